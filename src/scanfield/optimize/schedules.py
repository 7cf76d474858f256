"""Learning-rate schedules: callables from the number of updates already made to the rate of the next one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy

from scanfield.advice import shown
from scanfield.arrays import Array, library_of
from scanfield.errors import ArgumentError
from scanfield.keywords import advised_class
from scanfield.optimize.given import in_python

__all__ = ["Constant", "Cosine", "Exponential", "Schedule", "positive"]

Schedule = Callable[[int], float]
"""The number of updates already made -> the learning rate of the next one."""


@advised_class
@dataclass(frozen=True)
class Constant:
    """The same rate for ever.

    >>> Constant(1e-3)(10_000)
    0.001
    """

    value: float

    def __post_init__(self) -> None:
        in_python(self)
        positive("value", self.value)

    def __call__(self, step: int) -> float:
        """The rate of the next update, after `step` of them."""
        return self.value


@advised_class
@dataclass(frozen=True)
class Cosine:
    """A linear warm-up over `warmup` updates to `peak`, then half a cosine down to `final` at update `steps`.

    The first update of a warm-up already moves (its rate is peak / warmup, not 0), and after `steps` the
    rate stays at `final`. (Loshchilov & Hutter, arXiv 1608.03983, equation 5, without restarts.)

    >>> rate = Cosine(peak=1.0, steps=10, warmup=4)
    >>> [round(rate(step), 3) for step in (0, 3, 4, 7, 10, 99)]
    [0.25, 1.0, 1.0, 0.5, 0.0, 0.0]
    """

    peak: float
    steps: int
    warmup: int = 0
    final: float = 0.0

    def __post_init__(self) -> None:
        in_python(self)
        positive("peak", self.peak)
        if self.steps < 1:
            raise ArgumentError(f"steps = {self.steps}: a schedule needs at least one step")
        if not 0 <= self.warmup <= self.steps:
            raise ArgumentError(f"warmup = {self.warmup}: it lies between 0 and steps = {self.steps}")
        if not self.final >= 0:
            raise ArgumentError(f"final = {self.final}: a learning rate is not negative")

    def __call__(self, step: Any) -> Any:
        """The rate of the next update, after `step` of them; an array for an array (a step that is traced)."""
        if hasattr(step, "shape") and not isinstance(step, numpy.generic):
            return self._of_array(step)
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        done = (step - self.warmup) / (self.steps - self.warmup) if step < self.steps else 1.0
        return self.final + (self.peak - self.final) * 0.5 * (1.0 + math.cos(math.pi * done))

    def _of_array(self, step: Array) -> Array:
        """All branches at once: a traced step has no value to choose by."""
        xp = library_of(step, "step").namespace
        rising = self.peak * (step + 1) / max(self.warmup, 1)
        done = (step - self.warmup) / max(self.steps - self.warmup, 1)
        done = xp.where(step < self.steps, done, xp.ones_like(done))
        falling = self.final + (self.peak - self.final) * 0.5 * (1.0 + xp.cos(math.pi * done))
        return xp.where(step < self.warmup, rising, falling)


@advised_class
@dataclass(frozen=True)
class Exponential:
    """`initial` times `factor` for every `every` updates, without steps in between.

    >>> rate = Exponential(initial=0.1, factor=0.5, every=100)
    >>> rate(0), rate(100), rate(200)
    (0.1, 0.05, 0.025)
    """

    initial: float
    factor: float
    every: int = 1

    def __post_init__(self) -> None:
        in_python(self)
        positive("initial", self.initial)
        positive("factor", self.factor)
        if self.every < 1:
            raise ArgumentError(f"every = {self.every}: it counts updates, at least 1")

    def __call__(self, step: Any) -> Any:
        """The rate of the next update, after `step` of them; an array for an array (a step that is traced)."""
        return self.initial * self.factor ** (step / self.every)


def positive(name: str, value: Any) -> None:
    """ArgumentError unless `value` is a finite number above 0."""
    if not (
        isinstance(value, int | float | numpy.integer | numpy.floating) and value > 0 and math.isfinite(value)
    ):
        raise ArgumentError(f"{name} = {shown(value)}: it is a number above 0")
