"""The demo's model: its smoothing, its gradients, and that no forecast sees what comes after it."""

from __future__ import annotations

import numpy as np
import pytest

from scanfield.cli import demo


def _record(months: int, seed: int = 0) -> np.ndarray:
    """A series with growth, a season and noise."""
    rng = np.random.default_rng(seed)
    t = np.arange(months)
    return 300 + 0.1 * t + 3 * np.sin(2 * np.pi * t / 12) + 0.2 * rng.normal(size=months)


def test_smoothing_is_the_recurrence():
    values = _record(50)
    level, expected = values[0], []
    for value in values:
        level = 0.9 * level + 0.1 * value
        expected.append(level)
    np.testing.assert_allclose(demo.smoothing(values, 0.1), expected, rtol=1e-14)


def test_the_models_gradients_are_exact():
    rng = np.random.default_rng(1)
    features, target = rng.normal(size=(1, 20, 2)), rng.normal(size=20)
    params = demo.initial_params(2)
    _, gradients = demo.loss_and_gradients(params, features, target)
    assert gradients.keys() == params.keys()
    step = 1e-5
    for name, values in params.items():
        direction = rng.normal(size=values.shape)
        ends = [
            demo.loss_and_gradients(params | {name: values + sign * step * direction}, features, target)[0]
            for sign in (1, -1)
        ]
        assert gradients[name].shape == values.shape
        slope = float(np.sum(gradients[name] * direction))
        assert slope == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-6, abs=1e-8)


def test_no_forecast_sees_its_future():
    """Other measurements in the last 20 %: what is learnt stays, and forecasts made before them."""
    months = _record(200)
    changed = months.copy()
    changed[160:] += 5.0
    first, second = demo.forecast(months, updates=3), demo.forecast(changed, updates=3)
    for method in first.by_method:
        np.testing.assert_array_equal(first.by_method[method][:160], second.by_method[method][:160])
        assert not np.array_equal(first.by_method[method][160:], second.by_method[method][160:])


def test_training_learns_a_season():
    """A season and a growth that persistence and smoothing both miss."""
    forecasts = demo.forecast(_record(240), updates=150)
    assert forecasts.model_wins
    assert forecasts.error("selective scan", held_out=True) < 0.5 * forecasts.error(
        "persistence", held_out=True
    )
    assert "selective scan" in forecasts.table()
