"""Calls from XLA's compiled code to Python functions on NumPy arrays over XLA's own memory, through its typed FFI.

XLA's runtime hands a handler a frame of C structures (``xla/ffi/api/c_api.h``), which are read here as that header lays
them: members are only ever added at an end, and each structure says its size. A handler may not raise: what goes wrong
becomes an error of XLA's. What a call is stands in a text, since compiled programs outlive the process that made them.
"""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy

Array = Any
Function = Callable[[Any, list[Array]], Sequence[Array]]
"""``function(what, arrays) -> results``: ``what`` is the call's text as ``json`` reads it."""

_I32, _I64, _ADDRESS = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
_HEAD: list[Any] = [("struct_size", ctypes.c_size_t), ("extension", _ADDRESS)]


class _Buffer(ctypes.Structure):
    _fields_ = [*_HEAD, ("dtype", _I32), ("data", _ADDRESS), ("rank", _I64), ("dims", ctypes.POINTER(_I64))]


class _Buffers(ctypes.Structure):
    """Arguments or results."""

    _fields_ = [
        *_HEAD,
        ("size", _I64),
        ("types", ctypes.POINTER(_I32)),
        ("buffers", ctypes.POINTER(ctypes.POINTER(_Buffer))),
    ]


class _Text(ctypes.Structure):
    _fields_ = [("data", _ADDRESS), ("size", ctypes.c_size_t)]


class _Attributes(ctypes.Structure):
    _fields_ = [
        *_HEAD,
        ("size", _I64),
        ("types", ctypes.POINTER(_I32)),
        ("names", _ADDRESS),
        ("values", ctypes.POINTER(ctypes.POINTER(_Text))),
    ]


class _Version(ctypes.Structure):
    _fields_ = [*_HEAD, ("major", ctypes.c_int), ("minor", ctypes.c_int)]


class _ErrorArguments(ctypes.Structure):
    _fields_ = [*_HEAD, ("message", ctypes.c_char_p), ("code", ctypes.c_int)]


class _Api(ctypes.Structure):
    _fields_ = [
        *_HEAD,
        ("version", _Version),
        ("internal", _ADDRESS),
        ("create_error", ctypes.CFUNCTYPE(_ADDRESS, ctypes.POINTER(_ErrorArguments))),
    ]


class _Extension(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("kind", ctypes.c_int), ("next", _ADDRESS)]


class _Metadata(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("version", _Version), ("traits", ctypes.c_uint32)]


class _MetadataExtension(ctypes.Structure):
    _fields_ = [("base", _Extension), ("metadata", ctypes.POINTER(_Metadata))]


class _Frame(ctypes.Structure):
    _fields_ = [
        *_HEAD,
        ("api", ctypes.POINTER(_Api)),
        ("context", _ADDRESS),
        ("stage", ctypes.c_int),
        ("arguments", _Buffers),
        ("results", _Buffers),
        ("attributes", _Attributes),
    ]


_METADATA = 1
_INTERNAL_ERROR = 13
_STRING = 4
_DTYPES = {
    10: numpy.dtype("float16"),
    11: numpy.dtype("float32"),
    12: numpy.dtype("float64"),
    15: numpy.dtype("complex64"),
    16: numpy.dtype(jnp.bfloat16),
    18: numpy.dtype("complex128"),
}
_HANDLER = ctypes.CFUNCTYPE(_ADDRESS, ctypes.POINTER(_Frame))
_registered: dict[str, Any] = {}


def register(name: str, function: Function) -> None:
    """Let ``call`` reach a function, in this process, on the CPU. It may not use JAX: XLA waits for it."""

    def handler(frame: Any) -> int | None:
        try:
            return _handle(frame.contents, function)
        except BaseException as error:  # nothing may leave, whatever it is
            return _failed(frame.contents, f"{name}: {type(error).__name__}: {error}")

    handle = _registered[name] = _HANDLER(handler)
    address = ctypes.cast(handle, _ADDRESS).value
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, [_ADDRESS, ctypes.c_char_p, _ADDRESS]
    jax.ffi.register_ffi_target(name, capsule(address, None, None), platform="cpu")


def registered() -> frozenset[str]:
    """The names that this process has registered."""
    return frozenset(_registered)


def call(name: str, what: Any, arrays: Sequence[Array], results: Sequence[Any]) -> list[Array]:
    """What a registered function returns. ``what`` is what json can write; ``results`` are shapes and dtypes."""
    run = jax.ffi.ffi_call(name, tuple(results), vmap_method="sequential")
    return list(run(*arrays, what=json.dumps(what)))


def _handle(frame: _Frame, function: Function) -> int | None:
    if frame.extension:
        extension = ctypes.cast(frame.extension, ctypes.POINTER(_MetadataExtension)).contents
        if extension.base.kind == _METADATA:
            _describe(frame, extension.metadata.contents)
            return None
    for part, kind in ((frame, _Frame), (frame.arguments, _Buffers), (frame.results, _Buffers)):
        if part.struct_size < ctypes.sizeof(kind):
            raise RuntimeError(f"this version of XLA lays out {kind.__name__} otherwise")
    count = frame.attributes.size
    if count != 1 or frame.attributes.types[0] != _STRING:
        raise RuntimeError(f"expected one text, came {count} attributes")
    text = frame.attributes.values[0].contents
    what = _read(ctypes.string_at(text.data, text.size))
    given = [_array(frame.arguments.buffers[i].contents, True) for i in range(frame.arguments.size)]
    found = function(what, given)
    if len(found) != frame.results.size:
        raise RuntimeError(f"{len(found)} results where {frame.results.size} are expected")
    for i, x in enumerate(found):
        room = _array(frame.results.buffers[i].contents, False)
        if room.shape != x.shape or room.dtype != x.dtype:
            raise RuntimeError(f"result {i} is {x.dtype}{x.shape} where {room.dtype}{room.shape} is expected")
        room[...] = x
    return None


def _describe(frame: _Frame, metadata: _Metadata) -> None:
    """XLA asks which version of its interface the handler knows: its own, of which the structures above are a part."""
    if frame.api:
        version = frame.api.contents.version
        metadata.version.major, metadata.version.minor = version.major, version.minor
    else:  # before jaxlib 0.7 or so
        metadata.version.major, metadata.version.minor = _header_version()
    metadata.traits = 0


def _header_version() -> tuple[int, int]:
    """The version that the header beside jaxlib says."""
    text = (Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h").read_text("utf-8")
    major, minor = (re.search(rf"define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR"))
    if major is None or minor is None:
        raise RuntimeError("jaxlib's header of its FFI says no version")
    return int(major[1]), int(minor[1])


def _failed(frame: _Frame, message: str) -> int | None:
    if not frame.api:  # nobody to tell; a version that was not said is refused
        return None
    arguments = _ErrorArguments(
        ctypes.sizeof(_ErrorArguments), None, message.encode("utf-8", "replace"), _INTERNAL_ERROR
    )
    found: int | None = frame.api.contents.create_error(ctypes.byref(arguments))
    return found


@lru_cache(256)
def _read(text: bytes) -> Any:
    return json.loads(text)


class _Memory:
    """What stands for memory of XLA's until NumPy has made an array of it."""

    __slots__ = ("__array_interface__",)

    def __init__(self, address: int, size: int, read_only: bool) -> None:
        self.__array_interface__ = {
            "version": 3,
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, read_only),
        }


def _array(buffer: _Buffer, read_only: bool) -> Array:
    """A buffer as an array over its memory."""
    dtype = _DTYPES.get(buffer.dtype)
    if dtype is None:
        raise RuntimeError(f"a buffer of XLA's dtype {buffer.dtype}")
    shape = tuple(buffer.dims[: buffer.rank])
    size = prod(shape) * dtype.itemsize
    if size == 0:
        return numpy.empty(shape, dtype)
    return numpy.asarray(_Memory(buffer.data, size, read_only)).view(dtype).reshape(shape)
