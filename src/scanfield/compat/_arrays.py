"""What the stand-ins share: axes moved, states written in place, rows of packed sequences."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy

from scanfield.arrays import (
    Array,
    Namespace,
    cast,
    check_same_library,
    device_of,
    dtype_name,
    dtype_of,
    host_integers,
    library_of,
    widest,
)
from scanfield.errors import ArgumentError, BackendError, ShapeError
from scanfield.scans import packing
from scanfield.scans.canonical import axes_text, quiet
from scanfield.scans.selective_forms import sigmoid


def namespace(**arrays: Any) -> Namespace:
    """The namespace of these arrays (None is left out); BackendError or DeviceError for a mix."""
    return check_same_library(
        [(name, array) for name, array in arrays.items() if array is not None], peers=True
    ).namespace


def check_rank(array: Array, name: str, *layouts: str) -> None:
    """ShapeError unless the array has as many axes as one of these layouts, "batch channels time" and the like."""
    shape = getattr(array, "shape", None)
    if shape is None:
        library_of(array, name)  # raises: no array
    elif len(shape) not in {len(layout.split()) for layout in layouts}:
        allowed = " or ".join(f"({', '.join(layout.split())})" for layout in layouts)
        raise ShapeError(f"{name}: shape {tuple(shape)} has {axes_text(len(shape))}; expected {allowed}")


def check_shape(array: Array, name: str, **sizes: int) -> None:
    """ShapeError unless the array has these sizes, given by the names of its axes in order."""
    if tuple(array.shape) != tuple(sizes.values()):
        raise ShapeError(
            f"{name}: shape {tuple(array.shape)}, but ({', '.join(sizes)}) = {tuple(sizes.values())} is expected"
        )


def time_second(xp: Namespace, x: Array) -> Array:
    """(batch, ..., time) -> (batch, time, ...)"""
    rank = len(x.shape)
    return xp.permute_dims(x, (0, rank - 1, *range(1, rank - 1)))


def time_last(xp: Namespace, x: Array) -> Array:
    """(batch, time, ...) -> (batch, ..., time)"""
    return xp.permute_dims(x, (0, *range(2, len(x.shape)), 1))


def wide(xp: Namespace, x: Array) -> Array:
    """A real array in float32 at least, in which gates and sums are computed."""
    return cast(xp, x, dtype_of(xp, widest([dtype_name(x.dtype)])))


def silu(xp: Namespace, x: Array) -> Array:
    """x sigmoid(x)"""
    return x * sigmoid(xp, x)


def gated(xp: Namespace, y: Array, z: Array, dtype: Any) -> Array:
    """y z sigmoid(z), rounded once."""
    z = wide(xp, z)
    with quiet(library_of(z, "z").name):
        return cast(xp, wide(xp, y) * silu(xp, z), dtype)


def take(xp: Namespace, array: Array, places: Any, axis: int = 0) -> Array:
    """The entries at these host integers along one axis."""
    index = numpy.asarray(places, dtype=numpy.int64)
    if library_of(array, "array").name == "dask":  # an index whose values are known keeps the graph small
        return xp.take(array, index, axis=axis)
    device = device_of(array)
    dtype = xp.__array_namespace_info__().default_dtypes(device=device)["indexing"]
    return xp.take(array, xp.asarray(index.tolist(), dtype=dtype, device=device), axis=axis)


def host_tuple(values: Any, name: str) -> tuple[int, ...]:
    """Integers of one axis on the host, wherever they lie."""
    found = host_integers(values, name)
    return found if isinstance(found, tuple) else tuple(int(value) for value in found.tolist())


# ---------------------------------------------------------------------------------------------------------------------
# states in place


def check_writable(state: Array, name: str) -> None:
    """BackendError for an array that cannot be changed in place."""
    library = library_of(state, name).name
    if library == "jax" or (library == "numpy" and not state.flags.writeable):
        raise BackendError(
            f"{name}: the state is updated in place, and this {library} array is read-only; "
            f"the functional form is scanfield's own: output, {name} = scanfield.selective_scan.step({name}, ...)"
        )


def write(state: Array, value: Array, name: str, rows: Sequence[int] | None = None) -> None:
    """Put ``value`` into ``state``, in its own dtype and through its strides; into these rows alone if given."""
    check_writable(state, name)
    xp = library_of(state, name).namespace
    value = cast(xp, value, state.dtype)
    if rows is None:
        state[...] = value
    else:
        for place, row in enumerate(rows):
            state[row, ...] = value[place, ...]


def check_rows(values: Any, name: str, batch: int, pool: int) -> tuple[int, ...]:
    """Rows of a pool of states, one for each of the batch, none twice."""
    rows = host_tuple(values, name)
    if len(rows) != batch:
        raise ShapeError(f"{name}: {len(rows)} rows for a batch of {batch}")
    for row in rows:
        if not 0 <= row < pool:
            raise ShapeError(f"{name}: row {row} lies outside the pool of {pool} states")
    if len(set(rows)) != len(rows):
        raise ArgumentError(f"{name}: {rows} names a row twice; the two updates would overwrite each other")
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# packed sequences


class Pack(NamedTuple):
    """Rows laid end to end with the bounds of all their sequences; the first and the last sequence of each row."""

    bounds: tuple[int, ...]
    first: tuple[int, ...]
    last: tuple[int, ...]


def pack_of(seq_idx: Array, batch: int, time: int) -> Pack:
    """The sequences of ``seq_idx`` (batch, time): a new one wherever the number changes, and at each row."""
    check_rank(seq_idx, "seq_idx", "batch time")
    check_shape(seq_idx, "seq_idx", batch=batch, time=time)
    xp = library_of(seq_idx, "seq_idx").namespace
    numbers = host_tuple(xp.reshape(seq_idx, (batch * time,)), "seq_idx")
    bounds: list[int] = []
    first, last = [], []
    for row in range(batch):
        first.append(len(bounds))
        start = row * time
        bounds.append(start)
        bounds += [t for t in range(start + 1, start + time) if numbers[t] != numbers[t - 1]]
        last.append(len(bounds) - 1)
    return Pack((*bounds, batch * time), tuple(first), tuple(last))


def check_seq_idx_agrees(pack: Pack, cu_seqlens: Any) -> None:
    """ArgumentError where ``seq_idx`` and ``cu_seqlens`` cut one packed row differently (empty sequences aside)."""
    bounds = sorted(set(host_tuple(cu_seqlens, "cu_seqlens")))
    if tuple(bounds) != pack.bounds:
        raise ArgumentError(
            f"seq_idx: changes at {pack.bounds[1:-1]}, but cu_seqlens cuts at {tuple(bounds[1:-1])}; pass one of them"
        )


def folded(xp: Namespace, x: Array | None) -> Array | None:
    """(batch, time, ...) -> (1, batch * time, ...)"""
    return None if x is None else xp.reshape(x, (1, x.shape[0] * x.shape[1], *x.shape[2:]))


def spread_states(xp: Namespace, states: Array | None, pack: Pack) -> Array | None:
    """States of rows as those of all sequences: a row's goes to its first one, the others start from zeros."""
    if states is None:
        return None
    count = len(pack.bounds) - 1
    with_zeros = xp.concat([states, xp.zeros_like(states[:1, ...])], axis=0)
    places = [states.shape[0]] * count
    for row, sequence in enumerate(pack.first):
        places[sequence] = row
    return take(xp, with_zeros, places)


def lengths(bounds: Sequence[int]) -> list[int]:
    """The number of tokens of each sequence."""
    return [after - before for before, after in pairwise(bounds)]


def checked_bounds(cu_seqlens: Any, batch: int, time: int) -> tuple[int, ...]:
    """``cu_seqlens`` as host integers, checked as every scan checks them."""
    bounds, _ = packing.read_bounds(cu_seqlens)
    assert bounds is not None
    host = packing.host_bounds(bounds)
    packing.check_bounds(host, batch, time)
    return host
