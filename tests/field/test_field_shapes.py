"""Field reports F044 to F047: edge shapes and size limits."""

from __future__ import annotations

import numpy as np
import pytest
import reference
from calls import GENERIC, call, needs_every_length, truth_vjp
from draws import G, M, within
from operations import every_operation

import scanfield

pytestmark = GENERIC

LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)


def in_a_parent(library, x):
    """x as the first tokens of a longer array of the library, with NaN behind."""
    behind = np.full((x.shape[0], 70, *x.shape[2:]), np.nan)
    return library.array(np.concatenate([x, behind], axis=1))[:, : x.shape[1], ...]


def dual(drawn):
    """The state-space dual of a gated draw: heads 2, head size 3, state 5; groups are the heads."""
    return {
        "x": drawn.value,
        "dt": drawn.beta + 0.05,
        "A": np.array([-0.7, -1.3]),
        "B": drawn.key,
        "C": drawn.query,
    }


@pytest.mark.parametrize("time", LENGTHS)
@pytest.mark.parametrize("operation", ["gdn2", "gated_delta_rule", "ssd", "selective_scan"])
def test_f044_nothing_is_read_behind_the_end(library, operation, time):
    needs_every_length(library, time, (17, 65))
    drawn = M(31, 1, time, 3, 2) if operation == "selective_scan" else G(31, 1, time, 2, 5, 3)
    if operation == "ssd":
        inputs = dual(drawn)
        d_state = np.swapaxes(drawn.d_state, -1, -2)
    else:
        inputs = drawn.inputs() if operation == "selective_scan" else drawn.inputs(operation)
        d_state = drawn.d_state
    given = {name: library.array(x) if name == "A" else in_a_parent(library, x) for name, x in inputs.items()}
    result, pullback = scanfield.vjp(getattr(scanfield, operation), **given)
    gradients = pullback(in_a_parent(library, drawn.d_output), library.array(d_state))
    truth = reference.forward(operation, inputs)
    within(library.numpy(result.output), truth.output, 1e-12)
    within(library.numpy(result.final_state), truth.final_state, 1e-12)
    wanted = truth_vjp(operation, inputs, drawn.d_output, d_state)
    assert set(gradients) == set(wanted)
    for name, gradient in gradients.items():
        within(library.numpy(gradient), wanted[name], 1e-10, name)


EMPTY = {
    "batch 0": {"batch": 0},
    "time 0": {"time": 0},
    "V 0, channels 0": {"value": 0, "channels": 0},
    "heads 0, state 0": {"heads": 0, "state": 0},
}
SIZES = {"batch": 2, "time": 3, "heads": 2, "key": 4, "value": 5, "channels": 6, "state": 4}


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("case", EMPTY)
def test_f045_arrays_without_elements(library, dtype, case, with_state):
    r = np.random.default_rng(450)
    examples = every_operation(45, **SIZES | EMPTY[case])
    if (
        library.name == "jax"
    ):  # compiles for half a second at every new shape: the base operations and one derived
        if dtype == "float64" or not with_state:
            pytest.skip("JAX compiles at every new shape; there float32 with a state stands for all")
        examples = {name: examples[name] for name in ("linear_scan", "selective_scan", "gdn2", "ssd")}
    for operation, (inputs, options, output_shape) in examples.items():
        state = inputs["initial_state"]
        given = library.arrays(inputs, dtype)
        if not with_state:
            del given["initial_state"]
        plain = getattr(scanfield, operation)(**given, **options)
        result, pullback = scanfield.vjp(getattr(scanfield, operation), **given, **options)
        d_output, d_state = r.standard_normal(output_shape), r.standard_normal(state.shape)
        gradients = pullback(library.array(d_output, dtype), library.array(d_state, dtype))
        for one in (result, plain):
            assert tuple(one.output.shape) == output_shape and library.dtype(one.output) == dtype, operation
            assert tuple(one.final_state.shape) == state.shape and library.dtype(one.final_state) == dtype, (
                operation
            )
        assert set(gradients) == set(given), operation
        for name, gradient in gradients.items():
            assert tuple(gradient.shape) == inputs[name].shape and library.dtype(gradient) == dtype, (
                operation,
                name,
            )
            assert np.isfinite(library.raw(gradient)).all(), (operation, name)
        if case == "time 0":
            kept = state.astype(dtype) if with_state else np.zeros(state.shape, dtype=dtype)
            assert np.array_equal(library.raw(result.final_state), kept), operation
            assert np.array_equal(library.raw(plain.final_state), kept), operation
            for name, gradient in gradients.items():
                # empty, or of an array that no token was multiplied with
                wanted = (
                    d_state.astype(dtype) if name == "initial_state" else np.zeros(inputs[name].shape, dtype)
                )
                assert np.array_equal(library.raw(gradient), wanted), (operation, name)


def test_f046_seventy_thousand_channels(library):
    u = np.random.default_rng(62).standard_normal((1, 4, 70000))
    inputs = {"u": u, "delta": np.ones_like(u), "A": np.zeros((70000, 1)), "B": np.ones((1, 4, 1))}
    inputs["C"] = inputs["B"]
    output = library.numpy(call(library, "selective_scan", inputs, "float32").output)
    wanted = np.cumsum(u, axis=1)
    within(output, wanted, 1e-6)
    within(output[..., -1], wanted[..., -1], 1e-6)


def test_f047_a_state_of_three_hundred(library):
    inputs = M(63, 1, 6, 2, 300).inputs()
    truth = reference.forward("selective_scan", inputs)
    for dtype, tolerance in (("float64", 1e-12), ("float32", 1e-5)):
        result = call(library, "selective_scan", inputs, dtype)
        within(library.numpy(result.output), truth.output, tolerance)
        within(library.numpy(result.final_state), truth.final_state, tolerance)
        explained = scanfield.explain(scanfield.selective_scan, **library.arrays(inputs, dtype))
        ran = explained.taken["forward"]
        assert ran in str(explained)
        # Whatever stood before the one that ran declined, and says why.
        forward = [verdict for verdict in explained.verdicts if verdict.verb == "forward"]
        before = forward[: [verdict.candidate for verdict in forward].index(ran)]
        assert all(verdict.reason and verdict.candidate in str(explained) for verdict in before)
