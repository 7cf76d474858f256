"""Candidates that are wrong on purpose, each in one way, and an honest one beside them."""

from __future__ import annotations

from typing import Any

from scanfield import dispatch
from scanfield.dispatch import Candidate, Manifest

OPERATIONS = ("linear_scan", "selective_scan", "gdn2")


class Honest:
    """The generic code under another name."""

    def __init__(self, operation: str) -> None:
        self.inner = dispatch.implementation(operation, "generic.recurrent")

    def declines(self, call: dispatch.Call, verb: str) -> str | None:
        return None

    def forward(self, call: dispatch.Call) -> Any:
        return self.inner.forward(call)

    def save(self, call: dispatch.Call) -> Any:
        return self.inner.save(call)

    def backward(self, call: dispatch.Call, residuals: Any, d_output: Any, d_state: Any, wanted: Any) -> Any:
        return self.inner.backward(call, residuals, d_output, d_state, wanted)

    def step(self, call: dispatch.Call) -> Any:
        return self.inner.step(call)

    def summarise(self, call: dispatch.Call) -> Any:
        return self.inner.summarise(call)


def off(x: Any, by: float) -> Any:
    """x with its last entry moved by `by` times the largest value."""
    moved = x.copy()
    if moved.size:
        moved.reshape(-1)[-1] += by * abs(x).max()
    return moved


class WrongOutput(Honest):
    """One output entry off by 1e-4 of the largest."""

    def forward(self, call: dispatch.Call) -> Any:
        output, state = super().forward(call)
        return off(output, 1e-4), state


class WrongState(Honest):
    """The final state is right to 1e-4 only."""

    def forward(self, call: dispatch.Call) -> Any:
        output, state = super().forward(call)
        return output, off(state, 1e-4)


class WrongGradient(Honest):
    """Forward is perfect; the gradient of the first array is off in one entry."""

    def backward(self, call: dispatch.Call, residuals: Any, d_output: Any, d_state: Any, wanted: Any) -> Any:
        first, *rest = super().backward(call, residuals, d_output, d_state, wanted)
        return [None if first is None else off(first, 1e-4), *rest]


class WrongStep(Honest):
    """The whole sequence is right, one token is not."""

    def step(self, call: dispatch.Call) -> Any:
        output, state = super().step(call)
        return off(output, 1e-4), state


class WrongSummary(Honest):
    """What a shard hands on is off."""

    def summarise(self, call: dispatch.Call) -> Any:
        transition, state, *rest = super().summarise(call)
        return transition, off(state, 1e-4), *rest


class NotFinite(Honest):
    """One output entry is NaN."""

    def forward(self, call: dispatch.Call) -> Any:
        output, state = super().forward(call)
        return off(output, float("nan")), state


class Raises(Honest):
    """Fails instead of declining."""

    def forward(self, call: dispatch.Call) -> Any:
        raise RuntimeError("misaligned address")


class Coarse(WrongOutput):
    """As wrong as WrongOutput, but it states a tolerance of 1e-3."""


def manifest(kind: type[Honest], **more: Any) -> Manifest:
    planted = Candidate("numpy.planted", OPERATIONS, "cpu", f"planted_backend:{kind.__name__}", **more)
    return Manifest(library="numpy", requires="numpy", install="pip install planted", candidates=(planted,))


HONEST = manifest(Honest)
WRONG_OUTPUT = manifest(WrongOutput)
WRONG_STATE = manifest(WrongState)
WRONG_GRADIENT = manifest(WrongGradient)
WRONG_STEP = manifest(WrongStep)
WRONG_SUMMARY = manifest(WrongSummary)
NOT_FINITE = manifest(NotFinite)
RAISES = manifest(Raises)
COARSE = manifest(Coarse, tolerance={"float32": 1e-3, "float64": 1e-3})
