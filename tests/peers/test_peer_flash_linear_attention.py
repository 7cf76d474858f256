"""flash-linear-attention's naive functions against ours, each loaded from its own file.

Their recurrent forms are safe in forward and gradients, and compute in float32 whatever they are given. Their chunk
forms take differences of summed decays, so they serve for mild gates, and those of the gated rules for the forward alone.
"""

from __future__ import annotations

import numpy as np
import pytest
from agreement import agree, positional
from loading import load_file

import scanfield

pytestmark = pytest.mark.backend("torch")
pytest.importorskip("torch", reason="flash-linear-attention's naive functions are PyTorch")
pytest.importorskip("einops", reason="flash-linear-attention's naive files import einops")

B, T, H, VH, K, V = 2, 29, 2, 4, 5, 3
FINAL = {"output_final_state": True}


def draw(
    seed: int, time: int = T, heads: int = H, vheads: int = H, decay: float = 1.0
) -> dict[str, np.ndarray]:
    """One array of every kind that a rule of the family takes; keys have unit norm, as in all these models."""
    r = np.random.default_rng(seed)
    key = r.standard_normal((B, time, heads, K))
    return {
        "query": r.standard_normal((B, time, heads, K)),
        "key": key / np.linalg.norm(key, axis=-1, keepdims=True),
        "value": r.standard_normal((B, time, vheads, V)),
        "log_decay": r.uniform(-decay, -0.01, (B, time, vheads, K)),
        "erase": r.uniform(0, 1, (B, time, vheads, K)),
        "write": r.uniform(0, 1, (B, time, vheads, V)),
        "beta": r.uniform(0, 1, (B, time, vheads)),
        "head_decay": r.uniform(-decay, -0.01, (B, time, vheads)),
        "erase_key": r.standard_normal((B, time, heads, K)) / np.sqrt(K),
        "initial_state": r.standard_normal((B, vheads, K, V)),
    }


def pick(drawn: dict[str, np.ndarray], *names: str, **renamed: str) -> dict[str, np.ndarray]:
    return {name: drawn[name] for name in names} | {ours: drawn[theirs] for ours, theirs in renamed.items()}


QKV = ("query", "key", "value")
GATES = ("log_decay", "erase", "write")


@pytest.mark.parametrize("decay", [1.0, 60.0])
def test_gdn2_recurrent(decay):
    peer = load_file("fla", "ops/gdn2/naive.py").naive_recurrent_gdn2
    inputs = pick(draw(1, decay=decay), *QKV, *GATES, "initial_state")
    agree(scanfield.gdn2, positional(peer, QKV + GATES, **FINAL), inputs)


def test_gdn2_recurrent_with_resets_and_a_given_scale():
    peer = load_file("fla", "ops/gdn2/naive.py").naive_recurrent_gdn2
    inputs = pick(draw(2), *QKV, *GATES, "initial_state")
    inputs["log_decay"][0, 11] = -np.inf
    inputs["log_decay"][1, 20, 1, :3] = -np.inf
    agree(scanfield.gdn2, positional(peer, QKV + GATES, scale=0.3, **FINAL), inputs, options={"scale": 0.3})


@pytest.mark.parametrize("time", [64, 77])
def test_gdn2_chunk_forward(time):
    peer = load_file("fla", "ops/gdn2/naive.py").naive_chunk_gdn2
    inputs = pick(draw(3, time=time, decay=0.2), *QKV, *GATES, "initial_state")
    agree(scanfield.gdn2, positional(peer, QKV + GATES, **FINAL), inputs, gradients=False)


def test_kda_recurrent_with_grouped_value_heads():
    peer = load_file("fla", "ops/kda/naive.py").naive_recurrent_kda
    inputs = pick(draw(4, vheads=VH), *QKV, "log_decay", "beta", "initial_state")
    agree(scanfield.kda, positional(peer, (*QKV, "log_decay", "beta"), **FINAL), inputs)


def test_kda_chunk_forward():
    peer = load_file("fla", "ops/kda/naive.py").naive_chunk_kda
    inputs = pick(draw(5, time=64, vheads=VH, decay=0.2), *QKV, "log_decay", "beta", "initial_state")
    agree(scanfield.kda, positional(peer, (*QKV, "log_decay", "beta"), **FINAL), inputs, gradients=False)


def test_gated_delta_rule_recurrent():
    """Their naive function takes beta before the gate, unlike their kernels."""
    peer = load_file("fla", "ops/gated_delta_rule/naive.py").naive_recurrent_gated_delta_rule
    inputs = pick(draw(6), *QKV, "beta", "initial_state", log_decay="head_decay")
    agree(scanfield.gated_delta_rule, positional(peer, (*QKV, "beta", "log_decay"), **FINAL), inputs)


def test_gated_delta_rule_chunk_forward():
    peer = load_file("fla", "ops/gated_delta_rule/naive.py").naive_chunk_gated_delta_rule
    inputs = pick(draw(7, time=70, decay=0.2), *QKV, "beta", "initial_state", log_decay="head_decay")
    order = (*QKV, "log_decay", "beta")
    agree(scanfield.gated_delta_rule, positional(peer, order, **FINAL), inputs, gradients=False)


def heads_first(function):
    """A peer that wants (batch, heads, time, ...): sequences are moved there and the output back."""

    def call(*sequences, **rest):
        output, state = function(*(x.transpose(1, 2) for x in sequences), **rest)
        return output.transpose(1, 2), state

    return call


def test_delta_rule_recurrent():
    peer = heads_first(load_file("fla", "ops/delta_rule/naive.py").delta_rule_recurrence)
    inputs = pick(draw(8), *QKV, "beta", "initial_state")
    agree(scanfield.delta_rule, positional(peer, (*QKV, "beta")), inputs)


def test_delta_rule_chunkwise_in_float64():
    """This chunk form has no decay to take differences of and stays in its inputs' dtype: a float64 peer."""
    chunkwise = load_file("fla", "ops/delta_rule/naive.py").delta_rule_chunkwise

    def peer(query, key, value, beta):
        return heads_first(chunkwise)(query, key, value, beta)

    inputs = pick(draw(9, time=96), *QKV, "beta")
    agree(scanfield.delta_rule, peer, inputs, peer_dtype="float64", tolerance=1e-12)


def test_comba_recurrent():
    peer = load_file("fla", "ops/comba/naive.py").naive_recurrent_comba
    inputs = pick(draw(10), *QKV, "erase_key", "beta", "initial_state", log_decay="head_decay")
    agree(scanfield.comba, positional(peer, (*QKV, "erase_key", "beta", "log_decay"), **FINAL), inputs)


def test_gla_recurrent():
    peer = load_file("fla", "ops/gla/naive.py").naive_recurrent_gla
    inputs = pick(draw(11), *QKV, "log_decay", "initial_state")
    agree(scanfield.gla, positional(peer, (*QKV, "log_decay"), **FINAL), inputs)


def test_simple_gla_recurrent_is_retention_with_given_decays():
    peer = load_file("fla", "ops/simple_gla/naive.py").naive_recurrent_simple_gla
    inputs = pick(draw(12), *QKV, "initial_state", log_decay="head_decay")
    agree(
        scanfield.retention,
        positional(peer, (*QKV, "log_decay"), scale=0.7, **FINAL),
        inputs,
        options={"scale": 0.7},
    )


def test_retention_with_its_default_decays():
    """Their parallel form; it has no final state, so ours is compared with that of the recurrent simple GLA."""
    import torch

    parallel = heads_first(
        lambda q, k, v: (load_file("fla", "ops/retention/naive.py").naive_retention(q, k, v), None)
    )
    recurrent = load_file("fla", "ops/simple_gla/naive.py").naive_recurrent_simple_gla

    def peer(query, key, value):
        output, _ = parallel(query, key, value)
        decay = torch.log1p(-torch.exp2(-5.0 - torch.arange(H, dtype=torch.float64))).to(query.dtype)
        _, state = recurrent(query, key, value, decay.expand(B, T, H), **FINAL)
        return output, state

    agree(scanfield.retention, peer, pick(draw(13), *QKV))


def test_linear_attention_recurrent():
    peer = load_file("fla", "ops/linear_attn/naive.py").naive_recurrent_linear_attn
    inputs = pick(draw(14), *QKV, "initial_state")
    agree(scanfield.linear_attention, positional(peer, QKV, **FINAL), inputs)


def test_linear_attention_chunk_in_float64():
    """Their chunk form returns the output alone; the state is that of the sum of outer products."""
    import torch

    chunk = load_file("fla", "ops/linear_attn/naive.py").naive_chunk_linear_attn

    def peer(query, key, value):
        return chunk(query, key, value), torch.einsum("bthk,bthv->bhkv", key, value)

    agree(
        scanfield.linear_attention,
        peer,
        pick(draw(15, time=128), *QKV),
        peer_dtype="float64",
        tolerance=1e-12,
    )


@pytest.mark.parametrize("gated", [True, False])
def test_gated_delta_product(gated):
    """Theirs holds the sub-steps of a token one after another along time, ours along an axis of their own.

    Without a decay the reflections keep every rounding error: a dozen tokens of three sub-steps are enough.
    """
    peer_function = load_file("fla", "ops/gated_delta_product/naive.py").naive_recurrent_gated_delta_product
    householders, time = 3, 12
    r = np.random.default_rng(16)
    key = r.standard_normal((B, time, householders, H, K))
    inputs = {
        "query": r.standard_normal((B, time, H, K)),
        "key": key / np.linalg.norm(key, axis=-1, keepdims=True),
        "value": r.standard_normal((B, time, householders, H, V)),
        "beta": r.uniform(0, 2, (B, time, householders, H)),
        "initial_state": r.standard_normal((B, H, K, V)),
    }
    if gated:
        inputs["log_decay"] = r.uniform(-1, -0.01, (B, time, H))

    def peer(query, key, value, beta, initial_state, log_decay=None):
        key, value, beta = (x.flatten(1, 2) for x in (key, value, beta))
        return peer_function(
            query, key, value, log_decay, beta, K**-0.5,
            initial_state=initial_state, output_final_state=True, num_householder=householders,
        )  # fmt: skip

    options = {} if gated else {"log_decay": None}
    agree(scanfield.gated_delta_product, peer, inputs, options=options)


def test_gdn2_is_the_diagonal_plus_low_rank_rule_with_a_tied_left_vector():
    """S_t = Diag(exp g) S + k (alpha^T S) with alpha = -exp(g) * erase * key, plus k (write * value)^T."""
    recurrence = heads_first(load_file("fla", "ops/generalized_delta_rule/dplr/naive.py").dplr_recurrence)

    def peer(query, key, value, log_decay, erase, write, initial_state):
        alpha = -log_decay.exp() * erase * key
        return recurrence(query, key, write * value, alpha, key, log_decay, initial_state=initial_state)

    agree(scanfield.gdn2, peer, pick(draw(17), *QKV, *GATES, "initial_state"))
