"""SciPy's `lfilter` against the linear scan: with one constant coefficient a scan is a first-order recursive filter."""

from __future__ import annotations

import arrays
import numpy as np
import pytest

import scanfield

signal = pytest.importorskip("scipy.signal", reason="the peer scipy is not installed")


@pytest.mark.parametrize("coefficient", [0.9, -0.7, 1.0, 1.01, 0.0])
@pytest.mark.parametrize("reverse", [False, True])
def test_linear_scan_is_a_first_order_filter(coefficient, reverse):
    r = np.random.default_rng(50)
    b, start = r.standard_normal((2, 211, 3)), r.standard_normal((2, 3))
    ordered = b[:, ::-1] if reverse else b
    # lfilter's state is what it adds to the next output: the coefficient times the last value.
    output, pending = signal.lfilter(
        [1.0], [1.0, -coefficient], ordered, axis=1, zi=coefficient * start[:, None]
    )
    a = np.full((1, 1, 1), coefficient)
    ours = scanfield.linear_scan(a, b, start, reverse=reverse)
    output = output[:, ::-1] if reverse else output
    assert arrays.deviation(ours.output, output) <= 1e-12
    last = ours.output[:, 0 if reverse else -1]
    assert arrays.deviation(ours.final_state, last) == 0
    assert arrays.deviation(coefficient * ours.final_state, pending[:, 0], floor=1e-300) <= 1e-12


def test_the_gradient_of_b_is_the_filter_run_backwards():
    r = np.random.default_rng(51)
    b, d_output = r.standard_normal((1, 130, 2)), r.standard_normal((1, 130, 2))
    a = np.full((1, 1, 1), 0.8)
    _, pullback = scanfield.vjp(scanfield.linear_scan, a, b)
    adjoint = signal.lfilter([1.0], [1.0, -0.8], d_output[:, ::-1], axis=1)[:, ::-1]
    assert arrays.deviation(pullback(d_output)["b"], adjoint) <= 1e-12


def test_complex_coefficients():
    r = np.random.default_rng(52)
    b = r.standard_normal((1, 90, 2)) + 1j * r.standard_normal((1, 90, 2))
    coefficient = 0.95 * np.exp(0.4j)
    output = signal.lfilter([1.0], [1.0, -coefficient], b, axis=1)
    ours = scanfield.linear_scan(np.full((1, 1, 1), coefficient), b)
    assert arrays.deviation(ours.output, output) <= 1e-12
