"""A problem's loss as a function of one vector: the network's parameters, then the unknowns."""

from __future__ import annotations

from typing import Any

import numpy as np

from scanfield.arrays import Array
from scanfield.pinn.jacobian import jacobian
from scanfield.pinn.loss import loss_and_grad, residuals
from scanfield.pinn.network import Network
from scanfield.pinn.placing import place, place_terms, to_host
from scanfield.pinn.problem import Helmholtz, Sample
from scanfield.pinn.selection import kernels_for
from scanfield.pinn.terms import PreparedTerms, dependences, prepare_terms
from scanfield.pinn.workspace import Workspace

__all__ = ["Objective"]


class Objective:
    """The loss of a problem at the points of a sample, for the optimisers of `scanfield.optimize`.

    Parameters
    ----------
    problem, network, sample
        What is solved, by what (its parameters are not used), and where.
    multipliers
        Name of a term -> what multiplies its weight; 1 where it is missing.
    chunk
        Rows that go through the network together.
    """

    def __init__(
        self,
        problem: Helmholtz,
        network: Network,
        sample: Sample,
        multipliers: dict[str, float] | None = None,
        *,
        chunk: int = 256,
    ) -> None:
        self.problem, self.network, self.sample, self.chunk = problem, network, sample, chunk
        network.constants()  # made once here; networks with other parameters share them
        self.terms: PreparedTerms = prepare_terms(place_terms(problem.terms(sample), network), network)
        self.names = tuple(shape.name for shape in self.terms.shapes)
        self._scales = self.terms.weights
        self._workspace: Workspace | None = None
        self.reweight(multipliers or {})

    @staticmethod
    def of(
        problem: Helmholtz, network: Network, sample: Sample, terms: PreparedTerms, chunk: int
    ) -> Objective:
        """The objective of terms that are prepared already: a part of the problem's own."""
        found = Objective.__new__(Objective)
        found.problem, found.network, found.sample, found.chunk = problem, network, sample, chunk
        found.terms, found.names = terms, tuple(shape.name for shape in terms.shapes)
        found._scales = terms.weights
        found._workspace = None
        found.multipliers = dict.fromkeys(found.names, 1.0)
        return found

    def reweight(self, multipliers: dict[str, float]) -> None:
        """Other multipliers of the terms' weights."""
        self.multipliers = {name: float(multipliers.get(name, 1.0)) for name in self.names}
        self.terms = self.terms._replace(
            weights=tuple(s * self.multipliers[n] for s, n in zip(self._scales, self.names, strict=True))
        )

    # -- vectors -----------------------------------------------------------------------------------------------------

    def start(self) -> Array:
        """The network's own parameters and the first guesses."""
        vector = self.network.flatten()
        guesses = list(self.problem.unknowns.values())
        return (
            self.network.xp.concat([vector, place(np.asarray(guesses), self.network)]) if guesses else vector
        )

    def split(self, x: Array) -> tuple[Network, dict[str, Any] | None]:
        """The network with the parameters of a vector, and the unknowns (None where there are none)."""
        size = self.network.size
        network = self.network.replace(self.network.unflatten(x[:size]))
        names = self.problem.unknowns
        return network, {name: x[size + i] for i, name in enumerate(names)} if names else None

    def unknowns(self, x: Array) -> dict[str, float]:
        """The unknowns on the host."""
        return {name: float(value) for name, value in (self.split(x)[1] or {}).items()}

    def workspace(self) -> Workspace | None:
        """Every buffer of a step, made at the first; None where the kernels of the moment write into none."""
        if not kernels_for(self.network).in_place:
            return None
        if self._workspace is None:
            # No longer than the longest term: a chunk may be asked for that no term fills.
            longest = max(shape.points for shape in self.terms.shapes)
            self._workspace = Workspace.of(self.network, min(self.chunk, longest))
        return self._workspace

    # -- what optimisers ask ----------------------------------------------------------------------------------------

    def loss_and_gradient(self, x: Array, terms: PreparedTerms | None = None) -> tuple[Array, Array]:
        """The weighted loss and its gradient."""
        network, unknowns = self.split(x)
        own = self.workspace()
        found = loss_and_grad(
            network,
            terms or self.terms,
            wavenumber=unknowns,
            chunk=None if own is not None else self.chunk,
            workspace=own,
        )
        gradient = network.flatten(found.gradients)  # a copy: the workspace's own are written again
        if unknowns:
            xp = network.xp
            gradient = xp.concat([gradient, xp.stack([found.gradients[name] for name in unknowns])])
        return found.loss, gradient

    def residuals(self, x: Array) -> Array:
        """All residuals, real, weights folded in: their squares add up to the loss."""
        network, unknowns = self.split(x)
        found = residuals(network, self.terms, wavenumber=unknowns, chunk=self.chunk)
        rows = [
            network.xp.reshape(found[shape.name], (-1,)) * (weight / shape.points) ** 0.5
            for shape, weight in zip(self.terms.shapes, self.terms.weights, strict=True)
        ]
        return rows[0] if len(rows) == 1 else network.xp.concat(rows)

    def jacobian(self, x: Array) -> tuple[Array, Array]:
        """The residuals and their Jacobian."""
        network, unknowns = self.split(x)
        found = jacobian(network, self.terms, wavenumber=unknowns, chunk=self.chunk)
        return found.residual, found.matrix

    # -- what reports ask --------------------------------------------------------------------------------------------

    def raw(self, x: Array) -> dict[str, float]:
        """Name of each term -> the mean of its |residual|^2, without weights, on the host."""
        network, unknowns = self.split(x)
        found = residuals(network, self.terms, wavenumber=unknowns, chunk=self.chunk)
        return {name: float(network.xp.sum(r * r)) / r.shape[0] for name, r in found.items()}

    def weighted(self, raw: dict[str, float]) -> float:
        """The loss of raw means."""
        return sum(w * raw[name] for name, w in zip(self.names, self.terms.weights, strict=True))

    def scaled(self, raw: dict[str, float]) -> dict[str, float]:
        """Raw means over the terms' scales, without multipliers."""
        return {name: w * raw[name] for name, w in zip(self.names, self._scales, strict=True)}

    def equation_residual(self, x: Array, points: np.ndarray) -> np.ndarray:
        """|Lap u + k^2 u - f| at host points, over the equation's scale, (n,)."""
        network, unknowns = self.split(x)
        term = self.problem.equation(points)
        needed = {dependence.name for dependence in dependences(term)}
        own = {name: value for name, value in (unknowns or {}).items() if name in needed} or None
        found = residuals(network, place_terms([term], network), wavenumber=own, chunk=self.chunk)
        r = to_host(found[term.name]).astype(np.float64)
        return np.asarray(np.sqrt(np.sum(r * r, axis=1)) / self.problem.equation_scale)
