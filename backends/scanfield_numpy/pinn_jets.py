"""The PINN's sweeps on NumPy arrays: BLAS products into buffers, jets through activations by compiled kernels."""

from __future__ import annotations

import math
from typing import Any

import numpy

from scanfield.pinn.inplace import InPlace
from scanfield.pinn.kernels import Channels
from scanfield.pinn.memory import Buffers
from scanfield.pinn.selection import own_kernels
from scanfield_numpy import pinn_kernels as compiled
from scanfield_numpy.pinn_vector import GELU, SIN, SOFTPLUS, SWISH, TANH
from scanfield_numpy.threads import run

Array = Any

_NUMBERS = {"tanh": TANH, "sin": SIN, "swish": SWISH, "softplus": SOFTPLUS, "gelu": GELU}


class Fused(InPlace):
    """Kernels that write, with the activations' steps fused."""

    name = "numpy.numba"

    def activate(self, name: str, z: Array, d: int, channels: Channels, memory: Buffers, key: Any) -> Array:
        """As ``Kernels.activate``."""
        h = memory.take(key, z.shape)
        if name == "sin":
            numpy.sin(z[0], out=h[0])
        beside = self._beside(name, z[0], memory)
        _run(compiled.forward, name, (z, h, None, beside), d, channels, name == "sin")
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
        _run(compiled.backward, name, (z, h, hbar, self._beside(name, z[0], memory)), d, channels, True)
        return hbar

    def _beside(self, name: str, z: Array, memory: Buffers) -> Array | None:
        if name == "sin":
            return numpy.cos(z, out=memory.take("s1", z.shape))
        if name != "gelu":
            return None
        big, scaled = memory.take("g0", z.shape), memory.take("g1", z.shape)
        self.write_erf(numpy.multiply(z, math.sqrt(0.5), out=scaled), big)
        numpy.multiply(big, 0.5, out=big)
        return numpy.add(big, 0.5, out=big)


def _run(kernel: Any, name: str, arrays: Any, d: int, channels: Channels, has_value: bool) -> None:
    z = arrays[0]
    blocks, n, width = z.shape
    weighted = bool(channels) and channels[0] is not None
    weights = [None if w is None else numpy.ascontiguousarray(w) for w in channels]
    weights += [None] * (2 - len(weights))
    nothing = z[:0]
    places = [nothing if array is None else array for array in (*arrays, *weights)]
    run(
        kernel,
        z.dtype.name,
        n,
        4.0 * blocks * n * width,
        0,
        (width, n * width, d if blocks > 1 else 0, len(channels), has_value, arrays[3] is not None, weighted),
        places,
        size=_NUMBERS[name],
    )


def kernels(family: str) -> Fused:
    """The kernels of the family."""
    return Fused(numpy, own_kernels("numpy", numpy)["generic"].erf)
