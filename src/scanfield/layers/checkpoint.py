"""Parameters in safetensors files, under the names of other projects.

| ``names`` | a language model's parameters are called |
|---|---|
| ``"scanfield"`` | ``embedding``, ``layers.0.norm``, ``layers.0.mixer``, ``norm_f``, ``lm_head`` |
| ``"mamba_ssm"`` | the same behind ``backbone.``, apart from ``lm_head`` |
| ``"transformers"`` | as mamba_ssm, but ``backbone.embeddings`` |
| ``"fla"`` | ``model.embeddings``, ``model.layers.0.attn_norm``, ``model.layers.0.attn``, ``model.norm``, ``lm_head`` |

Behind a mixer ``norm2`` and ``mlp`` follow in a model with MLPs; fla calls the former ``mlp_norm``. Below a mixer all four
agree, and below an MLP mamba_ssm's has fused projections.
"""

from __future__ import annotations

import importlib
import os
import reprlib
from collections.abc import Mapping
from typing import Any

import numpy

from scanfield import tensorfile
from scanfield.arrays import REAL, Array, device_of, dtype_name, library_of
from scanfield.errors import ArgumentError, DtypeError, ShapeError, StateError
from scanfield.layers.language_model import LanguageModel
from scanfield.layers.layer import Layer
from scanfield.layers.parameters import maker

NAMES = ("scanfield", "mamba_ssm", "transformers", "fla")

_HEADS = {
    "mamba_ssm": {
        "embedding": "backbone.embedding",
        "layers": "backbone.layers",
        "norm_f": "backbone.norm_f",
    },
    "transformers": {
        "embedding": "backbone.embeddings",
        "layers": "backbone.layers",
        "norm_f": "backbone.norm_f",
    },
    "fla": {"embedding": "model.embeddings", "layers": "model.layers", "norm_f": "model.norm"},
}
_SHOWN = 20  # names in an error
_IN_BLOCKS = {"fla": {"norm": "attn_norm", "mixer": "attn", "norm2": "mlp_norm"}}


def upstream(layer: Layer, name: str, names: str) -> str:
    """The name that a parameter of ``layer``, or a layer in it, has in another project."""
    if names not in NAMES:
        raise ArgumentError(f"names: {names!r}; allowed are {', '.join(map(repr, NAMES))}")
    if names == "scanfield" or not isinstance(layer, LanguageModel):
        return name
    head, *rest = name.split(".")
    if head == "layers" and len(rest) > 1:
        inside = _IN_BLOCKS.get(names, {})
        rest[1] = inside.get(rest[1], rest[1])
    return ".".join([_HEADS[names].get(head, head), *rest])


def state_dict(layer: Layer, names: str = "scanfield") -> dict[str, Array]:
    """All parameters under the names of a project, as the layer's own arrays.

    >>> from scanfield.layers import LanguageModel, MambaBlock
    >>> model = LanguageModel(5, 4, [MambaBlock(4, 2)]).init()
    >>> list(state_dict(model, "transformers"))[:2]
    ['backbone.embeddings.weight', 'backbone.layers.0.norm.weight']
    """
    return {upstream(layer, name, names): array for name, array in layer.named_parameters().items()}


def load_state_dict(layer: Layer, arrays: Mapping[str, Array], names: str = "scanfield") -> None:
    """Give a layer, after its ``init``, the parameters of a state dict: all, or, on an error, none.

    Arrays may be of any library and floating dtype; they become arrays of the layer's library, dtype and device. A tied model
    accepts ``lm_head.weight`` beside its embedding if both are equal.

    Raises
    ------
    StateError
        For a name too many or too few, and for a second, different weight of a tied model.
    ShapeError, DtypeError
        For another shape, and for numbers that are no real floats.
    """
    if not isinstance(arrays, Mapping):
        raise StateError(f"state dict: a {type(arrays).__name__}; arrays by name are expected")
    keys: list[object] = list(arrays)
    for key in keys:
        if not isinstance(key, str):
            raise StateError(f"state dict: a key is a {type(key).__name__}; names are expected")
    present = layer.named_parameters()
    wanted = {upstream(layer, name, names): name for name in present}
    first, second = upstream(layer, "embedding.weight", names), "lm_head.weight"
    tied = isinstance(layer, LanguageModel) and layer.tied and second in arrays
    missing, unknown = (
        sorted(wanted.keys() - arrays.keys()),
        sorted(arrays.keys() - wanted.keys() - ({second} if tied else set())),
    )
    if missing or unknown:
        shown = [
            ", ".join(map(reprlib.repr, found[:_SHOWN])) + ", ..." * (len(found) > _SHOWN)
            for found in (missing, unknown)
        ]
        raise StateError(f"state dict: missing are [{shown[0]}], unknown are [{shown[1]}]; names={names!r}")
    for name, array in arrays.items():
        library_of(array, name)
        # A cast would drop the imaginary part, or read text as numbers.
        if dtype_name(array.dtype) not in REAL:
            raise DtypeError(f"{name}: dtype {dtype_name(array.dtype)}; allowed are {', '.join(REAL[:4])}")
        like = present[wanted[first if name == second and tied else name]]
        if tuple(array.shape) != tuple(like.shape):  # before anything of that size is copied
            raise ShapeError(f"{name}: shape {tuple(array.shape)}, must be {tuple(like.shape)}")
    given = {name: host(array) for name, array in arrays.items()}
    if tied and not numpy.array_equal(given[first], given[second]):
        raise StateError(
            "lm_head.weight: differs from the embedding, and this model is tied; pass tied=False"
        )
    made = {}
    for foreign, name in wanted.items():
        like = present[name]
        make = maker(library_of(like, name).namespace, device_of(like), like.dtype)
        made[name] = make(given[foreign])
    layer.set_parameters(made)


def save(layer: Layer, path: str | os.PathLike[str], names: str = "scanfield") -> None:
    """Write the parameters to a safetensors file, in their dtypes, bit for bit."""
    given = state_dict(layer, names)
    arrays = {n: (dtype_name(a.dtype), bits_of(a)) for n, a in given.items()}
    tensorfile.write(path, arrays, {"format": "pt"})


def load(layer: Layer, path: str | os.PathLike[str], names: str = "scanfield") -> None:
    """Read the parameters of a layer, after its ``init``, from a safetensors file.

    Errors as ``load_state_dict``; StateError for a file that is none.
    """
    found, _ = tensorfile.read(path)
    load_state_dict(layer, {n: _wide(a) if d == "bfloat16" else a for n, (d, a) in found.items()}, names)


def bits_of(array: Array) -> Any:
    """A NumPy array of the same bits; bfloat16 as unsigned integers, since NumPy does not know it."""
    name = library_of(array, "array").name
    half = dtype_name(array.dtype) == "bfloat16"
    if name == "torch":
        tensor = array.detach().cpu().contiguous()
        return (tensor.view(importlib.import_module("torch").int16) if half else tensor).numpy()
    if name == "cupy":
        array = array.get()
    elif name == "dask":
        array = array.compute()
    elif name == "array_api_strict":  # its other devices stand for accelerators
        array = array.to_device(type(array.device)("CPU_DEVICE"))
    found = numpy.ascontiguousarray(numpy.asarray(array))
    return found.view(numpy.uint16) if half else found


def host(array: Array) -> Any:
    """A NumPy array of the same numbers; bfloat16 as float32."""
    bits = bits_of(array)
    return _wide(bits) if dtype_name(array.dtype) == "bfloat16" else bits


def _wide(bits: Any) -> Any:
    return (bits.astype(numpy.uint16).astype(numpy.uint32) << 16).view(numpy.float32)
