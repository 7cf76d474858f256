"""The linear scan's kernels: segments, tiles that must be walked token by token, arrays as they lie, limits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import reference
import standin
from arrays import deviation, same_bits

import scanfield

METHOD = "cupy.rawkernel"


def both(
    card, a: Any, b: Any, state: Any = None, method: str | None = METHOD, **options: Any
) -> list[np.ndarray]:
    """Output, final state and all gradients, as NumPy arrays."""
    arrays = {"a": a, "b": b} | ({} if state is None else {"initial_state": state})
    result, pullback = scanfield.vjp(scanfield.linear_scan, **arrays, method=method, **options)
    gradients = pullback(result.output * 0 + 1, result.final_state * 0 + 1)
    return [card.raw(x) for x in (result.output, result.final_state, *gradients.values())]


def draw(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, shape)


def truth(a: np.ndarray, b: np.ndarray, state: np.ndarray | None = None, **options: Any) -> list[np.ndarray]:
    inputs = {"a": a, "b": b} | ({} if state is None else {"initial_state": state})
    found = reference.forward("linear_scan", inputs, **options)
    ones = np.ones_like(found.output), np.ones_like(found.final_state)
    return [found.output, found.final_state, *reference.vjp("linear_scan", inputs, *ones, **options).values()]


def launched() -> dict[str, int]:
    return {launch.name: launch.grid[0] for launch in standin.LAUNCHES}


# Lanes 1, 8, 32 and 33 stand for the kernels' widths and for a block with a lane to spare; times are such that segments
# exist, are cut off in the middle of a tile, and that one is a single token.
@pytest.mark.parametrize(
    ("time", "lanes", "segmented"), [(16385, 1, True), (100, 1, False), (2100, 6, True), (577, 33, True), (64, 32, False)]
)  # fmt: skip
def test_segments(card, time: int, lanes: int, segmented: bool):
    a, b, state = draw(time, 2, time, lanes), draw(time + 1, 2, time, lanes), draw(time + 2, 2, lanes)
    standin.LAUNCHES.clear()
    got = both(card, *(card.array(x) for x in (a, b, state)))
    assert any(name.startswith("summary") for name in launched()) == segmented
    want = both(card, a, b, state, method="generic.recurrent") if time > 1000 else truth(a, b, state)
    for x, y in zip(got, want, strict=True):
        assert deviation(x, y) <= 1e-12


def test_packed_segments(card):
    """Sequences that end before, in and behind the first segment."""
    time, bounds = 2100, [0, 0, 3, 1500, 1500, 2100]
    a, b, state = draw(1, 1, time, 3), draw(2, 1, time, 3), draw(3, 5, 3)
    got = both(card, *(card.array(x) for x in (a, b, state)), cu_seqlens=bounds)
    want = both(card, a, b, state, cu_seqlens=bounds, method="generic.recurrent")
    for x, y in zip(got, want, strict=True):
        assert deviation(x, y) <= 1e-12
    on_device = card.cupy.asarray(np.array(bounds))
    again = both(card, *(card.array(x) for x in (a, b, state)), cu_seqlens=on_device)
    assert all(same_bits(x, y) for x, y in zip(got, again, strict=True))


def test_bounds_on_the_device_reach_no_memory_outside(card):
    """Their values are nobody's business until the kernel reads them: wrong ones give wrong numbers and no more."""
    a, b = (card.array(draw(seed, 1, 40, 3)) for seed in (1, 2))
    wrong = card.cupy.asarray(np.array([-7, 10, 1 << 40, 3]))
    result = scanfield.linear_scan(a, b, cu_seqlens=wrong, method=METHOD)
    assert tuple(result.final_state.shape) == (3, 3)


@pytest.mark.parametrize("lanes", [1, 40])
@pytest.mark.parametrize("what", ["growth", "cancels", "inf", "nan", "inf state", "zero then inf"])
def test_products_that_overflow_hide_nothing(card, what: str, lanes: int):
    """The product of a tile's or a segment's coefficients overflows or vanishes; the recurrence's values do not."""
    time = 16400 if lanes == 1 else 600
    a, b = np.full((1, time, lanes), 0.5), np.zeros((1, time, lanes))
    state = np.ones((1, lanes))
    if what == "growth":  # 1e-600 of a state of 1, and back
        a[:, 50:150], a[:, 150:250] = 1e-3, 1e3
        b[:, 149] = 1e-250
    elif what == "cancels":  # the state is exactly 0 while products grow beyond all bounds
        a[:, 1:] = 1e4
        b[:, 0] = -0.5
    elif what == "inf":
        b[:, 7] = np.inf
    elif what == "nan":
        a[:, 300] = np.nan
    elif what == "inf state":
        state[...] = np.inf
    else:
        a[:, 20], b[:, 30] = 0.0, np.inf
    got = both(card, *(card.array(x) for x in (a, b, state)))
    with np.errstate(all="ignore"):
        want = both(card, a, b, state, method="generic.recurrent")
    for x, y in zip(got, want, strict=True):
        assert deviation(x, y) <= 1e-12


def test_the_same_call_twice_is_the_same_bits(card):
    a, b, state = (card.array(draw(i, 1, 600, 5), "float32") for i in range(3))
    first, second = (both(card, a, b, state[:, 0, :]) for _ in range(2))
    assert all(same_bits(x, y) for x, y in zip(first, second, strict=True))


@pytest.mark.parametrize(
    "shapes", [("111", "btf"), ("1tf", "bt1"), ("b1f", "1t1"), ("btf", "111"), ("b11", "b1f")]
)
def test_shared_axes_are_read_in_place_and_summed_back(card, shapes: tuple[str, str]):
    sizes = {"b": 2, "t": 21, "f": 5}
    a, b = (draw(i, *(sizes.get(axis, 1) for axis in shape)) for i, shape in enumerate(shapes))
    for x, y in zip(both(card, card.array(a), card.array(b)), truth(a, b), strict=True):
        assert deviation(x, y) <= 1e-12


VIEWS = {
    "time flipped": lambda x: x[:, ::-1],
    "lanes flipped": lambda x: x[..., ::-1],
    "turned": lambda x: x.swapaxes(0, 1),
    "sliced": lambda x: x[:, ::2, 1:],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_arrays_are_read_as_they_lie(card, view: Any):
    """Flips, transposes and slices: a kernel that took them for contiguous would read other numbers."""
    a, b = draw(1, 6, 6, 5), draw(2, 6, 6, 5)
    standin.TRANSFERS.clear()
    arrays = [view(card.array(x)) for x in (a, b)]
    assert not arrays[0].flags.c_contiguous
    assert "no copy" in str(scanfield.explain(scanfield.linear_scan, *arrays))
    for x, y in zip(both(card, *arrays), truth(view(a), view(b)), strict=True):
        assert deviation(x, y) <= 1e-12


def test_mixed_halves_are_widened_and_explain_says_so(card):
    a, b = card.array(draw(1, 2, 9, 3), "float16"), card.array(draw(2, 2, 9, 3), "float32")
    got = both(card, a, b)
    assert got[0].dtype == np.float16 and got[1].dtype == np.float32
    assert "copies a to float32" in str(scanfield.explain(scanfield.linear_scan, a, b))
    want = truth(card.numpy(a), card.numpy(b))
    assert deviation(got[1], want[1]) <= 4e-6
    assert deviation(got[0], want[0]) <= 1e-3


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 0, 3), (2, 4, 0)])
def test_nothing_is_launched_on_nothing(card, shape: tuple[int, int, int]):
    a, b, state = np.ones(shape), np.ones(shape), np.full((shape[0], shape[2]), 2.0)
    standin.LAUNCHES.clear()
    got = both(card, *(card.array(x) for x in (a, b, state)))
    assert not standin.LAUNCHES
    want = both(card, a, b, state, method="generic.recurrent")
    assert all(np.array_equal(x, y) for x, y in zip(got, want, strict=True))


def test_more_sequences_than_a_grid_has_rows(card, monkeypatch):
    """A grid has 65,535 rows at most: each block then walks on to the next sequence of its own."""
    from scanfield_cupy import linear

    assert linear.MOST_ROWS <= 65_535
    monkeypatch.setattr(linear, "MOST_ROWS", 3)
    a, b, state = draw(1, 8, 700, 2), draw(2, 8, 700, 2), draw(3, 8, 2)
    got = both(card, *(card.array(x) for x in (a, b, state)))
    for x, y in zip(got, both(card, a, b, state, method="generic.recurrent"), strict=True):
        assert deviation(x, y) <= 1e-12


def test_summaries(card):
    a, b = draw(1, 2, 300, 3), draw(2, 2, 300, 3)
    one = scanfield.summarise(scanfield.linear_scan, card.array(a), card.array(b), method=METHOD)
    assert deviation(card.raw(one.transition), np.prod(a, axis=1)) <= 1e-12
    assert deviation(card.raw(one.state), truth(a, b)[1]) <= 1e-12


def test_a_step_is_one_token(card):
    a, b, state = draw(1, 2, 3), draw(2, 2, 3), draw(3, 2, 3)
    out, after = scanfield.linear_scan.step(card.array(state), card.array(a), card.array(b), method=METHOD)
    assert deviation(card.raw(after), a * state + b) <= 1e-15
    assert np.array_equal(card.raw(out), card.raw(after))


def test_rocm_is_declined(card, monkeypatch):
    import cupy

    monkeypatch.setattr(cupy.cuda.runtime, "is_hip", True)
    a = card.array(np.ones((1, 4, 1)))
    told = str(scanfield.explain(scanfield.linear_scan, a, a))
    assert "cupy.rawkernel" in told and "rocm" in told.lower()
    assert scanfield.linear_scan(a, a).output.shape == (1, 4, 1)


def test_more_lanes_than_a_grid_has_blocks_are_declined(card):
    wide = card.cupy.broadcast_to(card.cupy.ones((1, 1, 1), "float32"), (1, 2, 2**37))
    from scanfield.dispatch import Call, implementation

    reason = implementation("linear_scan", METHOD).declines(
        Call("linear_scan", (wide, wide, None, None), (None,), "float32"), "forward"
    )
    assert reason is not None and "more than a grid has" in reason
