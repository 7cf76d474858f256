"""The options that scans share, checked."""

from __future__ import annotations

from typing import Any

import numpy

from scanfield.advice import class_of, shown
from scanfield.errors import ArgumentError, DtypeError

DEFAULT_CHUNK = 64
"""Tokens between the boundaries of ``states_at="chunks"`` where no chunk size was given."""


def check_chunk_size(value: Any) -> int | None:
    """A chunk size: None (let the implementation choose) or an integer of at least 1."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | numpy.integer) or value < 1:
        raise ArgumentError(f"chunk_size: {shown(value)}; allowed is an integer of at least 1, or None")
    return int(value)


def check_flag(value: Any, name: str) -> bool:
    """A Python or NumPy boolean."""
    if not isinstance(value, bool | numpy.bool_):
        raise ArgumentError(f"{name}: {shown(value)}; allowed are True and False")
    return bool(value)


def check_number(value: Any, name: str) -> float:
    """A Python or NumPy real number as a Python float, which promotes alike in every library; no arrays."""
    if isinstance(value, bool | numpy.bool_) or not isinstance(
        value, int | float | numpy.integer | numpy.floating
    ):
        raise DtypeError(f"{name}: expected a Python number, came {class_of(value)}; {name} = float({name})")
    try:
        return float(value)
    except OverflowError:
        raise ArgumentError(f"{name}: too large for a float") from None
