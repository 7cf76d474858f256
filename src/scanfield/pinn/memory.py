"""Named buffers that a sweep writes into, made at the first step and used again at every later one."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

from scanfield.arrays import Array, Namespace


class Buffers:
    """One flat array for each name, as long as the longest asked for; views of it by name and shape."""

    def __init__(self, xp: Namespace, dtype: Any, device: Any) -> None:
        self.xp, self.dtype, self.device = xp, dtype, device
        self._flat: dict[Hashable, Array] = {}
        self._views: dict[tuple[Hashable, tuple[int, ...]], Array] = {}
        self._parts: dict[Hashable, Buffers] = {}

    def take(self, name: Hashable, shape: tuple[int, ...]) -> Array:
        """An array of this shape, holding anything. The same name gives the same memory."""
        view = self._views.get((name, shape))
        if view is None:
            size = math.prod(shape)
            flat = self._flat.get(name)
            if flat is None or flat.shape[0] < size:
                flat = self._flat[name] = self.xp.empty((size,), dtype=self.dtype, device=self.device)
                self._views = {key: kept for key, kept in self._views.items() if key[0] != name}
            view = self._views[name, shape] = self.xp.reshape(flat[:size], shape)
        return view

    def part(self, name: Hashable) -> Buffers:
        """Buffers of the same kind under a name: what two sweeps need at the same time."""
        found = self._parts.get(name)
        if found is None:
            found = self._parts[name] = Buffers(self.xp, self.dtype, self.device)
        return found

    def put(self, name: Hashable, array: Array) -> None:
        """Let a name stand for this array's memory, which is contiguous."""
        self._flat[name] = self.xp.reshape(array, (-1,))

    @property
    def bytes(self) -> int:
        """What all buffers take."""
        own = sum(flat.shape[0] * flat.itemsize for flat in self._flat.values())
        return int(own) + sum(part.bytes for part in self._parts.values())


class Nothing:
    """The buffers of kernels that make new arrays."""

    def part(self, name: Hashable) -> Nothing:
        """Itself."""
        return self


NOTHING = Nothing()
