"""Schedules of array steps, normal equations instead of a Jacobian, and states that have stopped."""

from __future__ import annotations

import numpy as np
import pytest
from arrays import Library

from scanfield.errors import ShapeError
from scanfield.optimize import LBFGS, Cosine, Exponential, LevenbergMarquardt, Normal


def never(*_: object) -> None:
    raise AssertionError("nothing is to be computed")


@pytest.mark.parametrize(("warmup", "steps"), [(0, 7), (3, 7), (7, 7)])
def test_a_schedule_of_array_steps_is_that_of_numbers(library: Library, warmup: int, steps: int):
    """Steps may be traced, or several; past the end the rate stays."""
    numbers = np.arange(10.0)
    for schedule in (Cosine(0.5, steps, warmup, 0.1), Exponential(0.5, 0.9, 2)):
        found = library.numpy(schedule(library.array(numbers)))
        np.testing.assert_allclose(found, [schedule(int(step)) for step in numbers], rtol=1e-14)


_J, _TARGET = np.asarray([[1.0, 2.0], [3.0, 5.0], [2.0, 2.0]]), np.asarray([1.0, -1.0, 2.0])


@pytest.mark.parametrize("metric", ["identity", "diagonal"])
def test_normal_equations_give_the_step_of_their_jacobian(metric: str):
    """And residuals may come as the sum of their squares."""
    lm, x = LevenbergMarquardt(metric=metric, system="primal"), np.asarray([0.3, -0.2])

    def residuals(x: np.ndarray) -> np.ndarray:
        return _J @ x - _TARGET

    def normal(x: np.ndarray) -> Normal:
        return Normal(_J.T @ residuals(x), _J.T @ _J)

    def summed(x: np.ndarray) -> np.ndarray:
        return np.sum(residuals(x) ** 2)[()]

    want, state = lm.step(residuals, lambda x: (residuals(x), _J), x, lm.init(residuals, x))
    got, other = lm.step(summed, normal, x, lm.init(summed, x))
    assert not np.array_equal(want, x)
    np.testing.assert_allclose(got, want, rtol=1e-12)
    assert other.value == pytest.approx(state.value, rel=1e-12) and other.damping == state.damping


@pytest.mark.parametrize(
    "wrong", [Normal(np.ones(3), np.eye(2)), Normal(np.ones(2), np.eye(3)), Normal(np.ones(2), np.ones(2))]
)
def test_normal_equations_of_another_size(wrong: Normal):
    lm, x = LevenbergMarquardt(), np.zeros(2)
    state = lm.init(lambda x: x + 1, x)
    with pytest.raises(ShapeError, match=r"J\^T r has shape .* and x \(2,\)"):
        lm.step(never, lambda x: wrong, x, state)


def test_a_jacobian_that_is_not_finite_stops_at_the_last_place():
    lm, x = LevenbergMarquardt(), np.ones(2)
    state = lm.init(lambda x: x, x)
    found, after = lm.step(never, lambda x: (x, np.full((2, 2), np.nan)), x, state)
    assert found is x and after == state._replace(stopped="not finite")


def test_what_has_stopped_stays():
    x = np.ones(2)
    lm, lbfgs = LevenbergMarquardt(), LBFGS()
    ended = lm.init(lambda x: x, x)._replace(stopped="gradient")
    assert lm.step(never, never, x, ended) == (x, ended)
    found, over = lbfgs.step(never, x, lbfgs.init(lambda x: (0.0 * x[0], 0 * x), x))
    assert found is x and over.stopped == "gradient"
