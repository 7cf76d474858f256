"""What a problem is given as: a number, an array at given points, or a function of the points; real or complex."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from scanfield.advice import shown
from scanfield.errors import ArgumentError, DtypeError, ShapeError

__all__ = ["Value", "evaluate"]

Value: TypeAlias = Any
"""A number, an array of one number a point (for points that are given), or a function of the points. A function takes host
points (n, d), and the outward normals (n, d) too if it has two arguments, and returns (n,) numbers."""


def evaluate(
    name: str, value: Value, x: np.ndarray, normals: np.ndarray | None = None, *, given: bool = False
) -> np.ndarray:
    """The value at points (n, d), (n,) float64 or complex128.

    `given` says that the points are the user's own, so that an array can belong to them. Raises `ShapeError`,
    `DtypeError` or `ArgumentError`, with `name`, for anything else than one finite number a point.
    """
    n = x.shape[0]
    if callable(value):
        # Copies: a function that writes to its argument would move the points.
        more = (normals.copy(),) if normals is not None and _takes_normals(value) else ()
        found = value(x.copy(), *more)
        origin = f"{name}(x) for x of shape {x.shape}"
    else:
        found, origin = value, name
        if np.ndim(value) > 0 and not given:
            raise ArgumentError(
                f"{name} is an array of shape {np.shape(value)}: the points are drawn, so give a number or a function "
                "of x; an array belongs to the points of a PointSet or of Data"
            )
    numbers = np.asarray(found)
    if numbers.dtype.kind == "b" and callable(value):  # where something holds: 1, elsewhere 0
        numbers = numbers.astype(np.float64)
    if numbers.dtype.kind not in "iufc":
        raise DtypeError(
            f"{origin} gave {numbers.dtype} ({shown(found)}): real or complex numbers are expected"
        )
    if numbers.ndim == 2 and numbers.shape == (n, 1):
        numbers = numbers[:, 0]
    if numbers.shape not in ((), (n,)):
        raise ShapeError(f"{origin} has shape {numbers.shape}: () or ({n},), one number a point, is expected")
    numbers = np.broadcast_to(numbers, (n,))
    if not np.all(np.isfinite(numbers)):
        raise ArgumentError(f"{origin} holds NaN or infinity")
    return np.array(numbers, dtype=np.complex128 if numbers.dtype.kind == "c" else np.float64)


def _takes_normals(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a compiled function without a signature
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p for p in parameters if p.kind in positional and p.default is inspect.Parameter.empty]
    return len(needed) == 2


def reals(name: str, values: Any) -> np.ndarray:
    """Host numbers as float64; DtypeError for text, complex numbers and what has no numbers."""
    try:
        found = np.asarray(values)
    except ValueError as error:  # rows of unequal lengths
        raise ShapeError(f"{name}: {error}") from None
    if found.dtype.kind not in "iuf":
        raise DtypeError(f"{name}: came {found.dtype} ({shown(values)}); real numbers are expected")
    return np.asarray(found, dtype=np.float64)


def check_positive(name: str, value: Any) -> None:
    """ArgumentError unless it is a finite number above 0."""
    number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:
        raise ArgumentError(f"{name} = {shown(value)}: it is a number above 0")
