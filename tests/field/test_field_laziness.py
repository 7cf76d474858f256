"""Field report F068: nothing in a call makes a Dask array compute."""

from __future__ import annotations

import numpy as np
import pytest
from draws import within
from operations import every_operation

import scanfield

pytestmark = pytest.mark.backend("dask")

BATCH, TIME, BLOCK = 2, 512, 128
CASES = every_operation(59, BATCH, TIME, 2, 8, 4, channels=6, state=4)


def refuse(*args, **kwargs):
    raise AssertionError("a call made its arrays compute")


@pytest.mark.parametrize("operation", CASES)
def test_f068_a_call_computes_nothing(library, operation):
    case, function = CASES[operation], getattr(scanfield, operation)

    def cut(x):
        """In blocks of one row and 128 tokens, where it has these axes."""
        blocks = {BATCH: 1, TIME: BLOCK}
        lead = [blocks.get(size, -1) for size in x.shape[:2]] if x.ndim > 2 else []
        return library.da.from_array(x, chunks=(*lead, *[-1] * (x.ndim - len(lead))))

    lazy = {name: cut(x) for name, x in case.inputs.items()}
    d_output = np.random.default_rng(590).standard_normal(case.output)
    with library.dask.config.set(scheduler=refuse):
        result = function(**lazy, **case.options)
        _, pullback = scanfield.vjp(function, **lazy, **case.options)
        gradients = pullback(cut(d_output))
        scanfield.explain(function, **lazy, **case.options)
        assert result.output.shape == case.output and result.output.dtype == np.float64
        assert result.final_state.dtype == np.float64
        for name, x in gradients.items():
            assert x.shape == case.inputs[name].shape and x.dtype == case.inputs[name].dtype, name
    # gated_delta_product has two canonical tokens for one, and so more and smaller blocks.
    assert len(result.output.__dask_graph__()) < 50 * max(BATCH * TIME // BLOCK, result.output.npartitions)
    wanted, pull = scanfield.vjp(function, **case.inputs, **case.options)
    found, found_gradients = library.dask.compute(tuple(result), gradients)
    for x, y in zip(found, wanted, strict=True):
        within(x, y, 1e-12)
    for name, x in pull(d_output).items():
        within(found_gradients[name], x, 1e-11)
