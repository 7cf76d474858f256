"""From an operation's record and its kernels to an implementation: what may run when, eager and compiled.

Eager calls take an ``autograd.Function`` straight to the kernels, or the kernels alone where no gradient can be asked
for. Where torch traces (``torch.compile``, ``torch.export``), calls take operators that it can put in a graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from scanfield import dispatch
from scanfield.dispatch import Call, Grads, Operation, Verb
from scanfield_torch.autograd import Gradients, gradients_again
from scanfield_torch.kernels import GraphKernels, Kernels
from scanfield_torch.operators import Operators
from scanfield_torch.plain import plain_gradients
from scanfield_torch.transforms import is_jit_tracing, transform_reason

Tensor = torch.Tensor

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Lifted:
    """Implementation of an operation on tensors."""

    def __init__(self, operation: str, kernels: Kernels, *, in_graphs: GraphKernels | None = None) -> None:
        """``in_graphs`` are what torch's graphs call, by operators; without them a call that is traced declines."""
        record = next(
            record
            for record in dispatch.operations()
            if isinstance(record, Operation) and record.name == operation
        )
        self.kernels = kernels
        self.index = [entry.role for entry in record.inputs].index("index")
        self.autograd = Gradients(self.index, self._backward, self._backward_again)
        self._operators = Operators(record, in_graphs, self.autograd) if in_graphs is not None else None

    def declines(self, call: Call, verb: Verb) -> str | None:
        """Transforms under which no operator is right, and tensors that no kernel takes."""
        reason = transform_reason()
        if reason is not None:
            return reason
        for i, x in enumerate(call.arrays):
            if x is None:
                continue
            if i == self.index:
                if not isinstance(x, tuple):
                    return "cu_seqlens: its values are not on the host"
                if not self.kernels.packs:
                    return "cu_seqlens: code would be compiled for every number of sequences of like length"
                continue
            if x.layout is not torch.strided:
                return f"a tensor of layout {x.layout}"
            reason = self.kernels.declines(x)
            if reason is not None:
                return reason
        if verb == "summarise" and self._followed(call):
            return "autograd follows its results, which only plain operations let it do here"
        own = self._operators is not None and not (
            verb == "summarise" or (verb == "save" and self._followed(call))
        )
        if not own and self._traced(call):
            return "a graph is made of the call"
        return None

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        """Output and final state. Nothing is saved where no gradient can be asked for."""
        operators = self._operators
        if operators is not None and self._traced(call):
            return operators.save(call)[:2] if self._followed(call) else operators.forward(call)
        if self._followed(call):
            found: tuple[Tensor, Tensor] = _Run.apply(self, call, *call.arrays)  # type: ignore[no-untyped-call]
            return found
        return self.kernels.forward(call)

    step = forward

    def save(self, call: Call) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Output, final state and residuals."""
        operators = self._operators
        if operators is not None and self._traced(call):
            return operators.save(call)
        if self._followed(call):
            output, state, *residuals = _Save.apply(self, call, *call.arrays)  # type: ignore[no-untyped-call]
            return output, state, tuple(residuals)
        return self.kernels.save(call)

    def backward(
        self,
        call: Call,
        residuals: tuple[Tensor, ...],
        d_output: Tensor | None,
        d_final_state: Tensor | None,
        wanted: tuple[bool, ...],
    ) -> Grads:
        """The wanted gradients, which autograd follows where it follows what they are made of."""
        wanted = tuple([want and x is not None for want, x in zip(wanted, call.arrays, strict=True)])
        followed = torch.is_grad_enabled() and any(
            x is not None and x.requires_grad for x in (d_output, d_final_state)
        )
        if transform_reason() is not None:
            run = plain_gradients
        elif followed or self._followed(call):
            run = self._backward_again
        else:
            run = self._backward
        return run(call, residuals, d_output, d_final_state, wanted)

    def summarise(self, call: Call) -> tuple[Tensor, Tensor]:
        """Transition and final state from zero."""
        return self.kernels.summarise(call)

    def _backward(
        self,
        call: Call,
        residuals: tuple[Tensor, ...],
        d_output: Tensor | None,
        d_final_state: Tensor | None,
        wanted: tuple[bool, ...],
    ) -> Grads:
        operators = self._operators
        if operators is not None and self._traced(call, d_output, d_final_state):
            kept = residuals or operators.save(call)[2]
            return operators.backward(call, kept, d_output, d_final_state, wanted)
        kept = residuals or self.kernels.save(call)[2]  # an operator may have kept none
        return self.kernels.backward(call, kept, d_output, d_final_state, wanted)

    def _backward_again(
        self,
        call: Call,
        residuals: tuple[Tensor, ...],
        d_output: Tensor | None,
        d_final_state: Tensor | None,
        wanted: tuple[bool, ...],
    ) -> Grads:
        if self._traced(call, d_output, d_final_state):
            return plain_gradients(call, residuals, d_output, d_final_state, wanted)
        return gradients_again(self._backward, call, residuals, d_output, d_final_state, wanted)

    def _followed(self, call: Call) -> bool:
        """Whether autograd follows the results."""
        if not torch.is_grad_enabled():
            return False
        for i, x in enumerate(call.arrays):  # noqa: SIM110  # a small call feels what a generator costs
            if x is not None and i != self.index and x.requires_grad:
                return True
        return False

    def _traced(self, call: Call, *more: Tensor | None) -> bool:
        """Whether a graph is made of the call, or its tensors stand for others and have no values of their own."""
        if torch.compiler.is_compiling() or is_in_torch_dispatch_mode() or is_jit_tracing():
            return True
        for x in (*call.arrays, *more):  # noqa: SIM110  # as above
            if x is not None and type(x) not in _PLAIN and not isinstance(x, tuple):
                return True
        return False


class _Run(torch.autograd.Function):
    """An eager call that autograd follows."""

    @staticmethod
    def forward(ctx: Any, lifted: Lifted, call: Call, *arrays: Any) -> tuple[Tensor, Tensor]:
        """Output and final state; ``arrays`` are those of the call."""
        output, state, residuals = lifted.kernels.save(call)
        lifted.autograd.keep(ctx, call, residuals)
        ctx.lifted = lifted
        return output, state

    @staticmethod
    def backward(ctx: Any, d_output: Tensor | None, d_final_state: Tensor | None) -> tuple[Any, ...]:
        """The gradients of ``arrays``."""
        needed = ctx.needs_input_grad[2:]
        return None, None, *ctx.lifted.autograd.pull(ctx, d_output, d_final_state, needed)


class _Save(torch.autograd.Function):
    """The same, with its residuals as results that are no part of autograd's graph."""

    @staticmethod
    def forward(ctx: Any, lifted: Lifted, call: Call, *arrays: Any) -> tuple[Tensor, ...]:
        """Output, final state and residuals."""
        output, state, residuals = lifted.kernels.save(call)
        lifted.autograd.keep(ctx, call, residuals)
        ctx.mark_non_differentiable(*residuals)
        ctx.lifted = lifted
        return output, state, *residuals

    @staticmethod
    def backward(ctx: Any, d_output: Tensor | None, d_final_state: Tensor | None, *_: Any) -> tuple[Any, ...]:
        """The gradients of ``arrays``."""
        return _Run.backward(ctx, d_output, d_final_state)
