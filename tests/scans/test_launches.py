"""Calls that go straight to a kernel: the results of any other call bit by bit, and only for arguments of the same kind."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from examples import BASE

import scanfield
from scanfield.errors import ArgumentError, BackendError, DtypeError, ShapeError
from scanfield.scans import launches

pytestmark = pytest.mark.backend("numpy")
pytest.importorskip("numba")

MOST = 5  # calls of a kind until it has a launcher


def drawn(op: str, seed: int = 0, dtype: str = "float32", heads: int = 2) -> dict[str, np.ndarray]:
    """A state and one token's arrays, with every gate."""
    rng = np.random.default_rng(seed)
    shapes = {
        "linear_scan": {"state": (2, 5), "a": (2, 5), "b": (2, 5)},
        "selective_scan": {
            "state": (2, 6, 3), "u": (2, 6), "delta": (2, 6), "A": (6, 3), "B": (2, 3), "C": (2, 3), "D": (6,), "z": (2, 6),
            "delta_bias": (6,),
        },
        "gdn2": {
            "state": (2, heads, 5, 3), "query": (2, heads, 5), "key": (2, heads, 5), "value": (2, heads, 3),
            "log_decay": (2, heads, 5), "erase": (2, heads), "write": (2, heads, 3),
        },
    }[op]  # fmt: skip
    negative = ("log_decay", "A")
    return {name: (rng.random(shape) - (name in negative)).astype(dtype) for name, shape in shapes.items()}


@pytest.fixture
def straight(monkeypatch):
    """Whether each call went straight to its kernel."""
    found: list[bool] = []
    run = launches.Launches.run

    def seen(self, args, kwargs):
        result = run(self, args, kwargs)
        found.append(result is not None)
        return result

    monkeypatch.setattr(launches.Launches, "run", seen)
    return found


def until_straight(call, straight: list[bool]):
    """Call until a call goes straight; its result."""
    for _ in range(MOST):
        result = call()
        if straight[-1]:
            return result
    raise AssertionError("no call went straight to its kernel")


def unlike(call):
    """A call with launchers out of the way."""
    run = launches.Launches.run
    try:
        launches.Launches.run = lambda *_: None
        return call()
    finally:
        launches.Launches.run = run


def same(found, wanted) -> None:
    for x, y in zip(found, wanted, strict=True):
        assert type(x) is np.ndarray
        assert (x.shape, x.dtype, x.flags.c_contiguous, x.flags.writeable) == (y.shape, y.dtype, True, True)
        assert np.array_equal(x, y, equal_nan=True)


def calls(op: str, given: dict[str, np.ndarray]) -> dict[str, Any]:
    """One step, and one whole call of three tokens, of an operation."""
    function = getattr(scanfield, op)
    whole = {
        name: x if name in ("A", "D", "delta_bias") else np.stack([x, x / 2, x / 3], 1)
        for name, x in given.items()
        if name != "state"
    }
    return {
        "step": lambda **more: function.step(**{**given, **more}),
        "whole": lambda **more: function(**{**whole, "initial_state": given["state"], **more}),
    }


@pytest.mark.parametrize("op", BASE)
def test_same_bits(op: str, straight):
    """New numbers in read-only arrays, NaN and infinities; float32 and float64 in turns."""
    for verb in ("step", "whole"):
        for dtype in ("float32", "float64"):
            until_straight(calls(op, drawn(op, 1, dtype))[verb], straight)
        for seed, dtype in ((2, "float32"), (3, "float64"), (4, "float32")):
            given = drawn(op, seed, dtype)
            if seed == 4:
                given["state"][0, 1], list(given.values())[1][1, 0] = np.nan, np.inf
            before = {name: x.copy() for name, x in given.items()}
            for x in given.values():
                x.flags.writeable = False
            call = calls(op, given)[verb]
            found = call()
            assert straight[-1]
            same(found, unlike(call))
            assert type(found) is (scanfield.scans.surface.ScanResult if verb == "whole" else tuple)
            assert not any(np.shares_memory(x, y) for x in found for y in given.values())
            assert not np.shares_memory(*found)
            assert all(np.array_equal(given[name], x, equal_nan=True) for name, x in before.items())


@pytest.mark.parametrize("op", BASE)
def test_another_kind_is_another_call(op: str, straight):
    """Each array in turn of another dtype, order of axes, step, byte order, alignment, class or library; results as anew."""
    given = drawn(op)
    step = getattr(scanfield, op).step
    until_straight(lambda: step(**given), straight)

    class Own(np.ndarray):
        """A class of its own."""

    for name, x in given.items():
        wide = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)
        wide[..., ::2] = x
        odd = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
        odd[...] = x
        for other in (
            wide[..., ::2], np.asfortranarray(x) if x.ndim > 1 else x[::-1][::-1].copy()[::-1], odd, x.view(Own),
            x.astype(x.dtype.newbyteorder()), np.broadcast_to(x[:1], x.shape), x.astype("float64"),
        ):  # fmt: skip
            taken = len(straight)
            call = functools.partial(step, **{**given, name: other})
            found = call()
            assert not straight[taken], (name, other.strides, other.dtype)
            for y, z in zip(found, unlike(call), strict=True):
                assert y.dtype == z.dtype and np.array_equal(y, z)
        for wrong, error in (
            (x[..., :-1], ShapeError), (x[None, None], ShapeError), (x.astype(int), DtypeError), (x.tolist(), BackendError),
            (np.float32(3), BackendError), (np.ma.masked_array(x), BackendError),
        ):  # fmt: skip
            with pytest.raises(error):
                step(**{**given, name: wrong})
    assert straight and step(**given) and straight[-1]


def test_options_are_part_of_the_kind(straight):
    given = drawn("gdn2")
    step = scanfield.gdn2.step
    one = until_straight(lambda: step(**given, scale=0.5), straight)
    same(step(**given, scale=float("0.5")), one)
    assert straight[-1], "an equal number"
    half, _ = step(**given, scale=0.25)
    assert not straight[-1] and np.array_equal(2 * half, one[0])
    for wrong in ({"scale": "1"}, {"qk_l2norm": 0}, {"scael": 1.0}, {"method": "no such"}, {"method": 3}):
        with pytest.raises((ArgumentError, DtypeError)):
            step(**{**given, "scale": 0.5, **wrong})
        assert not straight[-1]
    with pytest.raises(ArgumentError):
        step(given["state"], **given, scale=0.5)
    # By position, and in another order.
    same(until_straight(lambda: step(*given.values(), scale=0.5), straight), one)
    turned = dict(reversed(given.items()))
    same(until_straight(lambda: step(**turned, scale=0.5), straight), one)
    swapped = {**turned, "query": given["key"], "key": given["query"]}
    same(step(**swapped, scale=0.5), unlike(lambda: step(**swapped, scale=0.5)))
    assert straight[-1]


def test_time_that_stands_still_is_turned_all_the_same(straight):
    """Arrays that are alike at all times look the same backwards; what comes of them does not."""
    a, b = (np.broadcast_to(np.float32(x), (1, 4, 2)) for x in (0.5, 1.0))
    for _ in range(MOST):
        output = scanfield.linear_scan(a, b, reverse=True).output
        assert output[0, :, 0].tolist() == [1.875, 1.75, 1.5, 1.0]


def test_whoever_asks_to_hear_of_underflow_hears_nothing(straight):
    """Of what a call makes of its arguments: numbers at the ends of their range are numbers."""
    given = drawn("selective_scan")
    given["A"][0, :2] = -1e-45, -3e38
    with np.errstate(all="raise"):
        for limit in ((0.0, 1e300), (1e-300, 1.0), None):
            call = functools.partial(scanfield.selective_scan.step, **given, dt_limit=limit)
            same(call(), unlike(call))
        same(until_straight(call, straight), unlike(call))


def test_one_array_in_two_places_first(straight):
    given = drawn("gdn2")
    step = scanfield.gdn2.step
    until_straight(lambda: step(**{**given, "key": given["query"]}), straight)
    same(step(**given), unlike(lambda: step(**given)))
    assert straight[-2]


def test_who_asks_counts(straight, monkeypatch):
    """`use`, in this thread alone; `method`; and what the dispatcher knows."""
    given = drawn("linear_scan")
    step = scanfield.linear_scan.step
    until_straight(lambda: step(**given), straight)
    with scanfield.use(method="generic"):
        for _ in range(MOST):
            step(**given)
            assert not straight[-1]
        with ThreadPoolExecutor(1) as other:
            other.submit(step, **given).result()
            assert straight[-1]
    with scanfield.use(method="numpy.numba"):
        until_straight(lambda: step(**given), straight)
    for wrong in ("no such", ["numpy.numba"], 3):
        with pytest.raises(ArgumentError, match="method"), scanfield.use(method=wrong):
            step(**given)
    step(**given)
    assert straight[-1]
    registry = launches.registry
    key = ("linear_scan", "numpy", "cpu")
    with monkeypatch.context() as patch:
        patch.setitem(registry._TABLE, key, registry._TABLE[key]._replace(candidates=()))
        step(**given)
        assert not straight[-1]


@pytest.mark.parametrize("op", BASE)
def test_a_state_is_its_own_successor(op: str, straight):
    """Each token from the state before it, with any number of threads, and with the results of all tokens kept."""
    given = drawn(op, heads=4)
    step, state = getattr(scanfield, op).step, given.pop("state")
    before, kept = scanfield.get_num_threads(), []
    try:
        for token in range(12):
            scanfield.set_num_threads(1 + token % 3)
            wanted = unlike(lambda state=state: step(state, **given))
            found = step(state, **given)
            same(found, wanted)
            kept.append((*found, *(x.copy() for x in found)))
            state = found[1]
    finally:
        scanfield.set_num_threads(before)
    assert straight[-1]
    assert all(np.array_equal(x[i], x[i + 2]) for x in kept for i in range(2))


def test_calls_in_several_threads(straight):
    """Each caller's results are of its own arrays."""
    step = scanfield.gdn2.step
    draws = [drawn("gdn2", seed) for seed in range(4)]
    wanted = [unlike(lambda given=given: step(**given)) for given in draws]
    until_straight(lambda: step(**draws[0]), straight)
    start = threading.Barrier(4)

    def many(i: int) -> bool:
        start.wait()
        return all(
            np.array_equal(x, y) for _ in range(200) for x, y in zip(step(**draws[i]), wanted[i], strict=True)
        )

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(many, range(4)))


def test_nothing_is_kept_alive(straight):
    given = drawn("gdn2", 5)
    found = until_straight(functools.partial(scanfield.gdn2.step, **given), straight)
    kept = [weakref.ref(x) for x in (*given.values(), *found)]
    del given, found
    gc.collect()
    assert not any(reference() is not None for reference in kept)


def test_kinds_do_not_grow_for_ever(straight, monkeypatch):
    monkeypatch.setattr(launches.Launches, "most", 2)
    for rows in range(1, 6):
        a = np.full((rows, 5), 0.5)
        until_straight(lambda a=a: scanfield.linear_scan.step(a, a, a), straight)
    cells = [cell.cell_contents for cell in scanfield.linear_scan.step.__closure__]
    (found,) = (x for x in cells if isinstance(x, launches.Launches))
    assert 0 < len(found._found) <= 2
