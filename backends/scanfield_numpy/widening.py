"""Half precision to wide numbers and back."""

from __future__ import annotations

from typing import Any

import numpy

from scanfield.arrays import HALF
from scanfield_numpy import half_kernels as kernels
from scanfield_numpy.threads import run

Array = Any

# Below so many numbers NumPy's own cast is not worth compiling for.
_MANY = 2**14
# A whole register of any width.
_REGISTER = 16


def widened(array: Array, dtype: str) -> Array:
    """A half array in ``dtype``; any other as it is."""
    if array.dtype.name not in HALF:
        return array
    if not _is_fast(array, dtype):
        return array.astype(dtype)
    half = numpy.ascontiguousarray(array)
    wide = numpy.empty(half.shape, dtype)
    whole = _run(kernels.widen, wide, half)
    wide.reshape(-1)[whole:] = half.reshape(-1)[whole:]
    return wide


def put(place: Array, wide: Array) -> None:
    """Write wide numbers to an array of any dtype, rounded to nearest, ties to even."""
    with numpy.errstate(all="ignore"):
        if wide.dtype.name != "float32" or not _is_fast(place, "float32"):
            place[...] = wide
            return
        wide = numpy.ascontiguousarray(wide)
        half = place if place.flags.c_contiguous else numpy.empty(wide.shape, place.dtype)
        whole = _run(kernels.narrow, wide, half)
        half.reshape(-1)[whole:] = wide.reshape(-1)[whole:]
        if half is not place:
            place[...] = half


def _is_fast(half: Array, dtype: str) -> bool:
    native = half.dtype.name == "float16" and half.dtype.isnative
    return bool(native and kernels.FAST and dtype == "float32" and half.size >= _MANY)


def _run(kernel: Any, wide: Array, half: Array) -> int:
    """Whole registers of two contiguous arrays; how many numbers these are."""
    whole: int = wide.size // _REGISTER * _REGISTER
    run(kernel, "float32", -(-whole // kernels.PIECE), float(whole), 0, (whole,), (wide, half))
    return whole
