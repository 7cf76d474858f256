"""How kernels are compiled: once for each dtype, whatever the options, strides and read-only flags of a call are.

``SCANFIELD_CACHE_DIR`` keeps what was compiled on disk.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from numba import config, njit, types
from numba.core.compiler_lock import global_compiler_lock

from scanfield.errors import BackendError
from scanfield.threads import SLOW_LOCK
from scanfield_numpy import parts
from scanfield_numpy.lean import KernelCompiler
from scanfield_numpy.stored import FOLDER, KernelCache

if config.DISABLE_JIT:
    raise ImportError("NUMBA_DISABLE_JIT is set: numba compiles nothing")


def reason_against_compiling() -> str | None:
    """Why numba compiles nothing now: somebody has switched it off since."""
    return "numba.config.DISABLE_JIT is set: numba compiles nothing" if config.DISABLE_JIT else None


# No fastmath: what may be fused or reordered, the vectors' own arithmetic says.
_OPTIONS = {
    "nogil": True,
    "error_model": "numpy",
    "boundscheck": False,
    "_nrt": False,
    "no_rewrites": True,
    "no_cfunc_wrapper": True,
}

# What only kernels call needs no way in from Python, which costs as much to compile as a small function.
part = njit(no_cpython_wrapper=True, **parts.pipeline(), **_OPTIONS)
"""Decorates a function that kernels call."""


class Kernel:
    """A function ``(first, last, block, memory, kind)`` over a range of tasks, compiled for a dtype when first asked for.

    ``block`` is the address of int64: sizes and flags, then the addresses of arrays; ``memory`` that of the range's own
    memory; ``kind`` any number of the dtype. Addresses keep what is compiled small: an array is seven arguments. A
    kernel that is compiled for each of a few sizes takes one argument more, a tuple as long as the size.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function
        self._compiled: dict[tuple[str, int], Any] = {}
        self.__doc__ = function.__doc__

    def __call__(self, dtype: str, size: int = 0) -> Callable[..., None]:
        """The compiled function for ``"float32"`` or ``"float64"``, and for a size if it has one."""
        found = self._compiled.get((dtype, size))
        if found is None:
            with SLOW_LOCK:
                found = self._compiled.get((dtype, size))
                if found is None:
                    found = self._compiled[dtype, size] = self._compile(dtype, size)
        return found  # type: ignore[no-any-return]  # numba ships no types

    def entry(self, dtype: str, size: int) -> Callable[..., None]:
        """The same, without what numba does to find it by its arguments: they are these very ones."""
        (found,) = self(dtype, size).overloads.values()  # type: ignore[attr-defined]  # as above
        return found.entry_point  # type: ignore[no-any-return]

    def _compile(self, dtype: str, size: int) -> Any:
        """In a thread of its own: Python's frames then lie where the compiler's calls do not take and give back memory.

        (CPython allots frames in blocks of 16 KiB; a loop of calls across the end of one spent a quarter of the time in
        the system.)
        """
        if global_compiler_lock.is_locked():  # by this thread: numba is compiling, and no other thread may
            return self._compile_here(dtype, size)
        try:
            alone = ThreadPoolExecutor(1)
            waiting = alone.submit(self._compile_here, dtype, size)
        except RuntimeError:
            # The interpreter is on its way out and starts no more threads.
            return self._compile_here(dtype, size)
        with alone:
            return waiting.result()

    def _compile_here(self, dtype: str, size: int) -> Any:
        reason = reason_against_compiling()
        if reason is not None:
            raise BackendError(f"{reason}; SCANFIELD_BLOCK=numpy.numba does without it")
        compiled = njit(pipeline_class=KernelCompiler, **_OPTIONS)(self._function)
        if FOLDER:
            # What ``cache=True`` would set, for one folder of the whole process.
            compiled._cache = KernelCache(self._function)
        tag = (types.UniTuple(types.int64, size),) if size else ()
        collects = gc.isenabled()
        gc.disable()
        try:
            compiled.compile((*(types.int64,) * 4, getattr(types, dtype), *tag))
        finally:
            if collects:
                gc.enable()
        compiled.disable_compile()
        return compiled


kernel = Kernel
"""Decorates the function of a ``Kernel``."""
