"""What messages show of a value that came, and the lines with which they end: run one, and the call works.

A line is text about arrays that are described by ``Like``; no library is imported here.
"""

from __future__ import annotations

import reprlib
from typing import Any, NamedTuple

_LONGEST, _MOST = 80, 120
"""Of one string or object, and of a whole value."""


class _Short(reprlib.Repr):
    """As ``repr``, with arrays as a class and a shape, and what is long cut to a line."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = 6
        self.maxlevel = 3
        self.maxstring = self.maxother = _LONGEST

    def repr_int(self, x: Any, level: int) -> str:
        # Python writes no number of thousands of digits.
        return super().repr_int(x, level) if x.bit_length() < 4096 else f"an integer of {x.bit_length()} bits"

    def repr_instance(self, x: Any, level: int) -> str:
        shape = None if isinstance(x, type) else shape_of(x)
        if shape:
            return f"{class_of(x)} of shape {shape}"
        text = " ".join(super().repr_instance(x, level).split())
        return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


_SHORT = _Short()


def shown(value: Any) -> str:
    """A value that came, for a message: an array by its class and shape, the rest by ``repr``, cut where it is long.

    >>> import numpy
    >>> shown(numpy.ones((20, 20))), shown(list(range(99))), shown("yes")
    ('numpy.ndarray of shape (20, 20)', '[0, 1, 2, 3, 4, 5, ...]', "'yes'")
    """
    text = _SHORT.repr(value)
    return text if len(text) <= _MOST else f"{text[: _MOST - 3]}..."


def class_of(value: Any) -> str:
    """The full name of a value's class."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def shape_of(value: Any) -> tuple[int, ...] | None:
    """The shape of what has one and a dtype; None for anything else (some raise when they are asked)."""
    try:
        return tuple(value.shape) if hasattr(value, "dtype") else None
    except Exception:  # a nested tensor raises RuntimeError, a proxy anything
        return None


class Like(NamedTuple):
    """An array that the refused ones are brought to."""

    library: str
    name: str = ""
    """What the caller calls it in code, ``a`` or ``params['w']``; empty if that has no name there."""
    dtype: str = ""
    """The name of its dtype, if that is a floating one."""
    device: str = ""


HOST = Like("numpy")
"""Where nothing else is known."""


def converted(name: str, source: str, like: Like) -> str:
    """The expression that makes of ``name``, an array of the library ``source``, one of the library of ``like``."""
    host = {
        "torch": f"{name}.detach().cpu().numpy()",
        "cupy": f"{name}.get()",
        "dask": f"{name}.compute()",
    }.get(source, f"numpy.asarray({name})" if like.library == "numpy" else name)
    return _brought(host, like)


def moved(name: str, like: Like) -> str:
    """The expression that brings an array to the device of another one of its library."""
    device = _device(like) or "device"
    if like.library == "torch":
        return f"{name}.to({device})"
    if like.library == "jax":
        return f"jax.device_put({name}, {device})"
    return f"array_api_compat.to_device({name}, {device})"


def floating(name: str, library: str, dtype: str) -> str:
    """The expression that casts integers to a floating dtype."""
    if library in ("numpy", "cupy", "dask", "jax"):
        return f'{name}.astype("{_plain(dtype)}")'
    if library == "torch":
        method = {"float64": "double", "float16": "half", "bfloat16": "bfloat16"}.get(dtype, "float")
        return f"{name}.{method}()"
    return f"xp.astype({name}, xp.{dtype}), with the namespace xp of the array"


def of_list(name: str, like: Like, *, tokens: bool) -> str:
    """The expression that makes an array of a list of numbers; of tokens where these are wanted."""
    if tokens:
        return _of_host(name, like, "int" if like.library == "numpy" else "")
    if like.dtype:
        return _of_host(name, like, _dtype(like))
    return _of_host(name, like, "torch.float32" if like.library == "torch" else "float")


def of_number(name: str, value: Any, shape: tuple[int, ...], like: Like) -> str:
    """The expression that makes an array of a shape of one number."""
    module = {"jax": "jax.numpy", "dask": "dask.array"}.get(like.library, like.library)
    # A dtype that cannot hold the number is left out: a complex coefficient of real input.
    dtype = f", dtype={_dtype(like)}" if like.dtype and not isinstance(value, complex) else ""
    plain = type(value) in (float, complex) or (type(value) is int and dtype)
    kind = "complex" if isinstance(value, complex) else "float"
    return f"{module}.full({shape}, {name if plain else f'{kind}({name})'}{dtype}{_placed(like)})"


def of_object(name: str, value: Any, like: Like) -> str | None:
    """The expression that makes an array of a table, a sparse matrix or the like, by what methods it has."""
    for method in ("to_numpy", "toarray"):
        if not isinstance(value, type) and callable(getattr(value, method, None)):
            host = f"{name}.{method}()"
            break
    else:
        if isinstance(value, type) or not hasattr(value, "__array__"):
            return None
        host = f"numpy.asarray({name})"
    return _brought(host, like)


def _brought(host: str, like: Like) -> str:
    """A NumPy array in the library of another one."""
    if like.library == "numpy":
        return host
    return f"dask.array.from_array({host})" if like.library == "dask" else _of_host(host, like)


def _of_host(host: str, like: Like, dtype: str = "") -> str:
    given = f", dtype={dtype}" if dtype else ""
    call = {
        "torch": "torch.as_tensor",
        "jax": "jax.numpy.asarray",
        "dask": "dask.array.asarray",
    }.get(like.library, f"{like.library}.asarray")
    return f"{call}({host}{given}{_placed(like)})"


def _placed(like: Like) -> str:
    """The argument that makes an array where another one is; nothing for libraries with one place or one at a time."""
    if like.library in ("numpy", "cupy", "dask", "jax"):
        return ""
    device = _device(like)
    return f", device={device}" if device else ""


def _device(like: Like) -> str:
    if like.name and not (like.library == "torch" and "(" in like.name):
        return f"{like.name}.device"
    if like.library == "torch" and like.device:
        return repr(like.device)
    return like.device if like.device.startswith(f"{like.library}.") else ""  # which is code


def _dtype(like: Like) -> str:
    if like.name and "(" not in like.name:
        return f"{like.name}.dtype"
    if like.library in ("numpy", "cupy", "dask", "jax"):
        return f'"{_plain(like.dtype)}"'
    return f"{like.library}.{like.dtype}"


def _plain(dtype: str) -> str:
    """A dtype's name on every machine: the bits of ``longdouble`` are the machine's."""
    return {"float128": "longdouble", "complex256": "clongdouble"}.get(dtype, dtype)
