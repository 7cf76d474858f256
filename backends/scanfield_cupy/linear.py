"""The linear scan on CuPy arrays."""

from __future__ import annotations

from typing import Any, NamedTuple

import cupy
import numpy

from scanfield.arrays import HALF, dtype_name
from scanfield.dispatch import Call, Grads, Verb
from scanfield_cupy.layout import (
    Array,
    as_dtype,
    bounds_of,
    carried,
    common_dtype,
    contiguous,
    copies,
    dtype,
    reason_against,
    reduced,
    saved_states,
    sequences_of,
    steps,
)
from scanfield_cupy.modules import MOST_ROWS, STORED, THREADS, launch

# Lanes that a block takes side by side, as the kernels are compiled.
_LANES = (1, 8, 32)
# Tokens of a thread's run, as the kernels have them.
_TOKENS = {"float32": 8, "float64": 8, "complex64": 4, "complex128": 2}
# A sequence is cut into segments where fewer blocks than this would run; a segment has at least so many tiles, and there
# are at most so many. By the shapes alone, so that the grouping of sums depends on nothing else.
_BLOCKS, _TILES, _SEGMENTS = 528, 4, 128


class Linear:
    """Implementation of ``linear_scan``."""

    def declines(self, call: Call, verb: Verb) -> str | None:
        """Dtypes that no kernel takes, and cards that none is written for."""
        reason = reason_against(call)
        if reason is not None:
            return reason
        plan = _plan(call)
        blocks = plan.lane_blocks * plan.segments
        return (
            f"{plan.shape[2]} lanes take {blocks} blocks, more than a grid has" if blocks >= 2**31 else None
        )

    def notes(self, call: Call) -> tuple[str, ...]:
        """What is copied before a kernel runs."""
        a, b, _, _ = call.arrays
        return copies({"a": a, "b": b}, _plan(call).stored)

    def forward(self, call: Call) -> tuple[Array, Array]:
        """Output and final state."""
        return _forward(call, keep=False)[:2]

    step = forward

    def save(self, call: Call) -> tuple[Array, Array, tuple[Array, ...]]:
        """Output, final state and the states at the tiles' starts."""
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
        a, b, state, bounds = call.arrays
        plan = _plan(call)
        carry = dtype(plan.carry)
        with a.device:
            if 0 in (*plan.shape, plan.sequences):
                return _nothing(call, wanted, carry, d_final_state)
            d_a, d_b = (cupy.empty(plan.shape, carry) if want else None for want in wanted[:2])
            d_state = cupy.empty(state.shape, carry) if wanted[2] and state is not None else None
            if d_a is None and d_b is None and d_state is None:
                return None, None, None, None
            d_output = contiguous(d_output, plan.carry)
            d_final_state = contiguous(d_final_state, plan.carry)
            given = _given(a, b, plan)
            on_device = bounds_of(bounds)
            segments = _Segments(plan)
            if plan.segments > 1:
                _run(
                    plan, "summary_back", plan.segments - 1,
                    (*given, d_output, d_final_state, on_device, *plan.sizes, *segments.arrays),
                )  # fmt: skip
            _run(
                plan, "backward", plan.segments,
                (*given, *residuals, d_output, d_final_state, on_device, *plan.sizes, *segments.arrays, d_a, d_b, d_state),
            )  # fmt: skip
            return reduced(d_a, a.shape), reduced(d_b, b.shape), d_state, None

    def summarise(self, call: Call) -> tuple[Array, Array]:
        """The product of the coefficients, and the final state from zero."""
        a, b, _, bounds = call.arrays
        plan = _plan(call)
        with a.device:
            state = self.forward(call._replace(arrays=(a, b, None, bounds)))[1]
            nothing = cupy.broadcast_to(cupy.zeros((), b.dtype), b.shape)
            one = cupy.ones(state.shape, dtype(plan.carry))
            return self.forward(call._replace(arrays=(a, nothing, one, bounds)))[1], state


class _Plan(NamedTuple):
    """How a call runs."""

    shape: tuple[int, int, int]
    """Batch, time and lanes."""
    sequences: int
    stored: str
    carry: str
    lanes: int
    """Of a block."""
    tile: int
    """Tokens of a block's tile."""
    tiles: int
    """Of a segment."""
    segments: int

    @property
    def lane_blocks(self) -> int:
        """Blocks side by side."""
        return -(-self.shape[2] // self.lanes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The integers that kernels have in common."""
        return (
            self.sequences, self.shape[1], self.shape[2], self.lane_blocks, self.tiles * self.tile, self.segments,
        )  # fmt: skip


def _plan(call: Call) -> _Plan:
    a, b, _, bounds = call.arrays
    batch, time, width = (m if n == 1 else n for n, m in zip(a.shape, b.shape, strict=True))
    carry = carried(call)
    stored = common_dtype((a, b), carry)
    sequences = sequences_of(bounds, batch)
    lanes = next((n for n in _LANES if n >= width), _LANES[-1])
    tile = THREADS // lanes * _TOKENS[carry]
    tiles = -(-time // tile)
    side_by_side = max(1, -(-width // lanes) * sequences)
    segments = max(1, min(_BLOCKS // side_by_side, tiles // _TILES, _SEGMENTS))
    tiles = max(1, -(-tiles // segments))
    segments = max(1, -(-time // (tiles * tile)))
    return _Plan((batch, time, width), sequences, stored, carry, lanes, tile, tiles, segments)


class _Segments:
    """The segments' maps, and whether one cannot be trusted."""

    def __init__(self, plan: _Plan) -> None:
        self.arrays: tuple[Array | None, ...] = (None, None, None)
        if plan.segments > 1:
            count = plan.sequences * (plan.segments - 1)
            carry = dtype(plan.carry)
            self.arrays = (
                cupy.empty((count, plan.shape[2]), carry),
                cupy.empty((count, plan.shape[2]), carry),
                cupy.empty((count, plan.lane_blocks), "int32"),
            )


def _given(a: Array, b: Array, plan: _Plan) -> tuple[Array | int, ...]:
    """a and b as kernels take them: addresses and steps."""
    given: list[Array | int] = []
    for array in (a, b):
        array = as_dtype(array, plan.stored)
        given += [array, *steps(array)]
    return tuple(given)


def _run(plan: _Plan, kernel: str, segments: int, arguments: tuple[Array | int | None, ...]) -> None:
    size = numpy.dtype(plan.carry).itemsize
    launch(
        "linear_scan.cu",
        {"STORED": STORED[plan.stored]},
        f"{kernel}_{plan.lanes}",
        (plan.lane_blocks * segments, min(plan.sequences, MOST_ROWS), 1),
        arguments,
        size * (4 * THREADS + 2 * plan.lanes),
    )


def _forward(call: Call, keep: bool) -> tuple[Array, Array, Array]:
    """Output, final state, and with ``keep`` the states at the tiles' starts."""
    a, b, state, bounds = call.arrays
    plan = _plan(call)
    _, time, width = plan.shape
    half = dtype_name(a.dtype) in HALF and plan.carry == call.compute
    carry = dtype(plan.carry)
    with a.device:
        output = cupy.empty(plan.shape, dtype(plan.stored))
        final = cupy.empty((plan.sequences, width), carry)
        count = saved_states(bounds, plan.sequences, time, plan.tile) if keep else 0
        starts = cupy.empty((count, width), carry) if keep else None
        state = contiguous(state, plan.carry)
        if 0 in (plan.sequences, width):
            output = cupy.zeros(plan.shape, dtype(plan.stored))
        elif 0 in plan.shape:
            final[...] = 0 if state is None else state
        else:
            given = _given(a, b, plan)
            on_device = bounds_of(bounds)
            segments = _Segments(plan)
            if plan.segments > 1:
                _run(
                    plan, "summary", plan.segments - 1, (*given, state, on_device, *plan.sizes, *segments.arrays)
                )  # fmt: skip
            _run(
                plan, "forward", plan.segments,
                (*given, state, on_device, *plan.sizes, *segments.arrays, output, final, starts),
            )  # fmt: skip
        return as_dtype(output, dtype_name(a.dtype) if half else plan.carry), final, starts


def _nothing(
    call: Call, wanted: tuple[bool, ...], carry: Any, d_final_state: Array | None
) -> tuple[Array | None, ...]:
    """The gradients of a call without elements."""
    d_a, d_b, d_state = (
        cupy.zeros(x.shape, carry) if want and x is not None else None
        for x, want in zip(call.arrays[:3], wanted, strict=False)
    )
    if d_state is not None and _plan(call).shape[1] == 0 and d_final_state is not None:
        d_state = d_final_state.astype(carry)
    return d_a, d_b, d_state, None
