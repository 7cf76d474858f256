"""Dask arrays as they come out of other work: blocks without elements, of unknown size, of other libraries."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from arrays import Library, deviation
from checks import operation
from examples import BASE, GRAPHS, op_inputs

import scanfield

pytestmark = pytest.mark.backend("dask")

SHARED = ("A", "D", "delta_bias")


def held(library: Library, op: str, inputs, lazy, form, **options):
    """Results and gradients of arrays in blocks are those of whole ones."""
    result, pullback = scanfield.vjp(operation(op), **lazy, **options, method=form)
    right, pull = scanfield.vjp(operation(op), **inputs, **options)
    found = library.dask.compute(*result, pullback(*result))
    for x, y in zip(found[:2], right, strict=True):
        assert deviation(x, y) <= 1e-12
    for name, y in pull(*right).items():
        assert found[2][name].shape == inputs[name].shape and deviation(found[2][name], y) <= 1e-11, name


@pytest.mark.parametrize("form", [None, *GRAPHS])
@pytest.mark.parametrize("op", BASE)
def test_blocks_without_elements(library: Library, op: str, form: str | None):
    inputs = op_inputs(op, f"{op} empty blocks")

    def cut(name, x):
        if name in SHARED:
            return library.array(x)
        time = ((0, 3, 0, 4, 0),) if name != "initial_state" else ((x.shape[1],),)
        return library.array(x).rechunk(((0, 1, 0, 1), *time, *((size,) for size in x.shape[2:])))

    held(library, op, inputs, {name: cut(name, x) for name, x in inputs.items()}, form)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("op", BASE)
def test_packs_whose_sequences_end_within_blocks(library: Library, op: str, reverse: bool):
    inputs = op_inputs(op, f"{op} packs", batch=1, time=11, states=4)
    whole = (*SHARED, "initial_state")
    lazy = {
        n: library.array(x) if n in whole else library.array(x).rechunk({1: 2}) for n, x in inputs.items()
    }
    held(library, op, inputs, lazy, None, cu_seqlens=[0, 0, 4, 5, 11], reverse=reverse)


def test_sizes_that_are_not_known(library: Library):
    x = library.array(np.ones((4, 7, 3))).rechunk((2, 7, 3))
    unknown = x[x[:, 0, 0] > 0]
    with pytest.raises(scanfield.ShapeError, match=r"a = a.compute_chunk_sizes\(\)"):
        scanfield.linear_scan(unknown, unknown)
    _, pullback = scanfield.vjp(scanfield.linear_scan, x, x)
    with pytest.raises(scanfield.ShapeError, match=r"d_output.compute_chunk_sizes\(\)"):
        pullback(unknown)
    known = unknown.compute_chunk_sizes()
    assert scanfield.linear_scan(known, known).output.shape == (4, 7, 3)


def test_kinds_of_data_that_are_refused(library: Library):
    numbers = library.da.from_array(np.ones((2, 7, 3), dtype=object), chunks=(1, 7, 3))
    with pytest.raises(scanfield.DtypeError, match="object"):
        scanfield.linear_scan(numbers, numbers)
    masked = library.da.ma.masked_greater(library.array(np.ones((2, 7, 3))), 5)
    with pytest.raises(scanfield.BackendError, match="MaskedArray"):
        scanfield.linear_scan(masked, masked).output.compute()


def test_a_graph_is_pickled_optimised_and_shared(library: Library):
    x = library.array(np.linspace(-1, 1, 2 * 64 * 3).reshape(2, 64, 3)).rechunk((1, 16, 3))
    first, second = scanfield.linear_scan(x, x).output, scanfield.linear_scan(x, x).output
    assert first.name == second.name  # equal calls are one in Dask's eyes
    wanted = first.compute()
    for array in (pickle.loads(pickle.dumps(first)), library.dask.optimize(first)[0], first.persist()):
        assert np.array_equal(array.compute(), wanted)
    assert np.array_equal(first[:, ::-1].rechunk(7)[:, 3].compute(), wanted[:, ::-1][:, 3])


def test_a_product_of_no_tokens(library: Library):
    """Its sub-steps are an axis that is merged with time, and Dask reshapes nothing that is empty."""
    inputs = op_inputs("gated_delta_product", "product of nothing", time=0)
    got = scanfield.gated_delta_product(**library.arrays(inputs))
    assert got.output.shape[1] == 0
    assert np.array_equal(library.numpy(got.final_state), inputs["initial_state"])
