"""Field reports F046 to F049 on the kernels, what comes later. F044, F050 to F052 run on the stand-in, in `tests/field`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import emulator
import numpy as np
import pytest
import standin
from arrays import deviation, same_bits

import scanfield
from scanfield.dispatch import Call

METHOD = "cupy.rawkernel"


def both(function: Any, arrays: dict[str, Any], method: str = METHOD, **options: Any) -> dict[str, Any]:
    result, pullback = scanfield.vjp(function, **arrays, method=method, **options)
    gradients = pullback(result.output * 0 + 1, result.final_state * 0 + 1)
    return {"output": result.output, "final_state": result.final_state, **gradients}


def test_f046_more_channels_than_a_grid_has_rows(card):
    u = np.random.default_rng(62).standard_normal((1, 4, 70_000)).astype(np.float32)
    arrays = {"u": u, "delta": np.ones_like(u), "A": np.zeros((70_000, 1), np.float32)}
    arrays |= {name: np.ones((1, 4, 1), np.float32) for name in ("B", "C")}
    result = scanfield.selective_scan(
        **{name: card.cupy.asarray(x) for name, x in arrays.items()}, method=METHOD
    )
    assert np.max(np.abs(card.raw(result.output) - np.cumsum(u, axis=1))) <= 1e-6


def test_f048_a_view_into_a_wide_parent(card):
    """The offset of a token passes 2^31 elements."""
    rng = np.random.default_rng(60)
    parent = np.zeros((1, 5, 2**29 + 64), np.float32)  # pages that nobody touches cost nothing
    view = parent[:, :, :4]
    view[...] = rng.uniform(0.5, 1, (1, 5, 4))
    b = card.cupy.asarray(rng.standard_normal((1, 5, 4)).astype(np.float32))
    got = both(scanfield.linear_scan, {"a": standin.ndarray(view), "b": b})
    want = both(scanfield.linear_scan, {"a": card.cupy.asarray(view.copy()), "b": b})
    assert all(same_bits(card.raw(got[name]), card.raw(want[name])) for name in want)
    assert abs(card.raw(got["output"]).sum() - 5.6660352) <= 1e-5


def sparse(path: Path, numbers: int) -> np.ndarray:
    """Room for float32 numbers, of which the disk keeps only those that are written."""
    try:
        with path.open("wb") as file:
            file.truncate(4 * numbers)
    except OSError as error:
        pytest.skip(f"no room for a sparse file: {error}")
    return np.memmap(path, np.float32, "r+", shape=(numbers,))


# One sequence of 3 tokens far behind in a pack: its outputs, gradients and saved states lie past 2^32 numbers.
FIRST, TIME = 2**32, 2**32 + 3


def launch_once(
    file: str, macros: dict[str, str], name: str, threads: int, shared: int, arguments: Any
) -> None:
    """In one order of the threads: what a second one would need, copies of all arrays, are gigabytes."""
    from scanfield_cupy import modules

    module = emulator.Module(
        modules.source(file), (*emulator.OPTIONS, *modules.options(**macros)[1:]), both_orders=False
    )
    hosts = [x.host if isinstance(x, standin.ndarray) else modules._argument(x) for x in arguments]
    module.get_function(name)((1,), (threads,), hosts, shared_mem=shared)


def test_f049_selective_scan_past_32_bits(card, tmp_path: Path):
    from scanfield_cupy import selective

    N = 16
    output, d_u, d_output = (sparse(tmp_path / name, TIME) for name in ("output", "d_u", "d_output"))
    starts = sparse(tmp_path / "starts", (TIME // 32 + 2) * N)
    one = card.cupy.ones((), "float32")
    u = card.cupy.broadcast_to(one, (1, TIME, 1))
    vectors = card.cupy.broadcast_to(one, (1, TIME, 1, N))
    A, state = card.cupy.zeros((1, N), "float32"), card.cupy.full((1, 1, N), 2.0, "float32")
    bounds = np.array([FIRST, TIME])
    call = Call(
        "selective_scan",
        (u, u, A, vectors, vectors, None, None, None, state, standin.ndarray(bounds)),
        (False, -np.inf, np.inf, None),
        "float32",
    )
    plan = selective._plan(call)._replace(segments=1, segment_tokens=2**40)
    macros = {
        "INPUT": "float",
        "VECTOR": "float",
        "STATE": "float",
        "PART": str(plan.part),
        "SHARE": str(plan.share),
    }
    given, sizes = selective._given(call, plan), (*plan.sizes, None, None, None)
    final, d_A, d_state = (np.zeros(N, np.float32) for _ in range(3))
    arguments = (*given, state, bounds, *sizes, output, final, starts)
    launch_once("selective_scan.cu", macros, "scan_forward", 128, plan.shared(False), arguments)
    assert np.array_equal(output[FIRST:], N * (2.0 + np.arange(1, 4)))
    assert np.array_equal(starts[FIRST // 32 * N :][:N], np.full(N, 2.0))
    assert np.array_equal(final, np.full(N, 5.0))
    assert not output[:3].any() and not starts[:N].any()
    d_output[FIRST:] = 1.0
    gradients = (d_u, None, None, d_A, None, None, None, None, d_state, 1)
    arguments = (*given, starts, d_output, None, bounds, *sizes, *gradients)
    launch_once("selective_scan.cu", macros, "scan_backward", 128, plan.shared(True), arguments)
    assert np.array_equal(d_u[FIRST:], N * np.array([3.0, 2.0, 1.0])) and not d_u[:3].any()
    # sum_t G_t h_(t-1) with G = 3, 2, 1 and h = 2, 3, 4
    assert np.array_equal(d_A, np.full(N, 16.0)) and np.array_equal(d_state, np.full(N, 3.0))


def test_f049_linear_scan_past_32_bits(card, tmp_path: Path):
    from scanfield_cupy import linear

    output, d_a, d_b, d_output = (
        sparse(tmp_path / name, TIME) for name in ("output", "d_a", "d_b", "d_output")
    )
    one, half = (card.cupy.full((), x, "float32") for x in (1.0, 0.5))
    a, b = (card.cupy.broadcast_to(x, (1, TIME, 1)) for x in (half, one))
    state, bounds = card.cupy.full((1, 1), 2.0, "float32"), np.array([FIRST, TIME])
    plan = linear._plan(Call("linear_scan", (a, b, state, standin.ndarray(bounds)), (None,), "float32"))
    plan = plan._replace(segments=1, tiles=-(-TIME // plan.tile))
    starts = sparse(tmp_path / "starts", TIME // plan.tile + 2)
    given, sizes = linear._given(a, b, plan), (*plan.sizes, None, None, None)
    final, d_state, shared = np.zeros(1, np.float32), np.zeros(1, np.float32), 4 * (4 * 256 + 2 * plan.lanes)
    arguments = (*given, state, bounds, *sizes, output, final, starts)
    launch_once("linear_scan.cu", {"STORED": "float"}, f"forward_{plan.lanes}", 256, shared, arguments)
    assert np.array_equal(output[FIRST:], [2.0, 2.0, 2.0]) and not output[:3].any() and final[0] == 2.0
    d_output[FIRST:] = 1.0
    arguments = (*given, starts, d_output, None, bounds, *sizes, d_a, d_b, d_state)
    launch_once("linear_scan.cu", {"STORED": "float"}, f"backward_{plan.lanes}", 256, shared, arguments)
    assert np.array_equal(d_b[FIRST:], [1.75, 1.5, 1.0]) and not d_b[:3].any()
    assert np.array_equal(d_a[FIRST:], [3.5, 3.0, 2.0]) and d_state[0] == 0.875


def test_f047_more_states_than_a_warp_holds_are_declined_by_name(card):
    rng = np.random.default_rng(63)
    u, B = card.array(rng.random((1, 6, 2))), card.array(rng.random((1, 6, 300)))
    arrays = {"u": u, "delta": u, "A": card.array(-rng.random((2, 300))), "B": B, "C": B}
    told = str(scanfield.explain(scanfield.selective_scan, **arrays))
    assert "300 states of a channel, kernels hold 128" in told and "generic.recurrent" in told
    with pytest.raises(scanfield.BackendError, match="300 states"):
        scanfield.selective_scan(**arrays, method=METHOD)
    hosts = {name: card.raw(x) for name, x in arrays.items()}
    want = scanfield.selective_scan(**hosts, method="generic.recurrent").output
    assert deviation(card.raw(scanfield.selective_scan(**arrays).output), want) <= 1e-14


@pytest.mark.parametrize("value", [np.nan, 1e200, np.inf])
@pytest.mark.parametrize("at", [5, 70, 300, 590])
def test_what_comes_later_changes_no_bit_before(card, at: int, value: float):
    """In a tile and in a segment that must be walked token by token, what lies before the token is as it was."""
    rng = np.random.default_rng(at)
    linear = {"a": rng.random((1, 600, 40)), "b": rng.random((1, 600, 40))}
    mamba = {name: rng.random((1, 600, 4)) for name in ("u", "delta")} | {"A": -rng.random((4, 3))}
    mamba |= {name: rng.random((1, 600, 3)) for name in ("B", "C")}
    delta = {name: rng.random((1, 600, 1, 3)) / 2 for name in ("query", "key", "value")}
    delta["log_decay"] = -rng.random((1, 600, 1))
    for function, data, gate in (
        (scanfield.linear_scan, linear, "a"),
        (scanfield.selective_scan, mamba, "delta"),
        (scanfield.gdn2, delta, "log_decay"),
    ):
        standin.LAUNCHES.clear()
        before = card.raw(function(**card.arrays(data), method=METHOD).output)
        assert function is scanfield.gdn2 or any("summary" in launch.name for launch in standin.LAUNCHES)
        data[gate][:, at:] = value
        after = card.raw(function(**card.arrays(data), method=METHOD).output)
        assert same_bits(before[:, :at], after[:, :at]), function
