"""What the kernels of all scans are given: flat arrays, and a table of the sequences."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy

from scanfield.arrays import HALF, REAL_OF, dtype_name
from scanfield.dispatch import Call
from scanfield_numpy.vector import lane_count

Array = Any

COLUMNS = 5
"""Of the table: row of the batch, first token, token after the last, first saved state, place in partial sums."""


Residuals = tuple[tuple[tuple[int, ...], str], ...]
"""Shape and dtype of each array that ``save`` keeps: what a compiler asks for, which has shapes but no values."""


def saved_states(batch: int, time: int, bounds: tuple[int, ...] | None, chunk: int) -> int:
    """How many states are saved, one every ``chunk`` tokens."""
    if bounds is None:
        return batch * -(-time // chunk)
    return sum(-(-(last - first) // chunk) for first, last in pairwise(bounds))


class Sequences(NamedTuple):
    """The sequences of a call: rows of a batch, or parts of a pack."""

    table: Array
    number: int
    states: int
    """How many states are saved."""
    empty: tuple[int, ...]


@lru_cache(16)  # a decoding step asks for the same one over and over, and is little more work than making it
def sequences(batch: int, time: int, bounds: tuple[int, ...] | None, chunk: int) -> Sequences:
    """The table of a call whose state is saved every ``chunk`` tokens."""
    if bounds is None:
        each = -(-time // chunk)
        table = numpy.zeros((batch, COLUMNS), numpy.int64)
        table[:, 0] = table[:, 4] = numpy.arange(batch)
        table[:, 2] = time
        table[:, 3] = numpy.arange(batch) * each
        return Sequences(table.reshape(-1), batch, batch * each, () if time else tuple(range(batch)))
    table = numpy.zeros((len(bounds) - 1, COLUMNS), numpy.int64)
    saved = 0
    for i, (first, last) in enumerate(pairwise(bounds)):
        table[i] = 0, first, last, saved, i
        saved += -(-(last - first) // chunk)
    empty = tuple(i for i, (first, last) in enumerate(pairwise(bounds)) if first == last)
    return Sequences(table.reshape(-1), len(table), saved, empty)


def flat(array: Array | None, dtype: str) -> Array:
    """An array as a kernel takes it: contiguous, in ``dtype``; zero-size for one that is absent.

    Copies only what does not lie so already.
    """
    if array is None:
        return ABSENT[dtype]
    flags = array.flags
    if array.dtype is OWN[dtype] and flags.c_contiguous and flags.aligned:
        return array
    return numpy.require(array, dtype, ("C", "A", "E"))


def rows(array: Array | None, dtype: str, *, repeated: bool = True) -> tuple[Array, tuple[int, ...]]:
    """An array whose rows (its last axis) are contiguous or, where that may be, one number ``repeated``; and its steps.

    The steps are the numbers from one element to the next along each axis, 0 along an axis of size 1. Copies only what
    does not lie so: a transposed batch, a slice or flip of time, a broadcast axis stay where they are. A kernel that
    finds a number at the sum of its indices times the steps needs nothing else to take an array as it lies.
    """
    if array is None:
        return ABSENT[dtype], (0, 0, 0)
    size, flags = OWN[dtype].itemsize, array.flags
    if array.dtype is OWN[dtype] and flags.c_contiguous and flags.aligned:
        return array, _steps(array.shape)
    if (
        array.dtype != dtype
        or not array.flags.aligned
        or any(step % size for step in array.strides)
        or (array.strides[-1] not in ((0, size) if repeated else (size,)) and array.shape[-1] > 1)
    ):
        array = numpy.require(array, dtype, ("C", "A", "E"))
    strides = zip(array.shape, array.strides, strict=True)
    return array, tuple(0 if count == 1 else step // size for count, step in strides)


@lru_cache(256)
def _steps(shape: tuple[int, ...]) -> tuple[int, ...]:
    """``rows``' steps of a contiguous array."""
    steps, step = [], 1
    for count in reversed(shape):
        steps.append(0 if count == 1 else step)
        step *= count
    return tuple(reversed(steps))


def flat_complex(array: Array | None, dtype: str) -> Array:
    """A complex array as a kernel takes it: flat, real and imaginary parts in turn."""
    if array is None:
        return ABSENT[REAL_OF[dtype]]
    return numpy.require(array, dtype, ("C", "A", "E")).reshape(-1).view(REAL_OF[dtype])


OWN = {name: numpy.dtype(name) for name in ("float32", "float64")}
"""The machine's own dtypes, one object each."""
ABSENT = {name: numpy.empty(0, name) for name in ("float32", "float64")}
"""An array that is absent, as kernels take it."""


def lanes_of(dtype: str) -> int:
    """Numbers in one vector register."""
    return lane_count(numpy.dtype(dtype).itemsize)


def width(array: Array | None) -> int:
    """Of an array's last axis; 0 for one that is absent."""
    return 0 if array is None else int(array.shape[-1])


def stride(array: Array, axis: int) -> int:
    """Numbers from one element to the next along an axis of a contiguous array; 0 along an axis of size 1."""
    if array.shape[axis] == 1:
        return 0
    step = 1
    for size in array.shape[axis + 1 :]:
        step *= size
    return step


def reason_against(call: Call, index: int) -> str | None:
    """Why a call's arrays cannot be handed to a kernel; ``index`` is the place of ``cu_seqlens``."""
    bounds = call.arrays[index]
    if bounds is not None and not isinstance(bounds, tuple):
        return "cu_seqlens: its values are not on the host"
    own = OWN.get(call.compute)
    for i, array in enumerate(call.arrays):
        if i == index or array is None or array.dtype is own:
            continue
        name = dtype_name(array.dtype)
        if name in HALF:
            continue  # widened a block at a time
        if REAL_OF.get(name) not in ABSENT:
            return f"dtype {name}: kernels are compiled for float32 and float64, real and complex, and take half precision"
        if REAL_OF[name] != call.compute or not array.dtype.isnative:
            return f"dtype {array.dtype.str}: kernels take all arrays in the machine's own {call.compute}"
    return None
