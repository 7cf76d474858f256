"""Scans in fifty digits by mparray: the generic code keeps them all, and float64 is off by rounding alone."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import scanfield

sys.path.insert(0, str(Path(__file__).parent))
import example_files  # (needs the line above)

pytest.importorskip("mparray", reason="mparray is not installed")
from mpmath import mp, mpf

example = example_files.load("arbitrary_precision")
TIME = 6


def test_all_fifty_digits_are_right():
    """Against a loop over mpmath's numbers, written from the recurrence."""
    arrays = example.draw("gdn2", TIME)
    found = example.exact("gdn2", arrays, digits=50)
    with mp.workdps(60):
        given = {name: values.astype(object) + mpf(0) for name, values in arrays.items()}
        S = np.full((1, 2, 3, 4), mpf(0), dtype=object)
        for t in range(TIME):
            decay = np.vectorize(mp.exp, otypes=[object])(given["log_decay"][:, t])
            S = decay[..., None] * S
            erase = given["erase"][:, t] * given["key"][:, t]
            old = (erase[..., None] * S).sum(axis=2)
            new = given["write"][:, t] * given["value"][:, t]
            S = S + given["key"][:, t][..., None] * (new - old)[:, :, None, :]
            output = (given["query"][:, t][..., None] * S).sum(axis=2) / mp.sqrt(3)
        assert max(abs(found["final_state"] - S).ravel()) < mpf(10) ** -47
        # K^-1/2 is a float64 number in scanfield, and so is right to 16 digits only.
        assert max(abs(found["output"][:, -1] - output).ravel()) < mpf(10) ** -14
        assert (
            0 < max(abs(S.astype(float).astype(object) - S).ravel()) < mpf(10) ** -14
        )  # what a float64 can hold


@pytest.mark.parametrize("operation", ["linear_scan", "selective_scan", "gdn2"])
def test_float64_is_wrong_by_rounding_alone(operation):
    found = example.errors(operation, TIME, digits=40)
    assert "generic.recurrent" in found
    for method, by_array in found.items():
        assert {"output", "final_state"} < set(by_array)
        assert max(by_array.values()) < 1e-14, (method, by_array)
        assert max(by_array.values()) > 0, method  # fifty digits are not float64's


def test_a_fault_is_seen():
    arrays = example.draw("linear_scan", TIME)
    truth = example.exact("linear_scan", arrays, digits=30)["output"]
    wrong = scanfield.linear_scan(arrays["a"], arrays["b"] * (1 + 1e-13)).output
    assert 1e-14 < max(abs(truth - wrong.astype(object)).ravel()) < 1e-11
