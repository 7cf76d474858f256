"""The quick gradients that the field rows compare with are those of the recurrences themselves."""

from __future__ import annotations

import arrays
import numpy as np
import pytest
import reference
from calls import truth_vjp
from draws import G


@pytest.mark.parametrize("operation", ["kda", "gated_delta_rule", "delta_rule", "gla"])
def test_tied_gates(operation):
    drawn = G(900, 1, 3, 2, 2, 3)
    inputs = drawn.inputs(operation) | {"initial_state": drawn.state}
    quick = truth_vjp(operation, inputs, drawn.d_output, drawn.d_state)
    slow = reference.numeric_vjp(operation, inputs, drawn.d_output, drawn.d_state)
    assert set(quick) == set(slow)
    assert max(arrays.deviation(quick[name], slow[name]) for name in slow) < 1e-11


def test_state_space_dual():
    r = np.random.default_rng(901)
    inputs = {
        "x": r.standard_normal((1, 3, 4, 2)),
        "dt": r.uniform(0.1, 0.5, (1, 3, 4)),
        "A": -r.uniform(0.5, 2, 4),
        "B": r.standard_normal((1, 3, 2, 3)),
        "C": r.standard_normal((1, 3, 2, 3)),
    }
    d_output, d_state = r.standard_normal((1, 3, 4, 2)), r.standard_normal((1, 4, 2, 3))
    quick = truth_vjp("ssd", inputs, d_output, d_state)
    slow = reference.numeric_vjp("ssd", inputs, d_output, d_state)
    assert set(quick) == set(slow)
    assert max(arrays.deviation(quick[name], slow[name]) for name in slow) < 1e-11
