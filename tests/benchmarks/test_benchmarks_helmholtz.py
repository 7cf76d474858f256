"""The benchmark of the Helmholtz networks runs, and knows what is asked of every entry."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from scanfield.pinn.reproduce import ENTRIES

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "helmholtz.py"

pytestmark = pytest.mark.skipif(not SCRIPT.is_file(), reason="the benchmarks are not in this installation")


def test_the_quick_problems(monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("benchmark_of_helmholtz", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert set(module.ASKED) == {entry.title for entry in ENTRIES} and set(module.QUICK) <= set(module.ASKED)
    # Errors alone: a test asserts no time.
    monkeypatch.setattr(
        module, "ASKED", {title: asked._replace(seconds=None) for title, asked in module.ASKED.items()}
    )
    monkeypatch.setattr(sys, "argv", ["helmholtz.py", "--quick"])
    assert module.main() == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(module.QUICK)
