"""Field reports F015 and F016: causality."""

from __future__ import annotations

import numpy as np
import pytest
from calls import FORMS, GENERIC, call, candidates, pull
from draws import G, M, bitwise

import scanfield

pytestmark = GENERIC


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", FORMS)
def test_f015_a_later_gate_changes_no_earlier_bit(library, method, dtype):
    if dtype == "bfloat16" and library.name != "torch":
        pytest.skip("the row names torch for bfloat16")
    drawn = G(19, 1, 22, 4, 128, 16)
    first = drawn.inputs("kda") | {"log_decay": np.random.default_rng(190).uniform(-5, 0, (1, 22, 4, 128))}
    second = first | {"log_decay": first["log_decay"].copy()}
    second["log_decay"][:, 21] = -5
    d_output = drawn.d_output.copy()
    d_output[:, 21] = 0

    outputs, gradients = [], []
    for inputs in (first, second):
        result, pulled = pull(library, "kda", inputs, d_output, None, dtype, method=method)
        outputs.append(library.raw(result.output))
        gradients.append({name: library.raw(x) for name, x in pulled.items()})
    bitwise(outputs[0][:, :21], outputs[1][:, :21])
    assert np.any(outputs[0][:, 21] != outputs[1][:, 21])
    for name in first:
        bitwise(gradients[0][name][:, :21], gradients[1][name][:, :21], name)
        assert np.all(gradients[0][name][:, 21] == 0) and np.all(gradients[1][name][:, 21] == 0), name


@pytest.mark.parametrize("operation", ["linear_scan", "selective_scan"])
def test_f016_a_nan_stays_in_its_channel_and_in_its_future(library, dtype, operation):
    if operation == "linear_scan":
        clean = {"a": np.full((1, 100, 3), 0.9), "b": np.random.default_rng(92).standard_normal((1, 100, 3))}
        struck = clean | {"b": clean["b"].copy()}
        struck["b"][0, 50, 1] = np.nan
    else:
        clean = M(92, 1, 100, 3, 2).inputs()
        struck = clean | {"u": clean["u"].copy()}
        struck["u"][0, 50, 1] = np.nan
    for method in candidates(operation, library.arrays(clean, dtype)):
        before = call(library, operation, clean, dtype, method=method)
        after = call(library, operation, struck, dtype, method=method)
        before_y, after_y = library.raw(before.output), library.raw(after.output)
        bitwise(after_y[:, :50], before_y[:, :50], method)
        bitwise(after_y[..., [0, 2]], before_y[..., [0, 2]], method)
        assert np.isnan(after_y[:, 50:, 1]).all(), method
        before_h, after_h = library.raw(before.final_state), library.raw(after.final_state)
        bitwise(after_h[:, [0, 2]], before_h[:, [0, 2]], method)
        assert np.isnan(after_h[:, 1]).all(), method
    assert scanfield.explain(getattr(scanfield, operation), **library.arrays(clean, dtype)).taken["forward"]
