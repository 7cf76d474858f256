"""CuPy on a card if there is one; otherwise the stand-in of scanfield's tests, if `CUPY_STANDIN` says where it lies."""

from __future__ import annotations

import importlib.util
import os
import sys
from contextlib import ExitStack

import pytest

_STACK = ExitStack()


def pytest_configure() -> None:
    if importlib.util.find_spec("cupy") is not None:
        import cupy

        if cupy.is_available():
            return
    folder = os.environ.get("CUPY_STANDIN")
    if folder is None:
        raise pytest.UsageError("no CUDA device, and CUPY_STANDIN does not name the folder of a stand-in")
    sys.path.insert(0, folder)
    import standin

    _STACK.enter_context(standin.installed())


def pytest_unconfigure() -> None:
    _STACK.close()
