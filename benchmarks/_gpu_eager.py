"""What a user of PyTorch has on a card without kernels of anyone: a loop over time, and chunks by torch's compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import scanfield


def eager(op: str, x: dict[str, Any]) -> Callable[[], Any] | None:
    """A loop over time in plain operations, in float32 inside; None for a rule that has none here."""
    import torch

    wide = {name: value.float() for name, value in x.items()}

    @torch.no_grad()
    def linear() -> Any:
        a, b = wide["a"], wide["b"]
        state, output = torch.zeros_like(a[:, 0]), torch.empty_like(b)
        for t in range(a.shape[1]):
            state = a[:, t] * state + b[:, t]
            output[:, t] = state
        return output

    @torch.no_grad()
    def selective() -> Any:
        u, A, B, C, z = (wide[name] for name in ("u", "A", "B", "C", "z"))
        step = torch.nn.functional.softplus(wide["delta"])
        state, output = u.new_zeros(u.shape[0], u.shape[2], A.shape[1]), torch.empty_like(u)
        for t in range(u.shape[1]):
            decay = torch.exp(step[:, t, :, None] * A)
            state = decay * state + (step[:, t] * u[:, t])[..., None] * B[:, t, None, :]
            output[:, t] = (state * C[:, t, None, :]).sum(-1)
        return (output + u * wide["D"]) * torch.nn.functional.silu(z)

    return {"linear_scan": linear, "selective_scan": selective}.get(op)


def compiled(op: str, x: dict[str, Any], options: dict[str, Any]) -> Callable[[], Any]:
    """scanfield's chunks compiled by torch: what CUDA tensors get where CuPy is missing."""
    function = getattr(scanfield, op)
    return lambda: function(**x, **options, method="torch.compile").output
