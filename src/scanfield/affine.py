"""One sequence cut anywhere: a block of tokens as an affine map of the state, S -> M S + N.

Glossary: M ``transition``, N ``state`` (the final state from zero). A diagonal M multiplies the state
elementwise (broadcast); any other is a matrix (..., K, K) that multiplies from the left. Left happens first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from scanfield.arrays import Array, check_same_library, current_device_of, library_of
from scanfield.dispatch import registry
from scanfield.errors import ArgumentError, ShapeError
from scanfield.scans.binding import bind, record_of
from scanfield.scans.canonical import quiet
from scanfield.scans.surface import ScanResult


class Affine(NamedTuple):
    """The map S -> transition S + state of a block of tokens.

    Both are float32 at least. ``state`` has the layout of the operation's states; so has a diagonal ``transition``
    ((batch, vheads, K, 1) for ``gdn2`` and its family where nothing is erased, (batch, heads, 1, N) for ``ssd``), which
    multiplies elementwise. Where the rule erases it is a matrix (batch, vheads, K, K).
    """

    transition: Array
    state: Array
    diagonal: bool


def summarise(op: Any, *arrays: Array, **options: Any) -> Affine:
    """The affine map of the state that a block of tokens is.

    Parameters
    ----------
    op : a scan of scanfield
    *arrays, **options
        As in the call of ``op``, without ``initial_state`` and ``states_at``. With ``cu_seqlens`` there is one map for
        each sequence; with ``reverse=True`` the block runs from right to left.

    Returns
    -------
    Affine
        A block without tokens is the identity.

    Raises
    ------
    ArgumentError
        For ``initial_state`` (the map holds for every one) and ``states_at``; else as ``op``.

    Examples
    --------
    >>> import numpy, scanfield
    >>> a, b = numpy.full((1, 4, 1), 0.5), numpy.ones((1, 4, 1))
    >>> left = scanfield.summarise(scanfield.linear_scan, a[:, :2], b[:, :2])
    >>> right = scanfield.summarise(scanfield.linear_scan, a[:, 2:], b[:, 2:])
    >>> scanfield.compose(left, right).state
    array([[1.875]])
    """
    bound = bind(op, arrays, options)
    if bound.states_at is not None:
        raise ArgumentError("states_at: not in summarise; summarise the parts and compose them")
    if bound.arrays["initial_state"] is not None:
        raise ArgumentError(
            "initial_state: not in summarise; the map holds for every state: apply(op, state, ...)"
        )
    with current_device_of(bound.arrays[bound.record.main]):
        prepared = bound.record.prepare(bound.arrays, bound.options)
        transition, state = registry.call(prepared.call, "summarise", bound.method)
        diagonal = registry.operation_of(prepared.call).diagonal(prepared.call)
        return Affine(prepared.state(transition), prepared.state(state), diagonal)


def compose(left: Affine, right: Affine) -> Affine:
    """The map of two blocks one after the other, ``left`` first. Associative; it does not commute.

    Raises
    ------
    ShapeError
        For maps whose states differ in shape; ArgumentError for anything but an Affine.
    """
    for name, block in (("left", left), ("right", right)):
        if not isinstance(block, Affine):
            raise ArgumentError(
                f"{name}: expected an Affine as summarise returns it, came {type(block).__name__}"
            )
    if tuple(left.state.shape) != tuple(right.state.shape):
        raise ShapeError(
            f"right: its state has shape {tuple(right.state.shape)}, that of left {tuple(left.state.shape)}; "
            f"both must be blocks of one sequence"
        )
    return Affine(
        _multiply(right, left.transition, left.diagonal),
        advance(right, left.state),
        left.diagonal and right.diagonal,
    )


def advance(block: Affine, state: Array) -> Array:
    """The state after a block, from the state before it."""
    moved = _multiply(block, state, False)
    with current_device_of(moved), quiet(library_of(moved, "state").name):
        return moved + block.state


def _multiply(block: Affine, x: Array, x_diagonal: bool) -> Array:
    """block.transition times a state or another transition."""
    library = check_same_library([("transition", block.transition), ("state", x)])
    with current_device_of(x), quiet(library.name, x):
        if block.diagonal:
            return block.transition * x
        if x_diagonal:
            return block.transition * library.namespace.matrix_transpose(x)
        return library.namespace.matmul(block.transition, x)


def apply(op: Any, incoming_state: Array, *arrays: Array, **options: Any) -> ScanResult:
    """Run a block of tokens from the state that comes in: outputs, and the state that goes out.

    Parameters
    ----------
    op : a scan of scanfield
    incoming_state : array
        The state before the block, in the layout of ``initial_state``.
    *arrays, **options
        As in the call of ``op``, without ``initial_state``.

    Returns
    -------
    ScanResult

    Raises
    ------
    ArgumentError
        For ``initial_state`` beside ``incoming_state``; else as ``op``.

    Examples
    --------
    >>> import numpy, scanfield
    >>> a, b = numpy.full((1, 4, 1), 0.5), numpy.ones((1, 4, 1))
    >>> left = scanfield.summarise(scanfield.linear_scan, a[:, :2], b[:, :2])
    >>> scanfield.apply(scanfield.linear_scan, left.state, a[:, 2:], b[:, 2:]).output[0, :, 0]
    array([1.75 , 1.875])
    """
    record = record_of(op)
    bound = bind(op, arrays, options)
    if bound.arrays["initial_state"] is not None:
        raise ArgumentError(f"initial_state: {record.name} is applied to incoming_state; give one of the two")
    given = {name: array for name, array in bound.arrays.items() if array is not None}
    call_options = {**bound.options, "states_at": bound.states_at, "method": bound.method}
    result: ScanResult = op(**{**given, "initial_state": incoming_state}, **call_options)
    return result
