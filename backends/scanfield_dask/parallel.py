"""A training set over the workers of a cluster: the reducer of ``scanfield.pinn.train`` on ``dask.distributed``.

A sequence over workers needs nothing of its own: Dask arrays in chunks along time are scanned chunk by chunk wherever the
chunks lie, and what a lost worker had computed is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy

from scanfield.errors import ArgumentError, BackendError, StateError

__all__ = ["ClusterReducer"]


class ClusterReducer:
    """Shards of a training set on the workers of a cluster; the optimiser runs where it was called.

    Parameters
    ----------
    client : distributed.Client
    size : int, optional
        How many shards; one for each worker thread, if absent.
    timeout : float, optional
        Seconds that one sum may take, lost workers replaced; None waits for as long as the cluster tries.

    Raises
    ------
    ArgumentError
        For a size or timeout out of range.
    BackendError
        By the training, for a network of other than NumPy arrays.
    StateError
        By the training, where a sum is not there in time or its workers keep dying, with the shard that failed.

    Notes
    -----
    Parameters travel to each shard, and a sum back, for each evaluation. A shard whose worker is lost is built again on
    another; sums are taken in the order of the shards, so that the result does not depend on who was first.

    Examples
    --------
    >>> from scanfield_dask.parallel import ClusterReducer
    >>> ClusterReducer(client=None, size=2).size
    2
    """

    def __init__(self, client: Any, size: int | None = None, *, timeout: float | None = None) -> None:
        if size is None:
            size = max(sum(client.nthreads().values()), 1)
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ArgumentError(f"size: {size!r}; allowed is an integer of at least 1")
        if timeout is not None and (isinstance(timeout, bool) or not timeout > 0):
            raise ArgumentError(f"timeout: {timeout!r}; allowed are seconds above 0, and None")
        self.client, self.size, self.timeout = client, size, timeout

    def build(self, network: Any, make: Callable[[int, int, Any], Any], told: Sequence[str]) -> Any:
        """Shards on the workers."""
        if network.library != "numpy":
            raise BackendError(
                f"network: arrays of {network.library}; over a cluster it is made of NumPy arrays, "
                "Network.create(..., xp=numpy)"
            )
        futures = [
            self.client.submit(make, shard, self.size, network, pure=False) for shard in range(self.size)
        ]
        return _OnWorkers(self, futures)


class _OnWorkers:
    def __init__(self, reducer: ClusterReducer, futures: Sequence[Any]) -> None:
        self._reducer, self._futures = reducer, futures

    def total(self, part: str, x: Any) -> Any:
        reducer = self._reducer
        asked = [reducer.client.submit(_ask, future, part, x, pure=False) for future in self._futures]
        found: Any = None
        for shard, answer in enumerate(asked):
            try:
                own = answer.result(timeout=reducer.timeout)
            except Exception as error:  # the cluster's own, or what a shard raised
                if isinstance(error, ArithmeticError | AssertionError):
                    raise
                words = str(error).splitlines()[0] if str(error) else type(error).__name__
                raise StateError(
                    f"shard {shard} of {len(asked)}: no {part.replace('_', ' ')} from the cluster ({words})"
                ) from error
            found = own if found is None else found + own
        return numpy.asarray(found)


def _ask(part: Any, name: str, x: Any) -> Any:
    return getattr(part, name)(x)
