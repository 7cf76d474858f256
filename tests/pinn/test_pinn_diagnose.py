"""The diagnosis in words: said where it is due, and not where it is not."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from scanfield import optimize, pinn
from scanfield.pinn.diagnose import DiagnosisWarning, diagnose

LEFT, RIGHT = pinn.Dirichlet(1.0, where="left"), pinn.Sommerfeld(where="right")


def told(problem, points=200, **more):
    return " | ".join(diagnose(problem, problem.draw(points), **more))


def test_points_per_wavelength():
    """Judged by the shortest local wave (field report F093)."""
    line = pinn.Interval(0, 1)
    assert "3.0 points per wavelength" in told(pinn.Helmholtz(line, 20 * np.pi, 0.0, [LEFT, RIGHT]), 30)
    assert told(pinn.Helmholtz(line, 2 * np.pi, 0.0, [LEFT, RIGHT]), 30) == ""
    varying = pinn.Helmholtz(line, lambda x: 2 * np.pi * np.where(x[:, 0] < 0.5, 1, 10), 0.0, [LEFT, RIGHT])
    assert "4.0 points per wavelength" in told(varying, 40)
    square = pinn.Helmholtz(pinn.Box((0, 0), (2, 2)), 2 * np.pi, 0.0, [LEFT, RIGHT])
    assert "5.0 points per wavelength" in told(square, 100) and "points=400" in told(square, 100)


@pytest.mark.parametrize(
    ("sides", "k", "warned"),
    [
        ({"left": "D", "right": "D", "bottom": "D", "top": "D"}, np.pi * np.sqrt(2), True),
        ({"left": "D", "right": "D", "bottom": "D", "top": "D"}, 4.0, False),
        ({"left": "N", "right": "N", "bottom": "D", "top": "D"}, np.pi, True),
        ({"left": "D", "right": "D", "bottom": "D", "top": "D"}, np.pi, False),
        ({"left": "D", "right": "N", "bottom": "D", "top": "D"}, np.pi * np.sqrt(1.25), True),
        ({"left": "D", "right": "N", "bottom": "D", "top": "D"}, np.pi * np.sqrt(2), False),
        ({"left": "N", "right": "N", "bottom": "N", "top": "N"}, 0.0, True),
        ({"left": "D", "right": "D", "bottom": "D"}, np.pi * np.sqrt(2), False),
    ],
)
def test_box_eigenvalues(sides, k, warned):
    conditions = [
        (pinn.Dirichlet if kind == "D" else pinn.Neumann)(0.0, where=side) for side, kind in sides.items()
    ]
    problem = pinn.Helmholtz(pinn.Box((0, 0), (1, 1)), float(k), 1.0, conditions)
    assert ("eigenvalue" in told(problem)) is warned
    lossy = pinn.Helmholtz(pinn.Box((0, 0), (1, 1)), float(k) + 0.1j, 1.0, conditions)
    assert "eigenvalue" not in told(lossy)


def test_a_problem_that_zero_solves():
    """Said once, at the training; not said with a source, data or a value (field report F090)."""
    line, k = pinn.Interval(0, 1), 4 * np.pi
    nothing = pinn.Helmholtz(line, k, complex_field=True)
    network = pinn.Network.create(pinn.FourierFeatures(1, 4, wavenumber=k), hidden=[4])
    with pytest.warns(DiagnosisWarning, match="boundary.*zero") as caught:
        fit = pinn.train(nothing, network, points=60, optimizer="adam", iterations=10)
    assert len(caught) == 1 and "zero" in fit.warnings[0]
    driven = [
        pinn.Helmholtz(line, k, 1.0),
        pinn.Helmholtz(line, k, 0.0, LEFT),
        pinn.Helmholtz(line, k, 0.0, pinn.Neumann(lambda x: x[:, 0] + 1)),
        pinn.Helmholtz(line, k, data=pinn.Data([[0.5]], [1.0])),
    ]
    assert all("zero" not in told(problem) for problem in driven)
    # Asked at the points of the training, not at one of a side; and what was measured may be zero too.
    upper = pinn.Dirichlet(lambda x: 1.0 * (x[:, 1] > 0.5), where="left")
    assert "zero" not in told(pinn.Helmholtz(pinn.Box((0, 0), (1, 1)), 4.0, 0.0, upper))
    narrow = pinn.Helmholtz(line, k, lambda x: 1.0 * (np.abs(x[:, 0] - 0.50045) < 2e-4))
    assert narrow.source_size == 0.0 and "zero" not in told(narrow, 5000)
    assert "zero" in told(pinn.Helmholtz(line, k, data=pinn.Data([[0.5]], [0.0])))
    assert "zero" in told(pinn.Helmholtz(line, k, 0.0, [pinn.Dirichlet(0.0, where="left"), RIGHT]))
    assert "zero" in told(pinn.Helmholtz(line, k, 0.0, pinn.Robin(1.0, lambda x: 0 * x[:, 0])))


@pytest.mark.parametrize(("top", "warned"), [(400.0, True), (60.0, False)])
def test_a_small_loss_with_a_wrong_field_between_the_points(top, warned):
    """64 points, 200 frequencies up to 400: zero at the points and wrong elsewhere (field report F091)."""
    k = 40.0
    problem = pinn.Helmholtz(pinn.Interval(0, 1), k, 0.0, [LEFT, RIGHT])
    waves = np.random.default_rng(0).uniform(0, top, 200)[None] / (2 * np.pi)
    network = pinn.Network.create(pinn.FourierFeatures(frequencies=waves, trainable=False), hidden=[])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit = pinn.train(problem, network, points=64, sampling="grid", optimizer="lm", iterations=100)
    words = [str(w.message) for w in caught if "held-out" in str(w.message)]
    assert fit.loss < 1e-12
    error = fit.error(pinn.solutions.plane_wave(k))
    if warned:
        assert error > 0.3 and len(words) == 1 and f"{fit.held_out:.1e}" in words[0]
    else:
        assert error < 1e-4 and not words


def test_precision_size_and_features():
    problem = pinn.Helmholtz(pinn.Interval(0, 1), 20.0, 0.0, [LEFT, RIGHT])

    def network(dtype="float64", hidden=(8,), **features):
        return pinn.Network.create(pinn.FourierFeatures(1, 8, **features), hidden=list(hidden), dtype=dtype)

    single = network("float32", wavenumber=20.0)
    assert "LBFGS in float32" in told(problem, network=single, optimizers=(optimize.LBFGS(),))
    assert told(problem, network=single, optimizers=(optimize.Adam(1e-3),)) == ""
    large = network(hidden=(64, 64), wavenumber=20.0)
    assert "5000 parameters" in told(problem, network=large, optimizers=(optimize.LevenbergMarquardt(),))
    assert told(problem, network=large, optimizers=(optimize.LBFGS(),)) == ""
    slow = network(frequencies=np.full((1, 8), 0.5))
    assert "cycles, not radians" in told(problem, network=slow)
    fast = network(frequencies=np.full((1, 8), 20.0))
    assert "nothing in the problem is so fast" in told(problem, network=fast)
    assert told(problem, network=network(wavenumber=20.0)) == ""
