"""Points of a training in shards of one process: the sums are one machine's, whatever their number."""

from __future__ import annotations

import numpy as np
import pytest
import training

from scanfield import pinn
from scanfield.errors import ArgumentError, ShapeError
from scanfield.optimize import LevenbergMarquardt, Normal, least_squares


@pytest.mark.parametrize("optimizer", training.OPTIMIZERS)
def test_any_number_of_shards(optimizer: str):
    """Two, and more than there are points: most shards then lack most terms, and some lack all."""
    want = training.trained(optimizer, np)
    for size in (2, 40):
        training.same(training.trained(optimizer, np, pinn.InTurn(size)), want)


@pytest.mark.parametrize("adaptive", [False, True])
def test_points_drawn_anew_are_those_of_one_machine(adaptive: bool):
    options = {"resample": 3, "adaptive": adaptive}
    want = training.trained("adam", np, **options)
    assert want["loss"][-1] != training.trained("adam", np)["loss"][-1]
    training.same(training.trained("adam", np, pinn.InTurn(3), **options), want)


def test_levenberg_marquardt_takes_products_in_the_place_of_rows():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((9, 3)), rng.standard_normal(9)

    def residuals(x):
        return np.tanh(a @ x) - b

    def jacobian(x):
        return residuals(x), (1 - np.tanh(a @ x) ** 2)[:, None] * a

    def normal(x):
        r, j = jacobian(x)
        return Normal(j.T @ r, j.T @ j)

    for metric in ("identity", "diagonal"):
        optimizer = LevenbergMarquardt(metric=metric, system="primal")
        start = np.zeros(3)
        want = least_squares(residuals, jacobian, start, optimizer=optimizer, iterations=12)
        got = least_squares(
            lambda x: np.sum(residuals(x) ** 2), normal, start, optimizer=optimizer, iterations=12
        )
        assert got.reason == want.reason and abs(got.value - want.value) <= 1e-14
        assert np.max(np.abs(got.x - want.x)) <= 1e-12
    with pytest.raises(ShapeError, match=r"J\^T J \(2, 2\)"):
        least_squares(
            lambda x: np.asarray(1.0),
            lambda x: Normal(np.zeros(3), np.zeros((2, 2))),
            np.zeros(3),
            iterations=1,
        )


def test_bad_input():
    problem = training.problem()
    network = pinn.Network.create(
        pinn.FourierFeatures(1, 3, scale=1.0), hidden=[], outputs=1, dtype="float64"
    )
    for size in (0, True, 1.5):
        with pytest.raises(ArgumentError, match="size"):
            pinn.InTurn(size)
    with pytest.raises(ArgumentError, match="weights = 'ntk'"):
        pinn.train(problem, network, optimizer="adam", weights="ntk", reducer=pinn.InTurn(2))
