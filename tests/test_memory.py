"""Backward keeps the states at chunk starts, O(time / chunk), and no array of one state a token.

The compiled scans have chunks of their own, and may keep a vector a token beside them.
"""

from __future__ import annotations

import tracemalloc
from math import isqrt
from typing import Any

import numpy as np
import pytest
from arrays import library
from checks import before_tracing, operation
from examples import COMPILED, GENERIC, methods

import scanfield

pytestmark = pytest.mark.backend("numpy")

# The state is made large against a token's vectors, so that a state a token cannot hide among them.
K, V = 48, 40


def inputs_of(op: str, time: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(time)
    if op == "linear_scan":
        return {"a": rng.uniform(0, 1, (1, time, 64)), "b": rng.standard_normal((1, time, 64))}
    if op == "selective_scan":
        return {
            "u": rng.standard_normal((1, time, 16)),
            "delta": rng.uniform(0, 1, (1, time, 16)),
            "A": -rng.uniform(0, 1, (16, 64)),
            "B": rng.standard_normal((1, time, 64)),
            "C": rng.standard_normal((1, time, 64)),
        }
    q, k = rng.standard_normal((2, 1, time, 1, K))
    return {
        "query": q,
        "key": k / np.linalg.norm(k, axis=-1, keepdims=True),
        "value": rng.standard_normal((1, time, 1, V)),
        "log_decay": -rng.uniform(0, 1, (1, time, 1, K)),
        "erase": rng.uniform(0, 1, (1, time, 1, K)),
    }


def state_size(op: str) -> int:
    return {"linear_scan": 64, "selective_scan": 16 * 64, "gdn2": K * V}[op]


def residuals(op: str, time: int, chunk: int | None, method: str) -> list[Any]:
    """What the implementation saves for its backward, asked of the dispatcher."""
    from scanfield.dispatch import save
    from scanfield.scans.binding import bind

    bound = bind(operation(op), (), {**inputs_of(op, time), "chunk_size": chunk, "method": method})
    prepared = bound.record.prepare(bound.arrays, bound.options)
    given = [x for x in prepared.call.arrays if isinstance(x, np.ndarray)]
    _, _, saved, _ = save(prepared.call, method)
    return [x for x in saved if not any(np.shares_memory(x, y) for y in given)]


@pytest.mark.parametrize("op", ["linear_scan", "selective_scan", "gdn2"])
def test_states_are_kept_at_chunk_starts_only(op: str):
    for method in GENERIC[op]:
        for time, chunk in ((256, 16), (256, 64), (200, 64), (64, 64)):
            kept = residuals(op, time, chunk, method)
            states = sum(x.size for x in kept) / state_size(op)
            # The blocked form has blocks of its own, of sqrt(time) tokens, whatever the chunk size.
            size = isqrt(time) if method == "generic.blocked" else chunk
            assert states <= -(-time // size), (
                f"{method}: {states} states for {time} tokens in chunks of {chunk}"
            )


@pytest.mark.parametrize("op", ["linear_scan", "selective_scan", "gdn2"])
def test_without_a_chunk_size_few_states_are_kept(op: str):
    """The default may be the square root of the length or a fixed chunk, but never a state a token."""
    for method in methods(library("numpy"), op):
        states = {
            time: sum(x.size for x in residuals(op, time, None, method)) / state_size(op)
            for time in (256, 1024)
        }
        tokens = 8 if method == COMPILED else 16  # for each state
        assert states[256] <= 256 / tokens and states[1024] <= 1024 / tokens, (method, states)


def peak(op: str, time: int, method: str, chunk: int) -> int:
    """Peak of what forward and backward allocate, beyond inputs, output, and gradients (which are O(time) by
    nature).
    """
    inputs = inputs_of(op, time)
    before_tracing(operation(op), inputs, method)
    tracemalloc.start()
    try:
        result, pullback = scanfield.vjp(operation(op), **inputs, chunk_size=chunk, method=method)
        gradients = pullback(result.output, result.final_state)
        _, top = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    lasting = (
        result.output.nbytes
        + sum(g.nbytes for g in gradients.values())
        + sum(x.nbytes for x in inputs.values())
    )
    return max(top - lasting, 0)


@pytest.mark.parametrize("op", ["selective_scan", "gdn2"])
def test_the_peak_stays_far_below_a_state_a_token(op: str):
    """4 times the tokens at one chunk size: the peak grows by chunk starts and vectors, not by whole states."""
    for method in methods(library("numpy"), op):
        short, long = peak(op, 256, method, 32), peak(op, 1024, method, 32)
        a_state_a_token = (1024 - 256) * state_size(op) * 8
        assert long - short < a_state_a_token / 4, f"{method}: {short} bytes, then {long}"


def training(op: str) -> dict[str, np.ndarray]:
    """Inputs in float32, as wide as layers have them, and long enough that what does not grow with time is little."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return rng.random(shape, dtype=np.float32)

    if op == "linear_scan":
        return {"a": draw(2, 2048, 256), "b": draw(2, 2048, 256)}
    if op == "selective_scan":
        u, delta, B, C = draw(1, 2048, 512), draw(1, 2048, 512), draw(1, 2048, 16), draw(1, 2048, 16)
        return {"u": u, "delta": delta, "A": -draw(512, 16), "B": B, "C": C}
    names = ("query", "key", "value", "log_decay", "erase", "write")
    inputs = {name: draw(1, 2048, 2, 64) for name in names}
    return inputs | {"key": inputs["key"] / 8, "log_decay": -inputs["log_decay"]}


@pytest.mark.parametrize("op", ["linear_scan", "selective_scan", "gdn2"])
def test_the_compiled_backward_takes_no_more_than_what_it_returns_and_reads(op: str):
    """At its peak, beyond inputs, cotangents and output, 1.5 times the bytes of inputs and gradients at the most.

    The gradients themselves count as taken.
    """
    pytest.importorskip("numba")
    inputs = training(op)
    ones = np.ones_like(operation(op)(**inputs, method="generic").output)
    before_tracing(operation(op), inputs, COMPILED)
    tracemalloc.start()
    try:
        result, pullback = scanfield.vjp(operation(op), **inputs, method=COMPILED)
        gradients = pullback(ones)
        peak = tracemalloc.get_traced_memory()[1] - sum(x.nbytes for x in result)
    finally:
        tracemalloc.stop()
    gradient_bytes = sum(x.nbytes for x in gradients.values())
    lasting = sum(x.nbytes for x in inputs.values()) + gradient_bytes
    assert peak >= gradient_bytes, "not all memory was seen"
    assert peak <= 1.5 * lasting, f"{peak / lasting:.2f} of {lasting / 1e6:.0f} MB"


def test_tracing_sees_numpy():
    """The measure itself: an array of one state a token would be seen."""
    tracemalloc.start()
    x = np.zeros((1024, K, V))
    _, top = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert top >= x.nbytes
