"""Levenberg-Marquardt: both systems give one step, ends and reasons, SciPy's on the same problem."""

from __future__ import annotations

import numpy as np
import pytest

from scanfield.errors import ArgumentError, BackendError, ShapeError
from scanfield.optimize import LevenbergMarquardt, least_squares
from scanfield.optimize.cholesky import solve_positive


def leave_out(backend, test, parameters):
    """Dask has a Cholesky factor of its own, for blocks; strict runs without linear algebra, which one test is about."""
    return "every_library" in test and backend in ("dask", "strict")


_T = np.linspace(0.0, 4.0, 30)


def _decays(xp, t):
    """Two decaying waves, five unknowns, against the truth (0.4, 1.1, 2.0, 0.7, 3.0)."""

    def model(x):
        return x[2] * xp.exp(-x[0] * t) + xp.exp(-x[3] * t) * xp.sin(x[1] * x[4] * t)

    def jacobian(x):
        slow, fast = xp.exp(-x[0] * t), xp.exp(-x[3] * t)
        inside = x[1] * x[4] * t
        columns = [
            -t * x[2] * slow,
            fast * xp.cos(inside) * x[4] * t,
            slow,
            -t * fast * xp.sin(inside),
            fast * xp.cos(inside) * x[1] * t,
        ]
        return xp.stack(columns, axis=1)

    return model, jacobian


def test_recovers_the_truth_on_every_library(library, dtype):
    if library.name == "dask":
        pytest.skip(
            "a Cholesky factor of Dask blocks is Dask's own matter; the systems are small: use arrays"
        )
    t = library.array(_T, dtype)
    model, slope = _decays(library.xp, t)
    target = model(library.array(np.asarray([0.4, 1.1, 2.0, 0.7, 3.0]), dtype))
    found = least_squares(
        lambda x: model(x) - target,
        lambda x: (model(x) - target, slope(x)),
        library.array(np.asarray([0.5, 1.0, 1.8, 0.6, 2.9]), dtype),
    )
    assert library.dtype(found.x) == dtype and library.on_device(found.x)
    assert found.value < (1e-20 if dtype == "float64" else 1e-9)
    fitted = library.numpy(found.x)
    bound = 1e-7 if dtype == "float64" else 1e-3
    assert abs(fitted[0] - 0.4) < bound and abs(fitted[1] * fitted[4] - 3.3) < bound


@pytest.mark.parametrize("metric", ["identity", "diagonal"])
@pytest.mark.parametrize(("rows", "parameters"), [(150, 70), (70, 150)])
def test_both_systems_give_the_same_step(metric, rows, parameters):
    rng = np.random.default_rng(2)
    j, r, x = rng.normal(size=(rows, parameters)), rng.normal(size=rows), rng.normal(size=parameters)
    j = j * np.geomspace(0.1, 10.0, parameters)
    moved = []
    for system in ("primal", "residual", "auto"):
        optimizer = LevenbergMarquardt(system=system, metric=metric, damping=0.3)
        there, state = optimizer.step(
            lambda y: r + j @ (y - x), lambda y: (r, j), x, optimizer.init(lambda y: r, x)
        )
        assert state.step == 1
        moved.append(there - x)
    weight = np.eye(parameters) if metric == "identity" else np.diag(np.sum(j * j, axis=0))
    exact = -np.linalg.solve(j.T @ j + 0.3 * weight, j.T @ r)
    for step in moved:
        np.testing.assert_allclose(step, exact, rtol=1e-9, atol=1e-11)


def test_a_diagonal_metric_does_not_see_units():
    """The same problem with one parameter in other units takes the same steps."""
    model, slope = _decays(np, _T)
    target = model(np.asarray([0.4, 1.1, 2.0, 0.7, 3.0]))
    units = np.asarray([1e3, 1.0, 1e-4, 1.0, 1.0])
    start = np.asarray([0.5, 1.0, 1.8, 0.6, 2.9])
    optimizer = LevenbergMarquardt(metric="diagonal", tolerance=0.0)
    ends = [
        least_squares(
            lambda x, u=u: model(x * u) - target,
            lambda x, u=u: (model(x * u) - target, slope(x * u) * u),
            start / u,
            iterations=4,
            optimizer=optimizer,
        ).x
        * u
        for u in (np.ones(5), units)
    ]
    np.testing.assert_allclose(ends[0], ends[1], rtol=1e-6)


def test_is_as_good_as_scipys():
    from scipy.optimize import least_squares as peer

    model, slope = _decays(np, _T)
    noise = 0.01 * np.random.default_rng(0).normal(size=_T.size)
    target = model(np.asarray([0.4, 1.1, 2.0, 0.7, 3.0])) + noise
    start = np.asarray([0.5, 1.0, 1.8, 0.6, 2.9])
    ours = least_squares(
        lambda x: model(x) - target, lambda x: (model(x) - target, slope(x)), start,
        optimizer=LevenbergMarquardt(tolerance=1e-9),
    )  # fmt: skip
    theirs = peer(lambda x: model(x) - target, start, jac=slope, method="lm", xtol=1e-14, ftol=1e-14)
    assert ours.reason == "gradient"
    assert ours.value == pytest.approx(2 * theirs.cost, rel=1e-9)


def test_says_why_it_stopped():
    rng = np.random.default_rng(0)
    j, b = rng.normal(size=(20, 6)), rng.normal(size=20)

    def residuals(x):
        return j @ x - b

    def jacobian(x):
        return j @ x - b, j

    zero = np.zeros(6)
    assert least_squares(residuals, jacobian, zero, iterations=2)[2:5:2] == (2, "iteration limit")
    end = least_squares(residuals, jacobian, zero, optimizer=LevenbergMarquardt(tolerance=1e-10))
    assert end.reason == "gradient"
    np.testing.assert_allclose(end.x, np.linalg.lstsq(j, b, rcond=None)[0], rtol=1e-8)
    worse = least_squares(residuals, lambda x: (j @ x - b, -j), zero)  # a Jacobian of the wrong sign
    assert worse.reason == "no descent" and worse.iterations == 0
    np.testing.assert_array_equal(worse.x, zero)
    lost = least_squares(lambda x: residuals(x) if not np.any(x) else np.full(20, np.nan), jacobian, zero)
    assert lost.reason == "not finite" and np.all(lost.x == 0)


def test_the_blocked_solve_is_the_solve_on_every_library(library, dtype):
    rng = np.random.default_rng(1)
    root = rng.normal(size=(150, 150)) / 12
    matrix, right = root @ root.T + np.eye(150), rng.normal(size=150)
    solved = solve_positive(library.xp, library.array(matrix, dtype), library.array(right, dtype))
    exact = np.linalg.solve(matrix, right)
    np.testing.assert_allclose(library.numpy(solved), exact, atol=1e-12 if dtype == "float64" else 1e-4)
    assert solve_positive(library.xp, library.array(-matrix, dtype), library.array(right, dtype)) is None


@pytest.mark.backend("strict")
def test_a_library_without_linear_algebra_is_named(library):
    x = library.array(np.ones(2), "float64")
    j = library.array(np.eye(2), "float64")
    with pytest.raises(BackendError, match="linear algebra"):
        least_squares(lambda x: x, lambda x: (x, j), x)


def test_bad_input_is_named():
    with pytest.raises(ShapeError, match=r"\(rows, parameters\)"):
        least_squares(lambda x: x, lambda x: (x, np.ones((3, 2))), np.ones(2))
    for settings in (
        {"damping": 0.0},
        {"increase": 1.0},
        {"metric": "unit"},
        {"system": "both"},
        {"tries": 0},
        {"tolerance": -1.0},
        {"tolerance": float("nan")},
    ):
        with pytest.raises(ArgumentError, match=next(iter(settings))):
            LevenbergMarquardt(**settings)
