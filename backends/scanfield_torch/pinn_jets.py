"""The PINN's sweeps on PyTorch tensors: written into buffers, and with what lies between the products compiled."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import array_api_compat.torch as compat
import torch

from scanfield.pinn.inplace import InPlace

Array = Any


class Out(InPlace):
    """Kernels that write into tensors. No graph is recorded: the gradients are formulas."""

    name = "torch.out"

    def context(self, like: Array) -> AbstractContextManager[Any]:
        """Nothing in it is recorded by autograd."""
        return torch.no_grad()

    def add_product(self, total: Array, left: Array, right: Array, memory: Any) -> Array:
        """total + left^T right, in one call."""
        return total.addmm_(left.T, right)

    def sigmoid(self, z: Array, out: Array, memory: Any) -> Array:
        """1 / (1 + e^-z)"""
        return torch.sigmoid(z, out=out)

    def positive(self, z: Array, out: Array) -> Array:
        """max(z, 0)"""
        return torch.clamp(z, min=0.0, out=out)

    def write_erf(self, x: Array, out: Array) -> None:
        """erf(x) into out."""
        torch.special.erf(x, out=out)


def kernels(family: str) -> Out:
    """The kernels of the family."""
    return Out(compat, torch.special.erf, torch)
