"""The chunk size is a matter of cost: results for 1, 2, 4, 6, 64 agree, and 0 is refused."""

from __future__ import annotations

from typing import Any

import pytest
from arrays import Library, deviation
from checks import TOLERANCE, call, vjp
from examples import OPERATIONS, Example, methods, op_inputs

import scanfield

SIZES = (1, 2, 4, 6, 64)


def leave_out(backend: str, test: str, given: dict[str, Any]) -> bool:
    return test == "test_sizes_agree" and backend in ("jax", "dask") and given["dtype"] == "float32"


@pytest.mark.parametrize("op", ["linear_scan", "selective_scan", "gdn2"])
def test_sizes_agree(library: Library, dtype: str, op: str):
    """All against the truth, so that any two agree; 13 tokens are a multiple of none but 1."""
    time = library.time(13)
    e = Example(f"{op} sizes", op, op_inputs(op, f"{op} sizes", time=time))
    gradients = e.gradients(dtype)
    scale = max(abs(g).max() for g in gradients.values())
    sizes = {"dask": (2,), "jax": (1, 6)}.get(library.name, SIZES)  # where a size is dear
    for method in methods(library, op):
        for size in sizes:
            got = vjp(library, op, e.inputs, e.cotangents(dtype), dtype, chunk_size=size, method=method)
            what = f"{method}, chunk_size {size}"
            assert deviation(library.numpy(got.output), e.truth(dtype).output) <= TOLERANCE[dtype], what
            assert (
                deviation(library.numpy(got.final_state), e.truth(dtype).final_state) <= TOLERANCE[dtype]
            ), what
            for name, want in gradients.items():
                worst = deviation(library.numpy(got.gradients[name]), want, floor=1e-2 * scale)
                assert worst <= TOLERANCE[dtype], (what, name)


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("size", [0, -1, 2.0, True, "4"])
def test_a_size_that_is_no_size_is_refused(library: Library, op: str, size: object):
    inputs = library.arrays(op_inputs(op, f"{op} bad size", time=2))
    with pytest.raises(scanfield.ArgumentError, match="chunk_size") as caught:
        getattr(scanfield, op)(**inputs, chunk_size=size)
    assert repr(size) in str(caught.value) and "at least 1" in str(caught.value)


@pytest.mark.backend("numpy")
def test_numpy_integers_are_integers(library: Library):
    import numpy as np

    inputs = op_inputs("gdn2", "numpy size", time=5)
    a = call(library, "gdn2", inputs, chunk_size=np.int32(2))
    b = call(library, "gdn2", inputs, chunk_size=2)
    assert (library.raw(a.output) == library.raw(b.output)).all()
