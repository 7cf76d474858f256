"""GatedDeltaNet2 against its equations in plain NumPy and the token-by-token reference of the recurrence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import reference
from arrays import Library, deviation

from scanfield.layers import GatedDeltaNet2, GatedDeltaNet2Config

HIDDEN, HEADS, K = 5, 2, 3
CONFIGS = {
    "paper": GatedDeltaNet2Config(HEADS, K, output_gate="silu"),
    "grouped values": GatedDeltaNet2Config(
        HEADS, K, value_heads=4, value_width=2, allow_neg_eigval=True, conv_bias=True
    ),
    "scalar gates": GatedDeltaNet2Config(
        HEADS, K, value_heads=4, erase="scalar", write="scalar", decay="scalar", output_scale=0.05
    ),
    "disabled": GatedDeltaNet2Config(
        HEADS, K, erase="disabled", write="disabled", decay="disabled", conv_width=None, output_gate=None
    ),
    "kda": GatedDeltaNet2Config.kda(HEADS, K),
    "gated delta net": GatedDeltaNet2Config.gated_delta_net(HEADS, K, value_heads=4, qk_l2_norm=False),
}


def leave_out(backend: str, test: str, given: dict[str, Any]) -> bool:
    """The same layers compile on JAX in other tests, and are thousands of tasks on Dask."""
    return backend in ("jax", "dask")


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def truth(c: GatedDeltaNet2Config, p: dict[str, np.ndarray], x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The layer, equation by equation."""
    wide, V = c.value_heads or c.heads, c.value_width or c.latent_per_head

    def linear(name: str) -> np.ndarray:
        if f"{name}.0.weight" not in p:
            return x @ p[f"{name}.weight"].T
        return x @ p[f"{name}.0.weight"].T @ p[f"{name}.1.weight"].T + p.get(f"{name}.1.bias", 0.0)

    def projected(name: str, heads: int) -> np.ndarray:
        y = linear(f"{name}_proj")
        if c.conv_width is not None:
            w = p[f"{name}_conv1d.weight"][:, 0]
            series = np.concatenate([np.zeros_like(y[:, : w.shape[1] - 1]), y], axis=1)
            y = sum(series[:, j : j + y.shape[1]] * w[:, j] for j in range(w.shape[1]))
            y = y + p.get(f"{name}_conv1d.bias", 0.0)
        return (y * sigmoid(y)).reshape(*x.shape[:2], heads, -1)

    def logits(name: str, mode: str, heads: int) -> np.ndarray:
        """(batch, time, value heads, channels or 1)"""
        y = linear(name)
        if mode == "head":
            return y[..., None]
        y = y.reshape(*x.shape[:2], heads, -1)
        y = y.mean(axis=-1, keepdims=True) if mode == "scalar" else y
        return np.repeat(y, wide // heads, axis=2)

    ones = np.ones((*x.shape[:2], wide, 1))
    erase = ones if c.erase == "disabled" else sigmoid(logits("b_proj", c.erase, c.heads))
    erase = 2 * erase if c.allow_neg_eigval and c.erase != "disabled" else erase
    write = ones
    if c.write == "erase":
        write = erase
    elif c.write != "disabled":
        write = sigmoid(logits("w_proj", c.write, wide))
    decay = 0 * ones
    if c.decay != "disabled":
        bias, rate = p["dt_bias"].reshape(len(p["A_log"]), -1), p["A_log"][:, None]
        bias = bias.mean(axis=-1, keepdims=True) if c.decay == "scalar" else bias
        bias, rate = (np.repeat(a, wide // len(a), axis=0) for a in (bias, rate))
        decay = -np.exp(rate) * np.logaddexp(
            0, logits("a_proj" if c.decay == "head" else "f_proj", c.decay, c.heads) + bias
        )
    full = {"log_decay": (decay, K), "erase": (erase, K), "write": (write, V)}
    inputs = {n: np.broadcast_to(a, (*x.shape[:2], wide, width)).copy() for n, (a, width) in full.items()}
    inputs |= {
        "query": projected("q", c.heads),
        "key": projected("k", c.heads),
        "value": projected("v", wide),
    }
    found = reference.forward("gdn2", inputs, qk_l2norm=c.qk_l2_norm)
    y, state = found.output, found.final_state
    y = y / np.sqrt(np.mean(y * y, axis=-1, keepdims=True) + 1e-5) * p["o_norm.weight"]
    if c.output_gate is not None:
        g = linear("g_proj").reshape(y.shape)
        y = y * (sigmoid(g) if c.output_gate == "sigmoid" else g * sigmoid(g))
    return c.output_scale * (y.reshape(*x.shape[:2], -1) @ p["o_proj.weight"].T), state


@pytest.mark.parametrize("name", CONFIGS)
def test_equations(library: Library, name: str):
    layer = GatedDeltaNet2(HIDDEN, CONFIGS[name]).init(4, library.xp, device=library.device, dtype="float64")
    rng = np.random.default_rng(4)
    p = {
        n: library.numpy(a) + 0.3 * rng.standard_normal(a.shape) for n, a in layer.named_parameters().items()
    }
    layer.set_parameters(library.arrays(p))
    x = rng.standard_normal((2, 7, HIDDEN))
    want, last = truth(CONFIGS[name], p, x)
    output, state = layer(library.array(x))
    assert deviation(library.numpy(output), want) <= 1e-12
    assert deviation(library.numpy(state["memory"]), last) <= 1e-12


@pytest.mark.backend("torch")
def test_burn_module_geometry(library: Library):
    """hidden 96, 4 tokens, 4 heads of 8, chunks of 4: the input has a gradient without a state, for both output scales."""
    i = np.arange(4 * 96)
    x = (((i * 7) % 53) / 53 - 0.2).reshape(1, 4, 96)
    weights = (((i * 11) % 59) / 59 - 0.1).reshape(1, 4, 96)
    found = []
    for scale in (1.0, 0.05):
        config = GatedDeltaNet2Config(4, 8, chunk_size=4, output_scale=scale)
        layer = GatedDeltaNet2(96, config).init(0, library.xp, dtype="float64")
        (_, state), pullback = layer.vjp(library.array(x))
        d_x, d_state, _ = pullback(library.array(weights))
        assert d_state is None and state["memory"].shape == (1, 4, 8, 8)
        found.append(library.numpy(d_x))
    assert np.any(found[0] != 0)
    assert deviation(found[1], 0.05 * found[0]) <= 1e-12
