"""A perfectly matched layer: coordinates that turn complex near some sides of a box, where waves then die away.

Time convention exp(-i omega t). With s_j(x_j) = 1 + i sigma_j(x_j)/k the equation becomes

    sum_j (1/s_j) d_j ((1/s_j) d_j u) + k^2 u = f:      a_j = s_j^-2,    b_j = -s_j'/s_j^3

(Berenger 1994; Chew & Weedon 1994, stretched coordinates). sigma rises as the square of the depth, and its integral over
the layer is chosen so that a wave that crosses it straight, is reflected at its end and returns, has shrunk to `reflection`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from scanfield.advice import shown
from scanfield.errors import ArgumentError
from scanfield.keywords import advised_class
from scanfield.pinn.compound import Difference
from scanfield.pinn.domains import Box, Domain, check_where
from scanfield.pinn.values import check_positive

__all__ = ["PML"]


@advised_class
@dataclass(frozen=True)
class PML:
    """A perfectly matched layer inside a box, along some of its sides; on its outer end the field is zero.

    Parameters
    ----------
    width
        Of the layer, which belongs to the domain, in units of length.
    where
        The sides, by name; None: all of them.
    reflection
        What is left of a wave after both ways through the layer, at normal incidence.

    Examples
    --------
    >>> layer = PML(0.5, where="right")
    >>> layer.depth(Box((0.0,), (2.0,)), np.asarray([[1.0], [1.75]]))[:, 0].tolist()
    [0.0, 0.25]
    """

    width: float
    where: str | tuple[str, ...] | None = None
    reflection: float = 1e-6

    def __post_init__(self) -> None:
        check_positive("width", self.width)
        check_where(self.where)
        if not 0 < self.reflection < 1:
            raise ArgumentError(f"reflection = {shown(self.reflection)}: it lies between 0 and 1")

    def sides(self, domain: Domain) -> tuple[Box, tuple[str, ...]]:
        """The box and the sides that have a layer; ArgumentError for a domain without such sides."""
        box = domain.outer if isinstance(domain, Difference) else domain
        if not isinstance(box, Box):
            raise ArgumentError(f"PML: a layer lies along the sides of a box, the domain is {domain!r}")
        named = box.check_parts(
            box.parts if self.where is None else (self.where,) if isinstance(self.where, str) else self.where
        )
        for axis, (low, high) in enumerate(zip(box.lower, box.upper, strict=True)):
            layers = sum(box.side(part)[0] == axis for part in named)
            if layers * self.width >= high - low:
                raise ArgumentError(
                    f"width = {self.width}: the layers fill the whole of axis {axis}, {low} to {high}"
                )
        return box, named

    def depth(self, domain: Domain, x: np.ndarray) -> np.ndarray:
        """How deep in the layer each point is along each axis, (n, d), negative on the low sides; 0 outside."""
        box, named = self.sides(domain)
        depth = np.zeros_like(x)
        for part in named:
            axis, sign = box.side(part)
            edge = box.upper[axis] if sign > 0 else box.lower[axis]
            depth[:, axis] += sign * np.maximum(0.0, sign * (x[:, axis] - edge) + self.width)
        return depth

    def coefficients(self, domain: Domain, x: np.ndarray, wavenumber: float) -> tuple[np.ndarray, np.ndarray]:
        """a, of the second derivatives, and b, of the first, (n, d) each, complex."""
        depth = self.depth(domain, x)
        # One way through the layer: the integral of strength (depth/width)^2 is strength width/3.
        strength = 1.5 * math.log(1.0 / self.reflection) / self.width
        s = 1.0 + 1j * strength / wavenumber * (depth / self.width) ** 2
        slope = 2j * strength / wavenumber * depth / self.width**2
        # |depth| grows outwards on both sides; d/dx of depth^2 is 2 depth with its sign.
        return s**-2, -slope / s**3

    def physical(self, domain: Domain, x: np.ndarray) -> np.ndarray:
        """Which points lie outside the layer, (n,) booleans."""
        return np.asarray(np.all(self.depth(domain, x) == 0.0, axis=1))
