"""Every buffer of a training step, made once: a step with a workspace allocates no array of the batch's size.

The names are those of the rtx PINN's GradientWorkspace; ``docs/pinn-workspace.md`` lists each of its fields and functions,
what became of it, and why. A *stack* holds a jet, (blocks, batch, width): value, d first derivatives, second order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy

from scanfield.advice import shown
from scanfield.arrays import Array, Namespace, asked_dtype, device_of, library_of
from scanfield.errors import ArgumentError, BackendError, DtypeError, ShapeError
from scanfield.pinn.fourier import check_count
from scanfield.pinn.inplace import InPlace
from scanfield.pinn.kernels import Kernels
from scanfield.pinn.memory import Buffers
from scanfield.pinn.network import PRECISIONS, Network, from_host
from scanfield.pinn.terms import PreparedTerms

WRITABLE = ("numpy", "torch", "cupy")
"""Libraries whose arrays can be written."""


class Workspace:
    """Buffers for sweeps over chunks of ``batch`` points, and the gradients that they add up to.

    Parameters
    ----------
    batch : int
        Points that go through the network together; 256 is a good size. Memory grows with it and not with the points.
    features : int
        ff, the columns of B (half the sines and cosines); 0 for raw coordinates alone.
    hidden : int or sequence of int
        Width of each hidden layer; an empty one for a linear model of the features.
    d : int
        Dimensions.
    xp, device, dtype
        Where it lives: ``numpy``, ``torch`` or ``cupy``, a device of that library, "float32" or "float64".
    outputs, raw : int
        Outputs of the network (2: complex), and raw coordinates beside the features.

    Attributes
    ----------
    z, h : list of (batch, width)
        Values before and after each layer's activation (in the last layer the same array); views of stacks.
    fourier_features : (batch, 2 features + raw)
        Values of the embedding.
    du_dx : (batch, outputs) for d = 1, else (d, batch, outputs)
        First derivatives of the output.
    d2u_dx2 : (batch, outputs)
        Its Laplacian, or the first channel's sum_i a_i u_ii.
    dW, db : list of (out, in), (out,)
        Gradients of weights and biases, which chunks and terms add to.
    dB : (d, features)
        Gradient of the frequencies.
    dL_dz, dL_dh_prev : list of (batch, out), (batch, in)
        What ``layer_backward_inplace`` writes.
    h_stacks, feature_stack : list of (d + 2, batch, width), (d + 2, batch, 2 features + raw)
        The whole jets that ``h`` and ``fourier_features`` are the values of.
    dL_dz_stacks, dL_dh_prev_stacks : list of (d + 2, batch, out), (d + 2, batch, in)
        What ``layer_backward_inplace`` writes on jets; made when they are first asked for.
    d_loss : (batch, outputs)
        What ``mse_backward_inplace`` writes; in a step, the residual's cotangent.
    Bx, cos_Bx, sin_Bx : (batch, features)
        2 pi x B, its cosine and sine.
    dL_dphi_sin, dL_dphi_cos : (batch, features)
        Views of ``dL_dh_prev[0]``.
    num_layers, batch_size, hidden_dim, ff_dim, device, dtype
        What it was made for; ``hidden_dim`` is the list of widths.

    Raises
    ------
    BackendError
        A library whose arrays cannot be written, such as JAX.
    ArgumentError, DtypeError
        A size or dtype that is not allowed.

    Notes
    -----
    One step at a time: two threads need two workspaces. The views of values hold the last chunk, in order if it was a
    whole one.

    Examples
    --------
    >>> from scanfield import pinn
    >>> workspace = pinn.Workspace(32, 16, [64, 64, 64])
    >>> workspace.num_layers, [dW.shape for dW in workspace.dW]
    (4, [(64, 32), (64, 64), (64, 64), (2, 64)])
    """

    def __init__(
        self,
        batch: int,
        features: int,
        hidden: int | Sequence[int],
        d: int = 1,
        xp: Namespace = numpy,
        device: Any = None,
        dtype: Any = "float32",
        *,
        outputs: int = 2,
        raw: int = 0,
    ) -> None:
        listed = [hidden] if isinstance(hidden, int | numpy.integer) else list(hidden)
        self.batch_size = check_count("batch", batch)
        self.ff_dim = check_count("features", features, 0)
        self.hidden_dim = [check_count("hidden", width) for width in listed]
        self.d = check_count("d", d)
        self.outputs = check_count("outputs", outputs)
        self.raw = check_count("raw", raw, 0)
        dtype = asked_dtype(dtype)
        if dtype not in PRECISIONS:
            raise DtypeError(f"dtype: {shown(dtype)}; allowed are {' and '.join(PRECISIONS)}")
        probe = from_host(xp, numpy.zeros(1), dtype, device)
        library = library_of(probe, "xp")
        if library.name not in WRITABLE:
            raise BackendError(
                f"xp: {library.name} arrays cannot be written; a workspace serves {', '.join(WRITABLE)}. "
                "Leave workspace out: the library's compiler plans the memory itself"
            )
        self.library, self.xp, self.dtype = library.name, library.namespace, dtype
        self.device = device_of(probe)
        self._dtype = probe.dtype
        self._widths = [*self.hidden_dim, self.outputs]
        self._inputs = [2 * self.ff_dim + self.raw, *self.hidden_dim]
        sizes = list(zip(self._widths, self._inputs, strict=True))
        self.dW = [self._zeros(size) for size in sizes]
        self.db = [self._zeros((out,)) for out, _ in sizes]
        self.dB = self._zeros((self.d, self.ff_dim))
        self.dL_dz = [self._zeros((self.batch_size, out)) for out, _ in sizes]
        self.dL_dh_prev = [self._zeros((self.batch_size, into)) for _, into in sizes]
        self.buffers = Buffers(self.xp, self._dtype, self.device)
        for stack in (*self._stacks("z"), *self._stacks("h"), self._stack(("h", -1), self._inputs[0])):
            stack[...] = 0.0
        for name in ("p", "cos", "sin"):
            self._line(name)[...] = 0.0
        self.d_loss[...] = 0.0

    @classmethod
    def of(cls, network: Network, batch: int = 256) -> Workspace:
        """A workspace for a network, on its library, device and dtype.

        >>> from scanfield import pinn
        >>> pinn.Workspace.of(pinn.Network.create(pinn.RawCoordinates(2), hidden=8)).dW[0].shape
        (8, 2)
        """
        embedding = network.embedding
        return cls(
            batch,
            embedding.features,
            list(network.widths[:-1]),
            network.dimensions,
            network.xp,
            device_of(network.parameters["W0"]),
            network.dtype,
            outputs=network.outputs,
            raw=len(embedding.axes),
        )

    def _zeros(self, shape: tuple[int, ...]) -> Array:
        return self.xp.zeros(shape, dtype=self._dtype, device=self.device)

    def _stack(self, name: Any, width: int) -> Array:
        """A jet of the first piece of a term, (d + 2, batch, width)."""
        return self.buffers.part(0).take(name, (self.d + 2, self.batch_size, width))

    def _stacks(self, name: str) -> list[Array]:
        last = len(self.hidden_dim)
        widths = self._widths if name == "z" else self.hidden_dim
        stacks = [self._stack((name, i), width) for i, width in enumerate(widths)]
        return stacks if name == "z" else [*stacks, self._stack(("z", last), self.outputs)]

    def _line(self, name: str) -> Array:
        return self.buffers.part(0).take(name, (self.batch_size, self.ff_dim))

    @property
    def h_stacks(self) -> list[Array]:
        """The jet after each layer, the last one before the loss."""
        return self._stacks("h")

    @property
    def feature_stack(self) -> Array:
        """The jet of the embedding."""
        return self._stack(("h", -1), self._inputs[0])

    @property
    def dL_dz_stacks(self) -> list[Array]:
        """What ``layer_backward_inplace`` writes on jets: cotangents before each activation."""
        return self._layer_stacks("dz", self._widths)

    @property
    def dL_dh_prev_stacks(self) -> list[Array]:
        """What ``layer_backward_inplace`` writes on jets: cotangents of each layer's input."""
        return self._layer_stacks("dh_prev", self._inputs)

    def _layer_stacks(self, name: str, widths: list[int]) -> list[Array]:
        take = self.buffers.part("layers").take
        return [take((name, i), (self.d + 2, self.batch_size, width)) for i, width in enumerate(widths)]

    @property
    def num_layers(self) -> int:
        """Hidden layers and the output layer."""
        return len(self._widths)

    @property
    def z(self) -> list[Array]:
        """Values before each layer's activation."""
        return [stack[0, ...] for stack in self._stacks("z")]

    @property
    def h(self) -> list[Array]:
        """Values after it; in the last layer, which has none, the output."""
        return [stack[0, ...] for stack in self._stacks("h")]

    @property
    def fourier_features(self) -> Array:
        """Values of the embedding."""
        return self._stack(("h", -1), self._inputs[0])[0, ...]

    @property
    def du_dx(self) -> Array:
        """First derivatives of the output."""
        first = self._stacks("z")[-1][1 : 1 + self.d, ...]
        return first[0, ...] if self.d == 1 else first

    @property
    def d2u_dx2(self) -> Array:
        """The Laplacian of the output."""
        return self._stacks("z")[-1][1 + self.d, ...]

    @property
    def d_loss(self) -> Array:
        """The cotangent of the output or of the residual."""
        return self.buffers.take("scaled", (self.batch_size, self.outputs))

    @property
    def Bx(self) -> Array:
        """2 pi x B"""
        return self._line("p")

    @property
    def cos_Bx(self) -> Array:
        """cos(2 pi x B)"""
        return self._line("cos")

    @property
    def sin_Bx(self) -> Array:
        """sin(2 pi x B)"""
        return self._line("sin")

    @property
    def dL_dphi_sin(self) -> Array:
        """The cotangent of the sines."""
        return self.dL_dh_prev[0][:, : self.ff_dim]

    @property
    def dL_dphi_cos(self) -> Array:
        """The cotangent of the cosines."""
        return self.dL_dh_prev[0][:, self.ff_dim : 2 * self.ff_dim]

    @property
    def bytes(self) -> int:
        """What all of it takes, buffers that later steps added included."""
        own = [*self.dW, *self.db, self.dB, *self.dL_dz, *self.dL_dh_prev]
        total: int = self.buffers.bytes
        return total + sum(int(array.itemsize * math.prod(array.shape)) for array in own)

    def zero_grad(self) -> None:
        """Set dW, db and dB to zero, where they are."""
        for array in (*self.dW, *self.db, self.dB):
            array[...] = 0.0

    def begin(self) -> tuple[Buffers, dict[str, Array]]:
        """Zeroed gradients under the parameters' names, and the buffers, for a sweep."""
        self.zero_grad()
        totals: dict[str, Array] = {}
        for i, (weight, bias) in enumerate(zip(self.dW, self.db, strict=True)):
            totals |= {f"W{i}": weight, f"b{i}": bias}
        return self.buffers, totals | {"B": self.dB}

    def serves(self, network: Network, kernels: Kernels, prepared: PreparedTerms, chunk: int | None) -> int:
        """The chunk to take; an error if the workspace was made for another network, library or chunk."""
        if not isinstance(kernels, InPlace):
            raise BackendError(f"workspace: {kernels.name} writes into no buffers; leave workspace out")
        first = network.parameters["W0"]
        mine = (self.library, self.dtype, self.d, self.ff_dim, self.raw, tuple(self._widths))
        embedding = network.embedding
        theirs = (
            network.library,
            network.dtype,
            network.dimensions,
            embedding.features,
            len(embedding.axes),
            network.widths,
        )
        if mine != theirs:
            words = ("library", "dtype", "d", "features", "raw", "widths")
            apart = [
                f"{word} {a} (the network: {b})"
                for word, a, b in zip(words, mine, theirs, strict=True)
                if a != b
            ]
            raise ShapeError(
                f"workspace: made for {', '.join(apart)}; Workspace.of(network) makes one that fits"
            )
        if device_of(first) != self.device:
            raise BackendError(f"workspace: on {self.device}, the network on {device_of(first)}")
        if chunk not in (None, self.batch_size):
            raise ArgumentError(
                f"chunk: {chunk}, the workspace has a batch of {self.batch_size}; leave chunk out"
            )
        return self.batch_size
