"""The tutorial for CuPy, run on the stand-in. (docs/cuda.md has sizes for a card, too large for the emulator.)"""

from __future__ import annotations

import importlib.util
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_tutorial_runs(card):
    spec = importlib.util.spec_from_file_location("run_examples", DOCS / "run_examples.py")
    run_examples = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(run_examples)
    assert run_examples.run(DOCS / "tutorials" / "cupy.md")
