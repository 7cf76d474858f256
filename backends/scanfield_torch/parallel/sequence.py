"""One sequence over the ranks of a ``torch.distributed`` group: each holds a slice of time, forward and backward exact."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, cast

import torch

from scanfield import ScanResult
from scanfield.dispatch import Call, registry
from scanfield.errors import ArgumentError, BackendError
from scanfield.shards import Bound, Place, Shard, adjoint, check_arguments, local_time, places, whole_bounds
from scanfield_torch.autograd import as_gradient
from scanfield_torch.parallel.agreement import Description, agree, digest
from scanfield_torch.parallel.exchange import Element, Exchange, check_exchange, incoming
from scanfield_torch.parallel.link import Link, check_once, is_alone
from scanfield_torch.transforms import transform_reason

Tensor = torch.Tensor
States = Literal["all", "own"]


def sequence_parallel(
    op: Any,
    *local_arrays: Any,
    group: Any = None,
    cu_seqlens: Any = None,
    exchange: Exchange = "scan",
    states: States = "all",
    timeout: float | None = None,
    **options: Any,
) -> ScanResult:
    """Run a scan over a sequence of which each rank of a group holds a slice of time.

    Every rank of the group calls it, with slices that follow each other in the order of the ranks; their lengths may
    differ, and be 0. Output and gradients are those of one call on the whole.

    Parameters
    ----------
    op : a scan of scanfield
    *local_arrays, **options
        As in the call of ``op``, by position or by name: arrays with a time axis are this rank's slice, the others
        (A, D, ``initial_state``) are whole, and the same on every rank. ``states_at`` is refused.
    group : ProcessGroup, optional
        The default group, if absent. Its ranks alone call.
    cu_seqlens : sequence of int, optional
        Bounds of packed sequences in the whole, from 0 to the tokens of all ranks; the same on every rank. A sequence may
        lie on any number of ranks.
    exchange : {"scan", "gather"}
        How states travel: in log2(ranks) rounds of one map each, or by one all-gather. The results agree to rounding.
    states : {"all", "own"}
        ``"all"``: ``final_state`` is the whole one, on every rank. ``"own"``: the states of those sequences that end on
        this rank, in order (none of them: no rows), which costs no exchange: for packs of many sequences.
    timeout : float, optional
        Seconds that one wait may take; the group's own limit if absent.

    Returns
    -------
    ScanResult
        ``output`` of this rank's tokens, and ``final_state``.

    Raises
    ------
    ArgumentError, ShapeError, DtypeError, BackendError, DeviceError
        As ``op``, on the rank whose arguments are wrong; for arguments in which ranks differ, on all, with the ranks that
        have each; for a DTensor, with the line that makes it local.
    StateError
        Without a process group; where another rank was refused; and where a rank does not answer in time or has died,
        with its number. Nothing hangs for longer than the limit.

    Notes
    -----
    The loss is the sum of what all ranks make of their results. The gradient of a whole array on a rank is the part of
    its tokens (that of ``initial_state`` stands where each sequence starts, zeros elsewhere): sum it over the ranks, as DDP
    and FSDP do; they divide by the number of ranks, so multiply the loss by it. The backward exchanges too: each rank must
    call it, a rank without a loss of its own on ``output.sum() * 0``. One derivative, no forward mode, no torch.func.

    A map of the state is a product of all decays of a shard, in the dtype of the carry (float32 at least). Growth whose
    product overflows that dtype is beyond it, though the state itself may not be.

    Source: the affine form of the recurrence, ``docs/parallel.md``; the scan over ranks, Hillis and Steele, CACM 29 (1986).

    Examples
    --------
    >>> import torch, scanfield
    >>> from scanfield_torch.parallel import sequence_parallel
    >>> torch.distributed.init_process_group(
    ...     "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    ... )
    >>> a, b = torch.full((1, 3, 1), 0.5), torch.ones(1, 3, 1)
    >>> sequence_parallel(scanfield.linear_scan, a, b).output.ravel()
    tensor([1.0000, 1.5000, 1.7500])
    >>> torch.distributed.destroy_process_group()
    """
    exchange = check_exchange(exchange)
    if states not in ("all", "own"):
        raise ArgumentError(f"states: {states!r}; allowed are 'all' and 'own'")
    if is_alone(group):
        if cu_seqlens is not None:
            options["cu_seqlens"] = cu_seqlens
        return cast(ScanResult, op(*local_arrays, **options))
    link = Link(group, timeout, "sequence_parallel", (*local_arrays, *options.values()))

    def local() -> tuple[tuple[Bound, tuple[int, ...] | None], int, Description]:
        for name, array in (*enumerate(local_arrays), *options.items()):
            if type(array).__name__ == "DTensor":
                name = f"array {name}" if isinstance(name, int) else name
                raise BackendError(
                    f"{name}: a DTensor; sharded along time it is this rank's slice as {name} = {name}.to_local()"
                )
        reason = transform_reason()
        if reason is not None:
            raise BackendError(
                f"sequence_parallel: not here; {reason}, and those carry no messages between ranks"
            )
        bound = check_arguments(op, local_arrays, options)
        link.check_devices(bound.arrays.items())
        bounds = None if cu_seqlens is None else whole_bounds(cu_seqlens)
        settings = [("exchange", exchange), ("states", states), ("cu_seqlens", digest(bounds))]
        return (bound, bounds), local_time(bound), [*_describe(bound), *settings]

    (bound, bounds), lengths = agree(link, local)
    found = places(lengths, bounds, bool(bound.options["reverse"]))
    shard = Shard(bound, found[link.rank], bounds)
    part = _Part(link, found, shard, exchange, states)
    arrays = shard.call.arrays
    if _followed(arrays):
        y, last = _Sharded.apply(part, *arrays)  # type: ignore[no-untyped-call]
    else:
        y, last = part.forward(shard.call, keep=False)[:2]
    return ScanResult(shard.prepared.output(y), shard.prepared.state(last))


class _Kept(NamedTuple):
    """What the backward of a part needs beside the call: residuals, who made them, and M."""

    residuals: tuple[Tensor, ...]
    chosen: Any
    transition: Tensor | None


class _Part:
    """One rank's part of a call, its messages included."""

    def __init__(
        self, link: Link, found: Sequence[Place], shard: Shard, exchange: Exchange, states: States
    ) -> None:
        self.link, self.shard, self.exchange, self.states = link, shard, exchange, states
        self.ranks = list(range(link.size))[:: -1 if shard.reverse else 1]
        self.walk = [found[rank] for rank in self.ranks]

    def forward(self, call: Call, *, keep: bool) -> tuple[Tensor, Tensor, Call, _Kept]:
        """Output, final states, the call with the state that came in, and what its backward needs."""
        shard, place = self.shard, self.shard.place
        like = shard.identity(call)
        mine, ran = None, None
        if not place.enters:
            ran = self._run(call, None, keep)
            mine = Element(None, shard.leaving(ran[1])) if place.leaves else None
        elif place.through:
            block = shard.map(call)
            mine = Element(block.transition, block.state)
        elif place.leaves:  # the last sequence starts here, whatever comes in
            mine = Element(None, shard.leaving(self._run(call, None, False)[1]))
        state = incoming(self.link, self.ranks, self.walk, mine, like, self.exchange, backward=False)
        output, last, entered, kept = ran or self._run(call, state, keep)
        transition = mine.transition if mine is not None else None
        return output, self._shared(last), entered, kept._replace(transition=transition)

    def backward(
        self,
        call: Call,
        kept: _Kept,
        d_output: Tensor | None,
        d_states: Tensor | None,
        wanted: tuple[bool, ...],
    ) -> Sequence[Tensor | None]:
        """The wanted gradients of the call that ``forward`` returned, with respect to the state that came in too."""
        shard, place, at = self.shard, self.shard.place, self.shard.at
        like = shard.identity(call)
        ended = self._collected(d_states, like)
        wanted = (*wanted[:at], wanted[at] or place.enters, *wanted[at + 1 :])
        state_only = tuple(i == at for i in range(len(wanted)))
        mine, ran = None, None

        def run(going: Tensor | None, asked: tuple[bool, ...]) -> Sequence[Tensor | None]:
            d_last = shard.after(ended, going, self._states_like(call, like))
            if d_output is None and d_last is None:
                return [
                    torch.zeros_like(x) if ask else None for x, ask in zip(call.arrays, asked, strict=True)
                ]
            return registry.backward(kept.chosen, call, kept.residuals, d_output, d_last, asked)

        if not place.leaves:
            ran = run(None, wanted)
        if place.enters:
            d_state = (ran or run(None, state_only))[at]
            gamma = shard.entering(cast(Tensor, d_state))
            mine = Element(None, gamma)
            if place.through:
                turned = adjoint(like._replace(transition=cast(Tensor, kept.transition)), gamma)
                mine = Element(turned.transition, gamma)
        going = incoming(self.link, self.ranks, self.walk, mine, like, self.exchange, backward=True)
        grads = list(ran or run(going, wanted))
        if place.enters and grads[at] is not None:
            # The given state had no part in the sequence that comes in.
            grads[at] = shard.entered(
                torch.zeros_like(like.state), call._replace(arrays=tuple(grads))
            ).arrays[at]
        return grads

    # -- one rank's own work ---------------------------------------------------------------------------------------------

    def _run(self, call: Call, state: Tensor | None, keep: bool) -> tuple[Tensor, Tensor, Call, _Kept]:
        call = self.shard.entered(state, call)
        if not keep:
            output, last = registry.call(call, "forward", self.shard.method)
            return output, last, call, _Kept((), None, None)
        output, last, residuals, chosen = registry.save(call, self.shard.method)
        return output, last, call, _Kept(residuals, chosen, None)

    def _states_like(self, call: Call, like: Any) -> Tensor:
        """The shape of all states of this shard."""
        first, behind = self.shard.place.sequences or (0, like.state.shape[0])
        zero: Tensor = like.state.new_zeros(())
        return zero.expand(behind - first, *like.state.shape[1:])

    # -- final states ----------------------------------------------------------------------------------------------------

    def _shared(self, last: Tensor) -> Tensor:
        """The final states that this rank returns, from those after its shard."""
        shard, what = self.shard, "the exchange of final states"
        if self.states == "own":
            return cast(Tensor, shard.ended(last))
        if shard.total is None:
            return self.link.broadcast(last.clone(), self.ranks[-1], what)
        whole = last.new_zeros((shard.total, *last.shape[1:]))
        whole[shard.rows] = shard.ended(last)
        return self.link.total(whole, what)

    def _collected(self, d_states: Tensor | None, like: Any) -> Tensor | None:
        """The cotangents of states that end here, from those of what every rank returned."""
        shard, link = self.shard, self.link
        flag = torch.tensor([d_states is not None], dtype=torch.int64, device=link.device)
        told = link.gather(flag, "the first word of the backward", count=False)
        if self.states == "own" or not any(int(x) for x in told):
            return d_states
        count = like.state.shape[0] if shard.total is None else shard.total
        given = like.state.new_zeros((count, *like.state.shape[1:])) if d_states is None else d_states.clone()
        whole = link.total(given, "the exchange of final states' cotangents")
        if shard.total is not None:
            return whole[shard.rows]
        return cast(Tensor, shard.ended(whole))


class _Sharded(torch.autograd.Function):
    """A part under one node of autograd."""

    @staticmethod
    def forward(ctx: Any, part: _Part, *arrays: Any) -> tuple[Tensor, Tensor]:
        """Output and final states; ``arrays`` are those of the call."""
        output, states, call, kept = part.forward(part.shard.call._replace(arrays=arrays), keep=True)
        tensors = [x if isinstance(x, Tensor) else None for x in call.arrays]
        ctx.save_for_backward(*arrays_only(arrays), *tensors, kept.transition, *kept.residuals)
        ctx.part, ctx.count, ctx.chosen = part, len(arrays), kept.chosen
        ctx.set_materialize_grads(False)
        return output, states

    @staticmethod
    def backward(ctx: Any, d_output: Tensor | None, d_states: Tensor | None) -> tuple[Any, ...]:
        """The gradients of ``arrays``."""
        check_once("sequence_parallel")
        part, count = ctx.part, ctx.count
        given, tensors = ctx.saved_tensors[:count], ctx.saved_tensors[count : 2 * count]
        transition, *residuals = ctx.saved_tensors[2 * count :]
        call = part.shard.call
        arrays = tuple([x if isinstance(x, tuple) else t for x, t in zip(call.arrays, tensors, strict=True)])
        wanted = tuple(
            [need and x is not None for need, x in zip(ctx.needs_input_grad[1:], given, strict=True)]
        )
        kept = _Kept(tuple([x.contiguous() for x in residuals]), ctx.chosen, transition)
        grads = part.backward(call._replace(arrays=arrays), kept, d_output, d_states, wanted)
        return None, *[
            as_gradient(grad, x) if want and grad is not None else None
            for grad, x, want in zip(grads, given, wanted, strict=True)
        ]


def arrays_only(arrays: Sequence[Any]) -> list[Tensor | None]:
    """The tensors among the arrays of a call, None in the place of the others."""
    return [x if isinstance(x, Tensor) else None for x in arrays]


def _followed(arrays: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in arrays)


def _describe(bound: Bound) -> Description:
    """The call as ranks compare it: everything but the number of tokens."""
    rows = [("op", bound.record.name)]
    for entry in bound.record.inputs:
        array = bound.arrays[entry.name]
        if entry.role == "index":
            continue
        if array is None:
            rows.append((entry.name, "None (no array)"))
            continue
        shape = [str(size) for size in array.shape]
        timeless = {
            sum(axis != "1" for axis in layout.split())
            for layout in entry.layouts
            if "time" not in layout.split()
        }
        if entry.role == "sequence" and array.ndim not in timeless:
            shape[1] = "time"
        dtype = str(array.dtype).removeprefix("torch.")
        rows.append((entry.name, f"{dtype} ({', '.join(shape)}) on {array.device.type}"))
    options = {name: value for name, value in sorted(bound.options.items()) if name != "cu_seqlens"}
    rows.extend((name, repr(value)) for name, value in options.items())
    followed = _followed([x for x in bound.arrays.values() if x is not None])
    return [*rows, ("requires_grad of the arrays (or torch.no_grad)", str(followed))]
