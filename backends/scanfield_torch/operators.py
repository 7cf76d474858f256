"""The operators by which a graph of torch's calls kernels: schema, shapes and gradients derived from the record."""

from __future__ import annotations

from typing import Any

import torch

from scanfield.dispatch import Call, Input, Operation, Option
from scanfield_torch.autograd import Gradients, as_gradient
from scanfield_torch.kernels import GraphKernels

Tensor = torch.Tensor

_LIBRARY = torch.library.Library("scanfield", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's own
_TAGS = (torch.Tag.pt2_compliant_tag,)


class Operators:
    """``scanfield::NAME``, ``NAME_save`` and ``NAME_backward`` of an operation, and calls of them."""

    def __init__(self, record: Operation, kernels: GraphKernels, gradients: Gradients) -> None:
        self._record, self._kernels, self._gradients = record, kernels, gradients
        self._form: Any = next(iter(record.generic.values()))
        name = record.name
        given = _schema(record)
        self._forward = self._define(
            name, f"({given}) -> (Tensor, Tensor)", self._run_forward, self._fake_forward
        )
        self._save = self._define(
            f"{name}_save", f"({given}) -> (Tensor, Tensor, Tensor[])", self._run_save, self._fake_save
        )
        self._backward = self._define(
            f"{name}_backward",
            f"({given}, Tensor[] residuals, Tensor? d_output, Tensor? d_final_state, bool[] wanted) -> Tensor[]",
            self._run_backward,
            self._fake_backward,
        )
        torch.library.register_autograd(
            f"scanfield::{name}_save", self._pull, setup_context=self._keep, lib=_LIBRARY
        )
        # A program that was exported without gradients may be asked for some later: it runs forward once more for them.
        torch.library.register_autograd(
            f"scanfield::{name}", self._pull, setup_context=self._keep_inputs, lib=_LIBRARY
        )

    def _define(self, name: str, schema: str, run: Any, fake: Any) -> Any:
        _LIBRARY.define(name + schema, tags=_TAGS)  # type: ignore[no-untyped-call]
        _LIBRARY.impl(name, run, "CPU")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"scanfield::{name}", fake, lib=_LIBRARY)
        return getattr(torch.ops.scanfield, name).default

    # -- calls of the operators ----------------------------------------------------------------------------------------

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        """Output and final state."""
        output, state = self._forward(*call.arrays, *call.options, call.compute)
        return output, state

    def save(self, call: Call) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Output and final state, which autograd follows, and residuals."""
        output, state, residuals = self._save(*call.arrays, *call.options, call.compute)
        return output, state, tuple(residuals)

    def backward(
        self,
        call: Call,
        residuals: tuple[Tensor, ...],
        d_output: Tensor | None,
        d_final_state: Tensor | None,
        wanted: tuple[bool, ...],
    ) -> list[Tensor | None]:
        """The wanted gradients, each in its tensor's dtype."""
        found = self._backward(
            *call.arrays, *call.options, call.compute, list(residuals), d_output, d_final_state, list(wanted)
        )
        grads: list[Tensor | None] = []
        at = 0
        for want in wanted:
            grads.append(found[at] if want else None)
            at += want
        return grads

    # -- what they do --------------------------------------------------------------------------------------------------

    def _call(self, args: tuple[Any, ...]) -> Call:
        count = len(self._record.inputs)
        arrays = [tuple(x) if isinstance(x, list) else x for x in args[:count]]
        return Call(self._record.name, tuple(arrays), tuple(args[count:-1]), args[-1])

    def _run_forward(self, *args: Any) -> tuple[Tensor, Tensor]:
        return self._kernels.forward(self._call(args))

    def _run_save(self, *args: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
        output, state, residuals = self._kernels.save(self._call(args))
        return output, state, list(residuals)

    def _run_backward(self, *args: Any) -> list[Tensor]:
        *given, residuals, d_output, d_final_state, wanted = args
        call = self._call(tuple(given))
        grads = self._kernels.backward(call, tuple(residuals), d_output, d_final_state, tuple(wanted))
        return [
            as_gradient(grad, x).contiguous()
            for grad, x in zip(grads, call.arrays, strict=True)
            if grad is not None
        ]

    # -- their shapes --------------------------------------------------------------------------------------------------

    def _fake_forward(self, *args: Any) -> tuple[Tensor, Tensor]:
        call = self._call(args)
        output, state, output_dtype, state_dtype = self._form.shapes(call)
        bounds = next((x for x in call.arrays if isinstance(x, tuple)), None)
        if bounds is not None:
            state = (len(bounds) - 1, *state[1:])
        main = call.arrays[self._record.main_index]
        return main.new_empty(output, dtype=output_dtype), main.new_empty(state, dtype=state_dtype)

    def _fake_save(self, *args: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
        call = self._call(args)
        main = call.arrays[self._record.main_index]
        residuals = [main.new_empty(shape, dtype=dtype) for shape, dtype in self._kernels.residuals(call)]
        return *self._fake_forward(*args), residuals

    def _fake_backward(self, *args: Any) -> list[Tensor]:
        wanted = args[-1]
        return [
            x.new_empty(x.shape)
            for x, want in zip(args[: len(self._record.inputs)], wanted, strict=True)
            if want
        ]

    # -- their gradients -----------------------------------------------------------------------------------------------

    def _keep(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        call = self._call(inputs)
        residuals = output[2]
        self._gradients.keep(ctx, call, tuple(residuals))
        ctx.mark_non_differentiable(*residuals)
        ctx.others = len(inputs) - len(call.arrays)

    def _keep_inputs(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        call = self._call(inputs)
        self._gradients.keep(ctx, call, ())
        ctx.others = len(inputs) - len(call.arrays)

    def _pull(
        self, ctx: Any, d_output: Tensor | None, d_final_state: Tensor | None, *_: Any
    ) -> tuple[Any, ...]:
        grads = self._gradients.pull(ctx, d_output, d_final_state, ctx.needs_input_grad[: -ctx.others])
        return *grads, *[None] * ctx.others


def _schema(record: Operation) -> str:
    """The arguments of a call: its arrays, its options, and the dtype of the carry."""
    return ", ".join([*map(_array, record.inputs), *map(_option, record.options), "str compute"])


def _array(entry: Input) -> str:
    if entry.role == "index":
        return f"int[]? {entry.name}"
    return f"Tensor{'?' if entry.optional else ''} {entry.name}"


def _option(option: Option) -> str:
    return f"{option.type.__name__}{'?' if option.default is None else ''} {option.name}"
