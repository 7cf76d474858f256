"""Tensors as NumPy arrays and back, over the same memory."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy
import torch

from scanfield.dispatch import Call, operation_of
from scanfield.errors import StateError
from scanfield_torch.kernels import no_view

Tensor = torch.Tensor

_PARAMETER = torch.nn.Parameter

_NUMPY: dict[torch.dtype, Any] = {
    torch.float16: numpy.dtype("float16"),
    torch.float32: numpy.dtype("float32"),
    torch.float64: numpy.dtype("float64"),
    torch.complex64: numpy.dtype("complex64"),
    torch.complex128: numpy.dtype("complex128"),
}
try:
    # NumPy has no bfloat16 of its own.
    import ml_dtypes

    _BFLOAT16: Any = numpy.dtype(ml_dtypes.bfloat16)
    _NUMPY[torch.bfloat16] = _BFLOAT16
except ImportError:
    _BFLOAT16 = None

TORCH = {dtype.name: kind for kind, dtype in _NUMPY.items()}
"""torch's dtype by NumPy's name of it."""


class Shape:
    """What stands for an array where there are shapes and no values."""

    __slots__ = ("dtype", "shape")

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tensor.shape, _NUMPY[tensor.dtype]


def dtype_reason(dtype: torch.dtype) -> str | None:
    """Why no kernel takes tensors of this dtype, or None."""
    if dtype in _NUMPY:
        return None
    if dtype is torch.bfloat16:
        return "bfloat16 tensors need the package ml_dtypes"
    return f"dtype {dtype}: kernels are compiled for float32 and float64, half and complex numbers"


def array_of(tensor: Tensor | None, *, borrowed: bool = False) -> Any:
    """A tensor on the CPU as a NumPy array over its memory. Copied is what has a conjugate or negative bit.

    ``Tensor.numpy`` marks the memory so that it can never be freed and filled again, as FSDP does with parameters: their
    memory, and what is ``borrowed``, is looked at without it.
    """
    if tensor is None:
        return None
    if not tensor.untyped_storage().nbytes() and tensor.numel():
        raise _freed(tensor)
    if borrowed or issubclass(type(tensor), _PARAMETER) or issubclass(type(tensor._base), _PARAMETER):
        return _borrowed(tensor)
    if tensor.dtype is torch.bfloat16:
        return tensor.detach().view(torch.int16).numpy().view(_BFLOAT16)
    return tensor.numpy(force=True)  # detached; resolved, if it has such a bit


def _is_freed(tensor: Tensor) -> bool:
    """Whether the storage ends before the tensor does."""
    if not tensor.numel():
        return False
    steps = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    end = tensor.element_size() * (tensor.storage_offset() + steps + 1)
    return tensor.untyped_storage().nbytes() < end


def _freed(tensor: Tensor) -> StateError:
    """NumPy would look at other memory, or at none."""
    return StateError(
        f"a tensor of shape {tuple(tensor.shape)} whose memory was freed, as FSDP does with parameters between two uses; "
        "gather it first (unshard, summon_full_params), and keep it until the backward pass is done"
    )


def _borrowed(tensor: Tensor) -> Any:
    """An array over a tensor's memory, which it keeps alive."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    shape, kind = tuple(tensor.shape), _NUMPY[tensor.dtype]
    if 0 in shape:
        return numpy.empty(shape, kind)
    size = tensor.element_size()
    strides = [size * step for step in tensor.stride()]
    reach = size + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    if _is_freed(tensor):
        raise _freed(tensor)
    memory: Any = (ctypes.c_char * reach).from_address(tensor.data_ptr())
    memory.owner = tensor
    return numpy.ndarray(shape, kind, memory, strides=strides)


def tensor_of(array: Any) -> Tensor:
    """A fresh NumPy array as a contiguous tensor over its memory; copied if it is no such."""
    flags = array.flags
    if not (flags.c_contiguous and flags.writeable):
        array = _row_major(array)
    if array.dtype is _BFLOAT16:
        return no_view(torch.from_numpy(array.view(numpy.int16)).view(torch.bfloat16))
    return torch.from_numpy(array)


def _row_major(array: Any) -> Any:
    """A fresh contiguous copy; rows of the batch one by one, since torch turns matrices ten times as fast as NumPy."""
    kind = TORCH.get(array.dtype.name)
    # torch takes no backward strides, and warns of what it may not write.
    unfit = not array.flags.writeable or any(stride < 0 for stride in array.strides)
    if array.ndim != 3 or array.dtype is _BFLOAT16 or kind is None or unfit:
        return numpy.array(array, order="C")
    copied = torch.empty(array.shape, dtype=kind)
    for row, source in zip(copied, torch.from_numpy(array), strict=True):
        row.copy_(source)
    return copied.numpy()


def on_arrays(call: Call, *, borrowed: bool = False) -> Call:
    """A call on tensors as one on arrays."""
    try:
        arrays = tuple(
            [x if x is None or type(x) is tuple else array_of(x, borrowed=borrowed) for x in call.arrays]
        )
    except StateError:
        raise _named(call) from None
    return Call(call.operation, arrays, call.options, call.compute)


def _named(call: Call) -> StateError:
    """The error for the tensors of a call that were freed."""
    given = zip(operation_of(call).inputs, call.arrays, strict=True)
    freed = {entry.name: x for entry, x in given if isinstance(x, Tensor) and _is_freed(x)}
    return StateError(f"{', '.join(freed)}: {_freed(next(iter(freed.values())))}")


def on_shapes(call: Call) -> Call:
    """A call on tensors as one on their shapes."""
    return call._replace(
        arrays=tuple([x if x is None or isinstance(x, tuple) else Shape(x) for x in call.arrays])
    )
