"""The diagnosis in words: said where it is due, and not where it is not."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pytest

from scanfield import optimize, pinn
from scanfield.pinn import files
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


WAVE = pinn.solutions.plane_wave(10.0)
SQUARE = pinn.Box((0, 0), (1, 1))
PLATE = pinn.Difference(SQUARE, pinn.Disk((0.5, 0.5), 0.2))
CUT = pinn.Difference(pinn.Interval(0, 1), pinn.Interval(0.4, 0.6))
ENDS = {"left": ([[0.0]], [[-1.0]]), "right": ([[1.0]], [[1.0]])}


@pytest.mark.parametrize(
    ("domain", "boundary", "named"),
    [
        (pinn.Interval(0, 1), LEFT, "on 'right':"),
        (SQUARE, pinn.Impedance(1.0, where="left"), "on 'right', 'bottom' and 'top':"),
        (SQUARE, [pinn.Dirichlet(1.0, where=("left", "top")), RIGHT], "Sommerfeld(where='bottom')"),
        (SQUARE, [pinn.Dirichlet(1.0, where="bottom"), pinn.Periodic(axis=0)], "on 'top':"),
        (PLATE, pinn.Dirichlet(1.0, where=SQUARE.parts), "on 'hole circle':"),
        (PLATE, pinn.Dirichlet(1.0, where="hole circle", hard=True), "on 'left', 'right', 'bottom' and 'top':"),
        (pinn.PointSet([[0.5]], ENDS), pinn.Dirichlet([1.0], where="left"), "on 'right':"),
        (pinn.PointSet([[0.5], [0.7]]), (), "PointSet has no boundary"),
        # The slip of a `where`: both on one side, none on the other.
        (pinn.Interval(0, 1), [LEFT, pinn.Sommerfeld(where="left")], "'left' has 2 (dirichlet left and sommerfeld left)"),
        (CUT, [LEFT, pinn.Neumann(1.0, where="left")], "'hole right'"),
        (SQUARE, pinn.Dirichlet(1.0), ""),
        (SQUARE, [pinn.Periodic(axis=0), pinn.Dirichlet(1.0, where=("bottom", "top"))], ""),
        (SQUARE, [pinn.PML(0.2, where=("right", "bottom", "top")), LEFT], ""),
        (PLATE, [pinn.Sommerfeld(where=SQUARE.parts), pinn.Neumann(1.0, where="hole circle")], ""),
        (pinn.Ball((0, 0, 0), 1.0), pinn.Robin(1.0, 1.0), ""),
        (pinn.Interval(0, 1), [LEFT, RIGHT, pinn.Interface(pinn.Interval(0.5, 1.0))], ""),
        (pinn.Interval(0, 1), [LEFT, pinn.Neumann(10j, where="left")], ""),  # values at the start: an ordinary equation's
    ],
)  # fmt: skip
def test_parts_without_a_condition(domain, boundary, named):
    """The field was wrong by 2.1 and by 6.4 with a held-out residual of 1e-15 and not a word."""
    problem = pinn.Helmholtz(domain, 10.0, 1.0, boundary)
    words = told(problem, 2000)
    assert named in words and bool(named) is ("no condition holds" in words)
    measured = pinn.Helmholtz(domain, 10.0, 1.0, boundary, pinn.Data([[0.5] * domain.dimensions], [1.0]))
    assert "no condition" not in told(measured, 2000)


def test_a_missing_condition_is_told_by_the_fit():
    problem = pinn.Helmholtz(pinn.Interval(0, 1), 10.0, boundary=pinn.Dirichlet(WAVE, where="left"))
    network = pinn.Network.create(pinn.FourierFeatures(1, 12, scale=2.0, trainable=False), hidden=[])
    with pytest.warns(DiagnosisWarning, match="no condition holds on 'right'"):
        fit = pinn.train(problem, network, points=60, iterations=10)
    assert fit.held_out < 1e-5 and fit.error(WAVE) > 0.1 and len(fit.warnings) == 1


@pytest.mark.parametrize(("period", "warned"), [(1.0, False), (0.5, False), (2.0, True)])
def test_a_network_that_is_periodic_needs_no_condition_between(period, warned):
    problem = pinn.Helmholtz(SQUARE, 10.0, 1.0, pinn.Dirichlet(0.0, where=("bottom", "top")))
    network = pinn.Network.create(pinn.PeriodicFeatures([period, None], 3), hidden=[4], outputs=1)
    words = told(problem, network=network)
    assert ("on 'left' and 'right'" in words) is warned is ("no condition" in words)


@pytest.mark.parametrize(
    ("boundary", "named"),
    [
        ([pinn.Dirichlet(WAVE), pinn.Dirichlet(0.0, where="left")], "'left' has two .* dirichlet and dirichlet left"),
        ([pinn.Impedance(WAVE.impedance, where="left"), pinn.Sommerfeld(name="open")], "'left' .* impedance left and open"),
        ([pinn.Neumann(1.0), pinn.Robin(0.0, lambda x: x[:, 0])], "'left' has two"),
        ([pinn.Sommerfeld(), pinn.Robin(-10j, 1.0)], "'right' has two"),
        ([pinn.Dirichlet(WAVE), pinn.Dirichlet(lambda x: np.exp(10j * x[:, 0]), where="left")], ""),
        ([pinn.Dirichlet(WAVE), pinn.Impedance(WAVE.impedance), pinn.Neumann(WAVE.normal)], ""),
        ([pinn.Robin(pinn.Unknown(1.0, "c"), 1.0), pinn.Neumann(0.0)], ""),
        ([pinn.Robin(1.0, 1.0), pinn.Neumann(0.0), pinn.Dirichlet(0.0)], ""),
    ],
)  # fmt: skip
def test_two_conditions_of_one_kind_on_a_part(boundary, named):
    words = told(pinn.Helmholtz(pinn.Interval(0, 1), 10.0, 0.0, boundary))
    assert re.search(named, words) and bool(named) is ("no field satisfies both" in words)


def test_nothing_is_missing_in_the_shipped_problems():
    for name in files.shipped():
        given = files.load_problem(name)
        assert told(given.problem, 4000, network=given.make_network()) == "", name
