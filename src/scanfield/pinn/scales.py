"""How large a field is that a source drives, before anything is solved: what the network is scaled by where no value says it.

Lap u + k^2 u = f gives |u| of about |f| / max(K^2, (pi/L)^2, q^2) away from resonance, with L the domain's longest side and q
how fast f varies, q^2 = mean |grad f|^2 / mean |f|^2, by differences. That is known to an order of magnitude, so a power of
ten is what is taken.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from scanfield.pinn.values import evaluate

if TYPE_CHECKING:
    from scanfield.pinn.problem import Helmholtz

__all__ = ["driven"]

_LEAST = 1e-60  # of a size whose square, and that of its inverse, stays a float
_STEP = 1e-4  # of the longest side: enough for functions that compute in float32
_JUMP = 0.1  # of the largest value, over one step: an edge of the source, which says nothing of its waves


def driven(problem: Helmholtz, x: np.ndarray, source: np.ndarray) -> float:
    """The size of the field that the source, (n,) at points (n, d), drives, a power of ten; 0 where none is to be seen."""
    largest = float(np.max(np.abs(source)))
    if largest < _LEAST:
        return 0.0
    longest = float(max(np.subtract(problem.domain.upper, problem.domain.lower)))
    slowest = max(problem.reference, math.pi / longest)
    size = largest / max(slowest**2, _variation(problem, x, source / largest, largest, longest))
    return 10.0 ** round(math.log10(size)) if _LEAST < size < 1.0 / _LEAST else 0.0


def _variation(problem: Helmholtz, x: np.ndarray, f: np.ndarray, largest: float, longest: float) -> float:
    """q^2, in 1 / length^2; 0 where f is no function that can be asked at other points."""
    domain = problem.domain
    if not callable(problem.source):
        return 0.0
    step, total = _STEP * longest, 0.0
    centre = 0.5 * (np.asarray(domain.lower) + np.asarray(domain.upper))
    for axis in range(problem.dimensions):
        moved = x.copy()
        moved[:, axis] += np.where(x[:, axis] < centre[axis], step, -step)
        within = domain.contains(moved)
        try:
            with np.errstate(all="ignore"):
                there = evaluate("source", problem.source, moved[within]) / largest
        except (
            Exception
        ):  # whatever a user's function raises where it was not asked to be known, as beside given points
            return 0.0
        change = np.abs(there - f[within])
        smooth = change <= _JUMP
        if np.any(smooth):
            total += float(np.mean(change[smooth] ** 2)) / step**2
    return total / float(np.mean(np.abs(f) ** 2))
