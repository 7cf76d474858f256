"""Levenberg-Marquardt for a sum of squares, on the arrays' own library and device.

| symbol | name | shape |
|---|---|---|
| theta | `x` | (parameters,) |
| r | residuals | (rows,), weights folded in |
| J | Jacobian dr/dtheta | (rows, parameters) |
| mu | `state.damping` | a number |
| D | the damping's metric: identity, or diag(J^T J) | (parameters,) |

    parameters <= rows    (J^T J + mu D) step = J^T r                                 primal system
    rows < parameters     step = D^-1 J^T (J D^-1 J^T + mu I)^-1 r                    residual-space system

theta - step is taken if |r|^2 falls, and mu is divided by `decrease`, twice if |r|^2 fell by over nine tenths of what the
linear model promised, step.J^T r + mu step.D step; else mu is multiplied by `increase` and the step solved again.
(Levenberg 1944; Marquardt 1963; Nocedal & Wright, Numerical Optimization, section 10.3.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from scanfield.advice import shown
from scanfield.arrays import Array, Namespace, library_of
from scanfield.errors import ArgumentError, ShapeError
from scanfield.keywords import advised, advised_class
from scanfield.optimize import result
from scanfield.optimize.cholesky import identity, solve_positive
from scanfield.optimize.given import check_real, detached, in_python, kept, like_leaf, real_number
from scanfield.optimize.lbfgs import check_vector
from scanfield.optimize.result import Result
from scanfield.optimize.schedules import positive

__all__ = ["Jacobian", "LMState", "LevenbergMarquardt", "Normal", "Residuals", "least_squares"]


class Normal(NamedTuple):
    """What a step needs of a Jacobian whose rows are spread over machines."""

    gradient: Array
    """J^T r, (parameters,)"""
    matrix: Array
    """J^T J, (parameters, parameters)"""


Residuals = Callable[[Array], Array]
"""A vector -> its residuals, (rows,), or the sum of their squares, ()."""

Jacobian = Callable[[Array], tuple[Array, Array] | Normal]
"""A vector -> its residuals and their Jacobian, (rows,) and (rows, parameters), or the products of these."""


class LMState(NamedTuple):
    """What Levenberg-Marquardt carries from one step to the next."""

    step: int
    value: float  # |r|^2 at x
    damping: float
    evaluations: int
    stopped: str  # "" while there is something to do


@advised_class
@dataclass(frozen=True)
class LevenbergMarquardt:
    """Levenberg-Marquardt with a damping rule.

    Parameters
    ----------
    damping
        mu at the start, in units of the squared residuals per squared parameter.
    increase, decrease
        What mu is multiplied by after a step that would raise the loss, and divided by after one that lowers it.
    smallest
        mu never falls below this.
    tries
        Steps that one iteration may try before it stops for want of descent.
    tolerance
        Stop once the largest entry of J^T r is at most this.
    metric
        `"identity"`, or `"diagonal"` for Marquardt's diag(J^T J), which does not see the parameters' units.
    system
        `"primal"`, `"residual"`, or `"auto"`: the smaller of the two. They give the same step.

    Use float64. One iteration costs rows * parameters^2 operations: above about 5,000 parameters take `LBFGS`.
    Raises `ArgumentError` for settings out of range, `ShapeError` for residuals and a Jacobian that do not fit, and
    `DtypeError` for complex ones: give their real parts, then their imaginary parts.

    Examples
    --------
    The rate and height of exp(-rate t), from four samples:

    >>> import numpy as np
    >>> t = np.asarray([0.0, 1.0, 2.0, 3.0])
    >>> def residuals(x):
    ...     return x[1] * np.exp(-x[0] * t) - 3.0 * np.exp(-0.5 * t)
    >>> def jacobian(x):
    ...     wave = np.exp(-x[0] * t)
    ...     return residuals(x), np.stack([-t * x[1] * wave, wave], axis=1)
    >>> found = least_squares(residuals, jacobian, np.asarray([1.0, 1.0]))
    >>> np.round(found.x, 6), found.reason
    (array([0.5, 3. ]), 'gradient')
    """

    damping: float = 1e-3
    increase: float = 4.0
    decrease: float = 3.0
    smallest: float = 1e-15
    tries: int = 12
    tolerance: float = 1e-12
    metric: Literal["identity", "diagonal"] = "identity"
    system: Literal["auto", "primal", "residual"] = "auto"

    def __post_init__(self) -> None:
        in_python(self)
        for name in ("damping", "smallest"):
            positive(name, getattr(self, name))
        for name in ("increase", "decrease"):
            if not getattr(self, name) > 1:
                raise ArgumentError(f"{name} = {getattr(self, name)}: it is above 1")
        if self.tries < 1:
            raise ArgumentError(f"tries = {self.tries}: it is at least 1")
        if not self.tolerance >= 0:
            raise ArgumentError(f"tolerance = {self.tolerance}: it is not negative")
        for name, allowed in (
            ("metric", ("identity", "diagonal")),
            ("system", ("auto", "primal", "residual")),
        ):
            if getattr(self, name) not in allowed:
                raise ArgumentError(
                    f"{name} = {shown(getattr(self, name))}: allowed are {', '.join(map(repr, allowed))}"
                )

    def init(self, residuals: Residuals, x: Array) -> LMState:
        """The state at `x`; calls `residuals` once."""
        check_vector(x)
        value = sum_of_squares(residuals(x))
        return LMState(0, value, self.damping, 1, "" if math.isfinite(value) else result.NOT_FINITE)

    def step(
        self, residuals: Residuals, jacobian: Jacobian, x: Array, state: LMState
    ) -> tuple[Array, LMState]:
        """One iteration: one Jacobian, and as many residuals as steps are tried."""
        if state.stopped:
            return x, state
        xp = library_of(x, "x").namespace
        found = jacobian(x)
        # The residuals are computed again for each step that is tried: into the same arrays, perhaps.
        if isinstance(found, Normal):
            _check_normal(found, x)
            found = Normal(kept(found.gradient), kept(found.matrix))
            gradient = found.gradient
        else:
            r, j = found
            _check_shapes(r, j, x)
            r, j = kept(r), detached(j)
            gradient = xp.matrix_transpose(j) @ r
        largest = float(xp.max(xp.abs(gradient))) if x.shape[0] else 0.0
        if not math.isfinite(largest):
            return x, state._replace(stopped=result.NOT_FINITE)
        if largest <= self.tolerance:
            return x, state._replace(stopped=result.GRADIENT)

        metric: Array | float
        if isinstance(found, Normal):
            metric = self._metric(xp, xp.linalg.diagonal(found.matrix))
            solve = self._primal(found.matrix, gradient, metric)
        else:
            metric = self._metric(xp, xp.sum(j * j, axis=0))
            solve = self._system(j, r, gradient, metric)
        damping, seen_finite = state.damping, False
        for attempt in range(1, self.tries + 1):
            step = solve(damping)
            if step is not None:
                there = like_leaf(detached(x) - step, x)
                value = sum_of_squares(residuals(there))
                seen_finite = seen_finite or math.isfinite(value)
                if value < state.value:
                    promised = float(xp.sum(step * gradient)) + damping * float(xp.sum(step * metric * step))
                    gained = (state.value - value) / promised if promised > 0 else 0.0
                    damping = max(damping / self.decrease ** (2 if gained > 0.9 else 1), self.smallest)
                    return there, LMState(state.step + 1, value, damping, state.evaluations + attempt, "")
            damping = damping * self.increase
        stopped = result.NO_DESCENT if seen_finite else result.NOT_FINITE
        return x, state._replace(evaluations=state.evaluations + self.tries, stopped=stopped)

    def _metric(self, xp: Namespace, diagonal: Array) -> Array | float:
        if self.metric == "identity":
            return 1.0
        # A parameter that moves nothing has no scale of its own: it takes the smallest there is.
        return xp.where(diagonal > 0, diagonal, xp.max(diagonal) * 1e-12)

    def _primal(
        self, normal: Array, gradient: Array, metric: Array | float
    ) -> Callable[[float], Array | None]:
        xp = library_of(normal, "jacobian").namespace
        weight = identity(xp, normal.shape[0], normal) * metric
        return lambda damping: solve_positive(xp, normal + damping * weight, gradient)

    def _system(
        self, j: Array, r: Array, gradient: Array, metric: Array | float
    ) -> Callable[[float], Array | None]:
        """The step as a function of the damping; products that no damping changes are made once."""
        xp = library_of(j, "jacobian").namespace
        rows, parameters = j.shape
        if self.system == "primal" or (self.system == "auto" and parameters <= rows):
            return self._primal(xp.matrix_transpose(j) @ j, gradient, metric)

        scaled = j / metric
        gram = scaled @ xp.matrix_transpose(j)
        unit = identity(xp, rows, j)

        def step(damping: float) -> Array | None:
            multipliers = solve_positive(xp, gram + damping * unit, r)
            return None if multipliers is None else xp.matrix_transpose(scaled) @ multipliers

        return step


@advised
def least_squares(
    residuals: Residuals,
    jacobian: Jacobian,
    x: Array,
    *,
    iterations: int = 200,
    optimizer: LevenbergMarquardt | None = None,
) -> Result:
    """Run Levenberg-Marquardt from `x`, (parameters,), for at most `iterations` steps.

    See `Result` for the reasons to stop (its `value` is the sum of squares), and `LevenbergMarquardt` for the settings and an
    example.
    """
    positive("iterations", iterations)
    optimizer = LevenbergMarquardt() if optimizer is None else optimizer
    state = optimizer.init(residuals, x)
    while not state.stopped and state.step < iterations:
        x, state = optimizer.step(residuals, jacobian, x, state)
    return Result(x, state.value, state.step, state.evaluations, state.stopped or result.ITERATIONS)


def sum_of_squares(r: Array) -> float:
    """|r|^2 on the host; a number without axes is one already."""
    if getattr(r, "shape", None) == ():
        return real_number("residuals", r)
    xp = library_of(r, "residuals").namespace
    check_real("residuals", r, _SPLIT)
    r = detached(r)
    return float(xp.sum(r * r))


_SPLIT = "split a complex one: xp.concat([xp.real(r), xp.imag(r)]), and its Jacobian alike"


def _check_normal(found: Normal, x: Array) -> None:
    size = x.shape[0]
    if tuple(found.gradient.shape) != (size,) or tuple(found.matrix.shape) != (size, size):
        raise ShapeError(
            f"J^T r has shape {tuple(found.gradient.shape)}, J^T J {tuple(found.matrix.shape)} and x {tuple(x.shape)}: "
            "expected are (parameters,), (parameters, parameters) and (parameters,)"
        )
    check_real("J^T r", found.gradient, _SPLIT)
    check_real("J^T J", found.matrix, _SPLIT)


def _check_shapes(r: Array, j: Array, x: Array) -> None:
    if len(r.shape) != 1 or tuple(j.shape) != (r.shape[0], x.shape[0]):
        raise ShapeError(
            f"residuals have shape {tuple(r.shape)}, the Jacobian {tuple(j.shape)} and x {tuple(x.shape)}: "
            "expected are (rows,), (rows, parameters) and (parameters,)"
        )
    check_real("residuals", r, _SPLIT)
    check_real("Jacobian", j, _SPLIT)
