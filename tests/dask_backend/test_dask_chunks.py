"""Dask arrays in blocks along any axes: results, gradients, steps, states and summaries are those of whole arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from arrays import Library, deviation
from checks import operation
from examples import EXAMPLES, PACKED, Example, op_inputs, rng_of

import scanfield

pytestmark = pytest.mark.backend("dask")

METHODS = (None, "dask.sequential", "dask.parallel")


def cut(library: Library, inputs: dict[str, np.ndarray], name: str, dtype: str = "float64") -> dict[str, Any]:
    """Arrays in random blocks, each array in its own."""
    rng = rng_of(f"{name} blocks")
    found = {}
    for n, x in inputs.items():
        chunks = []
        for size in x.shape:
            bounds = sorted({0, size, *rng.integers(0, size + 1, 2).tolist()})
            chunks.append(tuple(int(b - a) for a, b in zip(bounds, bounds[1:], strict=False)) or (0,))
        found[n] = library.array(x, dtype).rechunk(tuple(chunks))
    return found


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("example", EXAMPLES, ids=repr)
def test_every_option_in_random_blocks(library: Library, example: Example, method: str | None):
    arrays = cut(library, dict(example.inputs), f"{example.name} {method}")
    result, pullback = scanfield.vjp(operation(example.op), **arrays, **example.options, method=method)
    d_output, d_final = (library.array(x) for x in example.cotangents())
    gradients = pullback(d_output, d_final)
    got = library.dask.compute(result.output, result.final_state, gradients)
    truth = example.truth()
    assert deviation(got[0], truth.output) <= 1e-12
    assert deviation(got[1], truth.final_state) <= 1e-12
    for name, want in example.gradients().items():
        assert deviation(got[2][name], want) <= 1e-12, name
        assert gradients[name].dtype == got[2][name].dtype
        assert gradients[name].shape == got[2][name].shape
