"""CUDA tensors of PyTorch on the kernels for CuPy arrays: the same memory, torch's device, stream and allocator.

A tensor becomes a CuPy array and a result a tensor through DLPack, without a copy. Kernels start on torch's current
stream, behind what made their inputs, and their memory comes from torch's allocator, which then knows of all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import cupy
import torch
from torch.autograd import forward_ad
from torch.utils.dlpack import from_dlpack

from scanfield.dispatch import Call, Grads, Verb, operation_of
from scanfield_cupy import implementations
from scanfield_cupy.layout import dtype

Tensor = torch.Tensor


class Bridged:
    """Implementation of an operation on CUDA tensors, under torch's autograd, by one for CuPy arrays."""

    def __init__(self, kernels: Any) -> None:
        self.kernels = kernels

    def declines(self, call: Call, verb: Verb) -> str | None:
        """Transforms and compilers, which look into plain operations only; then what the kernels decline."""
        if torch.compiler.is_compiling():
            return "torch.compile traces plain operations here"
        if forward_ad._current_level >= 0 or torch._C._functorch.maybe_current_level() is not None:
            return "torch.func, vmap and forward-mode derivatives go through plain operations"
        for x in call.arrays:
            if isinstance(x, Tensor) and (x.layout is not torch.strided or type(x) not in _PLAIN):
                return f"a {type(x).__name__} of layout {x.layout}"
        if verb in ("save", "summarise") and _followed(call):
            return "autograd follows its results, which only plain operations let it do here"
        with _current(call):
            reason: str | None = self.kernels.declines(_arrays(call), verb)
        return reason

    def notes(self, call: Call) -> tuple[str, ...]:
        """What the kernels' implementation tells, under the names that it has here."""
        with _current(call):
            told = self.kernels.notes(_arrays(call))
        return tuple(line.replace("cupy.rawkernel", "torch.cuda") for line in told)

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        """Output and final state."""
        if _followed(call):
            found: tuple[Tensor, Tensor] = _Run.apply(self, call, *call.arrays)  # type: ignore[no-untyped-call]
            return found
        output, state = self._run("forward", call)
        return output, state

    step = forward

    def save(self, call: Call) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Output, final state and residuals."""
        output, state, residuals = self._run("save", call)
        return output, state, residuals

    def backward(
        self,
        call: Call,
        residuals: tuple[Tensor, ...],
        d_output: Tensor | None,
        d_final_state: Tensor | None,
        wanted: tuple[bool, ...],
    ) -> Grads:
        """The wanted gradients."""
        grads: Grads = self._run("backward", call, residuals, d_output, d_final_state, tuple(wanted))
        return grads

    def summarise(self, call: Call) -> tuple[Tensor, Tensor]:
        """Transition and final state from zero."""
        transition, state = self._run("summarise", call)
        return transition, state

    def _run(self, verb: str, call: Call, *more: Any) -> Any:
        with torch.no_grad(), _current(call):
            return _tensors(getattr(self.kernels, verb)(_arrays(call), *(_array(x) for x in more)))


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _followed(call: Call) -> bool:
    """Whether autograd follows the results."""
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in call.arrays)


@contextmanager
def _current(call: Call) -> Iterator[None]:
    """CuPy on the device of the call's tensors, on torch's current stream there, with torch's allocator."""
    device = call.arrays[operation_of(call).main_index].device
    stream = torch.cuda.current_stream(device)

    def allocate(size: int, index: int) -> int:
        return int(torch.cuda.caching_allocator_alloc(size, index, stream))

    def release(pointer: int, index: int) -> None:
        torch.cuda.caching_allocator_delete(pointer)  # type: ignore[no-untyped-call]

    with ExitStack() as entered:
        entered.enter_context(cupy.cuda.Device(device.index or 0))
        entered.enter_context(cupy.cuda.Stream.from_external(stream))
        entered.enter_context(
            cupy.cuda.using_allocator(cupy.cuda.PythonFunctionAllocator(allocate, release).malloc)
        )
        yield


def _arrays(call: Call) -> Call:
    return call._replace(arrays=tuple(_array(x) for x in call.arrays))


def _array(x: Any) -> Any:
    """A tensor, or a tuple of them, as CuPy arrays on the same memory; anything else as it is."""
    if isinstance(x, tuple):
        return tuple(_array(each) for each in x)
    if not isinstance(x, Tensor):
        return x
    x = x.detach().resolve_conj().resolve_neg()
    if x.dtype is torch.bfloat16:  # two bytes that DLPack's readers need not know
        return cupy.from_dlpack(x.view(torch.int16)).view(dtype("bfloat16"))
    return cupy.from_dlpack(x)


def _tensors(x: Any) -> Any:
    """CuPy arrays, or sequences of them, as tensors on the same memory."""
    if isinstance(x, tuple | list):
        return tuple(_tensors(each) for each in x)
    if x is None:
        return None
    if x.dtype == dtype("bfloat16"):
        return from_dlpack(x.view("int16")).view(torch.bfloat16)
    return from_dlpack(x)


class _Run(torch.autograd.Function):
    """A call that autograd follows."""

    @staticmethod
    def forward(ctx: Any, bridged: Bridged, call: Call, *arrays: Any) -> tuple[Tensor, Tensor]:
        """Output and final state; ``arrays`` are those of the call."""
        output, state, residuals = bridged.save(call)
        tensors = [x if isinstance(x, Tensor) else None for x in arrays]
        ctx.save_for_backward(*tensors, *residuals)
        ctx.bridged, ctx.call = (
            bridged,
            call._replace(arrays=tuple(x for x in arrays if isinstance(x, tuple))),
        )
        ctx.places = [i for i, x in enumerate(arrays) if isinstance(x, tuple)]
        ctx.count = len(arrays)
        ctx.set_materialize_grads(False)
        return output, state

    @staticmethod
    def backward(ctx: Any, d_output: Tensor | None, d_final_state: Tensor | None) -> tuple[Any, ...]:
        """The gradients of ``arrays``, in their dtypes."""
        arrays = list(ctx.saved_tensors[: ctx.count])
        for place, bounds in zip(ctx.places, ctx.call.arrays, strict=True):
            arrays[place] = bounds
        call = ctx.call._replace(arrays=tuple(arrays))
        wanted = tuple(
            need and isinstance(x, Tensor) for need, x in zip(ctx.needs_input_grad[2:], arrays, strict=True)
        )
        if d_output is None and d_final_state is None:
            return (None,) * (2 + len(arrays))
        if torch.is_grad_enabled():  # a gradient that is to be differentiated again: in plain operations
            return None, None, *_plain_gradients(call, d_output, d_final_state, wanted)
        residuals = ctx.saved_tensors[ctx.count :]
        carried = _cotangents(call, d_output, d_final_state)
        grads = ctx.bridged.backward(call, residuals, *carried, wanted)
        return None, None, *(None if g is None else g.to(x.dtype) for g, x in zip(grads, arrays, strict=True))


def _cotangents(call: Call, *given: Tensor | None) -> tuple[Tensor | None, ...]:
    """In the dtype of the carry, as kernels take them."""
    wide = getattr(torch, call.compute)
    return tuple(x if x is None or x.is_complex() else x.to(wide) for x in given)


def _plain_gradients(
    call: Call, d_output: Tensor | None, d_final_state: Tensor | None, wanted: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    operation = operation_of(call)
    results = operation.generic[operation.choose(call).removeprefix("generic.")].forward(call)
    pairs = [(y, d) for y, d in zip(results, (d_output, d_final_state), strict=True) if d is not None]
    asked = [x for x, want in zip(call.arrays, wanted, strict=True) if want]
    found = iter(
        torch.autograd.grad(
            [y for y, _ in pairs], asked, [d for _, d in pairs], create_graph=True, allow_unused=True
        )
    )
    return tuple(next(found) if want else None for want in wanted)


def implementation(operation: str) -> Bridged:
    """The implementation of an operation."""
    return Bridged(implementations.implementation(operation))


def recurrent(operation: str) -> Bridged:
    """The gated delta rule token by token, at any length."""
    return Bridged(implementations.recurrent(operation))


def chunk(operation: str) -> Bridged:
    """The gated delta rule in chunks, at any length."""
    return Bridged(implementations.chunk(operation))


def tensor(operation: str) -> Bridged:
    """The gated delta rule in chunks on tensor cores."""
    return Bridged(implementations.tensor(operation))
