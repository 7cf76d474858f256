"""What a task does with its block: plain functions of arrays of the block's own library.

Each builds the block's call and hands it to the dispatcher, which chooses among the implementations of that library. They
are importable by name, and a task's own data is small and static, so that a worker elsewhere can be sent one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy

from scanfield.affine import Affine, advance, compose
from scanfield.arrays import COMPLEX_OF, cast, dtype_of, is_complex, library_of, zeros
from scanfield.dispatch import Call, Verb, implementation, operation_of, registry, use
from scanfield_dask.grid import Piece

Array = Any


class Block(NamedTuple):
    """What a block's call has beside its arrays."""

    operation: str
    options: tuple[Any, ...]
    compute: str
    piece: Piece


class Kept(NamedTuple):
    """Residuals, and the name of the implementation that made them."""

    name: str
    residuals: tuple[Array, ...]


# Within a task nothing is forced: a method that the caller forces chose the graph, and its name means nothing here.


def run(block: Block, verb: Verb, carry: Array | None, *arrays: Array | None) -> tuple[Array, Array]:
    """Output and final state of a block that starts from ``carry``."""
    with use(method=None):
        output, state = registry.call(_call(block, carry, arrays), verb)
        return output, state


def save(block: Block, carry: Array | None, *arrays: Array | None) -> tuple[Array, Array, Kept]:
    """The same, and what its gradient needs."""
    with use(method=None):
        output, state, residuals, chosen = registry.save(_call(block, carry, arrays))
    return output, state, Kept(chosen.name, residuals)


def backward(
    block: Block,
    wanted: tuple[bool, ...],
    carry: Array | None,
    kept: Kept,
    d_output: Array | None,
    d_final_state: Array | None,
    d_carry: Array | None,
    *arrays: Array | None,
) -> tuple[Any, ...]:
    """The wanted gradients of a block's arrays, and that of the carry at the end.

    ``d_carry`` is the gradient of what the block handed on, ``d_final_state`` that of the final states (all of them,
    where sequences are packed).
    """
    piece, call = block.piece, _call(block, carry, arrays)
    place = _state_place(call)
    asked = tuple(want or (i == place and piece.entering) for i, want in enumerate(wanted))
    code: Any = implementation(block.operation, kept.name)
    with use(method=None):
        d_state = _state_cotangent(piece, call.arrays[place], d_final_state, d_carry)
        grads = code.backward(call, kept.residuals, d_output, d_state, asked)
    found: list[Any] = [
        None if grad is None else _as_declared(block.compute, array, grad)
        for array, grad in zip(call.arrays, grads, strict=True)
    ]
    passed_on = None
    if piece.entering:
        passed_on = found[place] if piece.bounds is None else found[place][:1, ...]
        # What began here is the rest, if it began from a given state.
        begun = piece.bounds is not None and wanted[place]
        found[place] = found[place][1:, ...] if begun else None
    return (*found, passed_on)


def summarise(block: Block, *arrays: Array | None) -> Affine:
    """The map of the state of each of the block's sequences."""
    return _map_of(_call(block, None, arrays, plain=True))


def summarise_tail(block: Block, *arrays: Array | None) -> Affine:
    """The map of what the block hands on: of its last sequence alone where several are packed."""
    call = _call(block, None, arrays, plain=True)
    piece = block.piece
    length = piece.stop - piece.start
    record = operation_of(call)
    cut = [
        None
        if entry.role == "index"
        else array[:, piece.tail :, ...]
        if piece.tail and entry.role == "sequence" and array is not None and array.shape[1] == length
        else array
        for entry, array in zip(record.inputs, call.arrays, strict=True)
    ]
    return _map_of(call._replace(arrays=tuple(cut)))


def compose_rows(left: Affine, right: Affine) -> Affine:
    """The maps of a block's sequences with what came before put in front of the first of them."""
    first = compose(left, _rows(right, 0, 1))
    if right.state.shape[0] == 1:
        return first
    rest = _rows(right, 1, right.state.shape[0])
    xp = library_of(right.state, "state").namespace
    return Affine(
        xp.concat([first.transition, rest.transition], axis=0),
        xp.concat([first.state, rest.state], axis=0),
        right.diagonal,
    )


def last_map(maps: Affine) -> Affine:
    """The map of the last sequence alone."""
    return _rows(maps, maps.state.shape[0] - 1, maps.state.shape[0])


def finished(piece: Piece, entry: int, result: Sequence[Any]) -> Array:
    """Of states (or maps), one for each of a block's sequences, those of the sequences that end in it."""
    states = result[entry]
    return states[: states.shape[0] - 1, ...] if piece.leaving else states


def last_row(entry: int, result: Sequence[Any]) -> Array:
    """The state that a block of packed sequences hands on."""
    return result[entry][-1:, ...]


def row(number: int, states: Array) -> Array:
    """The given state of one packed sequence."""
    return states[number : number + 1, ...]


def enter(block: Affine, state: Array | None) -> Array:
    """The state after a block, from the state before it; None is zeros."""
    return block.state if state is None else advance(block, state)


def join(*parts: Array) -> Array:
    """Rows one after the other."""
    return library_of(parts[0], "parts").namespace.concat(list(parts), axis=0)


def add(*parts: Array) -> Array:
    """The sum, in the order given."""
    total = parts[0]
    with numpy.errstate(all="ignore"):  # of NumPy's blocks; no other library has anything to do with it
        for part in parts[1:]:
            total = total + part
    return total


# ---------------------------------------------------------------------------------------------------------------------


def _call(block: Block, carry: Array | None, arrays: Sequence[Array | None], *, plain: bool = False) -> Call:
    """The call of a block; ``plain`` leaves its state out."""
    call = Call(block.operation, tuple(arrays), block.options, block.compute)
    ready: list[Any] = []
    for entry, array in zip(operation_of(call).inputs, arrays, strict=True):
        if entry.role == "index":
            ready.append(block.piece.bounds)
        elif entry.role == "state":
            ready.append(None if plain else _initial(block.piece, array, carry))
        else:
            ready.append(array)
    return call._replace(arrays=tuple(ready))


def _initial(piece: Piece, state: Array | None, carry: Array | None) -> Array | None:
    if piece.bounds is None:
        return carry if piece.entering else state
    given = None if state is None else state[piece.first : piece.last, ...]
    if carry is None or not piece.entering:
        return given
    count = piece.last - piece.first
    if count == 1:
        return carry
    xp = library_of(carry, "carry").namespace
    rest = zeros(xp, (count - 1, *carry.shape[1:]), carry.dtype, carry) if given is None else given[1:, ...]
    return xp.concat([carry, rest], axis=0)


def _state_cotangent(
    piece: Piece, state: Array | None, d_final_state: Array | None, d_carry: Array | None
) -> Array | None:
    if piece.bounds is None:
        return d_carry if piece.leaving else d_final_state
    given = None if d_final_state is None else d_final_state[piece.first : piece.last, ...]
    if not piece.leaving or d_carry is None:
        return given
    count = piece.last - piece.first
    if count == 1:
        return d_carry
    xp = library_of(d_carry, "d_carry").namespace
    rest = (
        zeros(xp, (count - 1, *d_carry.shape[1:]), d_carry.dtype, d_carry)
        if given is None
        else given[:-1, ...]
    )
    return xp.concat([rest, d_carry], axis=0)


def _map_of(call: Call) -> Affine:
    with use(method=None):
        transition, state = registry.call(call, "summarise")
    return Affine(transition, state, operation_of(call).diagonal(call))


def _rows(maps: Affine, start: int, stop: int) -> Affine:
    return Affine(maps.transition[start:stop, ...], maps.state[start:stop, ...], maps.diagonal)


def _state_place(call: Call) -> int:
    return [entry.role for entry in operation_of(call).inputs].index("state")


def _as_declared(compute: str, array: Array, grad: Array) -> Array:
    """A gradient in the carry's dtype: real for a real array, as the graph says before any block is there."""
    xp = library_of(grad, "gradient").namespace
    if not is_complex(array):
        return cast(xp, xp.real(grad) if is_complex(grad) else grad, dtype_of(xp, compute))
    return cast(xp, grad, dtype_of(xp, COMPLEX_OF[compute]))
