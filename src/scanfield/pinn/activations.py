"""Activations and their first three derivatives: what jets of second order and their reverse sweep need.

| sigma | s1 | s2 | s3 |
|---|---|---|---|
| tanh = t | 1 - t^2 | -2 t s1 | s1 (6 t^2 - 2) |
| sin | cos | -sin | -cos |
| swish z g | g + z g1 | 2 g1 + z g2 | 3 g2 + z g3 |
| softplus log(1 + e^z) | g | g1 | g2 |
| gelu z Phi | Phi + z phi | (2 - z^2) phi | (z^3 - 4 z) phi |

g = 1 / (1 + e^-z) with g1 = g (1 - g), g2 = g1 (1 - 2 g), g3 = g1 (1 - 6 g1); phi and Phi are the density and the
distribution of the normal law, so gelu is the one with erf (Hendrycks & Gimpel, arXiv 1606.08415), not its tanh
approximation. swish: Ramachandran et al., arXiv 1710.05941, with beta = 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from scanfield.advice import shown
from scanfield.arrays import Array, Namespace
from scanfield.errors import ArgumentError

Erf = Callable[[Array], Array]
ACTIVATIONS = ("tanh", "sin", "swish", "softplus", "gelu")


def check_activation(name: Any) -> str:
    """The name itself; ArgumentError for one that is not known."""
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ArgumentError(f"activation: {shown(name)}; allowed are {', '.join(ACTIVATIONS)}")
    return str(name)


def derivatives(xp: Namespace, name: str, z: Array, order: int, erf: Erf | None = None) -> tuple[Array, ...]:
    """sigma(z) and its first ``order`` derivatives, each of the shape of ``z``; order 0 to 3.

    >>> import numpy
    >>> [s.tolist() for s in derivatives(numpy, "tanh", numpy.zeros(1), 3)]
    [[0.0], [1.0], [-0.0], [-2.0]]
    """
    return _TABLE[name](xp, z, order, erf)


def _tanh(xp: Namespace, z: Array, order: int, erf: Erf | None) -> tuple[Array, ...]:
    t = xp.tanh(z)
    if order == 0:
        return (t,)
    s1 = 1.0 - t * t
    return (t, s1, -2.0 * t * s1, s1 * (6.0 * t * t - 2.0))[: order + 1]


def _sin(xp: Namespace, z: Array, order: int, erf: Erf | None) -> tuple[Array, ...]:
    s = xp.sin(z)
    if order == 0:
        return (s,)
    c = xp.cos(z)
    return (s, c, -s, -c)[: order + 1]


def sigmoid(xp: Namespace, z: Array) -> Array:
    """1 / (1 + e^-z) without overflow."""
    e = xp.exp(-xp.abs(z))
    return xp.where(z < 0, e, xp.ones_like(e)) / (1.0 + e)


def _logistic(xp: Namespace, z: Array) -> tuple[Array, Array, Array, Array]:
    g = sigmoid(xp, z)
    g1 = g * (1.0 - g)
    return g, g1, g1 * (1.0 - 2.0 * g), g1 * (1.0 - 6.0 * g1)


def _swish(xp: Namespace, z: Array, order: int, erf: Erf | None) -> tuple[Array, ...]:
    g, g1, g2, g3 = _logistic(xp, z)
    return (z * g, g + z * g1, 2.0 * g1 + z * g2, 3.0 * g2 + z * g3)[: order + 1]


def _softplus(xp: Namespace, z: Array, order: int, erf: Erf | None) -> tuple[Array, ...]:
    s = xp.where(z > 0, z, xp.zeros_like(z)) + xp.log1p(xp.exp(-xp.abs(z)))
    g, g1, g2, _ = _logistic(xp, z)
    return (s, g, g1, g2)[: order + 1]


def _gelu(xp: Namespace, z: Array, order: int, erf: Erf | None) -> tuple[Array, ...]:
    big = 0.5 * (1.0 + (erf or _erf_of(xp))(z * math.sqrt(0.5)))
    density = xp.exp(-0.5 * z * z) * (1.0 / math.sqrt(2.0 * math.pi))
    square = z * z
    return (z * big, big + z * density, (2.0 - square) * density, z * (square - 4.0) * density)[: order + 1]


_TABLE: dict[str, Callable[..., tuple[Array, ...]]] = {
    "tanh": _tanh,
    "sin": _sin,
    "swish": _swish,
    "softplus": _softplus,
    "gelu": _gelu,
}


def _erf_of(xp: Namespace) -> Erf:
    return lambda x: erf_series(xp, x)


_TERMS, _DEPTH, _LIMIT = 60, 40, 3.0


def erf_series(xp: Namespace, x: Array) -> Array:
    """erf to some 2e-16, from the operations of the array API standard, which has none.

    Below 3 the series of positive terms 2/sqrt(pi) x e^(-x^2) sum (2 x^2)^n / (2n+1)!! (DLMF 7.6.2), above it the
    continued fraction of erfc (DLMF 7.9.1).
    """
    size = xp.abs(x)
    inner = xp.where(size < _LIMIT, size, xp.zeros_like(x))
    double = 2.0 * inner * inner
    series = xp.ones_like(x)
    for n in range(_TERMS, 0, -1):
        series = 1.0 + series * double / (2.0 * n + 1.0)
    near = 2.0 / math.sqrt(math.pi) * inner * xp.exp(-inner * inner) * series
    # Where the series holds, the fraction runs at its limit and is thrown away; beyond 30 erfc is 0 in any precision.
    outer = xp.where(
        size < _LIMIT, _LIMIT * xp.ones_like(x), xp.where(size > 30.0, 30.0 * xp.ones_like(x), size)
    )
    fraction = outer
    for n in range(_DEPTH, 0, -1):
        fraction = outer + (0.5 * n) / fraction
    far = 1.0 - xp.exp(-outer * outer) / (math.sqrt(math.pi) * fraction)
    value = xp.where(size < _LIMIT, near, far)
    return xp.where(x < 0, -value, value) + 0.0 * x  # a NaN stays
