"""Field reports F039 to F042: what is refused, and in which words.

The halves of F040 and F041 that call adapters, and F043, join with `compat`.
"""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
from calls import CHEAP_FORMS, GENERIC, call, pull, truth_vjp
from draws import G, L, printed, within

import scanfield

pytestmark = GENERIC


def says(error: pytest.ExceptionInfo, *words: str) -> None:
    for word in words:
        assert word in str(error.value), f"{word!r} is not in: {error.value}"


@pytest.mark.parametrize("method", CHEAP_FORMS)
@pytest.mark.parametrize("operation", ["gdn2", "kda", "gated_delta_rule"])
def test_f039_more_value_heads_than_key_heads(library, operation, method):
    drawn = G(30, 1, 6, 4, 4, 3)
    inputs = drawn.inputs(operation)
    grouped = inputs | {name: inputs[name][:, :, :2] for name in ("query", "key")}
    repeated = inputs | {name: np.repeat(grouped[name], 2, axis=2) for name in ("query", "key")}
    result, gradients = pull(library, operation, grouped, drawn.d_output, drawn.d_state, method=method)
    full = call(library, operation, repeated, method=method)
    within(library.numpy(result.output), library.numpy(full.output), 1e-12)
    within(library.numpy(result.final_state), library.numpy(full.final_state), 1e-12)
    if operation == "gdn2":
        printed(library.numpy(result.output).sum(), "0.266678855360")
    wanted = truth_vjp(operation, repeated, drawn.d_output, drawn.d_state)
    for name, gradient in gradients.items():
        summed = wanted[name]
        if name in ("query", "key"):
            summed = summed.reshape(1, 6, 2, 2, 4).sum(axis=3)
        within(library.numpy(gradient), summed, 1e-12, name)


def test_f039_gates_of_too_few_heads_are_refused(library):
    inputs = G(30, 1, 6, 4, 4, 3).inputs()
    inputs |= {name: inputs[name][:, :, :2] for name in ("query", "key")}
    with pytest.raises(scanfield.ShapeError) as refused:
        call(library, "gdn2", inputs | {name: inputs[name][:, :, :2] for name in ("log_decay", "erase")})
    says(refused, "log_decay", "(1, 6, 2, 4)", "(1, 6, 4, 4)")
    with pytest.raises(scanfield.ShapeError) as refused:
        call(library, "gdn2", inputs | {name: inputs[name][:, :, :3] for name in ("value", "write")})
    says(refused, "value", "3", "2")
    for operation in ("kda", "gated_delta_rule"):
        inputs = G(30, 1, 6, 4, 4, 3).inputs(operation)
        inputs |= {name: inputs[name][:, :, :2] for name in ("query", "key")}
        with pytest.raises(scanfield.ShapeError) as refused:
            call(
                library, operation, inputs | {name: inputs[name][:, :, :2] for name in ("log_decay", "beta")}
            )
        says(refused, "log_decay", "(1, 6, 2", "(1, 6, 4")
        with pytest.raises(scanfield.ShapeError) as refused:
            call(library, operation, inputs | {"value": inputs["value"][:, :, :3]})
        says(refused, "value", "3", "2")


def test_f040_the_gate_is_a_natural_logarithm_and_says_so(library):
    inputs = G(40, 1, 8, 1, 4, 3).inputs("gated_delta_rule")
    for gate, text in ((0.9, "-158.569998694"), (math.log(0.9), "-0.503216575214")):
        filled = inputs | {"log_decay": np.full_like(inputs["log_decay"], gate)}
        printed(library.numpy(call(library, "gated_delta_rule", filled).output).sum(), text)
    for keyword in ("g", "alpha"):
        renamed = {keyword if name == "log_decay" else name: x for name, x in inputs.items()}
        with pytest.raises(TypeError) as refused:
            call(library, "gated_delta_rule", renamed)
        assert isinstance(refused.value, scanfield.ScanfieldError)
        says(refused, keyword, "log_decay")
    assert "natural log" in scanfield.gated_delta_rule.__doc__


def test_f041_bad_boundaries_are_refused(library):
    inputs = G(52, 1, 100, 2, 4, 3).inputs()
    for boundaries, words in (
        ([0, 40, 90], ("90", "100")),
        ([0, 50, 40, 100], ("50", "40")),
        ([1, 100], ("1", "0")),
    ):
        kinds = [boundaries, np.array(boundaries)]
        if library.name != "dask":  # whose arrays have no values yet
            kinds.append(library.array(np.array(boundaries)))
        for given in kinds:
            with pytest.raises(scanfield.ShapeError) as refused:
                call(library, "gdn2", inputs, cu_seqlens=given)
            says(refused, "cu_seqlens", *words)
    if library.name == "dask":
        with pytest.raises(scanfield.ArgumentError) as refused:
            call(library, "gdn2", inputs, cu_seqlens=library.array(np.array([0, 40, 100])))
        says(refused, "cu_seqlens", "compute()")
    two = G(52, 2, 100, 2, 4, 3).inputs()
    with pytest.raises(scanfield.ShapeError) as refused:
        call(library, "gdn2", two, cu_seqlens=[0, 40, 100])
    says(refused, "cu_seqlens", "batch", "2")
    floats = np.array([0.0, 40.0, 100.0])
    for given in (floats, library.array(floats), [0.0, 40.0, 100.0]):
        with pytest.raises(scanfield.DtypeError) as refused:
            call(library, "gdn2", inputs, cu_seqlens=given)
        says(refused, "cu_seqlens")
    for keyword in ("attention_mask", "cu_seqlen"):
        with pytest.raises(TypeError) as refused:
            call(library, "gdn2", inputs, **{keyword: [0, 40, 100]})
        assert isinstance(refused.value, scanfield.ScanfieldError)
        says(refused, keyword)


@pytest.mark.backend("torch")
def test_f042_torch_and_numpy_do_not_mix(library):
    drawn = G(53, 1, 4, 1, 3, 2)
    inputs = library.arrays(drawn.inputs())
    with pytest.raises(scanfield.BackendError) as refused:
        scanfield.gdn2(**inputs, initial_state=drawn.state)
    assert isinstance(refused.value, TypeError)
    says(refused, "initial_state", "numpy", "torch", "initial_state = torch.as_tensor(initial_state")
    with pytest.raises(scanfield.BackendError) as refused:
        scanfield.gdn2(**drawn.inputs(), initial_state=library.array(drawn.state))
    says(
        refused,
        "initial_state",
        "numpy",
        "torch",
        "query = torch.as_tensor(query",
        "write = torch.as_tensor(write",
    )


@pytest.mark.backend("jax")
def test_f042_jax_and_numpy_do_not_mix(library):
    drawn = L(53, 1, 4, 2)
    for a, b in ((library.array(drawn.a), drawn.b), (drawn.a, library.array(drawn.b))):
        with pytest.raises(scanfield.BackendError) as refused:
            scanfield.linear_scan(a, b)
        assert isinstance(refused.value, TypeError)
        says(refused, "jax", "numpy", " = jax.numpy.asarray(")


@pytest.mark.backend("numpy")
def test_f042_matrices_and_masked_arrays_are_refused():
    drawn = L(53, 1, 4, 2)
    masked = np.ma.masked_array(drawn.b, drawn.b > 0)
    with pytest.raises(scanfield.BackendError) as refused:
        scanfield.linear_scan(drawn.a, masked)
    says(refused, "b", "MaskedArray")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PendingDeprecationWarning)  # NumPy's own advice against the class
        A = np.asmatrix(np.ones((2, 3)))
    sequence = np.ones((1, 4, 2))
    states = np.ones((1, 4, 3))
    with pytest.raises(scanfield.BackendError) as refused:
        scanfield.selective_scan(sequence, sequence, A, states, states)
    says(refused, "A", "matrix")
