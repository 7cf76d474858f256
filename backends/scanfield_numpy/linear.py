"""The linear scan on NumPy arrays."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy

from scanfield.dispatch import Call, Grads, Verb
from scanfield.threads import get_num_threads
from scanfield_numpy import linear_kernels as kernels
from scanfield_numpy import series_kernels
from scanfield_numpy.compiling import Kernel
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
)
from scanfield_numpy.memory import cleared, fresh, past_cache
from scanfield_numpy.threads import WORTH_A_THREAD, run

# Tokens between two saved states: a chunk's rebuilt states fit in cache.
_CHUNK = 32
# Registers of lanes in a task, at most and at least: rows that stream through memory are the faster the longer.
_WIDEST, _NARROWEST, _WIDEST_BACK = 128, 8, 64
# From so many tokens on, few lanes have kernels of their own.
_LONG = 32
# Sequences share a gradient in at most so many groups, whose sums are added up in their order.
_GROUPS = 8


class Linear:
    """Implementation of ``linear_scan``."""

    def declines(self, call: Call, verb: Verb) -> str | None:
        """Dtypes other than float32 and float64."""
        return reason_against(call, 3)

    def forward(self, call: Call) -> tuple[Array, Array]:
        """Output and final state."""
        return _forward(call, 0)[:2]

    step = forward

    def launch(self, call: Call) -> Launch | None:
        """What a call of this kind gives its kernel; None if arrays are copied for it."""
        a, b, state, bounds = call.arrays
        dtype = call.compute
        (a_read, a_steps), (b_read, b_steps) = rows(a, dtype), rows(b, dtype)
        start = flat(state, dtype)
        if bounds is not None or a_read is not a or b_read is not b or not (state is None or start is state):
            return None
        plan = _plan(a.shape, b.shape, a_steps, b_steps, None, 0, dtype, get_num_threads())
        integers = (*plan.integers, state is not None, True, False)
        arrays = (plan.sequences.table, 0, 1, start if state is None else 2, OUTPUT, STATE, ABSENT[dtype])
        return Launch(
            plan.kernel,
            dtype,
            plan.tasks,
            plan.work,
            plan.memory,
            integers,
            arrays,
            plan.shape,
            plan.last,
            plan.size,
        )

    def save(self, call: Call) -> tuple[Array, Array, tuple[Array, ...]]:
        """Output, final state and the states at the chunks' starts."""
        output, last, starts = _forward(call, _chunk(call))
        return output, last, (starts,)

    def residuals(self, call: Call) -> Residuals:
        """Shapes and dtypes of what ``save`` keeps."""
        a, b, _, bounds = call.arrays
        batch, time, width = _shape(a.shape, b.shape)
        return (((saved_states(batch, time, bounds, _chunk(call)), width), call.compute),)

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
        batch, time, width = shape = _shape(a.shape, b.shape)
        dtype = call.compute
        if 0 in (batch, width):
            d_a, d_b, d_state = (
                numpy.zeros(x.shape, dtype) if want and x is not None else None
                for x, want in zip((a, b, state), wanted, strict=False)
            )
            return d_a, d_b, d_state, None
        few = _few(width, time, dtype)
        chunk = _chunk(call)
        plan = sequences(batch, time, bounds, chunk)
        asked = [array for array, want in zip((a, b), wanted, strict=False) if want]
        shared = any(_shared(array, shape, plan.number) for array in asked)
        # Sums are made of the same parts for every number of threads; what is no sum may be cut anywhere.
        fixed = shared or any(array.shape[2] < width for array in asked)
        tasks = (
            -(-_GROUPS // max(1, plan.number))
            if fixed
            else _tasks(plan.number, 4.0 * batch * time * width, get_num_threads())
        )
        lanes = width if few else _lanes(width, tasks, _WIDEST_BACK, dtype)
        blocks = -(-width // lanes)
        groups = plan.number
        if shared:
            groups = max(1, min(-(-plan.number // 2), _GROUPS // max(blocks, 1)))
        sums = [
            _sums(array, shape, blocks, groups, plan.number, dtype) if want else _Sums(None, (0,) * 8)
            for array, want in zip((a, b), wanted, strict=False)
        ]
        d_state = fresh(state.shape, dtype) if wanted[2] and state is not None else None
        cotangent, steps = rows(d_output, dtype, repeated=False)
        given, common = _common(a, b, (lanes, chunk), shape, dtype)
        integers = (
            *common, groups, plan.number, d_output is not None, steps[0], steps[1], d_final_state is not None,
            d_state is not None, *sums[0].layout, *sums[1].layout,
        )  # fmt: skip
        arrays = (d_final_state, *(each.partial for each in sums), d_state)
        run(
            series_kernels.backward if few else kernels.backward,
            dtype,
            groups * blocks,
            4.0 * batch * time * width,
            series_kernels.backward_memory(lanes_of(dtype)) if few else lanes * (3 + chunk),
            integers,
            (
                plan.table,
                *given,
                flat(residuals[0], dtype),
                cotangent,
                *(flat(array, dtype) for array in arrays),
            ),
            size=width if few else 0,
        )
        with numpy.errstate(all="ignore"):
            d_a, d_b = (_summed(each, array) for each, array in zip(sums, (a, b), strict=True))
        return d_a, d_b, d_state, None

    def summarise(self, call: Call) -> tuple[Array, Array]:
        """The product of the coefficients, and the final state from zero."""
        a, b, _, bounds = call.arrays
        call = call._replace(arrays=(a, b, None, bounds))
        state = _forward(call, 0, want_output=False)[1]
        nothing = numpy.broadcast_to(numpy.zeros((), call.compute), b.shape)
        call = call._replace(arrays=(a, nothing, numpy.ones(state.shape, call.compute), bounds))
        return _forward(call, 0, want_output=False)[1], state


def _shape(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, int, int]:
    """Batch, time and lanes, from the shapes of a and b."""
    batch, time, width = a if a == b else tuple([m if n == 1 else n for n, m in zip(a, b, strict=True)])
    return batch, time, width


def _chunk(call: Call) -> int:
    """Tokens between two saved states."""
    a, b = call.arrays[:2]
    _, time, width = _shape(a.shape, b.shape)
    asked = call.options[0]
    if width and _few(width, time, call.compute):
        per = lanes_of(call.compute) // width
        most = per * series_kernels.REGISTERS
        return max(per, min(int(asked) // per * per, most)) if asked else most
    return min(int(asked), _CHUNK) if asked else _CHUNK


def _lanes(width: int, tasks: int, most: int, dtype: str) -> int:
    """Lanes of a task, whole registers, where so many tasks should share them."""
    step = lanes_of(dtype)
    registers = -(-width // (step * tasks))
    return step * max(1, min(most, max(registers, _NARROWEST), -(-width // step)))


def _tasks(number: int, work: float, threads: int) -> int:
    """In how many tasks each of so many sequences is cut: one thread takes long rows, several want some tasks each."""
    threads = threads if work > WORTH_A_THREAD else 1
    return 1 if threads == 1 else -(-2 * threads // max(1, number))


def _few(width: int, time: int, dtype: str) -> bool:
    """Whether several tokens lie side by side in a register, and often enough to compile a kernel for the width."""
    return 2 * width <= lanes_of(dtype) and time >= _LONG


def _common(
    a: Array, b: Array, sizes: tuple[int, int], shape: tuple[int, int, int], dtype: str
) -> tuple[tuple[Array, Array], tuple[int, ...]]:
    """a and b as kernels take them; the integers that kernels have in common."""
    (a, a_steps), (b, b_steps) = rows(a, dtype), rows(b, dtype)
    lanes, chunk = sizes
    return (a, b), (shape[2], lanes, shape[1], chunk, *a_steps, *b_steps)


class _Sums(NamedTuple):
    """A gradient that is wanted, in parts to be added up: (blocks or 1, groups or rows of the batch, time, lanes)."""

    partial: Array | None
    layout: tuple[int, ...]


def _shared(array: Array, shape: tuple[int, int, int], count: int) -> bool:
    """Whether several of so many sequences add to one gradient."""
    return count > 1 and array.shape[0] == 1 and (shape[0] > 1 or array.shape[1] == 1)


def _sums(
    array: Array, shape: tuple[int, int, int], blocks: int, groups: int, count: int, dtype: str
) -> _Sums:
    _, time, width = array.shape
    shared, whole = _shared(array, shape, count), width == shape[2]
    lead, number = 1 if whole else blocks, groups if shared else array.shape[0]
    adds = not whole or shared or time == 1
    partial = (cleared if adds else fresh)((lead, number, time, width), dtype)
    past = not adds and past_cache(partial)
    each_block, each_token = 0 if whole else number * time, width if time > 1 else 0
    return _Sums(partial, (1, shared, each_block, time * width, each_token, whole, adds, past))


def _summed(sums: _Sums, array: Array) -> Array | None:
    """The gradient of an array."""
    if sums.partial is None:
        return None
    whole = sums.partial[0] if sums.partial.shape[0] == 1 else sums.partial.sum(axis=0)
    return whole if whole.shape == array.shape else whole.sum(axis=0, keepdims=True)


class _Plan(NamedTuple):
    """What a forward call's shapes and steps alone decide."""

    kernel: Kernel
    sequences: Sequences
    shape: tuple[int, int, int]
    last: tuple[int, int]
    starts: tuple[int, ...]
    tasks: int
    work: float
    memory: int
    size: int
    """That of a kernel compiled for several; 0 for one that is not."""
    integers: tuple[int, ...]
    """The first places of the kernel's block."""


@lru_cache(256)  # short calls come often, and are little more work than this
def _plan(
    a: tuple[int, ...],
    b: tuple[int, ...],
    a_steps: tuple[int, ...],
    b_steps: tuple[int, ...],
    bounds: tuple[int, ...] | None,
    chunk: int,
    dtype: str,
    threads: int,
) -> _Plan:
    batch, time, width = shape = _shape(a, b)
    found = sequences(batch, time, bounds, chunk or 1)
    last, starts = (found.number, width), (found.states, width) if chunk else (0,)
    work = 2.0 * batch * time * width
    number = found.number if batch and width else 0
    steps = (*a_steps, *b_steps)
    if _few(width, time, dtype):
        memory, integers = series_kernels.forward_memory(lanes_of(dtype)), (width, width, time, chunk, *steps)
        return _Plan(
            series_kernels.forward, found, shape, last, starts, number, work, memory, width, integers
        )
    lanes = _lanes(width, _tasks(found.number, work, threads), _WIDEST, dtype) if width else 1
    integers = (width, lanes, time, chunk, *steps)
    tasks = number * -(-width // lanes)
    return _Plan(kernels.forward, found, shape, last, starts, tasks, work, lanes, 0, integers)


def _forward(call: Call, chunk: int, *, want_output: bool = True) -> tuple[Array, Array, Array]:
    """Output, final state, states at the chunks' starts."""
    a, b, state, bounds = call.arrays
    dtype = call.compute
    own = OWN[dtype]
    (a_read, a_steps), (b_read, b_steps) = rows(a, dtype), rows(b, dtype)
    plan = _plan(a.shape, b.shape, a_steps, b_steps, bounds, chunk, dtype, get_num_threads())
    output = fresh(plan.shape if want_output else (0, 0), own)
    last = fresh(plan.last, own)
    starts = fresh(plan.starts, own) if chunk else ABSENT[dtype]
    if plan.tasks:
        run(
            plan.kernel,
            dtype,
            plan.tasks,
            plan.work,
            plan.memory,
            (*plan.integers, state is not None, want_output, plan.size == 0 and past_cache(output)),
            (plan.sequences.table, a_read, b_read, flat(state, dtype), output, last, starts),
            size=plan.size,
        )
    return output, last, starts
