"""The generic recurrence with a few tokens unrolled and compiled by ``torch.compile``, the loop over time outside.

A graph of the whole sequence would take minutes to compile and be another one at each length. One of a block of
tokens is compiled once, whatever the length; the tokens that are left over at the end run as they are. A call's
``chunk_size`` is the size of a block where it is the smaller one.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from types import FunctionType
from typing import Any

import torch

from scanfield import dispatch
from scanfield.dispatch import Call, loops
from scanfield_torch.kernels import no_view
from scanfield_torch.lift import Lifted
from scanfield_torch.plain import without_autocast

Tensor = torch.Tensor

TOKENS = 16
"""Of a block, at most. Half as many cost a quarter more time; twice as many gain little and take twice as long to
compile, which is 10 seconds for the forward of ``gdn2`` and 12 for its backward."""

with warnings.catch_warnings():
    # The compiler imports this module of torch's, which warns of what torch itself has deprecated.
    warnings.simplefilter("ignore", DeprecationWarning)
    importlib.import_module("torch.utils.mkldnn")


class Unrolled:
    """The verbs of the recurrent form, its steps compiled."""

    packs = False

    def __init__(self, operation: str) -> None:
        self._form: Any = dispatch.implementation(operation, "generic.recurrent")
        record = next(record for record in dispatch.operations() if record.name == operation)
        self._chunk = [option.name for option in record.options].index("chunk")

    def declines(self, tensor: Tensor) -> str | None:
        """Complex tensors, which torch compiles to no kernels, and devices that it has no compiler for."""
        if tensor.is_complex():
            return "torch.compile makes no kernels for complex numbers"
        if tensor.is_cuda and not _has_triton():
            return "torch.compile needs the package triton for CUDA tensors"
        return None

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        """Output and final state."""
        with self._compiled_steps(call):
            output, state = self._form.forward(self._ready(call))
        return no_view(output), no_view(state)

    def save(self, call: Call) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Output, final state and the states at the blocks' starts."""
        with self._compiled_steps(call):
            output, state, residuals = self._form.save(self._ready(call))
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
        with self._compiled_steps(call):
            grads = self._form.backward(self._ready(call), residuals, d_output, d_final_state, wanted)
        return [no_view(grad) if want else None for grad, want in zip(grads, wanted, strict=True)]

    def summarise(self, call: Call) -> tuple[Tensor, Tensor]:
        """Transition and final state from zero."""
        with self._compiled_steps(call):
            transition, state = self._form.summarise(self._ready(call))
        return transition, state

    def _tokens(self, call: Call) -> int:
        """Of a block."""
        return min(call.options[self._chunk] or TOKENS, TOKENS)

    def _ready(self, call: Call) -> Call:
        """The call in blocks, on tensors that autograd does not follow."""
        arrays = tuple([x.detach() if isinstance(x, Tensor) else x for x in call.arrays])
        options = (*call.options[: self._chunk], self._tokens(call), *call.options[self._chunk + 1 :])
        return call._replace(arrays=arrays, options=options)

    @contextmanager
    def _compiled_steps(self, call: Call) -> Iterator[None]:
        tokens = self._tokens(call)

        def compiler(step: loops.Step, size: int) -> loops.Step:
            return _compiled(step) if size == tokens else step  # a shorter sequence runs as it is

        # What compiled code is made for: neither autograd nor autocast is its affair.
        with torch.no_grad(), without_autocast(call), loops.steps_by(compiler):
            yield


@cache
def implementation(operation: str) -> Lifted:
    """The implementation of an operation."""
    return Lifted(operation, Unrolled(operation))


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _compiled(step: loops.Step) -> loops.Step:
    """A step for all blocks of one walk over time, compiled at the first."""
    run: Callable[..., Any] | None = None
    strides: list[tuple[int, ...]] = []

    def whole(config: Any, constants: Any, carry: Any, slices: Any) -> Any:
        nonlocal run, strides
        leaves: list[Tensor] = []
        form = _flatten((constants, carry, slices), leaves)
        if run is None:  # the blocks of a walk are alike
            kinds = tuple([(tuple(x.shape), x.dtype, x.device) for x in leaves])
            run = _compile(step, config, form, kinds, torch.is_inference_mode_enabled())
            strides = [torch.empty(x.shape, device="meta").stride() for x in leaves]
        leaves = [
            x if x.stride() == stride else _plain(x, stride)
            for x, stride in zip(leaves, strides, strict=True)
        ]
        with loops.steps_by(None):  # loops within the step are unrolled
            return run(*leaves)

    return whole


def _plain(x: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Contiguous, with the steps of such a tensor along axes of size 1 too: torch compiles anew for others."""
    return x.contiguous().as_strided(x.shape, stride)


def _flatten(tree: Any, leaves: list[Tensor]) -> Any:
    """The form of nested tuples, whose tensors are appended to ``leaves``."""
    if type(tree) is tuple:
        return tuple([_flatten(x, leaves) for x in tree])
    if tree is None:
        return None
    leaves.append(tree)
    return True


def _filled(form: Any, leaves: Iterator[Tensor]) -> Any:
    """The nested tuples of a form."""
    if type(form) is tuple:
        return tuple([_filled(x, leaves) for x in form])
    return None if form is None else next(leaves)


@lru_cache(maxsize=256)
def _compile(
    step: loops.Step, config: Hashable, form: Any, kinds: Hashable, inference: bool
) -> Callable[..., Any]:
    """A step compiled for tensors of these shapes, dtypes and devices."""

    def block(*leaves: Tensor) -> Any:
        constants, carry, slices = _filled(form, iter(leaves))
        return step(config, constants, carry, slices)

    # torch counts what it compiles by code object, and gives up after a few: each has its own.
    alone = FunctionType(block.__code__.replace(), block.__globals__, "block", None, block.__closure__)
    compiled: Callable[..., Any] = torch.compile(alone, fullgraph=True, dynamic=False)
    return compiled
