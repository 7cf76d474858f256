"""The scans of the candidate ``jax.scan``, by the operation's name."""

from __future__ import annotations

from functools import cache

from scanfield_jax.gated_delta import GatedDelta
from scanfield_jax.lift import Kernels, Lifted
from scanfield_jax.linear import Linear
from scanfield_jax.selective import Selective

KERNELS: dict[str, type[Kernels]] = {
    "linear_scan": Linear,
    "selective_scan": Selective,
    "gdn2": GatedDelta,
}


@cache
def implementation(operation: str) -> Lifted:
    """The implementation of an operation. One for each process: JAX knows what it compiled by its kernels."""
    return Lifted(operation, KERNELS[operation]())
