"""Points in the unit cube, seeded, on the host: every library gets the same numbers.

Rules: `"sobol"` (scrambled Sobol', scipy.stats.qmc), `"latin"` (Latin hypercube, the same), `"uniform"` (independent),
`"grid"` (centres of equal cells). No global generator is read or changed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from scanfield.advice import shown
from scanfield.errors import ArgumentError, ShapeError
from scanfield.pinn.extras import need

__all__ = ["RULES", "generator", "unit_points", "weighted_choice"]

RULES = ("sobol", "latin", "uniform", "grid")


def check_rule(rule: object) -> None:
    """ArgumentError for a rule by which no points are drawn."""
    if not isinstance(rule, str) or rule not in RULES:
        raise ArgumentError(f"sampling = {shown(rule)}: allowed are {', '.join(map(repr, RULES))}")


def unit_points(
    count: int, dimensions: int, rule: str = "sobol", seed: int | tuple[int, ...] = 0
) -> np.ndarray:
    """Points of the unit cube, (count, dimensions), float64.

    Parameters
    ----------
    count
        How many. A grid has the least number of equal cells along each axis that gives so many, and its first `count`
        centres; a `count` that is a power fills it.
    rule
        `"sobol"`, `"latin"`, `"uniform"` or `"grid"`.
    seed
        One or several integers; a grid does not depend on it.

    Raises `ArgumentError` for an unknown rule or a count below 1.

    Examples
    --------
    >>> unit_points(4, 1, "grid")[:, 0].tolist()
    [0.125, 0.375, 0.625, 0.875]
    >>> bool((unit_points(8, 2, seed=3) == unit_points(8, 2, seed=3)).all())
    True
    """
    check_rule(rule)
    if not _whole(count) or count < 1:
        raise ArgumentError(f"points = {shown(count)}: an integer of at least 1 is expected")
    if dimensions == 0:  # the ends of an interval have no coordinate of their own
        return np.zeros((count, 0))
    if rule == "grid":
        cells = int(np.ceil(count ** (1.0 / dimensions) - 1e-9))
        centres = (np.arange(cells) + 0.5) / cells
        mesh = np.stack(np.meshgrid(*[centres] * dimensions, indexing="ij"), axis=-1)
        return np.asarray(mesh.reshape(-1, dimensions)[:count])
    rng = generator(seed)
    if rule == "uniform":
        return np.asarray(rng.random((count, dimensions)))
    qmc = need("scipy.stats.qmc")

    if rule == "latin":
        return np.asarray(qmc.LatinHypercube(dimensions, seed=rng).random(count))
    # A power of two first: that is what makes a Sobol' sequence balanced.
    return np.asarray(
        qmc.Sobol(dimensions, seed=rng).random_base2(max(0, int(count - 1).bit_length()))[:count]
    )


def generator(seed: int | tuple[int, ...]) -> np.random.Generator:
    """A generator of its own for each seed; ArgumentError for what is no integer of at least 0."""
    words = (seed,) if isinstance(seed, int | np.integer) else tuple(seed)
    if any(not _whole(word) or word < 0 for word in words):
        raise ArgumentError(f"seed = {shown(seed)}: an integer of at least 0 is expected")
    return np.random.default_rng(words)


def weighted_choice(
    residual: np.ndarray, count: int, seed: int | tuple[int, ...], *, power: float = 1.0, floor: float = 1.0
) -> np.ndarray:
    """Indices of `count` candidates, without repetition, likelier where the residual is large.

    The density is |r|^power / mean(|r|^power) + floor (residual-based adaptive distribution: Wu, Zhu, Tan, Kartha and
    Lu, arXiv 2207.10289, equation 2).

    Examples
    --------
    >>> chosen = weighted_choice(np.asarray([0.0, 0.0, 5.0]), 1, seed=0, floor=0.0)
    >>> chosen.tolist()
    [2]
    """
    size = np.abs(np.asarray(residual)) ** power
    if size.ndim != 1 or size.shape[0] < count:
        raise ShapeError(
            f"residual has shape {size.shape}: one axis of at least {count} candidates is expected"
        )
    mean = size.mean()
    density = (size / mean if mean > 0 else np.ones_like(size)) + floor
    return np.asarray(
        generator(seed).choice(size.shape[0], size=count, replace=False, p=density / density.sum())
    )


def _whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
