"""Which parts of a boundary have no condition, and which have two that contradict each other.

Conditions hold on parts by name, so both are known before a training. They are where a field goes wrong unseen: the
equation alone has many solutions, and the one that is found satisfies all that is asked for, to the last digit.

    on a part, at its points: Dirichlet u = g; all others d_n u + c u = g, c = 0, a coefficient or -i k
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from scanfield.pinn.boundary import Condition, Dirichlet, Interface, Neumann, Periodic, Robin, Unknown
from scanfield.pinn.domains import Box
from scanfield.pinn.fourier import PeriodicFeatures
from scanfield.pinn.network import Network
from scanfield.pinn.problem import Helmholtz
from scanfield.pinn.sampling import unit_points

__all__ = ["contradictions", "uncovered"]

_LOOKED_AT = 16  # points of a part
_APART = 1e-6  # of the field's or its slope's size: a contradiction of less is no one's error


class _Stated(NamedTuple):
    """A condition at points of a part: c, None for u itself, and g, (n,) each."""

    coefficient: np.ndarray | None
    value: np.ndarray


def uncovered(problem: Helmholtz, network: Network | None = None) -> str:
    """A warning that names the parts of the boundary without a condition; "" where none is missing.

    None is missing where measured values stand in for it, in a line whose field and slope are both given at one end,
    and between two sides whose network is periodic.
    """
    domain = problem.domain
    if problem.data:
        return ""
    if not domain.parts and domain.given:
        return (
            f"no condition holds anywhere: {type(domain).__name__} has no boundary, and the equation alone has many "
            "solutions. Give PointSet the boundary's points too, boundary={name: (points, normals)}, or data."
        )
    held = _by_part(problem)
    initial = any({Dirichlet, Neumann} <= {type(c) for c in here} for here in held.values())
    if initial and problem.dimensions == 1 and isinstance(domain, Box):
        return ""
    closed = _periodic(problem, network)
    bare = [part for part in domain.parts if not held[part] and part not in closed]
    if not bare:
        return ""
    where = repr(bare[0]) if len(bare) == 1 else repr(tuple(bare))
    several = [
        f" {part!r} has {len(here)} ({' and '.join(c.title for c in here)}): is its where the one that was meant?"
        for part, here in held.items()
        if len(here) > 1
    ]
    return (
        f"no condition holds on {_listed(map(repr, bare))}: the equation then has many solutions, and the one that is "
        "found need not be yours, however small loss and residual are. Say what holds there, "
        f"for example Sommerfeld(where={where}) where waves leave; Neumann(0.0) is a hard wall.{''.join(several)}"
    )


def contradictions(problem: Helmholtz) -> str:
    """A warning that names the parts with two conditions of one kind and different values; "" where none has."""
    found = []
    for part, here in _by_part(problem).items():
        stated = [(c, _stated(problem, c, part)) for c in here] if len(here) > 1 else []
        known = [(c, s) for c, s in stated if s is not None]
        for i, (one, first) in enumerate(known):
            found += [
                f"{part!r} has two conditions of one kind with different values, {one.title} and {other.title}"
                for other, second in known[i + 1 :]
                if _contradict(problem, first, second)
            ]
    if not found:
        return ""
    return f"{'; '.join(found)}: no field satisfies both. Keep one, or give each its own part (where=)."


def _by_part(problem: Helmholtz) -> dict[str, list[Condition]]:
    """Name of each part -> the conditions that hold there."""
    held: dict[str, list[Condition]] = {part: [] for part in problem.domain.parts}
    for condition in problem.conditions:
        if isinstance(condition, Interface):  # inside the domain
            continue
        if isinstance(condition, Periodic):
            parts = problem.domain.parts[2 * condition.axis : 2 * condition.axis + 2]
        else:
            parts = condition.on(problem.domain)
        for part in dict.fromkeys(parts):
            held[part].append(condition)
    return held


def _periodic(problem: Helmholtz, network: Network | None) -> set[str]:
    """Sides of a box between which the network repeats itself whatever its weights are."""
    if network is None or not isinstance(network.embedding, PeriodicFeatures):
        return set()
    embedding, domain = network.embedding, problem.domain
    found: set[str] = set()
    for axis, size in enumerate(np.subtract(domain.upper, domain.lower)):
        waves = np.abs(embedding.frequencies[axis])
        # A longer period than the domain leaves its sides free.
        if axis not in embedding.axes and float(np.min(waves[waves > 0])) * size >= 1 - 1e-9:
            found.update(domain.parts[2 * axis : 2 * axis + 2])
    return found


def _stated(problem: Helmholtz, condition: Condition, part: str) -> _Stated | None:
    """What a condition says on a part; None where it is not known: a coupling, an unknown, arrays at given points."""
    if isinstance(condition, Periodic):
        return None
    value = getattr(condition, "value", 0.0)
    coefficient = condition.coefficient if isinstance(condition, Robin) else 0.0
    if isinstance(coefficient, Unknown) or any(
        not callable(given) and np.ndim(given) > 0 for given in (value, coefficient)
    ):
        return None
    domain = problem.domain
    surface = domain.surface(part, unit_points(_LOOKED_AT, domain.dimensions - 1, "grid"))
    g = problem.value_at("value", value, surface)
    if isinstance(condition, Dirichlet):
        return _Stated(None, g)
    if isinstance(condition, Robin | Neumann):
        return _Stated(problem.value_at("coefficient", coefficient, surface), g)
    return _Stated(-1j * problem.wavenumber_at(surface.points), g)


def _contradict(problem: Helmholtz, one: _Stated, other: _Stated) -> bool:
    scale = problem.field_scale
    if one.coefficient is not None and other.coefficient is not None:
        scale = problem.slope_scale
        if np.max(np.abs(one.coefficient - other.coefficient)) > _APART * scale / problem.field_scale:
            return False
    elif one.coefficient is not None or other.coefficient is not None:
        return False
    return bool(np.max(np.abs(one.value - other.value)) > _APART * scale)


def _listed(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last
