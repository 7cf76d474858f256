"""Operations along a line: all arrays of a small call move with one short vector, so that derivatives are small.

The truth of every derivative is a difference quotient of scanfield's results on NumPy arrays, of eighth order in
float64: right to some 1e-12.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from examples import rng_of

import scanfield

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "dispatch"))

from small_calls import EXAMPLES as SMALL

PLACE = np.array([0.3, -0.2])
TANGENT = np.array([0.7, 1.1])
PLACES = np.stack([PLACE, -PLACE, 2 * TANGENT])

# Of the derivative: weights of f(x + i h) - f(x - i h), i = 1..4.
_WEIGHTS = (4 / 5, -1 / 5, 4 / 105, -1 / 280)
_STEP = 0.03


class Line:
    """An operation and verb, on the arrays of ``xp``; a call gives all numbers that come out, at the place ``t``."""

    def __init__(self, operation: str, verb: str, xp: Any = np, method: str | None = None) -> None:
        inputs, options, token = SMALL[operation]
        self._function, self._verb, self._options = getattr(scanfield, operation), verb, dict(options)
        self._xp, self._method = xp, method
        if verb == "step":
            self._options = {k: x for k, x in options.items() if k not in ("reverse", "chunk_size")}
            inputs = {"state": inputs.get("initial_state"), **token}
        draw = rng_of(f"{operation} {verb}")
        self._start = {name: x for name, x in inputs.items() if x is not None}
        self._none = [name for name, x in inputs.items() if x is None]
        self._along = {
            name: draw.uniform(-0.1, 0.1, (len(PLACE), *x.shape)) for name, x in self._start.items()
        }

    def __call__(self, t: Any) -> Any:
        given = {
            name: self._xp.asarray(x) + self._xp.tensordot(t, self._xp.asarray(self._along[name]), 1)
            for name, x in self._start.items()
        } | dict.fromkeys(self._none)
        options = self._options | {"method": self._method}
        if self._verb == "vjp":
            result, pullback = scanfield.vjp(self._function, **given, **options)
            found = [*result, *pullback(result.output, result.final_state).values()]
        else:
            call = self._function.step if self._verb == "step" else self._function
            found = list(call(**given, **options))
        return self._xp.concatenate([x.reshape(-1) for x in found])

    def loss(self, t: Any) -> Any:
        """A number that is not linear in the output."""
        return (self(t) ** 2).sum()


def along(function: Callable[[np.ndarray], Any], place: np.ndarray, direction: np.ndarray) -> Any:
    """The derivative of a function of NumPy's at a place."""
    return sum(
        weight / _STEP * (function(place + i * _STEP * direction) - function(place - i * _STEP * direction))
        for i, weight in enumerate(_WEIGHTS, 1)
    )


def gradient(function: Callable[[np.ndarray], Any], place: np.ndarray = PLACE) -> np.ndarray:
    """One derivative for each number of the place, along a last axis."""
    return np.stack([along(function, place, one) for one in np.eye(len(place))], axis=-1)


def hessian(function: Callable[[np.ndarray], Any]) -> np.ndarray:
    return gradient(lambda place: gradient(function, place))
