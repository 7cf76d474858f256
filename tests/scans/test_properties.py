"""Laws that hold for any input: drawn by Hypothesis, the same draws in every run.

A new shape is a new compilation on JAX and every time step is many tasks on Dask, so these run on NumPy,
torch, strict and CuPy.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from arrays import Library, deviation, same_bits
from checks import operation
from examples import BASE, COMPILED_FOR, METHODS, OPERATIONS, methods, op_inputs
from hypothesis import given
from hypothesis import strategies as st

import scanfield

pytestmark = pytest.mark.backend("numpy", "torch", "strict", "cupy")

SHARED = {"A", "D", "delta_bias", "dt_bias"}
TIME = 9  # other than batch, heads, channels, K, V, state

seeds = st.integers(0, 999)
cuts = st.integers(0, TIME)
ops = st.sampled_from(OPERATIONS)
forms = st.sampled_from(sorted({form for every in METHODS.values() for form in every}))
chunks = st.sampled_from([None, 1, 2, 4, 64])


def drawn(op: str, seed: int, **sizes: int) -> dict[str, np.ndarray]:
    return op_inputs(op, f"{op} property {seed}", **{"time": TIME, **sizes})


def piece(inputs: dict[str, Any], lo: int, hi: int) -> dict[str, Any]:
    return {n: x if n in SHARED or n == "initial_state" else x[:, lo:hi, ...] for n, x in inputs.items()}


def whole_vjp(op: str, inputs: dict[str, Any], **options: Any) -> tuple[Any, dict[str, Any]]:
    """Result and gradients for cotangents of ones."""
    result, pullback = scanfield.vjp(operation(op), **inputs, **options)
    return result, pullback(result.output * 0 + 1.0, result.final_state * 0 + 1.0)


def taken(library: Library, op: str, method: str, otherwise: str | None = None) -> str | None:
    """The drawn method where the library has it. On CuPy every draw goes through the kernels, which no other library runs."""
    if library.name == "cupy":
        return "cupy.rawkernel"
    return method if method in methods(library, op) else otherwise


@given(op=ops, seed=seeds, cut=cuts, method=forms, chunk_size=chunks, reverse=st.booleans())
def test_split_anywhere_is_the_whole(library: Library, op, seed, cut, method, chunk_size, reverse):
    """Output, state and every gradient, the two halves chained by the state and by its cotangent."""
    options = {
        "method": taken(library, op, method),
        "chunk_size": chunk_size,
        "reverse": reverse,
    }
    inputs = library.arrays(drawn(op, seed))
    whole, want = whole_vjp(op, inputs, **options)
    halves = [piece(inputs, 0, cut), piece(inputs, cut, TIME)]
    first, second = reversed(halves) if reverse else halves
    one, pull_one = scanfield.vjp(operation(op), **first, **options)
    two, pull_two = scanfield.vjp(operation(op), **{**second, "initial_state": one.final_state}, **options)
    of_two = pull_two(two.output * 0 + 1.0, two.final_state * 0 + 1.0)
    of_one = pull_one(one.output * 0 + 1.0, of_two["initial_state"])
    outputs = [library.numpy(two.output), library.numpy(one.output)]
    left, right = outputs if reverse else outputs[::-1]
    assert deviation(np.concatenate([left, right], axis=1), library.numpy(whole.output)) <= 1e-12
    assert deviation(library.numpy(two.final_state), library.numpy(whole.final_state)) <= 1e-12
    for name, gradient in library.numpys(want).items():
        a, b = library.numpy(of_one[name]), library.numpy(of_two[name])
        if name == "initial_state":
            joined = a
        elif name in SHARED:
            joined = a + b
        else:
            joined = np.concatenate([b, a] if reverse else [a, b], axis=1)
        assert deviation(joined, gradient, floor=1e-3) <= 1e-11, name


# The gate of each operation that a later token could leak through.
GATES = {
    "linear_scan": "a",
    "selective_scan": "delta",
    "gdn2": "log_decay",
    "gla": "log_decay",
    "kda": "log_decay",
    "gated_delta_rule": "log_decay",
    "retention": "log_decay",
    "comba": "log_decay",
    "ssd": "dt",
}


@given(
    op=st.sampled_from(sorted(GATES)),
    seed=seeds,
    at=st.integers(1, TIME - 1),
    method=forms,
    chunk_size=chunks,
    size=st.sampled_from([0.1, 3.0, 50.0, 300.0, np.inf]),
)
def test_a_later_gate_changes_nothing_before(library: Library, op, seed, at, method, chunk_size, size):
    """Outputs before a token, and the gradients of a loss of them, keep every bit when gates from that token
    on change.
    """
    if op in ("linear_scan", "selective_scan", "ssd") and not np.isfinite(size):
        size = 300.0
    options = {"method": taken(library, op, method), "chunk_size": chunk_size}
    data = drawn(op, seed)
    changed = {n: x.copy() for n, x in data.items()}
    gate = changed[GATES[op]]
    if op == "linear_scan":
        gate[:, at:] = size
    elif op in ("selective_scan", "ssd"):
        gate[:, at:] += size
    else:
        gate[:, at:] -= size
    weights = np.zeros((1, TIME))
    weights[:, :at] = 1.0
    found = []
    for inputs in (library.arrays(data), library.arrays(changed)):
        result, pullback = scanfield.vjp(operation(op), **inputs, **options)
        shape = (1, TIME, *[1] * (len(result.output.shape) - 2))
        seen = library.array(np.broadcast_to(weights.reshape(shape), tuple(result.output.shape)))
        found.append((result.output, pullback(seen)))
    (output, gradients), (other_output, other_gradients) = found
    assert same_bits(library.raw(output)[:, :at], library.raw(other_output)[:, :at])
    for name in data:
        x, y = library.raw(gradients[name]), library.raw(other_gradients[name])
        if name not in SHARED and name != "initial_state":
            x, y = x[:, :at], y[:, :at]
        assert same_bits(x + 0.0, y + 0.0), name  # + 0.0: the sign of a zero may differ


@given(op=ops, seed=seeds, method=forms, row=st.integers(0, 2))
def test_batch_rows_are_independent(library: Library, op, seed, method, row):
    """A row alone gives that row; other numbers in the other rows change none of its bits."""
    method = taken(library, op, method)
    data = drawn(op, seed, batch=3)
    own = {
        n
        for n in data
        if n not in SHARED and data[n].shape[0] == 3 and not (op == "selective_scan" and data[n].ndim == 2)
    }
    others = {n: x.copy() for n, x in data.items()}
    for name in own:
        for r in set(range(3)) - {row}:
            others[name][r] = others[name][r] / 2 - 0.25
    single = {n: x[row : row + 1] if n in own else x for n, x in data.items()}
    result, grads = whole_vjp(op, library.arrays(data), method=method)
    again, other_grads = whole_vjp(op, library.arrays(others), method=method)
    alone, alone_grads = whole_vjp(op, library.arrays(single), method=method)
    for i in range(2):
        x, y, z = (library.raw(r[i]) for r in (result, again, alone))
        assert same_bits(x[row], y[row])
        assert deviation(z[0], x[row]) <= 1e-13
    for name in own:
        x, y, z = (library.raw(g[name]) for g in (grads, other_grads, alone_grads))
        assert same_bits(x[row], y[row]), name
        assert deviation(z[0], x[row]) <= 1e-12, name


@given(
    op=ops,
    seed=seeds,
    lengths=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    method=forms,
    reverse=st.booleans(),
)
def test_packed_is_separate(library: Library, op, seed, lengths, method, reverse):
    """Each sequence of a pack gives what it gives alone: output, state, and the gradients of all of it."""
    method = taken(library, op, method)
    bounds = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    inputs = library.arrays(drawn(op, seed, batch=1, time=bounds[-1], states=len(lengths)))
    options = {"method": method, "reverse": reverse}
    packed, grads = whole_vjp(op, inputs, cu_seqlens=bounds, **options)
    shared_sum: dict[str, np.ndarray] = {}
    for i, (lo, hi) in enumerate(pairwise(bounds)):
        own = piece(inputs, lo, hi)
        own["initial_state"] = inputs["initial_state"][i : i + 1, ...]
        alone, alone_grads = whole_vjp(op, own, **options)
        assert deviation(library.numpy(packed.output)[:, lo:hi], library.numpy(alone.output)) <= 1e-12
        assert (
            deviation(library.numpy(packed.final_state)[i : i + 1], library.numpy(alone.final_state)) <= 1e-12
        )
        for name, gradient in library.numpys(alone_grads).items():
            if name in SHARED:
                shared_sum[name] = shared_sum.get(name, 0) + gradient
            else:
                whole = library.numpy(grads[name])
                mine = whole[i : i + 1] if name == "initial_state" else whole[:, lo:hi]
                assert deviation(mine, gradient, floor=1e-6) <= 1e-11, name
    for name, total in shared_sum.items():
        assert deviation(library.numpy(grads[name]), total, floor=1e-6) <= 1e-11, name


@given(op=ops, seed=seeds, batch=st.sampled_from([0, 1, 2]), time=st.sampled_from([0, 1, 2]), method=forms,
       reverse=st.booleans(), dtype=st.sampled_from(["float32", "float64"]))  # fmt: skip
def test_nothing_is_something(library: Library, op, seed, batch, time, method, reverse, dtype):
    """Zero rows and zero tokens, alone and together: shapes and dtypes as for any other size, and gradients
    for all.
    """
    data = drawn(op, seed, batch=batch, time=time)
    inputs = library.arrays(data, dtype)
    options = {"method": taken(library, op, method), "reverse": reverse}
    result, grads = whole_vjp(op, inputs, **options)
    assert result.output.shape[:2] == (batch, time)
    assert tuple(result.final_state.shape) == data["initial_state"].shape
    assert library.dtype(result.output) == library.dtype(result.final_state) == dtype
    assert {n: tuple(g.shape) for n, g in grads.items()} == {n: x.shape for n, x in data.items()}
    if time == 0:
        assert same_bits(library.raw(result.final_state), library.raw(inputs["initial_state"]))


@given(
    op=ops,
    seed=seeds,
    at=st.integers(0, TIME - 1),
    value=st.sampled_from([np.nan, np.inf, -np.inf]),
    chunk_size=chunks,
    which=st.integers(0, 9),
    method=st.sampled_from(["generic.recurrent", *COMPILED_FOR]),
)
def test_a_nan_reaches_no_earlier_output(library: Library, op, seed, at, value, chunk_size, which, method):
    """The recurrent forms: outputs before the token keep every bit, whatever stands in the token."""
    data = drawn(op, seed)
    timed = [n for n in data if n not in SHARED and n != "initial_state"]
    name = timed[which % len(timed)]
    broken = {n: x.copy() for n, x in data.items()}
    broken[name][:, at] = value
    method = taken(library, op, method, "generic.recurrent")
    options = {"method": method, "chunk_size": chunk_size}
    clean = operation(op)(**library.arrays(data), **options)
    with np.errstate(all="ignore"):
        dirty = operation(op)(**library.arrays(broken), **options)
    assert same_bits(library.raw(clean.output)[:, :at], library.raw(dirty.output)[:, :at])


@given(op=ops, seed=seeds, method=forms, chunk_size=chunks)
def test_the_same_call_twice_is_bitwise_equal(library: Library, op, seed, method, chunk_size):
    options = {"method": taken(library, op, method), "chunk_size": chunk_size}
    data = drawn(op, seed)
    one, grads = whole_vjp(op, library.arrays(data), **options)
    two, again = whole_vjp(op, library.arrays(data), **options)
    for x, y in zip((*one, *grads.values()), (*two, *again.values()), strict=True):
        assert same_bits(library.raw(x), library.raw(y))


@given(op=st.sampled_from(BASE), seed=seeds, factor=st.floats(-3, 3))
def test_the_output_is_linear_in_what_is_written_and_in_the_state(library: Library, op, seed, factor):
    """An affine map of the state: a multiple of the input and of the state gives that multiple of the output."""
    main = {"linear_scan": "b", "selective_scan": "u", "gdn2": "value"}[op]
    data = drawn(op, seed)
    scaled = {**data, main: data[main] * factor, "initial_state": data["initial_state"] * factor}
    one, two = (operation(op)(**library.arrays(x)) for x in (data, scaled))
    for x, y in zip(one, two, strict=True):
        assert deviation(library.numpy(y), factor * library.numpy(x), floor=1e-6) <= 1e-12
