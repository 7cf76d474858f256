"""Sums over the shards of a cluster, by a client that answers at once: their order, and what is told when one fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from scanfield.errors import ArgumentError, BackendError, StateError
from scanfield_dask.parallel import ClusterReducer

pytestmark = pytest.mark.backend("dask")


class Client:
    """Computes when it is asked."""

    def __init__(self, **workers: int) -> None:
        self.workers, self.submitted, self.timeouts = workers, 0, []

    def nthreads(self) -> dict[str, int]:
        return self.workers

    def submit(self, function: Any, *given: Any, pure: bool) -> Any:
        assert not pure  # equal calls are two shards, or two steps
        self.submitted += 1
        given = tuple(x.result(None) if isinstance(x, Future) else x for x in given)
        return Future(self, function, given)


class Future:
    """A call that is made when its result is asked for."""

    def __init__(self, client: Client, *call: Any) -> None:
        self.client, self.call = client, call

    def result(self, timeout: float | None) -> Any:
        function, given = self.call
        if function is not made:
            self.client.timeouts.append(timeout)
        return function(*given)


def made(shard: int, size: int, network: Any) -> Any:
    """A shard of the sum of 10^shard x."""
    return SimpleNamespace(loss=lambda x: 10.0**shard * network.checked(shard, x))


def reduced(client: Client, checked: Any, **options: Any) -> Any:
    network = SimpleNamespace(library="numpy", checked=checked)
    return ClusterReducer(client, 3, **options).build(network, made, ("loss",))


def test_a_size_is_one_for_each_thread():
    assert ClusterReducer(Client(a=2, b=1)).size == 3
    assert ClusterReducer(Client()).size == 1  # no worker has come yet
    assert ClusterReducer(Client(a=2), 5).size == 5


@pytest.mark.parametrize("size", [0, -1, True, 2.0])
def test_a_size_out_of_range_is_named(size: Any):
    with pytest.raises(ArgumentError, match=f"size: {size!r}; allowed is an integer of at least 1"):
        ClusterReducer(Client(), size)


@pytest.mark.parametrize("timeout", [0, -1.0, True, float("nan")])
def test_a_timeout_out_of_range_is_named(timeout: Any):
    with pytest.raises(ArgumentError, match=f"timeout: {timeout!r}; allowed are seconds above 0, and None"):
        ClusterReducer(Client(), 1, timeout=timeout)


def test_a_network_of_other_arrays_is_refused_before_anything_is_sent():
    client = Client(a=2)
    with pytest.raises(BackendError, match="network: arrays of torch; over a cluster it is made of NumPy"):
        ClusterReducer(client, 2).build(SimpleNamespace(library="torch"), made, ("loss",))
    assert client.submitted == 0


def test_the_sum_of_all_shards_in_their_order():
    order: list[int] = []
    client = Client(a=1)
    found = reduced(client, lambda shard, x: order.append(shard) or x, timeout=2.5).total("loss", np.ones(2))
    np.testing.assert_array_equal(found, [111.0, 111.0])
    assert order == [0, 1, 2] and client.timeouts == [2.5] * 3


def test_a_shard_that_is_lost_is_named_and_what_a_shard_raises_of_numbers_is_its_own():
    def lost(shard: int, x: Any) -> Any:
        if shard:
            raise TimeoutError("three workers died\nand more")
        return x

    with pytest.raises(
        StateError, match=r"shard 1 of 3: no loss from the cluster \(three workers died\)"
    ) as told:
        reduced(Client(), lost).total("loss", 1.0)
    assert isinstance(told.value.__cause__, TimeoutError)

    def silent(shard: int, x: Any) -> Any:
        raise TimeoutError

    with pytest.raises(StateError, match=r"shard 0 of 3: no loss from the cluster \(TimeoutError\)"):
        reduced(Client(), silent).total("loss", 1.0)

    def overflows(shard: int, x: Any) -> Any:
        raise FloatingPointError("too large")

    with pytest.raises(FloatingPointError, match="too large"):
        reduced(Client(), overflows).total("loss", 1.0)
