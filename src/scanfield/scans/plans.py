"""How the last tokens of this kind were made ready: a decoding step is little work, as little as its checks.

A *plan* is what ``prepare`` made of one step of NumPy arrays where all that it did was to give arrays other shapes. Which
those are, it finds out from shapes, dtypes and options alone, and so the next step with the same ones is made ready alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy

from scanfield.arrays import Array
from scanfield.dispatch import Call, Operation, Prepared

Key = tuple[Any, ...]


class Plan(NamedTuple):
    """A step made ready before; it holds no array."""

    sources: tuple[tuple[int, tuple[int, ...] | None] | None, ...]
    """For each canonical array its place among the arguments and its shape, if that is another; None if absent."""
    call: Call
    output: Callable[[Array], Array]
    state: Callable[[Array], Array]

    def ready(self, values: Sequence[Any]) -> Call:
        """The call of these arguments."""
        arrays = [
            None
            if source is None
            else values[source[0]]
            if source[1] is None
            else values[source[0]].reshape(source[1])
            for source in self.sources
        ]
        name, _, options, compute = self.call
        return Call(name, tuple(arrays), options, compute)


class Plans:
    """The plans of one scan's steps, by the kind of their arguments."""

    most = 256

    def __init__(self) -> None:
        self._found: dict[Key, Plan] = {}

    def get(self, key: Key | None) -> Plan | None:
        """The plan for this kind of arguments, if there is one."""
        return None if key is None else self._found.get(key)

    def keep(self, key: Key | None, record: Any, values: Mapping[str, Any], prepared: Prepared) -> None:
        """Remember how a step was made ready, if that is no more than shapes."""
        if key is None or not isinstance(record, Operation):
            return
        places = {name: i for i, name in enumerate(values)}
        sources: list[tuple[int, tuple[int, ...] | None] | None] = []
        for entry, array in zip(record.inputs, prepared.call.arrays, strict=True):
            if array is None:
                sources.append(None)
                continue
            name = "state" if entry.role == "state" else entry.name
            given = values.get(name)
            if array is not given and not _reshaped(given, array):
                return
            sources.append((places[name], None if array is given else array.shape))
        if len(self._found) >= self.most:
            self._found.clear()
        call = prepared.call._replace(arrays=())
        self._found[key] = Plan(tuple(sources), call, prepared.output, prepared.state)


def _reshaped(given: Any, array: Any) -> bool:
    """Whether ``array`` is ``given`` in another shape."""
    if type(given) is not numpy.ndarray or type(array) is not numpy.ndarray or given.dtype != array.dtype:
        return False
    own = given.__array_interface__["data"] == array.__array_interface__["data"]
    return own and given.size == array.size and given.reshape(array.shape).strides == array.strides


def key_of(values: Sequence[Any]) -> Key | None:
    """The kind of a step's arguments; None where one is neither a NumPy array nor a plain option.

    Options that Python takes for equal (1 and True, 0.0 and -0.0) are not.
    """
    found: list[Any] = []
    for value in values:
        kind = type(value)
        if kind is numpy.ndarray:
            found.append((value.shape, value.dtype))
        elif value is None or kind is bool:
            found.append(value)
        elif kind is float:
            found.append(value.hex())
        else:
            return None
    return tuple(found)
