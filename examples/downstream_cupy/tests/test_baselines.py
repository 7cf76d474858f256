"""Baselines against a loop that says what they mean, block by block and sample by sample; the fit against a search."""

from __future__ import annotations

import math

import baselines
import cupy as cp
import numpy as np
import pytest

import scanfield


def host(*shape: int) -> np.ndarray:
    return np.random.default_rng(3).normal(size=shape).cumsum(axis=1)


def loop(x: np.ndarray, tau: float) -> np.ndarray:
    keep = math.exp(-1 / tau)
    level, rest = x[:, 0], np.empty_like(x)
    for t in range(x.shape[1]):
        level = keep * level + (1 - keep) * x[:, t]
        rest[:, t] = x[:, t] - level
    return rest


def test_blocks_and_samples_are_the_loop():
    x = host(2, 41, 3)
    baseline = baselines.Baseline(tau=7.0)
    parts = [baseline.remove(cp.asarray(x[:, :17])), baseline.remove(cp.asarray(x[:, 17:40]))]
    last = baseline.push(cp.asarray(x[:, 40]))
    assert all(isinstance(part, cp.ndarray) for part in (*parts, last, baseline.state))
    ours = np.concatenate([*map(cp.asnumpy, parts), cp.asnumpy(last)[:, None]], axis=1)
    np.testing.assert_allclose(ours, loop(x, 7.0), rtol=1e-12, atol=1e-12)


def test_the_kernels_run_it():
    x = cp.asarray(host(1, 20, 2))
    told = scanfield.explain(scanfield.linear_scan, cp.full((1, 1, 1), 0.5), x)
    assert set(told.taken.values()) == {"cupy.rawkernel"}, told


def test_float32_stays_float32():
    rest = baselines.Baseline(tau=3.0).remove(cp.asarray(host(1, 9, 2), dtype=cp.float32))
    assert rest.dtype == cp.float32


def test_fit_finds_the_best_tau():
    walk = host(1, 300, 1)
    x = walk + np.random.default_rng(4).normal(scale=2.0, size=walk.shape)

    def error(tau: float) -> float:
        level = x - loop(x, tau)
        return float(np.mean((level[:, :-1] - x[:, 1:]) ** 2))

    best = min(np.geomspace(0.5, 30, 2000), key=error)
    assert baselines.fit_tau(cp.asarray(x)) == pytest.approx(best, rel=5e-3)


@pytest.mark.parametrize("tau", [0.0, -1.0, math.nan])
def test_a_tau_that_is_none_is_refused(tau):
    with pytest.raises(ValueError, match="tau"):
        baselines.Baseline(tau)


def test_arrays_of_the_host_and_other_shapes_are_refused():
    with pytest.raises(ValueError, match="channels"):
        baselines.Baseline(2.0).remove(cp.asarray(host(2, 5)))
    with pytest.raises(ValueError, match="three samples"):
        baselines.fit_tau(cp.asarray(host(1, 2, 1)))
    with pytest.raises(TypeError):  # CuPy and scanfield both copy nothing unasked
        baselines.Baseline(2.0).remove(host(1, 5, 2))
