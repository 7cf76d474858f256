"""The check that stands ready for a card: its build and its comparisons run on the emulator."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import scanfield

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


def test_the_bytes_of_the_chunk_kernels_are_those_of_the_arrays_that_they_get(card, gpu, monkeypatch, capsys):
    """The model behind the floors, and behind the table of docs/cuda.md, against what is launched."""
    from scanfield_cupy import gated_delta_chunk

    given = {}
    launch = gated_delta_chunk.launch

    def counted(file, defined, name, grid, arguments, *rest):
        arrays = {id(x): x for x in arguments if hasattr(x, "nbytes") and x.ndim}
        given[name] = sum(x.nbytes for x in arrays.values())
        launch(file, defined, name, grid, arguments, *rest)

    monkeypatch.setattr(gated_delta_chunk, "launch", counted)
    for wide in (1, 0):
        size = {"B": 1, "T": 128, "H": 1, "VH": 2, "D": 64, "wide": wide}
        arrays = gpu.delta(np.random.default_rng(0), **size)
        if not wide:
            arrays["erase"] = arrays["write"] = arrays.pop("beta")
        state = {"initial_state": np.zeros((1, 2, 64, 64), "float32")}
        scanfield.gdn2(
            **{name: card.cupy.asarray(x) for name, x in (arrays | state).items()}, method=gpu.CHUNK
        )
        model = gpu.chunk_kernels(size, kept=4, stored=4, keys=4)
        # Kernels get inputs that they leave alone where the updates are made already.
        inputs = sum(x.nbytes for x in arrays.values())
        assert given["delta_inside"] == model["delta_inside"][0]
        assert given["delta_states"] - inputs == model["delta_states"][0] - 4 * 2 * 128 * 64
        assert given["delta_output"] - inputs == model["delta_output"][0]
    assert gpu.main(["--paper"]) == 0 and "| gdn2, gdn2 | all |" in capsys.readouterr().out
