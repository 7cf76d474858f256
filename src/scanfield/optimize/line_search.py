"""A line search for the strong Wolfe conditions (Nocedal & Wright, Numerical Optimization, algorithms 3.5 and 3.6).

phi(t) = f(x + t p) along a direction p of descent, phi'(0) < 0. A step t is accepted if

    phi(t) <= phi(0) + c1 t phi'(0)      and      |phi'(t)| <= c2 |phi'(0)|.

A trial whose value is not finite counts as infinitely high, so the search turns back from where f overflows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["Trial", "strong_wolfe"]


class Trial(NamedTuple):
    """A point of the search: the step, phi, phi', and whatever the function wants back for it."""

    step: float
    value: float
    slope: float
    payload: Any


Phi = Callable[[float], Trial]


def strong_wolfe(
    phi: Phi, start: Trial, first: float, *, c1: float = 1e-4, c2: float = 0.9, evaluations: int = 25
) -> tuple[Trial | None, int, bool]:
    """Search from `start` (its step is 0) with the trial step `first`.

    Returns the accepted trial, the number of calls of `phi`, and whether any of them was finite. Where the calls
    run out, the lowest trial that satisfies the first condition is accepted; None if there is none.
    """
    used, seen_finite = 0, False
    best: Trial | None = None

    def tried(step: float) -> Trial:
        nonlocal used, seen_finite, best
        used += 1
        trial = phi(step)
        if not (math.isfinite(trial.value) and math.isfinite(trial.slope)):
            return trial._replace(value=math.inf, slope=math.inf)
        seen_finite = True
        if sufficient(trial) and (best is None or trial.value < best.value):
            best = trial
        return trial

    def sufficient(trial: Trial) -> bool:
        if trial.value < start.value:
            return trial.value <= start.value + c1 * trial.step * start.slope
        # Close to a minimum the loss differs by less than its rounding, and only slopes tell (Hager & Zhang 2005,
        # equation 4.1).
        return trial.value == start.value and trial.slope <= (2.0 * c1 - 1.0) * start.slope

    def flat(trial: Trial) -> bool:
        return abs(trial.slope) <= -c2 * start.slope

    low, high = start, None
    trial = tried(first)
    while high is None and used < evaluations:
        if not sufficient(trial) or (low.step > 0 and trial.value >= low.value):
            high = trial
        elif flat(trial):
            return trial, used, True
        elif trial.slope >= 0:
            low, high = trial, low
        else:
            low, trial = trial, tried(2.0 * trial.step)

    while high is not None and used < evaluations:
        if abs(high.step - low.step) <= 1e-12 * max(abs(high.step), abs(low.step)):
            break
        trial = tried(_between(low, high))
        if not sufficient(trial) or trial.value >= low.value:
            high = trial
        elif flat(trial):
            return trial, used, True
        else:
            if trial.slope * (high.step - low.step) >= 0:
                high = low
            low = trial
    return best, used, seen_finite


def _between(low: Trial, high: Trial) -> float:
    """The minimiser of the cubic through both ends (equation 3.59), kept away from them; else the middle."""
    width = high.step - low.step
    middle = low.step + 0.5 * width
    if not math.isfinite(high.value):
        return low.step + 0.1 * width
    d1 = low.slope + high.slope - 3.0 * (low.value - high.value) / (low.step - high.step)
    square = d1 * d1 - low.slope * high.slope
    if square < 0:
        return middle
    d2 = math.copysign(math.sqrt(square), width)
    below = high.slope - low.slope + 2.0 * d2
    if below == 0:
        return middle
    step = high.step - width * (high.slope + d2 - d1) / below
    inside = (step - low.step) / width
    return step if 0.05 <= inside <= 0.95 else middle
