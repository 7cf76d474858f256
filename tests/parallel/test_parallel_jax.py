"""One sequence over host devices under shard_map: results, and gradients through jit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import training
from checks import TOLERANCE
from examples import OPERATIONS
from ranks import Ranks

pytestmark = pytest.mark.backend("jax")

TIME, TOKENS = 130, 264  # of the sequence that is cut, and of the pack that it lies in: 66 a device of four
REVERSED = ("linear_scan", "gdn2", "kda")


@pytest.fixture(scope="module")
def devices():
    with Ranks("jax_jobs", 1) as process:
        yield process


def check(devices: Ranks, op: str, count: int, dtype: str, options: dict[str, Any], **how: Any) -> None:
    (answer,) = devices.run("agreement", op, count, dtype, options, how)
    assert len(answer) > 3
    for error, where in answer.values():
        assert error <= TOLERANCE.get(dtype, 2e-2), f"{op}: {where} deviates by {error:.1e}"


def packs_of(count: int) -> list[list[int]]:
    """A sequence of 130 tokens in a pack, cut by the devices' edges at every tenth place, the ends and twenty random ones.

    Cuts are data: one program runs them all.
    """
    rng, each = np.random.default_rng(20), TOKENS // count
    found, met = [], set()
    for cut in (*range(10, TIME, 10), 0, TIME, *map(int, rng.integers(1, TIME, 20))):
        if cut in met:
            continue
        starts = [edge - cut for edge in range(each, TOKENS, each) if 0 <= edge - cut <= TOKENS - TIME]
        start = starts[len(found) % len(starts)]
        met |= {edge - start for edge in range(each, TOKENS, each)}
        stop = start + TIME
        # Others before and behind, of which some are empty and some lie on several devices too.
        found.append([0, start // 3, start, stop, stop, stop + (TOKENS - stop) // 2, TOKENS])
    # Over all devices, from one edge on, and up to one.
    edge = TOKENS - each
    return [
        *found,
        [0, 0, 0, TOKENS, *[TOKENS] * 3],
        [0, 0, each, TOKENS, *[TOKENS] * 3],
        [0, 5, 5, edge, edge, edge, TOKENS],
    ]


@pytest.mark.parametrize("op", OPERATIONS)
def test_every_operation_cut_anywhere(devices: Ranks, op: str):
    exchange = "gather" if OPERATIONS.index(op) % 2 else "scan"
    options = {"exchange": exchange, "reverse": op in REVERSED}
    changes = ("slow", "resets", "growth") if op in ("linear_scan", "selective_scan", "gdn2") else ("slow",)
    check(devices, op, 4, "float64", options, packs=packs_of(4), changes=changes)


def test_two_devices(devices: Ranks):
    check(devices, "linear_scan", 2, "float64", {"exchange": "gather"}, packs=packs_of(2), changes=["slow"])


def test_two_devices_in_float32(devices: Ranks):
    """Every operation over 130 tokens, in the direction that it does not have above."""
    for op in OPERATIONS:
        check(devices, op, 2, "float32", {"reverse": op not in REVERSED}, time=TIME, changes=["slow"])


@pytest.mark.parametrize("count", [2, 4])
def test_bytes_are_those_of_the_formula(devices: Ranks, count: int):
    """P for a state and M for a transition: a map in each round, in the last one of "scan" the state; backward the same."""
    for op, M in (("linear_scan", 2 * 3 * 4), ("selective_scan", None), ("gdn2", 2 * 4 * 3 * 3 * 4)):
        for exchange, rounds in (("scan", 1 + math.ceil(math.log2(count - 1))), ("gather", 1)):
            (found,) = devices.run("exchanged", op, count, exchange)
            P = found["state"]  # where the state is elementwise, so is the transition
            Q = P + (P if M is None else M)
            want = P if count == 2 else Q if exchange == "gather" else (rounds - 1) * Q + P
            assert found["forward"] == want > 0, (op, exchange)
            assert found["both"] == 2 * found["forward"], (op, exchange)


def test_batches_directions_and_numbers(devices: Ranks):
    check(devices, "gdn2", 4, "bfloat16", {"exchange": "gather"}, drop=("initial_state", "erase"))
    check(devices, "selective_scan", 4, "float64", {"reverse": True, "complex": True})


def test_other_axes_of_the_mesh_and_a_line_of_one(devices: Ranks):
    """Time over one axis and the lanes of a pack over another; and time over a single device."""
    (answer,) = devices.run("other_axes")
    assert set(answer) == {"lanes", "one", "eager"}
    for name, error in answer.items():
        assert error <= 1e-12, name


def test_bounds_beyond_32_bits(devices: Ranks):
    """1e10 tokens on 1,024 devices, in 32-bit integers."""
    (answer,) = devices.run("far_bounds")
    assert answer == [True, True]


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("outside", "StateError", "jax.shard_map"),
        ("exchange", "ArgumentError", "'ring'"),
        ("unchecked", "StateError", "check_vma"),
        ("short", "ShapeError", "cu_seqlens: ends with 7, must end with the time 8"),
        ("falls", "ShapeError", "falls from 5 to 3"),
        ("none", "ShapeError", "two bounds at least"),
        ("batch", "ShapeError", "batch must be 1; it is 2"),
        ("traced batch", "ShapeError", "batch must be 1; it is 2"),
        ("floats", "DtypeError", "cu_seqlens: expected integers"),
        ("traced floats", "DtypeError", "cu_seqlens: dtype float64"),
        ("cut", "ArgumentError", "every device needs the bounds of the whole"),
        ("method", "ArgumentError", "'generic.recurrent'; packs over devices run by 'jax.scan'"),
    ],
)
def test_refusals(devices: Ranks, what: str, kind: str, words: str):
    (answer,) = devices.answers("refused", what)
    assert answer[:2] == ("raised", kind) and words in answer[2], answer


def test_a_training_over_devices_is_one_devices(devices: Ranks):
    for optimizer in ("lbfgs", "lm"):
        (found,) = devices.run("train", optimizer)
        training.same(found, training.trained(optimizer, np))
