"""Whether one of torch's transforms is at work that a compiled scan knows nothing of.

Under ``torch.func`` (grad, vjp, jvp, vmap and their mixes) and forward-mode derivatives only plain operations are
right: an operator of our own raises there or, under forward mode, gives tangents of zero without a word. This and
``scanfield.optimize.given`` are the only places that ask torch for what it keeps private.
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from scanfield.tracing import constant_for_compilers


def transform_reason() -> str | None:
    """Why a compiled scan may not run now, or None."""
    # Read outside of what a compiler takes for a constant, so that it compiles anew when the level changes.
    if forward_ad._current_level >= 0:
        return "forward-mode derivatives go through plain operations"
    if _functorch_level():
        return "torch.func and vmap go through plain operations"
    return None


def is_batched(*cotangents: torch.Tensor | None) -> bool:
    """Whether cotangents are many in one: those of ``autograd.grad(..., is_grads_batched=True)``, whose vmap has no level."""
    if torch.compiler.is_compiling():  # a compiled backward knows no such vmap
        return False
    return any(x is not None and torch._C._functorch.is_legacy_batchedtensor(x) for x in cotangents)


def is_jit_tracing() -> bool:
    """Whether ``torch.jit.trace`` records: of what is no operation of torch's it would keep the numbers."""
    return torch._C._get_tracing_state() is not None


@constant_for_compilers
def _functorch_level() -> bool:
    """Whether a transform of torch.func or vmap is open.

    A compiler opens it while it traces one, and asks here then; one that is open around a compiled function it guards.
    """
    return torch._C._functorch.maybe_current_level() is not None
