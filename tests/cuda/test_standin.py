"""The stand-in is as strict as CuPy: what slips through it would fail on a card."""

from __future__ import annotations

import numpy as np
import pytest
import standin
from array_api_compat import array_namespace

import scanfield


def test_arrays_are_no_numpy_arrays(card):
    x = card.array(np.arange(6.0).reshape(2, 3))
    with pytest.raises(TypeError, match="Implicit conversion"):
        np.asarray(x)
    with pytest.raises(TypeError):
        np.ones((2, 3)) + x
    with pytest.raises(TypeError, match="Unsupported type"):
        card.cupy.concatenate([x, np.ones((2, 3))])
    assert card.is_array(x + 1) and card.is_array(x[:, 0]) and card.is_array(x.sum())
    assert array_namespace(x).__name__ == "array_api_compat.cupy"


def test_new_memory_is_nan_and_transfers_are_counted(card):
    assert np.isnan(card.cupy.empty((3,), "float32").host).all()
    standin.TRANSFERS.clear()
    x = card.cupy.asarray(np.ones(3))
    assert float(x.sum()) == 3 and x.get().shape == (3,)
    assert standin.TRANSFERS == {"to device": 1, "to host": 2}


def test_a_call_copies_nothing_between_host_and_device(card):
    a, b = (card.array(np.full((2, 5, 3), 0.5)) for _ in range(2))
    scanfield.linear_scan(a, b)  # compiled, and the pack's bounds are here
    standin.TRANSFERS.clear()
    result, pullback = scanfield.vjp(scanfield.linear_scan, a, b)
    pullback(result.output)
    assert not standin.TRANSFERS
