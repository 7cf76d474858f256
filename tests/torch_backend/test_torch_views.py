"""Arrays as tensors: the same numbers in the same order, however the array lies."""

from __future__ import annotations

import numpy as np
import pytest

WHOLE = np.random.default_rng(0).standard_normal((2, 6, 5))
LYING = {
    "contiguous": WHOLE,
    "turned": WHOLE.transpose(0, 2, 1),
    "turned over the batch": WHOLE.transpose(2, 1, 0),
    "every other": WHOLE[:, ::2],
    "backwards": WHOLE[:, ::-1],
    "no rows": WHOLE[:0].transpose(0, 2, 1),
    "a matrix": WHOLE[0].T,
    "complex": (WHOLE + 1j).astype("complex64").transpose(0, 2, 1),
    "half": WHOLE.astype("float16").transpose(0, 2, 1),
    "read-only": np.broadcast_to(WHOLE[:, :1], WHOLE.shape),
}


@pytest.mark.backend("torch")
@pytest.mark.parametrize("name", LYING)
def test_a_tensor_of_an_array(name: str):
    pytest.importorskip("torch")
    from scanfield_torch.views import tensor_of

    tensor = tensor_of(LYING[name])
    assert tensor.is_contiguous() and tensor._base is None
    assert np.array_equal(tensor.numpy(), LYING[name])
    assert tensor.numpy().flags.writeable
