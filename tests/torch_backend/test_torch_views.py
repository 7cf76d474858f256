"""Arrays as tensors: the same numbers in the same order, however the array lies."""

from __future__ import annotations

import numpy as np
import pytest

import scanfield
from scanfield.errors import StateError

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


@pytest.mark.backend("torch")
@pytest.mark.parametrize("left", [0, 8])
def test_memory_that_was_freed_is_not_read(left: int):
    """NumPy makes other memory of what begins nowhere: results were numbers out of the blue."""
    torch = pytest.importorskip("torch")
    from scanfield_torch.views import array_of

    made = torch.nn.Parameter(torch.randn(4, 3)), torch.randn(8, 3).T[:, 2:6], torch.ones(4)[3:].expand(4, 3)
    for tensor in made:
        assert array_of(tensor, borrowed=True).tolist() == tensor.tolist()
    looks = [*made, made[0][1:], made[0][:0]]
    for tensor in made:
        tensor.untyped_storage().resize_(left)
    for tensor in looks[:-1]:
        with pytest.raises(StateError, match=r"a tensor of shape \(\d, [34]\) whose memory was freed"):
            array_of(tensor, borrowed=True)
    assert array_of(looks[-1]).shape == (0, 3)


@pytest.mark.backend("torch")
def test_a_parameter_that_was_freed_before_the_backward_pass_is_named():
    torch = pytest.importorskip("torch")
    pytest.importorskip("numba")
    a, b = torch.nn.Parameter(torch.full((1, 4, 3), 0.5)), torch.ones(1, 4, 3)
    output, _ = scanfield.linear_scan(a, b, method="torch.numba")
    kept = a.detach().clone()
    a.untyped_storage().resize_(0)
    for call in (lambda: output.sum().backward(), lambda: scanfield.linear_scan(a, b, method="torch.numba")):
        with pytest.raises(StateError, match=r"^a: a tensor of shape"):
            call()
    a.untyped_storage().resize_(48)
    with torch.no_grad():
        a.untyped_storage().copy_(kept.untyped_storage())
    scanfield.linear_scan(a, b, method="torch.numba").output.sum().backward()
    assert torch.isfinite(a.grad).all()


@pytest.mark.backend("torch")
@pytest.mark.parametrize("time", [0, 2])
def test_data_exchanged_before_the_backward_pass_are_not_read(time: int):
    """The kernels went by the shapes of the other arrays, and read what lay behind the shorter ones."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("numba")
    a, b = (torch.nn.Parameter(torch.full((1, 4000, 3), 0.5)) for _ in range(2))
    output, _ = scanfield.linear_scan(a, b, method="torch.numba")
    a.data = torch.ones(1, time, 3)
    with pytest.raises(
        StateError, match=rf"^a: shape \(1, {time}, 3\), but \(1, 4000, 3\) when the scan ran"
    ):
        output.sum().backward()
