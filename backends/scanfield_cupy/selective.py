"""The selective scan on CuPy arrays."""

from __future__ import annotations

from math import gcd
from typing import Any, NamedTuple

import cupy
import numpy

from scanfield.arrays import COMPLEX, dtype_name
from scanfield.dispatch import Call, Grads, Verb
from scanfield_cupy.layout import (
    Array,
    as_dtype,
    bounds_of,
    common_dtype,
    contiguous,
    copies,
    dtype,
    reason_against,
    reduced,
    saved_states,
    sequences_of,
    shared_memory,
    steps,
)
from scanfield_cupy.modules import MOST_ROWS, STORED, launch

_THREADS = 128
# Tokens between two saved states.
_CHUNK = 32
# By the bytes of a state: how many of a channel's states a thread holds, and how many threads share a channel. The first
# that holds them all is taken.
_PARTS = {
    4: ((4, 1), (4, 4), (8, 8), (8, 32)),
    8: ((2, 2), (4, 4), (4, 16), (4, 32)),
    16: ((2, 2), (2, 8), (2, 32)),
}
# A sequence is cut into segments where fewer blocks than this would run; a segment has at least so many chunks, and there
# are at most so many. By the shapes alone, so that the grouping of sums depends on nothing else.
_BLOCKS, _CHUNKS, _SEGMENTS = 528, 4, 128


class Selective:
    """Implementation of ``selective_scan``."""

    def declines(self, call: Call, verb: Verb) -> str | None:
        """Dtypes that no kernel takes, cards that none is written for or that lack shared memory; too many states."""
        reason = reason_against(call)
        if reason is not None:
            return reason
        states = call.arrays[2].shape[1]
        part, share = _PARTS[_state_dtype(call).itemsize][-1]
        if states > part * share:
            return f"{states} states of a channel, kernels hold {part * share} in {_state_dtype(call)}"
        if states == 0:
            return "no state: nothing for a kernel to do"
        if verb in ("save", "backward"):
            need, have = _plan(call).shared(True), shared_memory(call.arrays[0].device.id)
            if need > have:
                return f"backward for {states} states needs {need} bytes of shared memory, this card gives a block {have}"
        return None

    def notes(self, call: Call) -> tuple[str, ...]:
        """What is copied before a kernel runs."""
        plan = _plan(call)
        u, delta, _, B, C, _, z, _, _, _ = call.arrays
        named = {"u": u, "delta": delta, "z": z}
        return (*copies(named, plan.stored), *copies({"B": B, "C": C}, plan.vectors))

    def forward(self, call: Call) -> tuple[Array, Array]:
        """Output and final state."""
        return _forward(call, keep=False)[:2]

    step = forward

    def save(self, call: Call) -> tuple[Array, Array, tuple[Array, ...]]:
        """Output, final state and the states at the chunks' starts."""
        output, final, starts = _forward(call, keep=True)
        return output, final, (starts,)

    def backward(
        self,
        call: Call,
        residuals: tuple[Array, ...],
        d_output: Array | None,
        d_final_state: Array | None,
        wanted: tuple[bool, ...],
    ) -> Grads:
        """The wanted gradients."""
        u, _, _, B, C, _, _, _, _, bounds = call.arrays
        plan = _plan(call)
        asked = [want and x is not None for x, want in zip(call.arrays, wanted, strict=True)]
        asked[9] = False
        batch, time, channels = u.shape
        real, state = dtype(call.compute), dtype(plan.carry)
        with u.device:
            if 0 in (batch, time, channels, plan.sequences):
                return _nothing(call, asked, real, state, d_final_state)
            index = plan.sequences * plan.segments
            d_tokens = [cupy.empty(u.shape, real) if asked[i] else None for i in (0, 1, 6)]
            d_A = cupy.zeros((index, channels, plan.states), state) if asked[2] else None
            d_vectors = [
                _vector_sums(x, plan, batch, time, channels, state) if asked[i] else None
                for i, x in ((3, B), (4, C))
            ]
            d_channels = [cupy.zeros((index, channels), real) if asked[i] else None for i in (5, 7)]
            shape = (plan.sequences, channels, plan.states)
            d_state = cupy.empty(shape, state) if asked[8] else None
            d_output, d_final_state = (
                contiguous(d_output, call.compute),
                contiguous(d_final_state, plan.carry),
            )
            given, on_device = _given(call, plan), bounds_of(bounds)
            maps = _maps(plan, channels, call.compute)
            if plan.segments > 1:
                edges = (d_output, d_final_state, on_device)
                _run(plan, "scan_summary_back", plan.segments - 1, (*given, *edges, *plan.sizes, *maps))
            _run(
                plan, "scan_backward", plan.segments,
                (*given, *residuals, d_output, d_final_state, on_device, *plan.sizes, *maps, *d_tokens, d_A, *d_vectors,
                 *d_channels, d_state, batch),
                backward=True,
            )  # fmt: skip
            d_u, d_delta, d_z = d_tokens
            d_A = None if d_A is None else d_A.sum(axis=0)
            d_D, d_bias = (None if x is None else x.sum(axis=0) for x in d_channels)
            d_B, d_C = (
                None if sums is None else _vector_gradient(sums, x, plan)
                for sums, x in zip(d_vectors, (B, C), strict=True)
            )
            return d_u, d_delta, d_A, d_B, d_C, d_D, d_z, d_bias, d_state, None

    def summarise(self, call: Call) -> tuple[Array, Array]:
        """exp(A sum s) and the final state from zero."""
        call = call._replace(arrays=(*call.arrays[:8], None, call.arrays[9]))
        u, _, A, *_ = call.arrays
        batch, time, channels = u.shape
        plan = _plan(call)._replace(segments=2)  # of which the first, whose map is asked for, is the whole
        plan = plan._replace(segment_tokens=max(1, time))
        with u.device:
            sums, state, wild = _empty_maps(plan, channels, call.compute)
            if 0 in (batch, time, channels, plan.sequences):
                sums[...], state[...] = 0, 0
            else:
                given = _given(call, plan)
                _run(
                    plan,
                    "scan_summary",
                    1,
                    (*given, None, bounds_of(call.arrays[9]), *plan.sizes, sums, state, wild),
                )
            return cupy.exp(sums[:, :, None] * A), state


class _Plan(NamedTuple):
    """How a call runs."""

    sequences: int
    time: int
    channels: int
    states: int
    stored: str
    """The dtype of u, delta and z in memory."""
    vectors: str
    """The dtype of B and C in memory."""
    carry: str
    part: int
    share: int
    unit: int
    """Channels that share their vectors."""
    segment_tokens: int
    segments: int

    @property
    def lanes(self) -> int:
        """Channels of a block."""
        return _THREADS // self.share

    @property
    def blocks_per_unit(self) -> int:
        """Blocks side by side that share their vectors."""
        return -(-self.unit // self.lanes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The integers that kernels have in common."""
        blocks = self.channels // self.unit * self.blocks_per_unit
        return (
            self.sequences, self.time, self.channels, self.states, self.unit, self.blocks_per_unit, blocks,
            self.segment_tokens, self.segments,
        )  # fmt: skip

    def shared(self, backward: bool) -> int:
        """Bytes of shared memory, as the kernels lay it out."""
        state: int = dtype(self.carry).itemsize
        real = state // 2 if self.carry in COMPLEX else state
        tile = min(8, 32 // (self.part * state // 4))
        width = self.part * self.share
        numbers = 2 * max(tile, self.lanes) * width
        if backward:
            numbers += _CHUNK // tile * self.part * _THREADS + _THREADS // 32 * tile * 2 * width
        return numbers * state + (6 if backward else 3) * tile * self.lanes * real


def _state_dtype(call: Call) -> Any:
    """Of the carry."""
    A = call.arrays[2]
    return numpy.dtype(dtype_name(A.dtype) if dtype_name(A.dtype) in COMPLEX else call.compute)


def _own(x: Array, channels: int) -> bool:
    """Whether each channel has a vector of its own that time does not change."""
    return bool(x.shape[2] == channels and x.shape[1] == 1)


def _plan(call: Call) -> _Plan:
    u, delta, A, B, C, _, z, _, _, bounds = call.arrays
    batch, time, channels = u.shape
    states = A.shape[1]
    carry = _state_dtype(call)
    part, share = next(pair for pair in _PARTS[carry.itemsize] if pair[0] * pair[1] >= states)
    unit = channels
    for x in (B, C):
        if channels and not _own(x, channels):
            unit = gcd(unit, channels // x.shape[2])
    sequences = sequences_of(bounds, batch)
    lanes = _THREADS // share
    blocks = max(1, channels // max(1, unit) * -(-unit // lanes) * sequences)
    chunks = -(-time // _CHUNK)
    segments = max(1, min(_BLOCKS // blocks, chunks // _CHUNKS, _SEGMENTS))
    tokens = max(1, -(-chunks // segments)) * _CHUNK
    return _Plan(
        sequences, time, channels, states, common_dtype((u, delta, z), call.compute),
        common_dtype((B, C), carry.name), carry.name, part, share, max(1, unit), tokens, max(1, -(-time // tokens)),
    )  # fmt: skip


def _given(call: Call, plan: _Plan) -> tuple[Array | int | numpy.generic | None, ...]:
    """The inputs as kernels take them."""
    u, delta, A, B, C, D, z, bias, _, _ = call.arrays
    real = dtype(call.compute).type
    soft, low, high, _ = call.options
    given: list[Any] = []
    for x in (u, delta, z):
        x = as_dtype(x, plan.stored)
        given += [None, 0, 0, 0] if x is None else [x, *steps(x)]
    given.append(contiguous(A, plan.carry))
    for x in (B, C):
        read: Array = as_dtype(x, plan.vectors)
        given += [read, *steps(read)]
        given += [plan.channels // x.shape[2], _own(x, plan.channels)]
    given += [contiguous(x, call.compute) for x in (D, bias)]
    return (*given, real(low), real(high), int(soft))


def _maps(plan: _Plan, channels: int, compute: str) -> tuple[Array | None, ...]:
    """The segments' maps (sums of the steps, states from zero), and whether one cannot be trusted."""
    return _empty_maps(plan, channels, compute) if plan.segments > 1 else (None, None, None)


def _empty_maps(plan: _Plan, channels: int, compute: str) -> tuple[Array, Array, Array]:
    count = plan.sequences * (plan.segments - 1)
    return (
        cupy.empty((count, channels), dtype(compute)),
        cupy.empty((count, channels, plan.states), dtype(plan.carry)),
        cupy.empty((count, plan.sizes[6]), "int32"),
    )


def _run(
    plan: _Plan, kernel: str, segments: int, arguments: tuple[Any, ...], *, backward: bool = False
) -> None:
    launch(
        "selective_scan.cu",
        {
            "INPUT": STORED[plan.stored],
            "VECTOR": STORED[plan.vectors],
            "STATE": STORED[plan.carry],
            "PART": str(plan.part),
            "SHARE": str(plan.share),
        },
        kernel,
        (plan.sizes[6] * segments, min(plan.sequences, MOST_ROWS), 1),
        arguments,
        plan.shared(backward),
        _THREADS,
    )


def _forward(call: Call, keep: bool) -> tuple[Array, Array, Array | None]:
    """Output, final state, and with ``keep`` the states at the chunks' starts."""
    u, _, _, _, _, _, _, _, state, bounds = call.arrays
    plan = _plan(call)
    batch, time, channels = u.shape
    carry = dtype(plan.carry)
    with u.device:
        output = cupy.empty(u.shape, dtype(plan.stored))
        final = cupy.empty((plan.sequences, channels, plan.states), carry)
        count = saved_states(bounds, plan.sequences, time, _CHUNK) if keep else 0
        starts = cupy.empty((count, channels, plan.states), carry) if keep else None
        if 0 in (batch, time, channels, plan.sequences):
            output[...] = 0
            final[...] = 0 if state is None else state
        else:
            given, on_device = _given(call, plan), bounds_of(bounds)
            initial = contiguous(state, plan.carry)
            maps = _maps(plan, channels, call.compute)
            if plan.segments > 1:
                _run(
                    plan, "scan_summary", plan.segments - 1, (*given, initial, on_device, *plan.sizes, *maps)
                )
            _run(
                plan, "scan_forward", plan.segments,
                (*given, initial, on_device, *plan.sizes, *maps, output, final, starts),
            )  # fmt: skip
        return as_dtype(output, dtype_name(u.dtype)), final, starts


def _vector_sums(x: Array, plan: _Plan, batch: int, time: int, channels: int, state: Any) -> Array:
    """Room for the parts of B's or C's gradient: for each block of a group, or for each sequence and segment."""
    if _own(x, channels):
        return cupy.zeros((plan.sequences * plan.segments, channels, plan.states), state)
    blocks = channels // x.shape[2] // plan.unit * plan.blocks_per_unit
    return cupy.empty((blocks, batch, time, x.shape[2], plan.states), state)


def _vector_gradient(sums: Array, x: Array, plan: _Plan) -> Array:
    if sums.ndim == 5:
        return reduced(sums[0] if sums.shape[0] == 1 else sums.sum(axis=0), x.shape)
    if x.shape[0] == 1:
        return sums.sum(axis=0).reshape(x.shape)
    return sums.reshape((plan.sequences, plan.segments, *sums.shape[1:])).sum(axis=1).reshape(x.shape)


def _nothing(
    call: Call, asked: list[bool], real: Any, state: Any, d_final_state: Array | None
) -> list[Array | None]:
    """The gradients of a call without elements."""
    grads = [
        cupy.zeros(x.shape, state if i in (2, 3, 4, 8) else real) if ask else None
        for i, (x, ask) in enumerate(zip(call.arrays, asked, strict=True))
    ]
    if grads[8] is not None and call.arrays[0].shape[1] == 0 and d_final_state is not None:
        grads[8] = d_final_state.astype(state)
    return grads
