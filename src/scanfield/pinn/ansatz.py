"""Hard Dirichlet conditions: u = G + D N, folded into the coefficients of every loss term.

| symbol | shape | meaning |
|---|---|---|
| N | | the network |
| D | `Distance` | zero where the condition holds, smooth, nowhere zero inside |
| G | `Extension` | takes the condition's values, made from these alone |

    sum_i a_i u_ii + b_i u_i + c u = sum_i (a_i D) N_ii + (b_i D + 2 a_i D_i) N_i + (c D + b.grad D + sum_i a_i D_ii) N
                                     + sum_i a_i G_ii + b.grad G + c G                    (MATH, hard constraints)

so a term in u is a term in N with other coefficients, and G's part goes into the target.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.polynomial import chebyshev

from scanfield.errors import ArgumentError
from scanfield.pinn.boundary import Dirichlet
from scanfield.pinn.domains import Box, Distance, Domain
from scanfield.pinn.terms import Piece
from scanfield.pinn.values import evaluate

__all__ = ["Ansatz", "hard_ansatz"]

Extension = Callable[[np.ndarray], Distance]
"""Points -> values, first and unmixed second derivatives; complex where the condition is."""


@dataclass(frozen=True)
class Ansatz:
    """D on the parts with hard conditions, and G."""

    domain: Domain
    parts: tuple[str, ...]
    extension: Extension | None

    def fold(self, piece: Piece, x: np.ndarray) -> tuple[Piece, np.ndarray | None]:
        """A piece in u at physical points x as a piece in N, and G's part of the sum (None: zero)."""
        distance = self.domain.distance(x, self.parts)
        value, first, second = (
            _operated(piece, distance),
            None if piece.first is None else piece.first * distance.value[:, None],
            None if piece.second is None else piece.second * distance.value[:, None],
        )
        if piece.second is not None:
            turned = 2.0 * piece.second * distance.first
            first = turned if first is None else first + turned
        constant = None if self.extension is None else _operated(piece, self.extension(x))
        return Piece(piece.points, value, first, second), constant

    def factor(self, factor: np.ndarray, x: np.ndarray) -> np.ndarray:
        """A coefficient of u as a coefficient of N."""
        return np.asarray(factor * self.domain.distance(x, self.parts).value)

    def field(self, network: np.ndarray, x: np.ndarray) -> np.ndarray:
        """u from N, (n,) each."""
        inside = self.domain.distance(x, self.parts).value * network
        return np.asarray(inside if self.extension is None else inside + self.extension(x).value)


def _operated(piece: Piece, function: Distance) -> np.ndarray:
    """sum_i a_i f_ii + b.grad f + c f."""
    total: np.ndarray = np.zeros(function.value.shape)
    if piece.value is not None:
        total = total + piece.value * function.value
    if piece.first is not None:
        total = total + np.sum(piece.first * function.first, axis=1)
    if piece.second is not None:
        total = total + np.sum(piece.second * function.second, axis=1)
    return total


def hard_ansatz(domain: Domain, conditions: list[Dirichlet]) -> Ansatz | None:
    """The ansatz of all hard conditions of a problem; None where there are none.

    Raises `ArgumentError` for values that cannot be extended into this domain.
    """
    if not conditions:
        return None
    values: dict[str, Dirichlet] = {}
    for condition in conditions:
        for part in condition.on(domain):
            if part in values:
                raise ArgumentError(f"boundary: two hard Dirichlet conditions on {part!r}; one can hold")
            values[part] = condition
    domain.distance(np.asarray([domain.lower]) * 0.5 + np.asarray([domain.upper]) * 0.5, tuple(values))
    given = list(values.values())
    for condition in given:
        if not callable(condition.value):  # a number, or an array, which no drawn points have
            evaluate("value", condition.value, np.asarray([domain.lower]))
    constant = all(not callable(condition.value) for condition in given)
    if constant and all(condition.value == given[0].value for condition in given):
        number = given[0].value
        return Ansatz(domain, tuple(values), None if number == 0 else _constant(number))
    if not isinstance(domain, Box) or domain.dimensions > 2:
        raise ArgumentError(
            f"hard = True with values that vary over the boundary of {domain!r}: they can be extended into an interval or "
            "a rectangle; use hard=False"
        )
    for part in domain.parts:
        if part not in values:
            raise ArgumentError(
                f"hard = True with values that vary: {part!r} has none, and an extension needs all sides; use hard=False"
            )
    return Ansatz(
        domain, tuple(values), _line(domain, values) if domain.dimensions == 1 else _coons(domain, values)
    )


def _constant(number: complex) -> Extension:
    def extension(x: np.ndarray) -> Distance:
        return Distance(np.full(x.shape[0], number), np.zeros(x.shape), np.zeros(x.shape))

    return extension


def _line(domain: Box, values: dict[str, Dirichlet]) -> Extension:
    """The straight line between the values at both ends."""
    low, high = domain.lower[0], domain.upper[0]
    a, b = (
        evaluate(f"value on {part!r}", values[part].value, *domain.surface(part, np.zeros((1, 0))))[0]
        for part in ("left", "right")
    )
    slope = (b - a) / (high - low)

    def extension(x: np.ndarray) -> Distance:
        return Distance(a + slope * (x[:, 0] - low), np.full(x.shape, slope), np.zeros(x.shape))

    return extension


def _coons(domain: Box, values: dict[str, Dirichlet]) -> Extension:
    """A Coons patch: both pairs of opposite sides blended linearly, less the bilinear patch of the corners.

    With s, t in [0, 1] along the axes:  G = (1-s) L(t) + s R(t) + (1-t) B(s) + t T(s) - corners. Each side is interpolated
    in Chebyshev points, so that its derivatives are those of a polynomial. (Coons 1967.)
    """
    low, size = np.asarray(domain.lower), np.subtract(domain.upper, domain.lower)
    curves = {part: _curve(part, values[part], domain) for part in domain.parts}
    corner = {}
    for s, t in itertools.product((0, 1), repeat=2):  # where two sides disagree, their mean
        along, up = curves["top" if t else "bottom"], curves["right" if s else "left"]
        corner[s, t] = 0.5 * (along(float(s), 0) + up(float(t), 0))

    def extension(x: np.ndarray) -> Distance:
        s, t = ((x - low) / size).T
        left, right = ([curves[part](t, order) for order in (0, 1, 2)] for part in ("left", "right"))
        bottom, top = ([curves[part](s, order) for order in (0, 1, 2)] for part in ("bottom", "top"))
        c00, c01, c10, c11 = (corner[key] for key in ((0, 0), (0, 1), (1, 0), (1, 1)))
        bilinear = (1 - s) * (1 - t) * c00 + (1 - s) * t * c01 + s * (1 - t) * c10 + s * t * c11
        value = (1 - s) * left[0] + s * right[0] + (1 - t) * bottom[0] + t * top[0] - bilinear
        by_s = right[0] - left[0] + (1 - t) * bottom[1] + t * top[1] - (1 - t) * (c10 - c00) - t * (c11 - c01)
        by_t = top[0] - bottom[0] + (1 - s) * left[1] + s * right[1] - (1 - s) * (c01 - c00) - s * (c11 - c10)
        by_ss = (1 - t) * bottom[2] + t * top[2]
        by_tt = (1 - s) * left[2] + s * right[2]
        return Distance(
            value, np.stack([by_s, by_t], axis=1) / size, np.stack([by_ss, by_tt], axis=1) / size**2
        )

    return extension


def _curve(part: str, condition: Dirichlet, domain: Box) -> Callable[..., np.ndarray]:
    """A side's values as a polynomial of its coordinate in [0, 1]: (coordinate, order of the derivative) -> values."""
    for degree in (16, 32, 64, 128, 256):
        nodes = 0.5 + 0.5 * np.cos(np.pi * (np.arange(degree + 1) + 0.5) / (degree + 1))
        points, normals = domain.surface(part, nodes[:, None])
        samples = evaluate(f"value on {part!r}", condition.value, points, normals)
        series = chebyshev.chebfit(2.0 * nodes - 1.0, samples, degree)
        size = float(np.max(np.abs(series)))
        if size == 0.0 or float(np.max(np.abs(series[-3:]))) <= 1e-13 * size:
            break
    else:
        raise ArgumentError(
            f"hard = True on {part!r}: a polynomial of degree {degree} does not follow its values; use hard=False"
        )

    # Coefficients below rounding would only be amplified by the derivatives.
    kept = np.trim_zeros(np.where(np.abs(series) > 1e-14 * size, series, 0.0), "b") if size else series[:1]

    def curve(at: np.ndarray, order: int) -> np.ndarray:
        return np.asarray(
            2.0**order * chebyshev.chebval(2.0 * np.asarray(at) - 1.0, chebyshev.chebder(kept, order))
        )

    return curve
