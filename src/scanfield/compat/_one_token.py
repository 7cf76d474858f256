"""One token of a decoding model on the CPU: what transformers computes for it, in fewer operations.

Upstream's convolution of one position is a general one, and its state is written four times a token. Plain products in place
take a third and two thirds of that time. For other dtypes and devices, and where gradients are recorded, transformers'
own functions run.
"""

from __future__ import annotations

import sys
from typing import Any

from scanfield.arrays import Array
from scanfield.compat import _hooked


def convolution(
    original: Any, frame: _hooked.Frame, x: Array, conv_state: Array, weight: Array, bias: Any = None,
    activation: Any = None, **unused: Any,
) -> Any:  # fmt: skip
    """causal_conv1d_update: x (batch, channels, 1), conv_state (batch, channels, W or W - 1), overwritten."""
    torch: Any = sys.modules["torch"]
    width, kept = weight.shape[1], conv_state.shape[2]
    plain = x.shape[2] == 1 and kept >= width - 1 and activation in (None, "silu", "swish")
    if not plain or torch.is_grad_enabled() or not _single(x, conv_state, weight, bias):
        return original(x, conv_state, weight, bias, activation=activation)
    inputs = torch.cat([conv_state[:, :, kept - width + 1 :], x], dim=2)
    if kept == width - 1:
        conv_state.copy_(inputs[:, :, 1:])
    elif kept == width:
        conv_state.copy_(inputs)
    else:
        conv_state.copy_(torch.cat([conv_state[:, :, 1:], x], dim=2))
    y = (inputs * weight).sum(dim=2, keepdim=True)
    if bias is not None:
        y += bias[:, None]
    return y if activation is None else torch.nn.functional.silu(y, inplace=True)


def update(
    original: Any, frame: _hooked.Frame, state: Array, x: Array, dt: Array, A: Array, B: Array, C: Array,
    D: Any = None, z: Any = None, dt_bias: Any = None, dt_softplus: bool = False, **unused: Any,
) -> Any:  # fmt: skip
    """mamba_selective_state_update: state (batch, channels, N), overwritten."""
    torch: Any = sys.modules["torch"]
    if state.ndim != 3 or torch.is_grad_enabled() or not _single(state, x, dt, A, B, C, D, z, dt_bias):
        return original(state, x, dt, A, B, C, D, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus)
    if dt_bias is not None:
        dt = dt + dt_bias
    if dt_softplus:
        dt = torch.nn.functional.softplus(dt)
    decay = (dt[:, :, None] * A).exp_()
    state.mul_(decay).addcmul_((dt * x)[:, :, None], B[:, None, :])
    y = (state @ C[:, :, None])[:, :, 0]
    if D is not None:
        y.addcmul_(x, D)
    return y if z is None else y.mul_(torch.nn.functional.silu(z))


def _single(*tensors: Any) -> bool:
    """Whether all that are given are float32 on the CPU."""
    torch: Any = sys.modules["torch"]
    return all(x is None or (x.dtype == torch.float32 and x.device.type == "cpu") for x in tensors)
