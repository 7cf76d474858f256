"""What may be written into, and what the functions of ``layerwise`` take: checked before anything is written."""

from __future__ import annotations

import sys
from typing import Any

from scanfield.arrays import Array, check_same_library, dtype_name
from scanfield.errors import ArgumentError, BackendError, DtypeError, ShapeError
from scanfield.pinn.workspace import WRITABLE


def writable(name: str, out: Array, given: dict[str, Array], shape: tuple[int, ...]) -> Any:
    """The library's own module, after checking that ``out`` may be written and shares memory with no argument."""
    library = check_same_library([(name, out), *given.items()])
    if library.name not in WRITABLE:
        raise BackendError(
            f"{name}: {library.name} arrays cannot be written; the forms without out return new ones"
        )
    if tuple(out.shape) != shape:
        raise ShapeError(f"{name} has shape {tuple(out.shape)}; expected {shape}")
    for other, array in given.items():
        if dtype_name(array.dtype) != dtype_name(out.dtype):
            raise DtypeError(f"{other} is {dtype_name(array.dtype)}, {name} is {dtype_name(out.dtype)}")
        if shares_memory(out, array):
            raise ArgumentError(f"{name} shares memory with {other}; pass an array of its own")
    return sys.modules[library.name]


def shares_memory(left: Array, right: Array) -> bool:
    """Whether the stretches of memory that two arrays lie in meet."""
    (a, b), (c, d) = _bounds(left), _bounds(right)
    return a < d and c < b


def _bounds(array: Array) -> tuple[int, int]:
    """First byte, and the byte after the last."""
    if 0 in array.shape:
        return 0, 0
    if hasattr(array, "data_ptr"):
        start, size = array.data_ptr(), array.element_size()
        strides = [step * size for step in array.stride()]
    else:
        size, strides = array.itemsize, list(array.strides)
        start = array.data.ptr if hasattr(array.data, "ptr") else array.__array_interface__["data"][0]
    reach = [(count - 1) * step for count, step in zip(array.shape, strides, strict=True)]
    return start + sum(r for r in reach if r < 0), start + sum(r for r in reach if r > 0) + size


def check_same_shape(name: str, array: Array, other: str, like: Array) -> None:
    """ShapeError unless both have one shape."""
    if tuple(array.shape) != tuple(like.shape):
        raise ShapeError(f"{name} has shape {tuple(array.shape)}, {other} has {tuple(like.shape)}")


def check_layer(dL_dh: Array, h: Array, h_prev: Array, W: Array) -> None:
    """What a layer is swept back with: values (n, width) or jets (d + 2, n, width)."""
    check_same_library([("W", W), ("dL_dh", dL_dh), ("h", h), ("h_prev", h_prev)])
    fits = len(W.shape) == 2 and _values_or_jets(dL_dh) and dL_dh.shape[-1] == W.shape[0]
    if not fits:
        raise ShapeError(
            f"dL_dh has shape {tuple(dL_dh.shape)}, W has {tuple(W.shape)}; expected (n, out) or (d + 2, n, out) "
            "with d = 1, 2 or 3, and (out, in)"
        )
    check_same_shape("h", h, "dL_dh", dL_dh)
    expected = (*dL_dh.shape[:-1], W.shape[1])
    if tuple(h_prev.shape) != expected:
        raise ShapeError(f"h_prev has shape {tuple(h_prev.shape)}; expected {expected}")


def _values_or_jets(array: Array) -> bool:
    """Whether it is (n, width), or (d + 2, n, width) for d of at most 3."""
    return len(array.shape) == 2 or (len(array.shape) == 3 and array.shape[0] in (3, 4, 5))


def check_fourier(dL_dphi: Array, x: Array, B: Array) -> None:
    """What the frequencies are swept back with."""
    check_same_library([("B", B), ("dL_dphi", dL_dphi), ("x", x)])
    if len(B.shape) != 2 or len(x.shape) != 2 or x.shape[1] != B.shape[0]:
        raise ShapeError(
            f"x has shape {tuple(x.shape)}, B has {tuple(B.shape)}; expected (n, d), (d, features)"
        )
    values = (x.shape[0], 2 * B.shape[1])
    jets = (x.shape[1] + 2, *values)
    if tuple(dL_dphi.shape) not in (values, jets):
        raise ShapeError(
            f"dL_dphi has shape {tuple(dL_dphi.shape)}; expected {values}, sines, then cosines, or jets of them, {jets}"
        )
