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
        codes = {code for x in looked for code in _codes(inside(problem, x))} | {0}
        return cls(tuple(sorted(codes, key=lambda code: (code.bit_count(), code))))

    def number(self, member: np.ndarray) -> np.ndarray:
        """The sheet of each point from the regions that it lies in, (n, regions) -> (n,)."""
        place = {code: number for number, code in enumerate(self.codes)}
        # A sliver that nobody saw has a sheet of its own all the same, behind the others.
        return np.asarray([float(place.get(code, len(place) + code)) for code in _codes(member)])


def _codes(member: np.ndarray) -> list[int]:
    """Integers of Python: there may be more regions than bits in an integer of NumPy."""
    rows, where = np.unique(member, axis=0, return_inverse=True)
    codes = [sum(1 << int(bit) for bit in np.flatnonzero(row)) for row in rows]
    return [codes[row] for row in where.reshape(-1)]
