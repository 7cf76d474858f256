"""Cards where there are none: tensors on a device by name, and a group that carries no others, as NCCL carries CUDA's alone.

``Card`` says that it lives on the device "meta"; its numbers lie in a tensor beside it. Under ``OnCards`` what is made for
that device is a Card, and one that meets a tensor of the host, or goes there, is an error: but for integers, which a header
is read from. A group of the back end "cards" hands its messages to gloo, and refuses what NCCL would.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("meta")
READ = (torch.int64, torch.uint8)  # headers and words


class Card(torch.Tensor):
    """A tensor on the card."""

    numbers: torch.Tensor

    @staticmethod
    def __new__(cls, numbers: torch.Tensor) -> Card:
        """Of the host's ``numbers``, which stay its memory."""
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, numbers.shape, numbers.stride(), numbers.storage_offset(), dtype=numbers.dtype, device=DEVICE
        )
        made.numbers = numbers
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """``tolist``, which subclasses do not have; anything else as it is."""
        if func is torch.Tensor.tolist:
            return read(args[0]).tolist()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """On the card, whatever the mode."""
        return on_card(func, args, kwargs or {})


class OnCards(TorchDispatchMode):
    """Makes what is made for the device a Card."""

    def __enter__(self) -> Any:
        """``torch.tensor`` too, which no dispatch mode sees."""
        self._tensor = torch.tensor

        def tensor(data: Any, *, device: Any = None, **kwargs: Any) -> torch.Tensor:
            made = self._tensor(data, **kwargs)
            return Card(made) if device == DEVICE else made

        torch.tensor = tensor
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        """As before."""
        super().__exit__(*error)
        torch.tensor = self._tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One operation."""
        return on_card(func, args, kwargs or {})


def read(x: Card) -> torch.Tensor:
    """What the host may see; AssertionError for a state or a token."""
    assert x.dtype in READ, f"{x.dtype} {tuple(x.shape)} went from the card to the host"
    return x.numbers


def on_card(func: Any, args: Any, kwargs: Any) -> Any:
    """An operation on the numbers, its results on the card where an argument, or the device asked for, is."""
    given = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
    cards = [x for x in given if isinstance(x, Card)]
    asked = kwargs.get("device")
    if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default):
        return func(*[read(x) if isinstance(x, Card) else x for x in args])
    if asked is not None and torch.device(asked) != DEVICE:
        assert not (cards and func is torch.ops.aten._to_copy.default), (
            "a tensor went from the card to the host"
        )
    for x in given:
        moved = func in (torch.ops.aten._to_copy.default, torch.ops.aten.lift_fresh.default)
        fits = isinstance(x, Card) or not cards or x.ndim == 0 or moved
        assert fits, f"{func}: a tensor {tuple(x.shape)} of the host among those of the card"
    if not cards and (asked is None or torch.device(asked) != DEVICE):
        return func(*args, **kwargs)
    if asked is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    plain_args, plain = tree_map(lambda x: x.numbers if isinstance(x, Card) else x, (args, kwargs))
    made = func(*plain_args, **plain)
    if func._schema.name.endswith("_") and not func._schema.name.endswith("__"):
        return args[0]  # written in place
    return tree_map(
        lambda x: Card(x.resolve_conj().resolve_neg()) if isinstance(x, torch.Tensor) else x, made
    )


class Cards(dist.ProcessGroup):
    """Messages between cards, over the gloo group of all ranks."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._under: Any = dist.group.WORLD
        self._met = False

    def _numbers(self, tensors: Any, *, all_ranks: bool = True) -> Any:
        for x in tensors:
            assert isinstance(x, Card), (
                f"a tensor of the host, {x.dtype} {tuple(x.shape)}, on a group of cards"
            )
            assert x.is_contiguous() and not x.is_complex() and x.dtype not in (torch.bool, torch.uint16), (
                x.dtype
            )
        assert all_ranks or self._met, "the first messages of a group are of all its ranks"
        self._met = True
        return [x.numbers for x in tensors]

    def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        """Everybody's tensor."""
        return self._under.allgather([self._numbers(outputs[0])], self._numbers(inputs))

    def allreduce(self, tensors: Any, options: Any) -> Any:
        """A sum."""
        return self._under.allreduce(self._numbers(tensors), options)

    def broadcast(self, tensors: Any, options: Any) -> Any:
        """One rank's."""
        return self._under.broadcast(self._numbers(tensors), options)

    def send(self, tensors: Any, rank: int, tag: int = 0) -> Any:
        """To one rank."""
        return self._under.send(self._numbers(tensors, all_ranks=False), rank, tag)

    def recv(self, tensors: Any, rank: int, tag: int = 0) -> Any:
        """From one rank."""
        return self._under.recv(self._numbers(tensors, all_ranks=False), rank, tag)


def group() -> Any:
    """A new group of all ranks."""
    if "CARDS" not in dist.Backend._plugins:
        dist.Backend.register_backend(
            "cards", lambda store, rank, size, timeout: Cards(rank, size), devices=["meta"]
        )
    return dist.new_group(backend="cards")
