"""What the derived operations are to each other: identities between papers, and the defaults that a paper fixes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from arrays import Library, deviation
from checks import call
from examples import DELTA_FAMILY, Example, family_inputs

import scanfield


def leave_out(backend: str, test: str, given: dict[str, Any]) -> bool:
    return backend in ("jax", "dask") and test not in (
        "test_retention_s_decays",
        "test_ssd_is_a_selective_scan",
    )


def equal(library: Library, left: Any, right: Any) -> None:
    for x, y in zip(left, right, strict=True):
        assert deviation(library.numpy(x), library.numpy(y)) <= 1e-13


def test_retention_s_decays(library: Library):
    """gamma = 1 - 2^(-5-h) for value head h = 0, 1, ..., far enough that a table of a few would be seen."""
    inputs = family_inputs("retention", "retention decays", batch=1, time=3, heads=3, vheads=12, K=2, V=5)
    del inputs["log_decay"]
    e = Example("retention decays", "retention", inputs)
    got = call(library, "retention", inputs)
    assert deviation(library.numpy(got.output), e.truth().output) <= 1e-14
    # The state of zero tokens decays alone, so its heads show the decays themselves.
    ones = np.ones((1, 12, 1, 1))
    empty = {
        "query": np.zeros((1, 1, 12, 1)),
        "key": np.zeros((1, 1, 12, 1)),
        "value": np.zeros((1, 1, 12, 1)),
    }
    gamma = library.numpy(call(library, "retention", {**empty, "initial_state": ones}).final_state).ravel()
    assert np.max(np.abs(gamma - (1 - 0.5 ** np.arange(5, 17)))) <= 1e-15


def test_retention_of_a_decay_a_head(library: Library):
    """(heads,) and the same written out for every token are one."""
    inputs = family_inputs("retention", "retention per head", heads=1, vheads=3)
    per_head = inputs["log_decay"][0, 0]
    written = np.broadcast_to(per_head, inputs["log_decay"].shape)
    equal(
        library,
        call(library, "retention", {**inputs, "log_decay": per_head}),
        call(library, "retention", {**inputs, "log_decay": written}),
    )


def test_the_delta_rules_are_one_family(library: Library):
    """kda with one decay a head is the gated delta rule; without decay that is the delta rule."""
    inputs = family_inputs("kda", "one family", heads=2, vheads=4)
    decay = inputs["log_decay"][..., 0]
    channel = np.broadcast_to(decay[..., None], inputs["log_decay"].shape)
    gated = call(library, "gated_delta_rule", {**inputs, "log_decay": decay})
    equal(library, call(library, "kda", {**inputs, "log_decay": channel}), gated)
    none = {n: x for n, x in inputs.items() if n != "log_decay"}
    zero = call(library, "gated_delta_rule", {**inputs, "log_decay": decay * 0})
    equal(library, call(library, "delta_rule", none), zero)


def test_comba_with_the_key_as_erase_key(library: Library):
    inputs = family_inputs("comba", "comba key", heads=2, vheads=4)
    inputs["erase_key"] = inputs["key"]
    rest = {n: x for n, x in inputs.items() if n != "erase_key"}
    equal(library, call(library, "comba", inputs), call(library, "gated_delta_rule", rest))


def test_a_product_of_one_is_the_gated_delta_rule(library: Library):
    inputs = family_inputs("gated_delta_product", "product one", heads=2, vheads=4, householders=1)
    flat = {n: x[:, :, 0] if n in ("key", "value", "beta") else x for n, x in inputs.items()}
    equal(library, call(library, "gated_delta_product", inputs), call(library, "gated_delta_rule", flat))


def test_linear_attention_is_retention_without_decay(library: Library):
    inputs = family_inputs("linear_attention", "no decay", heads=2, vheads=4)
    zeros = np.zeros(4)
    equal(
        library,
        call(library, "linear_attention", inputs),
        call(library, "retention", {**inputs, "log_decay": zeros}),
    )


def test_ssd_is_a_selective_scan(library: Library):
    """Each of the H * P channels with its head's step and decay, the groups those of the heads."""
    x = family_inputs("ssd", "ssd selective", time=library.time(5), heads=2, vheads=4, K=3, V=5)
    B, T, H, P = x["x"].shape
    repeated = {
        "u": x["x"].reshape(B, T, H * P),
        "delta": np.repeat(x["dt"], P, axis=2),
        "A": np.broadcast_to(np.repeat(x["A"], P)[:, None], (H * P, 3)),
        "B": x["B"],
        "C": x["C"],
        "D": np.repeat(x["D"], P),
        "delta_bias": np.repeat(x["dt_bias"], P),
        "initial_state": x["initial_state"].reshape(B, H * P, 3),
    }
    ssd = call(library, "ssd", x, dt_softplus=True)
    mamba = call(library, "selective_scan", repeated, delta_softplus=True)
    assert deviation(library.numpy(ssd.output).reshape(B, T, H * P), library.numpy(mamba.output)) <= 1e-13
    assert (
        deviation(library.numpy(ssd.final_state).reshape(B, H * P, 3), library.numpy(mamba.final_state))
        <= 1e-13
    )


@pytest.mark.parametrize("op", [op for op in DELTA_FAMILY if op != "ssd"])
def test_identity_columns(library: Library, op: str):
    """Values of zero beside an initial state [0 | I] return the block's map: what `summarise` says it is."""
    K, V = 3, 4
    inputs = family_inputs(op, f"{op} columns", heads=2, vheads=4, K=K, V=V)
    axis_v = inputs["value"].ndim - 1
    pad = [(0, 0)] * axis_v + [(0, K)]
    wider = {**inputs, "value": np.pad(inputs["value"], pad)}
    if "write" in inputs:
        wider["write"] = np.pad(inputs["write"], pad, constant_values=1.0)
    eye = np.broadcast_to(np.eye(K), (2, 4, K, K))
    wider["initial_state"] = np.concatenate([np.zeros((2, 4, K, V)), eye], axis=-1)
    state = library.numpy(call(library, op, wider).final_state)
    rest = {n: x for n, x in library.arrays(inputs).items() if n != "initial_state"}
    block = scanfield.summarise(getattr(scanfield, op), **rest)
    M = library.numpy(block.transition)
    M = M * np.eye(K) if block.diagonal else M
    assert deviation(state[..., :V], library.numpy(block.state)) <= 1e-13
    assert deviation(state[..., V:], M) <= 1e-13
