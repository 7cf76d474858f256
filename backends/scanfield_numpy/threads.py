"""One pool of threads that all kernels share.

A kernel runs a range of independent tasks without the interpreter's lock. What a task computes, and where it writes,
depends on the shapes alone, so a result is the same for every number of threads. No OpenMP: its runtime aborts a forked
child and spins between calls.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from array import array as Block
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy

from scanfield.threads import get_num_threads
from scanfield_numpy.compiling import Kernel
from scanfield_numpy.memory import fresh

Array = Any

_BYTE = numpy.dtype(numpy.uint8)
_ZERO = {name: numpy.dtype(name).type(0) for name in ("float32", "float64")}

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None
_pool_size = 0

# Below so many multiplications a second thread costs more than it takes over (waking it takes some 35 us).
WORTH_A_THREAD = 1_000_000


def run(
    kernel: Kernel,
    dtype: str,
    tasks: int,
    work: float,
    memory: int,
    integers: Sequence[int],
    arrays: Sequence[Array],
    size: int = 0,
) -> None:
    """A kernel over all tasks, in as many threads as the work (in multiplications) is worth.

    ``memory`` is the number of numbers that a range of tasks needs for itself; ``integers`` may be a ``block_of`` some;
    ``arrays`` lie as the kernel expects; ``size`` is that of a kernel compiled for several.
    """
    if not tasks:
        return
    compiled = kernel(dtype, size)
    tag = ((0,) * size,) if size else ()
    kind = _ZERO[dtype]
    block = integers[:] if type(integers) is Block else Block("q", integers)
    block.fromlist(addresses_of(arrays))
    place = block.buffer_info()[0]
    count = min(tasks, int(work // WORTH_A_THREAD))
    if count > 1:
        count = min(count, get_num_threads())
    if count <= 1:  # the whole of a short call: nothing of what several threads need
        own = fresh(memory * kind.itemsize + 64, _BYTE)
        (address,) = addresses_of((own,))
        compiled(0, tasks, place, address + -address % 64, kind, *tag)
        return

    def ranged(first: int, last: int, held: Any) -> None:
        own = fresh(memory * kind.itemsize + 64, _BYTE)
        (address,) = addresses_of((own,))
        compiled(first, last, place, address + -address % 64, kind, *tag)

    # A kernel reads and writes by address: whoever runs it holds the arrays.
    held = block, arrays
    bounds = [tasks * i // count for i in range(count + 1)]
    waiting: list[Future[None]] = []
    try:
        try:
            workers = _workers(count - 1)
            for i in range(1, count):  # one by one, so that those of an interrupted call are known
                waiting.append(workers.submit(ranged, bounds[i], bounds[i + 1], held))  # noqa: PERF401
        except RuntimeError:
            # The interpreter is on its way out and starts no more threads.
            ranged(bounds[len(waiting) + 1], tasks, held)
        ranged(0, bounds[1], held)
        for future in waiting:
            future.result()
    except BaseException:
        _abandon(waiting)
        raise


def block_of(integers: Sequence[int], arrays: Sequence[Array]) -> Block[int]:
    """The first places of a kernel's block, for many calls; whoever keeps it keeps the arrays."""
    return Block("q", [*integers, *addresses_of(arrays)])


def _abandon(waiting: Sequence[Future[None]]) -> None:
    """Nothing of an interrupted call runs on, however often it is interrupted."""
    while True:
        try:
            for future in waiting:
                future.cancel()
            wait(waiting)
        except KeyboardInterrupt:
            continue
        return


def _told(arrays: Sequence[Array]) -> list[int]:
    return [array.__array_interface__["data"][0] for array in arrays]


def _found(arrays: Sequence[Array]) -> list[int]:
    return [_read(id(array) + _HEADER).value for array in arrays]


# NumPy's array is a Python object whose first field is the address of its numbers, as every C extension built for NumPy
# relies on. To ask for it in Python takes ten times as long, which for fifteen arrays is more than a step's arithmetic.
_HEADER, _read = object.__basicsize__, ctypes.c_size_t.from_address
_probe = (numpy.empty(1), numpy.empty((2, 3), numpy.float32)[1:])
addresses_of = _found if sys.implementation.name == "cpython" and _found(_probe) == _told(_probe) else _told
"""The addresses of arrays' first numbers."""


def _workers(count: int) -> ThreadPoolExecutor:
    global _pool, _pool_size
    with _lock:
        if _pool is None or _pool_size < count:
            # A smaller pool may still be in use by another caller: it ends with its last task.
            _pool, _pool_size = ThreadPoolExecutor(count, thread_name_prefix="scanfield"), count
        return _pool


def _after_fork() -> None:
    """A forked child has none of its parent's threads, and the lock may be held by one of them."""
    global _lock, _pool, _pool_size
    _lock = threading.Lock()
    _pool, _pool_size = None, 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
