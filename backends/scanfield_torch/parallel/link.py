"""Messages between the ranks of a group: each wait ends, and says which rank it waited for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from scanfield.errors import ArgumentError, BackendError, DeviceError, StateError

Tensor = torch.Tensor

_GROUP: Any = getattr(dist, "ProcessGroup", ())
_ANSWER = 10.0  # seconds in which a rank that is alive says so after a failure


@dataclass
class Traffic:
    """Bytes that this rank has sent to and received from others, and the waits in which it did."""

    sent: int = 0
    received: int = 0
    waits: int = 0


_counting: list[Traffic] = []


@contextmanager
def traffic() -> Iterator[Traffic]:
    """Count the bytes of states and tokens that calls inside exchange, their backward included.

    The headers, some hundred bytes a call, are not counted. A sum over the group counts as a ring: 2 (size - 1) / size
    of the tensor, sent and received.

    Examples
    --------
    >>> from scanfield_torch.parallel import traffic
    >>> with traffic() as counted:
    ...     pass
    >>> counted.sent
    0
    """
    counted = Traffic()
    _counting.append(counted)
    try:
        yield counted
    finally:
        _counting.remove(counted)


def check_timeout(timeout: Any) -> timedelta | None:
    """Seconds as a timedelta; None leaves the group's own."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < 1e9:
        raise ArgumentError(
            f"timeout: {timeout!r}; allowed are seconds above 0, and None for the group's own"
        )
    return timedelta(seconds=timeout)


def is_alone(group: Any) -> bool:
    """Whether a group has one member, this process. Asked first and at once: a small call feels what checks cost."""
    pg = dist.group.WORLD if group is None and dist.is_available() else group
    return isinstance(pg, _GROUP) and pg.size() == 1


def check_once(name: str) -> None:
    """BackendError in a backward that is to be differentiated again: its messages leave no graph."""
    if torch.is_grad_enabled():
        raise BackendError(f"{name}: create_graph=True; what crosses ranks has a first derivative alone")


class Link:
    """One call's connection to its group; ranks are those of the group."""

    def __init__(self, group: Any, timeout: Any, name: str, near: Iterable[Any] = ()) -> None:
        """``near`` are arrays of the call: headers are made where the first of them is that the group carries."""
        if not dist.is_available() or not dist.is_initialized():
            raise StateError(
                f"{name}: no process group; torch.distributed.init_process_group('gloo') first, on every rank"
            )
        self.group: Any = dist.group.WORLD if group is None else group
        if self.group == dist.GroupMember.NON_GROUP_MEMBER or dist.get_rank(self.group) < 0:
            raise ArgumentError("group: this process is no member of it; only members call")
        self.timeout = check_timeout(timeout)
        self.name = name
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.counted = tuple(_counting)
        self._carried = _carried(self.group)
        own = [x.device for x in near if isinstance(x, Tensor) and x.device.type in self._carried]
        self.device = own[0] if own else torch.device("cpu" if "cpu" in self._carried else self._carried[0])

    def check_devices(self, arrays: Iterable[tuple[str, Any]]) -> None:
        """DeviceError for a tensor that the group's back end does not carry from rank to rank."""
        for name, x in arrays:
            if isinstance(x, Tensor) and x.device.type not in self._carried:
                there = self._carried[0]
                raise DeviceError(
                    f"{name}: on {x.device}; this group (back end {dist.get_backend(self.group)}) carries tensors on "
                    f"{' and '.join(self._carried)}: {name} = {name}.to({there!r}), or a group of another back end"
                )

    # -- messages --------------------------------------------------------------------------------------------------------

    def gather(self, x: Tensor, what: str, *, count: bool = True) -> list[Tensor]:
        """Every rank's tensor of this shape, in order."""
        x = _plain(x)
        found = [torch.empty_like(x) for _ in range(self.size)]
        self._wait(what, lambda: [dist.all_gather(found, x, group=self.group, async_op=True)])
        if count:
            self._count((self.size - 1) * _bytes(x), (self.size - 1) * _bytes(x))
        return found

    def swap(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], what: str
    ) -> None:
        """Messages to and from single ranks; what is received is written into the tensors given for it."""
        if not sends and not receives:
            return
        messages: list[tuple[Any, int, Tensor]] = [(dist.isend, peer, _plain(x)) for peer, x in sends]
        messages += [(dist.irecv, peer, _plain(x)) for peer, x in receives]
        operations = [
            dist.P2POp(kind, x, dist.get_global_rank(self.group, peer), self.group)
            for kind, peer, x in messages
            if x.numel()
        ]
        if operations:
            peers = sorted({peer for _, peer, _ in messages})
            self._wait(what, lambda: dist.batch_isend_irecv(operations), peers)
        self._count(sum(_bytes(x) for _, x in sends), sum(_bytes(x) for _, x in receives))

    def broadcast(self, x: Tensor, source: int, what: str) -> Tensor:
        """The tensor of one rank; those of the others are written over."""
        x = x.detach().contiguous()
        if x.numel():
            place, sent = dist.get_global_rank(self.group, source), _plain(x)
            self._wait(what, lambda: [dist.broadcast(sent, place, group=self.group, async_op=True)])
        if self.rank == source:
            self._count((self.size - 1) * _bytes(x), 0)
        else:
            self._count(0, _bytes(x))
        return x

    def total(self, x: Tensor, what: str) -> Tensor:
        """The sum over all ranks, the same bits on each; a contiguous tensor is written over."""
        x = x.detach().contiguous()
        if x.numel():
            summed = _plain(x)
            self._wait(what, lambda: [dist.all_reduce(summed, group=self.group, async_op=True)])
        share = 2 * (self.size - 1) * _bytes(x) // self.size
        self._count(share, share)
        return x

    # -- waiting ---------------------------------------------------------------------------------------------------------

    def _wait(
        self, what: str, start: Callable[[], Sequence[Any]], peers: Sequence[int] | None = None
    ) -> None:
        try:
            for work in start():
                if work is None:
                    continue
                if self.timeout is None:
                    work.wait()
                else:
                    work.wait(self.timeout)
        except RuntimeError as error:
            raise StateError(self._blame(what, peers, error)) from error

    def _blame(self, what: str, peers: Sequence[int] | None, error: RuntimeError) -> str:
        """Which ranks do not answer. Those that fail likewise leave a word in the group's store."""
        waited = "" if self.timeout is None else f" within {self.timeout.total_seconds():g} s"
        cause = str(error).splitlines()[0][:200]
        head = f"{self.name}: {what} failed on rank {self.rank} of {self.size}"
        tail = f"({cause}); the group can no longer be used: end every rank and start again"
        try:
            store = self.group.get_group_store()
            store.set(f"scanfield/alive/{self.rank}", "1")
            missing = [rank for rank in range(self.size) if rank != self.rank]
            patience = _ANSWER if self.timeout is None else min(self.timeout.total_seconds() + 1.0, _ANSWER)
            until = time.monotonic() + patience
            while missing and time.monotonic() < until:
                missing = [rank for rank in missing if not store.check([f"scanfield/alive/{rank}"])]
                time.sleep(0.02)
        except RuntimeError:  # the store went with its host
            ranks = f"rank {', '.join(map(str, peers))} or " if peers else ""
            return f"{head}: {ranks}the host of the group's store (rank 0, as a rule) is gone {tail}"
        if missing:
            names = ", ".join(f"rank {rank}" for rank in missing)
            return f"{head}: {names} did not answer{waited} {tail}"
        return f"{head}: all ranks live, and one of them was too late or called something else{waited} {tail}"

    def _count(self, sent: int, received: int) -> None:
        for counted in self.counted:
            counted.sent += sent
            counted.received += received
            counted.waits += 1


def _carried(group: Any) -> tuple[str, ...]:
    """Device types whose tensors travel between ranks. Gloo takes CUDA tensors in sums alone, so not for it."""
    pairs = [pair.split(":") for pair in str(dist.get_backend_config(group)).split(",")]
    return tuple([device for device, backend in pairs if device == "cpu" or backend != "gloo"]) or ("cpu",)


def _plain(x: Tensor) -> Tensor:
    """Contiguous, and real: back ends carry no complex numbers."""
    x = x.detach()
    return (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).contiguous()


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
