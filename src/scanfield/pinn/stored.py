"""What a training's checkpoint has to hold, checked before any of it is used: the file may come from anywhere."""

from __future__ import annotations

import math
from typing import Any

from scanfield.errors import StateError
from scanfield.pinn.fit import Record

__all__ = ["history", "numbers", "real", "texts", "whole"]

_LARGEST = 2**53


def whole(name: str, value: Any, below: int = _LARGEST) -> int:
    """An integer from 0 to `below`, itself left out; StateError otherwise.

    >>> whole("stage", 1, 2)
    1
    """
    if type(value) is not int or not 0 <= value < below:
        raise StateError(f"{name} = {value!r:.40}: an integer from 0 to {below - 1} is expected")
    return value


def real(name: str, value: Any, *, finite: bool = False) -> float:
    """A real number; StateError otherwise. A loss may be infinite or NaN."""
    if type(value) not in (int, float) or (abs(value) > 1e308 and not isinstance(value, float)):
        raise StateError(f"{name} = {value!r:.40}: a real number is expected")
    if finite and not math.isfinite(value):
        raise StateError(f"{name} = {value!r}: a finite number is expected")
    return float(value)


def numbers(name: str, given: Any, *, finite: bool = False) -> dict[str, float]:
    """Numbers by name, `finite` ones of at least 0 where that is asked for; StateError for anything else."""
    if not isinstance(given, dict):
        raise StateError(f"{name} = {given!r:.40}: numbers by name are expected")
    found = {key: real(f"{name} of {key!r:.40}", value, finite=finite) for key, value in given.items()}
    for key, value in found.items():
        if finite and value < 0.0:
            raise StateError(f"{name} of {key!r:.40} = {value}: a number of at least 0 is expected")
    return found


def texts(name: str, value: Any) -> str:
    """A text; StateError for anything else."""
    if not isinstance(value, str):
        raise StateError(f"{name} = {value!r:.40}: a text is expected")
    return value


def history(given: Any) -> list[Record]:
    """The records of a training; StateError for what are none."""
    if not isinstance(given, list) or not all(
        isinstance(line, dict) and set(line) == set(Record._fields) for line in given
    ):
        raise StateError("history: a list of records is expected")
    return [
        Record(
            whole("iteration", line["iteration"]),
            texts("stage", line["stage"]),
            real("loss", line["loss"]),
            numbers("terms", line["terms"]),
            real("held_out", line["held_out"]),
            numbers("weights", line["weights"]),
            texts("points", line["points"]),
        )
        for line in given
    ]
