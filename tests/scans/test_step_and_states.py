"""One token at a time equals the whole sequence; the states between are the states that a walk passes
through.
"""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from arrays import Library, deviation, same_bits
from checks import TOLERANCE, call, call_on, carry_dtype, operation, step, vjp_on
from examples import COMPILED_FOR, EXAMPLES, OPERATIONS, PACKED, Example, methods, op_inputs

import scanfield

# `step` has no reverse and no packing: the examples without them.
STEPPED = [e for e in EXAMPLES if not {"reverse", "cu_seqlens"} & set(e.options)]
SHARED = {"A", "D", "delta_bias", "dt_bias"}


def at(inputs: dict[str, Any], t: int) -> dict[str, Any]:
    """The arrays of one token: without their time axis where they have one. (batch, ...) stays what it is."""
    token = {}
    for name, x in inputs.items():
        if name == "initial_state":
            continue
        token[name] = x if name in SHARED else x[:, min(t, x.shape[1] - 1), ...]
    return token


def tokens(library: Library, e: Example, dtype: str) -> list[dict[str, Any]]:
    inputs = dict(e.inputs)
    constant = {n for n in "BC" if n in inputs and inputs[n].ndim == 2}
    batch = inputs["u"].shape[0] if "u" in inputs else None
    for (
        name
    ) in constant:  # a token's B and C always carry the batch: (batch, channels, state) is a group a channel
        channels, state = inputs[name].shape
        inputs[name] = np.broadcast_to(inputs[name], (batch, e.time, channels, state))
    if e.op == "retention" and "log_decay" in inputs and inputs["log_decay"].ndim == 1:
        inputs["log_decay"] = np.broadcast_to(
            inputs["log_decay"], (*inputs["query"].shape[:2], inputs["log_decay"].size)
        )
    return [library.arrays(at(inputs, t), dtype) for t in range(e.time)]


def leave_out(backend: str, test: str, given: dict[str, Any]) -> bool:
    # Selection chooses the compiled or the recurrent form on NumPy, where both are forced; the latter elsewhere.
    again = None if backend == "numpy" else "generic.recurrent"
    if test == "test_step_token_by_token" and given["method"] == again:
        return True
    if backend not in ("jax", "dask"):
        return False
    if given.get("dtype") == "float32":
        return True
    if test == "test_step_token_by_token":
        return backend == "dask" and not given["example"].name.endswith(": plain")
    if test == "test_states_at_chunks":
        return given["chunk_size"] not in (2, 64) or (backend == "dask" and given["op"] != "gdn2")
    if test == "test_states_of_packed_sequences":
        return given["op"] != "gdn2"
    if test == "test_states_at":
        return given["op"] not in ("linear_scan", "selective_scan", "gdn2", "ssd") or (
            backend == "dask" and not given["reverse"]
        )
    return given.get("op", "gdn2") not in ("linear_scan", "selective_scan", "gdn2")


@pytest.mark.parametrize("method", [None, "generic.recurrent", *COMPILED_FOR])
@pytest.mark.parametrize("example", STEPPED, ids=repr)
def test_step_token_by_token(library: Library, dtype: str, example: Example, method: str | None):
    state = library.array(example.inputs.get("initial_state"), dtype)  # None: zeros
    truth = example.truth(dtype)
    options = dict(example.options)
    for t, token in enumerate(tokens(library, example, dtype)):
        output, state = step(library, example.op, state, token, **options, method=method)
        assert library.is_array(output) and library.is_array(state)
        assert library.on_device(output) and library.on_device(state)
        assert (
            deviation(library.numpy(output), truth.output[:, t], floor=abs(truth.output).max())
            <= TOLERANCE[dtype]
        )
        assert deviation(library.numpy(state), truth.states[:, t + 1]) <= TOLERANCE[dtype]
    assert library.dtype(state).endswith(carry_dtype(dtype)) or "complex" in library.dtype(state)


@pytest.mark.parametrize("op", OPERATIONS)
def test_step_leaves_the_state_it_was_given(library: Library, op: str):
    """Neither `step` nor the call may write into its inputs, and what comes out is no view of them."""
    inputs = library.arrays(op_inputs(op, f"{op} untouched", time=library.time(3)))
    before = {name: library.raw(x).copy() for name, x in inputs.items()}
    step(library, op, inputs["initial_state"], at(inputs, 0))
    result = call_on(library, op, inputs)
    vjp_on(library, op, inputs, (result.output, result.final_state))
    for name, x in inputs.items():
        assert same_bits(library.raw(x), before[name]), name


@pytest.mark.backend("numpy", "torch")
@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("time", [0, 1, 3])
def test_results_share_no_memory_with_inputs(library: Library, op: str, time: int):
    inputs = {n: np.array(x) for n, x in op_inputs(op, f"{op} fresh", time=time).items()}
    arrays = library.arrays(inputs) if library.name != "readonly" else inputs
    result = operation(op)(**arrays)
    gradients = scanfield.vjp(operation(op), **arrays)[1](result.output, result.final_state)
    view = (lambda x: x.numpy()) if library.name == "torch" else np.asarray
    for got in (*result, *gradients.values()):
        for name, x in arrays.items():
            assert not np.shares_memory(view(got), view(x)), name


# -- states_at -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("op", OPERATIONS)
def test_states_at(library: Library, dtype: str, op: str, reverse: bool):
    time = library.time(7)
    wanted = [0, 3, 1, time, 3]  # both ends, out of order, twice the same
    e = Example(f"{op} states", op, op_inputs(op, f"{op} states", time=time), {"reverse": reverse})
    truth = e.truth(dtype)
    for method in (None, *methods(library, op)):
        got = call(library, op, e.inputs, dtype, reverse=reverse, states_at=wanted, method=method)
        assert got._fields == ("output", "final_state", "states")
        assert deviation(library.numpy(got.output), truth.output) <= TOLERANCE[dtype]
        assert deviation(library.numpy(got.final_state), truth.final_state) <= TOLERANCE[dtype]
        states = library.numpy(got.states)
        assert deviation(states, truth.states[:, wanted]) <= TOLERANCE[dtype]
        # The ends are what they are called: the initial state comes back bit by bit, and so does the final
        # one.
        first, last = (3, 0) if reverse else (0, 3)
        assert same_bits(states[:, first], library.numpy(library.array(e.inputs["initial_state"], dtype)))
        assert same_bits(states[:, last], library.numpy(got.final_state))


def test_states_at_of_numpy_integers(library: Library):
    """Boundaries are often computed: a NumPy array of integers is a sequence of them, one of floats is not."""
    e = Example("states of an array", "linear_scan", op_inputs("linear_scan", "states of an array", time=4))
    arrays = library.arrays(e.inputs)
    found = [scanfield.linear_scan(**arrays, states_at=x).states for x in ([1, 4], np.array([1, 4]))]
    assert same_bits(*map(library.raw, found))
    with pytest.raises(scanfield.DtypeError, match="states_at: expected integers, came float64"):
        scanfield.linear_scan(**arrays, states_at=np.array([1.0]))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("op", ["linear_scan", "selective_scan", "gdn2", "gated_delta_product"])
def test_states_at_chunks(library: Library, op: str, chunk_size: int, reverse: bool):
    """ "chunks" is the boundary where each chunk is entered: its left end, and with `reverse` its right end, counted
    from the last token.
    """
    time = library.time(7)
    e = Example(f"{op} chunks", op, op_inputs(op, f"{op} chunks", time=time), {"reverse": reverse})
    got = call(library, op, e.inputs, reverse=reverse, states_at="chunks", chunk_size=chunk_size)
    starts = [time - t if reverse else t for t in range(0, time, chunk_size)]
    assert got.states.shape[1] == len(starts) == -(-time // chunk_size)
    assert deviation(library.numpy(got.states), e.truth().states[:, starts]) <= 1e-12


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("op", OPERATIONS)
def test_states_of_packed_sequences(library: Library, op: str, reverse: bool):
    """The state before token t in that token's own sequence; with `reverse` the one that has come down to its left end
    from the right, within the sequence.
    """
    data = op_inputs(op, f"{op} packed states", batch=1, time=7, states=5)
    e = Example(f"{op} packed states {reverse}", op, data, {"cu_seqlens": PACKED, "reverse": reverse})
    wanted = [0, 1, 3, 4, 5, 7]  # ends, starts of sequences, the single token, inside
    for method in (None, *methods(library, op)):
        got = call(library, op, data, **e.options, states_at=wanted, method=method)
        assert deviation(library.numpy(got.output), e.truth().output) <= 1e-12
        assert deviation(library.numpy(got.final_state), e.truth().final_state) <= 1e-12
        for i, t in enumerate(wanted):
            assert deviation(library.numpy(got.states)[:, i], e.truth().states[:, t]) <= 1e-12, (
                f"boundary {t}"
            )


def test_chunks_of_packed_sequences(library: Library):
    """The chunks of each sequence are counted from its own first token."""
    data = op_inputs("gdn2", "packed chunks", batch=1, time=7, states=5)
    got = call(library, "gdn2", data, cu_seqlens=PACKED, states_at="chunks", chunk_size=2)
    truth = Example("packed chunks", "gdn2", data, {"cu_seqlens": PACKED}).truth()
    assert deviation(library.numpy(got.states), truth.states[:, [0, 2, 3, 4, 6]]) <= 1e-12


@pytest.mark.parametrize("op", ["linear_scan", "selective_scan", "gdn2", "retention"])
def test_states_without_an_initial_state_begin_with_zeros(library: Library, op: str):
    inputs = op_inputs(op, f"{op} zero start", time=library.time(4))
    del inputs["initial_state"]
    got = call(library, op, inputs, states_at=[0])
    assert not library.numpy(got.states).any()
    assert (
        got.states.shape[0] == got.final_state.shape[0] and got.states.shape[2:] == got.final_state.shape[1:]
    )


@pytest.mark.parametrize("op", ["linear_scan", "selective_scan", "gdn2"])
def test_no_states_wanted(library: Library, op: str):
    got = call(library, op, op_inputs(op, f"{op} none wanted", time=3), states_at=[])
    assert got.states.shape == (2, 0, *got.final_state.shape[1:])


@pytest.mark.parametrize("op", ["linear_scan", "selective_scan", "gdn2"])
def test_resuming_from_a_state_that_came_back(library: Library, op: str):
    """What `states_at` is for: a prefix cache. The rest of the sequence from a stored state equals the whole."""
    time, cut = library.time(7), 2
    e = Example(f"{op} resume", op, op_inputs(op, f"{op} resume", time=time))
    inputs = library.arrays(e.inputs)
    whole = call_on(library, op, inputs, states_at=[cut])
    rest = {n: x if n in SHARED | {"initial_state"} else x[:, cut:, ...] for n, x in inputs.items()}
    rest["initial_state"] = whole.states[:, 0, ...]
    again = call_on(library, op, rest)
    assert deviation(library.numpy(again.output), e.truth().output[:, cut:]) <= 1e-12
    assert deviation(library.numpy(again.final_state), e.truth().final_state) <= 1e-12


@pytest.mark.parametrize("op", ["linear_scan", "selective_scan", "gdn2"])
def test_states_at_under_the_gradient_of_the_loss(library: Library, op: str):
    """`vjp` takes no cotangent of states between, so it refuses to be asked for them rather than dropping a
    gradient.
    """
    inputs = library.arrays(op_inputs(op, f"{op} states vjp", time=3))
    with pytest.raises(scanfield.ArgumentError, match="states_at"):
        scanfield.vjp(operation(op), **inputs, states_at=[1])


def test_examples_cover_step():
    assert {e.op for e in STEPPED} == set(OPERATIONS)


@pytest.mark.parametrize("op", OPERATIONS)
def test_a_scan_and_its_step_are_pickled_by_name(op: str):
    scan = getattr(scanfield, op)
    assert pickle.loads(pickle.dumps((scan, scan.step))) == (scan, scan.step)  # as process pools do
