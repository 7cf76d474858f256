"""Slow baselines of many detector channels on a card, (batch, time, channels): one linear scan each.

Everything that comes in and goes out is a CuPy array on one device, and nothing is copied to the host but the number that
`fit_tau` looks for.
"""

from __future__ import annotations

import math

import cupy as cp

import scanfield

__all__ = ["Baseline", "fit_tau"]


class Baseline:
    """A baseline that follows with a time constant of `tau` samples, carried from block to block.

    `remove(block)` returns the block (batch, time, channels) without its baseline, `push(sample)` one sample (batch,
    channels). The first sample that ever comes is the first baseline.
    """

    def __init__(self, tau: float) -> None:
        if not tau > 0:
            raise ValueError(f"tau is {tau}; a time constant above 0 is expected")
        self.keep = math.exp(-1 / tau)
        self.state: cp.ndarray | None = None

    def remove(self, block: cp.ndarray) -> cp.ndarray:
        """The block without its baseline, in its own dtype."""
        if block.ndim != 3:
            raise ValueError(f"a block of shape {block.shape}; (batch, time, channels) is expected")
        keep, start = self._of(block, (1, 1, 1)), self._start(block[:, 0])
        level, self.state = scanfield.linear_scan(keep, (1 - self.keep) * block, start)
        return block - level

    def push(self, sample: cp.ndarray) -> cp.ndarray:
        """One sample without its baseline."""
        keep, start = self._of(sample, (1, 1)), self._start(sample)
        level, self.state = scanfield.linear_scan.step(start, keep, (1 - self.keep) * sample)
        return sample - level

    def _of(self, like: cp.ndarray, shape: tuple[int, ...]) -> cp.ndarray:
        return cp.full(shape, self.keep, dtype=like.dtype)

    def _start(self, first: cp.ndarray) -> cp.ndarray:
        return first if self.state is None else self.state


def fit_tau(series: cp.ndarray, steps: int = 30) -> float:
    """The time constant whose baseline predicts the next sample best, in squared error; series is (batch, time, channels).

    Newton's steps on log(tau), with the slope from `scanfield.vjp` and the curvature from the change of the slope.
    """
    if series.ndim != 3 or series.shape[1] < 3:
        raise ValueError(
            f"a series of shape {series.shape}; (batch, time, channels), three samples or more, is expected"
        )
    log_tau, before, slope_before = math.log(5.0), None, 0.0
    for _ in range(steps):
        slope = _slope(series, log_tau)
        if before is None:
            step = -math.copysign(0.2, slope)
        else:
            curvature = (slope - slope_before) / (log_tau - before)
            step = -slope / curvature if curvature > 0 else -math.copysign(0.5, slope)
        before, slope_before = log_tau, slope
        log_tau += min(max(step, -0.5), 0.5)
        if abs(log_tau - before) < 1e-7:
            break
    return math.exp(log_tau)


def _slope(series: cp.ndarray, log_tau: float) -> float:
    """How the mean squared error of the prediction moves with log(tau)."""
    keep = math.exp(-math.exp(-log_tau))
    gate = cp.full((1, 1, 1), keep, dtype=series.dtype)
    result, pullback = scanfield.vjp(scanfield.linear_scan, gate, (1 - keep) * series, series[:, 0])
    error = result.output[:, :-1] - series[:, 1:]
    cotangent = cp.concatenate([2 * error / error.size, cp.zeros_like(series[:, :1])], axis=1)
    gradients = pullback(d_output=cotangent)
    d_keep = float(gradients["a"].sum()) - float((gradients["b"] * series).sum())
    return d_keep * keep * math.exp(-log_tau)  # keep = exp(-1 / tau)
