"""The two filters against loops that say what they mean, and the fit against a search."""

from __future__ import annotations

import numpy as np
import pytest

import smoothing


def series(*shape: int) -> np.ndarray:
    return np.random.default_rng(7).normal(size=shape).cumsum(axis=-1)


@pytest.mark.parametrize("shape", [(1,), (50,), (3, 50), (2, 3, 50)])
@pytest.mark.parametrize("alpha", [0.05, 0.5, 1.0])
def test_exponential_is_its_loop(shape, alpha):
    x = series(*shape)
    expected = x.copy()
    for t in range(1, x.shape[-1]):
        expected[..., t] = (1 - alpha) * expected[..., t - 1] + alpha * x[..., t]
    np.testing.assert_allclose(smoothing.exponential(x, alpha), expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("a", [-0.9, 0.0, 0.7])
def test_first_order_is_its_loop(a):
    x, b = series(2, 40), (0.3, -0.2)
    expected = np.zeros_like(x)
    for t in range(x.shape[-1]):
        before = (x[:, t - 1], expected[:, t - 1]) if t else (0.0, 0.0)
        expected[:, t] = b[0] * x[:, t] + b[1] * before[0] - a * before[1]
    np.testing.assert_allclose(smoothing.first_order(x, b, a), expected, rtol=1e-13, atol=1e-13)


def test_fit_finds_the_best_alpha():
    x = series(400) + np.random.default_rng(8).normal(scale=2.0, size=400)

    def error(alpha: float) -> float:
        return float(np.sum((smoothing.exponential(x, alpha)[:-1] - x[1:]) ** 2))

    best = min(np.linspace(0.01, 1, 991), key=error)
    assert smoothing.fit_alpha(x) == pytest.approx(best, abs=2e-3)


def test_floats_keep_their_width_and_integers_become_floats():
    assert smoothing.exponential(np.ones(4, np.float32), 0.5).dtype == np.float32
    assert smoothing.exponential(np.arange(4), 0.5).dtype == np.float64


def test_the_input_is_left_alone():
    x = series(20)
    x.flags.writeable = False
    smoothing.exponential(x, 0.5)
    smoothing.first_order(x, (1.0, 1.0), 0.5)


@pytest.mark.parametrize("alpha", [0.0, -1.0, 1.5])
def test_alpha_outside_its_range_is_refused(alpha):
    with pytest.raises(ValueError, match="alpha"):
        smoothing.exponential(series(5), alpha)


def test_an_empty_series_is_refused():
    with pytest.raises(ValueError, match="no time steps"):
        smoothing.exponential(np.zeros((2, 0)), 0.5)
