"""The PINN's sweeps with PyTorch's compiler: one graph a chunk, what lies between the products fused.

The sweep back is a formula, so the compiler differentiates nothing. Each kind of term, and each number of rows, is compiled
once, for some seconds; that needs a C++ compiler on the CPU.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FunctionType
from typing import Any

import array_api_compat.torch as compat
import torch

from scanfield.pinn.jets import Model
from scanfield.pinn.kernels import Kernels
from scanfield.pinn.loss import Body
from scanfield.pinn.memory import NOTHING

with warnings.catch_warnings():
    # The compiler imports this module of torch's, which warns of what torch itself has deprecated.
    warnings.simplefilter("ignore", DeprecationWarning)
    importlib.import_module("torch.utils.mkldnn")


class Compiled(Kernels):
    """Kernels that make new tensors, with each chunk of a loss compiled."""

    name = "torch.compile"

    def __init__(self) -> None:
        super().__init__(compat, torch.special.erf)
        self._plain = Kernels(compat, torch.special.erf)
        self._compiled: dict[Any, Callable[..., Any]] = {}

    def context(self, like: Any) -> AbstractContextManager[Any]:
        """Nothing in it is recorded by autograd."""
        return torch.no_grad()

    def fold(self, body: Any, carry: Any, rows: Any, count: int, chunk: int) -> tuple[Any, Any]:
        """As ``Kernels.fold``; a chunk of a loss runs compiled."""
        if not isinstance(body, Body):
            return super().fold(body, carry, rows, count, chunk)
        scale = torch.as_tensor(body.scale, dtype=carry[2].dtype, device=carry[2].device)
        arrays = dict(body.model.arrays)

        def step(carry: Any, part: Any) -> Any:
            size = part.operators[0].points.shape[0]
            key = (body.static._replace(chunk=0), body.shape._replace(points=0), _structure(part), size)
            compiled = self._compiled.get(key)
            if compiled is None:
                compiled = self._compiled[key] = self._compile(body)
            return compiled(arrays, scale, dict(body.unknowns), carry, part)

        return super().fold(step, carry, rows, count, chunk)

    def _compile(self, body: Body) -> Callable[..., Any]:
        plain, static, shape = self._plain, body.static, body.shape

        def chunk(arrays: Any, scale: Any, unknowns: Any, carry: Any, part: Any) -> Any:
            model = Model(arrays, static.layers, static.activation)
            return Body(plain, model, static, shape, scale, unknowns, NOTHING)(carry, part)

        # torch counts what it compiles by code object, and gives up after a few: each has its own.
        alone = FunctionType(chunk.__code__.replace(), chunk.__globals__, "chunk", None, chunk.__closure__)
        compiled: Callable[..., Any] = torch.compile(alone, fullgraph=True, dynamic=False)
        return compiled


def _structure(tree: Any) -> Any:
    """Where a tree has arrays, and of which dtype."""
    if tree is None:
        return None
    if isinstance(tree, tuple):
        return tuple([_structure(part) for part in tree])
    return tree.dtype, tree.ndim


def kernels(family: str) -> Compiled:
    """The kernels of the family."""
    return Compiled()
