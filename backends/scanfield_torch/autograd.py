"""How torch's autograd asks kernels for gradients: what is kept, and what runs backward.

Kernels compute a gradient also where it is to be differentiated again: that derivative, when somebody asks for it, is
taken of the generic form in plain operations, as autograd cannot look into residuals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from scanfield.dispatch import Call, Grads, operation_of
from scanfield.errors import StateError
from scanfield_torch.plain import batched_gradients, plain_gradients
from scanfield_torch.transforms import is_batched, transform_reason

Tensor = torch.Tensor
Backward = Callable[[Call, tuple[Tensor, ...], "Tensor | None", "Tensor | None", tuple[bool, ...]], Grads]


class Gradients:
    """The two halves of an ``autograd.Function`` over kernels; ``index`` is the place of ``cu_seqlens``.

    ``backward`` gives the gradients alone, ``followed`` those that autograd follows.
    """

    def __init__(self, index: int, backward: Backward, followed: Backward) -> None:
        self._index, self._backward, self._followed = index, backward, followed

    def keep(self, ctx: Any, call: Call, residuals: tuple[Tensor, ...]) -> None:
        """Save a call and its residuals: tensors where autograd watches them, the rest beside."""
        at = self._index
        tensors = (*call.arrays[:at], *call.arrays[at + 1 :])
        ctx.save_for_backward(*tensors, *residuals)
        ctx.shapes = [None if x is None else x.shape for x in tensors]
        ctx.call = Call(call.operation, (call.arrays[at],), call.options, call.compute)
        ctx.count = len(tensors)
        ctx.set_materialize_grads(False)

    def pull(
        self, ctx: Any, d_output: Tensor | None, d_final_state: Tensor | None, needed: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        """The gradient of each array of the call that needs one, in its dtype."""
        saved, at = ctx.saved_tensors, self._index
        # A hook on saved tensors may have kept them elsewhere and give them back lying otherwise.
        tensors, residuals = saved[: ctx.count], tuple([x.contiguous() for x in saved[ctx.count :]])
        if [None if x is None else x.shape for x in tensors] != ctx.shapes:
            raise _changed(ctx, tensors, at)
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
        elif transform_reason() is not None:
            run = plain_gradients
        elif torch.is_grad_enabled():
            run = self._followed
        else:
            run = self._backward
        grads = run(call, residuals, d_output, d_final_state, wanted)
        return tuple(
            [None if grad is None else as_gradient(grad, x) for grad, x in zip(grads, arrays, strict=True)]
        )


def _changed(ctx: Any, tensors: Sequence[Tensor | None], at: int) -> StateError:
    """No version counts an assignment to ``.data``, and kernels would read what lies beside it."""
    entries = operation_of(ctx.call).inputs
    told = [
        f"{entry.name}: shape {tuple(x.shape)}, but {tuple(shape)} when the scan ran"
        for entry, x, shape in zip((*entries[:at], *entries[at + 1 :]), tensors, ctx.shapes, strict=True)
        if x is not None and x.shape != shape
    ]
    return StateError(f"{'; '.join(told)}; its data were exchanged before the backward pass")


def gradients_again(
    backward: Backward,
    call: Call,
    residuals: tuple[Tensor, ...],
    d_output: Tensor | None,
    d_final_state: Tensor | None,
    wanted: tuple[bool, ...],
) -> Grads:
    """What ``backward`` gives, in a graph from which the derivatives of these gradients come."""
    found = iter(
        _Again.apply(backward, call, residuals, wanted, d_output, d_final_state, *call.arrays)  # type: ignore[no-untyped-call]
        if any(wanted)
        else ()
    )
    return [next(found) if want else None for want in wanted]


class _Again(torch.autograd.Function):
    """Gradients as results: forward by kernels, backward by autograd through their closed form in plain operations."""

    @staticmethod
    def forward(
        ctx: Any,
        backward: Backward,
        call: Call,
        residuals: tuple[Tensor, ...],
        wanted: tuple[bool, ...],
        *given: Any,
    ) -> tuple[Tensor, ...]:
        """The wanted gradients; ``given`` are both cotangents and the arrays of the call."""
        grads = backward(call, residuals, given[0], given[1], wanted)
        ctx.save_for_backward(*[x if isinstance(x, Tensor) else None for x in given])
        ctx.call, ctx.wanted = call._replace(arrays=tuple([_beside(x) for x in call.arrays])), wanted
        ctx.set_materialize_grads(False)
        return tuple(
            [as_real(grad, x) for grad, x in zip(grads, call.arrays, strict=True) if grad is not None]
        )

    @staticmethod
    def backward(ctx: Any, *d_grads: Tensor | None) -> tuple[Any, ...]:
        """The gradients of ``given``."""
        nothing = (None,) * 4
        needed = ctx.needs_input_grad[len(nothing) :]
        if all(x is None for x in d_grads) or not any(needed):
            return *nothing, *[None] * len(needed)
        graph = torch.is_grad_enabled()
        with torch.enable_grad():
            # Views: a tensor that is given twice has a gradient for each place, and the walk back ends here.
            d_output, d_final_state, *arrays = given = [
                x.view_as(x) if need else x for x, need in zip(ctx.saved_tensors, needed, strict=True)
            ]
            arrays = [
                x if beside is None else beside for x, beside in zip(arrays, ctx.call.arrays, strict=True)
            ]
            call = ctx.call._replace(arrays=tuple(arrays))
            grads = plain_gradients(call, (), d_output, d_final_state, ctx.wanted)
            made = [x for x in grads if x is not None]
            asked = [
                (as_real(x, d_x).to(d_x.dtype), d_x)
                for x, d_x in zip(made, d_grads, strict=True)
                if d_x is not None and x.requires_grad
            ]
        if not asked:
            return *nothing, *[None] * len(needed)
        found = iter(
            torch.autograd.grad(
                [x for x, _ in asked],
                [x for x, need in zip(given, needed, strict=True) if need],
                [d_x for _, d_x in asked],
                create_graph=graph,
                allow_unused=True,
            )
        )
        return *nothing, *[next(found) if need else None for need in needed]


def _beside(x: Any) -> Any:
    """What of a call's arrays is no tensor."""
    return None if isinstance(x, Tensor) else x


def as_real(grad: Tensor, tensor: Tensor) -> Tensor:
    """A gradient, of which the real part for a real tensor."""
    return grad.real if grad.is_complex() and not tensor.is_complex() else grad


def as_gradient(grad: Tensor, tensor: Tensor) -> Tensor:
    """A gradient in the dtype of its tensor; the real part for a real one."""
    if grad.dtype is tensor.dtype:
        return grad
    return as_real(grad, tensor).to(tensor.dtype)
