"""Which points a problem is trained on: inside, and on the parts of the boundary that conditions hold on."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from scanfield.errors import ArgumentError
from scanfield.pinn.boundary import Dirichlet, Interface, Periodic
from scanfield.pinn.domains import Domain, Surface
from scanfield.pinn.sampling import unit_points

if TYPE_CHECKING:
    from scanfield.pinn.problem import Helmholtz

__all__ = ["Sample", "boundary_count", "surfaces"]


class Sample(NamedTuple):
    """The points of one cycle: inside, (n, d), and for each condition a surface (None where it has no points)."""

    interior: np.ndarray
    surfaces: tuple[Surface | None, ...]

    @property
    def checksum(self) -> str:
        """Sixteen hexadecimal digits that change with any point."""
        digest = hashlib.sha256(self.interior.tobytes())
        for surface in self.surfaces:
            if surface is not None:
                digest.update(surface.points.tobytes())
        return digest.hexdigest()[:16]


def boundary_count(dimensions: int, points: int, boundary: int | None) -> int:
    """Points on the boundary: those asked for, or as dense as the ones inside."""
    if boundary is not None:
        return boundary
    d = dimensions
    return 2 * d * max(1, math.ceil(math.pow(points, (d - 1) / d)))


def surfaces(problem: Helmholtz, count: int, sampling: str, seed: tuple[int, ...]) -> list[Surface | None]:
    """Points for each condition, None where it has none, shared out over its parts by their size."""
    found: list[Surface | None] = []
    total = sum(problem.domain.measure(part) for part in problem.domain.parts) or 1.0
    for index, condition in enumerate(problem.conditions):
        if isinstance(condition, Dirichlet) and condition.hard and not problem.domain.given:
            found.append(_gather(condition.on(problem.domain), problem.domain, 64, total, "grid", (0,)))
            continue
        if isinstance(condition, Interface):
            region = condition.region
            size = sum(region.measure(part) for part in region.parts)
            rim = _gather(region.parts, region, max(count, 2), size, sampling, (*seed, index + 1))
            inside = problem.domain.contains(rim.points)
            if not np.any(inside):
                raise ArgumentError(f"region = {region!r}: its rim does not pass through {problem.domain!r}")
            found.append(Surface(rim.points[inside], rim.normals[inside]))
            continue
        if isinstance(condition, Periodic):
            parts: tuple[str, ...] = (problem.domain.parts[2 * condition.axis + 1],)
        else:
            parts = condition.on(problem.domain)
        found.append(_gather(parts, problem.domain, count, total, sampling, (*seed, index + 1)))
    return found


def _gather(
    parts: Sequence[str],
    domain: Domain,
    count: int,
    total: float,
    sampling: str,
    seed: tuple[int, ...],
) -> Surface:
    surfaces = []
    for number, part in enumerate(parts):
        share = max(1, round(count * domain.measure(part) / total)) if domain.dimensions > 1 else 1
        unit = unit_points(share, domain.dimensions - 1, sampling, (*seed, number))
        surfaces.append(domain.surface(part, unit))
    return Surface(
        np.concatenate([s.points for s in surfaces]), np.concatenate([s.normals for s in surfaces])
    )
