"""Elementary functions that the array API lacks, right to a few units in the last place for every finite number."""

from __future__ import annotations

import math

from scanfield.arrays import Array, Namespace

# erfc(z) = t exp(-z^2 + p(4 t - 2)), t = 2 / (2 + z), z >= 0: Chebyshev coefficients of p on [-2, 2], computed with 40
# digits. (The substitution is that of Press et al., "Numerical Recipes", section 6.2.)
_ERFC = (
    -0.6513268598908547,
    0.6419697923564902,
    0.019476473204185836,
    -0.009561514786808632,
    -0.0009465953444820369,
    0.00036683949785276145,
    4.252332480690777e-05,
    -2.0278578112534242e-05,
    -1.6242900046470256e-06,
    1.3036558355805232e-06,
    1.5626441722066142e-08,
    -8.523809591492654e-08,
    6.5290544390988515e-09,
    5.059343495551469e-09,
    -9.91364156493033e-10,
    -2.273651222931836e-10,
    9.646791102015527e-11,
    2.3940380830391146e-12,
    -6.886027526497553e-12,
    8.944879273090725e-13,
    3.130921399342958e-13,
    -1.1270822361367252e-13,
    3.810905255189232e-16,
    7.106097613609237e-15,
    -1.5230282014571043e-15,
    -9.457494571291233e-17,
)


def sigmoid(xp: Namespace, x: Array) -> Array:
    """exp(min(x, 0)) / (1 + exp(-abs(x))): no overflow, no cancellation, and no slow choice by sign."""
    return xp.exp(xp.minimum(x, xp.zeros_like(x))) / (1 + xp.exp(-xp.abs(x)))


def softplus(xp: Namespace, x: Array) -> Array:
    """log(1 + exp(x)) = max(x, 0) + log1p(exp(-|x|))"""
    return xp.maximum(x, xp.zeros_like(x)) + xp.log1p(xp.exp(-xp.abs(x)))


def normal_cdf(xp: Namespace, x: Array) -> Array:
    """The normal distribution function Phi(x), relatively exact on the left tail too."""
    z = xp.abs(x) * math.sqrt(0.5)
    t = 2 / (2 + z)
    u = 2 * t - 1
    # Clenshaw's recurrence for the sum of Chebyshev polynomials.
    before, now = xp.zeros_like(u), xp.zeros_like(u)
    for coefficient in reversed(_ERFC[1:]):
        before, now = now, 2 * u * now - before + coefficient
    tail = 0.5 * t * xp.exp(u * now - before + _ERFC[0] - z * z)
    return xp.where(x < 0, tail, 1 - tail)
