"""Which dtype comes out, and how wide the arithmetic between is: half precision is rounded once, on output."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from arrays import Library, deviation
from checks import call, step, vjp, vjp_on
from examples import BASE, OPERATIONS, Example, main_of, methods, op_inputs, round_to

import scanfield

HALF = {"float16": 2.0**-11, "bfloat16": 2.0**-8}  # half a unit in the last place, relative


def leave_out(backend: str, test: str, given: dict[str, Any]) -> bool:
    return backend in ("jax", "dask") and given.get("op", "gdn2") not in BASE


def has(library: Library, *dtypes: str) -> None:
    for dtype in dtypes:
        if dtype not in library.dtypes:
            pytest.skip(f"{library.name} has no {dtype}")


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("op", OPERATIONS)
def test_half_in_half_out(library: Library, op: str, dtype: str):
    """Output and gradients are the float32 results rounded once; the state is float32 and has float32's
    precision.
    """
    has(library, dtype)
    e = Example(f"{op} {dtype}", op, op_inputs(op, f"{op} {dtype}", time=library.time(9)))
    truth, gradients = e.truth(dtype), None
    d_output, d_final = e.cotangents(dtype)
    for method in methods(library, op):
        cotangents = library.array(d_output, dtype), library.array(d_final, "float32")
        got = vjp_on(library, op, library.arrays(e.inputs, dtype), cotangents, method=method)
        assert library.dtype(got.output) == dtype
        assert library.dtype(got.final_state) == "float32"
        assert deviation(library.numpy(got.final_state), truth.final_state) <= 4e-6
        assert_rounded_once(library.numpy(got.output), truth.output, dtype)
        if op in ("linear_scan", "selective_scan", "gdn2"):
            gradients = e.gradients(dtype)
        for name, x in e.inputs.items():
            assert library.dtype(got.gradients[name]) == dtype
            assert tuple(got.gradients[name].shape) == x.shape
            if gradients is not None:
                assert_rounded_once(library.numpy(got.gradients[name]), gradients[name], dtype)


def assert_rounded_once(got: np.ndarray, want: np.ndarray, dtype: str) -> None:
    """Within half a unit in the last place of each element, and what float32 arithmetic adds to it."""
    tiny = float(np.finfo(np.float16).smallest_subnormal) if dtype == "float16" else 0.0
    allowed = HALF[dtype] * np.abs(want) + 8e-6 * np.max(np.abs(want)) + tiny
    assert np.all(np.abs(got - want) <= allowed), np.max(np.abs(got - want) / allowed)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("op", ["linear_scan", "selective_scan", "gdn2"])
def test_the_carry_is_not_half(library: Library, op: str, dtype: str):
    """Long sums: a half-precision carry would stop growing (1 + 1000 steps of 1e-3 stays 1 in bfloat16)."""
    has(library, dtype)
    if library.short:
        pytest.skip(f"{library.name}: the sum needs many steps")
    time, step = 512, 2.0**-10
    one, small = np.ones((1, time, 1)), np.full((1, time, 1), step)
    inputs = {
        "linear_scan": {"a": one, "b": small},
        "selective_scan": {"u": one, "delta": small, "A": -1e-8 * np.ones((1, 1)), "B": one, "C": one},
        "gdn2": {"query": one[..., None], "key": one[..., None], "value": small[..., None]},
    }[op]
    for method in methods(library, op):
        got = call(library, op, inputs, dtype, method=method)
        assert abs(library.numpy(got.final_state).ravel()[0] - time * step) <= 1e-5
        assert abs(library.numpy(got.output).ravel()[-1] - time * step) <= HALF[dtype]


@pytest.mark.parametrize("op", OPERATIONS)
def test_main_input_sets_the_output_dtype(library: Library, op: str):
    """Mixed widths are computed in the widest (float32 at least); the output has the main input's dtype."""
    inputs = op_inputs(op, f"{op} mixed", time=library.time(4))
    main = main_of(op)
    rounded = {n: round_to(x, "float32") if n == main else x for n, x in inputs.items()}
    e = Example(f"{op} mixed", op, rounded)
    arrays = {n: library.array(x, "float32" if n == main else "float64") for n, x in inputs.items()}
    cotangents = library.array(e.truth().output, "float32"), library.array(e.truth().final_state)
    got = vjp_on(library, op, arrays, cotangents)
    assert library.dtype(got.output) == "float32"
    assert library.dtype(got.final_state) == "float64"
    assert deviation(library.numpy(got.final_state), e.truth().final_state) <= 1e-12
    assert deviation(library.numpy(got.output), e.truth().output) <= 2.0**-24
    assert {n: library.dtype(g) for n, g in got.gradients.items()} == {
        n: library.dtype(x) for n, x in arrays.items()
    }


@pytest.mark.parametrize("dtype", HALF)
def test_half_input_with_a_wide_step(library: Library, dtype: str):
    """selective_scan with u in half precision and delta in float32, as trained models have it."""
    has(library, dtype)
    inputs = op_inputs("selective_scan", f"wide step {dtype}", time=library.time(5))
    low = {"u", "B", "C", "z"}
    e = Example(
        f"wide step {dtype}",
        "selective_scan",
        {n: round_to(x, dtype if n in low else "float32") for n, x in inputs.items()},
    )
    got = scanfield.selective_scan(
        **{n: library.array(x, dtype if n in low else "float32") for n, x in inputs.items()}
    )
    assert library.dtype(got.output) == dtype and library.dtype(got.final_state) == "float32"
    assert deviation(library.numpy(got.final_state), e.truth().final_state) <= 4e-6
    assert_rounded_once(library.numpy(got.output), e.truth().output, dtype)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("op", ["linear_scan", "selective_scan", "gdn2"])
def test_a_half_state_is_taken_and_comes_back_wide(library: Library, op: str, dtype: str):
    has(library, dtype)
    inputs = op_inputs(op, f"{op} half state", time=library.time(3))
    arrays = {n: library.array(x, dtype if n == "initial_state" else "float32") for n, x in inputs.items()}
    d_final = library.array(np.ones(inputs["initial_state"].shape), "float32")
    got = vjp_on(library, op, arrays, (None, d_final))
    assert library.dtype(got.final_state) == "float32" == library.dtype(got.output)
    assert library.dtype(got.gradients["initial_state"]) == dtype


@pytest.mark.parametrize("op", OPERATIONS)
def test_step_has_the_same_dtypes(library: Library, op: str):
    for dtype in [d for d in ("float16", "bfloat16", "float32", "float64") if d in library.dtypes]:
        inputs = op_inputs(op, f"{op} step dtype", time=1)
        token = {
            n: x if n in ("A", "D", "delta_bias", "dt_bias") else x[:, 0]
            for n, x in inputs.items()
            if n != "initial_state"
        }
        output, state = step(library, op, None, library.arrays(token, dtype))
        assert library.dtype(output) == dtype
        assert library.dtype(state) == ("float64" if dtype == "float64" else "float32")


@pytest.mark.parametrize("op", ["linear_scan", "selective_scan"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_complex(library: Library, op: str, dtype: str):
    """complex64 stays complex64 and complex128 complex128; outputs of a real u are real."""
    from examples import linear_inputs, selective_inputs

    make = linear_inputs if op == "linear_scan" else selective_inputs
    e = Example(f"{op} {dtype} complex", op, make(f"{op} complex dtype", time=library.time(5), complex_=True))
    got = vjp(library, op, e.inputs, e.cotangents(dtype), dtype)
    wide = {"float32": "complex64", "float64": "complex128"}[dtype]
    assert library.dtype(got.final_state) == wide
    assert library.dtype(got.output) == (wide if op == "linear_scan" else dtype)
    for name, x in e.inputs.items():
        assert library.dtype(got.gradients[name]) == (wide if x.dtype.kind == "c" else dtype), name


@pytest.mark.backend("numpy")
def test_float64_never_passes_through_float32(library: Library):
    """An answer good to 1e-12 says so already; this says it of a state too large for float32."""
    a, b = library.array(np.full((1, 3, 1), 1e30)), library.array(np.ones((1, 3, 1)))
    assert np.isfinite(library.numpy(scanfield.linear_scan(a, b).final_state)).all()
