"""The selective scan's kernels: sizes of state, groups, segments, steps that overflow, arrays as they lie."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import standin
from arrays import deviation, same_bits

import scanfield

METHOD = "cupy.rawkernel"


def draw(
    time: int,
    channels: int,
    states: int,
    *,
    batch: int = 2,
    sequences: int | None = None,
    vectors: str = "tg",
) -> dict[str, np.ndarray]:
    """``vectors``: for B and C each t (one for a token), g (two groups) or c (one for a channel, the same at all times)."""
    rng = np.random.default_rng(time + channels + states)
    shapes = {"t": (batch, time, states), "g": (batch, time, 2, states), "c": (channels, states)}
    return {
        "u": rng.standard_normal((batch, time, channels)),
        "delta": rng.standard_normal((batch, time, channels)) - 1,
        "A": -rng.uniform(0.1, 2, (channels, states)),
        "B": rng.standard_normal(shapes[vectors[0]]),
        "C": rng.standard_normal(shapes[vectors[1]]),
        "D": rng.standard_normal(channels),
        "z": rng.standard_normal((batch, time, channels)),
        "delta_bias": rng.standard_normal(channels),
        "initial_state": rng.standard_normal((sequences or batch, channels, states)),
    }


OPTIONS = {"delta_softplus": True, "dt_limit": (0.01, 3.0)}


def both(arrays: Mapping[str, Any], method: str = METHOD, **options: Any) -> dict[str, Any]:
    result, pullback = scanfield.vjp(scanfield.selective_scan, **arrays, method=method, **options)
    gradients = pullback(result.output * 0 + 1, result.final_state * 0 + 1)
    return {"output": result.output, "final_state": result.final_state, **gradients}


def check(card, inputs: Mapping[str, np.ndarray], tolerance: float = 1e-12, **options: Any) -> None:
    """The kernels against generic code on NumPy arrays."""
    got = both(card.arrays(inputs), **options)
    with np.errstate(all="ignore"):
        want = both(inputs, "generic.recurrent", **options)
    assert set(got) == set(want)
    for name, x in want.items():
        assert deviation(card.raw(got[name]), x) <= tolerance, name


@pytest.mark.parametrize("vectors", ["tg", "gt", "cc", "ct", "gc"])
@pytest.mark.parametrize(("channels", "states"), [(6, 3), (70, 5), (4, 17), (2, 100)])
def test_sizes_and_groups(card, channels: int, states: int, vectors: str):
    """Every division of a channel's states among threads, with channels to spare in the last block."""
    check(card, draw(19, channels, states, vectors=vectors), **OPTIONS)


def test_a_group_narrower_than_a_block(card):
    inputs = draw(9, 12, 4)
    rng = np.random.default_rng(0)
    inputs["B"], inputs["C"] = rng.standard_normal((2, 9, 12, 4)), rng.standard_normal((2, 9, 4, 4))
    check(card, inputs)


@pytest.mark.parametrize("vectors", ["tg", "cc"])
def test_segments(card, vectors: str):
    """Cut off in the middle of a tile; the gradient comes back through the same segments."""
    standin.LAUNCHES.clear()
    check(card, draw(395, 4, 3, vectors=vectors), **OPTIONS)
    assert {"scan_summary", "scan_summary_back"} <= {launch.name for launch in standin.LAUNCHES}


def test_packed_segments(card):
    bounds = [0, 0, 3, 300, 300, 395]
    check(card, draw(395, 4, 3, batch=1, sequences=5), cu_seqlens=bounds, **OPTIONS)


def test_complex_segments(card):
    inputs = draw(300, 4, 3)
    rng = np.random.default_rng(5)
    for name in ("A", "B", "C", "initial_state"):
        inputs[name] = inputs[name] + 1j * rng.standard_normal(inputs[name].shape)
    check(card, inputs, **OPTIONS)


@pytest.mark.parametrize("what", ["growth", "huge steps", "nan", "inf", "inf state", "inf input"])
def test_segments_that_overflow_hide_nothing(card, what: str):
    """A segment's product overflows, or takes an infinity to NaN, where the recurrence does not."""
    inputs = draw(395, 4, 3)
    inputs["delta"] = np.abs(inputs["delta"])
    del inputs["z"], inputs["delta_bias"]
    if what == "growth":  # the state is exactly 0 until the last tokens
        inputs["A"] = np.abs(inputs["A"]) * 30
        inputs["u"][:, :390] = 0
        inputs["initial_state"] *= 0
    elif what == "huge steps":
        inputs["delta"][:, 100:150] = 1e6
    elif what == "nan":
        inputs["delta"][0, 200, 1] = np.nan
    elif what == "inf":
        inputs["u"][0, 7, 2] = np.inf
    elif what == "inf state":
        inputs["initial_state"][1, 3, 1] = np.inf
    else:
        inputs["B"][1, 300, 1] = -np.inf
    check(card, inputs)


def test_the_same_call_twice_is_the_same_bits(card):
    arrays = card.arrays(draw(300, 4, 3), "float32")
    first, second = (both(arrays, **OPTIONS) for _ in range(2))
    assert all(same_bits(card.raw(first[name]), card.raw(second[name])) for name in first)


def test_arrays_are_read_as_they_lie(card):
    """A transposed A, u and B with their axes in another order, delta a slice of a wider projection full of NaN."""
    inputs = draw(9, 6, 4)
    arrays = card.arrays(inputs)
    cupy = card.cupy
    wide = cupy.full((2, 9, 20), np.nan)
    wide[..., 3:9] = arrays["delta"]
    arrays["delta"] = wide[..., 3:9]
    arrays["u"] = arrays["u"].transpose(2, 0, 1).copy().transpose(1, 2, 0)
    arrays["B"] = arrays["B"].transpose(1, 2, 0).copy().transpose(2, 0, 1)
    arrays["A"] = arrays["A"].T.copy().T
    arrays["z"] = arrays["z"][:, ::-1].copy()[:, ::-1]
    assert not any(arrays[name].flags.c_contiguous for name in ("delta", "u", "B", "A", "z"))
    got, want = both(arrays), both(inputs, "generic.recurrent")
    for name, x in want.items():
        assert deviation(card.raw(got[name]), x) <= 1e-12, name


def test_gradients_that_are_not_wanted_are_not_made(card):
    arrays = card.arrays(draw(19, 6, 3))
    whole = both(arrays)
    for name in arrays:
        result, pullback = scanfield.vjp(scanfield.selective_scan, **arrays, wrt=[name], method=METHOD)
        gradients = pullback(result.output * 0 + 1, result.final_state * 0 + 1)
        assert set(gradients) == {name}
        assert same_bits(card.raw(gradients[name]), card.raw(whole[name])), name


@pytest.mark.parametrize("which", [0, 1])
def test_one_cotangent_alone(card, which: int):
    inputs = draw(19, 6, 3)
    found = []
    for arrays, method in ((card.arrays(inputs), METHOD), (inputs, "generic.recurrent")):
        result, pullback = scanfield.vjp(scanfield.selective_scan, **arrays, method=method)
        given = [x * 0 + 1 if i == which else None for i, x in enumerate(result[:2])]
        found.append(pullback(*given))
    for name, x in found[1].items():
        assert deviation(card.raw(found[0][name]), x, floor=1e-9) <= 1e-12, name


def test_more_sequences_than_a_grid_has_rows(card, monkeypatch):
    from scanfield_cupy import selective

    assert selective.MOST_ROWS <= 65_535
    monkeypatch.setattr(selective, "MOST_ROWS", 3)
    check(card, draw(20, 4, 3, batch=8))


@pytest.mark.parametrize("sizes", [(0, 4, 3), (2, 0, 3), (2, 4, 0)])
def test_nothing_is_launched_on_nothing(card, sizes: tuple[int, int, int]):
    batch, time, channels = sizes
    inputs = draw(time, channels, 3, batch=batch, vectors="tt")
    standin.LAUNCHES.clear()
    check(card, inputs)
    assert not standin.LAUNCHES


def test_state_sizes_beyond_the_kernels_are_declined_by_name(card):
    arrays = card.arrays(draw(6, 2, 300))
    told = str(scanfield.explain(scanfield.selective_scan, **arrays))
    assert "300 states of a channel, kernels hold 128" in told
    with pytest.raises(scanfield.BackendError, match="300 states"):
        scanfield.selective_scan(**arrays, method=METHOD)
    assert scanfield.selective_scan(**arrays).output.shape == (2, 6, 2)


def test_summaries(card):
    inputs = draw(50, 4, 3)
    del inputs["z"], inputs["D"], inputs["initial_state"]
    one = scanfield.summarise(scanfield.selective_scan, **card.arrays(inputs), method=METHOD, **OPTIONS)
    two = scanfield.summarise(scanfield.selective_scan, **inputs, method="generic.recurrent", **OPTIONS)
    assert deviation(card.raw(one.transition), two.transition) <= 1e-12
    assert deviation(card.raw(one.state), two.state) <= 1e-12


def test_a_card_without_the_shared_memory_of_backward_says_so(card, monkeypatch):
    """A Turing card gives a block 64 KB."""
    from scanfield_cupy import selective

    monkeypatch.setattr(selective, "shared_memory", lambda device: 64 * 1024)
    many, few = (
        card.arrays(
            {
                "u": np.ones((1, 2, 1)), "delta": np.ones((1, 2, 1)), "A": -np.ones((1, states)),
                "B": np.ones((1, 2, states)), "C": np.ones((1, 2, states)),
            },
            "float32",
        )
        for states in (65, 64)
    )  # fmt: skip
    with pytest.raises(
        scanfield.BackendError, match="backward for 65 states needs 74112 bytes of shared memory"
    ):
        scanfield.vjp(scanfield.selective_scan, **many, method="cupy.rawkernel")
    assert scanfield.selective_scan(**many, method="cupy.rawkernel").output.shape == (1, 2, 1)
    _, pullback = scanfield.vjp(scanfield.selective_scan, **many)
    assert set(pullback(card.array(np.ones((1, 2, 1)), "float32"))) == set(many)
    _, pullback = scanfield.vjp(scanfield.selective_scan, **few, method="cupy.rawkernel")
    assert set(pullback(card.array(np.ones((1, 2, 1)), "float32"))) == set(few)
