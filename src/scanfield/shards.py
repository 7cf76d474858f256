"""One sequence cut over the ranks of a group: what every engine shares, whatever carries its messages.

Glossary (``docs/parallel.md``)
--------
rank          who holds a slice of time; ranks hold consecutive slices, in order
walk          the order in which the recurrence runs: that of the ranks, or the opposite with ``reverse``
S_in, S_out   the state that comes into a shard and the one that leaves it, in the order of the walk
M, N          the shard's map S_out = M S_in + N, for a shard that one sequence runs through
gamma         the cotangent of S_in from the shard's own outputs alone

Forward: S_in of a shard is what the maps of the shards before it make of the first state. Backward, with G the cotangent:
G_in = M^H G_out + gamma, from the last shard to the first; then each shard runs its own gradient with S_in and G_out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy

from scanfield.affine import Affine
from scanfield.arrays import Array, host_integers, is_complex, library_of, zeros
from scanfield.dispatch import Call, Operation, Prepared, operation_of, registry
from scanfield.errors import ArgumentError, BackendError, ShapeError
from scanfield.scans import packing
from scanfield.scans.binding import Bound, bind
from scanfield.scans.canonical import quiet

__all__ = [
    "Bound",
    "Place",
    "Shard",
    "adjoint",
    "block_map",
    "bounds_of",
    "check_arguments",
    "identity",
    "local_time",
    "places",
    "sources",
    "whole_bounds",
]


class Place(NamedTuple):
    """What one rank holds of a sequence, or of a pack of them."""

    tokens: tuple[int, int]
    """First token and the one behind the last, in the whole."""
    sequences: tuple[int, int] | None
    """First sequence with tokens here (or an empty one that lies here) and the one behind the last; None: no pack."""
    enters: bool
    """A sequence comes in from the rank before it in the walk."""
    leaves: bool
    """A sequence goes on in the next rank of the walk."""
    through: bool
    """The one that comes in is the one that goes on: S_out = M S_in + N. Else S_out hangs on nothing before."""


def places(lengths: Sequence[int], cu_seqlens: tuple[int, ...] | None, reverse: bool) -> tuple[Place, ...]:
    """What each rank holds, in the order of the ranks, whose shards have these numbers of tokens.

    ShapeError unless ``cu_seqlens`` rises from 0 to the sum of the lengths.
    """
    packing.check_bounds(cu_seqlens, 1, sum(lengths))
    last = len(lengths) - 1
    bounds = None if cu_seqlens is None else numpy.asarray(cu_seqlens, dtype=numpy.int64)
    found, start = [], 0
    for rank, length in enumerate(lengths):
        stop = start + length
        sequences = None
        left, right = rank > 0, rank < last
        if bounds is not None:
            # An empty sequence lies where its place is; behind everything, on the last rank.
            first, behind = (int(i) for i in numpy.searchsorted(bounds[:-1], (start, stop)))
            behind = bounds.size - 1 if rank == last else behind
            left = first > 0 and bool(bounds[first] > start)
            first -= left
            right = behind > first and bool(bounds[behind] > stop)
            sequences = (first, behind)
        enters, leaves = (right, left) if reverse else (left, right)
        one = sequences is None or sequences[1] - sequences[0] == 1
        found.append(Place((start, stop), sequences, enters, leaves, enters and leaves and one))
        start = stop
    return tuple(found)


def bounds_of(place: Place, cu_seqlens: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """``cu_seqlens`` of what lies in a place, in its own tokens."""
    if cu_seqlens is None or place.sequences is None:
        return None
    first, behind = place.sequences
    start, stop = place.tokens
    return (0, *[min(bound, stop) - start for bound in cu_seqlens[first + 1 : behind + 1]])


def whole_bounds(cu_seqlens: Any) -> tuple[int, ...]:
    """``cu_seqlens`` as host integers, wherever its values are."""
    return packing.host_bounds(host_integers(cu_seqlens, "cu_seqlens"))


def sources(walk: Sequence[Place], rank: int, *, backward: bool = False) -> range:
    """The ranks (numbered along the walk) whose maps make S_in of a rank, in order; empty where nothing comes in.

    The first of them sends a state. With ``backward``, those whose maps make the cotangent of S_out, from behind.
    """
    step = 1 if backward else -1
    if not (walk[rank].leaves if backward else walk[rank].enters):
        return range(0)
    first = rank + step
    while walk[first].through:
        first += step
    return range(first, rank, -step)


def check_arguments(op: Any, arrays: Sequence[Any], options: Mapping[str, Any]) -> Bound:
    """The call, sorted; ArgumentError for what no shard can have."""
    bound = bind(op, arrays, options)
    if bound.states_at is not None:
        raise ArgumentError(
            "states_at: not over ranks; call the operation on the shard with the state that enters it"
        )
    return bound


def local_time(bound: Bound) -> int:
    """Tokens of this rank, its arrays checked against each other."""
    arrays = {**bound.arrays, "cu_seqlens": None, "initial_state": None}
    prepared = bound.record.prepare(arrays, bound.options)
    call = prepared.call
    return _time(operation_of(call), call) // prepared.stretch


class Shard:
    """One rank's slice in canonical form, and what a rank does with it.

    ``initial_state`` of the call is the whole one: the batch's, or one state for each sequence of the pack. What of it
    does not start here stands in the call until ``entered`` takes its place.
    """

    def __init__(self, bound: Bound, place: Place, cu_seqlens: tuple[int, ...] | None) -> None:
        """``cu_seqlens`` is that of the whole pack."""
        sequences = None if cu_seqlens is None else len(cu_seqlens) - 1
        self.place, self.method, self.total = place, bound.method, sequences
        self.reverse = bool(bound.options["reverse"])
        state = bound.arrays["initial_state"]
        if place.sequences is not None and state is not None:
            if state.ndim == 0 or state.shape[0] != sequences:
                raise ShapeError(
                    f"initial_state: shape {tuple(state.shape)}; over ranks it holds all {sequences} sequences of cu_seqlens"
                )
            state = state[place.sequences[0] : place.sequences[1], ...]
        arrays = {**bound.arrays, "initial_state": state, "cu_seqlens": bounds_of(place, cu_seqlens)}
        self.prepared: Prepared = bound.record.prepare(arrays, bound.options)
        self.call: Call = self.prepared.call
        self.operation = operation_of(self.call)
        roles = [entry.role for entry in self.operation.inputs]
        self.at = roles.index("state")

    # -- rows of states ------------------------------------------------------------------------------------------------

    @property
    def rows(self) -> slice:
        """Where the states that end here lie among those of all sequences, along the walk."""
        first, behind = self.place.sequences or (0, 0)
        start = (self.total or 0) - behind if self.reverse else first
        return slice(start, start + behind - first - self.place.leaves)

    def ended(self, states: Array) -> Array:
        """Of the states after this shard, those of sequences that end here."""
        if not self.place.leaves:
            return states
        return states[:0, ...] if self.place.sequences is None else states[:-1, ...]

    def leaving(self, states: Array) -> Array:
        """Of the states after this shard, the one that goes on."""
        return states if self.place.sequences is None else states[-1:, ...]

    def entering(self, states: Array) -> Array:
        """Of the states before this shard, the one that comes in."""
        return states if self.place.sequences is None else states[:1, ...]

    def after(self, ended: Array | None, going: Array | None, like: Array) -> Array | None:
        """Cotangents of all states after this shard, from those of sequences that end here and of the one that goes on."""
        if not self.place.leaves:
            return ended
        if going is None and ended is None:
            return None
        if self.place.sequences is None:
            return going
        xp = library_of(like, "state").namespace
        parts = [
            xp.zeros_like(like[:-1, ...]) if ended is None else ended,
            xp.zeros_like(like[-1:, ...]) if going is None else going,
        ]
        return xp.concat(parts, axis=0)

    def entered(self, incoming: Array | None, call: Call) -> Call:
        """The call with the state that comes in; None for zeros (and where nothing comes in)."""
        given = call.arrays[self.at]
        if self.place.enters:
            if incoming is None:
                incoming = self.nothing(call)
            if self.place.sequences is None:
                given = incoming
            else:
                xp = library_of(incoming, "state").namespace
                count = self.place.sequences[1] - self.place.sequences[0]
                if count > 1:
                    others = [xp.zeros_like(incoming)] * (count - 1) if given is None else [given[1:, ...]]
                    incoming = xp.concat([incoming, *others], axis=0)
                given = incoming
        return call._replace(arrays=(*call.arrays[: self.at], given, *call.arrays[self.at + 1 :]))

    # -- the shard as a map --------------------------------------------------------------------------------------------

    def identity(self, call: Call) -> Affine:
        """As the function of this name."""
        return identity(call)

    def nothing(self, call: Call) -> Array:
        """A state of zeros for the sequence that comes in."""
        return identity(call).state

    def map(self, call: Call) -> Affine:
        """M and N of a shard that one sequence runs through."""
        return block_map(call, self.method)


def identity(call: Call) -> Affine:
    """The map of no tokens of a call's one sequence: the shape and dtype of all its maps."""
    operation = operation_of(call)
    arrays = [
        None if entry.role in ("state", "index") else array
        for entry, array in zip(operation.inputs, call.arrays, strict=True)
    ]
    dense = call._replace(arrays=tuple(arrays))
    form: Any = operation.generic[operation.choose(dense).removeprefix("generic.")]
    _, shape, _, dtype = form.shapes(dense)
    main = call.arrays[operation.main_index]
    xp = library_of(main, operation.main).namespace
    return Affine(form.identity(dense), zeros(xp, shape, dtype, main), operation.diagonal(call))


def block_map(call: Call, method: str | None) -> Affine:
    """M and N of a call, whatever state it has."""
    operation = operation_of(call)
    at = [entry.role for entry in operation.inputs].index("state")
    call = call._replace(arrays=(*call.arrays[:at], None, *call.arrays[at + 1 :]))
    try:
        transition, state = registry.call(call, "summarise", method)
    except BackendError:  # a forced candidate need not have this verb; the map is the same by any
        transition, state = registry.call(call, "summarise", "generic")
    return Affine(transition, state, operation.diagonal(call))


def adjoint(block: Affine, gamma: Array) -> Affine:
    """The map of cotangents G_in = M^H G_out + gamma of a block S_out = M S_in + N."""
    library = library_of(gamma, "gamma")
    xp = library.namespace
    with quiet(library.name):
        turned = block.transition if block.diagonal else xp.matrix_transpose(block.transition)
        return Affine(xp.conj(turned) if is_complex(turned) else turned, gamma, block.diagonal)


def _time(operation: Operation, call: Call) -> int:
    """Canonical tokens; an array that is tied along time has size 1 there."""
    sizes = [
        array.shape[1]
        for entry, array in zip(operation.inputs, call.arrays, strict=True)
        if entry.role == "sequence" and array is not None
    ]
    return int(next((size for size in sizes if size != 1), 1))
