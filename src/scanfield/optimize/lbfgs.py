"""L-BFGS with a strong Wolfe search, on the arrays' own library and device.

| symbol | name | shape | in Nocedal & Wright, Numerical Optimization, chapter 7 |
|---|---|---|---|
| x | `x` | (parameters,) | x_k |
| f, g | `state.value`, `state.gradient` | number, as x | f_k, grad f_k |
| s, y | `state.steps`, `state.changes` | as x, at most `history` each | s_i = x_{i+1} - x_i, y_i = g_{i+1} - g_i |
| H g | direction | as x | algorithm 7.4, initial matrix (s.y / y.y) I, equation 7.20 |

Vectors never leave the device; per evaluation two numbers come to the host: the loss and the slope along the direction.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from scanfield.arrays import Array, check_floating, library_of
from scanfield.errors import ArgumentError, ShapeError, StateError
from scanfield.keywords import advised, advised_class
from scanfield.optimize import result
from scanfield.optimize.given import check_real, detached, in_python, kept, like_leaf, real_number
from scanfield.optimize.line_search import Trial, strong_wolfe
from scanfield.optimize.result import Result
from scanfield.optimize.schedules import positive

__all__ = ["LBFGS", "LBFGSState", "LossAndGradient", "minimise"]

LossAndGradient = Callable[[Array], tuple[Array | float, Array]]
"""A vector -> its loss (a real number or array without axes) and the gradient, shaped as the vector.

Both are the function's own: it may write the next gradient into the same array.
"""


class LBFGSState(NamedTuple):
    """What L-BFGS carries from one step to the next: the loss and gradient at x, and its memory of the past."""

    step: int
    value: float
    gradient: Array
    steps: tuple[Array, ...]
    changes: tuple[Array, ...]
    evaluations: int
    stopped: str  # "" while there is something to do


@advised_class
@dataclass(frozen=True)
class LBFGS:
    """L-BFGS.

    Parameters
    ----------
    history
        Pairs of steps and gradient changes that are remembered.
    tolerance
        Stop once the largest entry of the gradient is at most this.
    evaluations
        Calls of the function that one line search may take.
    c1, c2
        The constants of the strong Wolfe conditions, 0 < c1 < c2 < 1.

    A loss that was accepted is never above the one before. Raises `ArgumentError` for settings out of range and
    `ShapeError` for an `x` with other than one axis or a gradient that is not shaped as `x`, and `DtypeError` for complex
    numbers. Of a torch `x` that requires a gradient every next one is a leaf that does: no graph grows over the steps.

    Examples
    --------
    >>> import numpy as np
    >>> def rosenbrock(x):
    ...     a, b = x[1] - x[0] ** 2, 1 - x[0]
    ...     return 100 * a**2 + b**2, np.stack([-400 * a * x[0] - 2 * b, 200 * a])
    >>> found = minimise(rosenbrock, np.asarray([-1.2, 1.0]), iterations=100)
    >>> found.reason, bool(np.max(np.abs(found.x - 1)) < 1e-6)
    ('gradient', True)
    """

    history: int = 20
    tolerance: float = 1e-9
    evaluations: int = 25
    c1: float = 1e-4
    c2: float = 0.9

    def __post_init__(self) -> None:
        in_python(self)
        for name in ("history", "evaluations"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name} = {getattr(self, name)}: it is at least 1")
        if not self.tolerance >= 0:
            raise ArgumentError(f"tolerance = {self.tolerance}: it is not negative")
        if not 0 < self.c1 < self.c2 < 1:
            raise ArgumentError(f"c1 = {self.c1}, c2 = {self.c2}: 0 < c1 < c2 < 1")

    def init(self, function: LossAndGradient, x: Array) -> LBFGSState:
        """The state at `x`; calls `function` once."""
        check_vector(x)
        value, gradient = _evaluated(function, x)
        state = LBFGSState(0, value, gradient, (), (), 1, "")
        return state._replace(stopped=self._judged(value, gradient))

    def step(self, function: LossAndGradient, x: Array, state: LBFGSState) -> tuple[Array, LBFGSState]:
        """One iteration. Where nothing can be gained, `x` comes back with `state.stopped` set to the reason."""
        if state.stopped:
            return x, state
        if tuple(state.gradient.shape) != tuple(x.shape):
            raise StateError(
                f"the state holds a gradient of shape {tuple(state.gradient.shape)}, x has {tuple(x.shape)}: "
                "the state was made for other parameters; start again with init(function, x)"
            )
        xp = library_of(x, "x").namespace
        here = detached(x)
        direction, slope = self._direction(state)
        if not slope < 0 and state.steps:  # the memory misleads (rounding): forget it
            state = state._replace(steps=(), changes=())
            direction, slope = self._direction(state)

        def phi(step: float) -> Trial:
            there = like_leaf(here + step * direction, x)
            value, gradient = _evaluated(function, there)
            return Trial(step, value, float(xp.sum(gradient * direction)), (there, gradient))

        # A first step has no memory of lengths: it moves by at most one unit in all.
        first = 1.0 if state.steps else min(1.0, 1.0 / float(xp.sum(xp.abs(state.gradient))))
        start = Trial(0.0, state.value, slope, None)
        found, used, seen_finite = strong_wolfe(
            phi, start, first, c1=self.c1, c2=self.c2, evaluations=self.evaluations
        )
        state = state._replace(evaluations=state.evaluations + used)
        if found is None:
            if state.steps and seen_finite:  # once more along the plain gradient
                return self.step(function, x, state._replace(steps=(), changes=()))
            return x, state._replace(stopped=result.LINE_SEARCH if seen_finite else result.NOT_FINITE)

        there, gradient = found.payload
        # Where rounding hides the loss, only a smaller gradient is progress.
        if found.value == state.value and not float(xp.sum(gradient**2)) < float(xp.sum(state.gradient**2)):
            return x, state._replace(stopped=result.LINE_SEARCH)
        moved, change = detached(there) - here, gradient - state.gradient
        steps, changes = state.steps, state.changes
        if float(xp.sum(moved * change)) > 0:
            steps, changes = (*steps, moved)[-self.history :], (*changes, change)[-self.history :]
        return there, LBFGSState(
            state.step + 1,
            found.value,
            gradient,
            steps,
            changes,
            state.evaluations,
            self._judged(found.value, gradient),
        )

    def _direction(self, state: LBFGSState) -> tuple[Array, float]:
        """-H g by the two loops of algorithm 7.4, and its slope; the numbers in between stay on the device."""
        xp = library_of(state.gradient, "gradient").namespace
        q = -state.gradient
        weights = []
        for s, y in zip(reversed(state.steps), reversed(state.changes), strict=True):
            weight = xp.sum(s * q) / xp.sum(s * y)
            q = q - weight * y
            weights.append(weight)
        if state.steps:
            s, y = state.steps[-1], state.changes[-1]
            q = q * (xp.sum(s * y) / xp.sum(y * y))
        for s, y, weight in zip(state.steps, state.changes, reversed(weights), strict=True):
            q = q + (weight - xp.sum(y * q) / xp.sum(s * y)) * s
        return q, float(xp.sum(q * state.gradient))

    def _judged(self, value: float, gradient: Array) -> str:
        xp = library_of(gradient, "gradient").namespace
        largest = float(xp.max(xp.abs(gradient))) if gradient.shape[0] else 0.0
        if not (math.isfinite(value) and math.isfinite(largest)):
            return result.NOT_FINITE
        return result.GRADIENT if largest <= self.tolerance else ""


@advised
def minimise(
    function: LossAndGradient, x: Array, *, iterations: int = 1000, optimizer: LBFGS | None = None
) -> Result:
    """Run L-BFGS from `x`, (parameters,), for at most `iterations` steps.

    `function` takes a vector and returns the loss and its gradient. See `Result` for the reasons to stop, and
    `LBFGS` for the settings and an example.
    """
    positive("iterations", iterations)
    optimizer = LBFGS() if optimizer is None else optimizer
    state = optimizer.init(function, x)
    while not state.stopped and state.step < iterations:
        x, state = optimizer.step(function, x, state)
    return Result(x, state.value, state.step, state.evaluations, state.stopped or result.ITERATIONS)


def check_vector(x: Array) -> None:
    """DtypeError or ShapeError unless `x` is one real vector."""
    library_of(x, "x")
    check_floating(x, "x", complex_allowed=False)
    if len(x.shape) != 1:
        raise ShapeError(f"x has shape {tuple(x.shape)}: one axis is expected, (parameters,)")


def _evaluated(function: LossAndGradient, x: Array) -> tuple[float, Array]:
    value, gradient = function(x)
    library_of(gradient, "gradient")
    if tuple(gradient.shape) != tuple(x.shape):
        raise ShapeError(
            f"the gradient has shape {tuple(gradient.shape)}, x {tuple(x.shape)}: they must be equal"
        )
    check_real("gradient", gradient, _REAL)
    return real_number("loss", value), kept(gradient)


_REAL = "x is real, and so are the derivatives of the loss by its entries"
