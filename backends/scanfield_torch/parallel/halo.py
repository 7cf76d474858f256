"""The tokens before a rank's first, which a convolution looks back on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch

from scanfield.errors import ArgumentError, BackendError, DtypeError, ShapeError
from scanfield.shards import Place, places, whole_bounds
from scanfield_torch.parallel.agreement import Description, agree, digest
from scanfield_torch.parallel.link import Link, check_once

Tensor = torch.Tensor


def halo(
    x: Tensor, count: int, *, group: Any = None, cu_seqlens: Any = None, timeout: float | None = None
) -> Tensor:
    """The ``count`` tokens before this rank's first, from the ranks that hold them; zeros before the sequence's start.

    Parameters
    ----------
    x : tensor (batch, time, ...)
        This rank's slice of time, as in ``sequence_parallel``; slices may be shorter than ``count``, or empty.
    count : int
        For a convolution of width w, w - 1: what comes back is its initial state.
    group, cu_seqlens, timeout
        As in ``sequence_parallel``. With ``cu_seqlens`` nothing comes from another sequence.

    Returns
    -------
    tensor (batch, count, ...)
        The oldest token first. Gradients flow back to the ranks that the tokens came from.

    Raises
    ------
    As ``sequence_parallel``.

    Examples
    --------
    >>> import torch
    >>> from scanfield_torch.parallel import halo
    >>> torch.distributed.init_process_group(
    ...     "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    ... )
    >>> halo(torch.ones(1, 5, 2), 3).shape
    torch.Size([1, 3, 2])
    >>> torch.distributed.destroy_process_group()
    """
    return looked_back(x, count, Link(group, timeout, "halo", [x]), cu_seqlens)[0]


def looked_back(
    x: Tensor, count: int, link: Link, cu_seqlens: Any
) -> tuple[Tensor, Place, tuple[int, ...] | None]:
    """The halo, what this rank holds, and the bounds of the whole pack."""

    def local() -> tuple[tuple[int, ...] | None, int, Description]:
        given: object = x
        if not isinstance(given, Tensor):
            raise BackendError(f"x: {type(given).__name__}; a tensor (batch, time, ...) is expected")
        link.check_devices([("x", x)])
        if x.ndim < 2:
            raise ShapeError(f"x: {tuple(x.shape)}; a tensor (batch, time, ...) is expected")
        if not (x.dtype.is_floating_point or x.dtype.is_complex):
            raise DtypeError(f"x: dtype {x.dtype}; a tensor of real or complex numbers is expected")
        if not _is_count(count):
            raise ArgumentError(f"count: {count!r}; allowed is an integer of at least 0")
        shape = ", ".join(["time" if i == 1 else str(size) for i, size in enumerate(x.shape)])
        bounds = None if cu_seqlens is None else whole_bounds(cu_seqlens)
        followed = str(torch.is_grad_enabled() and x.requires_grad)
        told = [("x", f"{x.dtype} ({shape})"), ("count", str(count)), ("requires_grad of x", followed)]
        return bounds, x.shape[1], [*told, ("cu_seqlens", digest(bounds))]

    bounds, lengths = agree(link, local)
    found = places(lengths, bounds, False)
    needs = [reach(place, bounds, count) for place in found]
    messages = _Messages(
        link,
        [part for part in overlaps(needs[link.rank], found) if part.tokens],
        [
            Overlap(rank, *_common(needs[rank], found[link.rank].tokens))
            for rank in range(link.rank + 1, link.size)
            if _common(needs[rank], found[link.rank].tokens)[1]
        ],
        found[link.rank].tokens[0],
        count,
    )
    tokens = cast(Tensor, _Halo.apply(messages, x))  # type: ignore[no-untyped-call]
    return tokens, found[link.rank], bounds


def _is_count(count: object) -> bool:
    return isinstance(count, int) and not isinstance(count, bool) and count >= 0


class Overlap(NamedTuple):
    """Tokens that one rank holds and another needs: the other rank, the first of them in the whole, their number."""

    rank: int
    start: int
    tokens: int


def reach(place: Place, bounds: tuple[int, ...] | None, count: int) -> tuple[int, int]:
    """First token that a rank looks back on and the one behind the last; none for a rank without tokens."""
    first, behind = place.tokens
    if first == behind or not place.enters:
        return first, first
    start = 0 if bounds is None or place.sequences is None else bounds[place.sequences[0]]
    return max(first - count, start), first


def overlaps(need: tuple[int, int], found: Sequence[Place]) -> list[Overlap]:
    """Who holds the tokens that a rank needs."""
    return [Overlap(rank, *_common(need, place.tokens)) for rank, place in enumerate(found)]


def _common(need: tuple[int, int], held: tuple[int, int]) -> tuple[int, int]:
    start = max(need[0], held[0])
    return start, max(min(need[1], held[1]) - start, 0)


class _Messages(NamedTuple):
    link: Link
    arriving: list[Overlap]
    leaving: list[Overlap]
    first: int
    width: int


class _Halo(torch.autograd.Function):
    """Tokens one way, their gradients the other."""

    @staticmethod
    def forward(ctx: Any, messages: _Messages, x: Tensor) -> Tensor:
        """The tokens before x."""
        link, arriving, leaving, first, count = messages
        ctx.messages, ctx.shape = messages, x.shape
        found = x.new_zeros((x.shape[0], count, *x.shape[2:]))
        sends = [(o.rank, x[:, o.start - first : o.start - first + o.tokens]) for o in leaving]
        buffers = [x.new_empty((x.shape[0], o.tokens, *x.shape[2:])) for o in arriving]
        receives = [(o.rank, buffer) for o, buffer in zip(arriving, buffers, strict=True)]
        link.swap(sends, receives, "the exchange of tokens (forward)")
        for o, buffer in zip(arriving, buffers, strict=True):
            at = count - (first - o.start)
            found[:, at : at + o.tokens] = buffer
        return found

    @staticmethod
    def backward(ctx: Any, d_found: Tensor) -> tuple[None, Tensor]:
        """The gradient of x."""
        check_once("halo")
        link, arriving, leaving, first, count = ctx.messages
        d_x = d_found.new_zeros(ctx.shape)
        sends = []
        for o in arriving:
            at = count - (first - o.start)
            sends.append((o.rank, d_found[:, at : at + o.tokens]))
        buffers = [d_x.new_empty((d_x.shape[0], o.tokens, *d_x.shape[2:])) for o in leaving]
        receives = [(o.rank, buffer) for o, buffer in zip(leaving, buffers, strict=True)]
        link.swap(sends, receives, "the exchange of tokens (backward)")
        for o, buffer in zip(leaving, buffers, strict=True):
            d_x[:, o.start - first : o.start - first + o.tokens] += buffer
        return None, d_x
