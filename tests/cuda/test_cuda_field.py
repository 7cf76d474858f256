"""Field reports F044, F046, F048 to F052 and F074 on the kernels: lengths, sizes, indices, strides, devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import emulator
import numpy as np
import pytest
import standin
from arrays import deviation, has_gpu, same_bits

import scanfield
from scanfield.dispatch import Call

METHOD = "cupy.rawkernel"


def both(function: Any, arrays: dict[str, Any], method: str = METHOD, **options: Any) -> dict[str, Any]:
    result, pullback = scanfield.vjp(function, **arrays, method=method, **options)
    gradients = pullback(result.output * 0 + 1, result.final_state * 0 + 1)
    return {"output": result.output, "final_state": result.final_state, **gradients}


def padded(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """The first tokens of an array that is NaN behind them."""
    parent = np.full((shape[0], shape[1] + 70, *shape[2:]), np.nan)
    parent[:, : shape[1]] = rng.random(shape)
    return parent


@pytest.mark.parametrize("time", [1, 2, 15, 17, 32, 33, 63, 64, 65, 129])
def test_f044_any_length_in_front_of_nan(card, time: int):
    rng = np.random.default_rng(time)
    of_mamba = {name: padded(rng, 1, time, 3) for name in ("u", "delta")}
    of_mamba |= {name: padded(rng, 1, time, 2) for name in ("B", "C")}
    of_delta = {name: padded(rng, 1, time, 2, 5) / 3 for name in ("query", "key", "log_decay", "erase")}
    of_delta["log_decay"] = -of_delta["log_decay"]
    of_delta |= {name: padded(rng, 1, time, 2, 3) for name in ("value", "write")}
    for function, parents in ((scanfield.selective_scan, of_mamba), (scanfield.gdn2, of_delta)):
        shared = {"A": -rng.random((3, 2))} if function is scanfield.selective_scan else {}
        views = {name: card.array(x)[:, :time] for name, x in parents.items()} | card.arrays(shared)
        hosts = {name: x[:, :time] for name, x in parents.items()} | shared
        got, want = both(function, views), both(function, hosts, "generic.recurrent")
        for name, x in want.items():
            assert deviation(card.raw(got[name]), x, floor=1e-9) <= 1e-10, (function, name)


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
    with path.open("wb") as file:
        file.truncate(4 * numbers)
    return np.memmap(path, np.float32, "r+", shape=(numbers,))


def test_f049_saved_states_past_32_bits(card, tmp_path: Path):
    """One sequence far behind in a pack: its outputs and its saved state lie past 2^31 numbers."""
    from scanfield_cupy import modules, selective

    first, tokens, N = 2**32, 3, 16
    time = first + tokens
    try:
        output, starts = sparse(tmp_path / "output", time), sparse(tmp_path / "starts", (time // 32 + 2) * N)
    except OSError as error:
        pytest.skip(f"no room for a sparse file: {error}")
    one = card.cupy.ones((), "float32")
    u = card.cupy.broadcast_to(one, (1, time, 1))
    vectors = card.cupy.broadcast_to(one, (1, time, 1, N))
    A, state = card.cupy.zeros((1, N), "float32"), card.cupy.full((1, 1, N), 2.0, "float32")
    bounds = np.array([first, time])
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
    module = emulator.Module(
        modules.source("selective_scan.cu"),
        (*emulator.OPTIONS, *modules.options(**macros)[1:]),
        both_orders=False,  # which would copy the gigabytes
    )
    final = np.zeros(N, np.float32)
    given = [*selective._given(call, plan), state, call.arrays[9], *plan.sizes, None, None, None]
    arguments = [x.host if isinstance(x, standin.ndarray) else modules._argument(x) for x in given]
    assert plan.sizes[0] == 1
    module.get_function("scan_forward")(
        (1,), (128,), [*arguments, output, final, starts], shared_mem=plan.shared(False)
    )
    assert np.array_equal(output[first:], N * (2.0 + np.arange(1, 4)))
    assert np.array_equal(starts[first // 32 * N :][:N], np.full(N, 2.0)) and np.array_equal(
        final, np.full(N, 5.0)
    )
    assert not output[:tokens].any() and not starts[:N].any()


def test_f050_to_f052_views_are_bitwise_their_copies(card):
    rng = np.random.default_rng(33)
    cupy = card.cupy

    def array(*shape: int) -> Any:
        return cupy.asarray(rng.random(shape))

    wide = cupy.full((2, 9, 11), np.nan)
    wide[..., 3:9] = array(2, 9, 6)
    mamba = {
        "u": array(9, 6, 2).transpose(2, 0, 1),
        "delta": wide[..., 3:9],
        "A": -array(4, 6).T,
        "B": array(9, 4, 2).transpose(2, 0, 1),
        "C": array(2, 9, 4)[:, ::-1],
    }
    linear = {"a": array(2, 11, 5)[:, ::-1], "b": array(2, 11, 5)[..., ::-1]}
    delta = {name: array(1, 11, 2, 4)[:, ::-1] for name in ("query", "key", "erase")} | {
        "value": array(1, 11, 2, 3)
    }
    for function, views in (
        (scanfield.selective_scan, mamba),
        (scanfield.linear_scan, linear),
        (scanfield.gdn2, delta),
    ):
        got = both(function, views)
        want = both(function, {name: cupy.ascontiguousarray(x) for name, x in views.items()})
        for name in want:
            assert same_bits(card.raw(got[name]), card.raw(want[name])), (function, name)


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


@pytest.mark.backend("torch")
@pytest.mark.gpu
def test_f074_kernels_wait_for_the_producer_on_torchs_stream():
    """Needs a card: fifty runs on a side stream, none of which is synchronised before the scan."""
    torch = pytest.importorskip("torch")
    assert has_gpu("torch")
    side = torch.cuda.Stream()
    b = torch.ones(1, 512, 4096, device="cuda")
    with torch.cuda.stream(side):
        matrix = torch.rand(4096, 4096, device="cuda") / 4096
        outputs = []
        for _ in range(50):
            product = matrix
            for _ in range(20):
                product = product @ matrix
            a = product[:512].reshape(1, 512, 4096)
            outputs.append(scanfield.linear_scan(a, b, method="torch.cuda").output)
        side.synchronize()
        want = scanfield.linear_scan(a, b, method="torch.cuda").output
    assert all(torch.equal(x, want) for x in outputs)
