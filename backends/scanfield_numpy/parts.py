"""Functions that only kernels call are not optimised and made machine code of by themselves, but in the kernels alone.

numba does with every function all that it does with one that Python calls: LLVM's passes, twice, and code in memory,
which here nobody enters, as the kernel's own passes meet a copy of the function's text. Left out, a kernel compiles in
60 to 85 % of the time. It is done by two passes of our own in numba's pipeline; what they rely on is looked for
first, and where a numba has it no longer a function is compiled as any other.
"""

from __future__ import annotations

from typing import Any

from numba.core.codegen import CPUCodeLibrary
from numba.core.compiler import CompilerBase
from numba.core.compiler_machinery import LoweringPass, register_pass
from numba.core.typed_passes import AnnotateTypes

from scanfield_numpy import lean

_NEEDED = ("_get_module_for_linking", "_ensure_finalized", "_optimize_final_module", "finalize")


@register_pass(mutates_CFG=False, analysis_only=False)
class _TextAlone(LoweringPass):  # type: ignore[misc]  # numba ships no types
    """Before lowering: a library that joins its parts' text and does nothing else with it."""

    _name = "scanfield_text_alone"

    def __init__(self) -> None:
        LoweringPass.__init__(self)

    def run_pass(self, state: Any) -> bool:
        library = state.library = state.targetctx.codegen().create_library(state.func_id.func_qualname)
        # Nothing is entered, and so nothing made ready for it.
        state.flags.no_compile = True

        def finalize() -> None:
            joined = []
            for other in library._linking_libraries:
                if other not in joined:
                    joined.append(other)
                    library._final_module.link_in(other._get_module_for_linking(), preserve=True)
            library._final_module.verify()
            library._finalized = True

        library.finalize = finalize
        return True


@register_pass(mutates_CFG=False, analysis_only=False)
class _Known(LoweringPass):  # type: ignore[misc]  # as above
    """After it: numba knows functions by what Python would enter, of which there is none; any callable stands for it."""

    _name = "scanfield_known"

    def __init__(self) -> None:
        LoweringPass.__init__(self)

    def run_pass(self, state: Any) -> bool:
        stands_for_it: Any = [].append  # one of its own
        found = state["cr"] = state["cr"]._replace(cfunc=stands_for_it)
        state.targetctx.insert_user_function(found.cfunc, found.fndesc, [state.library])
        return True


class _PartCompiler(CompilerBase):  # type: ignore[misc]  # as above
    def define_pipelines(self) -> list[Any]:
        manager = lean.passes(self.state)
        manager.add_pass_after(_TextAlone, AnnotateTypes)
        manager.add_pass_after(_Known, lean.LOWERING)
        manager.finalize()
        return [manager]


def pipeline() -> dict[str, Any]:
    """The options of ``njit`` for such a function."""
    known = all(callable(getattr(CPUCodeLibrary, name, None)) for name in _NEEDED)
    return {"pipeline_class": _PartCompiler if known else lean.KernelCompiler}
