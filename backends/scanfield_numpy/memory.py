"""Memory for large results, aligned to registers and kept from one call to the next.

The system clears every page of a new large array when it is first written, which takes longer than a scan that runs at
the speed of memory. So the memory of a large result comes back here when the array and all its views and exports
are gone, and a later result takes it. At most ``SCANFIELD_POOL_BYTES`` (256 MiB unless set; 0 for none) waits so.

Where results of one shape follow each other (a decoding state), they *take turns*: an array that was handed out is kept,
and handed out again once nobody else refers to it. That takes a twentieth of the time, and counts as waiting.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import numpy

from scanfield_numpy.vector import REGISTER_BYTES

Array = Any

_NAMES = getattr(os, "sysconf_names", {})

SMALLEST = 1 << 20
"""Bytes; a smaller array is numpy's own, whose allocator keeps small pieces itself."""
LAST_CACHE = (os.sysconf("SC_LEVEL3_CACHE_SIZE") if "SC_LEVEL3_CACHE_SIZE" in _NAMES else 0) or 32 << 20
"""Bytes of the last level of cache."""
_ALIGNED = 64
# A larger array takes a block at most so much larger than itself.
_FIT = 1.25


_DEFAULT = 256 << 20


def _limit() -> int:
    asked = os.environ.get("SCANFIELD_POOL_BYTES", "")
    if not asked:
        return _DEFAULT
    if not (asked.isascii() and asked.isdecimal()):
        # A size in other units is no reason to do without the kernels.
        warnings.warn(
            f"SCANFIELD_POOL_BYTES: {asked!r}; allowed is a number of bytes, 0 for none; {_DEFAULT} is taken",
            stacklevel=2,
        )
        return _DEFAULT
    return int(asked)


class _Pool:
    """Blocks that wait for an array, the longest waiting first.

    Nobody waits for the lock: a destructor may run in the middle of any line here, a signal's handler too. Who finds
    the pool in use, by another thread or in its own, goes to the system. A handler may raise as well: so the lock is
    taken where it is given back in any case, and knows whose it is.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.turns: dict[Any, deque[Array]] = {}
        self.clear()

    def clear(self) -> None:
        self._lock: Any = threading.RLock()
        # Before the blocks: they may come back.
        self.turns = {}
        self._blocks: list[Array] = []

    @property
    def held(self) -> int:
        """Bytes of the blocks; a sum that is kept would be wrong after an interrupt."""
        return sum(block.nbytes for block in tuple(self._blocks))

    def kept(self) -> int:
        """Bytes of the arrays that take turns, in use or not."""
        return sum(array.nbytes for arrays in tuple(self.turns.values()) for array in tuple(arrays))

    def keep(self, kind: Any, array: Array) -> None:
        """Let an array take turns with those of its kind, if half of what may wait is room for it; older ones make it."""
        gone: list[Array] = []  # until the lock is free: then they come back here
        self._alone(self._keep, kind, array, gone)

    def take(self, size: int) -> Array | None:
        """The smallest block that fits."""
        return self._alone(self._take, size)

    def give(self, block: Array) -> None:
        """Take a block back; the longest waiting ones make room for it."""
        if block.nbytes <= self.limit:
            self._alone(self._give, block)

    def _alone(self, do: Callable[..., Array | None], *given: Any) -> Array | None:
        """Do something while nobody else is in the middle of it; otherwise nothing.

        An interrupt may come after any call, and in a loop: so there is none but in what is tried.
        """
        if self._lock._is_owned():
            return None
        try:
            return do(*given) if self._lock.acquire(blocking=False) else None
        finally:
            try:  # noqa: SIM105  # an interrupt may come on the way into a context manager
                self._lock.release()
            except RuntimeError:  # it was not taken
                pass

    def _keep(self, kind: Any, array: Array, gone: list[Array]) -> None:
        room = self.limit // 2 - array.nbytes
        if room < 0:
            return
        own = self.turns.pop(kind, None) or deque()
        self.turns[kind] = own
        while self.kept() > room:
            oldest = next(iter(self.turns))
            if self.turns[oldest]:
                gone.append(self.turns[oldest].popleft())
            else:
                del self.turns[oldest]
        own.append(array)
        while self._blocks and self.held + self.kept() > self.limit:
            self._blocks.pop(0)

    def _take(self, size: int) -> Array | None:
        found = None
        for i, block in enumerate(self._blocks):
            if size <= block.nbytes <= _FIT * size and (
                found is None or block.nbytes < self._blocks[found].nbytes
            ):
                found = i
        return None if found is None else self._blocks.pop(found)

    def _give(self, block: Array) -> None:
        room = self.limit - self.kept() - block.nbytes
        if room < 0:
            return
        while self.held > room:
            self._blocks.pop(0)
        self._blocks.append(block)


class _Owner:
    """What an array's memory belongs to: the base of the array, and so alive as long as anything that reads it."""

    __slots__ = ("__array_interface__", "_block", "_pool")

    def __init__(self, block: Array, pool: _Pool, shape: tuple[int, ...], dtype: Any) -> None:
        self._block, self._pool = block, pool
        address = block.__array_interface__["data"][0]
        self.__array_interface__ = {
            "version": 3,
            "shape": shape,
            "typestr": dtype.str,
            "data": (address + -address % _ALIGNED, False),
        }

    def __del__(self) -> None:
        self._pool.give(self._block)


pool = _Pool(_limit())
if hasattr(os, "register_at_fork"):
    # Written by a forked child, a page of the parent's is copied, which costs more than a new one.
    os.register_at_fork(after_in_child=pool.clear)


def fresh(shape: int | tuple[int, ...], dtype: Any) -> Array:
    """``numpy.empty(shape, dtype)``, from a block that waits if it is large."""
    return _array(shape, dtype, numpy.empty)


def cleared(shape: int | tuple[int, ...], dtype: Any) -> Array:
    """``numpy.zeros(shape, dtype)``, from a block that waits if it is large."""
    return _array(shape, dtype, numpy.zeros)


def taking_turns(shape: tuple[int, ...], dtype: Any) -> Callable[[], Array]:
    """What makes arrays of one shape as ``fresh`` does, large ones in turns."""
    if prod(shape) * dtype.itemsize < SMALLEST:
        return partial(numpy.empty, shape, dtype)
    if not _COUNTS:
        return partial(fresh, shape, dtype)
    kind = shape, dtype

    def make() -> Array:
        waiting = pool.turns.get(kind)
        if waiting:
            # Whoever took it out is alone with it. The one that was handed out first is the likeliest to be free.
            array, alone = _taken(waiting)
            # By way of its views' ``base`` it may have been made read-only, or given another shape.
            if array is not None and _as_made(array, shape, dtype):
                view = array.view() if alone else None
                waiting.append(array)
                if view is not None:
                    return view
        new = fresh(shape, dtype)
        pool.keep(kind, new)
        return new.view()

    return make


def _taken(waiting: deque[Array]) -> tuple[Array | None, bool]:
    """The first array of a queue, and whether nobody else refers to it: views, views of views and exports all do.

    Nor to its base: whoever walks that far holds the memory too.
    """
    try:
        array = waiting.popleft()
    except IndexError:  # by another thread
        return None, False
    # How often CPython counts a variable of its own differs from one version to the next, but not between two.
    owner, probe = array.base, object()
    once = sys.getrefcount(probe)
    alone = sys.getrefcount(array) == once and sys.getrefcount(owner) == once + 1
    return array, alone


def _as_made(array: Array, shape: tuple[int, ...], dtype: Any) -> bool:
    flags = array.flags
    own = flags.c_contiguous and flags.aligned and flags.writeable
    return bool(own and array.shape == shape and array.dtype is dtype)


# Without a lock around the interpreter counts are not exact.
_COUNTS = sys.implementation.name == "cpython" and bool(getattr(sys, "_is_gil_enabled", lambda: True)())


def past_cache(array: Array, moved: int = 0) -> bool:
    """Whether an array is best written past the cache: it is larger, and its rows begin where registers do.

    Larger is also the number of bytes that are ``moved`` while the array is written.
    """
    if max(array.nbytes, moved) <= LAST_CACHE:
        return False
    address = array.__array_interface__["data"][0]
    return bool((address | array.strides[-2]) % REGISTER_BYTES == 0)


def _array(shape: int | tuple[int, ...], dtype: Any, make: Callable[..., Array]) -> Array:
    kind = dtype if isinstance(dtype, numpy.dtype) else numpy.dtype(dtype)
    size = (shape if isinstance(shape, int) else prod(shape)) * kind.itemsize
    if size < SMALLEST:
        return make(shape, kind)
    axes = (shape,) if isinstance(shape, int) else tuple(shape)
    block = pool.take(size + _ALIGNED)
    waited = block is not None
    if block is None:
        block = make(size + _ALIGNED, numpy.uint8)
    array = numpy.asarray(_Owner(block, pool, axes, kind))
    if waited and make is numpy.zeros:
        array.fill(0)  # a new block's pages are zeros when they are first touched
    return array
