"""The scans as operations of a layer, and what makes their gates.

| function | forward | gradient |
|---|---|---|
| ``Scan`` | any public scan: outputs and final state | the scan's own |
| ``Rates`` | A = -exp(A_log) | dA_log = A dA |
| ``LogDecay`` | g = -exp(A_log) softplus(f + bias) | df = -dg exp(A_log) sigmoid(f + bias), dA_log = sum g dg |
| ``BoundedDecay`` | g = low sigmoid(e z), e = exp(A_log), z = f + bias | df = dg low e s(e z) s(-e z), dA_log = sum z df |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import scanfield
from scanfield.advice import shown
from scanfield.arrays import Array, Namespace
from scanfield.dispatch import registry
from scanfield.errors import ArgumentError
from scanfield.layers.elementary import sigmoid, softplus
from scanfield.layers.tape import Function, Saved
from scanfield.lrp.rules import Epsilon, Passed, Rule
from scanfield.scans.binding import bind

_LARGEST_RATE = 80.0
"""Of A_log: exp of it stays finite in float32, and its products with a logit too."""


@dataclass(frozen=True)
class Scan(Function):
    """A public scan by name, with the names of its array inputs in order and its options.

    For relevance all arrays but its value and its state are held constant.
    """

    op: str
    names: tuple[str, ...]
    options: tuple[tuple[str, Any], ...] = ()
    single: bool = False
    """One token, by the scan's ``step``."""

    kind = "scan"
    rules = ("epsilon",)

    def forward(self, xp: Namespace, *inputs: Any) -> tuple[Array, ...]:
        """Output and final state."""
        given = dict(zip(self.names, inputs, strict=True))
        op = getattr(scanfield, self.op)
        if not self.single:
            return tuple(op(**given, **dict(self.options)))
        state = given.pop("initial_state")
        sequences = {entry.name for entry in op.record.inputs if entry.role == "sequence"}
        token = {
            name: xp.squeeze(a, axis=1) if name in sequences and a is not None else a
            for name, a in given.items()
        }
        options = {name: value for name, value in self.options if name not in ("cu_seqlens", "chunk_size")}
        output, state = op.step(state, **token, **options)
        return xp.expand_dims(output, axis=1), state

    def save(self, xp: Namespace, *inputs: Any) -> tuple[tuple[Array, ...], Any]:
        """The scan, with what its gradient needs."""
        given = dict(zip(self.names, inputs, strict=True))
        bound = bind(getattr(scanfield, self.op), (), {**given, **dict(self.options)})
        prepared = bound.record.prepare(bound.arrays, bound.options)
        output, state, residuals, chosen = registry.save(prepared.call, bound.method)
        return (prepared.output(output), prepared.state(state)), (prepared, residuals, chosen)

    def backward(
        self, xp: Namespace, saved: Saved, d_outputs: tuple[Any, ...], wanted: tuple[bool, ...]
    ) -> tuple[Array | None, ...]:
        """By name, as ``scanfield.vjp``."""
        prepared, residuals, chosen = saved.residuals
        names = frozenset(
            name
            for name, want, array in zip(self.names, wanted, saved.inputs, strict=True)
            if want and array is not None
        )
        d_y, d_last = prepared.cotangents(*d_outputs)
        grads = registry.backward(chosen, prepared.call, residuals, d_y, d_last, prepared.wanted(names))
        found = prepared.pull(grads, d_y)
        return tuple([found[name] if name in names else None for name in self.names])

    def relevance(self, xp: Namespace, saved: Saved, rho: tuple[Any, ...], rule: Rule | None) -> Passed:
        """Gates held constant the scan is linear in its value and state: rho of these is their gradient."""
        y, r = saved.outputs[0], rho[0]
        absorbed = None
        if isinstance(rule, Epsilon) and rule.epsilon and r is not None:
            R = y * r
            r = rule.divided(xp, R, y)
            absorbed = R - y * r
        elif rule is not None and not isinstance(rule, Epsilon):
            raise ArgumentError(f"rule: {shown(rule)}; a scan has the rule 'epsilon'")
        value = getattr(scanfield, self.op).record.relevant
        wanted = tuple(name in (value, "initial_state") for name in self.names)
        return Passed(self.backward(xp, saved, (r, rho[1]), wanted), (), None, absorbed)


@dataclass(frozen=True)
class Rates(Function):
    """A = -exp(A_log): decay rates that stay negative."""

    kind = "activation"

    def forward(self, xp: Namespace, *inputs: Any) -> tuple[Array, ...]:
        """A"""
        return (-xp.exp(inputs[0]),)

    def backward(
        self, xp: Namespace, saved: Saved, d_outputs: tuple[Any, ...], wanted: tuple[bool, ...]
    ) -> tuple[Array | None, ...]:
        """A dA"""
        return (saved.outputs[0] * d_outputs[0],)


@dataclass(frozen=True)
class LogDecay(Function):
    """g = -exp(A_log) softplus(f + bias): f (batch, time, heads[, K]), A_log (heads,), bias (heads[, K]) or None.

    exp(A_log) softplus is guarded where one is infinite and the other 0: no decay.
    """

    kind = "activation"

    def forward(self, xp: Namespace, *inputs: Any) -> tuple[Array, ...]:
        """g"""
        f, rate, bias = inputs
        s = softplus(xp, f if bias is None else f + bias)
        return (xp.where(s == 0, xp.zeros_like(s), -_by_head(xp, xp.exp(rate), f) * s),)

    def backward(
        self, xp: Namespace, saved: Saved, d_outputs: tuple[Any, ...], wanted: tuple[bool, ...]
    ) -> tuple[Array | None, ...]:
        """df, dA_log, dbias"""
        (f, rate, bias), (g,), (d,) = saved.inputs, saved.outputs, d_outputs
        z = f if bias is None else f + bias
        slope = sigmoid(xp, z)
        d_f = xp.where(slope == 0, xp.zeros_like(slope), -_by_head(xp, xp.exp(rate), f) * slope * d)
        d_rate = None
        if wanted[1]:
            d_rate = xp.sum(g * d, axis=(0, 1, *range(3, f.ndim)))
        d_bias = xp.sum(d_f, axis=(0, 1)) if wanted[2] else None
        return d_f, d_rate, d_bias


@dataclass(frozen=True)
class BoundedDecay(Function):
    """g = low sigmoid(exp(A_log) (f + bias)), in (low, 0): Kimi Linear's gate with a lower bound; shapes as ``LogDecay``.

    exp(A_log) is cut off where any gate is long saturated, so that no slope of 0 meets an infinite rate.
    """

    low: float

    kind = "activation"

    def forward(self, xp: Namespace, *inputs: Any) -> tuple[Array, ...]:
        """g"""
        f, rate, bias = inputs
        z = f if bias is None else f + bias
        return (self.low * sigmoid(xp, self._rate(xp, rate, f) * z),)

    def _rate(self, xp: Namespace, rate: Array, f: Any) -> Array:
        return _by_head(xp, xp.exp(xp.minimum(rate, xp.full_like(rate, _LARGEST_RATE))), f)

    def backward(
        self, xp: Namespace, saved: Saved, d_outputs: tuple[Any, ...], wanted: tuple[bool, ...]
    ) -> tuple[Array | None, ...]:
        """df, dA_log, dbias"""
        (f, rate, bias), (d,) = saved.inputs, d_outputs
        z = f if bias is None else f + bias
        factor = self._rate(xp, rate, f)
        # The slope as s(x) s(-x): 1 - s would be 0 where it is merely small.
        slope = sigmoid(xp, factor * z) * sigmoid(xp, -factor * z)
        d_f = d * (self.low * slope * factor)
        d_rate = None
        if wanted[1]:
            d_rate = xp.sum(z * d_f, axis=(0, 1, *range(3, f.ndim)))
            d_rate = xp.where(rate > _LARGEST_RATE, xp.zeros_like(d_rate), d_rate)
        d_bias = xp.sum(d_f, axis=(0, 1)) if wanted[2] else None
        return d_f, d_rate, d_bias


def _by_head(xp: Namespace, x: Array, like: Any) -> Array:
    return xp.reshape(x, (x.shape[0], *(1,) * (like.ndim - 3)))
