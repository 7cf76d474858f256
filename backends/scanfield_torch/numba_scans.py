"""The scans that numba compiles, on tensors: the kernels read and write the tensors' own memory."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from scanfield import dispatch
from scanfield.dispatch import Call
from scanfield_torch.lift import Lifted
from scanfield_torch.views import TORCH, array_of, dtype_reason, on_arrays, on_shapes, tensor_of

Tensor = torch.Tensor


class OnArrays:
    """An implementation for NumPy arrays, called with tensors; in graphs nothing tells a parameter from another tensor."""

    packs = True

    def __init__(self, arrays: Any, *, in_graphs: bool = False) -> None:
        self._arrays, self._borrowed = arrays, in_graphs

    def declines(self, tensor: Tensor) -> str | None:
        """Why no kernel takes this tensor."""
        return dtype_reason(tensor.dtype)

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        """Output and final state."""
        output, state = self._arrays.forward(on_arrays(call, borrowed=self._borrowed))
        return tensor_of(output), tensor_of(state)

    def save(self, call: Call) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Output, final state and residuals."""
        output, state, residuals = self._arrays.save(on_arrays(call, borrowed=self._borrowed))
        return tensor_of(output), tensor_of(state), tuple([tensor_of(x) for x in residuals])

    def residuals(self, call: Call) -> list[tuple[tuple[int, ...], Any]]:
        """Shapes and dtypes of the residuals."""
        return [(shape, TORCH[name]) for shape, name in self._arrays.residuals(on_shapes(call))]

    def backward(
        self,
        call: Call,
        residuals: tuple[Tensor, ...],
        d_output: Tensor | None,
        d_final_state: Tensor | None,
        wanted: tuple[bool, ...],
    ) -> list[Tensor | None]:
        """The wanted gradients."""
        grads = self._arrays.backward(
            on_arrays(call, borrowed=self._borrowed),
            tuple([array_of(x) for x in residuals]),
            array_of(d_output),
            array_of(d_final_state),
            wanted,
        )
        return [
            None if grad is None or not want else tensor_of(grad)
            for grad, want in zip(grads, wanted, strict=True)
        ]

    def summarise(self, call: Call) -> tuple[Tensor, Tensor]:
        """Transition and final state from zero."""
        transition, state = self._arrays.summarise(on_arrays(call, borrowed=self._borrowed))
        return tensor_of(transition), tensor_of(state)


@cache
def implementation(operation: str) -> Lifted:
    """The implementation of an operation. One for each process: torch knows its operators by name."""
    arrays = dispatch.implementation(operation, "numpy.numba")
    return Lifted(operation, OnArrays(arrays), in_graphs=OnArrays(arrays, in_graphs=True))
