"""ONNX's reference operator LinearAttention (NumPy, sequential, float32) against the rules it can express.

Heads lie packed in the last axis there, the decay is in natural-log space, and the state is (batch, heads, K, V). It has no
separate erase gate, so gdn2 itself is beyond it.
"""

from __future__ import annotations

import arrays
import numpy as np
import pytest

import scanfield

reference = pytest.importorskip(
    "onnx.reference.ops.op_linear_attention", reason="the peer onnx (1.21 or later) is not installed"
)

BATCH, TIME, HEADS, K, V = 2, 41, 3, 5, 4


def packed(x: np.ndarray) -> np.ndarray:
    return x.reshape(*x.shape[:2], -1)


# the operator's rule -> our operation and the gates that it takes beside query, key and value
RULES = {
    "linear": (scanfield.linear_attention, ()),
    "gated": (scanfield.gla, ("log_decay",)),
    "delta": (scanfield.delta_rule, ("beta",)),
    "gated_delta": (scanfield.kda, ("log_decay", "beta")),
    "gated_delta, one decay a head": (scanfield.gated_delta_rule, ("head_decay", "beta")),
    "gated, one decay a head": (scanfield.retention, ("head_decay",)),
}


def draw() -> dict[str, np.ndarray]:
    r = np.random.default_rng(40)
    key = r.standard_normal((BATCH, TIME, HEADS, K))
    drawn = {
        "query": r.standard_normal((BATCH, TIME, HEADS, K)),
        "key": key / np.linalg.norm(key, axis=-1, keepdims=True),
        "value": r.standard_normal((BATCH, TIME, HEADS, V)),
        "log_decay": r.uniform(-1, -0.05, (BATCH, TIME, HEADS, K)),
        "head_decay": r.uniform(-1, -0.05, (BATCH, TIME, HEADS)),
        "beta": r.uniform(0, 1, (BATCH, TIME, HEADS)),
        "state": r.standard_normal((BATCH, HEADS, K, V)),
    }
    return {name: x.astype(np.float32) for name, x in drawn.items()}


@pytest.mark.parametrize("scale", [None, 0.4])
@pytest.mark.parametrize("rule", RULES)
def test_linear_attention_operator(rule, scale):
    operation, gates = RULES[rule]
    drawn = draw()
    inputs = {name: drawn[name] for name in ("query", "key", "value")}
    inputs |= {gate.replace("head_decay", "log_decay"): drawn[gate] for gate in gates}
    operator = object.__new__(reference.LinearAttention)  # the computation needs no graph node
    output, final = operator._run(
        *(packed(inputs[name]) for name in ("query", "key", "value")),
        past_state=drawn["state"],
        decay=packed(inputs["log_decay"]) if "log_decay" in inputs else None,
        beta=inputs.get("beta"),
        kv_num_heads=HEADS,
        q_num_heads=HEADS,
        scale=scale,
        update_rule=rule.partition(",")[0],
    )
    output = output.reshape(inputs["value"].shape)
    for dtype in (np.float64, np.float32):
        given = {name: x.astype(dtype) for name, x in inputs.items()}
        ours = operation(**given, initial_state=drawn["state"].astype(dtype), scale=scale)
        assert arrays.deviation(ours.output, output) <= 1e-6
        assert arrays.deviation(ours.final_state, final) <= 1e-6
