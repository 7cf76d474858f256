"""The loss terms of a problem: each condition as coefficients of the network's jet, on the host.

Conditions are written down in u at physical points. Then hard conditions are folded in, the points become those that the
network sees (`Helmholtz.chart`), and everything is multiplied by the field's scale, since u = U * network.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from scanfield.pinn import regions
from scanfield.pinn.boundary import (
    Condition,
    Dirichlet,
    Impedance,
    Interface,
    Periodic,
    Robin,
    Sommerfeld,
    Unknown,
)
from scanfield.pinn.domains import Surface
from scanfield.pinn.terms import Dependence, Piece, Term
from scanfield.pinn.values import evaluate

if TYPE_CHECKING:
    from scanfield.pinn.problem import Helmholtz

__all__ = ["PDE", "condition_terms", "data_term", "distinct", "equation_term"]

PDE = "equation"
Depends: TypeAlias = tuple[tuple[str, np.ndarray, int], ...]
"""What of the coefficient of u follows unknowns: the name of each, its factor (n,), its power."""


def data_term(problem: Helmholtz, measured: Any) -> Term:
    """u less what was measured."""
    x = measured.points
    weight = measured.weight / problem.field_scale**2
    return _term(problem, measured.name, [(x, Piece(x, np.ones(x.shape[0])))], measured.values, weight)


def equation_term(problem: Helmholtz, x: np.ndarray) -> Term:
    """Lap u + k^2 u - f at points (n, d)."""
    f = evaluate("source", problem.source, x, given=problem.domain.given)
    weight = 1.0 / problem.equation_scale**2
    n = x.shape[0]
    squared, depends = _squared(problem, x)
    first: np.ndarray | None = None
    if problem.layer is not None:
        second, first = problem.layer.coefficients(problem.domain, x, problem.outward * problem.reference)
    else:
        # A collapsed Laplacian is one block of the jet, whatever d is.
        second = np.ones((n, 1))
    return _term(problem, PDE, [(x, Piece(x, squared, first, second))], f, weight, depends)


def _squared(problem: Helmholtz, x: np.ndarray) -> tuple[np.ndarray | None, Depends]:
    """k^2 at points: what is known, and what follows an unknown s: k = s g + h, k^2 = s^2 g^2 + s 2 g h + h^2."""
    unknown = problem.wavenumber
    if not isinstance(unknown, Unknown):
        return problem.wavenumber_at(x) ** 2, ()
    g, h = unknown.parts(x, given=problem.domain.given)
    depends = [(unknown.name, g**2, 2)]
    if h is not None and np.any(g * h):
        depends.append((unknown.name, 2.0 * g * h, 1))
    return None if h is None else h**2, tuple(depends)


def _once(unknown: Unknown, surface: Surface, given: bool, scale: complex) -> tuple[Any, Depends]:
    """scale (s g + h): what is known, and what follows the unknown s."""
    g, h = unknown.parts(*surface, given=given)
    return None if h is None else scale * h, ((unknown.name, scale * g, 1),)


def condition_terms(problem: Helmholtz, condition: Condition, surface: Surface) -> list[Term]:
    """What a condition adds to the loss at the points of a surface."""
    x, normals = surface
    one = np.ones(x.shape[0])
    value_weight = condition.weight / problem.field_scale**2
    slope_weight = condition.weight / problem.slope_scale**2
    title = condition.title
    if isinstance(condition, Dirichlet):
        if condition.hard:
            return []
        g = problem.value_at("value", condition.value, surface)
        return [_term(problem, title, [(x, Piece(x, one))], g, value_weight)]
    if isinstance(condition, Periodic):
        return _periodic(problem, condition, surface, value_weight, slope_weight)
    if isinstance(condition, Interface):
        return _interface(problem, condition, surface, value_weight, slope_weight)

    g = problem.value_at("value", getattr(condition, "value", 0.0), surface)
    value: np.ndarray | None = None
    depends: Depends = ()
    given = problem.domain.given
    if isinstance(condition, Robin):
        if isinstance(condition.coefficient, Unknown):
            value, depends = _once(condition.coefficient, surface, given, 1.0)
        else:
            value = problem.value_at("coefficient", condition.coefficient, surface)
    elif isinstance(condition, Impedance | Sommerfeld):
        if isinstance(problem.wavenumber, Unknown):
            value, depends = _once(problem.wavenumber, surface, given, -1j)
        else:
            value = -1j * problem.wavenumber_at(x)
    return [_term(problem, title, [(x, Piece(x, value, normals))], g, slope_weight, depends)]


def _periodic(
    problem: Helmholtz, condition: Periodic, high: Surface, value_weight: float, slope_weight: float
) -> list[Term]:
    axis, x = condition.axis, high.points
    low = x.copy()
    low[:, axis] = problem.domain.lower[axis]
    turn = np.exp(1j * condition.phase) if condition.phase else 1.0
    one, along = np.ones(x.shape[0]), np.zeros_like(x)
    along[:, axis] = 1.0
    title = condition.name or f"periodic axis {axis}"
    return [
        _term(
            problem,
            f"{title}, value",
            [(x, Piece(x, one)), (low, Piece(low, -turn * one))],
            None,
            value_weight,
        ),
        _term(
            problem,
            f"{title}, slope",
            [(x, Piece(x, None, along)), (low, Piece(low, None, -turn * along))],
            None,
            slope_weight,
        ),
    ]


def _interface(
    problem: Helmholtz, condition: Interface, rim: Surface, value_weight: float, slope_weight: float
) -> list[Term]:
    x, n = rim
    # A step to either side says which regions a side of the rim belongs to; the points stay on the rim.
    sides = regions.both_sides(problem, rim)
    inside, outside = (problem.chart(side) - (side - x) for side in sides)
    within, without = _slopes(problem, *sides)
    one = np.ones(x.shape[0])
    return [
        _term(
            problem,
            f"{condition.title}, value",
            [(x, Piece(inside, one)), (x, Piece(outside, -one))],
            None,
            value_weight,
        ),
        _term(
            problem,
            f"{condition.title}, slope",
            [(x, Piece(inside, None, within * n)), (x, Piece(outside, None, -without * n))],
            None,
            slope_weight,
        ),
    ]


def _slopes(problem: Helmholtz, inside: np.ndarray, outside: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What multiplies the slope on both sides of a rim, (n, 1) each: the ratios of the regions of that side alone.

    (Those of regions that lie on both sides would multiply both. Where two regions touch, the rim is that of both.)
    """
    ratios = np.asarray([interface.ratio for interface in problem.interfaces])
    here, there = regions.inside(problem, inside), regions.inside(problem, outside)
    own = [
        np.prod(np.where(member, ratios, 1.0), axis=1)[:, None] for member in (here & ~there, there & ~here)
    ]
    return own[0], own[1]


def _term(
    problem: Helmholtz,
    name: str,
    pieces: list[tuple[np.ndarray, Piece]],
    target: np.ndarray | None,
    weight: float,
    depends: Depends = (),
) -> Term:
    """A term in the network: physical points beside each piece in u, hard conditions and field scale folded in."""
    folded, constant = [], None
    followed = []
    for place, (x, piece) in enumerate(pieces):
        if piece.points is x and problem.interfaces:
            piece = piece._replace(points=problem.chart(x))
        if place == 0:  # an unknown stands in the first piece, the others are the other sides of a coupling
            followed = [
                (unknown, factor if problem.ansatz is None else problem.ansatz.factor(factor, x), power)
                for unknown, factor, power in depends
            ]
        if problem.ansatz is not None:
            piece, own = problem.ansatz.fold(piece, x)
            if own is not None:
                constant = own if constant is None else constant + own
        scaled = [None if c is None else problem.field_scale * c for c in piece[1:]]
        folded.append(Piece(piece.points, *scaled))
    if target is not None and not np.any(target):
        target = None
    if constant is not None:
        target = -constant if target is None else target - constant
    rest = (None,) * (len(folded) - 1)
    found = [
        Dependence((problem.field_scale * factor, *rest), power, unknown)
        for unknown, factor, power in followed
    ]
    return Term(name, tuple(folded), target, weight, tuple(found) or None)


def distinct(terms: list[Term]) -> tuple[Term, ...]:
    """Names made distinct by numbers."""
    seen: dict[str, int] = {}
    found = []
    for term in terms:
        seen[term.name] = seen.get(term.name, 0) + 1
        found.append(term if seen[term.name] == 1 else term._replace(name=f"{term.name} ({seen[term.name]})"))
    return tuple(found)
