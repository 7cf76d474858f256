"""What runs in the place of transformers' own functions: its calls, answered by the stand-ins.

A mixer's forward pass leaves a `Frame`: the state that it brings along and the sequences that lie in its rows. The
functions here read the innermost one of their thread; outside of every frame transformers' own function runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from math import prod
from typing import Any

from scanfield.arrays import Array, copy
from scanfield.compat import _arrays, _depthwise
from scanfield.compat._convolution import causal_conv1d_fn
from scanfield.compat._fla_channel import chunk_kda
from scanfield.compat._fla_delta import chunk_gated_delta_rule
from scanfield.compat._open import Open
from scanfield.compat._selective import selective_scan_fn
from scanfield.compat._ssd import mamba_chunk_scan_combined
from scanfield.compat._state_update import selective_state_update
from scanfield.scans.gated_delta import LENGTH_EPSILON

# Below so many elements of the state, transformers' own few operations for one token cost less than ours, on one core.
_SMALL_STATE = 200_000


@dataclass
class Frame:
    """One mixer's forward pass."""

    state: Array | None = None
    """The recurrent state before these tokens, for mixers that do not hand it on."""
    seq_idx: Array | None = None
    """The sequence of each token (batch, time), or None where a row is one sequence."""
    heads_done: int = 0
    """Zamba scans its heads one by one."""
    layer: Any = None
    """The mixer."""
    inputs: Array | None = None
    """What the convolution has seen before these tokens (batch, channels, width), for mixers that do not hand it on."""


frames = Open()
"""Those of the mixers that run."""


def within_frames(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is ours inside of a frame and ``original`` outside."""

    @wraps(original)
    def choose(*args: Any, **kwargs: Any) -> Any:
        frame = frames.innermost()
        return original(*args, **kwargs) if frame is None else ours(original, frame, *args, **kwargs)

    return choose


@dataclass(frozen=True)
class Chosen:
    """The same as an attribute of a layer, which is copied and pickled with it."""

    original: Any
    ours: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One of the two."""
        frame = frames.innermost()
        if frame is None:
            return self.original(*args, **kwargs)
        return self.ours(self.original, frame, *args, **kwargs)


# ---------------------------------------------------------------------------------------------------------------------
# Mamba-1 and Mamba-2


def scan(
    original: Any, frame: Frame, u: Array, dt: Array, A: Array, B: Array, C: Array, D: Any = None, z: Any = None,
    delta_bias: Any = None, delta_softplus: bool = False, return_last_state: bool = False, **unused: Any,
) -> Any:  # fmt: skip
    """mamba_selective_scan: continues the cached state, which upstream drops when a prompt comes in pieces."""
    state = frame.state
    if state is not None and len(state.shape) == 4:  # (batch, heads, channels, state), a head at a time
        state = state[:, frame.heads_done, ...]
        frame.heads_done += 1
    return selective_scan_fn(
        _time_by_time(u),
        _time_by_time(dt),
        A,
        B,
        C,
        D,
        None if z is None else _time_by_time(z),
        delta_bias,
        delta_softplus,
        return_last_state,
        initial_state=state,
        seq_idx=frame.seq_idx,
    )


def _time_by_time(x: Array) -> Array:
    """The same tensor (batch, channels, time), with the channels of a time side by side in memory, as the scan wants them.

    torch turns a matrix in blocks, in a tenth of the time that a copy of the transposed batch takes.
    """
    if x.device.type != "cpu" or not x.is_contiguous() or 1 in x.shape[1:] or 0 in x.shape:
        return x
    rows = [row.t().contiguous() for row in x.unbind(0)]
    xp = _arrays.namespace(x=x)
    whole = rows[0].unsqueeze(0) if len(rows) == 1 else xp.stack(rows, axis=0)
    return whole.transpose(1, 2)


def update(
    original: Any, frame: Frame, state: Array, x: Array, dt: Array, A: Array, B: Array, C: Array, D: Any = None,
    z: Any = None, dt_bias: Any = None, dt_softplus: bool = False, **unused: Any,
) -> Any:  # fmt: skip
    """mamba2_selective_state_update: the state is overwritten."""
    update = original if prod(state.shape) < _SMALL_STATE else selective_state_update
    return update(state, x, dt, A, B, C, D, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus)


def chunk_scan(
    original: Any, frame: Frame, x: Array, dt: Array, A: Array, B: Array, C: Array, chunk_size: int, D: Any = None,
    z: Any = None, dt_bias: Any = None, initial_states: Any = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")), return_final_states: bool = False, **unused: Any,
) -> Any:  # fmt: skip
    """mamba2_chunk_scan."""
    return mamba_chunk_scan_combined(
        x, dt, A, B, C, chunk_size, D, z, dt_bias, _own(initial_states), frame.seq_idx, dt_softplus=dt_softplus,
        dt_limit=dt_limit, return_final_states=return_final_states,
    )  # fmt: skip


def nothing_fused(original: Any, frame: Frame, *args: Any, **kwargs: Any) -> None:
    """mamba_inner_fn and mamba2_split_conv1d_scan_combined: None sends the mixer its unfused way."""


def convolution(
    original: Any,
    frame: Frame,
    x: Array,
    weight: Array,
    bias: Any = None,
    activation: Any = None,
    **unused: Any,
) -> Any:
    """causal_conv1d_fn: sequences are kept apart; for what nothing here takes, transformers' own."""
    if frame.seq_idx is None:
        if _depthwise.takes(x, weight, bias, activation):
            return _depthwise.convolution(x, weight, bias, activation)
        return original(x, weight, bias, activation=activation)
    seq_idx, batch = frame.seq_idx, x.shape[0]
    before = x.shape[2] - seq_idx.shape[1]
    if before:  # inputs that the cache has put in front belong to the row's first sequence
        xp = _arrays.namespace(seq_idx=seq_idx)
        seq_idx = xp.concat([xp.broadcast_to(seq_idx[:, :1], (batch, before)), seq_idx], axis=1)
    return causal_conv1d_fn(x, weight, bias, seq_idx, activation=activation)


def _own(state: Array | None) -> Array | None:
    """The cache's buffer is overwritten by the same forward pass; autograd and the scan keep this copy."""
    return None if state is None else copy(state)


# ---------------------------------------------------------------------------------------------------------------------
# the gated delta rules


def gated_delta_rule(
    original: Any, frame: Frame, query: Array, key: Array, value: Array, **given: Any
) -> Any:
    """torch_chunk_gated_delta_rule and torch_recurrent_gated_delta_rule."""
    if _is_small_step(query, value):
        return original(query, key, value, **given)
    return _rule(chunk_gated_delta_rule, frame, query, key, value, **given)


def kimi_delta_attention(
    original: Any, frame: Frame, query: Array, key: Array, value: Array, **given: Any
) -> Any:
    """chunk_kimi_delta_attention and recurrent_kimi_delta_attention."""
    if _is_small_step(query, value):
        return original(query, key, value, **given)
    return _rule(chunk_kda, frame, query, key, value, **given)


def _is_small_step(query: Array, value: Array) -> bool:
    batch, time, heads, width = value.shape
    return bool(time == 1 and batch * heads * width * query.shape[3] < _SMALL_STATE)


def _token_by_token(x: Array) -> Array:
    """The same tensor (batch, time, heads, width), a token's numbers side by side where the convolution left times so."""
    batch, time, heads, width = x.shape
    if x.device.type != "cpu" or x.stride(1) != 1 or x.stride(3) != time or 0 in x.shape:
        return x
    rows = [row.reshape(time, heads * width).contiguous() for row in x.unbind(0)]
    whole = rows[0].unsqueeze(0) if batch == 1 else _arrays.namespace(x=x).stack(rows, axis=0)
    return whole.reshape(batch, time, heads, width)


def _are_plain(q: Array, k: Array) -> bool:
    """Whether q and k are alike, float32 on the CPU, and nobody asks for their gradients."""
    torch: Any = sys.modules["torch"]
    followed = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad)
    return (
        not followed and q.shape == k.shape and q.dtype == k.dtype == torch.float32 and q.device.type == "cpu"
    )


def _normalised(q: Array, k: Array) -> tuple[Array, Array]:
    """Both over their lengths, in one new piece of memory: what the rule does to each would take three larger ones."""
    torch: Any = sys.modules["torch"]
    both = torch.cat([q, k], dim=2)
    both.mul_(torch.linalg.vector_norm(both, dim=3, keepdim=True).square_().add_(LENGTH_EPSILON).rsqrt_())
    q, k = both.tensor_split(2, dim=2)
    return q, k


def _rule(
    rule: Callable[..., Any], frame: Frame, q: Array, k: Array, v: Array, *, g: Array, beta: Array,
    initial_state: Array | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    **unused: Any,
) -> Any:  # fmt: skip
    state = _own(initial_state)
    q, k, v = (_token_by_token(x) for x in (q, k, v))
    if use_qk_l2norm_in_kernel and _are_plain(q, k):
        (q, k), use_qk_l2norm_in_kernel = _normalised(q, k), False
    options = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "output_final_state": output_final_state}
    if frame.seq_idx is None:
        return rule(q, k, v, g, beta, initial_state=state, **options)
    batch, time = q.shape[:2]
    xp = _arrays.namespace(q=q)
    pack = _arrays.pack_of(frame.seq_idx, batch, time)
    o, last = rule(
        *(_arrays.folded(xp, x) for x in (q, k, v, g, beta)), initial_state=_arrays.spread_states(xp, state, pack),
        cu_seqlens=pack.bounds, **options,
    )  # fmt: skip
    o = xp.reshape(o, (batch, time, *o.shape[2:]))
    return o, None if last is None else _arrays.take(xp, last, pack.last)
