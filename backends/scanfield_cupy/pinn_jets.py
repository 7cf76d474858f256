"""The PINN's sweeps on CuPy arrays: products into buffers; between them a jet goes through an activation in one kernel."""

from __future__ import annotations

from typing import Any

import array_api_compat.cupy as compat
import cupy

from scanfield.arrays import dtype_name
from scanfield.pinn.kernels import Channels
from scanfield.pinn.memory import Buffers
from scanfield.pinn.selection import own_kernels
from scanfield_cupy.modules import STORED, THREADS, blocks_for, launch
from scanfield_cupy.pinn_embedding import Embedding
from scanfield_cupy.pinn_steps import Steps, weights_of

Array = Any


class Fused(Steps, Embedding):
    """Kernels that write, with the steps of embedding, activations and single layers fused."""

    name = "cupy.rawkernel"

    def activate(self, name: str, z: Array, d: int, channels: Channels, memory: Buffers, key: Any) -> Array:
        """As ``Kernels.activate``."""
        if not z.flags.c_contiguous:
            return super().activate(name, z, d, channels, memory, key)
        h = memory.take(key, z.shape)
        _through("jet_forward", name, (z, h), d, channels)
        return h

    def activate_back(
        self,
        name: str,
        z: Array,
        h: Array,
        hbar: Array,
        d: int,
        channels: Channels,
        memory: Buffers,
        key: Any,
    ) -> Array:
        """As ``Kernels.activate_back``, in the place of hbar."""
        if not all(x.flags.c_contiguous for x in (z, h, hbar)):
            return super().activate_back(name, z, h, hbar, d, channels, memory, key)
        _through("jet_backward", name, (z, h, hbar), d, channels)
        return hbar

    def add_bias(self, total: Array, zbar: Array, memory: Buffers) -> Array:
        """As ``Kernels.add_bias``."""
        self.sum_rows(zbar[0, ...], total, True, memory.take)
        return total


def _through(kernel: str, activation: str, arrays: tuple[Array, ...], d: int, channels: Channels) -> None:
    blocks, n, width = arrays[0].shape
    count = n * width
    if count == 0:
        return
    launch(
        "pinn_jets.cu",
        {"REAL": STORED[dtype_name(arrays[0].dtype)]},
        f"{kernel}_{activation}",
        (blocks_for(count), 1, 1),
        (*arrays, count, width, d if blocks > 1 else 0, len(channels), *weights_of(channels)),
        0,
        THREADS,
    )


def kernels(family: str) -> Fused:
    """The kernels of the family."""
    return Fused(compat, own_kernels("cupy", compat)["generic"].erf, cupy)
