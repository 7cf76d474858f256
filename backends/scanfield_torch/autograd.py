"""How torch's autograd asks kernels for gradients: what is kept, and what runs backward.

A gradient that is to be differentiated again, or that a transform takes apart, is computed by the generic form in
plain operations: residuals belong to the kernels, and autograd cannot look into these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from scanfield.arrays import COMPLEX_OF
from scanfield.dispatch import Call, Grads, operation_of
from scanfield_torch.transforms import is_batched, transform_reason

Tensor = torch.Tensor
Backward = Callable[[Call, tuple[Tensor, ...], "Tensor | None", "Tensor | None", tuple[bool, ...]], Grads]


class Gradients:
    """The two halves of an ``autograd.Function`` over kernels; ``index`` is the place of ``cu_seqlens``."""

    def __init__(self, index: int, backward: Backward) -> None:
        self._index, self._backward = index, backward

    def keep(self, ctx: Any, call: Call, residuals: tuple[Tensor, ...]) -> None:
        """Save a call and its residuals: tensors where autograd watches them, the rest beside."""
        at = self._index
        ctx.save_for_backward(*call.arrays[:at], *call.arrays[at + 1 :], *residuals)
        ctx.call = Call(call.operation, (call.arrays[at],), call.options, call.compute)
        ctx.count = len(call.arrays) - 1
        ctx.set_materialize_grads(False)

    def pull(
        self, ctx: Any, d_output: Tensor | None, d_final_state: Tensor | None, needed: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        """The gradient of each array of the call that needs one, in its dtype."""
        saved, at = ctx.saved_tensors, self._index
        tensors, residuals = saved[: ctx.count], saved[ctx.count :]
        arrays = (*tensors[:at], *ctx.call.arrays, *tensors[at:])
        if d_output is None and d_final_state is None:
            return (None,) * len(arrays)
        call = ctx.call._replace(arrays=arrays)
        wanted = tuple(
            [
                need and x is not None and i != at
                for i, (x, need) in enumerate(zip(arrays, needed, strict=True))
            ]
        )
        run: Backward
        if is_batched(d_output, d_final_state):
            run = batched_gradients
        elif torch.is_grad_enabled() or transform_reason() is not None:
            run = plain_gradients
        else:
            run = self._backward
        grads = run(call, residuals, d_output, d_final_state, wanted)
        return tuple(
            [None if grad is None else as_gradient(grad, x) for grad, x in zip(grads, arrays, strict=True)]
        )


def plain_gradients(
    call: Call,
    residuals: tuple[Tensor, ...],
    d_output: Tensor | None,
    d_final_state: Tensor | None,
    wanted: tuple[bool, ...],
) -> Grads:
    """The closed form in plain operations, from a forward of its own: it takes nobody's residuals."""
    operation = operation_of(call)
    form: Any = operation.generic[operation.choose(call).removeprefix("generic.")]
    device = call.arrays[operation.main_index].device.type
    with torch.autocast(device, enabled=False):  # gradients are carried in the dtype that the call says
        _, state, kept = form.save(call)
        if d_output is not None:
            kind = COMPLEX_OF[call.compute] if d_output.is_complex() else call.compute
            d_output = d_output.to(getattr(torch, kind))
        if d_final_state is not None:
            d_final_state = d_final_state.to(state.dtype)
        grads: Grads = form.backward(call, kept, d_output, d_final_state, wanted)
    return [grad if want else None for grad, want in zip(grads, wanted, strict=True)]


def batched_gradients(
    call: Call,
    residuals: tuple[Tensor, ...],
    d_output: Tensor | None,
    d_final_state: Tensor | None,
    wanted: tuple[bool, ...],
) -> Grads:
    """Autograd through the generic form: the vmap of ``is_grads_batched`` knows no more than torch's own backward."""
    operation = operation_of(call)
    form: Any = operation.generic[operation.choose(call).removeprefix("generic.")]
    device = call.arrays[operation.main_index].device.type
    graph = torch.is_grad_enabled()
    with torch.enable_grad(), torch.autocast(device, enabled=False):
        # An array may be given twice: each place has a gradient of its own.
        arrays = tuple([x.view_as(x) if want else x for x, want in zip(call.arrays, wanted, strict=True)])
        results = form.forward(call._replace(arrays=arrays))
    asked = [(y, d_y) for y, d_y in zip(results, (d_output, d_final_state), strict=True) if d_y is not None]
    found = iter(
        torch.autograd.grad(
            [y for y, _ in asked],
            [x for x, want in zip(arrays, wanted, strict=True) if want],
            [d_y for _, d_y in asked],
            create_graph=graph,
            allow_unused=True,
        )
    )
    return [next(found) if want else None for want in wanted]


def as_gradient(grad: Tensor, tensor: Tensor) -> Tensor:
    """A gradient in the dtype of its tensor; the real part for a real one."""
    if grad.dtype is tensor.dtype:
        return grad
    if grad.is_complex() and not tensor.is_complex():
        grad = grad.real
    return grad.to(tensor.dtype)
