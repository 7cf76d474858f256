"""One training set on many machines: each holds a share of the points, and what an optimiser asks for is a sum of shares.

| asked for | a shard's part |
|---|---|
| loss L, gradient | sum_i w_i / n_i sum over its points of |r|^2, and its gradient |
| |r|^2, J^T r, J^T J (Levenberg-Marquardt) | the same sums over its rows |
| raw means of a report | sum over its points of |r|^2 |

n_i counts the points of term i on all machines, so that the sums are those of one machine up to rounding, whatever the
number of shards. Shard k of s has the points k, k + s, k + 2 s, ... of each term; a term with fewer points than shards is
absent from some. Every optimiser then does the same arithmetic on the same numbers, on each rank or on one controller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from scanfield.arrays import Array
from scanfield.errors import ArgumentError
from scanfield.optimize import Normal
from scanfield.pinn.fourier import check_count
from scanfield.pinn.jacobian import jacobian
from scanfield.pinn.loss import residuals
from scanfield.pinn.network import Network
from scanfield.pinn.objective import Objective
from scanfield.pinn.placing import place_terms
from scanfield.pinn.problem import Helmholtz, Sample
from scanfield.pinn.terms import Dependence, Term, prepare_terms

__all__ = ["InTurn", "Reducer", "Sharded", "Shares"]


class Shares(Protocol):
    """Shards that were built somewhere."""

    def total(self, part: str, x: Array) -> Array:
        """The sum over all shards of ``getattr(shard, part)(x)``, a vector beside ``x``; the same bits on every rank."""


class Reducer(Protocol):
    """An engine that holds shards of a training set and adds up what they say."""

    def build(
        self, network: Network, make: Callable[[int, int, Network], Part], told: Sequence[str]
    ) -> Shares:
        """Make shards: ``make(k, size, network)`` is shard k of ``size``, its arrays beside those of ``network``.

        ``told`` describes the training, for engines whose ranks were started separately to compare.
        """


class Part:
    """One shard's share of the sums. Every part is a vector, so that engines need to add up vectors alone."""

    def __init__(
        self, problem: Helmholtz, network: Network, sample: Sample, chunk: int, shard: int, size: int
    ) -> None:
        self.names = tuple(term.name for term in problem.terms(sample))
        own = [part for term in problem.terms(sample) if (part := share(term, shard, size)) is not None]
        self.objective: Objective | None = None
        self._parameters = network.size + len(problem.unknowns)
        self._network = network
        if own:
            network.constants()
            terms = prepare_terms(place_terms(own, network), network)
            self.objective = Objective.of(problem, network, sample, terms, chunk)

    def loss_and_gradient(self, x: Array) -> Array:
        """(1 + parameters,): the loss, then its gradient."""
        if self.objective is None:
            return self._zeros(x, 1 + self._parameters)
        loss, gradient = self.objective.loss_and_gradient(x)
        xp = self._network.xp
        return xp.concat([xp.reshape(loss, (1,)), gradient])

    def squares(self, x: Array) -> Array:
        """(1,): |r|^2"""
        if self.objective is None:
            return self._zeros(x, 1)
        r = self.objective.residuals(x)
        return self._network.xp.reshape(self._network.xp.sum(r * r), (1,))

    def normal(self, x: Array) -> Array:
        """(parameters + parameters^2,): J^T r, then the rows of J^T J."""
        size = self._parameters
        if self.objective is None:
            return self._zeros(x, size + size * size)
        xp = self._network.xp
        network, unknowns = self.objective.split(x)
        found = jacobian(network, self.objective.terms, wavenumber=unknowns, chunk=self.objective.chunk)
        turned = xp.matrix_transpose(found.matrix)
        return xp.concat([turned @ found.residual, xp.reshape(turned @ found.matrix, (size * size,))])

    def raw(self, x: Array) -> Array:
        """(terms,): the sum of |r|^2 of each."""
        xp = self._network.xp
        sums = {name: self._zeros(x, 1) for name in self.names}
        if self.objective is not None:
            network, unknowns = self.objective.split(x)
            found = residuals(network, self.objective.terms, wavenumber=unknowns, chunk=self.objective.chunk)
            sums |= {name: xp.reshape(xp.sum(r * r), (1,)) for name, r in found.items()}
        return xp.concat([sums[name] for name in self.names])

    def _zeros(self, x: Array, count: int) -> Array:
        xp = self._network.xp
        return xp.concat([x[:1] * 0] * count) if count > 1 else x[:1] * 0


def share(term: Term, shard: int, size: int) -> Term | None:
    """A shard's points of a term, with the weight of all; None where it has none."""
    points = term.pieces[0].points.shape[0]
    rows = slice(shard, None, size)
    own = len(range(shard, points, size))
    if not own:
        return None

    def cut(values: Any) -> Any:
        return None if values is None or not len(values.shape) else values[rows, ...]

    def dependence(given: Dependence) -> Dependence:
        return given._replace(factors=tuple(map(cut, given.factors)))

    unknown = term.wavenumber
    if isinstance(unknown, Dependence):
        unknown = dependence(unknown)
    elif unknown is not None:
        unknown = tuple(map(dependence, unknown))
    pieces = tuple(type(piece)(*map(cut, piece)) for piece in term.pieces)
    weight = term.weight * (own / points)
    return term._replace(pieces=pieces, target=cut(term.target), weight=weight, wavenumber=unknown)


class Sharded(Objective):
    """The loss of a problem whose points are spread over a reducer's shards."""

    def __init__(
        self, problem: Helmholtz, network: Network, sample: Sample, reducer: Reducer, *, chunk: int = 256
    ) -> None:
        self.problem, self.network, self.sample, self.chunk = problem, network, sample, chunk
        terms = problem.terms(sample)
        self.names = tuple(term.name for term in terms)
        self._points = tuple(int(term.pieces[0].points.shape[0]) for term in terms)
        self._scales = tuple(float(term.weight) for term in terms)
        self.multipliers = dict.fromkeys(self.names, 1.0)
        told = [f"{name}: {count} points" for name, count in zip(self.names, self._points, strict=True)]

        def make(shard: int, size: int, beside: Network) -> Part:
            return Part(problem, beside, sample, chunk, shard, size)

        self._shares = reducer.build(network, make, [*told, f"points {sample.checksum}"])

    def reweight(self, multipliers: dict[str, float]) -> None:
        """ArgumentError for multipliers other than 1."""
        if any(value != 1.0 for value in multipliers.values()):
            raise ArgumentError(f"multipliers: {multipliers}; over shards the weights are fixed")

    def loss_and_gradient(self, x: Array, terms: Any = None) -> tuple[Array, Array]:
        """The weighted loss and its gradient."""
        found = self._shares.total("loss_and_gradient", x)
        return found[0], found[1:]

    def residuals(self, x: Array) -> Array:
        """The sum of all squares, (): what Levenberg-Marquardt takes in the place of residuals."""
        return self._shares.total("squares", x)[0, ...]

    def jacobian(self, x: Array) -> Any:
        """J^T r and J^T J."""
        found, size = self._shares.total("normal", x), x.shape[0]
        return Normal(found[:size], self.network.xp.reshape(found[size:], (size, size)))

    def raw(self, x: Array) -> dict[str, float]:
        """As one machine's."""
        sums = self._shares.total("raw", x)
        return {
            name: float(sums[i]) / points
            for i, (name, points) in enumerate(zip(self.names, self._points, strict=True))
        }

    def weighted(self, raw: dict[str, float]) -> float:
        """The loss of raw means."""
        return sum(w * raw[name] for name, w in zip(self.names, self._scales, strict=True))


class InTurn:
    """Shards one after the other in this process: what every other reducer must equal.

    Parameters
    ----------
    size
        How many.

    Examples
    --------
    >>> from scanfield import pinn
    >>> problem = pinn.Helmholtz(pinn.Interval(0, 1), 2.0, boundary=[pinn.Dirichlet(1.0)])
    >>> network = pinn.Network.create(pinn.FourierFeatures(1, 4, scale=1.0), hidden=[], outputs=1)
    >>> fit = pinn.train(problem, network, points=64, iterations=3, reducer=pinn.InTurn(3), held_out=10)
    >>> fit.iterations
    3
    """

    def __init__(self, size: int) -> None:
        self.size = check_count("size", size)

    def build(
        self, network: Network, make: Callable[[int, int, Network], Part], told: Sequence[str]
    ) -> Shares:
        """All of them, here."""
        return _Here([make(shard, self.size, network) for shard in range(self.size)])


class _Here:
    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts

    def total(self, part: str, x: Array) -> Array:
        found = getattr(self._parts[0], part)(x)
        for other in self._parts[1:]:
            found = found + getattr(other, part)(x)
        return found
