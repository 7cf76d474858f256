"""Half precision in and out: a block of time at a time is widened, scanned from the carried state, and rounded.

A block is as many rows and tokens as fit the second-level cache when widened, so no sequence is ever there twice.
Backward goes through the blocks from last to first, from the states that ``save`` kept at their starts.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy

from scanfield.arrays import COMPLEX_OF
from scanfield.dispatch import Call, Grads, Implementation, Input, Verb, operation_of
from scanfield_numpy.layout import Residuals
from scanfield_numpy.widening import is_half, put, widened

Array = Any

# The widened arrays of a block: a second-level cache holds them, or most of them. With half as much, what a block costs
# whatever its size shows (a third more time on a machine with 1 MiB of that cache); twice as much gains nothing.
_BLOCK_BYTES = 2**21
# Tokens of a block are a multiple of this, and so of the tokens between two states that the kernels save.
_STEP = 32


class Verbs(Implementation, Protocol):
    """An implementation with every verb."""

    def save(self, call: Call) -> tuple[Array, Array, tuple[Array, ...]]:
        """Output, final state and residuals."""

    def residuals(self, call: Call) -> Residuals:
        """Shapes and dtypes of what ``save`` keeps."""

    def backward(
        self,
        call: Call,
        residuals: tuple[Array, ...],
        d_output: Array | None,
        d_final_state: Array | None,
        wanted: tuple[bool, ...],
    ) -> Grads:
        """The wanted gradients."""

    def step(self, call: Call) -> tuple[Array, Array]:
        """Output and state after one token."""

    def summarise(self, call: Call) -> tuple[Array, Array]:
        """Transition and final state from zero."""


class _Block(NamedTuple):
    """Rows of the batch, tokens, and the sequences (rows of the states) that have tokens here."""

    rows: slice
    tokens: slice
    states: slice
    bounds: tuple[int, ...] | None


class _Plan(NamedTuple):
    """How a call is cut."""

    inputs: tuple[Input, ...]
    main: int
    state: int
    """Where the state stands in ``Call.arrays``."""
    batch: int
    time: int
    sequences: int
    blocks: tuple[_Block, ...]
    """In the order of time."""

    def varies(self, array: Array) -> bool:
        """Whether a sequence array has a time axis of its own."""
        return bool(array.shape[1] == self.time)

    def place(self, array: Array, block: _Block) -> tuple[slice, slice]:
        """A block's part of a sequence array, or of its gradient."""
        whole = slice(None)
        return (
            block.rows if array.shape[0] == self.batch else whole,
            block.tokens if self.varies(array) else whole,
        )


class Half:
    """Implementation for calls with half-precision arrays, made of one for wide arrays."""

    def __init__(self, wide: Verbs) -> None:
        self._wide = wide

    def declines(self, call: Call, verb: Verb) -> str | None:
        """What the wide implementation says."""
        return self._wide.declines(call, verb)

    def forward(self, call: Call) -> tuple[Array, Array]:
        """Output and final state."""
        return self._run(call, keep=False)[:2]

    step = forward

    def save(self, call: Call) -> tuple[Array, Array, tuple[Array, ...]]:
        """Output, final state and the states at the blocks' starts."""
        return self._run(call, keep=True)

    def residuals(self, call: Call) -> Residuals:
        """Shapes and dtypes of what ``save`` keeps."""
        call = call._replace(compute="float64") if _loses_digits(call) else call
        size = _measure(call)
        if size.bounds is None:
            states = size.batch * -(-max(size.time, 1) // size.tokens)
        else:
            states = sum(block.states.stop - block.states.start for block in _blocks(size))
        dtype = COMPLEX_OF[call.compute] if size.complex_state else call.compute
        return (((states, *size.state_shape), dtype),)

    def _run(self, call: Call, *, keep: bool) -> tuple[Array, Array, tuple[Array, ...]]:
        carry = call.compute
        call = _accurate(call)
        plan = _plan(call)
        output: Array = None
        starts: Array = None
        kept = 0
        given = last = call.arrays[plan.state]
        for block in plan.blocks:
            before = None if last is None else last[block.states]
            y, after = self._wide.forward(_part(call, plan, block, before))
            if keep:
                if starts is None:
                    states = sum(each.states.stop - each.states.start for each in plan.blocks)
                    starts = numpy.empty((states, *after.shape[1:]), after.dtype)
                starts[kept : kept + len(after)] = 0 if before is None else before
                kept += len(after)
            if output is None:
                main = call.arrays[plan.main]
                kind = main.dtype if is_half(main) else y.dtype
                output = numpy.empty((plan.batch, plan.time, *y.shape[2:]), kind)
                if after.shape[0] == plan.sequences:
                    last = after  # a token's state may be large: no copy
                elif given is None:
                    last = numpy.zeros((plan.sequences, *after.shape[1:]), after.dtype)
                else:
                    last = numpy.array(given)
            if last is not after:
                last[block.states] = after
            put(output[block.rows, block.tokens], y)
        return output, _narrowed(last, call.compute, carry), (starts,) if keep else ()

    def backward(
        self,
        call: Call,
        residuals: tuple[Array, ...],
        d_output: Array | None,
        d_final_state: Array | None,
        wanted: tuple[bool, ...],
    ) -> Grads:
        """The wanted gradients: those of half arrays are rounded block by block."""
        carry = call.compute
        call = _accurate(call)
        plan = _plan(call)
        grads: list[Array | None] = [
            numpy.zeros(array.shape, _gradient_dtype(call, plan, i)) if want and array is not None else None
            for i, (array, want) in enumerate(zip(_without_index(call, plan), wanted, strict=True))
        ]
        (starts,) = residuals
        d_state = numpy.zeros((plan.sequences, *starts.shape[1:]), starts.dtype)
        if d_final_state is not None:
            d_state[...] = d_final_state
        wants = tuple(want or i == plan.state for i, want in enumerate(wanted))
        last = len(starts)
        for block in reversed(plan.blocks):
            first = last - (block.states.stop - block.states.start)
            part = _part(call, plan, block, starts[first:last])
            last = first
            _, _, kept = self._wide.save(part)
            d_y = None if d_output is None else d_output[block.rows, block.tokens]
            d_y = None if d_y is None else widened(d_y, call.compute)
            found = self._wide.backward(part, kept, d_y, d_state[block.states], wants)
            with numpy.errstate(all="ignore"):
                for i, (entry, grad) in enumerate(zip(plan.inputs, grads, strict=True)):
                    if i == plan.state or grad is None:
                        continue
                    if entry.role == "sequence":
                        place = plan.place(call.arrays[i], block)
                        if plan.varies(grad):
                            put(grad[place], found[i])
                        else:
                            grad[place] += found[i]
                    else:
                        grad += found[i]
            d_state[block.states] = found[plan.state]
        if grads[plan.state] is not None:
            grads[plan.state] = _narrowed(d_state, call.compute, carry)
        return grads

    def summarise(self, call: Call) -> tuple[Array, Array]:
        """The blocks' maps, one after the other."""
        carry = call.compute
        call = _accurate(call)
        plan = _plan(call)
        diagonal = operation_of(call).diagonal(call)
        transition: Array = None
        state: Array = None
        for block in plan.blocks:
            M, N = self._wide.summarise(_part(call, plan, block, None))
            if transition is None:
                state = numpy.zeros((plan.sequences, *N.shape[1:]), N.dtype)
                one = 1 if diagonal else numpy.eye(M.shape[-1], dtype=M.dtype)
                transition = numpy.zeros((plan.sequences, *M.shape[1:]), M.dtype) + one
            rows = block.states
            with numpy.errstate(all="ignore"):
                if diagonal:
                    before = state[rows]
                    # A product that overflowed meets a state that is exactly 0: nothing came in, nothing goes out.
                    nothing = (before == 0) & ~numpy.isfinite(M)
                    state[rows] = numpy.where(nothing, 0, M * before) + N
                    transition[rows] *= M
                else:
                    state[rows] = M @ state[rows] + N
                    transition[rows] = M @ transition[rows]
        return _narrowed(transition, call.compute, carry), _narrowed(state, call.compute, carry)


def _loses_digits(call: Call) -> bool:
    operation = operation_of(call)
    return (
        call.compute == "float32"
        and "blocked" in operation.generic
        and operation.choose(call) == "generic.blocked"
    )


def _accurate(call: Call) -> Call:
    """The call in float64 where generic code takes the form that loses fewest digits: long series of few lanes.

    Half precision can hold the sum of very many small numbers, but a float32 carry loses its third digit on the way.
    """
    if not _loses_digits(call):
        return call
    arrays = (
        array.astype("float64")
        if getattr(array, "ndim", 0) == 2
        else array  # the state: sequences have three axes
        for array in call.arrays
    )
    return call._replace(arrays=tuple(arrays), compute="float64")


def _narrowed(array: Array, computed: str, carry: str) -> Array:
    if computed == carry:
        return array
    with numpy.errstate(all="ignore"):
        return array.astype(carry)


def _without_index(call: Call, plan: _Plan) -> list[Array | None]:
    return [
        None if entry.role == "index" else array
        for entry, array in zip(plan.inputs, call.arrays, strict=True)
    ]


def _gradient_dtype(call: Call, plan: _Plan, i: int) -> Any:
    """Half for a half array, unless its gradient is yet to be summed: over tokens here, or by who made the call."""
    array = call.arrays[i]
    if not is_half(array):
        return array.dtype
    repeats = any(step == 0 and size > 1 for step, size in zip(array.strides, array.shape, strict=True))
    twice = any(
        j != i and other is not None and _address(other) == _address(array)
        for j, other in enumerate(_without_index(call, plan))
    )
    return call.compute if repeats or twice or not plan.varies(array) else array.dtype


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def _part(call: Call, plan: _Plan, block: _Block, state: Array | None) -> Call:
    """One block as a call of its own, in wide arrays."""
    arrays: list[Any] = []
    for entry, array in zip(plan.inputs, call.arrays, strict=True):
        if entry.role == "index":
            arrays.append(block.bounds)
        elif entry.role == "state":
            arrays.append(state)
        elif entry.role == "sequence" and array is not None:
            arrays.append(widened(array[plan.place(array, block)], call.compute))
        else:
            arrays.append(array)
    return call._replace(arrays=tuple(arrays))


# ---------------------------------------------------------------------------------------------------------------------
# where to cut


class _Size(NamedTuple):
    """What the shapes of a call say about its cut. A compiler's sizes, which are no integers, will do."""

    batch: int
    time: int
    rows: int
    """Rows and tokens of a block."""
    tokens: int
    bounds: tuple[int, ...] | None
    state_shape: tuple[int, ...]
    """Of one row."""
    complex_state: bool


def _measure(call: Call) -> _Size:
    operation = operation_of(call)
    roles = [entry.role for entry in operation.inputs]
    bounds = call.arrays[roles.index("index")]
    dims: dict[str, int] = {"batch": 1, "time": 1}
    for entry, array in zip(operation.inputs, call.arrays, strict=True):
        if array is not None and entry.role != "index":
            dims |= {axis: n for axis, n in zip(entry.axes, array.shape, strict=True) if n != 1}
    batch, time = dims["batch"], dims["time"]
    state = roles.index("state")
    moving = [
        array
        for role, array in zip(roles, call.arrays, strict=True)
        if role == "sequence" and array is not None and array.shape[1] == time
    ]
    widths = [prod(array.shape[2:]) for array in moving]
    number = numpy.dtype(call.compute).itemsize
    if any(array.dtype.kind == "c" for array in call.arrays if hasattr(array, "dtype")):
        number *= 2
    token = number * (sum(widths) + max(widths))  # the output is as wide as the widest, or less
    state_shape = tuple(dims.get(axis, 1) for axis in operation.inputs[state].axes[1:])
    held = number * prod(state_shape)
    rows, tokens = _sizes(batch, max(token, 1), held)
    if any(array.shape[0] != batch for array in moving):
        rows = batch  # a gradient for all rows is summed before it is rounded
    complex_state = any(
        array is not None and role != "index" and array.dtype.kind == "c"
        for role, array in zip(roles, call.arrays, strict=True)
    )
    return _Size(batch, time, max(rows, 1), tokens, bounds, state_shape, complex_state)


def _plan(call: Call) -> _Plan:
    operation, size = operation_of(call), _measure(call)
    return _Plan(
        operation.inputs,
        operation.main_index,
        [entry.role for entry in operation.inputs].index("state"),
        size.batch,
        size.time,
        size.batch if size.bounds is None else len(size.bounds) - 1,
        tuple(_blocks(size)),
    )


def _sizes(batch: int, token: int, held: int) -> tuple[int, int]:
    """Rows and tokens of a block, from the bytes of a row's token and of its state.

    A block is at least twice as large as the states kept for it.
    """
    least = -(-max(_STEP, 2 * held // token) // _STEP) * _STEP
    rows = max(1, min(batch, _BLOCK_BYTES // (token * least)))
    return rows, max(least, _BLOCK_BYTES // (token * rows) // _STEP * _STEP)


def _blocks(size: _Size) -> Iterator[_Block]:
    batch, time, rows, tokens, bounds = size[:5]
    for t0 in range(0, max(time, 1), tokens):
        t1 = min(t0 + tokens, time)
        if bounds is not None:
            # Empty sequences at either end belong to the first and the last block.
            first = bisect_right(bounds, t0) - 1 if t0 else 0
            last = bisect_left(bounds, t1) if t1 < time else len(bounds) - 1
            inside = tuple(min(max(bound, t0), t1) - t0 for bound in bounds[first : last + 1])
            yield _Block(slice(None), slice(t0, t1), slice(first, last), inside)
            continue
        for r0 in range(0, max(batch, 1), rows):
            part = slice(r0, min(r0 + rows, batch))
            yield _Block(part, slice(t0, t1), part, None)
