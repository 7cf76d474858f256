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


@pytest.mark.backend("torch")
@pytest.mark.parametrize("name", LYING)
def test_a_parameter_is_looked_at_and_may_still_be_freed(name: str):
    """As FSDP does between two calls; the array itself keeps what it looks at."""
    torch = pytest.importorskip("torch")
    from scanfield_torch.views import array_of

    own = torch.from_numpy(np.ascontiguousarray(LYING[name]))
    parameter = torch.nn.Parameter(own.clone())
    for look in (lambda x: x, lambda x: x.transpose(0, -1), lambda x: x[..., 1:3], lambda x: -x):
        got, want = array_of(look(parameter)), look(own).numpy(force=True)
        assert np.array_equal(got, want) and got.dtype == want.dtype and got.flags.writeable
        assert got.strides == want.strides or not got.size
    held = array_of(parameter)
    assert parameter.untyped_storage().resizable()
    del parameter
    assert np.array_equal(held, own.numpy())
