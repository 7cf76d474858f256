"""Where a call is cut: the grid of blocks that all of its arrays fit, from the operation's record alone.

Glossary
--------
lane axis  batch, or an axis of both output and state: nothing meets along it, so blocks of it never talk
cuts       the bounds of the blocks along an axis, (0, ..., size)
piece      a block of time; where sequences are packed it knows which of them it meets
position   grid axis -> number of the block along it
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate, pairwise, product
from math import prod
from typing import Any, NamedTuple

from scanfield.dispatch import Call, Input, Operation

Array = Any
Cuts = tuple[int, ...]
Position = Mapping[str, int]


class Piece(NamedTuple):
    """Tokens ``start`` to ``stop``, and the sequences ``first`` to ``last`` (exclusive) that have tokens there."""

    start: int
    stop: int
    entering: bool
    """Whether the first of its sequences began in the piece before."""
    leaving: bool
    """Whether the last of them goes on in the piece after."""
    bounds: Cuts | None = None
    """Of its packed sequences, counted from ``start``; None where each row of the batch is one sequence."""
    first: int = 0
    last: int = 0
    tail: int = 0
    """Where the last of its sequences starts, counted from ``start``; 0 for one that began before."""


class Layout(NamedTuple):
    """How one array lies in the grid: for each of its axes the grid axis that cuts it, and which block that means."""

    axes: tuple[str | None, ...]
    blocks: tuple[tuple[int, ...], ...]
    chunks: tuple[tuple[int, ...], ...]

    def block_at(self, position: Position) -> tuple[int, ...]:
        """The block of this array that a block of the grid takes."""
        return tuple(
            0 if axis is None else blocks[position[axis]]
            for axis, blocks in zip(self.axes, self.blocks, strict=True)
        )


class Grid(NamedTuple):
    """The blocks of a call."""

    lanes: tuple[str, ...]
    cuts: dict[str, Cuts]
    pieces: tuple[Piece, ...]
    arrays: tuple[Layout | None, ...]
    """Of the call's arrays, in their order."""
    output: Layout
    state: Layout

    def lane_positions(self) -> list[dict[str, int]]:
        """The blocks of the lanes: chains of pieces that never talk to each other."""
        ranges = [range(len(self.cuts[axis]) - 1) for axis in self.lanes]
        return [dict(zip(self.lanes, numbers, strict=True)) for numbers in product(*ranges)]


def grid_of(operation: Operation, call: Call) -> Grid:
    """The coarsest grid with every cut that an array of the call has along time or a lane axis.

    So no block grows, and nothing but cutting brings an array to it: unless an axis is cut that must stay whole, as the
    components of a key, which meet.
    """
    bounds = _bounds(operation, call)
    state_axes = tuple(_state(operation).axes)
    output_axes = tuple(operation.output.split())
    both = tuple(axis for axis in output_axes if axis in state_axes)
    lanes = both if bounds is not None else ("batch", *both)
    sizes = sizes_of(operation, call)
    if bounds is not None:
        sizes["sequence"] = len(bounds) - 1
    cuts = {axis: _cuts_along(operation, call, axis, sizes) for axis in (*lanes, "time")}
    ratios = {small: sizes[large] // max(sizes[small], 1) for small, large in operation.groups.items()}
    for axis in lanes:
        members = [ratios[small] for small, large in operation.groups.items() if large == axis]
        cuts[axis] = _fit_groups(cuts[axis], members)

    def layout(axes: Iterable[str], shape: Iterable[int]) -> Layout:
        entries = [
            _axis(axis, size, sizes, cuts, operation, ratios) for axis, size in zip(axes, shape, strict=True)
        ]
        return Layout(*zip(*entries, strict=True))

    arrays = tuple(
        None if array is None or entry.role == "index" else layout(_named(entry, bounds), array.shape)
        for entry, array in zip(operation.inputs, call.arrays, strict=True)
    )
    named = _named(_state(operation), bounds)
    return Grid(
        lanes,
        cuts,
        _pieces(cuts["time"], bounds),
        arrays,
        layout(output_axes, [sizes[axis] for axis in output_axes]),
        layout(named, [sizes[axis] for axis in named]),
    )


def _bounds(operation: Operation, call: Call) -> Cuts | None:
    roles = [entry.role for entry in operation.inputs]
    found: Cuts | None = call.arrays[roles.index("index")] if "index" in roles else None
    return found


def _state(operation: Operation) -> Input:
    return next(entry for entry in operation.inputs if entry.role == "state")


def _named(entry: Input, bounds: Cuts | None) -> tuple[str, ...]:
    """The axes of an input; where nothing is packed a row of the batch is a sequence."""
    if bounds is not None:
        return entry.axes
    return tuple("batch" if axis == "sequence" else axis for axis in entry.axes)


def sizes_of(operation: Operation, call: Call) -> dict[str, int]:
    """The size of each axis; a tied array shows it only where no other one does."""
    sizes: dict[str, int] = {}
    for entry, array in zip(operation.inputs, call.arrays, strict=True):
        if array is None or entry.role == "index":
            continue
        for axis, size in zip(entry.axes, array.shape, strict=True):
            known = sizes.get(axis, 1)
            sizes[axis] = int(size) if known == 1 else known
    return sizes


def _cuts_along(operation: Operation, call: Call, axis: str, sizes: Mapping[str, int]) -> Cuts:
    size = sizes[axis]
    found = {0, size}
    packed = _bounds(operation, call) is not None
    for entry, array in zip(operation.inputs, call.arrays, strict=True):
        if array is None or entry.role == "index":
            continue
        for name, chunks in zip(_named(entry, () if packed else None), array.chunks, strict=True):
            whole = sum(chunks)
            if name == axis and whole == size:
                found.update(accumulate(chunks))
            elif operation.groups.get(name) == axis and whole:
                found.update(bound * (size // whole) for bound in accumulate(chunks))
    return tuple(sorted(found)) if size else (0, 0)


def _fit_groups(cuts: Cuts, ratios: Iterable[int]) -> Cuts:
    """The cuts, and those that it takes for each block to hold whole groups, or to lie within one."""
    found = set(cuts)
    ratios = [ratio for ratio in ratios if ratio > 1]
    before = 0
    while len(found) != before:
        before = len(found)
        for start, stop in pairwise(sorted(found)):
            for ratio in ratios:
                if (start % ratio or stop % ratio) and start // ratio != (stop - 1) // ratio:
                    found |= {-(-start // ratio) * ratio, stop // ratio * ratio}
    return tuple(sorted(found)) if cuts[-1] else cuts


def _axis(
    axis: str,
    size: int,
    sizes: Mapping[str, int],
    cuts: Mapping[str, Cuts],
    operation: Operation,
    ratios: Mapping[str, int],
) -> tuple[str | None, tuple[int, ...], tuple[int, ...]]:
    """Of an axis of an array: the grid axis that cuts it, the block for each of the grid's, and the sizes of its blocks."""
    large = operation.groups.get(axis)
    if axis in cuts and size == sizes[axis] and size:
        widths = tuple(stop - start for start, stop in pairwise(cuts[axis]))
        return axis, tuple(range(len(widths))), widths
    if large is not None and large in cuts and size > 1 and ratios[axis]:
        spans = [(start // ratios[axis], -(-stop // ratios[axis])) for start, stop in pairwise(cuts[large])]
        order = sorted(set(spans))
        return large, tuple(order.index(span) for span in spans), tuple(stop - start for start, stop in order)
    return None, (), (int(size),)


def _pieces(cuts: Cuts, bounds: Cuts | None) -> tuple[Piece, ...]:
    end = cuts[-1]
    pieces = []
    for start, stop in pairwise(cuts):
        if bounds is None:
            pieces.append(Piece(start, stop, start > 0, stop < end))
            continue
        met = [
            i
            for i, (first, last) in enumerate(pairwise(bounds))
            if (
                first < stop and last > start
                if first < last
                else start <= first < stop or first == stop == end
            )
        ]
        first, last = (met[0], met[-1] + 1) if met else (0, 0)
        edges = [min(max(bound, start), stop) - start for bound in bounds[first : last + 1]]
        entering = bool(met) and bounds[first] < start
        leaving = bool(met) and bounds[last] > stop
        tail = max(bounds[last - 1] - start, 0) if met else 0
        pieces.append(Piece(start, stop, entering, leaving, tuple(edges), first, last, tail))
    return tuple(pieces)


def told(operation: Operation, call: Call, grid: Grid, form: str) -> tuple[str, ...]:
    """The grid in words, for ``explain``."""
    counts = {axis: len(cuts) - 1 for axis, cuts in grid.cuts.items()}
    shown = ", ".join(f"{axis} {count}" for axis, count in counts.items())
    sentences = [f"{prod(counts.values())} blocks ({shown}); {_FORMS[form]}."]
    for entry, array, layout in zip(operation.inputs, call.arrays, grid.arrays, strict=True):
        if layout is None:
            continue
        changed = [
            f"{axis} {_sizes_text(have)} to {_sizes_text(want)}"
            for axis, have, want in zip(entry.axes, array.chunks, layout.chunks, strict=True)
            if tuple(have) != want
        ]
        if changed:
            sentences.append(f"{entry.name} is cut anew to fit: {'; '.join(changed)}.")
    return tuple(sentences)


_FORMS = {
    "blocks": "no block waits for another",
    "sequential": "sequential over time: the state goes from block to block",
    "parallel": "parallel over time: blocks are summarised, their maps composed, then all run at once",
}


def _sizes_text(sizes: Iterable[int]) -> str:
    listed = [str(size) for size in sizes]
    return "+".join(listed if len(listed) <= 6 else [*listed[:3], "...", listed[-1]])
