"""The gates that flash-linear-attention's kernels can compute by themselves, from raw numbers and parameters.

Glossary (Kimi Linear, arXiv 2510.26692, section 4; Gated DeltaNet, arXiv 2412.06464, section 3.4)
--------
g      ``g``        (batch, time, heads[, K])   raw gate
a      ``A_log``    (heads,)                    logarithm of the rate
b      ``dt_bias``  (heads,) or (heads K,)      added to the raw gate
low    ``lower_bound``                          most negative log decay of the bounded form

softplus gate: log decay = -exp(a) softplus(g + b); bounded gate: log decay = low sigmoid(exp(a) (g + b)).
"""

from __future__ import annotations

from math import prod
from typing import Any

from scanfield.arrays import Array, Namespace, library_of
from scanfield.compat import _arrays
from scanfield.errors import ArgumentError, ShapeError
from scanfield.scans.canonical import quiet
from scanfield.scans.options import check_number
from scanfield.scans.selective_forms import sigmoid, softplus

# exp of it is far beyond every decay that is not 0, and its products stay finite in float32: an infinite rate times a
# slope that has underflown to 0 would be NaN in a gradient.
_LARGEST_RATE = 80.0


def log_decay(
    xp: Namespace, g: Array, A_log: Array | None, dt_bias: Array | None, lower_bound: float | None
) -> Array:
    """The log decay of a raw gate (batch, time, heads) or (batch, time, heads, K), in float32 at least."""
    heads, inner = g.shape[2], tuple(g.shape[2:])
    with quiet(library_of(g, "g").name):
        raw = _arrays.wide(xp, g)
        if dt_bias is not None:
            if prod(dt_bias.shape) != prod(inner):
                raise ShapeError(
                    f"dt_bias: shape {tuple(dt_bias.shape)}, but g {tuple(g.shape)} needs {prod(inner)} entries"
                )
            raw = raw + xp.reshape(_arrays.wide(xp, dt_bias), inner)
        rate = None
        if A_log is not None:
            if prod(A_log.shape) != heads:
                raise ShapeError(
                    f"A_log: shape {tuple(A_log.shape)}, but g {tuple(g.shape)} needs {heads} entries"
                )
            rate = _rate(xp, xp.reshape(_arrays.wide(xp, A_log), (heads, *(1 for _ in inner[1:]))))
        if lower_bound is not None:
            return lower_bound * sigmoid(xp, raw if rate is None else rate * raw)
        assert rate is not None, "check_gate has seen to it"
        return -rate * softplus(xp, raw)


def _rate(xp: Namespace, a: Array) -> Array:
    return xp.exp(xp.where(a > _LARGEST_RATE, xp.full_like(a, _LARGEST_RATE), a))


def check_gate(
    use_gate_in_kernel: bool, A_log: Any, dt_bias: Any, lower_bound: Any, safe_gate: bool = False
) -> float | None:
    """The lower bound, or None for the softplus gate; ArgumentError for parameters that make no gate, or without one."""
    bound = None if lower_bound is None else check_number(lower_bound, "lower_bound")
    if bound is not None and not bound < 0:
        raise ArgumentError(
            f"lower_bound: {bound}; it is the most negative log decay, allowed is a number below 0"
        )
    if not use_gate_in_kernel:
        for name, given in (("A_log", A_log), ("dt_bias", dt_bias), ("lower_bound", lower_bound)):
            if given is not None:
                raise ArgumentError(
                    f"{name}: it makes a decay of a raw gate, and use_gate_in_kernel=False takes g for the log decay "
                    f"itself; pass use_gate_in_kernel=True, or leave {name} out"
                )
        return None
    if safe_gate:
        if bound is None:
            raise ArgumentError(
                "lower_bound: None; safe_gate=True with use_gate_in_kernel=True needs one in [-5, 0)"
            )
        if bound < -5:
            raise ArgumentError(f"lower_bound: {bound}; safe_gate=True allows [-5, 0)")
    if A_log is None and bound is None:
        raise ArgumentError("A_log: None; use_gate_in_kernel=True needs A_log, lower_bound or both")
    return bound


def strength(xp: Namespace, beta: Array, use_beta_sigmoid_in_kernel: bool, allow_neg_eigval: bool) -> Array:
    """beta itself, its sigmoid, or twice that."""
    if not use_beta_sigmoid_in_kernel:
        if allow_neg_eigval:
            raise ArgumentError(
                "allow_neg_eigval: True needs use_beta_sigmoid_in_kernel=True, which it doubles"
            )
        return beta
    with quiet(library_of(beta, "beta").name):
        y = sigmoid(xp, _arrays.wide(xp, beta))
    return 2 * y if allow_neg_eigval else y


def unit(xp: Namespace, x: Array) -> Array:
    """x / sqrt(sum of squares + 1e-6) over the last axis, in float32 at least."""
    a = _arrays.wide(xp, x)
    with quiet(library_of(x, "x").name):
        return a / xp.sqrt(xp.sum(a * a, axis=-1, keepdims=True) + 1e-6)
