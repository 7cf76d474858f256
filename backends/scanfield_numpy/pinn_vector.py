"""Activations of vectors with their derivatives. A tag as long as an activation's number says which one.

What numba's vectors have no function for comes from NumPy as a vector beside: the cosine for sin, Phi for gelu.
"""

from __future__ import annotations

import math
from typing import Any

from numba import types
from numba.extending import intrinsic

from scanfield_numpy.elementary import _fall, _polynomial, _sigmoid, _softplus
from scanfield_numpy.vector import _bits, _call, _constant, _fused

TANH, SIN, SWISH, SOFTPLUS, GELU = range(1, 6)

# Below this tanh is x D(x^2) / N(x^2), a convergent of Lambert's continued fraction x / (1 + x^2 / (3 + x^2 / (5 + ...)));
# above it comes from exp(-2 |x|). So many levels leave less than a rounding error.
_SMALL = 0.625
_LEVELS = {32: 5, 64: 8}


def _lambert(levels: int) -> tuple[list[float], list[float]]:
    """D and N, from the innermost level outwards, N(0) = 1."""
    top, bottom = [2.0 * levels - 1.0], [1.0]
    for level in range(levels - 1, 0, -1):
        odd = 2.0 * level - 1.0
        above = [odd * c for c in top] + [0.0] * (len(bottom) + 1 - len(top))
        for i, c in enumerate(bottom):
            above[i + 1] += c
        top, bottom = above, top
    return [c / top[0] for c in bottom], [c / top[0] for c in top]


_CONVERGENTS = {bits: _lambert(levels) for bits, levels in _LEVELS.items()}


def _tanh(builder: Any, x: Any) -> Any:
    kind = x.type
    size = _call(builder, "fabs", x)
    square = builder.fmul(x, x)
    above, below = (_polynomial(builder, terms, square) for terms in _CONVERGENTS[_bits(kind)])
    e = _fall(builder, builder.fadd(x, x))
    one = _constant(kind, 1.0)
    near = builder.fcmp_ordered("<", size, _constant(kind, _SMALL))
    top = builder.select(near, builder.fmul(size, above), builder.fsub(one, e))
    bottom = builder.select(near, below, builder.fadd(one, e))
    return _call(builder, "copysign", builder.fdiv(top, bottom), x)


def _ramp(builder: Any, constant: float, slope: float, x: Any) -> Any:
    """constant + slope x"""
    return _fused(builder, _constant(x.type, slope), x, _constant(x.type, constant))


def _derivatives(builder: Any, number: int, x: Any, value: Any, beside: Any) -> tuple[Any, ...]:
    """sigma, s1, s2, s3; ``value`` is sigma(x) where it is known. Those that nobody uses are not computed."""
    product = builder.fmul
    if number == TANH:
        t = _tanh(builder, x) if value is None else value
        square = product(t, t)
        s1 = builder.fsub(_constant(x.type, 1.0), square)
        s2 = product(product(_constant(x.type, -2.0), t), s1)
        return t, s1, s2, product(s1, _ramp(builder, -2.0, 6.0, square))
    if number == SIN:
        s = beside if value is None else value  # nobody asks for the sine of nothing but the cosine
        return s, beside, builder.fneg(s), builder.fneg(beside)
    if number == GELU:
        square = product(x, x)
        density = product(_half_exp(builder, square), _constant(x.type, 1.0 / math.sqrt(2.0 * math.pi)))
        s1 = _fused(builder, x, density, beside)
        s3 = product(product(x, _ramp(builder, -4.0, 1.0, square)), density)
        return product(x, beside), s1, product(_ramp(builder, 2.0, -1.0, square), density), s3
    g = _sigmoid(builder, x)
    g1 = product(g, builder.fsub(_constant(x.type, 1.0), g))
    g2 = product(g1, _ramp(builder, 1.0, -2.0, g))
    if number == SOFTPLUS:
        return (_softplus(builder, x) if value is None else value), g, g1, g2
    g3 = product(g1, _ramp(builder, 1.0, -6.0, g1))
    s2 = _fused(builder, x, g2, builder.fadd(g1, g1))
    s3 = _fused(builder, x, g3, product(_constant(x.type, 3.0), g2))
    return product(x, g), _fused(builder, x, g1, g), s2, s3


def _half_exp(builder: Any, square: Any) -> Any:
    """exp(-x^2 / 2)"""
    return _fall(builder, builder.fmul(square, _constant(square.type, 0.5)))


@intrinsic
def sigma(typing: Any, x: Any, beside: Any, tag: Any) -> Any:
    """sigma(x), s1, s2; for sin ``beside`` is cos(x), and the sine is left to who made the cosine."""

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        found = _derivatives(builder, len(tag), values[0], None, values[1])
        return context.make_tuple(builder, sig.return_type, found[:3])

    return types.UniTuple(x, 3)(x, x, tag), generate


@intrinsic
def slopes(typing: Any, x: Any, value: Any, beside: Any, tag: Any) -> Any:
    """s1, s2, s3 where sigma(x) is known."""

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        found = _derivatives(builder, len(tag), *values[:3])
        return context.make_tuple(builder, sig.return_type, found[1:])

    return types.UniTuple(x, 3)(x, x, x, tag), generate
