"""transformers as it was half a year before: one method of a mixer does all that module-level functions do today.

Up to 5.10 a mixer of the Mamba family has a method in plain PyTorch and one for the kernels of mamba_ssm. On a CPU the first
one runs. Within a frame a prompt takes the second one, with the stand-ins for its kernels; one token keeps the first. The
mixers of the gated delta rules hold their functions as attributes of their own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import wraps
from typing import Any

from scanfield import arrays
from scanfield.arrays import Array
from scanfield.compat import _arrays, _hooked
from scanfield.compat._convolution import causal_conv1d_fn
from scanfield.compat._ssd import mamba_chunk_scan_combined


def convolution(
    original: Any, frame: _hooked.Frame, x: Array, weight: Array, bias: Any = None, activation: Any = None,
    **unused: Any,
) -> Any:  # fmt: skip
    """causal_conv1d_fn: behind the inputs that the cache has kept, and by sequence."""
    time, seq_idx = x.shape[2], frame.seq_idx
    xp = _arrays.namespace(x=x)
    before = 0 if frame.inputs is None else frame.inputs.shape[2]
    if before:
        x = xp.concat([xp.astype(frame.inputs, x.dtype), x], axis=2)
    layer = frame.layer
    if seq_idx is None and activation in (None, "silu", "swish") and hasattr(layer, "conv1d"):
        y = layer.conv1d(x)[:, :, : before + time]
        y = y if activation is None else layer.act(y)
    else:
        if seq_idx is not None and before:  # what was kept belongs to the row's first sequence
            first = xp.broadcast_to(seq_idx[:, :1], (x.shape[0], before))
            seq_idx = xp.concat([first, xp.broadcast_to(seq_idx, (x.shape[0], time))], axis=1)
        y = causal_conv1d_fn(x, weight, bias, seq_idx, activation=activation)
    return y[:, :, before:] if before else y


def chunk_scan(
    original: Any, frame: _hooked.Frame, x: Array, dt: Array, A: Array, B: Array, C: Array, chunk_size: int,
    D: Any = None, z: Any = None, dt_bias: Any = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")), return_final_states: bool = False, **unused: Any,
) -> Any:  # fmt: skip
    """mamba_chunk_scan_combined, which is not given the cached state."""
    return mamba_chunk_scan_combined(
        x, dt, A, B, C, chunk_size, D, z, dt_bias, frame.state, frame.seq_idx, dt_softplus=dt_softplus,
        dt_limit=dt_limit, return_final_states=return_final_states,
    )  # fmt: skip


class Continued:
    """A cache as that way wants to see it: without a state before these tokens, which the frame holds instead."""

    def __init__(self, cache: Any, inputs: Array, tokens: int) -> None:
        self._cache, self._inputs, self._tokens = cache, inputs, tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def has_previous_state(self, *unused: Any) -> bool:
        """No."""
        return False

    def update_conv_state(self, conv_states: Array, layer_idx: int, **more: Any) -> Any:
        """The last inputs; where the tokens do not fill the place, those kept before move up in it."""
        width = conv_states.shape[2]
        if self._tokens < width:
            xp = _arrays.namespace(conv_states=conv_states)
            before = xp.astype(self._inputs[:, :, self._tokens :], conv_states.dtype)
            conv_states = xp.concat([before, conv_states[:, :, width - self._tokens :]], axis=2)
        return self._cache.update_conv_state(conv_states, layer_idx, **more)


def prompt(original: Callable[..., Any], ensure: Callable[[], None]) -> Callable[..., Any]:
    """The method in plain PyTorch, which hands prompts within a frame on to the one for kernels.

    ``ensure`` puts our functions in place once more: the constructor of any other such layer takes them out.
    """

    @wraps(original)
    def choose(
        layer: Any, hidden_states: Array, cache_params: Any = None, attention_mask: Any = None, *rest: Any
    ) -> Any:
        frame, time = _hooked.frames.innermost(), hidden_states.shape[1]
        if frame is None or frame.layer is not layer or time == 1:
            return original(layer, hidden_states, cache_params, attention_mask, *rest)
        ensure()
        cache = cache_params
        if cache is not None and frame.inputs is not None:
            cache = Continued(cache, frame.inputs, time)
        # In training without a cache that way is one fused kernel; a layer in evaluation computes the same unfused.
        unfused = copy.copy(layer)
        unfused.training = False
        return unfused.cuda_kernels_forward(hidden_states, cache, attention_mask)

    return choose


def kept(layer: Any, cache: Any) -> tuple[Array | None, Array | None]:
    """Copies of the recurrent state and of the convolution's last inputs in an older cache; None where there are none."""
    has = getattr(cache, "has_previous_state", None)
    if not callable(has) or not hasattr(cache, "layers") or not has(layer.layer_idx):
        return None, None
    own = cache.layers[layer.layer_idx]
    return arrays.copy(own.recurrent_states), arrays.copy(own.conv_states)
