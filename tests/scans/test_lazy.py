"""Libraries that do not compute at once: nothing may ask for a value, and any partition gives the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from arrays import Library, deviation
from checks import operation
from examples import BASE, Example, methods, op_inputs

import scanfield


def example(op: str) -> Example:
    return Example(f"{op} lazy", op, op_inputs(op, f"{op} lazy", time=4))


def refuse(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("something asked for the values of a lazy array")


@pytest.mark.backend("dask")
@pytest.mark.parametrize("op", [*BASE, "gated_delta_product", "ssd"])
def test_dask_computes_nothing(library: Library, op: str):
    """Building the graph of forward, gradients, step and summary computes no block."""
    import dask

    e = example(op)
    inputs = library.arrays(e.inputs)
    token = {n: x if n in ("A", "D", "delta_bias", "dt_bias") else x[:, 0, ...] for n, x in inputs.items()}
    with dask.config.set(scheduler=refuse):
        result, pullback = scanfield.vjp(operation(op), **inputs)
        gradients = pullback(result.output, result.final_state)
        state = token.pop("initial_state")
        operation(op).step(inputs["initial_state"], **token)
        rest = {n: x for n, x in inputs.items() if n != "initial_state"}
        scanfield.summarise(operation(op), **rest)
    assert state is not None
    assert deviation(library.numpy(result.output), e.truth().output) <= 1e-12
    assert all(library.is_array(g) for g in gradients.values())


@pytest.mark.backend("dask")
@pytest.mark.parametrize("op", BASE)
@pytest.mark.parametrize("blocks", [1, 2])
def test_dask_blocks_are_a_matter_of_cost(library: Library, op: str, blocks: int):
    """Arrays cut along every axis (time too) into blocks of 1 or 2."""
    e = example(op)
    inputs = {n: library.array(x).rechunk(blocks) for n, x in e.inputs.items()}
    d_output, d_final = (library.array(x) for x in e.cotangents())
    result, pullback = scanfield.vjp(operation(op), **inputs)
    assert deviation(library.numpy(result.output), e.truth().output) <= 1e-12
    assert deviation(library.numpy(result.final_state), e.truth().final_state) <= 1e-12
    gradients = pullback(d_output, d_final)
    for name, want in e.gradients().items():
        assert deviation(library.numpy(gradients[name]), want) <= 1e-12, name


@pytest.mark.backend("jax")
@pytest.mark.parametrize("op", BASE)
def test_jax_under_its_guards(library: Library, op: str):
    """No value leaves the device, no tracer leaks, and no dtype is promoted without being asked to."""
    jax = library.jax
    e = example(op)
    inputs = library.arrays(e.inputs, "float32")
    cotangents = tuple(library.array(x, "float32") for x in e.cotangents("float32"))

    def both(inputs: Any, cotangents: Any) -> Any:
        result, pullback = scanfield.vjp(
            operation(op), **inputs, method=methods(library, op)[-1], chunk_size=2
        )
        return result, pullback(*cotangents)

    with jax.checking_leaks(), jax.transfer_guard("disallow"), jax.numpy_dtype_promotion("strict"):
        result, gradients = jax.jit(both)(inputs, cotangents)
    assert deviation(library.numpy(result.output), e.truth("float32").output) <= 4e-6
    for name, want in e.gradients("float32").items():
        assert deviation(library.numpy(gradients[name]), want, floor=1e-1) <= 4e-6, name


@pytest.mark.backend("jax")
@pytest.mark.parametrize("op", BASE)
def test_jax_maps_over_a_new_axis(library: Library, op: str):
    """`vmap` of a call is that call on each."""
    e = example(op)
    inputs = library.arrays(e.inputs)
    two = {n: library.xp.stack([x, x * 0.5]) for n, x in inputs.items()}
    got = library.jax.jit(library.jax.vmap(lambda x: operation(op)(**x)))(two)
    half = Example(f"{op} half", op, {n: x * 0.5 for n, x in e.inputs.items()})
    assert deviation(library.numpy(got.output)[0], e.truth().output) <= 1e-12
    assert deviation(library.numpy(got.output)[1], half.truth().output) <= 1e-12


def torch_function(library: Library, e: Example) -> tuple[Any, tuple[Any, ...]]:
    """The call as a function of positional arrays, which transforms want, and the arrays."""
    inputs = library.arrays(e.inputs)
    names = list(inputs)
    return lambda *x: tuple(operation(e.op)(**dict(zip(names, x, strict=True)))), tuple(inputs.values())


@pytest.mark.backend("torch")
@pytest.mark.parametrize("op", BASE)
def test_torch_vmap(library: Library, op: str):
    """`vmap` of a call is that call on each."""
    function, arrays = torch_function(library, e := example(op))
    output = library.torch.func.vmap(function)(*(library.torch.stack([x, x * 0.5]) for x in arrays))[0]
    half = Example(f"{op} half", op, {n: x * 0.5 for n, x in e.inputs.items()})
    assert deviation(library.numpy(output[0]), e.truth().output) <= 1e-12
    assert deviation(library.numpy(output[1]), half.truth().output) <= 1e-12


@pytest.mark.backend("torch")
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch warns of its own use of it
@pytest.mark.parametrize("op", BASE)
def test_torch_forward_mode(library: Library, op: str):
    """Tangents are not silently zero: the same directional derivative as the gradients give."""
    function, arrays = torch_function(library, e := example(op))
    _, slopes = library.torch.func.jvp(function, arrays, tuple(library.torch.ones_like(x) for x in arrays))
    along = sum(float(np.sum(g)) for g in e.gradients().values())
    cotangents = [library.array(x) for x in e.cotangents()]
    found = sum(float((c * s).sum()) for c, s in zip(cotangents, slopes, strict=True))
    assert abs(found - along) <= 1e-10 * max(abs(along), 1.0)


@pytest.mark.backend("torch")
@pytest.mark.parametrize("op", BASE)
def test_torch_gradcheck(library: Library, op: str):
    """First and second derivatives of the plain operations, by torch's own check."""
    e = Example(f"{op} gradcheck", op, op_inputs(op, f"{op} gradcheck", batch=1, time=2))
    function, arrays = torch_function(library, e)
    arrays = tuple(x.requires_grad_() for x in arrays)
    assert library.torch.autograd.gradcheck(function, arrays)
    assert library.torch.autograd.gradgradcheck(function, arrays)
