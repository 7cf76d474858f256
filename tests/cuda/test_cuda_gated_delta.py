"""The gated delta rule's kernels: sizes of the state, chunks, heads in turns, arrays as they lie, steps."""

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
    K: int,
    V: int,
    *,
    heads: int = 1,
    vheads: int = 2,
    batch: int = 2,
    sequences: int | None = None,
    gates: str = "kkk",
) -> dict[str, np.ndarray]:
    """``gates``: for decay, erase and write each k (a channel's), s (scalar) or - (none)."""
    rng = np.random.default_rng(time + K + V)
    inputs = {
        "query": rng.standard_normal((batch, time, heads, K)),
        "key": rng.standard_normal((batch, time, heads, K)) / np.sqrt(K),
        "value": rng.standard_normal((batch, time, vheads, V)),
    }
    for (name, width), kind in zip({"log_decay": K, "erase": K, "write": V}.items(), gates, strict=True):
        if kind != "-":
            gate = rng.random((batch, time, vheads) + ((width,) if kind == "k" else ()))
            inputs[name] = -gate if name == "log_decay" else gate
    inputs["initial_state"] = rng.standard_normal((sequences or batch, vheads, K, V))
    return inputs


def both(arrays: Mapping[str, Any], method: str = METHOD, **options: Any) -> dict[str, Any]:
    result, pullback = scanfield.vjp(scanfield.gdn2, **arrays, method=method, **options)
    gradients = pullback(result.output * 0 + 1, result.final_state * 0 + 1)
    return {"output": result.output, "final_state": result.final_state, **gradients}


def check(card, inputs: Mapping[str, np.ndarray], tolerance: float = 1e-12, **options: Any) -> None:
    """The kernels against the generic recurrence on NumPy arrays."""
    got = both(card.arrays(inputs), **options)
    with np.errstate(all="ignore"):
        want = both(inputs, "generic.recurrent", **options)
    assert set(got) == set(want)
    for name, x in want.items():
        assert deviation(card.raw(got[name]), x) <= tolerance, name


# Each way to share the rows among threads, whole and with rows to spare; V of one block of columns and of several.
@pytest.mark.parametrize(
    ("time", "K", "V"),
    [(19, 16, 5), (9, 64, 33), (9, 100, 20), (5, 128, 3), (5, 200, 9), (5, 256, 2), (3, 5, 300)],
)
def test_sizes(card, time: int, K: int, V: int):
    check(card, draw(time, K, V, batch=1))


@pytest.mark.parametrize("time", [64, 65, 137])
def test_chunks(card, time: int):
    """States are saved every 64 tokens: one chunk exactly, one token more, a chunk that ends within a tile."""
    check(card, draw(time, 5, 3, batch=1))


@pytest.mark.parametrize("gates", ["---", "k--", "s--", "-k-", "sss", "ks-", "--k"])
def test_gates(card, gates: str):
    check(card, draw(17, 6, 4, heads=2, vheads=4, gates=gates))


def test_packed(card):
    bounds = [0, 0, 3, 70, 70, 135, 140]
    check(card, draw(140, 5, 3, batch=1, sequences=6), cu_seqlens=bounds)
    check(card, draw(140, 5, 3, batch=1, sequences=6), cu_seqlens=bounds, reverse=True)


def test_heads_in_turns(card, monkeypatch):
    """The parts of gradients that are sums over columns are kept small: the same numbers, head after head."""
    from scanfield_cupy import gated_delta

    arrays = card.arrays(draw(9, 6, 40, heads=3, vheads=3))
    whole = both(arrays)
    monkeypatch.setattr(gated_delta, "_PART_BYTES", 1)
    standin.LAUNCHES.clear()
    turns = both(arrays)
    assert sum(launch.name == "delta_backward" for launch in standin.LAUNCHES) == 3
    assert all(same_bits(card.raw(whole[name]), card.raw(turns[name])) for name in whole)


@pytest.mark.parametrize("what", ["strong", "minus inf", "growth", "nan", "inf"])
def test_gates_and_numbers_of_any_size(card, what: str):
    inputs = draw(70, 5, 3)
    if what == "strong":
        inputs["log_decay"] = inputs["log_decay"] * 200
    elif what == "minus inf":
        inputs["log_decay"][:, 30] = -np.inf
    elif what == "growth":
        inputs["log_decay"] = np.abs(inputs["log_decay"]) / 10
    elif what == "nan":
        inputs["value"][0, 50, 1, 1] = np.nan
    else:
        inputs["value"][1, 60, 0, 2] = np.inf
    if what in (
        "nan",
        "inf",
    ):  # forward; what is not finite then meets every gradient, in another order of the sums
        with np.errstate(all="ignore"):
            want = scanfield.gdn2(**inputs, method="generic.recurrent")
        got = scanfield.gdn2(**card.arrays(inputs), method=METHOD)
        before = 50 if what == "nan" else 60
        assert deviation(card.raw(got.output)[:, :before], want.output[:, :before]) <= 1e-12
        assert np.array_equal(np.isfinite(card.raw(got.output)), np.isfinite(want.output))
        return
    check(card, inputs, 1e-11 if what == "growth" else 1e-12)


def test_arrays_are_read_as_they_lie(card):
    """Heads before time, as other projects lay them; one projection cut into query, key and value; flipped gates."""
    inputs = draw(9, 4, 4, heads=2, vheads=2)
    arrays = card.arrays(inputs)
    cupy = card.cupy
    wide = cupy.concatenate([arrays[name] for name in ("query", "key", "value")], axis=-1)
    arrays["query"], arrays["key"], arrays["value"] = (wide[..., 4 * i : 4 * i + 4] for i in range(3))
    arrays["log_decay"] = arrays["log_decay"].transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3)
    arrays["erase"] = arrays["erase"][:, ::-1].copy()[:, ::-1]
    assert not any(
        x.flags.c_contiguous for name, x in arrays.items() if name not in ("write", "initial_state")
    )
    assert "no copy" in str(scanfield.explain(scanfield.gdn2, **arrays))
    got, want = both(arrays), both(inputs, "generic.recurrent")
    for name, x in want.items():
        assert deviation(card.raw(got[name]), x) <= 1e-12, name


def test_the_same_call_twice_is_the_same_bits(card):
    arrays = card.arrays(draw(70, 20, 9), "float32")
    first, second = (both(arrays) for _ in range(2))
    assert all(same_bits(card.raw(first[name]), card.raw(second[name])) for name in first)


def test_gradients_that_are_not_wanted_are_not_made(card):
    arrays = card.arrays(draw(19, 6, 3))
    whole = both(arrays)
    for name in arrays:
        result, pullback = scanfield.vjp(scanfield.gdn2, **arrays, wrt=[name], method=METHOD)
        gradients = pullback(result.output * 0 + 1, result.final_state * 0 + 1)
        assert set(gradients) == {name}
        assert same_bits(card.raw(gradients[name]), card.raw(whole[name])), name


@pytest.mark.parametrize("which", [0, 1])
def test_one_cotangent_alone(card, which: int):
    inputs = draw(19, 6, 3)
    found = []
    for arrays, method in ((card.arrays(inputs), METHOD), (inputs, "generic.recurrent")):
        result, pullback = scanfield.vjp(scanfield.gdn2, **arrays, method=method)
        found.append(pullback(*(x * 0 + 1 if i == which else None for i, x in enumerate(result[:2]))))
    for name, x in found[1].items():
        assert deviation(card.raw(found[0][name]), x, floor=1e-9) <= 1e-12, name


@pytest.mark.parametrize("sizes", [(0, 4, 3), (2, 0, 3), (2, 4, 0)])
def test_nothing_is_launched_on_nothing(card, sizes: tuple[int, int, int]):
    batch, time, V = sizes
    standin.LAUNCHES.clear()
    check(card, draw(time, 3, V, batch=batch))
    assert not standin.LAUNCHES


def test_more_sequences_than_a_grid_has_rows(card, monkeypatch):
    from scanfield_cupy import gated_delta

    assert gated_delta.MOST_ROWS <= 65_535
    monkeypatch.setattr(gated_delta, "MOST_ROWS", 3)
    check(card, draw(10, 4, 3, batch=8))


def test_what_a_card_or_the_kernels_cannot_hold_is_declined_by_name(card, monkeypatch):
    from scanfield_cupy import gated_delta

    arrays = card.arrays(draw(3, 300, 2))
    with pytest.raises(scanfield.BackendError, match="K = 300, kernels hold 256 rows"):
        scanfield.gdn2(**arrays, method=METHOD)
    monkeypatch.setattr(gated_delta, "shared_memory", lambda device: 99 * 1024)  # of a card for games
    told = str(scanfield.explain(scanfield.gdn2, **card.arrays(draw(3, 256, 2))))
    assert "of shared memory, this card gives a block 101376" in told
    small = scanfield.explain(scanfield.gdn2, **card.arrays(draw(3, 128, 2), "float32"))
    assert small.taken["save"] == METHOD, str(small)


@pytest.mark.parametrize("gates", ["kkk", "k--", "s-s", "---"])
def test_summaries(card, gates: str):
    inputs = draw(20, 6, 3, gates=gates)
    del inputs["initial_state"]
    one = scanfield.summarise(scanfield.gdn2, **card.arrays(inputs), method=METHOD)
    two = scanfield.summarise(scanfield.gdn2, **inputs, method="generic.recurrent")
    assert deviation(card.raw(one.transition), two.transition) <= 1e-12
    assert deviation(card.raw(one.state), two.state) <= 1e-12


def test_a_step_is_one_token(card):
    inputs = draw(1, 6, 3)
    state = inputs.pop("initial_state")
    token = {name: x[:, 0] for name, x in inputs.items()}
    out, after = scanfield.gdn2.step(card.array(state), **card.arrays(token), method=METHOD)
    want, want_after = scanfield.gdn2.step(state, **token, method="generic.recurrent")
    assert deviation(card.raw(out), want) <= 1e-12 and deviation(card.raw(after), want_after) <= 1e-12
