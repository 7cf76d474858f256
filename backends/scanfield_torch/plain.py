"""The generic form of a call in plain operations: what is right wherever torch's own operations are."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from scanfield.arrays import COMPLEX_OF
from scanfield.dispatch import Call, Grads, operation_of

Tensor = torch.Tensor


def form_of(call: Call) -> Any:
    """The generic form that the size of a call asks for."""
    operation = operation_of(call)
    return operation.generic[operation.choose(call).removeprefix("generic.")]


def without_autocast(call: Call) -> Any:
    """A context in which numbers are carried in the dtype that the call says."""
    device = call.arrays[operation_of(call).main_index].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return nullcontext()  # and nothing in a graph that is made of the call
    return torch.autocast(device, enabled=False)


def plain_gradients(
    call: Call,
    residuals: tuple[Tensor, ...],
    d_output: Tensor | None,
    d_final_state: Tensor | None,
    wanted: tuple[bool, ...],
) -> Grads:
    """The closed form in plain operations, from a forward of its own: it takes nobody's residuals."""
    form = form_of(call)
    with without_autocast(call):
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
    graph = torch.is_grad_enabled()
    with torch.enable_grad(), without_autocast(call):
        # An array may be given twice: each place has a gradient of its own.
        arrays = tuple([x.view_as(x) if want else x for x, want in zip(call.arrays, wanted, strict=True)])
        results = form_of(call).forward(call._replace(arrays=arrays))
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
