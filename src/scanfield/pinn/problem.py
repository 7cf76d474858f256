"""A Helmholtz problem: where, with which wavenumber and source, and what holds on the boundary; and its loss terms.

    Lap u + k(x)^2 u = f(x)   in the domain,    conditions on its boundary,    measured values at points

| symbol | name | meaning |
|---|---|---|
| u | field | real, or complex where anything in the problem is |
| k | `wavenumber` | radians per length: k, not k^2; a number, an array on given points, or a function of x; complex k: loss |
| f | `source` | note the sign: -Lap u - k^2 u = s is f = -s |
| U | `field_scale` | the largest boundary or data value, or what the source drives (`scales`); the network is u / U |
| K | `reference` | the largest Re k |

Everything here is stated on the host in float64; `Helmholtz.terms` gives the loss terms, which `place_terms` brings to a
network's library. Residuals are divided by their size: the equation by max(K^2 U, max |f|), values by U, slopes by K U.
These scales live in the weights: what is reported is the raw mean of |residual|^2.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from scanfield.advice import shown
from scanfield.arrays import Array
from scanfield.errors import ArgumentError, ShapeError
from scanfield.keywords import advised
from scanfield.pinn import assembly, regions, scales
from scanfield.pinn.absorbing import PML
from scanfield.pinn.ansatz import Ansatz, hard_ansatz
from scanfield.pinn.boundary import (
    Condition,
    Dirichlet,
    Impedance,
    Interface,
    Neumann,
    Periodic,
    Robin,
    Sommerfeld,
    Unknown,
)
from scanfield.pinn.domains import Box, Domain, Surface
from scanfield.pinn.drawing import Sample, boundary_count, surfaces
from scanfield.pinn.fourier import check_count
from scanfield.pinn.jets import jet
from scanfield.pinn.network import Network
from scanfield.pinn.placing import place, to_host
from scanfield.pinn.solutions import Solution
from scanfield.pinn.terms import Term
from scanfield.pinn.values import Value, check_positive, evaluate, reals

__all__ = ["Data", "Helmholtz", "Sample"]

PDE = assembly.PDE
_PROBE = 512  # points at which sizes are looked at
_FASTEST = 1e60  # what is squared twice stays finite
_BESIDE = 1e-2  # of the driven field: values below it do not set its scale
_ROUNDING = 1e-8  # the same for measured values
_SQUARES = 1e-150, 1e150  # what is squared, and divided by the square, stays a float
_HELD_OUT = 1_000_003  # a stream of seeds that no cycle of training uses


class Data(NamedTuple):
    """Measured values of the field: points (n, d), values (n,), and what multiplies their default weight."""

    points: Any
    values: Any
    weight: float = 1.0
    name: str = "data"


class Helmholtz:
    """Lap u + k^2 u = f in a domain, with conditions on its boundary.

    Parameters
    ----------
    domain
        `Interval`, `Box`, `Disk`, `Ball`, `Difference` of them, or a `PointSet`.
    wavenumber
        k (not k^2), in radians per length: a number or a function of x, real or complex; an array on a `PointSet`; or an
        `Unknown` to be found from data. Its sign is that of the time convention: with exp(-i omega t) waves that leave
        have k > 0, with exp(+i omega t) they have k < 0, in `Impedance`, `Sommerfeld` and `PML` alike; the equation has k^2.
    source
        f, the same kinds of values.
    boundary
        One condition or several; see `Dirichlet`, `Neumann`, `Robin`, `Impedance`, `Sommerfeld`, `Periodic`, `Interface`,
        `PML`.
    data
        Measured values, one `Data` or several.
    complex_field
        Whether the field is complex; None: it is where any number of the problem is.
    field_scale
        U: the field is U times the network (and U is what sizes are measured by); None: from the values and the source, as
        above.

    Functions take host points (n, d) and return (n,) numbers.

    Raises `ArgumentError`, `ShapeError` or `DtypeError` for what does not fit together, by its name.

    Examples
    --------
    >>> from scanfield import pinn
    >>> wave = pinn.solutions.plane_wave(5.0)
    >>> problem = pinn.Helmholtz(
    ...     pinn.Interval(0, 1), 5.0, boundary=[pinn.Dirichlet(1.0, where="left"), pinn.Sommerfeld(where="right")]
    ... )
    >>> problem.complex_field, problem.outputs
    (True, 2)
    >>> [term.name for term in problem.terms(problem.draw(64))]
    ['equation', 'dirichlet left', 'sommerfeld right']
    """

    @advised
    def __init__(
        self,
        domain: Domain,
        wavenumber: Value,
        source: Value = 0.0,
        boundary: Condition | PML | Sequence[Condition | PML] = (),
        data: Data | Sequence[Data] = (),
        *,
        complex_field: bool | None = None,
        field_scale: float | None = None,
    ) -> None:
        if not isinstance(domain, Domain):
            raise ArgumentError(
                f"domain is a {type(domain).__name__}: give an Interval, Box, Disk, Difference or PointSet"
            )
        for name, value in (("wavenumber", wavenumber), ("source", source)):
            if isinstance(value, Solution):
                raise ArgumentError(
                    f"{name} is the field of the solution {value.name!r}: give wave.{name}, with your name for wave"
                )
        self.domain, self.source = domain, source
        self.wavenumber = wavenumber
        conditions = _listed("boundary", boundary, Condition | PML)
        self.layer = _layer(conditions, domain)
        self.conditions = _with_layers_end(
            [c for c in conditions if isinstance(c, Condition)], self.layer, domain
        )
        self.data = tuple(_data(d, domain.dimensions) for d in _listed("data", data, Data))
        self.interfaces = [c for c in self.conditions if isinstance(c, Interface)]
        for condition in self.conditions:
            self._check(condition)
        axes = [c.axis for c in self.conditions if isinstance(c, Periodic)]
        if len(set(axes)) < len(axes):
            raise ArgumentError(f"boundary: Periodic on the axes {axes}; one on each can hold")
        self.ansatz = self._hard()
        self.unknowns = _unknowns(self)
        _check_start(self)
        self._measure(complex_field, field_scale)
        self.sheets = regions.Sheets.of(self)

    def __getstate__(self) -> dict[str, Any]:
        """Without the ansatz, which holds functions made here and is made again: a fit may come from another process."""
        return {name: value for name, value in self.__dict__.items() if name != "ansatz"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.ansatz = self._hard()

    def _hard(self) -> Ansatz | None:
        return hard_ansatz(self.domain, [c for c in self.conditions if isinstance(c, Dirichlet) and c.hard])

    # -- what the problem is -----------------------------------------------------------------------------------------

    @property
    def dimensions(self) -> int:
        """d"""
        return self.domain.dimensions

    @property
    def outputs(self) -> int:
        """Of the network: 1 for a real field, 2 for a complex one."""
        return 2 if self.complex_field else 1

    def wavenumber_at(self, x: np.ndarray) -> np.ndarray:
        """k at points (n, d), (n,); the first guess where it is unknown."""
        if isinstance(self.wavenumber, Unknown):
            return self.wavenumber.at(x, given=self.domain.given)
        return evaluate("wavenumber", self.wavenumber, x, given=self.domain.given)

    def _measure(self, asked: bool | None, scale: float | None) -> None:
        """Sizes that scale the terms, and whether anything is complex."""
        longest = float(max(np.subtract(self.domain.upper, self.domain.lower)))
        if not 1 / _FASTEST < longest < _FASTEST:
            raise ArgumentError(
                f"domain = {self.domain!r}: its size is {longest:.3g}, and powers of it leave the floats"
            )
        probe = self.domain.interior(_PROBE, seed=0)
        k = self.wavenumber_at(probe)
        f = evaluate("source", self.source, probe, given=self.domain.given)
        self.reference = float(np.max(np.abs(k.real)))
        self.outward = -1.0 if np.all(k.real < 0) else 1.0  # the sign of k where waves leave
        if self.reference > _FASTEST:
            raise ArgumentError(
                f"wavenumber = {self.reference:.3g}: at most {_FASTEST:g}, or its powers overflow"
            )
        if self.layer is not None and self.reference == 0.0:
            raise ArgumentError("wavenumber: its real part is zero; a PML absorbs waves, and there are none")
        self.source_size = float(np.max(np.abs(f)))
        size = 0.0
        found_complex = any(v.dtype.kind == "c" for v in (k, f)) or self.layer is not None
        slope = max(self.reference, 1.0 / longest)
        for condition, surface in zip(self.conditions, surfaces(self, 256, "sobol", (0,)), strict=True):
            found_complex |= isinstance(condition, Impedance | Sommerfeld)
            found_complex |= isinstance(condition, Periodic) and condition.phase != 0.0
            if isinstance(condition, Robin):
                assert surface is not None
                c = condition.coefficient
                c = (
                    c.at(*surface, given=self.domain.given)
                    if isinstance(c, Unknown)
                    else self.value_at("coefficient", c, surface)
                )
                found_complex |= c.dtype.kind == "c"
            if surface is not None and isinstance(condition, Dirichlet | Neumann | Robin | Impedance):
                g = self.value_at("value", condition.value, surface)
                found_complex |= g.dtype.kind == "c"
                largest = float(np.max(np.abs(g)))
                size = max(size, largest if isinstance(condition, Dirichlet) else largest / slope)
        measured_size = 0.0
        for measured in self.data:
            found_complex |= measured.values.dtype.kind == "c"
            measured_size = max(measured_size, float(np.max(np.abs(measured.values))))
        size = max(size, measured_size)
        if asked is not None and not isinstance(asked, bool | np.bool_):
            raise ArgumentError(f"complex_field = {shown(asked)}: True, False or None is expected")
        if asked is not None and not asked and found_complex:
            raise ArgumentError("complex_field = False: a wavenumber, source, condition or value is complex")
        self.complex_field = bool(found_complex if asked is None else asked)
        # Values say how large the field is, unless a source drives one beside which they are nothing, or, of data, rounding.
        driven = scales.driven(self, probe, f)
        beside = _ROUNDING if measured_size else _BESIDE
        self.field_scale = size if size > max(beside * driven, 1 / _FASTEST) else driven or 1.0
        if scale is not None:
            check_positive("field_scale", scale)
            self.field_scale = float(scale)
        self.slope_scale = slope * self.field_scale
        self.equation_scale = max(self.reference**2 * self.field_scale, self.source_size)
        laplace = self.field_scale / longest**2
        if self.equation_scale < 1e-100 * laplace:  # k = 0, or as good as that
            self.equation_scale = laplace
        sizes = {"field": self.field_scale, "slope": self.slope_scale, "equation": self.equation_scale}
        for name, found in sizes.items():
            if not _SQUARES[0] < found < _SQUARES[1]:
                raise ArgumentError(
                    f"values, source or field_scale: the {name} has the size {found:.3g}, whose square leaves the floats; "
                    "state the problem in other units"
                )

    def _check(self, condition: Condition) -> None:
        if isinstance(condition, Periodic):
            if not isinstance(self.domain, Box) or not 0 <= condition.axis < self.dimensions:
                raise ArgumentError(
                    f"axis = {condition.axis}: Periodic needs an axis of a box, the domain is {self.domain!r}"
                )
        elif isinstance(condition, Interface):
            if condition.region.dimensions != self.dimensions:
                raise ShapeError(
                    f"region has {condition.region.dimensions} dimensions, the domain {self.dimensions}"
                )
        else:
            condition.on(self.domain)
            if isinstance(condition, Impedance | Sommerfeld) and _is_array(self.wavenumber):
                raise ArgumentError(
                    f"wavenumber is an array, at the points inside: {condition.title!r} needs it on the boundary too; give a "
                    "number or a function of x"
                )

    def value_at(self, name: str, value: Value, surface: Surface) -> np.ndarray:
        """A condition's value on a surface, (n,)."""
        return evaluate(name, value, surface.points, surface.normals, given=self.domain.given)

    # -- points ------------------------------------------------------------------------------------------------------

    def draw(
        self,
        points: int = 1000,
        boundary: int | None = None,
        *,
        sampling: str = "sobol",
        seed: int = 0,
        cycle: int = 0,
    ) -> Sample:
        """Points inside and on the boundary, from a seed: the same for every library.

        `boundary` is shared out over the parts by their size (None: as dense as the points inside); `cycle` gives other
        points for the same seed.
        """
        points = check_count("points", points)
        boundary = None if boundary is None else check_count("boundary", boundary)
        interior = self.domain.interior(points, sampling, (seed, cycle, 0))
        return Sample(
            interior,
            tuple(surfaces(self, boundary_count(self.dimensions, points, boundary), sampling, (seed, cycle))),
        )

    def held_out(self, points: int, *, seed: int = 0) -> np.ndarray:
        """Points inside, (n, d), that no cycle of training draws; the interior itself where it is given."""
        points = check_count("held_out", points)
        return self.domain.interior(
            points, "sobol" if not self.domain.given else "grid", (seed, _HELD_OUT, 0)
        )

    # -- terms -------------------------------------------------------------------------------------------------------

    def terms(self, sample: Sample) -> tuple[Term, ...]:
        """The loss terms at these points, of host arrays; `weight` holds the scales, reports are raw means."""
        found = [self.equation(sample.interior)]
        for condition, surface in zip(self.conditions, sample.surfaces, strict=True):
            if surface is not None:
                found += assembly.condition_terms(self, condition, surface)
        found += [assembly.data_term(self, values) for values in self.data]
        return assembly.distinct(found)

    def equation(self, x: np.ndarray) -> Term:
        """Lap u + k^2 u - f at points (n, d)."""
        return assembly.equation_term(self, x)

    # -- the field ---------------------------------------------------------------------------------------------------

    def chart(self, x: np.ndarray) -> np.ndarray:
        """Where the network sees the points x: those in regions of interfaces are moved beside the domain, see `regions`."""
        if not self.interfaces:
            return x
        moved = x.copy()
        low, high = self.domain.lower[0], self.domain.upper[0]
        moved[:, 0] += self.sheets.number(regions.inside(self, x)) * regions.APART * (high - low)
        return moved

    def field(self, network: Network, x: Any, *, chunk: int = 4096) -> np.ndarray:
        """The field at host points (n, d): (n,) float64, or complex128 where the problem is complex."""
        points = reals("x", x)
        if points.ndim != 2 or points.shape[1] != self.dimensions:
            raise ShapeError(f"x has shape {points.shape}: (n, {self.dimensions}) is expected")
        value: Array = jet(network, place(self.chart(points), network), order=0, chunk=chunk).value
        numbers = to_host(value).astype(np.float64)
        u = numbers[:, 0] + 1j * numbers[:, 1] if self.complex_field else numbers[:, 0]
        u = self.field_scale * u
        return u if self.ansatz is None else self.ansatz.field(u, points)

    def physical(self, x: np.ndarray) -> np.ndarray:
        """Which points (n, d) show the field itself: all but those in an absorbing layer."""
        return np.ones(x.shape[0], dtype=bool) if self.layer is None else self.layer.physical(self.domain, x)


def _listed(name: str, given: Any, kind: Any) -> list[Any]:
    """One of a kind, or several, as a list."""
    if isinstance(given, kind):
        return [given]
    if not isinstance(given, Iterable):
        raise ArgumentError(f"{name} is {shown(given)}: one, a list of them, or () for none is expected")
    return list(given)


def _is_array(value: Any) -> bool:
    """Whether anything of it is an array of one number a point."""
    if isinstance(value, Unknown):
        return _is_array(value.times) or _is_array(value.plus)
    return not callable(value) and np.ndim(value) > 0


def _layer(conditions: list[Any], domain: Domain) -> PML | None:
    for condition in conditions:
        if not isinstance(condition, Condition | PML):
            raise ArgumentError(
                f"boundary holds a {type(condition).__name__}: conditions are expected, such as Dirichlet(0.0)"
            )
    layers = [c for c in conditions if isinstance(c, PML)]
    if len(layers) > 1:
        raise ArgumentError("boundary: two PML layers; one can name several sides, where=('left', 'right')")
    if layers:
        layers[0].sides(domain)
    return layers[0] if layers else None


def _with_layers_end(conditions: list[Condition], layer: PML | None, domain: Domain) -> list[Condition]:
    """The field is zero where a layer ends, unless a condition says what holds there."""
    if layer is None:
        return conditions
    taken = {part for c in conditions if not isinstance(c, Periodic | Interface) for part in c.on(domain)}
    free = tuple(part for part in layer.sides(domain)[1] if part not in taken)
    return [*conditions, Dirichlet(0.0, where=free, name="end of the layer")] if free else conditions


def _unknowns(problem: Helmholtz) -> dict[str, float]:
    """Names and first guesses of the numbers to be found."""
    found: dict[str, float] = {}
    given = [problem.wavenumber, *(c.coefficient for c in problem.conditions if isinstance(c, Robin))]
    for unknown in given:
        if isinstance(unknown, Unknown):
            if unknown.name in found:
                raise ArgumentError(f"name = {unknown.name!r}: two unknowns have it")
            found[unknown.name] = float(unknown.start)
    if isinstance(problem.wavenumber, Unknown) and problem.layer is not None:
        raise ArgumentError("wavenumber is Unknown beside a PML, whose coefficients need it: give a number")
    # The coefficient times the extension of the values would be a target that follows the unknown.
    if found and problem.ansatz is not None and problem.ansatz.extension is not None:
        name = "wavenumber" if isinstance(problem.wavenumber, Unknown) else next(iter(found))
        raise ArgumentError(f"{name} is Unknown beside a hard condition that is not zero: use hard=False")
    return found


def _check_start(problem: Helmholtz) -> None:
    """ArgumentError for a wavenumber that begins where k^2 does not follow it, and nothing else does."""
    unknown = problem.wavenumber
    if not isinstance(unknown, Unknown) or unknown.start != 0:
        return
    if any(isinstance(condition, Impedance | Sommerfeld) for condition in problem.conditions):
        return
    factor, rest = unknown.parts(problem.domain.interior(_PROBE, seed=0), given=problem.domain.given)
    if rest is None or not np.any(factor * rest):
        raise ArgumentError(
            f"start = {unknown.start} of {unknown.name!r}: the equation has its square, whose slope is zero there, so it "
            "would never move; give another first guess"
        )


def _data(given: Data, dimensions: int) -> Data:
    if not isinstance(given, Data):
        raise ArgumentError(f"data holds a {type(given).__name__}: Data(points, values) is expected")
    x, values = reals(f"points of {given.name!r}", given.points), np.asarray(given.values)
    if x.ndim != 2 or x.shape[1] != dimensions or x.shape[0] < 1:
        raise ShapeError(f"points of {given.name!r} have shape {x.shape}: (n, {dimensions}) is expected")
    if not np.all(np.isfinite(x)):
        raise ArgumentError(f"points of {given.name!r}: NaN or infinity")
    check_positive(f"weight of {given.name!r}", given.weight)
    return given._replace(points=x, values=evaluate(f"values of {given.name!r}", values, x, given=True))
