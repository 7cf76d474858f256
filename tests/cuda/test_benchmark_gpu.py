"""The check that stands ready for a card: its build and its comparisons run on the emulator."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu.py"


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    import sys

    spec = importlib.util.spec_from_file_location("gpu", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu"] = module  # its dataclass looks for itself there
    spec.loader.exec_module(module)
    yield module
    del sys.modules["gpu"]


def smaller(gpu: ModuleType, case):
    """The emulator runs a thread after the other: a tenth of the size."""
    small = {name: max(1, n // 8) if name in ("T", "C", "W") else n for name, n in case.small.items()}
    return gpu.Case(**{**vars(case), "small": small | ({"D": 16} if "D" in small else {})})


def test_every_case_is_checked_against_float64(card, gpu, monkeypatch, capsys):
    few = [smaller(gpu, case) for case in gpu.cases()]
    monkeypatch.setattr(gpu, "cases", lambda: few)
    assert gpu.main(["--check"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("ok  ") == len(few) and "BAD" not in shown


def test_a_wrong_result_is_found(card, gpu, monkeypatch, capsys):
    case = smaller(gpu, gpu.cases()[-1])
    monkeypatch.setattr(gpu, "cases", lambda: [case])
    everything = gpu._everything

    def wrong(function, arrays, **options):
        found = everything(function, arrays, **options)
        if "method" in options:
            found["output"] = found["output"] * np.float32(1.001)
        return found

    monkeypatch.setattr(gpu, "_everything", wrong)
    assert gpu.main(["--check"]) == 1
    assert "BAD" in capsys.readouterr().out


def test_without_a_card_it_says_so(card, gpu, monkeypatch, capsys):
    monkeypatch.setattr(card.cupy.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 2
    assert "needs a CUDA card" in capsys.readouterr().err
