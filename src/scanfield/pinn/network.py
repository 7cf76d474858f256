"""A network and its parameters: embedding, hidden layers with an activation, linear output.

| symbol | name | shape |
|---|---|---|
| B | `parameters["B"]` | (d, m), cycles per length; there only while it is trainable |
| W | `parameters["W0"]`, ... | (out, in), the last one (outputs, in) |
| b | `parameters["b0"]`, ... | (out,) |

    h = phi(x);   h = sigma(h W^T + b) for each hidden layer;   u = h W^T + b

One output is a real field, two are one complex field u = out0 + i out1. Nothing here is changed in place: a network with
other parameters is another network.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy

from scanfield.advice import shown
from scanfield.arrays import (
    Array,
    Namespace,
    asked_dtype,
    check_same_library,
    device_kind,
    device_of,
    dtype_name,
    dtype_of,
    library_of,
    library_of_namespace,
)
from scanfield.errors import ArgumentError, DtypeError, ShapeError
from scanfield.keywords import advised
from scanfield.pinn.activations import check_activation
from scanfield.pinn.fourier import Embedding, check_count

PRECISIONS = ("float32", "float64")


class Network:
    """Embedding, hidden layers and linear output, with the parameters as a mapping of names to arrays.

    Parameters
    ----------
    parameters : mapping
        ``W0, b0, W1, b1, ...`` and, where the embedding is trainable, ``B``: float32 or float64, one library and device.
    embedding : Embedding
        ``FourierFeatures``, ``RawCoordinates`` or ``PeriodicFeatures``.
    activation : str
        "tanh", "sin", "swish", "softplus" or "gelu", between all layers but not after the last.

    Raises
    ------
    ArgumentError
        A missing or unknown parameter, or an unknown activation.
    ShapeError, DtypeError, BackendError, DeviceError
        Parameters that do not fit each other, by their names.

    Examples
    --------
    >>> import numpy
    >>> from scanfield.pinn import FourierFeatures, Network
    >>> network = Network.create(FourierFeatures(2, 8, wavenumber=5.0), hidden=[32, 32], seed=0)
    >>> list(network.parameters), network.size
    (['W0', 'b0', 'W1', 'b1', 'W2', 'b2', 'B'], 1682)
    """

    def __init__(
        self, parameters: Mapping[str, Array], *, embedding: Embedding, activation: str = "tanh"
    ) -> None:
        self.embedding = embedding
        self.activation = check_activation(activation)
        layers = sum(name.startswith("W") for name in parameters)
        expected = _names(layers, embedding.trainable)
        if layers == 0 or set(parameters) != set(expected):
            raise ArgumentError(
                f"parameters: came {', '.join(parameters) or 'none'}; expected {', '.join(expected) or 'W0, b0'}"
            )
        self.parameters: dict[str, Array] = {name: parameters[name] for name in expected}
        library = check_same_library(list(self.parameters.items()))
        self.library, self.xp = library.name, library.namespace
        first = self.parameters["W0"]
        self.dtype = dtype_name(first.dtype)
        self.device = device_kind(first, library.name)
        self._check(layers)
        self.layers = layers
        self.widths = tuple(int(self.parameters[f"W{i}"].shape[0]) for i in range(layers))
        self.outputs = self.widths[-1]
        self._constants: dict[str, Array] | None = None

    def _check(self, layers: int) -> None:
        width = self.embedding.width
        for i in range(layers):
            weight, bias = self.parameters[f"W{i}"], self.parameters[f"b{i}"]
            if len(weight.shape) != 2 or weight.shape[1] != width:
                raise ShapeError(f"W{i} has shape {tuple(weight.shape)}; expected (out, {width})")
            width = int(weight.shape[0])
            if tuple(bias.shape) != (width,):
                raise ShapeError(f"b{i} has shape {tuple(bias.shape)}; expected ({width},), the rows of W{i}")
        if width not in (1, 2):
            raise ShapeError(
                f"W{layers - 1} has {width} rows; expected 1 (a real field) or 2 (one complex field)"
            )
        if "B" in self.parameters and tuple(self.parameters["B"].shape) != self.embedding.frequencies.shape:
            raise ShapeError(
                f"B has shape {tuple(self.parameters['B'].shape)}; expected {self.embedding.frequencies.shape}"
            )
        for name, array in self.parameters.items():
            kind = dtype_name(array.dtype)
            if kind not in PRECISIONS or kind != self.dtype:
                raise DtypeError(
                    f"{name} is {kind}; allowed is one of {' and '.join(PRECISIONS)} for all parameters"
                )

    @classmethod
    @advised
    def create(
        cls,
        embedding: Embedding,
        *,
        hidden: int | Sequence[int] = (64, 64),
        outputs: int = 2,
        activation: str = "tanh",
        seed: int = 0,
        xp: Namespace = numpy,
        dtype: Any = "float64",
        device: Any = None,
    ) -> Network:
        """Draw a network: weights normal with variance 2 / (in + out) (Glorot & Bengio 2010, equation 12), biases zero.

        Parameters
        ----------
        embedding : Embedding
            The first layer's input.
        hidden : int or sequence of int
            Width of each hidden layer; an empty one leaves a linear model of the features.
        outputs : int
            1 for a real field, 2 for a complex one.
        activation, seed : str, int
            The seed is of NumPy's generator, on the host: every library gets the same numbers.
        xp, dtype, device
            Where the parameters live: a namespace (``numpy``, ``torch``, ``jax.numpy``, ``cupy``), "float32" or
            "float64", by name or as the library's, and a device of that library.

        Returns
        -------
        Network

        Raises
        ------
        ArgumentError, DtypeError
            An ``xp`` that is no namespace, a width, an activation or a dtype that is not allowed (float64 on JAX needs
            ``jax_enable_x64``).

        Examples
        --------
        >>> from scanfield.pinn import Network, RawCoordinates
        >>> Network.create(RawCoordinates(1), hidden=[], outputs=1).widths
        (1,)
        """
        listed = [hidden] if isinstance(hidden, int | numpy.integer) else list(hidden)
        widths = [check_count("hidden", width) for width in listed] + [check_count("outputs", outputs)]
        dtype = asked_dtype(dtype)
        if dtype not in PRECISIONS:
            raise DtypeError(f"dtype: {shown(dtype)}; allowed are {' and '.join(PRECISIONS)}")
        library_of_namespace(xp)  # a name instead of the module is told apart here
        draws = numpy.random.default_rng(seed)
        host: dict[str, Any] = {}
        before = embedding.width
        for i, width in enumerate(widths):
            host[f"W{i}"] = draws.normal(size=(width, before)) * math.sqrt(2.0 / (before + width))
            host[f"b{i}"] = numpy.zeros(width)
            before = width
        if embedding.trainable:
            host["B"] = embedding.frequencies
        parameters = {name: from_host(xp, value, dtype, device) for name, value in host.items()}
        return cls(parameters, embedding=embedding, activation=activation)

    @property
    def dimensions(self) -> int:
        """d, the number of coordinates."""
        return self.embedding.dimensions

    @property
    def size(self) -> int:
        """How many numbers the parameters are."""
        return sum(math.prod(array.shape) for array in self.parameters.values())

    def constants(self) -> dict[str, Array]:
        """What of the embedding is not trained, as arrays beside the parameters."""
        if self._constants is None:
            embedding, like = self.embedding, self.parameters["W0"]
            host: dict[str, Any] = {"mean": numpy.array(embedding.mean)}
            rows = numpy.zeros((embedding.dimensions, len(embedding.axes)))
            for column, axis in enumerate(embedding.axes):
                rows[axis, column] = 1.0 / embedding.scale[axis]
            host["raw"] = rows
            if not embedding.trainable:
                host["B"] = embedding.frequencies
            self._constants = {
                name: from_host(self.xp, value, self.dtype, place_beside(like))
                for name, value in host.items()
            }
        return self._constants

    def replace(self, parameters: Mapping[str, Array]) -> Network:
        """The same network with other parameters (all of them, or some by name).

        >>> from scanfield.pinn import Network, RawCoordinates
        >>> network = Network.create(RawCoordinates(1), hidden=4)
        >>> network.replace({"b1": network.parameters["b1"] + 1.0}).parameters["b1"].tolist()
        [1.0, 1.0]
        """
        unknown = [name for name in parameters if name not in self.parameters]
        if unknown:
            raise ArgumentError(f"parameters: no {unknown[0]!r}; there are {', '.join(self.parameters)}")
        merged = {**self.parameters, **parameters}
        network = Network(merged, embedding=self.embedding, activation=self.activation)
        if network.xp is self.xp and network.dtype == self.dtype and network.device == self.device:
            network._constants = self._constants
        return network

    def flatten(self, arrays: Mapping[str, Array] | None = None) -> Array:
        """The parameters, or arrays of their names and shapes (gradients), as one vector (size,).

        >>> from scanfield.pinn import Network, RawCoordinates
        >>> Network.create(RawCoordinates(1), hidden=4).flatten().shape
        (18,)
        """
        chosen = self.parameters if arrays is None else arrays
        return self.xp.concat([self.xp.reshape(chosen[name], (-1,)) for name in self.parameters])

    def unflatten(self, vector: Array) -> dict[str, Array]:
        """One vector (size,) as arrays of the parameters' names and shapes; ShapeError for another length."""
        if tuple(vector.shape) != (self.size,):
            raise ShapeError(f"vector has shape {tuple(vector.shape)}; expected ({self.size},)")
        found, start = {}, 0
        for name, array in self.parameters.items():
            end = start + math.prod(array.shape)
            found[name] = self.xp.reshape(vector[start:end], tuple(array.shape))
            start = end
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        """Without the namespace, which is a module: the parameters say which one it is."""
        return _remade, (type(self), self.parameters, self.embedding, self.activation)

    def __repr__(self) -> str:
        # Without hidden layers there is nothing that an activation acts on.
        activation = f"activation={self.activation!r}, " if self.layers > 1 else ""
        return (
            f"Network({self.embedding!r}, widths={self.widths}, {activation}"
            f"{self.library} {self.dtype}, {self.size} parameters)"
        )


def _remade(
    kind: type[Network], parameters: dict[str, Array], embedding: Embedding, activation: str
) -> Network:
    return kind(parameters, embedding=embedding, activation=activation)


def _names(layers: int, trainable: bool) -> list[str]:
    return [f"{kind}{i}" for i in range(layers) for kind in "Wb"] + ["B"] * trainable


def place_beside(array: Array) -> Any:
    """The device for a small array that meets this one; JAX moves those that no device was asked for by itself.

    (One that is bound to a device binds what it meets: a compiled function would be compiled again for that.)
    """
    return None if library_of(array, "array").name == "jax" else device_of(array)


def from_host(xp: Namespace, values: Any, dtype: str, device: Any = None) -> Array:
    """Host numbers as an array of a library; DtypeError where the library made another dtype of them."""
    place = {} if device is None else {"device": device}
    array = xp.asarray(numpy.array(values, dtype=dtype), dtype=dtype_of(xp, dtype), **place)
    library_of(array, "xp")
    if dtype_name(array.dtype) != dtype:
        raise DtypeError(
            f"dtype: asked for {dtype}, the library made {dtype_name(array.dtype)} of it; on JAX "
            'jax.config.update("jax_enable_x64", True) turns float64 on'
        )
    return array
