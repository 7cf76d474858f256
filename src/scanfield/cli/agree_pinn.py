"""What `scanfield check` compares of the PINN: jets, losses with all gradients, and Jacobians on the same inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy

from scanfield import pinn
from scanfield.cli import draws
from scanfield.cli.places import Place
from scanfield.pinn.activations import ACTIVATIONS
from scanfield.pinn.selection import FAMILY, methods

_POINTS, _WIDTHS, _FEATURES = 21, (12, 9), 6
# A chunk that does not divide the points: every implementation meets a whole one and a rest.
_CHUNK = 16


class Subject(NamedTuple):
    """The PINN, beside the records of the operations."""

    name: str = FAMILY


SUBJECT = Subject()

_QUICK = (("tanh", 2), ("sin", 1))
_FULL = (*_QUICK, *((name, d) for name in ACTIVATIONS for d in (1, 2, 3) if (name, d) not in _QUICK))


def cases(*, full: bool) -> list[draws.Case]:
    """Networks and coefficients of every kind, drawn for each activation and number of dimensions."""
    found = [_case(name, d) for name, d in (_FULL if full else _QUICK)]
    if full:
        found.append(_case("tanh", 2, alone=True))
    return found


def _case(activation: str, d: int, *, alone: bool = False) -> draws.Case:
    rng = numpy.random.default_rng(d)
    network = pinn.Network.create(
        pinn.FourierFeatures(d, _FEATURES, wavenumber=3.0), hidden=_WIDTHS, activation=activation, seed=d
    )
    arrays = {
        name: value + 0.1 * rng.standard_normal(value.shape) for name, value in network.parameters.items()
    }
    n = _POINTS
    arrays |= {
        "points": rng.uniform(-1.0, 1.0, (n, d)),
        "other points": rng.uniform(-1.0, 1.0, (n, d)),
        "laplacian": numpy.ones((n, 1)),
        "normal": rng.standard_normal((n, d)),
    }
    for name, shape in (("value", (n,)), ("first", (n, d)), ("second", (n, d)), ("target", (n,))):
        arrays[name] = rng.standard_normal(shape) + 1j * rng.standard_normal(shape)
    # What runs only by name compiles for seconds for each kind of term: it gets the one that has everything.
    regime = draws.Regime(f"{activation}, {d}-D{', one term' if alone else ''}")
    return draws.Case(regime, arrays, {"activation": activation, "alone": alone}, None)


def candidates(place: Place, arrays: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    """The implementations at a place; none on Dask, whose arrays would compute at every step of a training."""
    if place.library == "dask":
        return []
    return methods(_network(arrays, options), by_name=options["alone"])


def _network(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> pinn.Network:
    d = int(arrays["points"].shape[1])
    embedding = pinn.FourierFeatures(d, _FEATURES, wavenumber=3.0)
    names = ["B", *(f"{kind}{i}" for i in range(len(_WIDTHS) + 1) for kind in "Wb")]
    return pinn.Network(
        {name: arrays[name] for name in names}, embedding=embedding, activation=options["activation"]
    )


def _terms(arrays: Mapping[str, Any]) -> list[pinn.Term]:
    """A Helmholtz term with an unknown, one with complex coefficients on each axis, a boundary, a periodic pair."""
    a = arrays
    unknown = pinn.Dependence((a["laplacian"][:, 0],), 2)
    return [
        pinn.Term("pde", (pinn.Piece(a["points"], None, None, a["laplacian"]),), a["target"], 0.02, unknown),
        pinn.Term("operator", (pinn.Piece(a["points"], a["value"], a["first"], a["second"]),), None, 0.05),
        pinn.Term("boundary", (pinn.Piece(a["other points"], a["value"], a["normal"]),), a["target"]),
        pinn.Term(
            "periodic",
            (
                pinn.Piece(a["points"], a["laplacian"][:, 0], a["normal"]),
                pinn.Piece(a["other points"], -1.0 * a["laplacian"][:, 0], a["normal"]),
            ),
        ),
    ]


def _jet(record: Any, arrays: Any, token: Any, options: Any, place: Place) -> dict[str, Any]:
    jet = pinn.jet(_network(arrays, options), arrays["points"], chunk=_CHUNK)
    return {"jet's value": jet.value, "jet's slopes": jet.first, "jet's Laplacian": jet.second}


def _loss(record: Any, arrays: Any, token: Any, options: Any, place: Place) -> dict[str, Any]:
    alone = options["alone"]
    terms = [_terms(arrays)[1]] if alone else _terms(arrays)
    found = pinn.loss_and_grad(
        _network(arrays, options),
        terms,
        wavenumber=None if alone else 2.0,
        points=True,
        chunk=_POINTS if alone else _CHUNK,
    )
    taken = {f"loss of {name}": raw for name, raw in found.terms.items()} | {"loss": found.loss}
    taken |= {f"d_{name}": g for name, g in found.gradients.items() if name != "points"}
    return taken | dict(_points(found.gradients["points"]))


def _points(gradients: Any) -> Iterator[tuple[str, Any]]:
    for t, pieces in enumerate(gradients):
        for p, gradient in enumerate(pieces):
            yield f"d_points of term {t}, piece {p}", gradient


def _jacobian(record: Any, arrays: Any, token: Any, options: Any, place: Place) -> dict[str, Any]:
    found = pinn.jacobian(_network(arrays, options), _terms(arrays), wavenumber=2.0, chunk=_CHUNK)
    return {"residual": found.residual, "d_residual": found.matrix}


VERBS = {"jet": _jet, "loss": _loss, "jacobian": _jacobian}
