"""The verbs of every operation as graphs over blocks; nothing is computed before the caller computes.

Over time a graph has one of two forms. *Sequential*: each block starts from the state that the block before hands on.
*Parallel*: all blocks but the last are summarised as affine maps, a tree of compositions gives each block's starting
state, then all run at once: about twice the work, and a path of log(blocks). The gradient goes from the last block to
the first in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import itemgetter
from typing import Any

from dask.base import tokenize

from scanfield.affine import compose
from scanfield.dispatch import Call, Grads, Operation, Verb, operation_of
from scanfield_dask import tasks
from scanfield_dask.graph import (
    Blocks,
    Graph,
    Key,
    array_over,
    first_of_each,
    fitted,
    gradient_meta,
    metas_of,
    opened,
    transition_layout,
)
from scanfield_dask.grid import Grid, grid_of, told

Array = Any


def blocks(operation: str) -> Lifted:
    """The form that the grid asks for."""
    return Lifted(None)


def sequential(operation: str) -> Lifted:
    """Block after block."""
    return Lifted("sequential")


def parallel(operation: str) -> Lifted:
    """Maps first, then all blocks at once."""
    return Lifted("parallel")


_MANY = 8
"""Blocks of time from which twice the work pays where nothing else can run at once."""


class Lifted:
    """Implementation of any operation whose record says how its axes may be cut."""

    def __init__(self, form: str | None) -> None:
        self._form = form

    def declines(self, call: Call, verb: Verb) -> str | None:
        """A record that does not say which axes the output has."""
        operation = operation_of(call)
        return None if operation.output else f"the record of {operation.name} names no axes of its output"

    def notes(self, call: Call) -> tuple[str, ...]:
        """The grid, the form, and which arrays are cut anew to fit."""
        operation = operation_of(call)
        grid = grid_of(operation, call)
        return told(operation, call, grid, self._form_for(operation, call, grid))

    def forward(self, call: Call) -> tuple[Array, Array]:
        """Output and final state."""
        return _results(self._open(call, "forward"), "forward")

    def step(self, call: Call) -> tuple[Array, Array]:
        """Output and state after one token."""
        return _results(self._open(call, "step"), "step")

    def save(self, call: Call) -> tuple[Array, Array, tuple[Any, ...]]:
        """Output, final state and, in the place of residuals, the graph that makes each block's own."""
        graph = self._open(call, "save")
        return *_results(graph, "save"), (graph,)

    def backward(
        self,
        call: Call,
        residuals: tuple[Any, ...],
        d_output: Array | None,
        d_final_state: Array | None,
        wanted: tuple[bool, ...],
    ) -> Grads:
        """The wanted gradients, block by block from the last to the first in time."""
        return _gradients(residuals[0], d_output, d_final_state, tuple(bool(want) for want in wanted))

    def summarise(self, call: Call) -> tuple[Array, Array]:
        """Transition and final state from zero, of the whole."""
        return _summary(self._open(call, "summarise"))

    def _open(self, call: Call, verb: Verb) -> Graph:
        operation = operation_of(call)
        grid = grid_of(operation, call)
        return opened(call, verb, grid, self._form_for(operation, call, grid))

    def _form_for(self, operation: Operation, call: Call, grid: Grid) -> str:
        if len(grid.pieces) == 1:
            return "blocks"
        if self._form is not None:
            return self._form
        # From the call alone, not from the workers at hand: the same graph, and the same bits, on every machine.
        alone = len(grid.lane_positions()) == 1
        many = len(grid.pieces) >= _MANY
        return "parallel" if alone and many and operation.diagonal(call) else "sequential"


# ---------------------------------------------------------------------------------------------------------------------
# forward


def _results(graph: Graph, verb: Verb) -> tuple[Array, Array]:
    """A task for each block, started from the right state: the output of all, and the final states."""
    grid, pieces = graph.grid, graph.grid.pieces
    outputs: Blocks = {}
    states: Blocks = {}
    for position in grid.lane_positions():
        lanes = tuple(position.values())
        if graph.form == "parallel":
            _start_all(graph, position)
        runs: list[Key] = []
        for k, piece in enumerate(pieces):
            run = graph.key("run", (*lanes, k))
            if piece.entering and graph.form != "parallel":
                # In a task of its own: where the state goes, the output need not go with it.
                take = partial(tasks.last_row, 1) if graph.packed else itemgetter(1)
                graph.starts[run] = graph.add("carry", (*lanes, k), take, runs[-1])
            block = graph.block(k)
            function = partial(tasks.save, block) if verb == "save" else partial(tasks.run, block, verb)
            inputs = graph.inputs(position, k, state=graph.begins(k))
            graph.add("run", (*lanes, k), function, graph.starts.get(run), *inputs)
            outputs[grid.output.block_at({**position, "time": k})] = (itemgetter(0), run)
            runs.append(run)
        states[grid.state.block_at(position)] = (
            _ends(graph, lanes, 1, runs) if graph.packed else (itemgetter(1), runs[-1])
        )
    whole, metas = graph.whole(), metas_of(graph)
    return (
        array_over(whole, graph.name, "output", grid.output.chunks, outputs, metas.output),
        array_over(whole, graph.name, "state", grid.state.chunks, states, metas.state),
    )


def _ends(graph: Graph, lanes: Sequence[int], entry: int, results: Sequence[Key]) -> tuple[Any, ...]:
    """A task that joins, of each piece's results, those of the packed sequences that end there."""
    ends = [
        graph.add(f"end{entry}", (*lanes, k), partial(tasks.finished, piece, entry), key)
        for k, (piece, key) in enumerate(zip(graph.grid.pieces, results, strict=True))
    ]
    return (tasks.join, *ends)


def _start_all(graph: Graph, position: dict[str, int]) -> None:
    """The state that each block starts from, by the maps of the blocks before it.

    A chain is a run of pieces that share a sequence: all of them, unless sequences are packed.
    """
    pieces = graph.grid.pieces
    begin = 0
    while begin < len(pieces):
        end = begin
        while pieces[end].leaving and (
            end == begin or not graph.packed or pieces[end].last - pieces[end].first == 1
        ):
            end += 1
        if end > begin:
            _start_chain(graph, position, begin, end)
        begin = max(end, begin + 1)


def _start_chain(graph: Graph, position: dict[str, int], begin: int, end: int) -> None:
    """The starts of blocks ``begin`` + 1 to ``end``: maps are composed up a binary tree, states go down it."""
    lanes = tuple(position.values())
    maps: dict[tuple[int, int], Key] = {}

    def map_over(low: int, high: int) -> Key:
        if (low, high) not in maps:
            if high - low == 1:
                function: Any = partial(tasks.summarise_tail, graph.block(low))
                arguments = graph.inputs(position, low, state=False)
            else:
                middle = (low + high) // 2
                function, arguments = compose, [map_over(low, middle), map_over(middle, high)]
            maps[low, high] = graph.add("map", (*lanes, low, high), function, *arguments)
        return maps[low, high]

    def descend(low: int, high: int, state: Key | None) -> None:
        if high - low == 1:
            if low > begin and state is not None:
                graph.starts[graph.key("run", (*lanes, low))] = state
            return
        middle = (low + high) // 2
        descend(low, middle, state)
        right = graph.add("enter", (*lanes, middle), tasks.enter, map_over(low, middle), state)
        descend(middle, high, right)

    state = graph.inputs(position, begin, state=True)[graph.place]
    if state is not None and graph.packed:
        number = graph.grid.pieces[begin].last - 1
        state = graph.add("given", (*lanes, begin), partial(tasks.row, number), state)
    descend(begin, end + 1, state)


# ---------------------------------------------------------------------------------------------------------------------
# backward


def _gradients(
    saved: Graph, d_output: Array | None, d_final_state: Array | None, wanted: tuple[bool, ...]
) -> list[Array | None]:
    grid, pieces = saved.grid, saved.grid.pieces
    d_output = None if d_output is None else fitted(d_output, grid.output.chunks)
    d_final_state = None if d_final_state is None else fitted(d_final_state, grid.state.chunks)
    names = [None if array is None else array.name for array in (d_output, d_final_state)]
    name = f"scanfield-{saved.operation.name}-backward-{tokenize(saved.name, names, wanted)}"
    graph = Graph(name, saved.call, grid, saved.form, saved.arrays)
    parts: list[dict[tuple[int, ...], list[Key]]] = [{} for _ in wanted]
    for position in grid.lane_positions():
        lanes = tuple(position.values())
        d_carry: Key | None = None
        for k in range(len(pieces) - 1, -1, -1):
            run, place = saved.key("run", (*lanes, k)), {**position, "time": k}
            back = graph.add(
                "back",
                (*lanes, k),
                partial(tasks.backward, saved.block(k), wanted),
                saved.starts.get(run),
                graph.add("kept", (*lanes, k), itemgetter(2), run),
                None if d_output is None else (d_output.name, *grid.output.block_at(place)),
                None
                if d_final_state is None or (pieces[k].leaving and not saved.packed)
                else (d_final_state.name, *grid.state.block_at(place)),
                d_carry,
                *saved.inputs(position, k, state=saved.begins(k)),
            )
            d_carry = None
            if pieces[k].entering:
                d_carry = graph.add("d_carry", (*lanes, k), itemgetter(len(wanted)), back)
            for i, (want, layout) in enumerate(zip(wanted, grid.arrays, strict=True)):
                if want and layout is not None and (i != saved.place or saved.begins(k)):
                    part = graph.add(f"part{i}", (*lanes, k), itemgetter(i), back)
                    parts[i].setdefault(layout.block_at(place), []).append(part)
    sums = [_sums(graph, i, found) for i, found in enumerate(parts)]
    whole = graph.whole(*(array for array in (d_output, d_final_state) if array is not None), under=saved)
    return [
        array_over(whole, name, f"d_{entry.name}", layout.chunks, made, gradient_meta(saved, array))
        if made and layout is not None
        else None
        for entry, layout, array, made in zip(
            saved.operation.inputs, grid.arrays, saved.arrays, sums, strict=True
        )
    ]


_TERMS = 8
"""Gradients that one task adds up: those of many blocks are added in a tree."""


def _sums(graph: Graph, i: int, parts: dict[tuple[int, ...], list[Key]]) -> Blocks:
    """For each block of an array the task that makes its gradient of its parts, which came from last to first in time."""
    made: Blocks = {}
    for index, found in parts.items():
        keys, level = found[::-1], 0
        if i == graph.place:  # rows of packed sequences, or the only part
            made[index] = (tasks.join, *keys)
            continue
        while len(keys) > _TERMS:
            groups = [keys[at : at + _TERMS] for at in range(0, len(keys), _TERMS)]
            keys = [
                graph.add(f"sum{i}", (*index, level, n), tasks.add, *group) for n, group in enumerate(groups)
            ]
            level += 1
        made[index] = (tasks.add, *keys)
    return made


# ---------------------------------------------------------------------------------------------------------------------
# summarise


def _summary(graph: Graph) -> tuple[Array, Array]:
    grid = graph.grid
    metas = metas_of(graph)
    layout = transition_layout(graph, metas.transition_axes)
    positions = grid.lane_positions()
    made = {tuple(position.values()): _maps(graph, position) for position in positions}
    states = {grid.state.block_at(position): made[tuple(position.values())][1] for position in positions}
    transitions = {
        index: made[tuple(position.values())][0]
        for index, position in first_of_each(layout, positions).items()
    }
    whole = graph.whole()
    return (
        array_over(whole, graph.name, "transition", layout.chunks, transitions, metas.transition),
        array_over(whole, graph.name, "state", grid.state.chunks, states, metas.state),
    )


def _maps(graph: Graph, position: dict[str, int]) -> tuple[Any, Any]:
    """The tasks that make the transition and the state of one block of the lanes, over all pieces of time."""
    pieces, lanes = graph.grid.pieces, tuple(position.values())
    keys = [
        graph.add(
            "map",
            (*lanes, k, k + 1),
            partial(tasks.summarise, graph.block(k)),
            *graph.inputs(position, k, state=False),
        )
        for k in range(len(pieces))
    ]
    if graph.packed:
        for k, piece in enumerate(pieces):
            if piece.entering:
                before = graph.add("carry", (*lanes, k), tasks.last_map, keys[k - 1])
                keys[k] = graph.add("rows", (*lanes, k), tasks.compose_rows, before, keys[k])
        return _ends(graph, lanes, 0, keys), _ends(graph, lanes, 1, keys)
    width = 1
    while len(keys) > 1:
        width *= 2
        pairs = [keys[at : at + 2] for at in range(0, len(keys), 2)]
        keys = [
            graph.add("map", (*lanes, n * width, (n + 1) * width), compose, *pair)
            if len(pair) == 2
            else pair[0]
            for n, pair in enumerate(pairs)
        ]
    return (itemgetter(0), keys[0]), (itemgetter(1), keys[0])
