"""How the last calls of this kind were made ready: a small call is as little work as its checks.

A *plan* is what ``prepare`` made of a whole call or a step, on NumPy's arrays or torch's own tensors, where all that it
did was to give arrays other shapes. Which those are, it finds out from shapes, dtypes, devices and options alone, and
so the next call with the same ones is made ready alike. What runs is chosen anew each time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy

from scanfield.arrays import Array, is_plain
from scanfield.dispatch import Call, Operation, Prepared

Key = tuple[Any, ...]


class Plan(NamedTuple):
    """A call made ready before; it holds no array."""

    sources: tuple[tuple[int, tuple[int, ...] | None] | None, ...] | None
    """For each canonical array its place among the arguments and its shape, if that is another; None if absent.

    None in all if the first arguments are the canonical arrays.
    """
    call: Call
    output: Callable[[Array], Array]
    state: Callable[[Array], Array]

    def ready(self, values: Sequence[Any]) -> Call:
        """The call of these arguments."""
        name, arrays, options, compute = self.call
        if self.sources is None:
            return Call(name, tuple(values[: len(arrays)]), options, compute)
        found = [
            None
            if source is None
            else values[source[0]]
            if source[1] is None
            else values[source[0]].reshape(source[1])
            for source in self.sources
        ]
        return Call(name, tuple(found), options, compute)


class Plans:
    """The plans of one scan's steps, or of whole calls, by the kind of their arguments."""

    most = 256

    def __init__(self) -> None:
        self._found: dict[Key, Plan] = {}

    def get(self, key: Key | None) -> Plan | None:
        """The plan for this kind of arguments, if there is one."""
        if key is None:
            return None
        try:
            return self._found.get(key)
        except TypeError:  # a size that is a symbol has no hash
            return None

    def keep(self, key: Key | None, record: Any, values: Mapping[str, Any], prepared: Prepared) -> None:
        """Remember how a call was made ready, if that is no more than shapes. A step's state is called ``state``."""
        if key is None or not isinstance(record, Operation):
            return
        places = {name: i for i, name in enumerate(values)}
        sources: list[tuple[int, tuple[int, ...] | None] | None] = []
        for entry, array in zip(record.inputs, prepared.call.arrays, strict=True):
            if array is None:
                sources.append(None)
                continue
            name = "state" if entry.role == "state" and entry.name not in places else entry.name
            given = values.get(name)
            if entry.role == "index" or (array is not given and not _reshaped(given, array)):
                return  # bounds are checked by value
            sources.append((places[name], None if array is given else tuple(array.shape)))
        if len(self._found) >= self.most:
            self._found.clear()
        straight = [name for name, _ in zip(values, record.inputs, strict=False)] == [
            entry.name for entry in record.inputs
        ] and all(source is None or source[1] is None for source in sources)
        call = prepared.call._replace(arrays=(None,) * len(sources))
        plan = Plan(None if straight else tuple(sources), call, prepared.output, prepared.state)
        try:
            self._found[key] = plan
        except TypeError:  # as above
            return


def _reshaped(given: Any, array: Any) -> bool:
    """Whether ``array`` is ``given`` in another shape."""
    if given is None or given.dtype != array.dtype:
        return False
    if type(given) is numpy.ndarray:
        own = given.__array_interface__["data"] == array.__array_interface__["data"]
        same = own and given.size == array.size and given.reshape(array.shape).strides == array.strides
        return bool(same)
    try:
        own = given.data_ptr() == array.data_ptr() != 0
    except RuntimeError:  # what stands for other tensors, under torch.func, has no memory of its own
        return False
    if not own or given.numel() != array.numel():
        return False
    return bool(given.reshape(array.shape).stride() == array.stride())


def key_of(values: Sequence[Any], name: str = "") -> Key | None:
    """The kind of the arguments of what is called ``name``; None where torch records what is done to one of them.

    None also where one is neither a plain array nor a plain option.
    Options that Python takes for equal (1 and True, 0.0 and -0.0) are not.
    """
    found: list[Any] = [name]
    plain: type | None = None
    for value in values:
        kind = type(value)
        if value is None or kind is bool:
            found.append(value)
        elif kind is numpy.ndarray:
            found.append((value.shape, value.dtype))
        elif kind is float:
            found.append(value.hex())
        elif kind is int:
            found.append((int, value))
        elif kind is plain or is_plain(kind):
            plain = kind
            try:
                found.append((value.shape, value.dtype, value.device, value.layout))
            except RuntimeError:  # a nested tensor has no shape
                return None
        else:
            return None
    return tuple(found)
