"""The states inside a sequence that ``states_at`` asks for."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy

from scanfield.advice import shown
from scanfield.arrays import Array, library_of
from scanfield.dispatch import Call, Operation, Prepared, operation_of, registry
from scanfield.errors import ArgumentError, DtypeError, ShapeError
from scanfield.scans import packing
from scanfield.scans.options import DEFAULT_CHUNK


class ScanStates(NamedTuple):
    """What a scan with ``states_at`` returns: ``states[:, i]`` is the state at the boundary before token ``t_i``.

    That is the state which comes into the token or, with ``reverse``, which has come out of it, in the token's own
    sequence if several are packed.
    """

    output: Array
    final_state: Array
    states: Array


def with_states(
    prepared: Prepared,
    options: Mapping[str, Any],
    states_at: Sequence[int] | str,
    method: str | None,
) -> ScanStates:
    """A call that is made ready, and the states at the boundaries asked for."""
    call, stretch = prepared.call, prepared.stretch
    operation = operation_of(call)
    reverse = options.get("reverse")
    roles = [entry.role for entry in operation.inputs]
    bounds = call.arrays[roles.index("index")]
    time, starts, cuts = check_boundaries(prepared, options, states_at)
    # In canonical time, where reversed sequences run forward too.
    walked = [time - cut for cut in cuts] if reverse else cuts
    place = roles.index("state")
    if bounds is None:
        y, last, found = _in_parts(operation, call, walked, stretch, place, method)
    else:
        y, last = registry.call(call, "forward", method)
        # A boundary belongs to the sequence of the token on its right; a chunk's start to the chunk.
        arrived = bool(reverse) and states_at != "chunks"
        found = _in_pack(operation, call, walked, stretch, place, starts, arrived, method)
    xp = library_of(last, "state").namespace
    output, final_state = prepared.output(y), prepared.state(last)
    if not cuts:
        empty = xp.expand_dims(final_state[:1, ...] if bounds is not None else final_state, axis=1)
        return ScanStates(output, final_state, empty[:, :0, ...])
    return ScanStates(output, final_state, xp.stack([prepared.state(found[cut]) for cut in walked], axis=1))


def check_boundaries(
    prepared: Prepared, options: Mapping[str, Any], states_at: Sequence[int] | str
) -> tuple[int, tuple[int, ...], list[int]]:
    """The number of tokens, where sequences start and end, and the boundaries that ``states_at`` asks for."""
    call, stretch = prepared.call, prepared.stretch
    operation = operation_of(call)
    time = _time(operation, call) // stretch
    bounds = next(x for entry, x in zip(operation.inputs, call.arrays, strict=True) if entry.role == "index")
    starts = (0, time) if bounds is None else tuple(bound // stretch for bound in packing.host_bounds(bounds))
    reverse = bool(options.get("reverse"))
    return time, starts, boundaries(states_at, time, options.get("chunk_size"), starts, reverse=reverse)


def _in_parts(
    operation: Operation, call: Call, cuts: Sequence[int], stretch: int, place: int, method: str | None
) -> tuple[Array, Array, dict[int, Array]]:
    """One sequence from boundary to boundary: output, final state, and the state at each."""
    time = _time(operation, call) // stretch
    found: dict[int, Array] = {}
    pieces, state, start = [], call.arrays[place], 0
    for stop in sorted({*cuts, time}):
        part = _cut(operation, call, start * stretch, stop * stretch, state)
        output, state = registry.call(part, "forward", method)
        found[stop] = state
        pieces.append(output)
        start = stop
    xp = library_of(state, "state").namespace
    return xp.concat(pieces, axis=1), state, found


def _in_pack(
    operation: Operation,
    call: Call,
    cuts: Sequence[int],
    stretch: int,
    place: int,
    starts: Sequence[int],
    arrived: bool,
    method: str | None,
) -> dict[int, Array]:
    """The state before token t in that token's sequence; each sequence is run once more, up to its last boundary.

    With ``arrived`` it is the state after token t - 1, in that one's sequence.
    """
    states = call.arrays[place]
    found: dict[int, Array] = {}
    index = next(i for i, entry in enumerate(operation.inputs) if entry.role == "index")
    dense = call._replace(arrays=(*call.arrays[:index], None, *call.arrays[index + 1 :]))
    before: tuple[int, int, Array | None] = (-1, 0, None)
    for cut in sorted(set(cuts)):
        sequence = max(_sequence_of(starts, cut - 1 if arrived and cut else cut), 0)
        if before[0] != sequence:
            row = None if states is None else states[sequence : sequence + 1, ...]
            before = (sequence, starts[sequence], row)
        part = _cut(operation, dense, before[1] * stretch, cut * stretch, before[2])
        found[cut] = registry.call(part, "forward", method)[1]
        before = (sequence, cut, found[cut])
    return found


def _sequence_of(starts: Sequence[int], token: int) -> int:
    """The sequence of a token; that of the last token for the boundary behind it."""
    return bisect.bisect_right(starts, min(token, starts[-1] - 1)) - 1


def _time(operation: Operation, call: Call) -> int:
    return int(
        max(
            (
                array.shape[1]
                for entry, array in zip(operation.inputs, call.arrays, strict=True)
                if entry.role == "sequence" and array is not None and array.shape[1] != 1
            ),
            default=call.arrays[operation.main_index].shape[1],
        )
    )


def _cut(operation: Operation, call: Call, start: int, stop: int, state: Array | None) -> Call:
    arrays = []
    length = _time(operation, call)
    for entry, array in zip(operation.inputs, call.arrays, strict=True):
        if entry.role == "state":
            arrays.append(state)
        elif entry.role == "sequence" and array is not None and (array.shape[1] == length):
            arrays.append(array[:, start:stop, ...])
        else:
            arrays.append(array)
    return call._replace(arrays=tuple(arrays))


def boundaries(
    states_at: Any, time: int, chunk_size: int | None, starts: Sequence[int], *, reverse: bool
) -> list[int]:
    """The boundaries that ``states_at`` asks for: ``"chunks"`` is where each chunk of each sequence starts."""
    if isinstance(states_at, str):
        if states_at != "chunks":
            raise ArgumentError(
                f"states_at: {shown(states_at)}; allowed are 'chunks' and a sequence of boundaries"
            )
        size = chunk_size or DEFAULT_CHUNK
        walked = [cut for first, last in itertools.pairwise(starts) for cut in range(first, last, size)]
        return [time - cut for cut in walked] if reverse else walked
    if isinstance(states_at, numpy.ndarray) and states_at.ndim == 1:
        states_at = list(states_at)
    if not isinstance(states_at, Sequence):
        raise ArgumentError(
            f"states_at: came {type(states_at).__name__}; allowed are 'chunks' and a sequence of boundaries"
        )
    cuts = []
    for value in states_at:
        if isinstance(value, bool) or not isinstance(value, int | numpy.integer):
            raise DtypeError(f"states_at: expected integers, came {type(value).__name__} ({shown(value)})")
        if not 0 <= value <= time:
            raise ShapeError(f"states_at: boundary {value} lies outside 0..{time}")
        cuts.append(int(value))
    return cuts
