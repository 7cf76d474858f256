"""Packed sequences: ``cu_seqlens`` checked, and a packed array cut into batches that the dense code can run.

Sequences of similar length (within a factor of two) go into one batch, padded at the end with tokens that leave the
state as it is. So a pack costs at most twice its tokens, in a handful of dense calls, whatever its sequences are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy

from scanfield.arrays import Array, Namespace, device_of, host_integers, library_of
from scanfield.errors import ShapeError

Bounds = tuple[int, ...] | Array


def read_bounds(cu_seqlens: Any) -> tuple[Bounds | None, int | None]:
    """``cu_seqlens`` as host integers where its values are at hand, and the number of sequences; or (None, None)."""
    if cu_seqlens is None:
        return None, None
    bounds = host_integers(cu_seqlens, "cu_seqlens")
    count = len(bounds) if isinstance(bounds, tuple) else bounds.shape[0]
    if count < 1:
        raise ShapeError("cu_seqlens: empty; it holds the bounds of the sequences and starts with 0")
    return bounds, count - 1


def check_bounds(bounds: Bounds | None, batch: int, time: int) -> None:
    """ShapeError unless the batch is 1 and the bounds rise from 0 to ``time``."""
    if bounds is None:
        return
    if batch != 1:
        raise ShapeError(
            f"cu_seqlens: packed sequences lie end to end in one row, so batch must be 1; it is {batch}"
        )
    if not isinstance(bounds, tuple):
        return
    if not bounds:
        raise ShapeError("cu_seqlens: holds nothing; its first bound is 0, its last the time")
    if bounds[0] != 0:
        raise ShapeError(f"cu_seqlens: starts with {bounds[0]}, must start with 0")
    for before, after in pairwise(bounds):
        if after < before:
            raise ShapeError(f"cu_seqlens: falls from {before} to {after}; bounds must not decrease")
    if bounds[-1] != time:
        raise ShapeError(f"cu_seqlens: ends with {bounds[-1]}, must end with the time {time}")


def flip_bounds(xp: Namespace, bounds: Bounds | None, time: int) -> Bounds | None:
    """The bounds of the same pack with time running backwards."""
    if bounds is None:
        return None
    if isinstance(bounds, tuple):
        return tuple(time - bound for bound in reversed(bounds))
    return time - xp.flip(bounds)


class Group(NamedTuple):
    """Sequences that run as one batch; ``tokens`` (sequences * length,) are their places in the pack."""

    sequences: tuple[int, ...]
    length: int
    tokens: numpy.ndarray[Any, Any]
    padding: numpy.ndarray[Any, Any] | None
    """(sequences, length), True where a token is real; None where all are."""


class Plan(NamedTuple):
    """How a pack is cut into groups and put together again."""

    groups: tuple[Group, ...]
    tokens: numpy.ndarray[Any, Any]
    """Place of each token of the pack in the groups' outputs laid end to end."""
    states: numpy.ndarray[Any, Any]
    """Place of each sequence in the groups' states laid end to end; empty sequences come first."""
    empty: tuple[int, ...]


@lru_cache(maxsize=64)
def _plan(bounds: tuple[int, ...]) -> Plan:
    lengths = [after - before for before, after in pairwise(bounds)]
    by_size: dict[int, list[int]] = {}
    for sequence, length in enumerate(lengths):
        by_size.setdefault((length - 1).bit_length() if length else -1, []).append(sequence)
    empty = tuple(by_size.pop(-1, ()))
    groups = []
    token_places = numpy.zeros(bounds[-1], dtype=numpy.int64)
    offset = 0
    for members in by_size.values():
        longest = max(lengths[sequence] for sequence in members)
        tokens = numpy.zeros((len(members), longest), dtype=numpy.int64)
        real = numpy.zeros((len(members), longest), dtype=bool)
        for row, sequence in enumerate(members):
            start, length = bounds[sequence], lengths[sequence]
            tokens[row] = start + numpy.minimum(numpy.arange(longest), length - 1)
            real[row, :length] = True
            token_places[start : start + length] = offset + row * longest + numpy.arange(length)
        offset += tokens.size
        groups.append(Group(tuple(members), longest, tokens.ravel(), None if real.all() else real))
    order = [*empty, *(sequence for group in groups for sequence in group.sequences)]
    state_places = numpy.argsort(numpy.asarray(order, dtype=numpy.int64), kind="stable")
    return Plan(tuple(groups), token_places, state_places, empty)


def host_bounds(bounds: Bounds) -> tuple[int, ...]:
    """The bounds as Python ints; read to the host if they live on an accelerator."""
    return bounds if isinstance(bounds, tuple) else tuple(int(bound) for bound in bounds.tolist())


def plan_of(bounds: Bounds) -> Plan:
    """The plan for a pack."""
    return _plan(host_bounds(bounds))


def gather(xp: Namespace, array: Array, group: Group, neutral: float) -> Array:
    """(1, time, ...) -> (sequences, length, ...) of one group, pads set to ``neutral``."""
    taken = _take(xp, xp.squeeze(array, axis=0), group.tokens)
    batch = xp.reshape(taken, (len(group.sequences), group.length, *array.shape[2:]))
    if group.padding is None:
        return batch
    mask = xp.asarray(group.padding, device=device_of(array))
    mask = xp.reshape(mask, (*group.padding.shape, *(1 for _ in array.shape[2:])))
    return xp.where(mask, batch, xp.full_like(batch, neutral))


def scatter(xp: Namespace, parts: Sequence[Array], plan: Plan) -> Array:
    """The groups' (sequences, length, ...) arrays as (1, time, ...) of the pack; pads fall away."""
    flat = [xp.reshape(part, (part.shape[0] * part.shape[1], *part.shape[2:])) for part in parts]
    return xp.expand_dims(
        _take(xp, flat[0] if len(flat) == 1 else xp.concat(flat, axis=0), plan.tokens), axis=0
    )


def take_states(xp: Namespace, states: Array, sequences: Sequence[int]) -> Array:
    """The rows of ``states`` that belong to these sequences."""
    return _take(xp, states, numpy.asarray(sequences, dtype=numpy.int64))


def join_states(xp: Namespace, parts: Sequence[Array], plan: Plan) -> Array:
    """States of empty sequences and of each group, laid end to end, in the order of the pack."""
    return _take(xp, parts[0] if len(parts) == 1 else xp.concat(list(parts), axis=0), plan.states)


def _take(xp: Namespace, array: Array, places: numpy.ndarray[Any, Any]) -> Array:
    if (
        library_of(array, "array").name == "dask"
    ):  # an index whose values are known keeps the graph small, and right
        return xp.take(array, places, axis=0)
    index = xp.__array_namespace_info__().default_dtypes(device=device_of(array))["indexing"]
    return xp.take(array, xp.asarray(places, dtype=index, device=device_of(array)), axis=0)
