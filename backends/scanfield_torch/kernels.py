"""What can be lifted to an implementation that autograd follows and torch's compilers see."""

from __future__ import annotations

from typing import Protocol

import torch

from scanfield.dispatch import Call

Tensor = torch.Tensor


class Kernels(Protocol):
    """The verbs on tensors, of which autograd knows nothing. All results are fresh and contiguous."""

    packs: bool
    """Whether several sequences may lie in one call (``cu_seqlens``)."""

    def declines(self, tensor: Tensor) -> str | None:
        """Why no kernel takes this tensor, or None."""

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        """Output and final state."""

    def save(self, call: Call) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Output, final state and residuals."""

    def backward(
        self,
        call: Call,
        residuals: tuple[Tensor, ...],
        d_output: Tensor | None,
        d_final_state: Tensor | None,
        wanted: tuple[bool, ...],
    ) -> list[Tensor | None]:
        """The wanted gradients, None for the others."""

    def summarise(self, call: Call) -> tuple[Tensor, Tensor]:
        """Transition and final state from zero."""


class GraphKernels(Kernels, Protocol):
    """Kernels that torch's graphs can call, by operators: those must know the residuals without running."""

    def residuals(self, call: Call) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of the residuals, from the shapes of the call."""


def no_view(tensor: Tensor) -> Tensor:
    """The same memory under a tensor that is no view: autograd lets nobody change views of its functions in place."""
    if not tensor._is_view():
        return tensor
    return tensor.new_empty(0).set_(tensor)  # type: ignore[call-overload,no-any-return]
