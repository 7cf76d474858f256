"""The compiled implementation of each operation, by its name."""

from __future__ import annotations

from scanfield.dispatch import Implementation
from scanfield_numpy.gated_delta import GatedDelta
from scanfield_numpy.linear import Linear
from scanfield_numpy.selective import Selective

_IMPLEMENTATIONS: dict[str, type[Implementation]] = {
    "linear_scan": Linear,
    "selective_scan": Selective,
    "gdn2": GatedDelta,
}


def implementation(operation: str) -> Implementation:
    """The implementation of an operation."""
    return _IMPLEMENTATIONS[operation]()
