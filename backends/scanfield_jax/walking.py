"""Walks over time: token by token, in blocks whose first states are kept, through packed sequences.

Arrays are laid (time, batch, ...) here. A step takes ``(state, sums)`` and the slices of one token; ``sums`` is what adds
up along the walk. In a pack the state is exchanged where a sequence begins, and put aside where it ends.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import isqrt
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy
from jax import lax

from scanfield_jax.spreading import scan

Array = Any
Step = Callable[[Any, Any], tuple[Any, Any]]


class Edges(NamedTuple):
    """Where sequences begin and end: (time,) each."""

    first: Array
    last: Array
    sequence: Array


class Ends(NamedTuple):
    """States at the ends of packed sequences, (sequences, ...): those that enter, and room for those that leave.

    Without room nobody asks for the latter.
    """

    entering: Array
    leaving: Array | None


def entering_only(ends: Ends | None) -> Ends | None:
    """The same without room for what leaves."""
    return None if ends is None else Ends(ends.entering, None)


def edges_of(bounds: tuple[int, ...] | Array | None, time: int) -> Edges | None:
    """The edges of a pack of so many tokens; None without one. Bounds that are an array may be traced."""
    if bounds is None:
        return None
    if not isinstance(bounds, tuple):
        # A token's sequence is the last that begins at or before it, which passes over the empty ones.
        begun = jnp.zeros(time + 1, jnp.int32).at[bounds[1:]].add(1)
        of_token = jnp.cumsum(begun)[:time]
        place = jnp.arange(time, dtype=bounds.dtype)
        return Edges(bounds[of_token] == place, bounds[of_token + 1] == place + 1, of_token)
    first, last = numpy.zeros(time, bool), numpy.zeros(time, bool)
    sequence = numpy.zeros(time, numpy.int32)
    for i, (start, stop) in enumerate(pairwise(bounds)):
        sequence[start:stop] = i
        if start < stop:
            first[start] = last[stop - 1] = True
    return Edges(first, last, sequence)


def tokens(
    step: Step,
    carry: Any,
    xs: Any,
    edges: Edges | None = None,
    ends: Ends | None = None,
    *,
    reverse: bool = False,
) -> tuple[Any, Ends | None, Any]:
    """Walk over the tokens of a block: ``step((state, sums), slices) -> ((state, sums), outputs)``.

    In a pack a state of ``ends.entering`` takes the state's place before the first token of its sequence (backward: the
    last), and the state after each token goes to ``ends.leaving``: what stays there is that of the sequence's last.
    """
    if edges is None or ends is None:
        carry, outputs = scan(step, carry, xs, reverse=reverse)
        return carry, ends, outputs

    def packed(carry: Any, slices: Any) -> tuple[Any, Any]:
        (state, sums), leaving = carry
        mark, sequence, slices = slices
        enters = lax.dynamic_index_in_dim(ends.entering, sequence, 0)
        (state, sums), outputs = step((jnp.where(mark, enters, state), sums), slices)
        if leaving is not None:
            leaving = lax.dynamic_update_index_in_dim(leaving, state, sequence, 0)
        return ((state, sums), leaving), outputs

    marks = edges.last if reverse else edges.first
    (carry, leaving), outputs = scan(
        packed, (carry, ends.leaving), (marks, edges.sequence, xs), reverse=reverse
    )
    return carry, ends._replace(leaving=leaving), outputs


def blocks(
    body: Callable[[Any, Any, Any], tuple[Any, Any, Any]],
    carry: Any,
    xs: Any,
    each: Any,
    size: int,
    *,
    reverse: bool = False,
) -> tuple[Any, Any, Any]:
    """Walk over blocks of ``size`` tokens, of which the last may be shorter.

    ``body(carry, slices, entry) -> (carry, outputs, kept)`` gets a block of every array in ``xs`` and the block's entry of
    every one in ``each``; its outputs are joined along time, what is kept is stacked.
    """
    time = jax.tree.leaves(xs)[0].shape[0]
    full, rest = divmod(time, size)
    outputs: list[Any] = []
    kept: list[Any] = []

    def single(carry: Any, start: int, index: int) -> Any:
        slices = jax.tree.map(lambda x: x[start : start + size], xs)
        carry, ys, keep = body(carry, slices, jax.tree.map(lambda x: x[index], each))
        outputs.append(ys)
        kept.append(jax.tree.map(lambda x: x[None], keep))
        return carry

    def whole(carry: Any, given: Any) -> tuple[Any, Any]:
        carry, ys, keep = body(carry, *given)
        return carry, (ys, keep)

    if rest and reverse:
        carry = single(carry, full * size, full)
    if full == 1:
        carry = single(carry, 0, 0)
    elif full:
        split = jax.tree.map(lambda x: x[: full * size].reshape(full, size, *x.shape[1:]), xs)
        entries = jax.tree.map(lambda x: x[:full], each)
        carry, (ys, keep) = scan(whole, carry, (split, entries), reverse=reverse)
        outputs.append(jax.tree.map(lambda y: y.reshape(full * size, *y.shape[2:]), ys))
        kept.append(keep)
    if rest and not reverse:
        carry = single(carry, full * size, full)
    if reverse:
        outputs.reverse()
        kept.reverse()
    return carry, _joined(outputs), _joined(kept)


def _joined(parts: list[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    return jax.tree.map(lambda *xs: jnp.concatenate(xs, axis=0), *parts)


def block_size(asked: int | None, time: int) -> int:
    """Tokens of a block: as asked, or some that balance kept states with recomputed ones and leave no rest."""
    if asked:
        return max(1, min(asked, time))
    best = min(64, max(16, isqrt(time)))
    if time <= best:
        return max(1, time)
    whole = [size for size in range(16, 65) if time % size == 0]
    return min(whole, key=lambda size: abs(size - best), default=best)


def time_first(x: Array | None) -> Any:
    """(batch, time, ...) as (time, batch, ...)."""
    return None if x is None else jnp.moveaxis(x, 1, 0)


def batch_first(x: Array | None) -> Any:
    """(time, batch, ...) as (batch, time, ...)."""
    return None if x is None else jnp.moveaxis(x, 0, 1)


def zeros(shape: tuple[int, ...], dtype: Any, like: Array) -> Array:
    """Zeros that vary over the devices of a ``shard_map`` as ``like`` does: a loop's carry may not change in that."""
    return jnp.zeros(shape, dtype) + jnp.sum(like[:0]).astype(dtype)


def sum_to(x: Array, shape: tuple[int, ...]) -> Array:
    """``x`` summed over each axis that has size 1 in ``shape`` and another size here."""
    axes = tuple(i for i, (have, want) in enumerate(zip(x.shape, shape, strict=True)) if want == 1 != have)
    return jnp.sum(x, axis=axes, keepdims=True) if axes else x
