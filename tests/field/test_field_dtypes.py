"""Field reports F033, F034 and F036 to F038: dtypes. (F035, and the half of F036 that trains, join with `pinn`.)"""

from __future__ import annotations

import subprocess
import sys

import arrays
import numpy as np
import pytest
import reference
from calls import FORMS, GENERIC, call, rounded, truth_vjp
from draws import G, M, within

import scanfield

pytestmark = GENERIC


@pytest.mark.backend("torch")
def test_f033_mixed_precision_arrays_are_promoted(library):
    """The output has the dtype of u, the state float32, and every gradient the dtype of its array."""
    drawn = M(50, 1, 16, 3, 4)
    inputs = drawn.inputs("z")
    half = ("u", "z")
    given = {name: library.array(x, "bfloat16" if name in half else "float32") for name, x in inputs.items()}
    exact = {name: rounded({name: x}, library.dtype(given[name]))[name] for name, x in inputs.items()}
    result, pullback = scanfield.vjp(scanfield.selective_scan, **given)
    assert library.dtype(result.output) == "bfloat16" and library.dtype(result.final_state) == "float32"
    truth = reference.forward("selective_scan", exact)
    within(library.numpy(result.output), truth.output, 1e-2)
    within(library.numpy(result.final_state), truth.final_state, 1e-2)
    gradients = pullback(library.array(drawn.d_output, "bfloat16"), library.array(drawn.d_state, "float32"))
    d_output = rounded({"d": drawn.d_output}, "bfloat16")["d"]
    wanted = reference.vjp("selective_scan", exact, d_output, drawn.d_state)
    for name, x in given.items():
        assert library.dtype(gradients[name]) == library.dtype(x), name
        within(library.numpy(gradients[name]), wanted[name], 1e-2, name)


@pytest.mark.parametrize("time", [100000, 1])
def test_f034_half_precision_scans_are_carried_in_float32(library, time):
    if "float16" not in library.dtypes:
        pytest.skip(f"{library.name} has no float16")
    inputs = {"a": np.ones((1, time, 1)), "b": np.full((1, time, 1), 0.001)}
    result = call(library, "linear_scan", inputs, "float16")
    assert library.dtype(result.output) == "float16" and library.dtype(result.final_state) == "float32"
    output, final_state = library.numpy(result.output), library.numpy(result.final_state).item()
    if time == 1:
        assert output.item() == final_state == float(np.float16(0.001))
    else:
        assert abs(final_state - 100.040436) <= 0.001
        assert abs(output[0, -1, 0] - 100.040436) <= 0.0625


def test_f036_a_wider_scalar_does_not_widen_the_result(library):
    """A Python float and a NumPy scalar are numbers; an array, even a 0-D one, is not an option's value."""
    inputs = G(51, 1, 6, 2, 4, 3).inputs()
    plain = call(library, "gdn2", inputs, "float32", scale=0.25)
    scalar = call(library, "gdn2", inputs, "float32", scale=np.float64(0.25))
    assert library.dtype(plain.output) == library.dtype(plain.final_state) == "float32"
    assert arrays.same_bits(library.raw(plain.output), library.raw(scalar.output))
    assert arrays.same_bits(library.raw(plain.final_state), library.raw(scalar.final_state))
    with pytest.raises(scanfield.DtypeError, match="scale"):
        call(library, "gdn2", inputs, "float32", scale=library.array(np.array(0.25)))


JAX_MODE = """
import numpy, warnings
warnings.simplefilter("error")
import jax, jax.numpy as jnp
assert not jax.config.jax_enable_x64
import scanfield
r = numpy.random.default_rng(0)
a, b = r.uniform(.5, 1, (2, 7, 3)), r.standard_normal((2, 7, 3))
ja, jb = jnp.asarray(a, dtype="float32"), jnp.asarray(b, dtype="float32")
for _ in range(2):
    result = scanfield.linear_scan(ja, jb)
    assert isinstance(result.output, jax.Array) and isinstance(result.final_state, jax.Array)
    assert result.output.dtype == result.final_state.dtype == numpy.float32, result.output.dtype
    result = scanfield.linear_scan(a, b)
    assert type(result.output) is numpy.ndarray
    assert result.output.dtype == result.final_state.dtype == numpy.float64, result.output.dtype
assert not jax.config.jax_enable_x64
"""


@pytest.mark.backend("jax")
def test_f037_jax_in_its_default_mode_stays_there():
    subprocess.run([sys.executable, "-c", JAX_MODE], check=True, timeout=120)


@pytest.mark.backend("torch")
@pytest.mark.parametrize("method", FORMS)
def test_f038_the_gradient_of_the_initial_state_is_carried_in_float32(library, method):
    drawn = G(29, 1, 100, 2, 16, 8)
    inputs = drawn.inputs() | {"log_decay": drawn.log_decay * 0.05}
    given = library.arrays(inputs, "bfloat16") | {"initial_state": library.array(drawn.state, "float32")}
    exact = rounded(inputs, "bfloat16") | rounded({"initial_state": drawn.state}, "float32")
    d_state = rounded({"d": drawn.d_state}, "float32")["d"]
    _, pullback = scanfield.vjp(scanfield.gdn2, **given, method=method)
    zero = library.array(np.zeros_like(drawn.d_output), "bfloat16")
    gradient = pullback(zero, library.array(drawn.d_state, "float32"))["initial_state"]
    assert library.dtype(gradient) == "float32"
    wanted = truth_vjp("gdn2", exact, np.zeros_like(drawn.d_output), d_state)["initial_state"]
    assert abs(np.abs(wanted).max() - 0.03016) < 1e-5
    difference = library.numpy(gradient) - wanted
    assert np.sqrt(np.mean(difference**2) / np.mean(wanted**2)) <= 1e-4
