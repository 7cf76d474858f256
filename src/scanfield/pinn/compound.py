"""Domains made of others, and those of which only points are known."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from scanfield.errors import ArgumentError, ShapeError
from scanfield.keywords import advised
from scanfield.pinn.domains import Ball, Distance, Domain, Surface
from scanfield.pinn.sampling import unit_points
from scanfield.pinn.values import reals

__all__ = ["Difference", "PointSet"]


class Difference(Domain):
    """A domain with a hole in it. The hole lies wholly inside; its boundary's normals point into it.

    Examples
    --------
    >>> from scanfield.pinn import Box, Disk
    >>> plate = Difference(Box((-1, -1), (1, 1)), Disk((0, 0), 0.5))
    >>> plate.parts
    ('left', 'right', 'bottom', 'top', 'hole circle')
    """

    @advised
    def __init__(self, outer: Domain, hole: Domain) -> None:
        for name, domain in (("outer", outer), ("hole", hole)):
            if not isinstance(domain, Domain):
                raise ArgumentError(
                    f"{name} is a {type(domain).__name__}: a domain is expected, such as Disk((0, 0), 1)"
                )
        if outer.dimensions != hole.dimensions:
            raise ShapeError(
                f"outer has {outer.dimensions} dimensions and hole {hole.dimensions}: equally many are expected"
            )
        if outer.given or hole.given:
            raise ArgumentError(
                "outer, hole: a PointSet has no shape to subtract; leave the hole's points out of it"
            )
        self.outer, self.hole = outer, hole
        self.lower, self.upper = outer.lower, outer.upper
        self.volume = outer.volume - hole.volume
        self.parts = (*outer.parts, *(f"hole {part}" for part in hole.parts))
        for part in hole.parts:
            rim = hole.surface(part, unit_points(64, hole.dimensions - 1, "grid")).points
            if not np.all(outer.contains(rim)):
                raise ArgumentError(f"hole = {hole!r}: it does not lie wholly inside {outer!r}")

    def contains(self, x: np.ndarray) -> np.ndarray:
        """See `Domain.contains`."""
        return np.asarray(self.outer.contains(x) & ~self.hole.contains(x))

    def _owner(self, part: str) -> tuple[Domain, str, bool]:
        self.check_parts([part])
        hole = part.startswith("hole ")
        return (self.hole, part.removeprefix("hole "), True) if hole else (self.outer, part, False)

    def measure(self, part: str) -> float:
        """See `Domain.measure`."""
        domain, name, _ = self._owner(part)
        return domain.measure(name)

    def surface(self, part: str, unit: np.ndarray) -> Surface:
        """See `Domain.surface`."""
        domain, name, hole = self._owner(part)
        points, normals = domain.surface(name, unit)
        return Surface(points, -normals if hole else normals)

    def distance(self, x: np.ndarray, parts: Iterable[str] | None = None) -> Distance:
        """The product of both distances; a hole must be a disk or ball, whose distance vanishes on its rim alone."""
        owners = [self._owner(part) for part in (self.parts if parts is None else self.check_parts(parts))]
        outer = [name for _, name, hole in owners if not hole]
        inner = [name for _, name, hole in owners if hole]
        if inner and not isinstance(self.hole, Ball):
            raise ArgumentError(
                f"hard = True on the hole {self.hole!r}: only a disk or ball has a smooth distance; use hard=False there"
            )
        found = self.outer.distance(x, outer)
        if not inner:
            return found
        rim = self.hole.distance(x, inner)
        return found.times(Distance(-rim.value, -rim.first, -rim.second))

    def __repr__(self) -> str:
        return f"Difference({self.outer!r}, {self.hole!r})"


class PointSet(Domain):
    """A domain given by its points: no shape is known, none can be drawn.

    Parameters
    ----------
    interior
        (n, d).
    boundary
        Name of each part -> its points, (n, d), and its outward normals, (n, d); the normals are scaled to length 1.
    volume
        Of the domain; without it the volume of the box around the points.

    Examples
    --------
    >>> points = PointSet([[0.2], [0.5]], {"left": ([[0.0]], [[-1.0]])})
    >>> points.dimensions, points.parts
    (1, ('left',))
    """

    given = True

    @advised
    def __init__(
        self,
        interior: Any,
        boundary: dict[str, tuple[Any, Any]] | None = None,
        *,
        volume: float | None = None,
    ) -> None:
        self._interior = _points("interior", interior)
        d = self._interior.shape[1]
        self._surfaces: dict[str, Surface] = {}
        for part, (points, normals) in (boundary or {}).items():
            x, n = _points(f"boundary[{part!r}]", points, d), _points(f"normals of {part!r}", normals, d)
            if x.shape != n.shape:
                raise ShapeError(
                    f"boundary[{part!r}] has {x.shape[0]} points and {n.shape[0]} normals: one each"
                )
            length = np.linalg.norm(n, axis=1, keepdims=True)
            if not np.all(length > 0):
                raise ArgumentError(f"normals of {part!r}: one has length 0")
            self._surfaces[part] = Surface(x, n / length)
        self.parts = tuple(self._surfaces)
        everything = np.concatenate([self._interior, *(s.points for s in self._surfaces.values())])
        low, high = everything.min(axis=0), everything.max(axis=0)
        self.lower, self.upper = tuple(map(float, low)), tuple(map(float, high))
        self.volume = (
            float(np.prod(np.where(high > low, high - low, 1.0))) if volume is None else float(volume)
        )

    def interior(self, count: int, rule: str = "sobol", seed: int | tuple[int, ...] = 0) -> np.ndarray:
        """The given points, all of them, whatever is asked."""
        return self._interior

    def contains(self, x: np.ndarray) -> np.ndarray:
        """Whether a point lies in the box around the given ones; no more is known."""
        return np.asarray(np.all((x >= self.lower) & (x <= self.upper), axis=1))

    def measure(self, part: str) -> float:
        """The number of the part's points: each counts once."""
        return float(self._surfaces[self.check_parts([part])[0]].points.shape[0])

    def surface(self, part: str, unit: np.ndarray) -> Surface:
        """The given points and normals, whatever is asked."""
        return self._surfaces[self.check_parts([part])[0]]

    def distance(self, x: np.ndarray, parts: Iterable[str] | None = None) -> Distance:
        """ArgumentError: no distance is known."""
        raise ArgumentError("hard = True: a PointSet has no distance function; use hard=False")


def _points(name: str, values: Any, dimensions: int | None = None) -> np.ndarray:
    x = reals(name, values)
    if x.ndim != 2 or x.shape[0] < 1 or x.shape[1] not in (1, 2, 3) or dimensions not in (None, x.shape[1]):
        shown = "d" if dimensions is None else str(dimensions)
        raise ShapeError(f"{name} has shape {x.shape}: (n, {shown}) is expected, d = 1, 2 or 3, n at least 1")
    if not np.all(np.isfinite(x)):
        raise ArgumentError(f"{name}: it holds NaN or infinity")
    return x
