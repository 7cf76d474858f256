"""How many threads of the CPU a call may use; backends with threads of their own ask here."""

from __future__ import annotations

import os
import threading
from typing import SupportsIndex

import numpy

from scanfield.advice import shown
from scanfield.errors import ArgumentError

_asked: int | None = None

SLOW_LOCK = threading.RLock()
"""Held while plugins are found and kernels compiled; a fork waits until it is free."""
if hasattr(os, "register_at_fork"):
    # A child that is born in the middle would wait for ever for what a thread that it lacks has begun. Registered here,
    # before anything slow: a hook that comes while a fork waits for another one is called after it alone.
    os.register_at_fork(
        before=SLOW_LOCK.acquire, after_in_parent=SLOW_LOCK.release, after_in_child=SLOW_LOCK.release
    )


def set_num_threads(count: SupportsIndex | None) -> None:
    """Set how many CPU threads one call may use, in the whole process.

    Parameters
    ----------
    count : int or None
        At least 1; None is one for each CPU that the process may run on (its affinity, not all that the machine has).

    Raises
    ------
    ArgumentError
        If ``count`` is neither.

    Notes
    -----
    Compiled implementations follow it (``numpy.numba``); no result depends on it, bit for bit. A small call stays in
    the caller's thread. More threads than CPUs are started as asked and take turns on them, which
    gains nothing. The array libraries' own threads (BLAS, PyTorch, JAX) have settings of their own.

    Examples
    --------
    >>> import scanfield
    >>> scanfield.set_num_threads(2)
    >>> scanfield.get_num_threads()
    2
    >>> scanfield.set_num_threads(None)
    """
    global _asked
    if count is None:
        _asked = None
        return
    if isinstance(count, bool) or not isinstance(count, int | numpy.integer) or count < 1:
        raise ArgumentError(f"count: {shown(count)}; allowed is an integer of at least 1, or None")
    _asked = int(count)


def get_num_threads() -> int:
    """Return how many CPU threads one call may use now.

    Returns
    -------
    int
        What ``set_num_threads`` set; otherwise the CPUs that the process may run on at this moment.

    Examples
    --------
    >>> import scanfield
    >>> scanfield.get_num_threads() >= 1
    True
    """
    if _asked is not None:
        return _asked
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
