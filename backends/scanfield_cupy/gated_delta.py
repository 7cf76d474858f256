"""The gated delta rule on CuPy arrays; through it linear attention, SSD, the delta rules and the rest of the family."""

from __future__ import annotations

from typing import Any, NamedTuple

import cupy

from scanfield.arrays import dtype_name
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
    saved_states,
    sequences_of,
    shared_memory,
    steps,
)
from scanfield_cupy.modules import MOST_ROWS, STORED, launch

_THREADS = 128
# By the bytes of a number: how many rows of the state a thread holds, how many threads share columns, and how many
# columns those are. The first that holds all rows is taken. Backward, a thread holds several states at once.
_FORWARD = {
    4: ((4, 4, 4), (8, 8, 4), (8, 16, 4), (8, 32, 4)),
    8: ((4, 4, 2), (8, 8, 2), (8, 16, 2), (8, 32, 2)),
}
_BACKWARD = {
    4: ((4, 4, 4), (4, 16, 4), (4, 32, 4), (8, 32, 2)),
    8: ((4, 4, 2), (4, 16, 2), (4, 32, 2), (8, 32, 1)),
}
# Tokens that are brought at once forward, between two states in shared memory and between two saved ones, and those whose
# states the registers hold: as the kernels have them.
_TILE, _MIDDLE, _CHUNK, _HISTORY = 8, 8, 64, 2
# The parts of the gradients of query, key and key gates take no more memory than this: heads run in turns.
_PART_BYTES = 2**28


class GatedDelta:
    """Implementation of ``gdn2``."""

    def declines(self, call: Call, verb: Verb) -> str | None:
        """Dtypes that no kernel takes, cards that none is written for or that lack shared memory, and more than 256 rows."""
        reason = reason_against(call)
        if reason is not None:
            return reason
        query = call.arrays[0]
        K, size = query.shape[3], dtype(call.compute).itemsize
        if K > 256:
            return f"K = {K}, kernels hold 256 rows of a state"
        if verb in ("save", "backward"):
            need = _plan(call, backward=True).shared(size)
            have = shared_memory(query.device.id)
            if need > have:
                return f"backward for K = {K} needs {need} bytes of shared memory, this card gives a block {have}"
        return None

    def notes(self, call: Call) -> tuple[str, ...]:
        """What is copied before a kernel runs."""
        names = ("query", "key", "value", "log_decay", "erase", "write")
        return copies(dict(zip(names, call.arrays, strict=False)), _plan(call).stored)

    def forward(self, call: Call) -> tuple[Array, Array]:
        """Output and final state."""
        return _forward(call, keep=False)[:2]

    step = forward

    def save(self, call: Call) -> tuple[Array, Array, tuple[Array, ...]]:
        """Output, final state; the states at the chunks' starts and, where the rule erases, the updates."""
        output, final, starts, updates = _forward(call, keep=True)
        return output, final, (starts,) if updates is None else (starts, updates)

    def backward(
        self,
        call: Call,
        residuals: tuple[Array, ...],
        d_output: Array | None,
        d_final_state: Array | None,
        wanted: tuple[bool, ...],
    ) -> Grads:
        """The wanted gradients."""
        query, _, value, log_decay, erase, write, state, bounds = call.arrays
        batch, time, vheads, V = value.shape
        heads, K = query.shape[2:]
        plan = _plan(call, backward=True)
        asked = [want and x is not None for x, want in zip(call.arrays, wanted, strict=True)]
        number = dtype(call.compute)
        with query.device:
            if 0 in (batch, time, vheads, V, K, plan.sequences):
                return no_gradients(call, asked, number, d_final_state)
            starts, updates = (*residuals, None)[:2]
            d_output, d_final_state = (
                contiguous(d_output, call.compute),
                contiguous(d_final_state, call.compute),
            )
            inputs, on_device = _inputs(call, plan), bounds_of(bounds)
            d_value = cupy.empty(value.shape, number) if asked[2] else None
            d_write = cupy.empty(value.shape, number) if asked[5] else None
            d_state = cupy.empty(state.shape, number) if asked[6] else None
            whole = (batch, time, vheads, K)
            found = [cupy.empty(whole, number) if asked[i] else None for i in (0, 1, 3, 4)]
            each = (
                plan.column_blocks
                * batch
                * time
                * K
                * number.itemsize
                * max(1, sum(asked[i] for i in (0, 1, 3, 4)))
            )
            turn = max(1, min(vheads, _PART_BYTES // each))
            for head in range(0, vheads, turn):
                count = min(turn, vheads - head)
                shape = (plan.column_blocks, batch, time, count, K)
                parts = [None if x is None else cupy.empty(shape, number) for x in found]
                _run(
                    plan, "delta_backward", count,
                    (*inputs, starts, updates, d_output, d_final_state, on_device, *plan.sizes(head), *parts, d_value,
                     d_write, d_state, batch, count),
                )  # fmt: skip
                for x, part in zip(found, parts, strict=True):
                    if x is not None and part is not None:
                        x[:, :, head : head + count] = part.sum(axis=0)
            d_query, d_key, d_decay, d_erase = found
            return (
                shared_heads(d_query, heads),
                shared_heads(d_key, heads),
                d_value,
                shared_channels(d_decay, log_decay),
                shared_channels(d_erase, erase),
                shared_channels(d_write, write),
                d_state,
                None,
            )

    def summarise(self, call: Call) -> tuple[Array, Array]:
        """The transition, elementwise or a matrix, and the final state from zero."""
        query, key, value, log_decay, erase, _, _, bounds = call.arrays
        batch, time, vheads, _ = value.shape
        K = query.shape[3]
        with query.device:
            state = self.forward(call._replace(arrays=(*call.arrays[:6], None, bounds)))[1]
            number, count = dtype(call.compute), state.shape[0]
            if erase is None and log_decay is None:
                return cupy.ones((count, vheads, K, 1), number), state
            # The columns of a unit matrix beside no value come out as the transition's. Without erasure all columns are
            # alike but for their row: one of ones will do.
            nothing = cupy.broadcast_to(
                cupy.zeros((), value.dtype), (batch, time, vheads, 1 if erase is None else K)
            )
            if erase is None:
                unit = cupy.ones((count, vheads, K, 1), number)
            else:
                unit = cupy.zeros((count, vheads, K, K), number) + cupy.eye(K, dtype=number)
            arrays = (query, key, nothing, log_decay, erase, None, unit, bounds)
            return self.forward(call._replace(arrays=arrays))[1], state


def blocks(call: Call) -> int:
    """Blocks that walk side by side forward."""
    plan = _plan(call)
    return plan.column_blocks * plan.vheads * plan.sequences


class _Plan(NamedTuple):
    """How a call runs."""

    sequences: int
    time: int
    vheads: int
    group: int
    """Value heads that share a key."""
    K: int
    V: int
    stored: str
    part: int
    share: int
    cols: int
    backward: bool

    @property
    def columns(self) -> int:
        """Of the state, in a block."""
        return _THREADS // self.share * self.cols

    @property
    def column_blocks(self) -> int:
        """Blocks side by side for one head."""
        return -(-self.V // self.columns)

    def sizes(self, head: int) -> tuple[int, ...]:
        """The integers that kernels have in common; ``head`` is the launch's first."""
        return (self.sequences, self.time, self.vheads, self.group, self.K, self.V, self.column_blocks, head)

    def shared(self, size: int) -> int:
        """Bytes of shared memory, as the kernels lay it out."""
        rows = self.part * self.share
        if not self.backward:
            return size * _TILE * (4 * rows + 3 * self.columns + 1)
        numbers = _MIDDLE * (4 * rows + 3 * self.columns + 1)
        numbers += _CHUNK // _MIDDLE * self.part * self.cols * _THREADS
        return size * (numbers + _THREADS // 32 * _HISTORY * 4 * rows)


def _plan(call: Call, *, backward: bool = False) -> _Plan:
    query, _, value, *_ = call.arrays
    batch, time, vheads, V = value.shape
    heads, K = query.shape[2:]
    table = (_BACKWARD if backward else _FORWARD)[dtype(call.compute).itemsize]
    part, share, cols = next((x for x in table if x[0] * x[1] >= K), table[-1])
    stored = common_dtype(call.arrays[:6], call.compute)
    sequences = sequences_of(call.arrays[7], batch)
    return _Plan(sequences, time, vheads, vheads // max(1, heads), K, V, stored, part, share, cols, backward)


def _inputs(call: Call, plan: _Plan) -> tuple[Any, ...]:
    """The inputs as kernels take them: addresses, steps and widths, then the scale."""
    given: list[Any] = []
    for x in call.arrays[:6]:
        if x is None:
            given += [None, 0, 0, 0, 0, 0]
        else:
            read: Array = as_dtype(x, plan.stored)
            given += [read, *steps(read), x.shape[3]]
    scale, erase_vector, _ = call.options
    return (*given, dtype(call.compute).type(scale), int(erase_vector))


def _run(plan: _Plan, kernel: str, heads: int, arguments: tuple[Any, ...]) -> None:
    carry = 8 if plan.stored == "float64" else 4
    launch(
        "gated_delta.cu",
        {
            "STORED": STORED[plan.stored],
            "PART": str(plan.part),
            "SHARE": str(plan.share),
            "COLS": str(plan.cols),
            "BACKWARD": str(int(plan.backward)),
        },
        kernel,
        (plan.column_blocks * heads, min(plan.sequences, MOST_ROWS), 1),
        arguments,
        plan.shared(carry),
        _THREADS,
    )


def _forward(call: Call, keep: bool) -> tuple[Array, Array, Array | None, Array | None]:
    """Output, final state, and with ``keep`` the states at the chunks' starts and the updates, where the rule erases."""
    query, _, value, _, erase, _, state, bounds = call.arrays
    plan = _plan(call)
    batch, time, vheads, V = value.shape
    number = dtype(call.compute)
    with query.device:
        output = cupy.empty(value.shape, dtype(plan.stored))
        final = cupy.empty((plan.sequences, vheads, plan.K, V), number)
        count = saved_states(bounds, plan.sequences, time, _CHUNK) if keep else 0
        starts = cupy.empty((count, vheads, plan.K, V), number) if keep else None
        updates = cupy.empty(value.shape, number) if keep and erase is not None else None
        if 0 in (batch, time, vheads, V, plan.K, plan.sequences):
            output[...] = 0
            final[...] = 0 if state is None else state
        else:
            _run(
                plan, "delta_forward", vheads,
                (*_inputs(call, plan), contiguous(state, call.compute), bounds_of(bounds), *plan.sizes(0), output, final,
                 starts, updates),
            )  # fmt: skip
        return as_dtype(output, dtype_name(query.dtype)), final, starts, updates


def shared_heads(gradient: Array | None, heads: int) -> Array | None:
    """Summed over the value heads that share a key."""
    if gradient is None or gradient.shape[2] == heads:
        return gradient
    batch, time, vheads, K = gradient.shape
    return gradient.reshape((batch, time, heads, vheads // heads, K)).sum(axis=3)


def shared_channels(gradient: Array | None, gate: Array | None) -> Array | None:
    """Summed over the channels that share a gate."""
    if gradient is None or gate is None or gate.shape[3] == gradient.shape[3]:
        return gradient
    return gradient.sum(axis=3, keepdims=True)


def no_gradients(
    call: Call, asked: list[bool], number: Any, d_final_state: Array | None
) -> list[Array | None]:
    """The gradients of a call without elements."""
    grads = [
        cupy.zeros(x.shape, number) if ask and i != 7 else None
        for i, (x, ask) in enumerate(zip(call.arrays, asked, strict=True))
    ]
    if grads[6] is not None and call.arrays[0].shape[1] == 0 and d_final_state is not None:
        grads[6] = d_final_state.astype(number)
    return grads
