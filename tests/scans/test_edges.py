"""The smallest and the oddest shapes: no tokens, no rows, packed sequences of length 0 and 1, sizes of 1."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from arrays import Library, deviation, same_bits
from checks import call, operation, vjp
from examples import BASE, DELTA_FAMILY, OPERATIONS, PACKED, Example, family_inputs, methods, op_inputs

import scanfield
from scanfield.scans.binding import bind


def leave_out(backend: str, test: str, given: dict[str, Any]) -> bool:
    if backend not in ("jax", "dask"):
        return False
    if test == "test_sizes_of_one":
        return given["op"] != "kda" or given["K"] == given["V"]
    return given.get("op", "gdn2") not in BASE or given.get("reverse") is False


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("op", OPERATIONS)
def test_no_tokens(library: Library, op: str, reverse: bool):
    """T = 0: output has no tokens, the final state is the initial one, its gradient the cotangent, all others
    zero.
    """
    inputs = op_inputs(op, f"{op} no tokens", time=0)
    e = Example(f"{op} no tokens {reverse}", op, inputs, {"reverse": reverse})
    d_output, d_final = e.cotangents()
    for method in (None, *methods(library, op)):
        got = vjp(library, op, inputs, (d_output, d_final), reverse=reverse, method=method)
        assert tuple(got.output.shape) == e.truth().output.shape and 0 in got.output.shape
        assert same_bits(library.numpy(got.final_state), inputs["initial_state"])
        assert same_bits(library.numpy(got.gradients["initial_state"]), d_final)
        for name, x in inputs.items():
            assert tuple(got.gradients[name].shape) == x.shape
            if name != "initial_state":
                assert not library.numpy(got.gradients[name]).any()


@pytest.mark.parametrize("op", OPERATIONS)
def test_no_tokens_and_no_state(library: Library, op: str):
    inputs = op_inputs(op, f"{op} nothing", time=0)
    shape = inputs.pop("initial_state").shape
    got = call(library, op, inputs)
    assert tuple(got.final_state.shape) == shape
    assert not library.numpy(got.final_state).any()


@pytest.mark.parametrize("op", OPERATIONS)
def test_no_rows(library: Library, op: str):
    """Batch 0 gives empty arrays of the right shapes; gradients of what is shared by all rows are zero."""
    inputs = op_inputs(op, f"{op} no rows", batch=0, time=3)
    for method in (None, *methods(library, op)):
        e = Example(f"{op} no rows", op, inputs)
        got = vjp(library, op, inputs, e.cotangents(), method=method)
        assert tuple(got.output.shape) == e.truth().output.shape
        assert tuple(got.final_state.shape) == e.truth().final_state.shape
        for name, x in inputs.items():
            assert tuple(got.gradients[name].shape) == x.shape
            assert not library.numpy(got.gradients[name]).any()


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("op", OPERATIONS)
def test_empty_and_single_token_sequences(library: Library, op: str, reverse: bool):
    """Each packed sequence equals its own call; an empty one returns its state and the gradient of it."""
    inputs = op_inputs(op, f"{op} packed sequences", batch=1, time=7, states=5)
    options = {"reverse": reverse}
    timed = [n for n in inputs if n not in ("A", "D", "delta_bias", "dt_bias", "initial_state")]
    d_state = np.random.default_rng(1).standard_normal(inputs["initial_state"].shape)
    for method in methods(library, op):
        packed = vjp(
            library, op, inputs, (None, d_state), cu_seqlens=PACKED, method=method, chunk_size=2, **options
        )
        output, state = library.numpy(packed.output), library.numpy(packed.final_state)
        assert state.shape == inputs["initial_state"].shape
        for i, (lo, hi) in enumerate(pairwise(PACKED)):
            if hi == lo:
                assert same_bits(state[i], inputs["initial_state"][i])
                assert same_bits(library.numpy(packed.gradients["initial_state"])[i], d_state[i])
                continue
            own = {n: x[:, lo:hi] if n in timed else x for n, x in inputs.items()}
            own["initial_state"] = inputs["initial_state"][i : i + 1]
            alone = Example(f"{op} alone {i} {reverse}", op, own, options).truth()
            assert deviation(output[:, lo:hi], alone.output) <= 1e-12
            assert deviation(state[i : i + 1], alone.final_state) <= 1e-12


@pytest.mark.parametrize("op", ["linear_scan", "selective_scan", "gdn2"])
def test_every_form_of_cu_seqlens_is_the_same(library: Library, op: str):
    """An index, not data: a list, a tuple, NumPy integers of any width, or integers of the arrays' own
    library.
    """
    cuts = [0, 2, 2, 3]
    inputs = op_inputs(op, f"{op} forms", batch=1, time=3, states=3)
    want = operation(op)(**library.arrays(inputs), cu_seqlens=cuts)
    forms = [
        tuple(cuts),
        np.asarray(cuts),
        np.asarray(cuts, dtype=np.int32),
        np.asarray(cuts, dtype=np.uint8),
    ]
    if library.name != "dask":  # whose values are not at hand: refused, see the tests of bad input
        forms.append(library.array(np.asarray(cuts)))
    for form in forms:
        got = operation(op)(**library.arrays(inputs), cu_seqlens=form)
        assert same_bits(library.raw(got.output), library.raw(want.output)), type(form)
        assert same_bits(library.raw(got.final_state), library.raw(want.final_state)), type(form)


@pytest.mark.parametrize("op", ["linear_scan", "selective_scan", "gdn2"])
def test_only_empty_sequences(library: Library, op: str):
    inputs = op_inputs(op, f"{op} only empty", batch=1, time=0, states=3)
    got = call(library, op, inputs, cu_seqlens=[0, 0, 0, 0])
    assert same_bits(library.numpy(got.final_state), inputs["initial_state"])


@pytest.mark.parametrize("op", ["linear_scan", "selective_scan", "gdn2"])
def test_no_sequences(library: Library, op: str):
    """cu_seqlens = [0]: zero sequences in zero tokens."""
    inputs = op_inputs(op, f"{op} no sequences", batch=1, time=0, states=0)
    for method in (None,) if library.name in ("jax", "dask") else (None, "generic"):
        got = call(library, op, inputs, cu_seqlens=[0], method=method)
        assert got.final_state.shape[0] == 0 and got.output.shape[1] == 0


@pytest.mark.parametrize("op", DELTA_FAMILY)
@pytest.mark.parametrize(("K", "V"), [(1, 3), (3, 1), (1, 1)])
def test_sizes_of_one(library: Library, op: str, K: int, V: int):
    """An axis of size 1 is not an axis that is missing: no gate may be taken for a broadcast one."""
    inputs = family_inputs(op, f"{op} {K} {V}", batch=1, time=library.time(5), heads=1, vheads=2, K=K, V=V)
    e = Example(f"{op} {K} {V}", op, inputs)
    for method in methods(library, op):
        got = call(library, op, inputs, method=method, chunk_size=4)
        assert deviation(library.numpy(got.output), e.truth().output) <= 1e-12
        assert deviation(library.numpy(got.final_state), e.truth().final_state) <= 1e-12


@pytest.mark.backend("numpy")
def test_limits_that_meet_are_a_constant_step():
    """A step that lies on them already is not changed, and its gradient passes (as through torch.clamp)."""
    inputs = op_inputs("selective_scan", "constant step")
    steps = np.full_like(inputs["delta"], 0.3) - inputs["delta_bias"]
    got = scanfield.selective_scan(**inputs, dt_limit=(0.3, 0.3))
    want = scanfield.selective_scan(**{**inputs, "delta": steps})
    assert deviation(got.output, want.output) <= 1e-14
    inputs |= {"delta": np.full_like(steps, 0.25), "delta_bias": np.zeros_like(inputs["delta_bias"])}
    for method in (None, "generic"):
        (_, free), (_, held) = (
            scanfield.vjp(scanfield.selective_scan, **inputs, dt_limit=limit, method=method)
            for limit in (None, (0.25, 0.25))
        )
        assert np.array_equal(held(want.output)["delta"], free(want.output)["delta"])


@pytest.mark.backend("numpy")
@pytest.mark.parametrize(("time", "lanes"), [(1, 2), (2, 2), (3, 1)])
def test_states_of_a_scan_with_one_coefficient_for_all_tokens(time: int, lanes: int):
    a, b = np.full((1, 1, lanes), 0.5), np.random.default_rng(4).random((1, time, lanes))
    got = scanfield.linear_scan(a, b, states_at=list(range(1, time + 1)))
    assert np.array_equal(got.states, got.output)
    assert np.array_equal(got.output, scanfield.linear_scan(np.full_like(b, 0.5), b).output)


@pytest.mark.backend("numpy")
def test_one_lane_for_all_stays_one():
    """Whatever the lanes' axes: what runs the call never sees it in full, unless one of its axes is the others'."""
    record, b = scanfield.linear_scan.record, np.ones((2, 5, 3, 2))
    for lanes, seen in (((1, 1), 1), ((1, 2), 6), ((3, 1), 6)):
        a = np.random.default_rng(3).random((2, 5, *lanes))
        bound = bind(scanfield.linear_scan, (a, b), {})
        arrays = record.prepare(bound.arrays, bound.options).call.arrays
        assert [x.shape for x in arrays[:2]] == [(2, 5, seen), (2, 5, 6)]
        full = scanfield.linear_scan(np.broadcast_to(a, b.shape).copy(), b)
        assert np.array_equal(scanfield.linear_scan(a, b).output, full.output)


@pytest.mark.parametrize("time", [15, 16, 17, 63, 64, 65, 127, 128, 129])
@pytest.mark.backend("numpy", "torch")
def test_lengths_around_the_chunks(library: Library, time: int):
    """gdn2 by default and by both forms, at the lengths where a chunk begins or ends."""
    inputs = op_inputs("gdn2", f"gdn2 {time}", batch=1, time=time)
    e = Example(f"gdn2 {time}", "gdn2", inputs)
    for method in (None, *methods(library, "gdn2")):
        got = vjp(library, "gdn2", inputs, e.cotangents(), method=method)
        assert deviation(library.numpy(got.output), e.truth().output) <= 1e-12
        for name, want in e.gradients().items():
            assert deviation(library.numpy(got.gradients[name]), want) <= 1e-11, (method, name)


@pytest.mark.backend("numpy", "torch")
@pytest.mark.parametrize("op", OPERATIONS)
def test_any_strides(library: Library, op: str):
    """Sliced, transposed and broadcast (stride 0) inputs are read where they lie; NumPy also backwards."""
    inputs = {n: np.array(x) for n, x in op_inputs(op, f"{op} strides", batch=2, time=4).items()}
    want = call(writable(library), op, inputs)

    def twisted(x: np.ndarray):
        if library.name == "torch":
            y = library.array(np.moveaxis(x, 0, -1))
            return y.permute(-1, *range(x.ndim - 1)) if x.ndim else y
        y = np.zeros((*x.shape[:-1], 2 * x.shape[-1]))
        y[..., ::2] = x
        y = y[..., ::2]
        return np.flip(np.ascontiguousarray(np.flip(y, axis=0)), axis=0)

    got = operation(op)(**{n: twisted(x) for n, x in inputs.items()})
    assert deviation(library.numpy(got.output), writable(library).numpy(want.output)) <= 1e-14

    ones = {n: np.broadcast_to(x[:1], x.shape) if x.shape[0] == 2 else x for n, x in inputs.items()}
    same = operation(op)(**{n: library.array(x) for n, x in ones.items()})
    if library.name == "torch":
        stride0 = {
            n: library.array(x[:1]).expand(x.shape) if x.shape[0] == 2 else library.array(x)
            for n, x in inputs.items()
        }
    else:
        stride0 = ones
    zero = operation(op)(**stride0)
    assert deviation(library.numpy(zero.output), library.numpy(same.output)) <= 1e-14
    gradients = scanfield.vjp(operation(op), **stride0)[1](zero.output, zero.final_state)
    assert all(tuple(gradients[n].shape) == x.shape for n, x in inputs.items())


def writable(library: Library) -> Library:
    """The library with writable arrays, whatever the parameter."""
    from arrays import library as named

    return named("numpy") if library.name == "readonly" else library
