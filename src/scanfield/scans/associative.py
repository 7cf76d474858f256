"""The general tool beside the scans: prefixes of any associative combination, over a tuple of arrays.

Odd-even recursion (Blelloch 1990, section 1.4): neighbours are combined, the half as long sequence is scanned, and the
even places follow from the odd ones. Some 2 T combinations in log2 T rounds, with positive-step slices, concat and
stack only, so that it runs on every library and through every transform.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from scanfield.arrays import Array, Namespace, check_same_library, current_device_of
from scanfield.errors import ArgumentError, ShapeError
from scanfield.scans.options import check_flag

Elements = tuple[Array, ...]
Combine = Callable[[Elements, Elements], Sequence[Array]]


def associative_scan(
    combine: Combine, elements: Sequence[Array], *, axis: int = 1, reverse: bool = False
) -> Elements:
    """All prefixes of an associative combination along one axis.

    Parameters
    ----------
    combine : callable
        ``combine(left, right)`` takes two tuples of arrays (any number of elements on ``axis``) and returns a
        tuple of the same shapes and dtypes. It must be associative; it need not commute. Left happens first.
    elements : sequence of arrays
        Arrays of one library and of one size on ``axis``.
    axis : int
        The axis to scan.
    reverse : bool
        Scan from the last element to the first (the last element is then the leftmost).

    Returns
    -------
    tuple of arrays
        For each array the prefixes, in its shape.

    Raises
    ------
    ArgumentError
        For no tuple, no arrays, or where ``combine`` returns another number of arrays.
    ShapeError
        For sizes that differ on ``axis``.

    Notes
    -----
    Gradients come from the library's own autodiff (PyTorch, JAX); there are none for NumPy and CuPy arrays, and
    ``vjp`` refuses it: use ``linear_scan`` and its kin, whose gradients are written out.

    Examples
    --------
    >>> import numpy, scanfield
    >>> running_max, = scanfield.associative_scan(
    ...     lambda left, right: (numpy.maximum(left[0], right[0]),), (numpy.array([[3, 1, 4, 1, 5]]),)
    ... )
    >>> running_max
    array([[3, 3, 4, 4, 5]])
    """
    if not callable(combine):
        raise ArgumentError(f"combine: expected a function of two tuples, came {type(combine).__name__}")
    if isinstance(axis, bool) or not isinstance(axis, int):
        raise ArgumentError(f"axis: expected an integer, came {type(axis).__name__}")
    reverse = check_flag(reverse, "reverse")
    if not isinstance(elements, tuple | list):
        raise ArgumentError(
            f"elements: expected a tuple of arrays, came {type(elements).__name__}; (elements,) is one"
        )
    elements = tuple(elements)
    if not elements:
        raise ArgumentError("elements: at least one array is needed, came none")
    xp = check_same_library([(f"elements[{i}]", x) for i, x in enumerate(elements)], peers=True).namespace
    sizes = []
    for i, x in enumerate(elements):
        if not -len(x.shape) <= axis < len(x.shape):
            raise ShapeError(f"elements[{i}]: shape {tuple(x.shape)} has no axis {axis}")
        sizes.append(x.shape[axis])
    if len(set(sizes)) != 1:
        raise ShapeError(f"elements: sizes {sizes} on axis {axis}; they must be equal")
    with current_device_of(elements[0]):
        moved = tuple(_moved(xp, x, axis, 0) for x in elements)
        if reverse:
            moved = tuple(xp.flip(x, axis=0) for x in moved)
        found = _prefixes(xp, combine, moved, axis)
        if reverse:
            found = tuple(xp.flip(x, axis=0) for x in found)
        if sizes[0] == 1:  # nothing was combined: a copy, so that no result shares memory with its input
            found = tuple(xp.concat([x], axis=0) for x in found)
        return tuple(_moved(xp, x, 0, axis) for x in found)


def _prefixes(xp: Namespace, combine: Combine, x: Elements, axis: int) -> Elements:
    count = x[0].shape[0]
    if count < 2:
        return x
    half = count // 2
    pairs = _combined(xp, combine, _each(x, 0, 2 * half, 2), _each(x, 1, 2 * half, 2), axis)
    odd = _prefixes(xp, combine, pairs, axis)
    first = _each(x, 0, 1, 1)
    later = _each(x, 2, count, 2)
    if later[0].shape[0] == 0:
        even = first
    else:
        before = _each(odd, 0, later[0].shape[0], 1)
        even = tuple(
            xp.concat([a, b], axis=0)
            for a, b in zip(first, _combined(xp, combine, before, later, axis), strict=True)
        )
    return tuple(_interleave(xp, a, b, count) for a, b in zip(even, odd, strict=True))


def _moved(xp: Namespace, x: Array, source: int, target: int) -> Array:
    """``moveaxis`` by a permutation, for which every transform has a rule."""
    order = list(range(len(x.shape)))
    order.insert(target % len(order), order.pop(source % len(order)))
    return xp.permute_dims(x, tuple(order))


def _each(x: Elements, start: int, stop: int, step: int) -> Elements:
    return tuple(one[start:stop:step, ...] for one in x)


def _interleave(xp: Namespace, even: Array, odd: Array, count: int) -> Array:
    half = odd.shape[0]
    pair = xp.stack([even[:half, ...], odd], axis=1)
    whole = xp.reshape(pair, (2 * half, *even.shape[1:]))
    return whole if 2 * half == count else xp.concat([whole, even[half:, ...]], axis=0)


def _combined(xp: Namespace, combine: Combine, left: Elements, right: Elements, axis: int) -> Elements:
    """``combine`` with the scanned axis where the user has it."""
    found = combine(
        tuple(_moved(xp, x, 0, axis) for x in left),
        tuple(_moved(xp, x, 0, axis) for x in right),
    )
    if not isinstance(found, tuple | list) or len(found) != len(left):
        came = f"{len(found)} arrays" if isinstance(found, tuple | list) else type(found).__name__
        raise ArgumentError(
            f"combine: returned {came} for {len(left)} elements; it must return a tuple of as many arrays"
        )
    for i, (x, y) in enumerate(zip(left, found, strict=True)):
        if tuple(y.shape) != tuple(_moved(xp, x, 0, axis).shape):
            raise ShapeError(
                f"combine: element {i} came back with shape {tuple(y.shape)}, "
                f"from {tuple(_moved(xp, x, 0, axis).shape)}; it must keep the shape"
            )
    return tuple(_moved(xp, x, axis, 0) for x in found)
