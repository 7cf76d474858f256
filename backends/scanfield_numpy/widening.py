"""Half precision to wide numbers and back."""

from __future__ import annotations

from typing import Any

import numpy

from scanfield_numpy import half_kernels as kernels
from scanfield_numpy.threads import run

Array = Any

# Below so many numbers NumPy's own cast is not worth compiling for.
_MANY = 2**14
# A whole register of any width.
_REGISTER = 16


def is_half(array: Array) -> bool:
    """Whether an array is in half precision. (A dtype's name takes a microsecond to make, its size nothing.)"""
    return bool(array.dtype.itemsize == 2)


def widened(array: Array, dtype: str) -> Array:
    """A half array in ``dtype``; any other as it is."""
    if not is_half(array):
        return array
    if not _is_fast(array):
        return array.astype(dtype)
    half = numpy.ascontiguousarray(array)
    wide = numpy.empty(half.shape, "float32")
    whole = _run(kernels.widen, wide, half)
    wide.reshape(-1)[whole:] = half.reshape(-1)[whole:]
    return wide.astype(dtype, copy=False)


def put(place: Array, wide: Array) -> None:
    """Write wide numbers to an array of any dtype, rounded to nearest, ties to even."""
    with numpy.errstate(all="ignore"):
        if wide.dtype != numpy.float32 or not _is_fast(place):
            place[...] = wide
            return
        wide = numpy.ascontiguousarray(wide)
        half = place if place.flags.c_contiguous else numpy.empty(wide.shape, place.dtype)
        whole = _run(kernels.narrow, wide, half)
        half.reshape(-1)[whole:] = wide.reshape(-1)[whole:]
        if half is not place:
            place[...] = half


def _is_fast(half: Array) -> bool:
    return bool(kernels.FAST and half.size >= _MANY and half.dtype == numpy.float16 and half.dtype.isnative)


def _run(kernel: Any, wide: Array, half: Array) -> int:
    """Whole registers of two contiguous arrays; how many numbers these are."""
    whole: int = wide.size // _REGISTER * _REGISTER
    run(kernel, "float32", -(-whole // kernels.PIECE), float(whole), 0, (whole,), (wide, half))
    return whole
