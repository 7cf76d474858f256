"""Jets: value, first derivatives and second-order operators of the field in one sweep, and the sweep back.

| symbol | name | shape |
|---|---|---|
| z, h | stack before and after an activation | (blocks, n, width) |
| blocks | value; d first derivatives; one a channel sum_i a_i u_ii | 1, 1 + d or 1 + d + channels |
| hbar, zbar | cotangents | as h, z |

    linear       z = h W^T + b in the value, z_i = h_i W^T, z_c = h_c W^T          one product for all blocks
    activation   h = sigma(z), h_i = s1 z_i, h_c = s2 sum_i a_i z_i^2 + s1 z_c
    back         zbar as in ``kernels``; Wbar = zbar^T h over all blocks; bbar = sum_n zbar; hbar = zbar W

The collapsed Laplacian is the forward Laplacian of Li et al., arXiv 2307.08214; the sweep back is derived by hand
(``docs/mathematics.md``, the PINN).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from scanfield.advice import shown
from scanfield.arrays import Array, check_same_library, dtype_name
from scanfield.errors import ArgumentError, DtypeError, ShapeError
from scanfield.pinn.fourier import check_count
from scanfield.pinn.kernels import Channels, Kernels
from scanfield.pinn.network import Network
from scanfield.pinn.selection import kernels_for

TWO_PI = 6.283185307179586


class Model(NamedTuple):
    """What a sweep needs of a network: arrays by name, and what is static."""

    arrays: Mapping[str, Array]
    """Parameters and constants; ``omega`` = 2 pi B."""
    layers: int
    activation: str


class Tape(NamedTuple):
    """What a sweep keeps for the way back."""

    x: Array
    channels: Channels
    waves: Any
    h: list[Array]
    """The input of each layer."""
    z: list[Array]
    """What each hidden layer's activation gets."""


def model_of(
    parameters: Mapping[str, Array], constants: Mapping[str, Array], static: tuple[int, str]
) -> Model:
    """A model of parameters and constants by name."""
    arrays = {**constants, **parameters}
    arrays["omega"] = TWO_PI * arrays["B"]
    return Model(arrays, *static)


def forward(
    kernels: Kernels, model: Model, x: Array, channels: Channels, first: bool, memory: Any
) -> tuple[Array, Tape]:
    """The stack (blocks, n, outputs) at points (n, d), and the tape."""
    arrays, d = model.arrays, x.shape[1]
    h, waves = kernels.features(x, arrays["omega"], arrays["raw"], arrays["mean"], channels, first, memory)
    tape = Tape(x, channels, waves, [h], [])
    last = model.layers - 1
    for i in range(model.layers):
        z = kernels.linear(h, arrays[f"W{i}"], arrays[f"b{i}"], memory, ("z", i))
        if i == last:
            return z, tape
        h = kernels.activate(model.activation, z, d, channels, memory, ("h", i))
        tape.z.append(z)
        tape.h.append(h)
    raise AssertionError("a network has at least one layer")


def reverse(
    kernels: Kernels, model: Model, tape: Tape, bar: Array, sink: Any, memory: Any, *, points: bool = False
) -> Array | None:
    """Send the output's bars back; ``sink`` takes what belongs to each parameter; the gradient of the points if asked."""
    arrays, d = model.arrays, tape.x.shape[1]
    zbar = hbar = bar
    for i in range(model.layers - 1, -1, -1):
        if i < model.layers - 1:
            zbar = kernels.activate_back(
                model.activation, tape.z[i], tape.h[i + 1], hbar, d, tape.channels, memory, ("bar", i)
            )
        sink.layer(kernels, i, zbar, tape.h[i], memory)
        if i == 0 and not (points or sink.wants_frequencies):
            return None
        hbar = kernels.linear_back(zbar, arrays[f"W{i}"], memory, ("bar", i - 1))
    _, xbar, rows = kernels.features_back(
        hbar, tape.x, arrays["omega"], arrays["raw"], tape.waves, tape.channels, points, memory
    )
    if sink.wants_frequencies:
        sink.frequencies(kernels, rows, memory)
    return xbar


class Jet(NamedTuple):
    """A field and its derivatives at points."""

    value: Array
    """(n, outputs)"""
    first: Array | None
    """(d, n, outputs): the derivative along each axis."""
    second: Array | None
    """(n, outputs): sum_i a_i u_ii, by default the Laplacian."""


def jet(
    network: Network, points: Array, *, second: Array | None = None, order: int = 2, chunk: int = 256
) -> Jet:
    """Value, first derivatives and Laplacian of a network's field, exact, in one sweep.

    Parameters
    ----------
    network : Network
        The field.
    points : (n, d) array
        Where; of the network's library, device and dtype.
    second : (n, d) array, optional
        Real weights a of the operator sum_i a_i u_ii; without them the Laplacian.
    order : int
        2; or 1 or 0 for less, which costs less.
    chunk : int
        Rows that go through the network together. It changes memory and speed, not the result beyond rounding.

    Returns
    -------
    Jet
        ``value`` (n, outputs), ``first`` (d, n, outputs), ``second`` (n, outputs); None above ``order``.

    Raises
    ------
    ShapeError, DtypeError, BackendError, DeviceError
        Points that do not fit the network.

    Notes
    -----
    d + 2 stacked blocks and one matrix product a layer (the forward Laplacian, Li et al., arXiv 2307.08214).

    Examples
    --------
    >>> import numpy
    >>> from scanfield import pinn
    >>> one = pinn.FourierFeatures(frequencies=[[1.0]])
    >>> sine = pinn.Network(
    ...     {"W0": numpy.array([[1.0, 0.0]]), "b0": numpy.zeros(1), "B": numpy.ones((1, 1))}, embedding=one
    ... )
    >>> jet = pinn.jet(sine, numpy.array([[0.25]]))
    >>> jet.value.round(12).tolist(), jet.second.round(12).tolist()  # sin(2 pi x) and -(2 pi)^2 sin(2 pi x)
    ([[1.0]], [[-39.478417604357]])
    """
    check_points("points", points, network)
    if order not in (0, 1, 2):
        raise ArgumentError(f"order: {shown(order)}; allowed are 0, 1 and 2")
    if second is not None:
        check_points("second", second, network, points.shape[0])
    d = network.dimensions
    kernels = kernels_for(network)
    static = (network.layers, network.activation, order > 0, check_count("chunk", chunk))
    with kernels.context(network.parameters["W0"]):
        stack = kernels.run(
            _stack, static, network.parameters, network.constants(), points, () if order < 2 else (second,)
        )
    return Jet(
        stack[0, ...],
        stack[1 : 1 + d, ...] if order > 0 else None,
        stack[1 + d, ...] if order > 1 else None,
    )


def _stack(
    kernels: Kernels, static: Any, store: Any, parameters: Any, constants: Any, x: Array, channels: Channels
) -> Array:
    layers, activation, first, chunk = static
    model = model_of(parameters, constants, (layers, activation))
    memory = kernels.buffers(x)

    def body(carry: None, rows: Any) -> tuple[None, Array]:
        points, weights = rows
        stack, _ = forward(kernels, model, points, weights, first, memory)
        # A copy: a buffer is written again by the next chunk.
        return None, kernels.xp.permute_dims(stack, (1, 0, 2)) * 1.0

    _, stack = kernels.fold(body, None, (x, channels), x.shape[0], chunk)
    return kernels.xp.permute_dims(stack, (1, 0, 2))


def check_points(name: str, points: Array, network: Network, count: int | None = None) -> None:
    """Raise unless an array is (n, d) of the network's library, device and dtype."""
    check_same_library([("network", network.parameters["W0"]), (name, points)])
    d = network.dimensions
    if len(points.shape) != 2 or points.shape[1] != d or count not in (None, points.shape[0]):
        shown = f"({'n' if count is None else count}, {d})"
        raise ShapeError(f"{name} has shape {tuple(points.shape)}; expected {shown}")
    if dtype_name(points.dtype) != network.dtype:
        raise DtypeError(
            f"{name} is {dtype_name(points.dtype)}, the network {network.dtype}; cast it, "
            f"xp.astype({name}, xp.{network.dtype})"
        )
