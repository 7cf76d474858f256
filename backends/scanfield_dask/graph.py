"""A graph under construction: tasks over arrays that fit a grid, and Dask arrays whose blocks are such tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import dask.array as da
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph

from scanfield.arrays import COMPLEX_OF, dtype_of, is_complex, library_of, zeros
from scanfield.dispatch import Call, implementation, operation_of
from scanfield_dask.grid import Grid, Layout, Position, sizes_of
from scanfield_dask.tasks import Block

Array = Any
Key = tuple[Any, ...]
Chunks = tuple[tuple[int, ...], ...]
Blocks = dict[tuple[int, ...], Any]
"""Block of an array -> the task that makes it."""


class Graph:
    """The tasks of one verb of one call.

    A key is (kind and name, *numbers): the kind says what the task makes, the numbers are those of its block.
    """

    def __init__(self, name: str, call: Call, grid: Grid, form: str, arrays: Sequence[Array | None]) -> None:
        self.name = name
        self.call = call
        self.grid = grid
        self.form = form
        self.arrays = tuple(arrays)
        """Those of the call, in the blocks of the grid."""
        self.operation = operation_of(call)
        self.place = [entry.role for entry in self.operation.inputs].index("state")
        self.packed = grid.pieces[0].bounds is not None
        self.tasks: dict[Key, Any] = {}
        self.starts: dict[Key, Key] = {}
        """Key of a block's task -> key of the state that the block before hands on to it."""

    def add(self, kind: str, numbers: Iterable[int], function: Callable[..., Any], *arguments: Any) -> Key:
        """A task: its function, and the keys (or None) of its arguments."""
        key = self.key(kind, numbers)
        self.tasks[key] = (function, *arguments)
        return key

    def key(self, kind: str, numbers: Iterable[int]) -> Key:
        """The key of a task."""
        return (f"{kind}-{self.name}", *numbers)

    def block(self, k: int) -> Block:
        """The static part of the blocks of one piece of time."""
        return Block(self.operation.name, self.call.options, self.call.compute, self.grid.pieces[k])

    def inputs(self, position: Position, k: int, *, state: bool) -> list[Key | None]:
        """The blocks of the call's arrays that a block takes; without ``state`` it starts from none that was given."""
        found = [
            None
            if layout is None or array is None
            else (array.name, *layout.block_at({**position, "time": k}))
            for layout, array in zip(self.grid.arrays, self.arrays, strict=True)
        ]
        if not state:
            found[self.place] = None
        return found

    def begins(self, k: int) -> bool:
        """Whether a block takes of the given states: all but those that merely go on with one row each."""
        return self.packed or not self.grid.pieces[k].entering

    def whole(self, *others: Array, under: Graph | None = None) -> HighLevelGraph:
        """All tasks, over the graphs of the call's arrays, of ``others`` and of the tasks ``under`` them."""
        given = [
            array for array, layout in zip(self.arrays, self.grid.arrays, strict=True) if layout is not None
        ]
        graph: HighLevelGraph = HighLevelGraph.from_collections(
            self.name, self.tasks, dependencies=[*given, *others]
        )
        if under is None:
            return graph
        below = under.whole()
        needed = {*graph.dependencies[self.name], under.name}
        return HighLevelGraph(
            {**below.layers, **graph.layers}, {**below.dependencies, **graph.dependencies, self.name: needed}
        )


def opened(call: Call, verb: str, grid: Grid, form: str) -> Graph:
    """A graph without tasks, its arrays brought to the grid. Equal calls get equal names, so that Dask shares their tasks."""
    operation = operation_of(call)
    arrays = [
        array if layout is None else fitted(array, layout.chunks)
        for array, layout in zip(call.arrays, grid.arrays, strict=True)
    ]
    names = [
        array if layout is None else array.name for array, layout in zip(arrays, grid.arrays, strict=True)
    ]
    token = tokenize(verb, form, call.options, call.compute, names)
    return Graph(f"scanfield-{operation.name}-{verb}-{token}", call, grid, form, arrays)


def fitted(array: Array, chunks: Chunks) -> Array:
    """An array in these blocks; nothing is computed."""
    return array if tuple(array.chunks) == chunks else array.rechunk(chunks)


def array_over(
    whole: HighLevelGraph, name: str, kind: str, chunks: Chunks, blocks: Blocks, meta: Array
) -> Array:
    """A Dask array whose blocks are tasks over the layer ``name``, in a layer of its own."""
    own = f"{kind}-{name}"
    layer = {(own, *index): task for index, task in blocks.items()}
    graph = HighLevelGraph({**whole.layers, own: layer}, {**whole.dependencies, own: {name}})
    return da.Array(graph, own, chunks, meta=meta)


# ---------------------------------------------------------------------------------------------------------------------
# what the blocks will be


class Metas(NamedTuple):
    """Small arrays of the blocks' own library that show the dtypes of the results, and the shape of a transition."""

    output: Array
    state: Array
    transition: Array
    transition_axes: tuple[str | None, ...]
    """The state's axis that each of its axes is; None for one of size 1."""


def metas_of(graph: Graph) -> Metas:
    """The generic code, which defines the meaning, run on no tokens."""
    operation, call = graph.operation, graph.call
    dims = sizes_of(operation, call)
    # A size of its own for each axis, so that those of a transition tell which they are; groups of one element.
    sizes = {axis: i + 2 for i, axis in enumerate(dims)} | dict.fromkeys(operation.groups, 1) | {"time": 0}
    sizes["sequence"] = sizes["batch"]
    arrays: list[Any] = []
    for entry, array in zip(operation.inputs, call.arrays, strict=True):
        if array is None or entry.role == "index":
            arrays.append(None)
            continue
        shape = [
            1 if size == 1 != dims[axis] else sizes[axis]
            for axis, size in zip(entry.axes, array.shape, strict=True)
        ]
        meta = array._meta
        arrays.append(zeros(library_of(meta, entry.name).namespace, shape, array.dtype, meta))
    small = call._replace(arrays=tuple(arrays))
    code: Any = implementation(operation.name, f"generic.{next(iter(operation.generic))}")
    output, state = code.forward(small)
    transition, _ = code.summarise(small)
    axes = operation.inputs[graph.place].axes
    names = {sizes[axis]: axis for axis in axes}
    found = tuple(
        axis if have == want else names.get(have)
        for axis, have, want in zip(axes, transition.shape, state.shape, strict=True)
    )
    return Metas(output, state, transition, found)


def gradient_meta(graph: Graph, array: Array) -> Array:
    """Of the gradient of an array: in the carry's dtype, or its complex partner."""
    name = COMPLEX_OF[graph.call.compute] if is_complex(array) else graph.call.compute
    meta = array._meta
    xp = library_of(meta, "meta").namespace
    return zeros(xp, (0,) * len(array.shape), dtype_of(xp, name), meta)


def transition_layout(graph: Graph, axes: Sequence[str | None]) -> Layout:
    """How a transition lies in the grid."""
    state = graph.grid.state
    names = graph.operation.inputs[graph.place].axes
    columns: list[tuple[str | None, tuple[int, ...], tuple[int, ...]]] = []
    for j, axis in enumerate(axes):
        if axis == names[j]:
            columns.append((state.axes[j], state.blocks[j], state.chunks[j]))
        else:  # 1, or another axis of the state, which then multiplies and so is whole
            columns.append((None, (), (1 if axis is None else sum(state.chunks[names.index(axis)]),)))
    return Layout(*(tuple(column) for column in zip(*columns, strict=True)))


def first_of_each(
    layout: Layout, positions: Iterable[Mapping[str, int]]
) -> dict[tuple[int, ...], dict[str, int]]:
    """For each block of an array the first block of the lanes that makes it."""
    found: dict[tuple[int, ...], dict[str, int]] = {}
    for position in positions:
        found.setdefault(layout.block_at(position), dict(position))
    return found
