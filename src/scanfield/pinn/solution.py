"""A field known in closed form, with its functions; it can be pickled although these were made in a function.

A fit that comes back from another process brings its problem, and that the functions of its data: they go as the call that
made them.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, ParamSpec

import numpy as np

from scanfield.errors import ShapeError

__all__ = ["Solution", "remembered"]

P = ParamSpec("P")
Function = Callable[[np.ndarray], np.ndarray]


class Recipe(NamedTuple):
    """The call that made a solution."""

    module: str
    name: str
    args: tuple[Any, ...]
    keywords: Mapping[str, Any]


@dataclass(frozen=True)
class Solution:
    """A field known in closed form. Functions take points (n, d) on the host and return (n,) or, the gradient, (n, d).

    Call it for the field. `normal(x, normals)` is its derivative along normals, for Neumann and impedance data.

    Examples
    --------
    >>> from scanfield.pinn.solutions import plane_wave
    >>> wave = plane_wave(2.0, (1.0,))
    >>> wave(np.asarray([[0.0]]))
    array([1.+0.j])
    >>> wave.normal(np.asarray([[0.0]]), np.asarray([[-1.0]]))
    array([0.-2.j])
    """

    name: str
    dimensions: int
    wavenumber: float | complex | Function
    value: Function
    gradient: Function
    source: Function
    recipe: Recipe | None = field(default=None, repr=False, compare=False)
    """The call that made it; None for a field of one's own, which is pickled as its functions can be."""

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """The field at points (n, d)."""
        return self.value(_points(x, self.dimensions))

    def normal(self, x: np.ndarray, normals: np.ndarray) -> np.ndarray:
        """The derivative along `normals`, (n, d) each."""
        return np.asarray(np.sum(self.gradient(_points(x, self.dimensions)) * normals, axis=1))

    def impedance(self, x: np.ndarray, normals: np.ndarray) -> np.ndarray:
        """d_n u - i k u, the data of an impedance condition."""
        k = self.wavenumber(x) if callable(self.wavenumber) else self.wavenumber
        return np.asarray(self.normal(x, normals) - 1j * k * self(x))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """By the call that made it, where that is known and nothing has been replaced since."""
        return (_again, (self.recipe,)) if self._is_as_made() else super().__reduce_ex__(protocol)

    def __copy__(self) -> Solution:
        return self  # nothing in it changes

    def __deepcopy__(self, memory: Any) -> Solution:
        return self

    def _is_as_made(self) -> bool:
        if self.recipe is None:
            return False
        made = _again(self.recipe)
        for name in ("name", "dimensions", *_FUNCTIONS):
            own, other = getattr(self, name), getattr(made, name)
            if isinstance(other, _Part):
                if not (isinstance(own, _Part) and own.recipe is self.recipe and own.name == name):
                    return False
            elif own != other:
                return False
        return True


_FUNCTIONS = ("wavenumber", "value", "gradient", "source")


class _Part:
    """A function of a solution, which knows whose it is."""

    def __init__(self, function: Function, recipe: Recipe, name: str) -> None:
        self.function, self.recipe, self.name = function, recipe, name

    def __deepcopy__(self, memory: Any) -> _Part:
        return self

    def __call__(self, x: np.ndarray) -> np.ndarray:
        return self.function(x)

    def __reduce__(self) -> tuple[Any, ...]:
        return _part, (self.recipe, self.name)


def remembered(make: Callable[P, Solution]) -> Callable[P, Solution]:
    """A function that makes solutions, whose solutions know the call."""

    @functools.wraps(make)
    def made(*args: P.args, **keywords: P.kwargs) -> Solution:
        solution = make(*args, **keywords)
        recipe = Recipe(make.__module__, make.__name__, args, keywords)
        parts: dict[str, Any] = {
            name: _Part(value, recipe, name)
            for name in _FUNCTIONS
            if callable(value := getattr(solution, name))
        }
        return replace(solution, recipe=recipe, **parts)

    return made


def _again(recipe: Recipe) -> Solution:
    made: Solution = getattr(importlib.import_module(recipe.module), recipe.name)(
        *recipe.args, **recipe.keywords
    )
    return made


def _part(recipe: Recipe, name: str) -> Any:
    return getattr(_again(recipe), name)


def _points(x: np.ndarray, dimensions: int) -> np.ndarray:
    points = np.asarray(x, dtype=np.float64)
    if points.ndim != 2 or points.shape[1] != dimensions:
        raise ShapeError(f"x has shape {points.shape}: (n, {dimensions}) is expected")
    return points
