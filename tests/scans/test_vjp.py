"""`vjp` and `check_gradients`: how arrays are named and chosen, and that a wrong gradient is shown as wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from arrays import Library, deviation, same_bits
from checks import operation
from examples import BASE, METHODS, OPERATIONS, op_inputs

import scanfield
from scanfield import layers
from scanfield.errors import ArgumentError


def inputs_of(library: Library, op: str) -> dict[str, Any]:
    return library.arrays(op_inputs(op, f"{op} vjp", time=library.time(4)))


def leave_out(backend: str, test: str, given: dict[str, Any]) -> bool:
    """Eager calls compile step by step on JAX, and are many tasks on Dask: the base operations stand for the others."""
    return backend in ("jax", "dask") and given.get("op", "gdn2") not in BASE


@pytest.mark.parametrize("op", OPERATIONS)
def test_arrays_by_position_and_by_name(library: Library, op: str):
    """As in the call: the first ones by position, the others by name; the same numbers and the same names
    come back.
    """
    inputs = inputs_of(library, op)
    order = [entry.name for entry in operation(op).record.inputs if entry.name in inputs]
    assert set(order) == set(inputs)
    named, pull_named = scanfield.vjp(operation(op), **inputs)
    leading = order[:2]
    rest = {n: x for n, x in inputs.items() if n not in leading}
    mixed, pull_mixed = scanfield.vjp(operation(op), *(inputs[n] for n in leading), **rest)
    want = pull_named(named.output, named.final_state)
    got = pull_mixed(d_output=mixed.output, d_final_state=mixed.final_state)
    assert list(want) == list(got) == order  # in the order of the arguments
    for name in order:
        assert same_bits(library.raw(got[name]), library.raw(want[name])), name
    direct = operation(op)(**inputs)
    assert same_bits(library.raw(direct.output), library.raw(named.output))
    assert same_bits(library.raw(direct.final_state), library.raw(named.final_state))


@pytest.mark.parametrize("op", OPERATIONS)
def test_wrt_gives_the_wanted_gradients_only(library: Library, op: str):
    inputs = inputs_of(library, op)
    result, pullback = scanfield.vjp(operation(op), **inputs)
    whole = pullback(result.output, result.final_state)
    subsets = [[name] for name in inputs] + [list(inputs)[1:3]]
    for wrt in subsets[:: 3 if library.name in ("jax", "dask") else 1]:
        _, some = scanfield.vjp(operation(op), **inputs, wrt=wrt)
        got = some(result.output, result.final_state)
        assert set(got) == set(wrt)
        for name in wrt:
            assert deviation(library.numpy(got[name]), library.numpy(whole[name])) <= 1e-14, name
    (name, *_) = inputs
    assert set(scanfield.vjp(operation(op), **inputs, wrt=name)[1](result.output)) == {
        name
    }  # a word is one name
    assert scanfield.vjp(operation(op), **inputs, wrt=[])[1](result.output) == {}


@pytest.mark.parametrize("op", BASE)
def test_wrt_names_what_it_does_not_know(library: Library, op: str):
    inputs = inputs_of(library, op)
    with pytest.raises(scanfield.ArgumentError, match=r"wrt.*'keys'") as caught:
        scanfield.vjp(operation(op), **inputs, wrt=["keys"])
    assert all(name in str(caught.value) for name in inputs)
    del inputs["initial_state"]
    with pytest.raises(scanfield.ArgumentError, match="initial_state"):  # known, but not given
        scanfield.vjp(operation(op), **inputs, wrt="initial_state")


def test_cu_seqlens_has_no_gradient(library: Library):
    inputs = library.arrays(op_inputs("gdn2", "index", batch=1, time=3, states=2))
    result, pullback = scanfield.vjp(scanfield.gdn2, **inputs, cu_seqlens=[0, 2, 3])
    assert "cu_seqlens" not in pullback(result.output)
    with pytest.raises(scanfield.ArgumentError, match="cu_seqlens"):
        scanfield.vjp(scanfield.gdn2, **inputs, cu_seqlens=[0, 2, 3], wrt="cu_seqlens")


@pytest.mark.parametrize("op", BASE)
def test_pullback_may_be_called_again(library: Library, op: str):
    """Nothing is used up: the same cotangents give the same bits, and other ones are not added to the first."""
    inputs = inputs_of(library, op)
    result, pullback = scanfield.vjp(operation(op), **inputs)
    first = pullback(result.output, result.final_state)
    pullback(result.output * 2.0, None)
    again = pullback(result.output, result.final_state)
    for name in first:
        assert same_bits(library.raw(first[name]), library.raw(again[name])), name


@pytest.mark.parametrize("op", BASE)
def test_a_cotangent_that_does_not_fit_is_refused(library: Library, op: str):
    inputs = inputs_of(library, op)
    result, pullback = scanfield.vjp(operation(op), **inputs)
    with pytest.raises(scanfield.ShapeError, match="d_output") as caught:
        pullback(result.output[:, :-1, ...])
    assert str(tuple(result.output.shape)) in str(caught.value)
    with pytest.raises(scanfield.ShapeError, match="d_final_state"):
        pullback(None, result.final_state[:-1, ...])
    with pytest.raises(scanfield.ScanfieldError, match="d_output"):
        pullback(1.0)


@pytest.mark.backend("strict", "torch", "jax", "dask", "cupy")
def test_a_cotangent_of_another_library_is_refused(library: Library):
    result, pullback = scanfield.vjp(scanfield.linear_scan, **inputs_of(library, "linear_scan"))
    with pytest.raises(scanfield.BackendError, match="d_output"):
        pullback(np.ones(result.output.shape))


def test_vjp_of_something_else_is_refused():
    with pytest.raises(scanfield.ArgumentError, match="linear_scan"):
        scanfield.vjp(np.cumsum, np.ones(3))


# -- check_gradients -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("op", OPERATIONS)
def test_true_gradients_show_small_errors(library: Library, op: str):
    if library.name == "jax" and op not in BASE:
        pytest.skip(
            "a scan is compiled anew for each perturbed array; the base operations stand for the others"
        )
    inputs = inputs_of(library, op)
    report = scanfield.check_gradients(operation(op), **inputs, directions=1 if library.short else 2)
    assert [row.name for row in report.rows] == [
        e.name for e in operation(op).record.inputs if e.name in inputs
    ]
    assert 0 < report.worst < 1e-7
    assert report.worst == max(row.error for row in report.rows)
    table = str(report)
    assert all(name in table for name in inputs) and op in table


@pytest.mark.backend("numpy")
@pytest.mark.parametrize("shape", [(2, 5, 3, 1), (2, 1, 1, 4), (1, 5, 3, 4), (1, 1, 1, 1)])
def test_a_broadcast_gate_gathers_its_gradient(shape: tuple[int, ...]):
    """Axes of size 1 are broadcast, any of them; their gradient is the sum over what they were broadcast to."""
    rng = np.random.default_rng(3)
    a, b = rng.uniform(0.5, 1, shape), rng.standard_normal((2, 5, 3, 4))
    full, back = scanfield.vjp(scanfield.linear_scan, np.broadcast_to(a, b.shape).copy(), b)
    small, back_small = scanfield.vjp(scanfield.linear_scan, a, b)
    d = rng.standard_normal(b.shape)
    want, got = back(d, None), back_small(d, None)
    ones = tuple(i for i, size in enumerate(shape) if size != b.shape[i])
    assert deviation(small.output, full.output) <= 1e-15 and deviation(got["b"], want["b"]) <= 1e-15
    assert deviation(got["a"], want["a"].sum(axis=ones, keepdims=True)) <= 1e-13


def test_a_complex_gradient_is_checked_in_both_parts(library: Library):
    from examples import linear_inputs

    inputs = library.arrays(linear_inputs("check complex", time=3, complex_=True))
    assert scanfield.check_gradients(scanfield.linear_scan, **inputs).worst < 1e-7


def test_single_precision_says_what_it_can(library: Library):
    inputs = library.arrays(op_inputs("gdn2", "check single", time=library.time(4)), "float32")
    report = scanfield.check_gradients(scanfield.gdn2, **inputs, directions=1)
    assert report.worst < 2e-2 and "float32" in str(report)


def test_wrt_limits_the_check(library: Library):
    inputs = library.arrays(op_inputs("gdn2", "check wrt", time=library.time(3)))
    report = scanfield.check_gradients(scanfield.gdn2, **inputs, wrt=["log_decay", "erase"], directions=1)
    assert {row.name for row in report.rows} == {"log_decay", "erase"}


@pytest.mark.backend("numpy")
@pytest.mark.parametrize("wrong", ["query", "key", "value", "log_decay", "erase", "write", "initial_state"])
@pytest.mark.parametrize("method", METHODS["gdn2"])
def test_a_planted_wrong_gradient_is_shown(library: Library, monkeypatch, wrong: str, method: str):
    """One gradient is made 1 % too large in one single entry: its row must show it, the other rows must not."""
    from scanfield.dispatch import implementation

    record, form = scanfield.gdn2.record, implementation("gdn2", method)
    place = [entry.name for entry in record.inputs].index(wrong)
    true = type(form).backward

    def planted(self, *args, **kwargs):
        grads = list(true(self, *args, **kwargs))
        grads[place] = np.array(grads[place])
        grads[place][(0,) * grads[place].ndim] *= 1.01
        return tuple(grads)

    inputs = library.arrays(op_inputs("gdn2", "planted", batch=1, time=3))
    clean = scanfield.check_gradients(scanfield.gdn2, **inputs, method=method)
    monkeypatch.setattr(type(form), "backward", planted)
    report = scanfield.check_gradients(scanfield.gdn2, **inputs, method=method)
    errors = {row.name: row.error for row in report.rows}
    assert clean.worst < 1e-7
    assert errors.pop(wrong) > 1e-5
    assert report.worst > 1e-5 and max(errors.values()) < 1e-7


WRONG = [
    ((), {"d_out": 1}, "pullback: unknown keyword 'd_out'; did you mean 'd_output'[?] it takes d_output, "),
    ((1, 2, 3), {}, "pullback: 3 arguments came; it takes 2: d_output, "),
    ((), {}, "pullback: d_output or .* is needed, both are None"),
]


@pytest.mark.parametrize(("args", "kwargs", "words"), WRONG)
def test_a_pullback_that_is_called_in_another_way(args, kwargs, words):
    x = np.full((1, 4, 2), 0.5)
    made = [
        scanfield.vjp(scanfield.linear_scan, x, x),
        layers.causal_conv1d_vjp(x, x[0].T),
        layers.Linear(2, 3).init(0, np, dtype="float64").vjp(x),
    ]
    for _, pullback in made:
        with pytest.raises(ArgumentError, match=words):
            pullback(*args, **kwargs)
