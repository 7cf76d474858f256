"""What holds on a boundary, each condition linear in the field u and its slope along the outward normal, d_n u.

| condition | equation |
|---|---|
| `Dirichlet` | u = g |
| `Neumann` | d_n u = g |
| `Robin` | d_n u + c u = g, c real or complex |
| `Impedance` | d_n u - i k u = g |
| `Sommerfeld` | d_n u - i k u = 0: outgoing waves leave, to first order (time convention exp(-i omega t)) |
| `Periodic` | u(x + L e) = exp(i phase) u(x), and the slopes along e likewise |
| `Interface` | u and (its slope times a ratio) continuous across the rim of a region |

`where` names the parts of the boundary ("left", ("bottom", "top"), ...); None is the whole boundary. Values are numbers,
functions of the points (n, d) or of points and normals, or, on a `PointSet`, arrays. `weight` multiplies the default weight
of the condition in the loss (1 is right for fields of order one; see `Helmholtz`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from scanfield.advice import shown
from scanfield.errors import ArgumentError
from scanfield.keywords import advised_class
from scanfield.pinn.domains import Domain, check_where
from scanfield.pinn.solution import Solution
from scanfield.pinn.values import Value, check_positive, evaluate

__all__ = [
    "Condition",
    "Dirichlet",
    "Impedance",
    "Interface",
    "Neumann",
    "Periodic",
    "Robin",
    "Sommerfeld",
    "Unknown",
]

Where: TypeAlias = str | tuple[str, ...] | list[str] | None


@advised_class
@dataclass(frozen=True)
class Unknown:
    """A real number to be found together with the field: the wavenumber, or the coefficient of a `Robin` condition.

    Parameters
    ----------
    start
        The first guess.
    name
        Under which a fit reports it.
    times, plus
        Numbers or functions of x, real or complex: the coefficient is number * times(x) + plus(x). So a medium of known shape
        has an unknown strength, or a part of the domain an unknown wavenumber beside the known rest.

    Raises `ArgumentError` for a first guess or a name that is none.

    Examples
    --------
    >>> import numpy as np
    >>> inside = Unknown(7.0, times=lambda x: x[:, 0] > 0.5, plus=lambda x: 4.0 * (x[:, 0] <= 0.5))
    >>> inside.at(np.asarray([[0.2], [0.8]])).tolist()
    [4.0, 7.0]
    """

    start: float
    name: str = "wavenumber"
    times: Value = 1.0
    plus: Value = 0.0

    def __post_init__(self) -> None:
        start: object = self.start
        number = isinstance(start, int | float | np.integer | np.floating) and not isinstance(start, bool)
        if not number or not math.isfinite(self.start):
            raise ArgumentError(f"start = {shown(start)}: a finite real number is expected")
        name: object = self.name
        if not isinstance(name, str) or not name:
            raise ArgumentError(f"name = {shown(name)}: a text is expected, such as 'wavenumber'")

    def parts(
        self, x: np.ndarray, normals: np.ndarray | None = None, *, given: bool = False
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """`times` and `plus` at points (n, d), (n,) each; None for a `plus` that is zero there."""
        factor, rest = (
            evaluate(f"{what} of {self.name!r}", value, x, normals, given=given)
            for what, value in (("times", self.times), ("plus", self.plus))
        )
        return factor, rest if np.any(rest) else None

    def at(self, x: np.ndarray, normals: np.ndarray | None = None, *, given: bool = False) -> np.ndarray:
        """The coefficient at points (n, d), (n,), for the first guess."""
        factor, rest = self.parts(x, normals, given=given)
        return np.asarray(self.start * factor if rest is None else self.start * factor + rest)


@dataclass(frozen=True)
class Condition:
    """What all conditions share: the parts where they hold, a weight, and a name for reports."""

    where: Where = field(default=None, kw_only=True)
    weight: float = field(default=1.0, kw_only=True)
    name: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        check_positive("weight", self.weight)
        check_where(self.where)
        name: object = self.name
        if not isinstance(name, str):
            raise ArgumentError(f"name = {shown(name)}: a text is expected")
        self._check_solution()

    def _check_solution(self) -> None:
        """A known field gives a condition data of the condition's own kind: its values are no slopes."""
        kind, value = type(self).__name__, getattr(self, "value", None)
        if isinstance(getattr(self, "coefficient", None), Solution):
            raise ArgumentError(
                "coefficient is a known field, a Solution: a number or a function of x is expected"
            )
        solution = value if isinstance(value, Solution) else getattr(value, "__self__", None)
        if not isinstance(solution, Solution):
            return
        came = str(getattr(value, "__name__", ""))
        came = "values" if value is solution or came == "__call__" else came
        if came == "values" and kind == "Robin":
            raise ArgumentError(
                f"value is the field of the solution {solution.name!r}, and {kind} takes d_n u + c u: "
                "give lambda x, n: wave.normal(x, n) + c * wave(x), with your names for wave and c"
            )
        meant, given = _DATA.get(kind, (came, ""))
        if came != meant:
            raise ArgumentError(
                f"value is the {_CALLED.get(came, came)} of the solution {solution.name!r}, and {kind} takes its "
                f"{_CALLED[meant]}: give {kind}({given}), with your name for wave"
            )

    def on(self, domain: Domain) -> tuple[str, ...]:
        """The parts of the boundary where it holds."""
        if self.where is None:
            if not domain.parts:
                raise ArgumentError(
                    f"{self.title}: the domain has no boundary; PointSet(interior, {{name: ...}}) gives one"
                )
            return domain.parts
        return domain.check_parts((self.where,) if isinstance(self.where, str) else self.where)

    @property
    def title(self) -> str:
        """Its name in reports: the one given, or its kind and place."""
        if self.name:
            return self.name
        kind = type(self).__name__.lower()
        if self.where is None:
            return kind
        return f"{kind} {self.where if isinstance(self.where, str) else ', '.join(self.where)}"


# What a condition takes of a known field, and how that is written.
_DATA = {
    "Dirichlet": ("values", "wave"),
    "Neumann": ("normal", "wave.normal"),
    "Impedance": ("impedance", "wave.impedance"),
}
_CALLED = {"values": "field", "normal": "slope", "impedance": "impedance data"}


@advised_class
@dataclass(frozen=True)
class Dirichlet(Condition):
    """u = `value`. With `hard` the field is built to satisfy it (u = G + D N), and no loss term is needed.

    `hard` needs a domain with a smooth distance function: intervals, boxes, disks, and boxes with a disk cut out. A value
    that is no constant is extended into the domain from its values on the boundary alone (linear in one dimension, a Coons
    patch in a rectangle); elsewhere use `hard=False`.
    """

    value: Value = 0.0
    hard: bool = False


@advised_class
@dataclass(frozen=True)
class Neumann(Condition):
    """d_n u = `value`, n the outward normal."""

    value: Value = 0.0


@advised_class
@dataclass(frozen=True)
class Robin(Condition):
    """d_n u + `coefficient` u = `value`; the coefficient is real or complex, a function too, or an `Unknown`."""

    coefficient: Value = 0.0
    value: Value = 0.0


@advised_class
@dataclass(frozen=True)
class Impedance(Condition):
    """d_n u - i k u = `value`, k the problem's wavenumber at the boundary."""

    value: Value = 0.0


@advised_class
@dataclass(frozen=True)
class Sommerfeld(Condition):
    """d_n u - i k u = 0: what comes straight from inside leaves. First order: oblique waves are partly reflected."""


@advised_class
@dataclass(frozen=True)
class Periodic(Condition):
    """u(high side) = exp(i `phase`) u(low side) along `axis` of a box, and the slopes along the axis likewise (Bloch)."""

    axis: int = 0
    phase: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.where is not None:
            raise ArgumentError(
                f"where = {shown(self.where)}: a periodic condition holds on both sides of its axis"
            )


@advised_class
@dataclass(frozen=True)
class Interface(Condition):
    """The rim of `region` inside the domain, where the wavenumber jumps: u and its normal slope are continuous.

    `ratio` multiplies the slope inside the region (the ratio of densities in acoustics; 1: the slope itself is continuous).
    At a rim that two regions share, and where they overlap, the slope of each side is multiplied by the ratios of all
    regions there. The network sees the region's points moved away, so that the field's second derivatives may jump at the
    rim while it stays smooth on each side.
    """

    region: Domain
    ratio: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.where is not None:
            raise ArgumentError(f"where = {shown(self.where)}: an interface holds on the rim of its region")
        ratio: object = self.ratio
        number = isinstance(ratio, int | float | np.integer | np.floating) and not isinstance(ratio, bool)
        if not number or not math.isfinite(self.ratio) or self.ratio == 0:
            raise ArgumentError(f"ratio = {shown(ratio)}: a finite number other than 0 is expected")
        if self.region.given:
            raise ArgumentError("region: a PointSet has no rim; give an Interval, Box, Disk or Ball")
