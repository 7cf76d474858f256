"""The plain PyTorch functions under the models of Hugging Face transformers against ours.

transformers wraps each of them so that a faster package may take its place; the test unwraps them, so that it meets the
PyTorch function whatever else is installed. They compute in float32.
"""

from __future__ import annotations

import importlib
import inspect

import arrays
import numpy as np
import pytest
from agreement import agree

import scanfield

pytestmark = pytest.mark.backend("torch")
torch = pytest.importorskip("torch", reason="transformers' fallbacks are PyTorch")
pytest.importorskip("transformers", reason="the peer transformers is not installed")

B, T, H, VH, K, V = 2, 29, 2, 4, 5, 3


def fallback(model: str, name: str):
    return inspect.unwrap(
        getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), name)
    )


def gated(
    seed: int, time: int = T, heads: int = H, vheads: int = VH, decay: float = 0.5, channels: bool = False
):
    r = np.random.default_rng(seed)
    key = r.standard_normal((B, time, heads, K))
    gate = (B, time, vheads, K) if channels else (B, time, vheads)
    return {
        "query": r.standard_normal((B, time, heads, K)),
        "key": key / np.linalg.norm(key, axis=-1, keepdims=True),
        "value": r.standard_normal((B, time, vheads, V)),
        "log_decay": r.uniform(-decay, -0.01, gate),
        "beta": r.uniform(0, 1, (B, time, vheads)),
        "initial_state": r.standard_normal((B, vheads, K, V)),
    }


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
@pytest.mark.parametrize("normalise", [False, True])
def test_gated_delta_rule(form, normalise):
    """qwen3-next, with its grouped value heads. T = 77 leaves a ragged second chunk."""
    function = fallback("qwen3_next", f"torch_{form}_gated_delta_rule")

    def peer(query, key, value, log_decay, beta, initial_state):
        return function(
            query, key, value, g=log_decay, beta=beta, initial_state=initial_state,
            output_final_state=True, use_qk_l2norm_in_kernel=normalise,
        )  # fmt: skip

    agree(scanfield.gated_delta_rule, peer, gated(20, time=77), options={"qk_l2norm": normalise})


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
def test_kimi_delta_attention(form):
    function = fallback("kimi_linear", f"{form}_kimi_delta_attention")

    def peer(query, key, value, log_decay, beta, initial_state):
        return function(
            query, key, value, g=log_decay, beta=beta, initial_state=initial_state, output_final_state=True
        )

    agree(scanfield.kda, peer, gated(21, heads=VH, channels=True))


def selective(seed: int, time: int = T, channels: int = 6, state: int = 4) -> dict[str, np.ndarray]:
    r = np.random.default_rng(seed)
    return {
        "u": r.standard_normal((B, time, channels)),
        "delta": r.standard_normal((B, time, channels)),
        "A": -r.uniform(0.5, 2, (channels, state)),
        "B": r.standard_normal((B, time, state)),
        "C": r.standard_normal((B, time, state)),
        "D": r.standard_normal(channels),
        "z": r.standard_normal((B, time, channels)),
        "delta_bias": r.uniform(-1, 1, channels),
    }


def test_mamba_selective_scan():
    function = fallback("mamba", "mamba_selective_scan")

    def peer(u, delta, A, B, C, D, z, delta_bias):
        output, state = function(
            *(x.transpose(1, 2) for x in (u, delta)), A, *(x.transpose(1, 2) for x in (B, C)), D, z.transpose(1, 2),
            delta_bias, delta_softplus=True, return_last_state=True,
        )  # fmt: skip
        return output.transpose(1, 2), state

    agree(scanfield.selective_scan, peer, selective(22), options={"delta_softplus": True})


def test_mamba_selective_state_update():
    """Thirty decoding steps; theirs overwrites the state, ours returns a new one."""
    function = fallback("mamba", "mamba_selective_state_update")
    inputs = {name: torch.tensor(x, dtype=torch.float32) for name, x in selective(23).items()}
    theirs = torch.zeros(B, 6, 4)
    ours = None
    library = arrays.library("torch")
    for t in range(T):
        tokens = {name: x[:, t] if x.ndim == 3 else x for name, x in inputs.items()}
        ours_y, ours = scanfield.selective_scan.step(ours, **tokens, delta_softplus=True)
        u, delta, A, B_t, C_t, D, z, bias = tokens.values()
        theirs_y = function(theirs, u, delta, A, B_t, C_t, D, z=z, dt_bias=bias, dt_softplus=True)
        assert arrays.deviation(library.raw(ours_y), library.raw(theirs_y)) <= 1e-6
        assert arrays.deviation(library.raw(ours), library.raw(theirs)) <= 1e-6


def state_space_dual(seed: int, time: int) -> dict[str, np.ndarray]:
    r = np.random.default_rng(seed)
    return {
        "x": r.standard_normal((B, time, 4, 3)),
        "dt": r.standard_normal((B, time, 4)),
        "A": -r.uniform(0.5, 2, 4),
        "B": r.standard_normal((B, time, 2, 5)),
        "C": r.standard_normal((B, time, 2, 5)),
        "D": r.standard_normal(4),
        "dt_bias": r.uniform(-2, 0, 4),
        "initial_state": r.standard_normal((B, 4, 3, 5)),
    }


@pytest.mark.parametrize("limit", [None, (0.2, 0.9)])
def test_mamba2_chunk_scan(limit):
    function = fallback("mamba2", "mamba2_chunk_scan")

    def peer(x, dt, A, B, C, D, dt_bias, initial_state):
        return function(
            x, dt, A, B, C, chunk_size=16, D=D, dt_bias=dt_bias, initial_states=initial_state, dt_softplus=True,
            dt_limit=limit or (0.0, float("inf")), return_final_states=True,
        )  # fmt: skip

    options = {"dt_softplus": True, "dt_limit": limit}
    agree(scanfield.ssd, peer, state_space_dual(24, 45), options=options)


def test_mamba2_selective_state_update():
    function = fallback("mamba2", "mamba2_selective_state_update")
    inputs = {name: torch.tensor(x, dtype=torch.float32) for name, x in state_space_dual(25, T).items()}
    theirs = inputs.pop("initial_state").clone()
    ours = theirs.clone()
    library = arrays.library("torch")
    for t in range(T):
        tokens = {name: x[:, t] if x.ndim > 2 else x for name, x in inputs.items()}
        ours_y, ours = scanfield.ssd.step(ours, **tokens, dt_softplus=True)
        x, dt, A, B_t, C_t, D, bias = tokens.values()
        theirs_y = function(
            theirs, x, dt[..., None].expand(B, 4, 3), A[:, None, None].expand(4, 3, 5), B_t, C_t,
            D[:, None].expand(4, 3), dt_bias=bias[:, None].expand(4, 3), dt_softplus=True,
        )  # fmt: skip
        assert arrays.deviation(library.raw(ours_y), library.raw(theirs_y)) <= 1e-6
        assert arrays.deviation(library.raw(ours), library.raw(theirs)) <= 1e-6
