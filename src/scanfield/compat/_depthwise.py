"""The causal depthwise convolution of a prompt on the CPU, with a token's channels side by side in memory.

transformers convolves (batch, channels, time) by a general function that turns what it is given around and back. As an
image of one row with its channels last the same sum takes a small part of that time, and what follows, the scans among them,
finds a token's numbers together. For other dtypes, devices and activations transformers' own function runs.

    y_t = act(p_t), p_t = b + sum_j w_j x_(t-W+1+j)       dp = act'(p) dy, db = sum_t dp_t
    dx_s = sum_j w_j dp_(s+W-1-j)                         dw_j = sum_t dp_t x_(t-W+1+j)
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

from scanfield.arrays import Array

_ROWS = 64
"""Tokens whose products lie in cache until they are summed."""


def takes(x: Array, weight: Array, bias: Array | None, activation: str | None) -> bool:
    """Whether x (batch, channels, time), weight (channels, W) and bias (channels,) are what is convolved here."""
    torch: Any = sys.modules["torch"]
    return (
        activation in (None, "silu", "swish")
        and all(t is None or (t.dtype == torch.float32 and t.device.type == "cpu") for t in (x, weight, bias))
        and 0 not in x.shape
        and not torch.compiler.is_compiling()
    )


def convolution(x: Array, weight: Array, bias: Array | None, activation: str | None) -> Array:
    """(batch, channels, time), the channels of a time side by side."""
    torch: Any = sys.modules["torch"]
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        return _followed().apply(x, weight, bias, activation is not None)[0]
    sums = _sums(x, weight, bias)
    return sums if activation is None else torch.nn.functional.silu(sums, inplace=True)


def _sums(x: Array, weight: Array, bias: Array | None, *, ahead: bool = False) -> Array:
    """p; with ``ahead`` the sums over times from t on, in the place of those up to t."""
    torch: Any = sys.modules["torch"]
    before, time = weight.shape[1] - 1, x.shape[2]
    image = _channels_side_by_side(x).unsqueeze(2)
    whole = torch.nn.functional.conv2d(
        image, weight.unsqueeze(1).unsqueeze(1), bias, padding=(0, before), groups=x.shape[1]
    )
    first = before if ahead else 0
    return whole.squeeze(2).narrow(2, first, time)


def _channels_side_by_side(x: Array) -> Array:
    """The same tensor (batch, channels, time) so in memory; torch turns matrices ten times as fast as a batch of them."""
    torch: Any = sys.modules["torch"]
    if x.stride(2) == 1 and 1 not in x.shape[1:]:
        rows = [row.t().contiguous() for row in x.unbind(0)]
        return (rows[0].unsqueeze(0) if len(rows) == 1 else torch.stack(rows)).transpose(1, 2)
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _slope(sums: Array) -> Array:
    """The derivative of SiLU."""
    torch: Any = sys.modules["torch"]
    sigma = torch.sigmoid(sums)
    return sigma * (1 + sums * (1 - sigma))


def _weights_back(x: Array, d: Array, width: int) -> Array:
    """dw (channels, W), a few tokens at a time: products of all tokens would be W arrays as large as x."""
    torch: Any = sys.modules["torch"]
    x, d = x.transpose(1, 2), d.transpose(1, 2)
    time = x.shape[1]
    columns = []
    for back in reversed(range(width)):
        parts = [x.new_zeros(x.shape[2])]
        for first in range(back, time, _ROWS):
            count = min(_ROWS, time - first)
            parts.append((d.narrow(1, first, count) * x.narrow(1, first - back, count)).sum(dim=(0, 1)))
        columns.append(torch.stack(parts).sum(dim=0))
    return torch.stack(columns, dim=1)


@cache
def _followed() -> Any:
    """The convolution with its gradients for torch's autograd, whose class of functions is not to be had before torch is."""
    torch: Any = sys.modules["torch"]

    class DepthwiseConvolution(torch.autograd.Function):  # type: ignore[misc]  # torch is Any: not imported here
        generate_vmap_rule = True

        @staticmethod
        def forward(x: Array, weight: Array, bias: Array | None, silu: bool) -> tuple[Array, Array]:
            sums = _sums(x, weight, bias)
            return torch.nn.functional.silu(sums) if silu else sums.clone(), sums

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Array, Array]) -> None:
            x, weight, bias, ctx.silu = inputs
            ctx.mark_non_differentiable(outputs[1])
            ctx.save_for_backward(x, weight, bias, outputs[1])
            ctx.save_for_forward(x, weight, bias, outputs[1])
            ctx.set_materialize_grads(False)

        @staticmethod
        def backward(ctx: Any, d: Array | None, _: Any) -> tuple[Array | None, ...]:
            if d is None:
                return (None,) * 4
            x, weight, bias, sums = ctx.saved_tensors
            if ctx.silu and torch.is_grad_enabled():
                d = d * _slope(_sums(x, weight, bias))  # anew: nothing leads from what was kept to the inputs
            elif ctx.silu:
                d = torch.ops.aten.silu_backward(d, sums)
            needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
            return (
                _sums(d, weight.flip(1), None, ahead=True) if needs_x else None,
                _weights_back(x, d, weight.shape[1]) if needs_weight else None,
                d.sum(dim=(0, 2)) if needs_bias else None,
                None,
            )

        @staticmethod
        def jvp(ctx: Any, d_x: Array | None, d_weight: Array | None, d_bias: Array | None, _: Any) -> Any:
            x, weight, bias, sums = ctx.saved_tensors
            parts = [] if d_x is None else [_sums(d_x, weight, None)]
            if d_weight is not None:
                parts.append(_sums(x, d_weight, None))
            if d_bias is not None:
                parts.append(d_bias[:, None].expand_as(sums))
            d = sum(parts[1:], parts[0])
            return d * _slope(_sums(x, weight, bias)) if ctx.silu else d, None

    return DepthwiseConvolution
