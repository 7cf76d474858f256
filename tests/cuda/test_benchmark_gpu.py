"""The check that stands ready for a card: its build and its comparisons run on the emulator."""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import scanfield

RATES = ("copy", "exponentials", "multiplications", "matmul", "matmul of float32")
SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu.py"


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    sys.path.insert(0, str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("gpu", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu"] = module  # its dataclass looks for itself there
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(SCRIPT.parent))
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
    assert shown.count("ok  ") == 7 + 5 and "BAD" not in shown
    assert all(f"{case.op}, " in shown for case in few)
    assert all(f"PINN, {name}, float32" in shown for name in ("tanh", "sin", "swish", "softplus", "gelu"))


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


def test_everything_is_timed_in_one_table(card, gpu, monkeypatch, capsys):
    """On the emulator the figures mean nothing; that every row comes, with its floors, is what is seen here."""
    few = [smaller(gpu, case) for case in (gpu.cases()[0], gpu.cases()[3], gpu.cases()[-1])]
    few = [gpu.Case(**{**vars(case), "size": case.small}) for case in few]
    monkeypatch.setattr(gpu, "seconds", functools.partial(gpu.seconds, repeats=1))
    measured, found = gpu.rates, dict(zip(RATES, (1e12, 1e12, 1e13, 1e15, 1e14), strict=True))

    def rates(cupy):
        """The same measurements, small; the figures are then of no card."""
        small = measured(cupy, numbers=1000, blocks=1, turns=3, side=8)
        assert set(small) == set(found) and all(x > 0 for x in small.values())
        return found

    monkeypatch.setattr(gpu, "cases", lambda: few)
    monkeypatch.setattr(gpu, "rates", rates)
    rows = gpu._gpu_pinn.rows
    monkeypatch.setattr(gpu._gpu_pinn, "rows", lambda *given: rows(*given, size=gpu._gpu_pinn.SMALL))
    assert gpu.main([]) == 0
    shown = capsys.readouterr().out.splitlines()
    (mamba,) = [line for line in shown if line.startswith("| selective_scan, mamba, bfloat16 |")]
    numbers = [float(x) for x in mamba.strip("| ").split(" | ")[2:]]
    forward, _, *floors, ratio, _ = numbers
    assert len(floors) == 4 and forward > 0 and ratio > 1
    forms = [line for line in shown if line.startswith("| gdn2, gdn2, bfloat16, ")]
    assert [line.split(" |")[0].split(", ")[-1] for line in forms] == ["recurrent", "chunk", "tensor"]
    assert all(float(line.split(" | ")[2]) > 0 for line in forms)
    size = few[0].size
    states = size["B"] * size["T"] * size["C"] * size["N"]
    assert floors[1] == pytest.approx(1e3 * states / 1e12, abs=6e-4)
    assert sum(line.startswith("| jet, ") for line in shown) == 5
    assert sum(line.startswith("| step, tanh") for line in shown) == 1


def test_what_the_time_left_does_not_allow_is_said(card, gpu, monkeypatch, capsys):
    case = smaller(gpu, gpu.cases()[-1])
    monkeypatch.setattr(gpu, "cases", lambda: [case])
    monkeypatch.setattr(gpu, "rates", lambda cupy: dict.fromkeys(RATES, 1e12))
    assert gpu.main(["--budget", "0"]) == 0
    assert "not timed: no time is left" in capsys.readouterr().out


class TensorsOfACard:
    """torch on a machine with a card, on CPU tensors."""

    def __init__(self) -> None:
        self.torch = pytest.importorskip("torch")
        self.cuda = self

    def __getattr__(self, name):
        return getattr(self.torch, name)

    def is_available(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def as_tensor(self, x, device):
        return self.torch.as_tensor(x)


@pytest.mark.parametrize("number", [0, -1])
def test_loops_in_plain_operations_are_the_same_call(gpu, number):
    """The peer that every reader knows computes what it is compared with."""
    torch = pytest.importorskip("torch")
    case = gpu.cases()[number]
    size = smaller(gpu, case).small
    arrays = case.draw(np.random.default_rng(0), **size)
    want = getattr(gpu.scanfield, case.op)(
        **{n: x.astype("float64") for n, x in arrays.items()}, **case.options
    ).output
    got = gpu._gpu_eager.eager(case.op, {n: torch.as_tensor(x) for n, x in arrays.items()})()
    assert np.max(np.abs(got.numpy() - want)) <= 1e-4 * np.max(np.abs(want))


def test_peers_have_rows_or_reasons(gpu, monkeypatch):
    case = smaller(gpu, gpu.cases()[-1])
    case = gpu.Case(**{**vars(case), "size": {"B": 2, "T": 5, "W": 3}})
    monkeypatch.setitem(sys.modules, "torch", TensorsOfACard())
    budget = gpu.Budget(1000.0)

    def broken() -> None:
        raise MemoryError

    monkeypatch.setattr(gpu._gpu_eager, "compiled", lambda *given: broken)
    rows = dict(gpu.peers(case, budget))
    assert float(rows["torch, a loop over time"]) > 0
    assert rows["torch.compile of scanfield"] == "failed: MemoryError"
    budget.seconds = 0
    assert all(row.startswith("not timed") for row in dict(gpu.peers(case, budget)).values())


def test_without_a_card_it_says_so(card, gpu, monkeypatch, capsys):
    monkeypatch.setattr(card.cupy.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 2
    assert "needs a CUDA card" in capsys.readouterr().err


def test_the_bytes_of_the_chunk_kernels_are_those_of_the_arrays_that_they_get(card, gpu, monkeypatch, capsys):
    """The models behind the floors, and behind the table of docs/cuda.md, against what is launched."""
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
        arrays["initial_state"] = np.zeros((1, 2, 64, 64), "float32")
        result, pullback = scanfield.vjp(
            scanfield.gdn2, **{name: card.cupy.asarray(x) for name, x in arrays.items()}, method=gpu.CHUNK
        )
        bytes_of = {name: x.nbytes for name, x in arrays.items() if name != "initial_state"}
        keys, gates = bytes_of["query"] + bytes_of["key"], bytes_of["log_decay"] + bytes_of["erase"]
        inputs, columns = sum(bytes_of.values()), 4 * 2 * 128 * 64
        model = {
            name: moved for name, (moved, _) in gpu.chunk_kernels(size, kept=4, stored=4, keys=4).items()
        }
        # Kernels get inputs that they leave alone where the updates are made already; an array that is read and written
        # in its place counts twice.
        assert given["delta_inside"] == model["delta_inside"]
        assert given["delta_states"] - inputs == model["delta_states"] - columns
        assert given["delta_output"] - inputs == model["delta_output"]
        pullback(result.output, result.final_state)
        back = gpu.chunk_kernels_back(size, kept=4, stored=4, keys=4)
        model = {name: moved for name, (moved, _) in back.items()}
        assert given["delta_inside"] - inputs + keys + gates == model["delta_inside"]
        assert given["delta_states_back"] == model["delta_states_back"] - columns
        assert given["delta_triangles"] - keys - gates == model["delta_triangles"] - columns
        assert given["delta_outer"] - inputs == model["delta_outer"] - 4 * 2 * 2 * 64
        assert given["delta_gradients"] - inputs + keys + gates == model["delta_gradients"]
    assert gpu.main(["--paper"]) == 0
    shown = capsys.readouterr().out
    assert "| gdn2, gdn2, forward | all |" in shown and "16/32 heads, backward | delta_triangles |" in shown
