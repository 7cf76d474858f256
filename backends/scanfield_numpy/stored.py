"""Compiled kernels on disk: numba's cache in a folder of the user's choice, which need not be writable."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba.core.caching import CompileResultCacheImpl, FunctionCache

from scanfield_numpy.vector import REGISTER_BYTES

FOLDER = os.environ.get("SCANFIELD_CACHE_DIR", "")
"""Where kernels are kept; empty for nowhere."""


@functools.cache
def _stamp() -> str:
    """Of all that a kernel may be made of: a kernel that another version of this package left is none of ours."""
    found = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()


class _Place:
    """What numba asks where a function's kernels lie."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._line = function.__code__.co_firstlineno

    @classmethod
    def from_function(cls, function: Callable[..., None], file: str) -> _Place:
        return cls(function)

    def get_cache_path(self) -> str:
        return os.path.join(FOLDER, f"vector{REGISTER_BYTES}")

    def ensure_cache_path(self) -> None:
        os.makedirs(self.get_cache_path(), exist_ok=True)

    def get_source_stamp(self) -> str:
        return _stamp()

    def get_disambiguator(self) -> str:
        return str(self._line)


class _Kernels(CompileResultCacheImpl):  # type: ignore[misc]  # numba ships no types
    _locator_classes = (_Place,)


class KernelCache(FunctionCache):  # type: ignore[misc]  # numba ships no types
    """The kernels of one function. A folder that cannot be written to is read; what it lacks is compiled each time.

    What lies there damaged is a warning and is written anew.
    """

    _impl_class = _Kernels

    def load_overload(self, signature: Any, target: Any) -> Any:
        """One that was kept, or None."""
        try:
            return super().load_overload(signature, target)
        except Exception as error:  # whatever a damaged pickle may do
            _warn(f"holds a damaged kernel ({type(error).__name__}: {error}), which is compiled anew")
            with contextlib.suppress(OSError):
                self.flush()
            return None

    def save_overload(self, signature: Any, compiled: Any) -> None:
        """Keep one, or say why not."""
        try:
            super().save_overload(signature, compiled)
        except Exception as error:
            _warn(
                f"takes no compiled kernel ({type(error).__name__}: {error}); the next process compiles anew"
            )


def _warn(what: str) -> None:
    warnings.warn(f"SCANFIELD_CACHE_DIR: {FOLDER!r} {what}", RuntimeWarning, stacklevel=3)
