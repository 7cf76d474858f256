"""The steps of the PINN's sweep back of single layers on CuPy arrays, a kernel each; sums in an order that the shapes fix."""

from __future__ import annotations

import math
from typing import Any

import cupy
import numpy

from scanfield.arrays import dtype_name
from scanfield.pinn.kernels import Channels
from scanfield.pinn.primitives import Primitives, Take
from scanfield_cupy.layout import dtype, steps
from scanfield_cupy.modules import MOST_ROWS, STORED, THREADS, blocks_for, launch

Array = Any

# Columns of a block that sums rows, as the kernels have them. Long columns are cut into segments of so many rows, and into no
# more than so many segments.
COLUMNS, _SEGMENT, _SEGMENTS = 32, 1024, 64


class Steps(Primitives):
    """``Primitives`` by kernels. Arrays of more than two axes that are not contiguous are left to CuPy's own functions."""

    def subtract(self, a: Array, b: Array, out: Array, accumulate: bool) -> None:
        """out = a - b"""
        if not _elementwise("subtract", (a, b), out, (int(accumulate),)):
            super().subtract(a, b, out, accumulate)

    def scale(self, a: Array, s: float, out: Array, accumulate: bool) -> None:
        """out = a s"""
        with numpy.errstate(over="ignore"):  # a factor beyond float32 is infinite, as on the card
            factor = out.dtype.type(s)
        if not _elementwise("scale", (a, factor), out, (int(accumulate),)):
            super().scale(a, s, out, accumulate)

    def tanh_slope_times(self, h: Array, g: Array, out: Array, accumulate: bool) -> None:
        """out = (1 - h^2) g"""
        if not _elementwise("tanh_slope_times", (h, g), out, (int(accumulate),)):
            super().tanh_slope_times(h, g, out, accumulate)

    def zero(self, out: Array) -> None:
        """out = 0"""
        if not _elementwise("zero", (), out, ()):
            super().zero(out)

    def sum_rows(self, a: Array, out: Array, accumulate: bool, take: Take | None = None) -> None:
        """out (width,) = the sum of the rows of a (n, width)"""
        n, width = a.shape
        if n == 0 or width == 0 or not _is_real(out):
            super().sum_rows(a, out, accumulate, take)
            return
        segments, each = cut_rows(n)
        if segments > 1:
            parts = _room(take, "parts", (segments, width), out)
            _sum(a, parts, n, width, width, segments, each, False)
            a, n, each = parts, segments, segments
        _sum(a, out, n, width, width, 1, each, accumulate)

    def frequency_gradient(
        self,
        x: Array,
        dL_dphi: Array,
        B: Array,
        out: Array,
        two_pi: float,
        accumulate: bool,
        take: Take | None = None,
    ) -> None:
        """out (d, features) = two_pi x^T (cos p dL_dphi_sin - sin p dL_dphi_cos) with p = two_pi x B"""
        (n, d), m = x.shape, B.shape[1]
        if 0 in (n, d, m) or not _is_real(out):
            super().frequency_gradient(x, dL_dphi, B, out, two_pi, accumulate, take)
            return
        segments, each = cut_rows(n)
        to = out if segments == 1 else _room(take, "parts", (segments * d, m), out)
        launch(
            "pinn_steps.cu",
            {"REAL": STORED[dtype_name(out.dtype)]},
            "frequency_gradient",
            (-(-m // COLUMNS), segments, 1),
            (*plane(x), *plane(dL_dphi), *plane(B), *plane(to), n, m, d, segments, each, out.dtype.type(two_pi),
             int(accumulate and segments == 1)),
            THREADS * out.dtype.itemsize,
        )  # fmt: skip
        if segments > 1:
            sum_segments(to, out, segments, accumulate)


def _is_real(x: Array) -> bool:
    return dtype_name(x.dtype) in ("float32", "float64")


def cut_rows(rows: int) -> tuple[int, int]:
    """Segments of a column, and the rows of each."""
    segments = max(1, min(_SEGMENTS, MOST_ROWS, -(-rows // _SEGMENT)))
    each = -(-rows // segments)
    return -(-rows // each), each


def _room(take: Take | None, name: str, shape: tuple[int, ...], like: Array) -> Array:
    return cupy.empty(shape, dtype(dtype_name(like.dtype))) if take is None else take(name, shape)


def plane(x: Array) -> tuple[Any, ...]:
    """An array of two axes, or of one as a row, as kernels take it: address, and steps along rows and columns."""
    found = steps(x)
    return (x, *(found if len(found) == 2 else (0, *found)))


def _elementwise(kernel: str, given: tuple[Any, ...], out: Array, more: tuple[int, ...]) -> bool:
    """Launch what sees one element at a time; False where arrays are no planes of numbers that kernels take."""
    if not _is_real(out):
        return False
    if out.size == 0:
        return True
    arrays = [x for x in (*given, out) if isinstance(x, cupy.ndarray)]
    if all(x.flags.c_contiguous for x in arrays):
        rows, width = 1, math.prod(out.shape)
        places = {id(x): (x, 0, 1) for x in arrays}
    elif out.ndim in (1, 2):
        rows, width = (1, *out.shape)[-2:]
        places = {id(x): plane(x) for x in arrays}
    else:
        return False
    arguments = [y for x in (*given, out) for y in places.get(id(x), (x,))]
    launch(
        "pinn_steps.cu",
        {"REAL": STORED[dtype_name(out.dtype)]},
        kernel,
        (blocks_for(rows * width), 1, 1),
        (*arguments, rows, width, *more),
        0,
        THREADS,
    )
    return True


def sum_segments(parts: Array, out: Array, segments: int, accumulate: bool) -> None:
    """out (d, width) = the sum of so many planes that lie one below the other, or added to it."""
    size, width = out.shape[0] * out.shape[1], out.shape[1]
    _sum(parts.reshape((segments, size)), out, segments, size, width, 1, segments, accumulate)


def weights_of(channels: Channels) -> tuple[Array | None, Array | None]:
    """The weights of both channels as kernels read them; None for a Laplacian's, and for a channel that is not there."""
    found = [None if x is None else cupy.ascontiguousarray(x) for x in channels]
    first, second = (*found, None, None)[:2]
    return first, second


def _sum(
    a: Array, out: Array, rows: int, width: int, inner: int, segments: int, each: int, accumulate: bool
) -> None:
    launch(
        "pinn_steps.cu",
        {"REAL": STORED[dtype_name(out.dtype)]},
        "row_sums",
        (-(-width // COLUMNS), segments, 1),
        (*plane(a), *plane(out), rows, width, inner, segments, each, int(accumulate)),
        THREADS * out.dtype.itemsize,
    )
