"""Smoothing and filtering of NumPy series by linear recurrences.

Time is the last axis; every axis before it holds independent series.
"""

from __future__ import annotations

import math

import numpy as np

import scanfield

__all__ = ["exponential", "first_order", "fit_alpha"]


def exponential(series: np.ndarray, alpha: float) -> np.ndarray:
    """Exponential smoothing: y[0] = x[0], y[t] = (1 - alpha) y[t-1] + alpha x[t].

    >>> exponential(np.array([1.0, 3.0, 3.0]), alpha=0.5)
    array([1. , 2. , 2.5])
    """
    if not 0 < alpha <= 1:
        raise ValueError(f"alpha is {alpha}; it must lie in (0, 1]")
    x, rows = _rows(series)
    # A state of x[0] before the first step leaves y[0] = x[0].
    result = scanfield.linear_scan(np.full((1, 1), 1 - alpha, x.dtype), alpha * rows, rows[:, 0])
    return result.output.reshape(x.shape)


def first_order(series: np.ndarray, b: tuple[float, float], a: float) -> np.ndarray:
    """The recursive filter y[t] = b[0] x[t] + b[1] x[t-1] - a y[t-1], at rest before the first step.

    >>> first_order(np.array([1.0, 0.0, 0.0]), b=(1.0, 0.0), a=-0.5)
    array([1.  , 0.5 , 0.25])
    """
    x, rows = _rows(series)
    driven = b[0] * rows
    driven[:, 1:] += b[1] * rows[:, :-1]
    return scanfield.linear_scan(np.full((1, 1), -a, x.dtype), driven).output.reshape(x.shape)


def fit_alpha(series: np.ndarray, steps: int = 50) -> float:
    """The alpha of `exponential` that predicts the next value best, in squared error.

    Gauss-Newton steps on log(alpha / (1 - alpha)), which keep alpha inside its range.
    """
    _, rows = _rows(series)
    if rows.shape[1] < 3:
        raise ValueError(f"a series of {rows.shape[1]} values is too short to fit; give 3 or more")
    logit = 0.0
    for _ in range(steps):
        alpha = 1 / (1 + math.exp(-logit))
        decay = np.full((1, 1), 1 - alpha, rows.dtype)
        level, pullback = scanfield.vjp(scanfield.linear_scan, decay, alpha * rows, rows[:, 0])
        error = np.zeros_like(rows)
        error[:, :-1] = level.output[:, :-1] - rows[:, 1:]
        gradients = pullback(error)
        slope = np.sum(gradients["b"] * rows) - np.sum(gradients["a"])
        # How the smoothed series moves with alpha is the same recurrence, driven by x[t] - y[t-1].
        before = np.concatenate([rows[:, :1], level.output[:, :-1]], axis=1)
        change = scanfield.linear_scan(decay, rows - before).output[:, :-1]
        curvature = np.sum(change * change) * alpha * (1 - alpha)
        step = slope / (curvature + 1e-12)
        logit = min(max(logit - min(max(float(step), -1.0), 1.0), -8.0), 8.0)
        if abs(step) < 1e-10:
            break
    return 1 / (1 + math.exp(-logit))


def _rows(series: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The series as floats, and the same as (series, time)."""
    x = np.asarray(series)
    if x.dtype.kind != "f":
        x = x.astype(np.float64)
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"a series of shape {x.shape} has no time steps")
    return x, x.reshape(-1, x.shape[-1])
