"""What the launchers of all scans need: dtypes, steps of arrays as they lie, sequences, and why a call is declined."""

from __future__ import annotations

import threading
from functools import cache, lru_cache
from typing import Any

import cupy
import numpy

from scanfield.arrays import COMPLEX, COMPLEX_OF, HALF, dtype_name
from scanfield.dispatch import Call
from scanfield_cupy.modules import STORED

Array = Any


def reason_against(call: Call) -> str | None:
    """Why a call's arrays cannot be handed to a kernel."""
    if cupy.cuda.runtime.is_hip:
        return "CuPy runs on ROCm here, where a warp is 64 threads wide; the kernels are written for 32"
    if call.compute not in ("float32", "float64"):
        return f"computed in {call.compute}: kernels carry float32 or float64"
    for array in call.arrays:
        if array is not None and not isinstance(array, tuple):
            name = dtype_name(array.dtype)
            if name not in STORED and not name.startswith(("int", "uint")):
                return f"dtype {name}: kernels are written for {', '.join(STORED)}"
            if _crooked(array):
                return f"an array of {name} does not lie at multiples of its {array.dtype.itemsize} bytes"
    return None


def _crooked(array: Array) -> bool:
    """Whether numbers lie where a card cannot read them at once: complex numbers that begin within another one."""
    size = array.dtype.itemsize
    return bool(array.size and (array.data.ptr % size or any(step % size for step in array.strides)))


def carried(call: Call) -> str:
    """The dtype of the carry: complex if any array is."""
    names = {dtype_name(x.dtype) for x in call.arrays if x is not None and not isinstance(x, tuple)}
    return COMPLEX_OF[call.compute] if names & set(COMPLEX) else call.compute


def common_dtype(arrays: tuple[Array | None, ...], carry: str) -> str:
    """The one dtype that kernels read these arrays in: their own if they share it, else the carry's."""
    names = {dtype_name(array.dtype) for array in arrays if array is not None}
    (name,) = names if len(names) == 1 else (carry,)
    return name if name in HALF and carry == "float32" else carry


def as_dtype(array: Array | None, name: str) -> Array | None:
    """An array in a dtype; itself where it has it."""
    if array is None or dtype_name(array.dtype) == name:
        return array
    return array.astype(dtype(name))


def dtype(name: str) -> Any:
    """The dtype of a name."""
    if name == "bfloat16":
        import ml_dtypes

        return numpy.dtype(ml_dtypes.bfloat16)
    return numpy.dtype(name)


def contiguous(array: Array | None, name: str) -> Array | None:
    """An array in row-major order and in a dtype; a copy only where it is not so already."""
    array = as_dtype(array, name)
    if array is None or (array.flags.c_contiguous and not _crooked(array)):
        return array
    return array.copy()


def steps(array: Array) -> tuple[int, ...]:
    """Numbers from one element to the next along each axis of an array as it lies; 0 along an axis of size 1."""
    size = array.dtype.itemsize
    return tuple(0 if n == 1 else step // size for n, step in zip(array.shape, array.strides, strict=True))


def bounds_of(cu_seqlens: Any) -> Array | None:
    """The bounds of a pack on the device."""
    if cu_seqlens is None:
        return None
    if isinstance(cu_seqlens, tuple):
        stream = (
            cupy.cuda.get_current_stream().ptr,
            threading.get_ident(),
        )  # a thread's default stream has a common name
        return _uploaded(cupy.cuda.Device().id, stream, cu_seqlens)
    return contiguous(cu_seqlens, "int64")


@cache
def shared_memory(device: int) -> int:
    """Bytes that a block may have on a device."""
    return int(cupy.cuda.Device(device).attributes["MaxSharedMemoryPerBlockOptin"])


@cache
def multiprocessors(device: int) -> int:
    """Of a device."""
    return int(cupy.cuda.Device(device).attributes["MultiProcessorCount"])


# The layers of a model ask for the same pack one after the other. Each stream has its own: memory that is forgotten here goes
# back to the stream that it was made on, and a kernel that still reads it has to come before whatever is written there next.
@lru_cache(16)
def _uploaded(device: int, stream: tuple[int, int], bounds: tuple[int, ...]) -> Array:
    return cupy.asarray(numpy.asarray(bounds, numpy.int64))


def sequences_of(cu_seqlens: Any, batch: int) -> int:
    """How many sequences: rows of a batch, or parts of a pack."""
    if cu_seqlens is None:
        return batch
    return (len(cu_seqlens) if isinstance(cu_seqlens, tuple) else int(cu_seqlens.shape[0])) - 1


def saved_states(cu_seqlens: Any, sequences: int, time: int, chunk: int) -> int:
    """Room for a state at the start of every chunk, where kernels look for it (``saved_at``)."""
    if cu_seqlens is None:
        return sequences * -(-time // chunk)
    return time // chunk + sequences + 1


def reduced(gradient: Array | None, shape: tuple[int, ...]) -> Array | None:
    """A gradient summed over the axes along which its array was shared."""
    if gradient is None or gradient.shape == shape:
        return gradient
    axes = tuple(i for i, (n, m) in enumerate(zip(gradient.shape, shape, strict=True)) if n != m)
    return gradient.sum(axis=axes, keepdims=True)


def copies(arrays: dict[str, Array | None], stored: str) -> tuple[str, ...]:
    """For ``explain``: which of these arrays are copied to another dtype before a kernel reads them as they lie."""
    given = {name: x for name, x in arrays.items() if x is not None}
    copied = [name for name, x in given.items() if dtype_name(x.dtype) != stored]
    if not copied:
        return (f"cupy.rawkernel reads {', '.join(given)} as they lie: no copy",)
    return (
        f"cupy.rawkernel copies {', '.join(copied)} to {stored} first, the one dtype of {', '.join(given)}",
    )
