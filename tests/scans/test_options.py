"""Every option of every operation against the float64 truth: forward, final state and all gradients, by every
candidate.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from arrays import Library
from checks import check_kind, check_truth, operation, run_example, vjp
from examples import BASE, DELTA_FAMILY, EXAMPLES, METHODS, OPERATIONS, Example, example, op_inputs

import scanfield
from scanfield.scans.binding import bind

RUNS = [pytest.param(e, method, id=f"{e}-{method}") for e in EXAMPLES for method in METHODS[e.op]]


PLAIN = {f"{op}: plain" for op in DELTA_FAMILY[1:]}
# What Dask runs: its every time step is many tasks, and the array code is the same.
DASK = PLAIN | {
    "linear_scan: plain",
    "linear_scan: a constant in time, reverse",
    "linear_scan: packed reverse",
    "selective_scan: real, B time, C groups",
    "selective_scan: complex, B constant, C time",
    "selective_scan: dt_limit softplus",
    "gdn2: grouped heads, gates a head",
    "gdn2: l2norm",
    "gdn2: packed reverse",
}
# What JAX runs by the generic forms, beside golden cases: every form of gate, and each way to walk.
JAX_GENERIC = {
    "gdn2: decay a head",
    "gdn2: no gates",
    "gdn2: only erase",
    "gdn2: grouped heads, gates a head",
    "gdn2: packed reverse",
    "linear_scan: complex reverse",
    "linear_scan: packed",
    "selective_scan: complex, B constant, C groups",
    "selective_scan: dt_limit softplus",
    "selective_scan: packed reverse",
}


def leave_out(backend: str, test: str, given: dict[str, Any]) -> bool:
    if test == "test_each_cotangent_alone":
        return backend in ("jax", "dask") and given["op"] not in BASE
    if test != "test_option":
        return False
    example, method = given["example"], given["method"]
    if backend == "dask":
        return given["dtype"] == "float32" or example.name not in DASK or method != METHODS[example.op][0]
    if backend == "jax":  # each of these is a compilation
        if given["dtype"] == "float32" or (example.op in DELTA_FAMILY[1:] and example.name not in PLAIN):
            return True
        return method != "jax.scan" and example.name not in JAX_GENERIC
    return False


@pytest.mark.parametrize(("example", "method"), RUNS)
def test_option(library: Library, dtype: str, example: Example, method: str):
    # 7 tokens in chunks of 4: the chunk form sees a whole chunk and a ragged one.
    got = run_example(library, example, dtype, method, chunk_size=4)
    check_kind(library, got, example.op, example.inputs, dtype)
    check_truth(library, got, example, dtype)


def test_every_operation_has_examples():
    names = {record.name for record in scanfield.operations()}
    assert names == set(OPERATIONS) == {e.op for e in EXAMPLES}


# One example of each operation stands for it where the option under test is not its own.
STANDING = {
    "linear_scan": "linear_scan: plain",
    "selective_scan": "selective_scan: real, B time, C groups",
    "gdn2": "gdn2: grouped heads",
    **{op: f"{op}: plain" for op in DELTA_FAMILY[1:]},
}


@pytest.mark.parametrize("op", OPERATIONS)
def test_each_cotangent_alone(library: Library, op: str):
    """A missing cotangent is zero; the two together are the sum of each alone (a pullback is linear)."""
    e = example(STANDING[op])
    d_output, d_final = e.cotangents()
    only_output = vjp(library, op, e.inputs, (d_output, None)).gradients
    only_final = vjp(library, op, e.inputs, (None, d_final)).gradients
    both = vjp(library, op, e.inputs, (d_output, d_final)).gradients
    with pytest.raises(scanfield.ArgumentError, match="d_output or d_final_state"):
        vjp(library, op, e.inputs, (None, None))
    for name in e.inputs:
        left, right, whole = (library.numpy(g[name]) for g in (only_output, only_final, both))
        scale = abs(whole).max() + abs(left).max() + abs(right).max()
        assert abs(left + right - whole).max() <= 1e-12 * scale, name
    # The final state's cotangent alone reaches what only the final state depends on, and is not lost.
    assert abs(library.numpy(only_final["initial_state"])).max() > 0


@pytest.mark.backend("numpy")
@pytest.mark.parametrize("op", OPERATIONS)
def test_the_record_tells_the_defaults_of_the_function(op: str):
    """What a plugin reads of an option is what a user, or the plugin's own call, gets if it is left away."""
    parameters = inspect.signature(operation(op)).parameters
    told = {
        option.name: option.default for option in operation(op).record.options if option.name in parameters
    }
    assert told == {name: parameters[name].default for name in told}
    if op in BASE:
        bound = bind(operation(op), (), dict(op_inputs(op, f"{op} defaults")))
        made = operation(op).record.prepare(bound.arrays, bound.options).call.options
        for option, value in zip(operation(op).record.options, made, strict=True):
            assert option.name in parameters or option.default == value, option
