"""The gated delta rule on NumPy arrays; through it linear attention, SSD, the delta rules and the rest of the family."""

from __future__ import annotations

from array import array as Block
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple, cast

import numpy

from scanfield.dispatch import Call, Grads, Verb, operation_of
from scanfield.threads import get_num_threads
from scanfield_numpy import gated_delta_backward, gated_delta_forward, gated_delta_step
from scanfield_numpy.launching import OUTPUT, STATE, Launch
from scanfield_numpy.layout import (
    ABSENT,
    OWN,
    Array,
    Residuals,
    Sequences,
    flat,
    lanes_of,
    reason_against,
    rows,
    saved_states,
    sequences,
    width,
)
from scanfield_numpy.memory import LAST_CACHE, SMALLEST, cleared, fresh, past_cache
from scanfield_numpy.threads import block_of, run
from scanfield_numpy.vector import REGISTER_BYTES

# Tokens between two saved states: the saved ones are then fewer than the numbers of an input.
_CHUNK = 32
# Bytes of the state's columns that a task works on, so that they stay in the first-level cache.
_TASK_BYTES = 65536
# Bytes of one quad's state that backward works on: the states of a chunk's eight quads then fit in the second one.
_PANEL_BYTES = 32768


class GatedDelta:
    """Implementation of ``gdn2``."""

    def declines(self, call: Call, verb: Verb) -> str | None:
        """Dtypes other than float32 and float64."""
        return reason_against(call, 7)

    def forward(self, call: Call) -> tuple[Array, Array]:
        """Output and final state."""
        state, bounds = call.arrays[6:]
        # One token of a state is all reading and writing.
        alone = call.arrays[0].shape[1] == 1 and state is not None and bounds is None
        return _step(call) if alone else _forward(call, 0)[:2]

    step = forward

    def launch(self, call: Call) -> Launch | None:
        """What a call of this kind gives its kernel; None if arrays are copied for it."""
        state, bounds = call.arrays[6:]
        if bounds is not None or 0 in (*call.arrays[0].shape, *call.arrays[2].shape):
            return None
        read, steps = _inputs(call.arrays[:6], call.compute)
        lying = (*read, flat(state, call.compute))
        if any(x is not y for x, y in zip(call.arrays, lying, strict=False) if x is not None):
            return None
        places = [array if call.arrays[i] is None else i for i, array in enumerate(lying)]
        alone = call.arrays[0].shape[1] == 1 and state is not None
        return (_launch_step if alone else _launch)(call, tuple(steps), places)

    def save(self, call: Call) -> tuple[Array, Array, tuple[Array, ...]]:
        """Output, final state; the states at the chunks' starts and, where the rule erases, the updates."""
        output, last, starts, updates = _forward(call, _chunk(call))
        return output, last, (starts, updates)

    def residuals(self, call: Call) -> Residuals:
        """Shapes and dtypes of what ``save`` keeps."""
        query, _, value, _, erase, _, _, bounds = call.arrays
        batch, time, vheads, V = value.shape
        states = saved_states(batch, time, bounds, _chunk(call))
        updates = (0,) if erase is None else (batch, time, vheads, V)
        return ((states, vheads, query.shape[3], V), call.compute), (updates, call.compute)

    def backward(
        self,
        call: Call,
        residuals: tuple[Array, ...],
        d_output: Array | None,
        d_final_state: Array | None,
        wanted: tuple[bool, ...],
    ) -> Grads:
        """The wanted gradients."""
        query, _, value, log_decay, erase, write, _, bounds = call.arrays
        batch, time, vheads, V = value.shape
        heads, K = query.shape[2:]
        chunk, dtype = _chunk(call), call.compute
        plan = sequences(batch, time, bounds, chunk)
        # A write gate that serves all columns adds up over them.
        clear = 0 in (batch, time, vheads, K, V) or width(write) == 1
        make = cleared if clear else fresh
        grads: list[Array | None] = [
            make(array.shape, dtype) if want and array is not None and i != 7 else None
            for i, (array, want) in enumerate(zip(call.arrays, wanted, strict=True))
        ]
        if 0 in (batch, vheads, K, V):
            return grads
        lanes = lanes_of(dtype)
        panel = _panel(K, V, lanes)
        integers = (
            heads, vheads // heads, K, V, time, width(log_decay), width(erase), width(write), call.options[1], chunk,
            d_output is not None, d_final_state is not None, *(grad is not None for grad in grads[:7]), panel,
        )  # fmt: skip
        read, steps = _inputs(call.arrays[:6], dtype)
        odd = numpy.zeros(plan.number * vheads, dtype)
        others = (*residuals, d_output, d_final_state, *grads[:7], odd)
        run(
            gated_delta_backward.backward,
            dtype,
            plan.number * heads,
            9.0 * batch * time * vheads * K * V,
            gated_delta_backward.memory_of(K, V, chunk, panel, lanes),
            (*integers, *steps),
            (plan.table, _scale(call.options[0], dtype), *read, *(flat(array, dtype) for array in others)),
        )
        if odd.any():
            return _token_by_token(call, d_output, d_final_state, wanted)
        return grads

    def summarise(self, call: Call) -> tuple[Array, Array]:
        """The transition, elementwise or a matrix, and the final state from zero."""
        query, _, value, log_decay, erase, _, _, bounds = call.arrays
        _, time, vheads, _ = value.shape
        K = query.shape[3]
        call = call._replace(arrays=(*call.arrays[:6], None, bounds))
        state = _forward(call, 0, want_output=False)[1]
        count = state.shape[0]
        if erase is not None:
            unit = numpy.zeros((count, vheads, K, K), call.compute) + numpy.eye(K, dtype=call.compute)
            arrays = (*call.arrays[:5], None, unit, bounds)
            return _forward(call._replace(arrays=arrays), 0, want_output=False, columns=K)[1], state
        if log_decay is None:
            return numpy.ones((count, vheads, K, 1), call.compute), state
        sums = numpy.empty((count, vheads, log_decay.shape[3]), call.compute)
        edges = (0, time) if bounds is None else bounds
        with numpy.errstate(all="ignore"):
            if bounds is None:
                log_decay.sum(axis=1, out=sums)
            else:
                for i in range(count):
                    log_decay[0, edges[i] : edges[i + 1]].sum(axis=0, out=sums[i])
            transition = numpy.broadcast_to(numpy.exp(sums), (count, vheads, K))
        return numpy.ascontiguousarray(transition)[..., None], state


def _token_by_token(
    call: Call, d_output: Array | None, d_final_state: Array | None, wanted: tuple[bool, ...]
) -> Grads:
    """Gradients by the recurrence: products of several decays may overflow, and meet what is not finite, elsewhere."""
    recurrence = cast(Any, operation_of(call).generic["recurrent"])
    grads: Grads = recurrence.backward(call, recurrence.save(call)[2], d_output, d_final_state, wanted)
    return grads


def _inputs(arrays: Sequence[Array | None], dtype: str) -> tuple[list[Array], list[int]]:
    """Arrays as the kernels read them, and their steps along batch, time and heads."""
    read: list[Array] = []
    steps: list[int] = []
    for array in arrays:
        ready, own = rows(array, dtype, repeated=False)
        read.append(ready)
        steps += own[:3]
    return read, steps


@lru_cache(64)
def _scale(scale: float, dtype: str) -> Array:
    """The factor of the output, and 1."""
    return numpy.array([scale, 1], dtype)


def _chunk(call: Call) -> int:
    """Tokens between two saved states: whole quads, as asked or as suits the cache."""
    asked = call.options[2]
    return max(4, min(int(asked), 64) // 4 * 4) if asked else _CHUNK


class _Sizes(NamedTuple):
    """What a forward call's shapes alone decide."""

    plan: Sequences
    output: tuple[int, ...]
    last: tuple[int, ...]
    starts: tuple[int, ...]
    task: int
    """Columns of a task."""
    tasks: int
    work: float
    memory: int
    integers: tuple[int, ...]
    """The first places of the kernel's block."""


@lru_cache(256)  # a decoding step asks for the same ones over and over
def _sizes(
    query: tuple[int, ...],
    value: tuple[int, ...],
    columns: int | None,
    widths: tuple[int, int, int],
    erase_vector: bool,
    bounds: tuple[int, ...] | None,
    chunk: int,
    dtype: str,
    threads: int,
) -> _Sizes:
    (batch, time, heads, K), (_, _, vheads, V) = query, value
    V = V if columns is None else columns
    plan = sequences(batch, time, bounds, chunk or 1)
    lanes = lanes_of(dtype)
    task = _task_columns(K, V, lanes, plan.number * vheads, threads) if K else lanes
    return _Sizes(
        plan,
        (batch, time, vheads, V),
        (plan.number, vheads, K, V),
        (plan.states, vheads, K, V),
        task,
        plan.number * vheads * -(-V // task),
        4.0 * batch * time * vheads * K * V,
        gated_delta_forward.memory_of(K, task, lanes),
        (heads, vheads // max(1, heads), K, V, time, *widths, erase_vector, chunk),
    )


def _forward(
    call: Call, chunk: int, *, want_output: bool = True, columns: int | None = None
) -> tuple[Array, Array, Array, Array]:
    """Output, final state, states at the chunks' starts, updates. With ``columns`` the value is zero, and so wide."""
    query, key, value, log_decay, erase, write, state, bounds = call.arrays
    scale, erase_vector, _ = call.options
    dtype = call.compute
    widths = width(log_decay), width(erase), 0 if columns else width(write)
    sizes = _sizes(
        query.shape, value.shape, columns, widths, erase_vector, bounds, chunk, dtype, get_num_threads()
    )
    keeps = bool(chunk) and erase is not None
    output, last = (
        fresh(sizes.output, OWN[dtype]) if want_output else ABSENT[dtype],
        fresh(sizes.last, OWN[dtype]),
    )
    starts = fresh(sizes.starts, OWN[dtype]) if chunk else ABSENT[dtype]
    updates = fresh(sizes.output, OWN[dtype]) if keeps else ABSENT[dtype]
    if 0 in (query.shape[0], *sizes.last[1:]):
        output[...] = 0
        return output, last, starts, updates
    read, steps = _inputs((query, key, value, log_decay, erase, write), dtype)
    run(
        gated_delta_forward.forward,
        dtype,
        sizes.tasks,
        sizes.work,
        sizes.memory,
        _block(sizes, (state is not None, columns is None, keeps, want_output), steps),
        (sizes.plan.table, _scale(scale, dtype), *read, flat(state, dtype), output, last, starts, updates),
    )
    return output, last, starts, updates


def _block(sizes: _Sizes, flags: tuple[bool, ...], steps: Sequence[int]) -> tuple[int, ...]:
    """The kernel's block up to the addresses."""
    return *sizes.integers, *flags, sizes.task, 0, 0, 0, 0, 0, *steps


def _launch(call: Call, steps: tuple[int, ...], places: Sequence[Array | int]) -> Launch:
    """As ``_forward`` without saved states."""
    query, _, value, log_decay, erase, write, state, _ = call.arrays
    scale, erase_vector, _ = call.options
    dtype = call.compute
    widths = width(log_decay), width(erase), width(write)
    sizes = _sizes(query.shape, value.shape, None, widths, erase_vector, None, 0, dtype, get_num_threads())
    return Launch(
        gated_delta_forward.forward,
        dtype,
        sizes.tasks,
        sizes.work,
        sizes.memory,
        _block(sizes, (state is not None, True, False, True), steps),
        (sizes.plan.table, _scale(scale, dtype), *places, OUTPUT, STATE, ABSENT[dtype], ABSENT[dtype]),
        sizes.output,
        sizes.last,
    )


class _Step(NamedTuple):
    """What the shapes and steps of one token alone decide."""

    output: tuple[int, ...]
    last: tuple[int, ...]
    tasks: int
    work: float
    memory: int
    large: bool
    """Whether the state may be best written past the cache."""
    blocks: tuple[Block[int], Block[int]]
    """The kernel's block up to the inputs' addresses; the second writes past the cache."""
    kept: tuple[Array, ...]
    """Whose addresses stand in those."""


@lru_cache(256)
def _step_plan(
    query: tuple[int, ...],
    value: tuple[int, ...],
    widths: tuple[int, int, int],
    steps: tuple[int, ...],
    scale: float,
    erase_vector: bool,
    dtype: str,
    threads: int,
) -> _Step:
    sizes = _sizes(query, value, None, widths, erase_vector, None, 0, dtype, threads)
    lanes, K, V = lanes_of(dtype), *sizes.last[2:]
    large = (
        V % (4 * lanes) == 0 == sizes.task % (4 * lanes)
        and prod(sizes.last) * OWN[dtype].itemsize > LAST_CACHE
    )
    kept = sizes.plan.table, _scale(scale, dtype)
    blocks = [
        block_of((*sizes.integers, 1, 1, 0, 1, sizes.task, past, 0, 0, 0, 0, *steps), kept) for past in (0, 1)
    ]
    tasks = 0 if 0 in sizes.last else sizes.tasks
    memory = gated_delta_step.memory_of(K, lanes)
    return _Step(sizes.output, sizes.last, tasks, sizes.work, memory, large, (blocks[0], blocks[1]), kept)


def _step(call: Call) -> tuple[Array, Array]:
    """Output and state after one token."""
    query, key, value, log_decay, erase, write, state, _ = call.arrays
    scale, erase_vector, _ = call.options
    dtype = call.compute
    read, steps = _inputs((query, key, value, log_decay, erase, write), dtype)
    widths = width(log_decay), width(erase), width(write)
    plan = _step_plan(
        query.shape, value.shape, widths, tuple(steps), scale, erase_vector, dtype, get_num_threads()
    )
    own = OWN[dtype]
    output, last = fresh(plan.output, own), fresh(plan.last, own)
    if plan.tasks:
        past = plan.large and past_cache(last)
        arrays = (*read, flat(state, dtype), output, last)
        run(gated_delta_step.step, dtype, plan.tasks, plan.work, plan.memory, plan.blocks[past], arrays)
    else:
        output[...] = 0
    return output, last


def _launch_step(call: Call, steps: tuple[int, ...], places: Sequence[Array | int]) -> Launch:
    """As ``_step``."""
    query, _, value, log_decay, erase, write, _, _ = call.arrays
    scale, erase_vector, _ = call.options
    dtype = call.compute
    widths = width(log_decay), width(erase), width(write)
    plan = _step_plan(query.shape, value.shape, widths, steps, scale, erase_vector, dtype, get_num_threads())
    itemsize = OWN[dtype].itemsize
    # Large memory begins where registers do.
    large = prod(plan.last) * itemsize >= SMALLEST
    past = plan.large and large and plan.last[3] * itemsize % REGISTER_BYTES == 0
    return Launch(
        gated_delta_step.step,
        dtype,
        plan.tasks,
        plan.work,
        plan.memory,
        plan.blocks[past][: -len(plan.kept)],
        (*plan.kept, *places, OUTPUT, STATE),
        plan.output,
        plan.last,
        streams=True,
    )


def _panel(K: int, V: int, lanes: int) -> int:
    """Columns whose states at a chunk's quads stay in the second-level cache."""
    numbers = _PANEL_BYTES * lanes // (REGISTER_BYTES * K)
    return max(1, min(numbers, V + lanes - 1) // lanes) * lanes


def _task_columns(K: int, V: int, lanes: int, heads: int, threads: int) -> int:
    """Columns of a task: what the cache holds, or fewer if threads would have none. Columns do not meet: no bit changes."""
    itemsize = REGISTER_BYTES // lanes
    columns = max(2, min(_TASK_BYTES // (K * itemsize), V) // lanes) * lanes
    while columns > 2 * lanes and heads * -(-V // columns) < threads:
        columns = -(-columns // (2 * lanes)) * lanes
    return columns
