"""The generic forms with their own save and backward under autograd: memory grows as time / chunk.

Plain operations that autograd follows one by one would keep every token's intermediate results. They run where only
they are right: where a transform is open, or a graph is made of the call.
"""

from __future__ import annotations

from functools import cache

import torch

from scanfield.dispatch import Call, Verb
from scanfield_torch.kernels import no_view
from scanfield_torch.lift import Lifted
from scanfield_torch.plain import form_of, without_autocast
from scanfield_torch.transforms import transform_reason

Tensor = torch.Tensor


class Forms:
    """The verbs of the generic form that the size of a call asks for, where autograd does not look."""

    packs = True

    def declines(self, tensor: Tensor) -> str | None:
        """Nothing: generic code takes every tensor."""
        return None

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        """Output and final state."""
        with torch.no_grad(), without_autocast(call):
            output, state = form_of(call).forward(call)
        return no_view(output), no_view(state)

    def save(self, call: Call) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Output, final state and the states at the starts of chunks."""
        with torch.no_grad(), without_autocast(call):
            output, state, residuals = form_of(call).save(call)
        return no_view(output), no_view(state), residuals

    def backward(
        self,
        call: Call,
        residuals: tuple[Tensor, ...],
        d_output: Tensor | None,
        d_final_state: Tensor | None,
        wanted: tuple[bool, ...],
    ) -> list[Tensor | None]:
        """The wanted gradients."""
        with torch.no_grad(), without_autocast(call):
            grads = form_of(call).backward(call, residuals, d_output, d_final_state, wanted)
        return [no_view(grad) if want else None for grad, want in zip(grads, wanted, strict=True)]

    def summarise(self, call: Call) -> tuple[Tensor, Tensor]:
        """Transition and final state from zero."""
        with torch.no_grad(), without_autocast(call):
            transition, state = form_of(call).summarise(call)
        return transition, state


class Generic(Lifted):
    """The generic forms, which take every call: in one node of autograd, or operation by operation."""

    generic_form = True

    def __init__(self, operation: str) -> None:
        super().__init__(operation, Forms())

    def declines(self, call: Call, verb: Verb) -> str | None:
        """Nothing."""
        return None

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        """Output and final state."""
        if not self._plain(call):
            return super().forward(call)
        with without_autocast(call):
            output, state = form_of(call).forward(call)
        return output, state

    step = forward

    def save(self, call: Call) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Output, final state and residuals."""
        if not self._plain(call):
            return super().save(call)
        with without_autocast(call):
            output, state, residuals = form_of(call).save(call)
        return output, state, residuals

    def summarise(self, call: Call) -> tuple[Tensor, Tensor]:
        """Transition and final state from zero; a map is wanted for one token or few, so autograd may look at all."""
        if not (self._plain(call) or self._followed(call)):
            return super().summarise(call)
        with without_autocast(call):
            transition, state = form_of(call).summarise(call)
        return transition, state

    def notes(self, call: Call) -> tuple[str, ...]:
        """Where operation by operation."""
        reason = transform_reason()
        if reason is None and self._traced(call):
            reason = "a graph is made of the call"
        return () if reason is None else (f"torch.generic runs in plain operations here: {reason}.",)

    def _plain(self, call: Call) -> bool:
        return transform_reason() is not None or self._traced(call)


@cache
def implementation(operation: str) -> Generic:
    """The implementation of an operation."""
    return Generic(operation)
