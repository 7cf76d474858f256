"""Where a problem is posed: what every domain answers, and the plain ones, intervals, boxes, disks and balls.

A domain answers four questions: which points lie in it, how the unit cube maps onto each part of its boundary (and the
outward normals there), how large both are, and which smooth function D vanishes on its boundary and nowhere inside (for
hard Dirichlet conditions, MATH u = G + D N). All on the host, float64.

| symbol | shape | meaning |
|---|---|---|
| x | (n, d) | points |
| normal | (n, d) | unit vectors that point out of the domain |
| D, D_i, D_ii | (n,), (n, d), (n, d) | distance function, its first and its unmixed second derivatives |

Parts of the boundary have names: "left", "right", "bottom", "top", "front", "back" are the low and high sides of axes 0, 1
and 2, "circle" is the boundary of a disk or ball; a hole's parts have "hole " in front ("hole circle").
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar, NamedTuple

import numpy as np

from scanfield.advice import shown
from scanfield.errors import ArgumentError, ShapeError
from scanfield.keywords import advised
from scanfield.pinn.sampling import unit_points
from scanfield.pinn.values import check_positive, reals

__all__ = ["Ball", "Box", "Disk", "Distance", "Domain", "Interval", "Surface"]

_MOST_DRAWN = 2**23  # points of the surrounding box, where the domain fills less than this of it:
_THIN = 0.01
_SIDES = (("left", "right"), ("bottom", "top"), ("front", "back"))


class Distance(NamedTuple):
    """A smooth function that vanishes on (parts of) a boundary, with the derivatives that the ansatz needs."""

    value: np.ndarray
    first: np.ndarray
    second: np.ndarray

    def times(self, other: Distance) -> Distance:
        """The product, by the product rule."""
        a, b = self.value[:, None], other.value[:, None]
        return Distance(
            self.value * other.value,
            self.first * b + a * other.first,
            self.second * b + 2.0 * self.first * other.first + a * other.second,
        )


class Surface(NamedTuple):
    """Points on a boundary, (n, d), and the outward unit normals there, (n, d)."""

    points: np.ndarray
    normals: np.ndarray


class Domain(ABC):
    """What problems and samplers ask of a domain."""

    lower: tuple[float, ...]
    upper: tuple[float, ...]
    """Corners of a box around it."""
    parts: tuple[str, ...]
    """Names of the pieces of its boundary."""
    volume: float
    given = False
    """Whether its points are given, so that none can be drawn."""

    @property
    def dimensions(self) -> int:
        """d"""
        return len(self.lower)

    @abstractmethod
    def contains(self, x: np.ndarray) -> np.ndarray:
        """Which of the points (n, d) lie inside, (n,) booleans."""

    @abstractmethod
    def measure(self, part: str) -> float:
        """The size of a part of the boundary: length, area; 1 for a point."""

    @abstractmethod
    def surface(self, part: str, unit: np.ndarray) -> Surface:
        """A part of the boundary at parameters (n, d - 1) of the unit cube."""

    @abstractmethod
    def distance(self, x: np.ndarray, parts: Iterable[str] | None = None) -> Distance:
        """D at points (n, d), zero on these parts (None: on all)."""

    def interior(self, count: int, rule: str = "sobol", seed: int | tuple[int, ...] = 0) -> np.ndarray:
        """`count` points inside, (count, d): those of the surrounding box that lie in the domain."""
        low, high = np.asarray(self.lower), np.asarray(self.upper)
        around = float(np.prod(high - low))
        share = self.volume / around if around > 0.0 else 0.0
        if share > 1.0 - 1e-12:
            return np.asarray(
                self._inside(low + (high - low) * unit_points(count, self.dimensions, rule, seed))[:count]
            )
        ask = first = math.ceil(1.1 * count / share) + 8 if share > 1e-9 else _MOST_DRAWN + 1
        while ask <= _MOST_DRAWN or (share > _THIN and ask <= 64 * first):
            x = self._inside(low + (high - low) * unit_points(ask, self.dimensions, rule, seed))
            if x.shape[0] >= count:
                # A grid is not cut short: that would leave a corner of the domain empty.
                return np.asarray(x if rule == "grid" else x[:count])
            ask *= 2
        raise ArgumentError(
            f"domain = {self!r:.80}: it fills {share:.1e} of the box around it, too little to draw {count} points in it"
        )

    def _inside(self, x: np.ndarray) -> np.ndarray:
        return np.asarray(x[self.contains(x)])

    def check_parts(self, parts: Iterable[str]) -> tuple[str, ...]:
        """The names, or ArgumentError for one that the boundary does not have."""
        named = tuple(parts)
        for part in named:
            if named.count(part) > 1:
                raise ArgumentError(f"where = {named!r:.80}: {part!r:.40} stands twice")
            if part not in self.parts:
                raise ArgumentError(
                    f"where = {part!r}: the boundary of {type(self).__name__} has {', '.join(map(repr, self.parts))}"
                )
        return named


def check_where(where: object) -> None:
    """ArgumentError unless it is None, a name, or names of parts of a boundary: at least one."""
    if where is None or isinstance(where, str):
        return
    if not isinstance(where, tuple | list) or not where or not all(isinstance(part, str) for part in where):
        raise ArgumentError(
            f"where = {shown(where)}: the name of a part, a list of names, or None for the whole boundary is expected"
        )


class Box(Domain):
    """A box with sides along the axes, in 1, 2 or 3 dimensions.

    Parameters
    ----------
    lower, upper
        Opposite corners, one number for each axis.

    Examples
    --------
    >>> square = Box((-1, -1), (1, 1))
    >>> square.volume, square.parts
    (4.0, ('left', 'right', 'bottom', 'top'))
    """

    @advised
    def __init__(self, lower: Sequence[float], upper: Sequence[float]) -> None:
        self.lower, self.upper = _corner("lower", lower), _corner("upper", upper)
        if len(self.lower) != len(self.upper) or not 1 <= len(self.lower) <= 3:
            raise ShapeError(
                f"lower has {len(self.lower)} and upper {len(self.upper)} numbers: 1, 2 or 3, equally many, are expected"
            )
        if not all(a < b for a, b in zip(self.lower, self.upper, strict=True)):
            raise ArgumentError(
                f"lower = {self.lower}, upper = {self.upper}: lower lies below upper on every axis"
            )
        self.parts = tuple(name for pair in _SIDES[: len(self.lower)] for name in pair)
        self.volume = float(np.prod(self._size))

    @property
    def _size(self) -> np.ndarray:
        return np.asarray(np.subtract(self.upper, self.lower))

    def contains(self, x: np.ndarray) -> np.ndarray:
        """See `Domain.contains`."""
        return np.asarray(np.all((x > self.lower) & (x < self.upper), axis=1))

    def side(self, part: str) -> tuple[int, int]:
        """Axis and direction (-1 or 1) of a side."""
        index = self.parts.index(self.check_parts([part])[0])
        return index // 2, 1 if index % 2 else -1

    def measure(self, part: str) -> float:
        """See `Domain.measure`."""
        axis, _ = self.side(part)
        return float(np.prod(np.delete(self._size, axis)))

    def surface(self, part: str, unit: np.ndarray) -> Surface:
        """See `Domain.surface`."""
        axis, sign = self.side(part)
        low, size = np.asarray(self.lower), self._size
        x = np.empty((unit.shape[0], self.dimensions))
        others = [i for i in range(self.dimensions) if i != axis]
        x[:, others] = low[others] + size[others] * unit
        x[:, axis] = self.upper[axis] if sign > 0 else self.lower[axis]
        normals = np.zeros_like(x)
        normals[:, axis] = sign
        return Surface(x, normals)

    def distance(self, x: np.ndarray, parts: Iterable[str] | None = None) -> Distance:
        """The product over the sides of the distance to each, in units that make it of order one."""
        n, d = x.shape
        found = Distance(np.ones(n), np.zeros((n, d)), np.zeros((n, d)))
        for part in self.parts if parts is None else self.check_parts(parts):
            axis, sign = self.side(part)
            edge = self.upper[axis] if sign > 0 else self.lower[axis]
            half = 0.5 * self._size[axis]
            first = np.zeros((n, d))
            first[:, axis] = -sign / half
            found = found.times(Distance(sign * (edge - x[:, axis]) / half, first, np.zeros((n, d))))
        return found

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.lower}, {self.upper})"


class Interval(Box):
    """A stretch of the line; its ends are "left" and "right".

    Examples
    --------
    >>> Interval(0.0, 2.0).volume
    2.0
    """

    @advised
    def __init__(self, lower: float, upper: float) -> None:
        super().__init__((lower,), (upper,))


class Ball(Domain):
    """A disk (two dimensions) or a ball (three); its boundary is called "circle".

    Parameters
    ----------
    center
        Two or three numbers.
    radius
        A number above 0.

    Examples
    --------
    >>> round(Disk((0, 0), 0.5).volume, 6)
    0.785398
    """

    _allowed: ClassVar[tuple[tuple[int, ...], str]] = ((2, 3), "two or three are expected")

    @advised
    def __init__(self, center: Sequence[float], radius: float) -> None:
        check_positive("radius", radius)
        self.center, self.radius = _corner("center", center), float(radius)
        if len(self.center) not in self._allowed[0]:
            raise ShapeError(f"center has {len(self.center)} numbers: {self._allowed[1]}")
        self.lower = tuple(c - self.radius for c in self.center)
        self.upper = tuple(c + self.radius for c in self.center)
        self.parts = ("circle",)
        r = self.radius  # products overflow to infinity where powers raise
        self.volume = math.pi * r * r if len(self.center) == 2 else 4.0 / 3.0 * math.pi * r * r * r

    def contains(self, x: np.ndarray) -> np.ndarray:
        """See `Domain.contains`."""
        return np.asarray(np.sum((x - self.center) ** 2, axis=1) < self.radius**2)

    def measure(self, part: str) -> float:
        """See `Domain.measure`."""
        self.check_parts([part])
        return 2.0 * math.pi * self.radius if self.dimensions == 2 else 4.0 * math.pi * self.radius**2

    def surface(self, part: str, unit: np.ndarray) -> Surface:
        """See `Domain.surface`; equal areas of the parameters are equal areas of the sphere."""
        self.check_parts([part])
        angle = 2.0 * math.pi * unit[:, 0]
        if self.dimensions == 2:
            normals = np.stack([np.cos(angle), np.sin(angle)], axis=1)
        else:
            height = 2.0 * unit[:, 1] - 1.0
            ring = np.sqrt(1.0 - height**2)
            normals = np.stack([ring * np.cos(angle), ring * np.sin(angle), height], axis=1)
        return Surface(np.asarray(self.center) + self.radius * normals, normals)

    def distance(self, x: np.ndarray, parts: Iterable[str] | None = None) -> Distance:
        """1 - |x - center|^2 / radius^2."""
        self.check_parts(self.parts if parts is None else parts)
        r = (x - self.center) / self.radius
        return Distance(
            1.0 - np.sum(r * r, axis=1), -2.0 * r / self.radius, np.full(x.shape, -2.0 / self.radius**2)
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.center}, {self.radius})"


class Disk(Ball):
    """A disk: center and radius. See `Ball`."""

    _allowed = ((2,), "a disk has two, a Ball three")

    @advised
    def __init__(self, center: Sequence[float], radius: float) -> None:
        super().__init__(center, radius)


def _corner(name: str, values: Sequence[float]) -> tuple[float, ...]:
    numbers = reals(name, values)
    if numbers.ndim != 1:
        raise ShapeError(f"{name} = {shown(values)}: a number for each axis is expected, such as (0, 0)")
    listed = tuple(float(value) for value in numbers)
    if not all(map(math.isfinite, listed)):
        raise ArgumentError(f"{name} = {listed}: finite numbers are expected")
    return listed
