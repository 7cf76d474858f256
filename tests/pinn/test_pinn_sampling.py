"""Points of the unit cube: where they lie, what the seed decides, and what stays untouched."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from scanfield.errors import ArgumentError, BackendError, ShapeError
from scanfield.pinn.sampling import RULES, unit_points, weighted_choice


@pytest.mark.parametrize("rule", RULES)
def test_points_lie_in_the_cube_and_follow_the_seed(rule):
    before = np.random.get_state()[1].copy()  # noqa: NPY002 (the global generator must not move)
    for count, d in ((1, 1), (16, 2), (27, 3), (37, 2)):
        x = unit_points(count, d, rule, seed=5)
        assert x.shape == (count, d) and x.dtype == np.float64
        assert np.all((x >= 0) & (x < 1))
        np.testing.assert_array_equal(x, unit_points(count, d, rule, seed=5))
        if rule != "grid":
            assert not np.array_equal(x, unit_points(count, d, rule, seed=6))
            assert not np.array_equal(x, unit_points(count, d, rule, seed=(5, 1)))
    np.testing.assert_array_equal(before, np.random.get_state()[1])  # noqa: NPY002


def test_each_rule_fills_as_it_promises():
    """One Latin point in each of n strata; Sobol' one in each elementary interval; a grid's centres."""
    x = unit_points(20, 2, "latin", seed=1)
    for axis in (0, 1):
        np.testing.assert_array_equal(np.sort(np.floor(20 * x[:, axis])), np.arange(20))
    x = unit_points(16, 2, "sobol", seed=1)
    cells = np.floor(4 * x[:, 0]) * 4 + np.floor(4 * x[:, 1])
    np.testing.assert_array_equal(np.sort(cells), np.arange(16))
    np.testing.assert_allclose(unit_points(9, 2, "grid")[:, 1], [1 / 6, 0.5, 5 / 6] * 3)


def test_the_adaptive_rule_prefers_large_residuals():
    residual = np.ones(1000)
    residual[:100] = 50.0
    chosen = weighted_choice(residual, 200, seed=0)
    assert len(set(chosen.tolist())) == 200
    assert np.sum(chosen < 100) > 60  # 20 by chance
    np.testing.assert_array_equal(chosen, weighted_choice(residual, 200, seed=0))
    assert weighted_choice(np.zeros(10), 10, seed=0).shape == (10,)


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.stats.qmc", None)
    with pytest.raises(BackendError, match=r"needs scipy.*scanfield\[pinn\]"):
        unit_points(4, 2, "sobol")
    assert unit_points(4, 2, "uniform").shape == (4, 2)


def test_bad_input_is_named():
    with pytest.raises(ArgumentError, match="sampling = 'halton'"):
        unit_points(4, 2, "halton")
    with pytest.raises(ArgumentError, match="points = 0"):
        unit_points(0, 2)
    with pytest.raises(ArgumentError, match="seed = -1"):
        unit_points(4, 2, "uniform", seed=-1)
    with pytest.raises(ShapeError, match="at least 5"):
        weighted_choice(np.ones(4), 5, seed=0)
