"""The implementation of each operation, by its name; of the gated delta rule all that can be asked for."""

from __future__ import annotations

from typing import Any

from scanfield_cupy.gated_delta import GatedDelta
from scanfield_cupy.gated_delta_chunk import GatedDeltaByLength, GatedDeltaChunk
from scanfield_cupy.linear import Linear
from scanfield_cupy.selective import Selective

_CLASSES: dict[str, Any] = {"linear_scan": Linear, "selective_scan": Selective, "gdn2": GatedDeltaByLength}


def implementation(operation: str) -> Any:
    """The implementation of an operation."""
    return _CLASSES[operation]()


def recurrent(operation: str) -> Any:
    """The gated delta rule token by token, at any length."""
    return GatedDelta()


def chunk(operation: str) -> Any:
    """The gated delta rule in chunks, at any length."""
    return GatedDeltaChunk()


def tensor(operation: str) -> Any:
    """The gated delta rule in chunks on tensor cores."""
    return GatedDeltaChunk(tensor=True)
