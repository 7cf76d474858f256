"""The implementation of each operation, by its name."""

from __future__ import annotations

from typing import Any

from scanfield_cupy.linear import Linear

_CLASSES: dict[str, Any] = {"linear_scan": Linear}


def implementation(operation: str) -> Any:
    """The implementation of an operation."""
    return _CLASSES[operation]()
