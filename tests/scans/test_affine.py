"""One sequence cut anywhere: blocks are summarised, composed and applied, and nothing changes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from arrays import Library, deviation
from checks import operation
from examples import OPERATIONS, Example, gdn2_inputs, linear_inputs, methods, op_inputs, selective_inputs

import scanfield

SHARED = {"A", "D", "delta_bias", "dt_bias"}


def cut(inputs: dict[str, Any], lo: int, hi: int) -> dict[str, Any]:
    """The tokens lo..hi of every array that has tokens, without a state."""
    return {n: x if n in SHARED else x[:, lo:hi, ...] for n, x in inputs.items() if n != "initial_state"}


def through(library: Library, block: Any, state: np.ndarray) -> np.ndarray:
    """S_out = M S_in + N: elementwise for a diagonal M, which is laid out as the state, else a matrix product."""
    M, N = library.numpy(block.transition), library.numpy(block.state)
    return (M * state if block.diagonal else M @ state) + N


def variant(name: str, **gates: str) -> Example:
    return Example(f"affine {name}", "gdn2", gdn2_inputs(f"affine {name}", **gates))


CASES = {
    **{op: Example(f"affine {op}", op, op_inputs(op, f"affine {op}", time=7)) for op in OPERATIONS},
    "linear complex": Example("affine lc", "linear_scan", linear_inputs("affine lc", complex_=True)),
    "selective complex": Example("affine sc", "selective_scan", selective_inputs("affine sc", complex_=True)),
    "gdn2 no erase": variant("no erase", erase="none"),
    "gdn2 decay a head": variant("decay a head", erase="none", log_decay="head"),
    "gdn2 no gates": variant("no gates", log_decay="none", erase="none", write="none"),
    "gdn2 no decay": variant("no decay", log_decay="none"),
    "gdn2 norm": Example("affine n", "gdn2", gdn2_inputs("affine n"), {"qk_l2norm": True, "scale": 2.0}),
}


DEAR = ("linear complex", "selective complex", "gdn2", "gla", "ssd")  # what JAX and Dask run


def leave_out(backend: str, test: str, given: dict[str, Any]) -> bool:
    if backend not in ("jax", "dask"):
        return False
    if test == "test_cut_anywhere" and given["pieces"] != (0, 2, 5, 7):
        return True
    return given.get("case", "gdn2") not in DEAR or given.get("op", "gdn2") not in (
        "linear_scan",
        "gdn2",
        "ssd",
    )


@pytest.fixture(params=CASES, scope="module")
def case(request) -> Example:
    return CASES[request.param]


def test_a_summary_maps_the_state(library: Library, case: Example):
    for method in methods(library, case.op):
        block = scanfield.summarise(
            operation(case.op), **cut(library.arrays(case.inputs), 0, 7), **case.options, method=method
        )
        assert library.is_array(block.transition) and library.on_device(block.state)
        got = through(library, block, case.inputs["initial_state"])
        assert deviation(got, case.truth().final_state) <= 1e-12


def test_the_kind_of_map(library: Library):
    """A map without erasure is diagonal and is not written out as a matrix."""
    for op, diagonal in (
        ("linear_scan", True),
        ("selective_scan", True),
        ("gdn2", False),
        ("gla", True),
        ("retention", True),
        ("linear_attention", True),
        ("ssd", True),
        ("kda", False),
        ("delta_rule", False),
    ):
        inputs = library.arrays(op_inputs(op, f"kind {op}", time=2))
        block = scanfield.summarise(operation(op), **cut(inputs, 0, 2))
        assert block.diagonal is diagonal, op
        assert tuple(block.state.shape) == tuple(inputs["initial_state"].shape)


@pytest.mark.parametrize("pieces", [(0, 3, 7), (0, 0, 7), (0, 7, 7), (0, 2, 5, 7), (0, 1, 1, 6, 7)], ids=str)
def test_cut_anywhere(library: Library, case: Example, pieces: tuple[int, ...]):
    """Summaries of the pieces compose to the whole's; applied piece by piece they give the whole's output."""
    op, inputs, options = operation(case.op), library.arrays(case.inputs), case.options
    spans = list(pairwise(pieces))
    blocks = [scanfield.summarise(op, **cut(inputs, lo, hi), **options) for lo, hi in spans]
    total = blocks[0]
    for block in blocks[1:]:
        total = scanfield.compose(total, block)
    truth = case.truth()
    assert deviation(through(library, total, case.inputs["initial_state"]), truth.final_state) <= 1e-12

    state, outputs = inputs["initial_state"], []
    for lo, hi in spans:
        result = scanfield.apply(op, state, **cut(inputs, lo, hi), **options)
        assert isinstance(result, scanfield.ScanResult)
        outputs.append(library.numpy(result.output))
        state = result.final_state
    assert deviation(np.concatenate(outputs, axis=1), truth.output) <= 1e-12
    assert deviation(library.numpy(state), truth.final_state) <= 1e-12


def test_composition_is_associative_and_has_an_identity(library: Library, case: Example):
    op, inputs, options = operation(case.op), library.arrays(case.inputs), case.options
    a, b, c = (
        scanfield.summarise(op, **cut(inputs, lo, hi), **options) for lo, hi in ((0, 2), (2, 5), (5, 7))
    )
    empty = scanfield.summarise(op, **cut(inputs, 3, 3), **options)
    left = scanfield.compose(scanfield.compose(a, b), c)
    right = scanfield.compose(a, scanfield.compose(b, c))
    for x, y in ((left.transition, right.transition), (left.state, right.state)):
        assert deviation(library.numpy(x), library.numpy(y)) <= 1e-13
    for with_empty in (scanfield.compose(empty, a), scanfield.compose(a, empty)):
        assert with_empty.diagonal == a.diagonal
        assert deviation(library.numpy(with_empty.transition), library.numpy(a.transition)) == 0
        assert deviation(library.numpy(with_empty.state), library.numpy(a.state)) == 0
    state = case.inputs["initial_state"]
    assert np.array_equal(through(library, empty, state), state)


def test_left_happens_first(library: Library, case: Example):
    """Composition is not commutative: the wrong order gives another map, unless nothing decays or is erased."""
    op, inputs, options = operation(case.op), library.arrays(case.inputs), case.options
    a, b = (scanfield.summarise(op, **cut(inputs, lo, hi), **options) for lo, hi in ((0, 3), (3, 7)))
    state, truth = case.inputs["initial_state"], case.truth().final_state
    assert deviation(through(library, scanfield.compose(a, b), state), truth) <= 1e-12
    sums_only = case.op == "linear_attention" or case.name == "affine no gates"
    wrong = deviation(through(library, scanfield.compose(b, a), state), truth)
    assert wrong <= 1e-12 if sums_only else wrong > 1e-3


@pytest.mark.parametrize("op", OPERATIONS)
def test_reverse(library: Library, op: str):
    """Walked from the right, the last piece happens first: it stands on the left of a composition."""
    e = Example(f"affine reverse {op}", op, op_inputs(op, f"affine reverse {op}", time=5), {"reverse": True})
    inputs, function = library.arrays(e.inputs), operation(op)
    pieces = ((3, 5), (2, 3), (0, 2))  # in the order of the walk
    blocks = [scanfield.summarise(function, **cut(inputs, lo, hi), reverse=True) for lo, hi in pieces]
    total = scanfield.compose(scanfield.compose(*blocks[:2]), blocks[2])
    assert deviation(through(library, total, e.inputs["initial_state"]), e.truth().final_state) <= 1e-12
    state, outputs = inputs["initial_state"], []
    for lo, hi in pieces:
        result = scanfield.apply(function, state, **cut(inputs, lo, hi), reverse=True)
        outputs.insert(0, library.numpy(result.output))
        state = result.final_state
    assert deviation(np.concatenate(outputs, axis=1), e.truth().output) <= 1e-12


@pytest.mark.parametrize("op", ["linear_scan", "selective_scan", "gdn2"])
def test_float32_summaries_are_float32(library: Library, op: str):
    inputs = library.arrays(op_inputs(op, f"affine 32 {op}", time=3), "float32")
    block = scanfield.summarise(operation(op), **cut(inputs, 0, 3))
    assert library.dtype(block.transition) == library.dtype(block.state) == "float32"
    both = scanfield.compose(block, block)
    assert library.dtype(both.transition) == library.dtype(both.state) == "float32"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_summaries_are_float32(library: Library, dtype: str):
    """Products of transitions run over many orders of magnitude."""
    if dtype not in library.dtypes:
        pytest.skip(f"{library.name} has no {dtype}")
    inputs = library.arrays(op_inputs("gdn2", "affine half", time=3), dtype)
    block = scanfield.summarise(scanfield.gdn2, **cut(inputs, 0, 3))
    assert library.dtype(block.transition) == library.dtype(block.state) == "float32"


def test_strong_decay_stays_finite(library: Library):
    """A transition is a product of decays, never a quotient: -inf and -1000 give 0."""
    for op in ("gdn2", "gla"):
        inputs = op_inputs(op, f"affine strong {op}", time=4)
        inputs["log_decay"] = np.where(inputs["log_decay"] < -1, -np.inf, -1000.0)
        block = scanfield.summarise(operation(op), **cut(library.arrays(inputs), 0, 4))
        assert (
            np.isfinite(library.numpy(block.transition)).all() and not library.numpy(block.transition).any()
        )
        assert np.isfinite(library.numpy(block.state)).all()


def test_maps_that_do_not_fit_are_refused(library: Library):
    one = scanfield.summarise(scanfield.gdn2, **cut(library.arrays(gdn2_inputs("fit", K=3)), 0, 2))
    two = scanfield.summarise(scanfield.gdn2, **cut(library.arrays(gdn2_inputs("fit", K=5)), 0, 2))
    with pytest.raises(scanfield.ShapeError):
        scanfield.compose(one, two)


@pytest.mark.parametrize("op", ["linear_scan", "gdn2"])
def test_an_initial_state_has_no_place_in_a_summary(library: Library, op: str):
    """The map is from any incoming state; a state given as well would be dropped or counted twice."""
    inputs = library.arrays(op_inputs(op, f"affine state {op}", time=2))
    with pytest.raises(scanfield.ArgumentError, match="initial_state"):
        scanfield.summarise(operation(op), **inputs)
    with pytest.raises(scanfield.ArgumentError, match="initial_state"):
        scanfield.apply(operation(op), inputs["initial_state"], **inputs)


@pytest.mark.parametrize("op", ["linear_scan", "selective_scan", "gdn2", "ssd"])
def test_packed_sequences_have_a_map_each(library: Library, op: str):
    data = op_inputs(op, f"affine packed {op}", batch=1, time=3, states=3)
    bounds = [0, 0, 2, 3]
    e = Example(f"affine packed {op}", op, data, {"cu_seqlens": bounds})
    for method in (None,) if library.name in ("jax", "dask") else (None, "generic"):
        block = scanfield.summarise(
            operation(op), **cut(library.arrays(data), 0, 3), cu_seqlens=bounds, method=method
        )
        assert deviation(through(library, block, data["initial_state"]), e.truth().final_state) <= 1e-12


@pytest.mark.backend("numpy")
@pytest.mark.parametrize("op", ["linear_scan", "selective_scan", "gdn2", "ssd"])
def test_packs_of_nothing_have_maps_too(op: str):
    """Sequences without tokens keep their state; a pack without sequences has no map, of the right shape."""
    none = cut(op_inputs(op, f"affine nothing {op}", batch=1, time=0, states=2), 0, 0)
    shape = op_inputs(op, f"affine nothing {op}", batch=1, time=0, states=2)["initial_state"].shape
    for bounds in ([0], [0, 0, 0]):
        block = scanfield.summarise(operation(op), **none, cu_seqlens=bounds, method="generic")
        assert block.state.shape == (len(bounds) - 1, *shape[1:]) and not block.state.any()
        assert block.transition.shape[0] == len(bounds) - 1
        state = np.ones(block.state.shape)
        moved = block.transition * state if block.diagonal else block.transition @ state
        assert np.array_equal(moved, state)


def test_states_within_a_block_have_no_place_in_a_summary():
    a = np.full((1, 4, 2), 0.5)
    with pytest.raises(scanfield.ArgumentError, match="states_at: not in summarise; summarise the parts"):
        scanfield.summarise(scanfield.linear_scan, a, a, states_at=[2])


def test_only_maps_compose():
    a = np.full((1, 4, 2), 0.5)
    block = scanfield.summarise(scanfield.linear_scan, a, a)
    for name, pair in (("left", (tuple(block), block)), ("right", (block, a))):
        with pytest.raises(
            scanfield.ArgumentError, match=f"{name}: expected an Affine as summarise returns it, came"
        ):
            scanfield.compose(*pair)


@pytest.mark.parametrize("erases", ["left", "right"])
def test_a_map_by_rows_beside_a_matrix(erases: str):
    """Tokens that only decay, before or behind tokens that erase too."""
    data = gdn2_inputs("affine mixed", batch=2, time=5, vheads=2)
    data = {n: x for n, x in data.items() if n != "initial_state"}
    halves = [{n: x[:, :3] for n, x in data.items()}, {n: x[:, 3:] for n, x in data.items()}]
    del halves[erases == "left"]["erase"]
    left, right = (scanfield.summarise(scanfield.gdn2, **{"erase": None, **half}) for half in halves)
    assert left.diagonal is (erases == "right") and right.diagonal is (erases == "left")
    state = np.random.default_rng(0).standard_normal(left.state.shape)
    want = state
    for half in halves:
        want = scanfield.gdn2(**{"erase": None, **half}, initial_state=want).final_state
    both = scanfield.compose(left, right)
    assert not both.diagonal
    assert deviation(both.transition @ state + both.state, want) <= 1e-13
