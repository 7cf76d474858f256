"""Dask arrays in blocks along any axes: results, gradients, steps, states and summaries are those of whole arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from arrays import Library, deviation
from checks import operation
from examples import BASE, EXAMPLES, GRAPHS, PACKED, Example, example, op_inputs, rng_of
from golden_adapter import GoldenCall, scan_cases

import scanfield

pytestmark = pytest.mark.backend("dask")

RUNS = [
    pytest.param(e, form, id=f"{e}-{form}")
    for e in EXAMPLES
    for form in (GRAPHS if e.op in BASE else GRAPHS[1:])  # the derived ones have no graph of their own
]


def cut(library: Library, inputs: dict[str, np.ndarray], name: str, dtype: str = "float64") -> dict[str, Any]:
    """Arrays in random blocks, each array in its own: up to three along time, two along the other axes."""
    rng = rng_of(f"{name} blocks")
    found = {}
    for n, x in inputs.items():
        chunks = []
        for axis, size in enumerate(x.shape):
            bounds = sorted({0, size, *rng.integers(0, size + 1, 2 if axis == 1 else 1).tolist()})
            chunks.append(tuple(np.diff(bounds).tolist()) or (0,))
        found[n] = library.array(x, dtype).rechunk(tuple(chunks))
    return found


def same(got: Any, want: np.ndarray, lazy: Any) -> None:
    """A computed array is right, and what the lazy one said of itself before is true."""
    assert deviation(got, want) <= 1e-12
    assert lazy.dtype == got.dtype
    assert lazy.shape == got.shape


@pytest.mark.parametrize(("example", "form"), RUNS)
def test_every_option_in_random_blocks(library: Library, example: Example, form: str):
    arrays = cut(library, dict(example.inputs), f"{example.name} {form}")
    result, pullback = scanfield.vjp(operation(example.op), **arrays, **example.options, method=form)
    d_output, d_final = cut(library, dict(zip("yS", example.cotangents(), strict=True)), form).values()
    gradients = pullback(d_output, d_final)
    got = library.dask.compute(*result, gradients)
    same(got[0], example.truth().output, result.output)
    same(got[1], example.truth().final_state, result.final_state)
    for name, want in example.gradients().items():
        same(got[2][name], want, gradients[name])


@pytest.mark.parametrize("form", GRAPHS)
@pytest.mark.parametrize("call", scan_cases(), ids=lambda call: call.case.name)
def test_golden_cases_in_random_blocks(library: Library, call: GoldenCall, form: str):
    case, dtype = call.case, "float64"
    arrays = cut(library, dict(call.inputs), f"{case.name} {form}", dtype)
    result, pullback = scanfield.vjp(operation(case.op), **arrays, **call.options, method=form)
    gradients = pullback(*(library.array(case.cotangents[n], dtype) for n in ("output", "final_state")))
    output, state, found = library.dask.compute(*result, gradients)
    got = {"expected/output": output, "expected/final_state": state}
    got |= {f"gradient/{name}": gradient for name, gradient in found.items()}
    assert set(got) == set(case.keys())
    errors = {key: case.error(key, x, dtype) for key, x in got.items()}
    assert all(error <= 1 for error in errors.values()), {k: e for k, e in errors.items() if not e <= 1}


@pytest.mark.parametrize("op", BASE)
@pytest.mark.parametrize("form", GRAPHS)
@pytest.mark.parametrize("alone", ["d_output", "d_final_state"])
def test_each_cotangent_alone(library: Library, op: str, form: str, alone: str):
    inputs = op_inputs(op, f"{op} one cotangent")
    whole, whole_pullback = scanfield.vjp(operation(op), **inputs)
    result, pullback = scanfield.vjp(operation(op), **cut(library, inputs, form), method=form)
    like = whole.output if alone == "d_output" else whole.final_state
    assert result.output.numblocks[1] > 1
    got = library.dask.compute(pullback(**{alone: library.array(np.ones(like.shape))}))[0]
    for name, want in whole_pullback(**{alone: np.ones(like.shape)}).items():
        # NumPy's own kernels sum in their own order.
        assert deviation(got[name], want, floor=1.0) <= 1e-12, name


@pytest.mark.parametrize("op", BASE)
@pytest.mark.parametrize("form", GRAPHS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_summaries_and_states_between(library: Library, op: str, form: str, packed: bool, reverse: bool):
    more: dict[str, Any] = {"reverse": reverse}
    if packed:
        more["cu_seqlens"] = PACKED
    inputs = op_inputs(
        op, f"{op} between", batch=1 if packed else 2, states=len(PACKED) - 1 if packed else None
    )
    for size in (1, 2, 3):
        arrays = {n: library.array(x).rechunk({1: size} if x.ndim > 2 else {}) for n, x in inputs.items()}
        state, given = arrays.pop("initial_state"), dict(inputs)
        want_state = given.pop("initial_state")
        whole = scanfield.summarise(operation(op), **given, **more)
        block = scanfield.summarise(operation(op), **arrays, **more, method=form)
        same(block.transition.compute(), whole.transition, block.transition)
        same(block.state.compute(), whole.state, block.state)
        assert block.diagonal == whole.diagonal
        want = scanfield.apply(operation(op), want_state, **given, **more, states_at=[0, 2, 7])
        found = scanfield.apply(operation(op), state, **arrays, **more, states_at=[0, 2, 7], method=form)
        for lazy, right in zip(found, want, strict=True):
            same(lazy.compute(), right, lazy)


@pytest.mark.parametrize("op", BASE)
def test_a_step_in_blocks(library: Library, op: str):
    inputs = op_inputs(op, f"{op} step in blocks")
    shared = ("A", "D", "delta_bias", "initial_state")
    token = {n: x if n in shared else x[:, 0, ...] for n, x in inputs.items()}
    arrays = cut(library, token, f"{op} step")
    output, state = operation(op).step(arrays.pop("initial_state"), **arrays)
    want, want_state = operation(op).step(token.pop("initial_state"), **token)
    same(output.compute(), want, output)
    same(state.compute(), want_state, state)


@pytest.mark.parametrize("form", GRAPHS)
def test_a_pack_whatever_the_blocks(library: Library, form: str):
    """Sequences that are empty, that end with a block, that span several, that share one."""
    bounds = [0, 0, 4, 4, 5, 6, 13, 13, 20, 20]
    for op in BASE:
        inputs = op_inputs(op, f"{op} long pack", batch=1, time=20, states=len(bounds) - 1)
        (want, want_state), back = scanfield.vjp(operation(op), **inputs, cu_seqlens=bounds)
        wanted = back(want, want_state)
        for size in (1, 2, 3, 4, 7, 19):
            arrays = {n: library.array(x).rechunk({1: size} if x.ndim > 2 else {}) for n, x in inputs.items()}
            result, pullback = scanfield.vjp(operation(op), **arrays, cu_seqlens=bounds, method=form)
            got = library.dask.compute(*result, pullback(*result))
            assert deviation(got[0], want) <= 1e-12, (op, size)
            assert deviation(got[1], want_state) <= 1e-12, (op, size)
            for name, gradient in wanted.items():
                assert deviation(got[2][name], gradient) <= 1e-11, (op, size, name)


@pytest.mark.parametrize("form", GRAPHS)
@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 0, 3), (2, 4, 0), (0, 0, 0)])
def test_blocks_of_no_size(library: Library, form: str, shape: tuple[int, ...]):
    """Empty axes, and empty blocks beside full ones."""
    xp = library.xp
    a, b = (library.da.ones(shape, chunks=tuple((0, n, 0) for n in shape)) for _ in range(2))
    result, pullback = scanfield.vjp(scanfield.linear_scan, a, b, method=form)
    gradients = pullback(xp.ones(shape), xp.ones((shape[0], shape[2])))
    assert result.output.compute().shape == gradients["a"].compute().shape == shape
    assert result.final_state.compute().shape == (shape[0], shape[2])
    u = library.da.ones((2, 4, 3), chunks=((2, 0), (0, 2, 2), (3,)))
    assert deviation(
        library.numpy(scanfield.linear_scan(u, u, method=form).output),
        np.broadcast_to(np.arange(1.0, 5.0)[:, None], (2, 4, 3)),
    ) == 0  # fmt: skip


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("op", BASE)
def test_what_a_lazy_array_says_of_its_dtype(library: Library, op: str, dtype: str):
    import ml_dtypes

    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    inputs = {n: x.astype(kind) for n, x in op_inputs(op, f"{op} kinds").items()}
    arrays = {n: library.da.from_array(x, chunks=2) for n, x in inputs.items()}
    lazy, pullback = scanfield.vjp(operation(op), **arrays)
    found = {
        "output": lazy.output,
        "final_state": lazy.final_state,
        **pullback(lazy.output, lazy.final_state),
    }
    computed = library.dask.compute(found)[0]
    for name, array in found.items():
        assert computed[name].dtype == array.dtype == (np.float32 if name == "final_state" else kind), name
        assert type(array._meta) is np.ndarray
    want = scanfield.vjp(operation(op), **inputs)[0]
    tolerance = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 4e-6}[dtype]
    assert deviation(computed["output"].astype(float), want.output.astype(float)) <= tolerance


def test_heads_that_share_a_query(library: Library):
    """Blocks of value heads that are cut within a group and across groups: query's gradient adds up over them."""
    e = example("gdn2: grouped heads, gates a head")
    want = e.gradients()
    vheads = e.inputs["value"].shape[2]
    assert vheads // e.inputs["query"].shape[2] > 1
    for size in range(1, vheads + 1):
        arrays = library.arrays(e.inputs)
        arrays["value"] = arrays["value"].rechunk({2: size, 3: 2})
        _, pullback = scanfield.vjp(scanfield.gdn2, **arrays, **e.options)
        gradients = library.dask.compute(pullback(*(library.array(x) for x in e.cotangents())))[0]
        for name, right in want.items():
            assert deviation(gradients[name], right) <= 1e-12, (size, name)
