"""What the optimisers of a vector return, and why they stopped."""

from __future__ import annotations

from typing import NamedTuple

from scanfield.arrays import Array

__all__ = ["GRADIENT", "ITERATIONS", "LINE_SEARCH", "NOT_FINITE", "NO_DESCENT", "Result"]

GRADIENT = "gradient"
ITERATIONS = "iteration limit"
LINE_SEARCH = "line search"
NOT_FINITE = "not finite"
NO_DESCENT = "no descent"


class Result(NamedTuple):
    """The end of an optimisation.

    `x` is the best vector seen, `value` the loss there, `iterations` the steps taken, `evaluations` the calls of
    the function. `reason` is one of

    * `"gradient"`: the largest entry of the gradient is at most the tolerance,
    * `"iteration limit"`,
    * `"line search"` (L-BFGS): no step along the direction lowers the loss enough in this precision,
    * `"no descent"` (Levenberg-Marquardt): the same, for every damping tried,
    * `"not finite"`: the loss or its gradient is NaN or infinite wherever the next step could go.
    """

    x: Array
    value: float
    iterations: int
    evaluations: int
    reason: str
