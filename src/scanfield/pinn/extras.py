"""Packages that the extras bring, imported where they are needed, with the line that installs what is missing."""

from __future__ import annotations

import importlib
from typing import Any

from scanfield.errors import BackendError

__all__ = ["need"]


def need(module: str, extra: str = "pinn") -> Any:
    """The module; BackendError with the line that installs it where it is missing.

    >>> need("math").pi > 3
    True
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.split(".")[0]
        raise BackendError(
            f"this needs {package}, which is not installed: pip install 'scanfield[{extra}]'"
        ) from None
