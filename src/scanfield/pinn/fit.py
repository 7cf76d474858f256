"""What a training returns: the field, how it came about and why it stopped."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from scanfield.errors import ArgumentError, ShapeError
from scanfield.pinn.checkpoint import check_place, save_network
from scanfield.pinn.network import Network
from scanfield.pinn.problem import Helmholtz
from scanfield.pinn.values import reals

__all__ = ["Fit", "Record", "evaluation_grid", "relative_error"]


class Record(NamedTuple):
    """One line of a history."""

    iteration: int
    stage: str
    loss: float
    """Weighted, as the optimiser sees it."""
    terms: dict[str, float]
    """Name of each term -> raw mean of |residual|^2."""
    held_out: float
    """Root mean square of the equation's residual at points that were not trained on, over the equation's scale."""
    weights: dict[str, float]
    """Multipliers of the terms."""
    points: str
    """Checksum of the points."""


@dataclass(frozen=True)
class Fit:
    """A trained network as the solution of its problem.

    `network` has the best parameters seen, `unknowns` the numbers found with it, `history` a `Record` every few iterations,
    `reason` why the training stopped, `iterations` how many there were in all stages, `seconds` of processor time.
    `warnings` holds the diagnosis in words.
    """

    problem: Helmholtz
    network: Network
    unknowns: dict[str, float]
    history: tuple[Record, ...]
    reason: str
    iterations: int
    seconds: float
    warnings: tuple[str, ...] = ()

    def field(self, x: Any) -> np.ndarray:
        """The field at host points (n, d): (n,) complex128 (float64 where the problem is real)."""
        return self.problem.field(self.network, x)

    def error(self, exact: Callable[[np.ndarray], np.ndarray], x: np.ndarray | None = None) -> float:
        """The relative L2 error against an exact field at points (n, d); None: a grid of 100 along each axis."""
        points = evaluation_grid(self.problem) if x is None else reals("x", x)
        return relative_error(self.field(points), np.asarray(exact(points)))

    @property
    def loss(self) -> float:
        """The last recorded loss."""
        return self.history[-1].loss

    @property
    def held_out(self) -> float:
        """The last recorded held-out residual."""
        return self.history[-1].held_out

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the network; `load_network` reads it. ArgumentError for a folder that does not exist."""
        save_network(path, self.network, self.unknowns)

    def plot(
        self, path: str | os.PathLike[str] | None = None, exact: Callable[..., Any] | None = None
    ) -> Any:
        """A figure of the field, of its error where the exact field is known, and of the history; also written to `path`.

        Needs matplotlib (BackendError without it); returns its Figure. ArgumentError, before anything is drawn, for a folder
        that does not exist and an ending that stands for no kind of picture; without one it is a png.
        """
        from scanfield.pinn.plotting import draw, picture

        place = None if path is None else picture("path", check_place("path", path))
        figure = draw(self, exact)
        if place is not None:
            figure.savefig(os.fspath(place), dpi=120)
        return figure

    def __str__(self) -> str:
        found = "".join(f", {name} = {value:.8g}" for name, value in self.unknowns.items())
        return (
            f"stopped after {self.iterations} iterations in {self.seconds:.1f} CPU s: {self.reason}; "
            f"loss {self.loss:.1e}, held-out residual {self.held_out:.1e}{found}"
        )


def evaluation_grid(problem: Helmholtz, count: int = 100) -> np.ndarray:
    """Points of a grid over the domain, (n, d), its edges included and an absorbing layer left out."""
    domain, d = problem.domain, problem.dimensions
    if domain.given:
        return domain.interior(1)
    each = count if d < 3 else 24
    axes = [np.linspace(low, high, each) for low, high in zip(domain.lower, domain.upper, strict=True)]
    x = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, d)
    centre = 0.5 * (np.asarray(domain.lower) + np.asarray(domain.upper))
    inside = domain.contains(x + 1e-9 * (centre - x))
    return np.asarray(x[inside & problem.physical(x)])


def relative_error(field: np.ndarray, exact: np.ndarray) -> float:
    """|field - exact| / |exact| in the L2 norm; ArgumentError where the exact field is zero.

    ShapeError where one of them is no row of numbers, one a point: (n, 1) beside (n,) would be compared all with all.
    """
    if np.shape(exact) not in ((), np.shape(field)):
        raise ShapeError(
            f"exact has shape {np.shape(exact)}: {np.shape(field)}, one number a point, is expected"
        )
    exact = np.broadcast_to(exact, np.shape(field))
    size = float(np.linalg.norm(exact))
    if size == 0.0:
        raise ArgumentError("exact: it is zero at all points, so there is no relative error")
    return float(np.linalg.norm(field - exact)) / size
