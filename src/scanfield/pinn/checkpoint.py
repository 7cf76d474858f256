"""Networks and trainings on disk: one safetensors file, the rest as JSON in its header.

Nothing in a file is executed: safetensors holds numbers, JSON text. A file is written beside its place and then moved there,
so an interrupted write leaves the old one. It carries a checksum of its numbers; what is truncated, changed or foreign is a
`StateError` and changes nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from scanfield import tensorfile
from scanfield.arrays import Namespace
from scanfield.errors import ArgumentError, ShapeError, StateError
from scanfield.pinn.fourier import Embedding
from scanfield.pinn.network import PRECISIONS, Network, from_host
from scanfield.pinn.placing import to_host

__all__ = ["architecture", "check_place", "load_network", "read", "save_network", "write"]

_KEY = "scanfield"
_VERSION = 1
_FREQUENCIES = "embedding.frequencies"
_PARAMETER = "network."


def check_place(name: str, path: str | os.PathLike[str]) -> Path:
    """The place of a file that will be written; ArgumentError, with the argument's name, for one where none can be."""
    place = Path(path)
    folder = place.resolve().parent
    if not folder.is_dir():
        raise ArgumentError(
            f"{name} = {os.fspath(path)!r}: its folder does not exist; make {str(folder)!r} first"
        )
    if place.is_dir():
        raise ArgumentError(f"{name} = {os.fspath(path)!r}: it is a folder, the name of a file is expected")
    return place


def write(
    path: str | os.PathLike[str], kind: str, tensors: Mapping[str, np.ndarray], facts: Mapping[str, Any]
) -> None:
    """Write tensors and facts (what JSON can hold) to a file of this kind."""
    text = json.dumps(
        {"kind": kind, "version": _VERSION, "checksum": _checksum(tensors), "facts": facts}, default=_number
    )
    held = {name: (value.dtype.name, value) for name, value in tensors.items()}
    tensorfile.write(path, held, {_KEY: text})


def read(path: str | os.PathLike[str], kind: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Tensors and facts of a file that `write` made; StateError for any other, FileNotFoundError for none."""
    try:
        held, metadata = tensorfile.read(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StateError(f"{path}: not a whole safetensors file ({error})") from None
    for name, (dtype, _) in held.items():
        if dtype not in PRECISIONS:
            raise StateError(f"{path}: {name:.80} is {dtype}; allowed are {' and '.join(PRECISIONS)}")
    tensors = {name: bits for name, (_, bits) in held.items()}
    try:
        record = json.loads(metadata[_KEY])
        found, version, checksum, facts = (record[name] for name in ("kind", "version", "checksum", "facts"))
    except (KeyError, TypeError, ValueError, RecursionError):
        raise StateError(f"{path}: a safetensors file, but scanfield did not write it") from None
    if found != kind or version != _VERSION or not isinstance(facts, dict):
        raise StateError(
            f"{path}: holds {found!r:.80} version {version!r:.80}, expected {kind!r} version {_VERSION}"
        )
    if checksum != _checksum(tensors):
        raise StateError(f"{path}: its numbers do not have the checksum that was written with them")
    return tensors, facts


def save_network(
    path: str | os.PathLike[str], network: Network, unknowns: Mapping[str, float] | None = None
) -> None:
    """Write a network, its embedding included, and the unknowns found with it; ArgumentError where no file can be."""
    check_place("path", path)
    tensors = {_PARAMETER + name: to_host(value) for name, value in network.parameters.items()}
    tensors[_FREQUENCIES] = network.embedding.frequencies
    write(path, "network", tensors, {"architecture": architecture(network), "unknowns": dict(unknowns or {})})


def load_network(
    path: str | os.PathLike[str], *, like: Network | None = None, xp: Namespace = np, device: Any = None
) -> Network:
    """The network that `save_network` (or `Fit.save`) wrote, bit for bit.

    Parameters
    ----------
    path
        The file.
    like
        A network that the file must fit: its library and device are used, and other shapes raise.
    xp, device
        Where the parameters go without `like`.

    Raises `StateError` for a truncated, changed or foreign file and `ShapeError`, naming the parameter and both shapes, for
    another architecture.
    """
    tensors, facts = read(path, "network")
    parameters = {
        name.removeprefix(_PARAMETER): value for name, value in tensors.items() if name.startswith(_PARAMETER)
    }
    if like is not None:
        fit_parameters(path, parameters, like)
        xp, first = like.xp, like.parameters["W0"]
        device = getattr(first, "device", None) if like.library not in ("numpy", "jax") else None
    try:
        shape = facts["architecture"]
        if shape["dtype"] not in PRECISIONS:
            raise ValueError(f"dtype {shape['dtype']!r:.80}")
        if not isinstance(shape["trainable"], bool):
            raise ValueError(f"trainable {shape['trainable']!r:.80}")
        embedding = Embedding(
            tensors[_FREQUENCIES],
            trainable=shape["trainable"],
            axes=shape["axes"],
            mean=shape["mean"],
            scale=shape["scale"],
        )
        moved = {name: from_host(xp, value, shape["dtype"], device) for name, value in parameters.items()}
        return Network(moved, embedding=embedding, activation=shape["activation"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise StateError(f"{path}: its description does not make a network ({error!s:.200})") from None


def fit_parameters(path: Any, parameters: Mapping[str, np.ndarray], network: Network) -> None:
    """ShapeError unless the parameters have the names and shapes of a network's."""
    for name in [*network.parameters, *parameters]:
        held = tuple(parameters[name].shape) if name in parameters else "none"
        own = tuple(network.parameters[name].shape) if name in network.parameters else "none"
        if held != own:
            raise ShapeError(
                f"{path}: parameter {name} has shape {held} in the file and {own} in the network"
            )


def architecture(network: Network) -> dict[str, Any]:
    """What of a network is no array, as JSON holds it."""
    embedding = network.embedding
    return {
        "widths": list(network.widths),
        "activation": network.activation,
        "dtype": network.dtype,
        "trainable": embedding.trainable,
        "axes": list(embedding.axes),
        "mean": list(embedding.mean),
        "scale": list(embedding.scale),
    }


def _number(value: Any) -> Any:
    """A scalar of NumPy as JSON holds it."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is no fact: numbers, texts, lists and mappings of them are")


def _checksum(tensors: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name]
        digest.update(f"{name} {value.dtype.str} {value.shape} ".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    return digest.hexdigest()
