"""Calls over a group of one, in one process: what is refused before a message is sent, and who is blamed for silence."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

import scanfield
from scanfield import layers
from scanfield.errors import ArgumentError, BackendError, DtypeError, ShapeError, StateError

pytestmark = pytest.mark.backend("torch")

torch = pytest.importorskip("torch")

from scanfield_torch.parallel import halo, layer_parallel, sequence_parallel  # noqa: E402
from scanfield_torch.parallel import link as links  # noqa: E402


@pytest.fixture
def group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


X = torch.ones(1, 5, 2)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (([1.0], 2), BackendError, r"x: list; a tensor \(batch, time, ...\) is expected"),
        ((X[0, 0], 2), ShapeError, r"x: \(2,\); a tensor \(batch, time, ...\) is expected"),
        ((X.int(), 2), DtypeError, "x: dtype torch.int32; a tensor of real or complex numbers"),
        ((X, -1), ArgumentError, "count: -1; allowed is an integer of at least 0"),
        ((X, True), ArgumentError, "count: True; allowed is an integer of at least 0"),
    ],
)
def test_a_halo_of_what_it_cannot_be(group: None, given: Any, error: type[Exception], words: str):
    with pytest.raises(error, match=words):
        halo(*given)
    assert torch.equal(halo(X, 3), torch.zeros(1, 3, 2))  # the group is as it was


def test_arguments_are_checked_before_the_group():
    with pytest.raises(ArgumentError, match="states: 'some'; allowed are 'all' and 'own'"):
        sequence_parallel(scanfield.linear_scan, X, X, states="some")
    with pytest.raises(ArgumentError, match=r"layer: int; allowed are layers of scanfield\.layers"):
        layer_parallel(3, X)
    block = layers.MambaBlock(2, 2).init(0, torch)
    given = dict(block.named_parameters())
    wrong = given | {"more": X}
    wrong.pop("D")
    with pytest.raises(ArgumentError, match=r"parameters: \['D', 'more'\]; the layer's names are .*A_log"):
        layer_parallel(block, X, parameters=wrong)
    with pytest.raises(StateError, match=r"halo: no process group; torch\.distributed\.init_process_group"):
        halo(X, 1)


def test_a_layer_alone_is_the_plain_call_with_parameters_of_ones_own(group: None):
    block = layers.MambaBlock(2, 2).init(0, torch)
    own = {name: x + 0.1 for name, x in block.named_parameters().items()}
    found = layer_parallel(block, X, parameters=own, cu_seqlens=[0, 2, 5])
    want = layers.MambaBlock(2, 2).adopt(own)(X, cu_seqlens=[0, 2, 5]).output
    torch.testing.assert_close(found, want)


def test_only_members_of_a_group_call(group: None):
    with pytest.raises(ArgumentError, match="this process is no member of it"):
        halo(X, 1, group=torch.distributed.GroupMember.NON_GROUP_MEMBER)


class Store:
    """Of a group of three: who left a word in it; None is a store whose host is gone."""

    def __init__(self, alive: set[int] | None) -> None:
        self.alive = alive

    def set(self, key: str, value: str) -> None:
        if self.alive is None:
            raise RuntimeError("Connection reset by peer")

    def check(self, keys: list[str]) -> bool:
        return int(keys[0].rsplit("/", 1)[1]) in self.alive


@pytest.mark.parametrize(
    ("alive", "peers", "words"),
    [
        ({1}, None, r"rank 2 did not answer within 0.01 s \(Broken pipe\)"),
        (set(), None, r"rank 1, rank 2 did not answer within 0.01 s"),
        ({1, 2}, None, "all ranks live, and one of them was too late or called something else within"),
        (None, [1, 2], "rank 1, 2 or the host of the group's store .* is gone"),
        (None, None, "rank 0 of 3: the host of the group's store .* is gone"),
    ],
)
def test_who_is_blamed_for_silence(alive: set[int] | None, peers: Any, words: str, monkeypatch):
    monkeypatch.setattr(links, "_ANSWER", 0.05)
    link = links.Link.__new__(links.Link)
    link.group = SimpleNamespace(get_group_store=lambda: Store(alive))
    link.rank, link.size, link.name, link.timeout = 0, 3, "halo", timedelta(seconds=0.01)

    def start() -> list[Any]:
        raise RuntimeError("Broken pipe\nand a long trace")

    with pytest.raises(StateError, match=words) as told:
        link._wait("the exchange", start, peers)
    assert str(told.value).startswith("halo: the exchange failed on rank 0 of 3: ")
    assert str(told.value).endswith("the group can no longer be used: end every rank and start again")


def test_a_wait_is_as_long_as_asked():
    waits: list[Any] = []
    link = links.Link.__new__(links.Link)
    works = [SimpleNamespace(wait=lambda *given: waits.append(given)), None]
    for timeout in (None, timedelta(seconds=3)):
        link.timeout = timeout
        link._wait("a sum", lambda: works)
    assert waits == [(), (timedelta(seconds=3),)]
