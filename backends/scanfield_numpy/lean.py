"""numba's way from Python to LLVM without what it does there for other functions than kernels.

Kernels are numbers, places and loops: no objects, closures or exceptions. Most of the time that numba takes for them goes
where it finds nothing:

- passes that look for what kernels do not have, and the ends of variables' lives, which only objects need;
- the type of every call is asked for at every call, once more for each literal in it, and again when it is lowered;
- an operator is sought in a form for constants, up to three times, before it is taken as its operands' types say;
- a parser works out the size of each variable, which only a debugger reads.

Without, a first call takes 67 to 89 % of the time, and a kernel's arithmetic keeps every instruction. What is done
otherwise than numba does it is done by a pass and two wrappers of our own; what they rely on is looked for first, and a
numba that has it no longer goes its own way.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from numba.core import types
from numba.core.base import BaseContext as Target
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import register_pass
from numba.core.errors import NumbaError
from numba.core.lowering import Lower
from numba.core.typed_passes import NativeLowering
from numba.core.types.misc import unliteral
from numba.core.typing.context import BaseContext as Typing

_RELIED_ON = {
    Lower: {"lower_binop": ["self", "resty", "expr", "op"]},
    Typing: {"resolve_function_type": ["self", "func", "args", "kws"]},
    Target: {"get_abi_sizeof": ["self", "ty"], "subtarget": ["self", "kws"]},
}
_KNOWN = all(
    list(inspect.signature(getattr(owner, name, list)).parameters) == parameters
    for owner, methods in _RELIED_ON.items()
    for name, parameters in methods.items()
)

_IDLE = {
    "DumpParforDiagnostics",
    "FindLiterallyCalls",
    "IRLegalization",
    "IRProcessing",
    "InlineClosureLikes",
    "InlineInlinables",
    "InlineOverloads",
    "LiteralPropagationSubPipelinePass",
    "LiteralUnroll",
    "MakeFunctionToJitFunction",
    "NoPythonSupportedFeatureValidation",
    "RewriteDynamicRaises",
    "WithLifting",
}
"""The passes that do nothing for a kernel."""


class _Remembered:
    """numba's typing context, which is asked for each function and types of arguments once, whatever the literals."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._found: dict[Any, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def resolve_function_type(self, func: Any, args: Any, kws: Any) -> Any:
        """The signature of a call."""
        if not kws and isinstance(func, types.Function) and not any(x.prefer_literal for x in func.templates):
            plain = tuple(unliteral(kind) for kind in args)
            found = self._found.get((func, plain))
            if found is not None:
                return found
            try:
                found = self._found[func, plain] = self._context.resolve_function_type(func, plain, {})
            except NumbaError:
                found = None
            if found is not None:
                return found
        return self._context.resolve_function_type(func, args, kws)


_remembered = lru_cache(1)(_Remembered)


@lru_cache(1)
def _sizes(target: Any) -> Callable[[Any], int]:
    """Of LLVM's types in memory, each worked out once."""
    found: dict[str, int] = {}

    def size(kind: Any) -> int:
        name = str(kind)
        if name not in found:
            found[name] = kind.get_abi_size(target)
        return found[name]

    return size


class _Lower(Lower):  # type: ignore[misc]  # numba ships no types
    def lower_binop(self, resty: Any, expr: Any, op: Any) -> Any:
        """An operator in the form that its operands' types say."""
        context, kinds = self.context, self.fndesc.calltypes[expr]
        function = context.get_function(context.typing_context.resolve_value_type(op), kinds)
        operands = [
            context.cast(self.builder, self.loadvar(operand.name), self.typeof(operand.name), kind)
            for operand, kind in zip((expr.lhs, expr.rhs), kinds.args, strict=True)
        ]
        return context.cast(self.builder, function(self.builder, operands), kinds.return_type, resty)


@register_pass(mutates_CFG=True, analysis_only=False)
class _Lowering(NativeLowering):  # type: ignore[misc]  # as above
    _name = "scanfield_lowering"

    @property
    def lowering_class(self) -> type[_Lower]:
        return _Lower


LOWERING = _Lowering if _KNOWN else NativeLowering
"""The pass after which a function is LLVM's text."""


def passes(state: Any) -> Any:
    """numba's manager of the passes for a function, which others may join before they are made final."""
    manager = DefaultPassBuilder.define_nopython_pipeline(state)
    if _KNOWN:
        state.typingctx = _remembered(state.typingctx)
        state.targetctx = state.targetctx.subtarget(get_abi_sizeof=_sizes(state.targetctx.target_data))
        manager.passes = [
            (LOWERING if kind is NativeLowering else kind, about)
            for kind, about in manager.passes
            if kind.__name__ not in _IDLE
        ]
    return manager


class KernelCompiler(CompilerBase):  # type: ignore[misc]  # as above
    """What compiles a kernel."""

    def define_pipelines(self) -> list[Any]:
        """The one pipeline."""
        manager = passes(self.state)
        manager.finalize()
        return [manager]
