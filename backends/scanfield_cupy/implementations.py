"""The implementation of each operation, by its name."""

from __future__ import annotations

from typing import Any

from scanfield_cupy.gated_delta import GatedDelta
from scanfield_cupy.linear import Linear
from scanfield_cupy.selective import Selective

_CLASSES: dict[str, Any] = {"linear_scan": Linear, "selective_scan": Selective, "gdn2": GatedDelta}


def implementation(operation: str) -> Any:
    """The implementation of an operation."""
    return _CLASSES[operation]()
