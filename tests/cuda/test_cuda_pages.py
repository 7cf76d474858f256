"""The pages about CuPy, their examples run on the stand-in."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize("page", ["cuda.md", "tutorials/cupy.md"])
def test_the_page_runs(card, page: str):
    spec = importlib.util.spec_from_file_location("run_examples", DOCS / "run_examples.py")
    run_examples = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(run_examples)
    assert run_examples.run(DOCS / page)
