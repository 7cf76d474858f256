"""Regions of interfaces: which points lie in which, and the sheets on which the network sees them.

Where regions overlap, each combination of them is a medium of its own: the field's second derivatives may jump between any
two. So each combination has a sheet, a copy of the domain beside it along the first axis, and the network is smooth on each.

| symbol | meaning |
|---|---|
| inside, (n, regions) | which regions a point lies in |
| code | their bits, region i the i-th: one number a combination, 0 outside all |
| sheet | 0 outside all; then the combinations that occur: first single regions, in their order, then pairs, ... |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from scanfield.errors import ArgumentError
from scanfield.pinn.boundary import Interface
from scanfield.pinn.domains import Surface
from scanfield.pinn.drawing import surfaces

if TYPE_CHECKING:
    from scanfield.pinn.problem import Helmholtz

__all__ = ["APART", "Sheets", "both_sides", "inside"]

APART = 2.5
"""Widths of the domain from one sheet to the next. At 1.25 a region on the low side of the domain would lie only a quarter
of a width from the rest of it, which features tell apart badly."""

_NUDGE = 1e-6  # widths to either side of a rim
_PROBE = 2048


def inside(problem: Helmholtz, x: np.ndarray) -> np.ndarray:
    """Which regions the points (n, d) lie in, (n, regions) booleans."""
    # A point on the domain's own boundary belongs to the region that it borders on.
    centre = 0.5 * (np.asarray(problem.domain.lower) + np.asarray(problem.domain.upper))
    inward = x + 1e-9 * (centre - x)
    return np.stack([interface.region.contains(inward) for interface in problem.interfaces], axis=1)


def both_sides(problem: Helmholtz, rim: Surface) -> tuple[np.ndarray, np.ndarray]:
    """Points next to those of a rim: in its region, and outside it, (n, d) each."""
    step = _NUDGE * max(np.subtract(problem.domain.upper, problem.domain.lower)) * rim.normals
    return rim.points - step, rim.points + step


class Sheets(NamedTuple):
    """The combinations of regions that occur."""

    codes: tuple[int, ...]
    """In the order of their sheets."""

    @classmethod
    def of(cls, problem: Helmholtz) -> Sheets:
        """Looked for next to all rims, which every combination borders on, and inside."""
        if not problem.interfaces:
            return cls((0,))
        looked = [problem.domain.interior(_PROBE, seed=0)]
        for condition, rim in zip(problem.conditions, surfaces(problem, _PROBE, "sobol", (0,)), strict=True):
            if isinstance(condition, Interface) and rim is not None:
                looked += both_sides(problem, rim)
        members = [inside(problem, x) for x in looked]
        _check_distinct(problem, np.concatenate(members))
        codes = {0, *(code for member in members for code in np.unique(_codes(member)).tolist())}
        return cls(tuple(sorted(codes, key=lambda code: (code.bit_count(), code))))

    def number(self, member: np.ndarray) -> np.ndarray:
        """The sheet of each point from the regions that it lies in, (n, regions) -> (n,)."""
        place = {code: number for number, code in enumerate(self.codes)}
        found, back = np.unique(_codes(member), return_inverse=True)
        # A sliver that nobody saw has a sheet of its own all the same, behind the others.
        return np.asarray([float(place.get(code, len(place) + code)) for code in found.tolist()])[
            back.reshape(-1)
        ]


def _codes(member: np.ndarray) -> np.ndarray:
    """(n,) integers; those of Python where there are more regions than an integer of NumPy has bits."""
    count = member.shape[1]
    bits = np.asarray([1 << bit for bit in range(count)], dtype=np.int64 if count < 63 else object)
    return np.asarray(member @ bits)


def _check_distinct(problem: Helmholtz, member: np.ndarray) -> None:
    """ArgumentError for two regions that are one: their ratios would multiply."""
    for j in range(member.shape[1]):
        for i in range(j):
            if np.array_equal(member[:, i], member[:, j]):
                raise ArgumentError(
                    f"boundary: two interfaces have the region {problem.interfaces[j].region!r}; give it once, with its ratio"
                )
