"""What a caller gives to an optimiser: settings as Python's numbers, arrays that are the optimiser's own, real losses."""

from __future__ import annotations

import sys
from dataclasses import fields
from numbers import Integral, Real
from typing import Any

from scanfield.arrays import COMPLEX, Array, copy, dtype_name, floating_names, library_of
from scanfield.errors import DtypeError

__all__ = ["check_real", "detached", "in_python", "kept", "like_leaf", "real_number"]


def in_python(settings: Any) -> None:
    """NumPy's numbers among the fields of a frozen dataclass as Python's: to other libraries they are arrays."""
    for field in fields(settings):
        value = getattr(settings, field.name)
        if type(value) not in (bool, int, float) and isinstance(value, Real):
            number = int(value) if isinstance(value, Integral) else float(value)
            object.__setattr__(settings, field.name, number)


def detached(array: Any) -> Any:
    """The numbers alone, where torch's autograd follows an array; anything else as it is."""
    return array.detach() if _followed(array) else array


def like_leaf(array: Array, like: Array) -> Array:
    """An array that autograd has not followed up to here, and follows from here on if it does `like`."""
    return detached(array).requires_grad_() if _followed(like) else detached(array)


def _followed(array: Any) -> bool:
    """Whether torch records a graph of an array. One who transforms or compiles a function wants all of it."""
    if not getattr(array, "requires_grad", False):
        return False
    torch: Any = sys.modules["torch"]
    return not torch.compiler.is_compiling() and torch._C._functorch.maybe_current_level() is None


def kept(array: Array) -> Array:
    """An array that stays as it is whatever the function that gave it writes into its own at the next call."""
    array = detached(array)
    return array if library_of(array, "array").name in _IMMUTABLE else copy(array)


_IMMUTABLE = ("jax", "dask", "ndonnx")


def real_number(name: str, value: Any) -> float:
    """A number, or an array without axes, on the host; DtypeError for a complex one."""
    if isinstance(value, complex) and not hasattr(value, "dtype"):
        raise DtypeError(
            f"{name}: a complex number is not taken; allowed is a real one: only these have an order"
        )
    if hasattr(value, "dtype"):
        check_real(name, value, "only real numbers have an order")
    return float(detached(value))


def check_real(name: str, array: Array, mend: str) -> None:
    """DtypeError for complex numbers, with the way out."""
    if (dtype := dtype_name(array.dtype)) in COMPLEX:
        try:
            allowed = floating_names(library_of(array, name).name)
        except TypeError:  # a scalar of NumPy
            allowed = floating_names("numpy")
        raise DtypeError(f"{name}: dtype {dtype} is not taken; allowed are {', '.join(allowed)}; {mend}")
