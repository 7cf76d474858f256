"""The closed-form gradients of a problem held against finite differences of its loss."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from scanfield.arrays import Array, is_complex
from scanfield.errors import ArgumentError
from scanfield.pinn.explain import terms_of
from scanfield.pinn.loss import loss_and_grad
from scanfield.pinn.network import Network, from_host, place_beside
from scanfield.pinn.problem import Helmholtz
from scanfield.pinn.terms import PreparedTerms, Term, prepare_terms, unknowns_of

# The fourth-order rule (Fornberg 1988, table 1): its error falls as the fourth power of the step.
_RULE = ((-2.0, 1.0 / 12.0), (-1.0, -2.0 / 3.0), (1.0, 2.0 / 3.0), (2.0, -1.0 / 12.0))


_TINY = 1e-300


@dataclass(frozen=True)
class GradientCheck:
    """How far the gradients are from finite differences."""

    deviations: Mapping[str, float]
    """Name of each gradient -> |closed form - difference| over the size of the gradient along the direction taken."""
    step: float
    """Of the differences, the same for every array."""

    @property
    def largest(self) -> float:
        """The worst of all."""
        return max(self.deviations.values())

    def __str__(self) -> str:
        width = max(len(name) for name in self.deviations)
        lines = [f"{name.ljust(width)}  {value:.1e}" for name, value in self.deviations.items()]
        return "\n".join(["gradient, relative deviation from finite differences", *lines])


def check_gradients(
    network: Network | Helmholtz,
    terms: Sequence[Term] | PreparedTerms | Helmholtz | Network,
    *,
    wavenumber: Any = None,
    points: bool = False,
    step: float = 1e-4,
    seed: int = 0,
) -> GradientCheck:
    """Compare every gradient of this loss with finite differences of it.

    Each array is moved along a random direction of all its entries; the fourth-order central difference of the loss is held
    against the closed form's product with that direction. Deviations of about 1e-9 are those of the differences.

    Parameters
    ----------
    network, terms
        As in ``loss_and_grad``; or a problem and a network, as in ``train``: its terms at 1000 points, its unknowns at their
        first guesses. The network is in float64: float32 has no digits to spare for differences.
    wavenumber
        As in ``loss_and_grad``.
    points : bool
        Also the gradients of the points; needs terms that are not prepared.
    step : float
        Of the differences, along a direction of length 1.
    seed : int
        Of the directions.

    Returns
    -------
    GradientCheck
        ``deviations`` by name, ``largest``; ``str()`` is a table.

    Raises
    ------
    ArgumentError
        No network among the first two, one in float32, or ``points`` with prepared terms.

    Examples
    --------
    >>> import numpy
    >>> from scanfield import pinn
    >>> network = pinn.Network.create(pinn.FourierFeatures(1, 8, wavenumber=3.0), hidden=16, seed=0)
    >>> x = numpy.linspace(0.0, 1.0, 50)[:, None]
    >>> inside = pinn.Term("PDE", (pinn.Piece(x, value=numpy.full(50, 9.0), second=numpy.ones((50, 1))),))
    >>> pinn.check_gradients(network, [inside]).largest < 1e-8
    True
    """
    problem = next((given for given in (network, terms) if isinstance(given, Helmholtz)), None)
    checked, listed = terms_of(network, terms)
    if problem is not None and wavenumber is None:
        wavenumber = dict(problem.unknowns) or None
    return _checked(checked, listed, wavenumber, points, step, seed)


def _checked(
    network: Network, terms: Any, wavenumber: Any, points: bool, step: float, seed: int
) -> GradientCheck:
    if terms is None:
        raise ArgumentError("terms: None; a list of terms is expected, or a problem in place of the network")
    if network.dtype != "float64":
        raise ArgumentError(
            "network: in float32 differences have no digits left; make it in float64 to check it"
        )
    if points and isinstance(terms, PreparedTerms):
        raise ArgumentError("points: the points of prepared terms cannot be moved; pass the terms themselves")
    prepared = prepare_terms(terms, network)
    unknowns = unknowns_of(prepared, wavenumber)
    found = loss_and_grad(network, prepared, wavenumber=unknowns or None, points=points).gradients
    draws = numpy.random.default_rng(seed)
    xp, place = network.xp, place_beside(network.parameters["W0"])

    def direction(like: Array) -> Array:
        signs = draws.choice([-1.0, 1.0], size=tuple(like.shape))
        return from_host(xp, signs / math.sqrt(max(1, signs.size)), "float64", place)

    def loss(*, by: Mapping[str, Array] | None = None, given: Any = None, moved: Any = None) -> float:
        other = network if by is None else network.replace(by)
        numbers = (unknowns if given is None else given) or None
        return float(loss_and_grad(other, prepared if moved is None else moved, wavenumber=numbers).loss)

    deviations = {}
    for name, array in network.parameters.items():
        along = direction(array)
        rule = [(place, loss(by={name: array + place * step * along})) for place, _ in _RULE]
        deviations[name] = _deviation(xp, found[name], along, _difference(rule, step))
    for name, value in unknowns.items():
        gaps = []
        for turn in (1.0, 1.0j) if isinstance(value, complex) or _is_complex_array(value) else (1.0,):
            rule = [
                (place, loss(given={**unknowns, name: value + place * step * turn})) for place, _ in _RULE
            ]
            closed = complex(found[name])
            gaps.append(
                abs((closed * turn.conjugate()).real - _difference(rule, step)) / max(abs(closed), _TINY)
            )
        deviations[name] = max(gaps)
    for i, term in enumerate(terms if points and not isinstance(terms, PreparedTerms) else ()):
        for p, piece in enumerate(term.pieces):
            along = direction(piece.points)
            rule = [
                (place, loss(moved=_moved(terms, i, p, piece.points + place * step * along)))
                for place, _ in _RULE
            ]
            deviations[f"points of {term.name}, piece {p}"] = _deviation(
                xp, found["points"][i][p], along, _difference(rule, step)
            )
    return GradientCheck(deviations, step)


def _moved(terms: Any, i: int, p: int, points: Array) -> list[Term]:
    """The terms with other points in one piece."""
    listed = list(terms)
    pieces = list(listed[i].pieces)
    pieces[p] = pieces[p]._replace(points=points)
    listed[i] = listed[i]._replace(pieces=tuple(pieces))
    return listed


def _is_complex_array(value: Any) -> bool:
    return not isinstance(value, int | float) and is_complex(value)


def _difference(losses: Sequence[tuple[float, float]], step: float) -> float:
    return sum(weight * loss for (_, weight), (_, loss) in zip(_RULE, losses, strict=True)) / step


def _deviation(xp: Any, closed: Array, along: Array, difference: float) -> float:
    """|closed . along - difference| over |closed|: a random direction may be nearly at right angles to it."""
    size = math.sqrt(float(xp.sum(closed * closed)) * float(xp.sum(along * along)))
    return abs(float(xp.sum(closed * along)) - difference) / max(size, _TINY)
