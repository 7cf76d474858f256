"""What every engine shares: who holds what of a sequence, and whose maps make the state that comes in."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from field.draws import G

import scanfield
from scanfield.errors import ShapeError
from scanfield.shards import adjoint, bounds_of, places, sources


def brute(lengths: list[int], bounds: list[int], rank: int):
    """Tokens one by one: the sequences with a token here, and whether the first and last go on elsewhere."""
    owner = np.searchsorted(bounds, np.arange(bounds[-1]), side="right") - 1
    start = sum(lengths[:rank])
    stop = start + lengths[rank]
    here = owner[start:stop]
    left = bool(0 < start < len(owner) and owner[start - 1] == owner[start])
    right = bool(0 < stop < len(owner) and owner[stop - 1] == owner[stop])
    return [int(i) for i in dict.fromkeys(here)], left, right


def test_places_are_those_of_a_count_token_by_token():
    rng = np.random.default_rng(1)
    for _ in range(300):
        size = int(rng.integers(1, 6))
        lengths = [int(n) for n in rng.integers(0, 5, size)]
        total = sum(lengths)
        bounds = [0, *sorted(int(b) for b in rng.integers(0, total + 1, rng.integers(0, 6))), total]
        for reverse in (False, True):
            found = places(lengths, tuple(bounds), reverse)
            # Each empty sequence lies in one place, and each that has tokens in all that hold one.
            empty = [i for i, (low, high) in enumerate(itertools.pairwise(bounds)) if low == high]
            met: list[int] = []
            for rank, place in enumerate(found):
                inside, left, right = brute(lengths, bounds, rank)
                first, behind = place.sequences
                own = [i for i in range(first, behind) if i not in empty]
                met += [i for i in range(first, behind) if i in empty]
                if lengths[rank]:
                    assert own == inside
                assert (place.enters, place.leaves) == ((right, left) if reverse else (left, right))
                local = bounds_of(place, tuple(bounds))
                assert local[0] == 0 and local[-1] == lengths[rank] and list(local) == sorted(local)
            assert sorted(met) == empty


def test_chains_begin_where_a_sequence_does():
    walk = places([4, 0, 3, 5, 2], (0, 2, 9, 14), False)
    assert [list(sources(walk, rank)) for rank in range(5)] == [[], [0], [0, 1], [0, 1, 2], [3]]
    assert [list(sources(walk, rank, backward=True)) for rank in range(5)] == [
        [3, 2, 1],
        [3, 2],
        [3],
        [4],
        [],
    ]
    assert [list(sources(places([1] * 4, None, False), rank)) for rank in range(4)] == [
        list(range(rank)) for rank in range(4)
    ]


def test_more_tokens_than_32_bits_count():
    """1e10 tokens on 1,024 ranks: nothing here is as long as the sequence, and no count is cut to 32 bits."""
    each, ranks = 10**7, 1024
    bounds = (0, 5, 3 * 2**31 + 1, 3 * 2**31 + 1, each * ranks)
    found = places([each] * ranks, bounds, False)
    assert found[-1].tokens == (each * (ranks - 1), each * ranks)
    at = (3 * 2**31 + 1) // each
    assert found[at].sequences == (1, 4) and bounds_of(found[at], bounds)[-1] == each
    assert not found[at].through and all(place.through for place in found[1:at])
    assert len(sources(found, ranks - 1)) == ranks - 1 - at
    with pytest.raises(ShapeError, match="ends with 7, must end with the time 8589934592"):
        places([2**31] * 4, (0, 7), False)


def test_f061_gradients_of_inner_shards_by_adjoint_maps():
    """As the shards' own numbers give them: gamma, M^H, and nobody else's tokens."""
    drawn = G(44, 1, 24, 2, 5, 3)
    inputs = drawn.inputs()
    _, pullback = scanfield.vjp(scanfield.gdn2, **inputs, initial_state=drawn.state)
    wanted = pullback(drawn.d_output, drawn.d_state)
    ends = [0, 10, 10, 17, 24]
    parts = [
        ({n: x[:, low:high] for n, x in inputs.items()}, drawn.d_output[:, low:high])
        for low, high in itertools.pairwise(ends)
    ]
    maps = [scanfield.summarise(scanfield.gdn2, **part) for part, _ in parts]
    states = [drawn.state]
    for block in maps:
        states.append(block.transition @ states[-1] + block.state)
    pulls = [
        scanfield.vjp(scanfield.gdn2, **part, initial_state=state)[1]
        for (part, _), state in zip(parts, states[:-1], strict=True)
    ]
    going = drawn.d_state
    for i in reversed(range(4)):
        got = pulls[i](parts[i][1], going)
        for name in inputs:
            right = wanted[name][:, ends[i] : ends[i + 1]]
            assert np.max(np.abs(got[name] - right), initial=0.0) <= 1e-12, (i, name)
        gamma = pulls[i](parts[i][1], np.zeros_like(drawn.d_state))["initial_state"]
        turned = adjoint(maps[i], gamma)
        going = turned.transition @ going + turned.state
    assert np.max(np.abs(going - wanted["initial_state"])) <= 1e-12
