"""The gated delta rule on NumPy arrays; through it linear attention, SSD, the delta rules and the rest of the family."""

from __future__ import annotations

import numpy

from scanfield.dispatch import Call, Grads, Verb
from scanfield_numpy import gated_delta_kernels as kernels
from scanfield_numpy.layout import Array, flat, lanes_of, reason_against, sequences, width
from scanfield_numpy.threads import run

# Tokens between two saved states: 16 make a chunk's rebuilt states fit in cache and the saved ones few.
_CHUNK = 16


class GatedDelta:
    """Implementation of ``gdn2``."""

    def declines(self, call: Call, verb: Verb) -> str | None:
        """Dtypes other than float32 and float64."""
        return reason_against(call, 7)

    def forward(self, call: Call) -> tuple[Array, Array]:
        """Output and final state."""
        return _forward(call, 0)[:2]

    step = forward

    def save(self, call: Call) -> tuple[Array, Array, tuple[Array, ...]]:
        """Output, final state; the states at the chunks' starts and, where the rule erases, the updates."""
        output, last, starts, updates = _forward(call, _chunk(call))
        return output, last, (starts, updates)

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
        grads: list[Array | None] = [
            numpy.zeros(array.shape, call.compute) if want and array is not None and i != 7 else None
            for i, (array, want) in enumerate(zip(call.arrays, wanted, strict=True))
        ]
        batch, time, vheads, V = value.shape
        heads, K = query.shape[2:]
        if 0 in (batch, vheads, K, V):
            return grads
        chunk = _chunk(call)
        plan = sequences(batch, time, bounds, chunk)
        integers = (
            heads, vheads // heads, K, V, time, width(log_decay), width(erase), width(write), call.options[1], chunk,
            d_output is not None, d_final_state is not None, *(grad is not None for grad in grads[:7]),
        )  # fmt: skip
        read = (*call.arrays[:6], *residuals, d_output, d_final_state)
        run(
            kernels.backward,
            call.compute,
            plan.number * heads,
            9.0 * batch * time * vheads * K * V,
            kernels.backward_memory(K, V, chunk, lanes_of(call.compute)),
            integers,
            (plan.table, _scale(call), *(flat(array, call.compute) for array in (*read, *grads[:7]))),
        )
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


def _scale(call: Call) -> Array:
    """The factor of the output, and 1."""
    return numpy.array([call.options[0], 1], call.compute)


def _chunk(call: Call) -> int:
    asked = call.options[2]
    return min(int(asked), _CHUNK) if asked else _CHUNK


def _forward(
    call: Call, chunk: int, *, want_output: bool = True, columns: int | None = None
) -> tuple[Array, Array, Array, Array]:
    """Output, final state, states at the chunks' starts, updates. With ``columns`` the value is zero, and so wide."""
    query, key, value, log_decay, erase, write, state, bounds = call.arrays
    batch, time, vheads, V = value.shape
    heads, K = query.shape[2:]
    V = V if columns is None else columns
    dtype = call.compute
    plan = sequences(batch, time, bounds, chunk or 1)
    output = numpy.empty((batch, time, vheads, V) if want_output else (0,), dtype)
    last = numpy.empty((plan.number, vheads, K, V), dtype)
    starts = numpy.empty((plan.states, vheads, K, V) if chunk else (0,), dtype)
    keeps = bool(chunk) and erase is not None
    updates = numpy.empty((batch, time, vheads, V) if keeps else (0,), dtype)
    if 0 in (batch, vheads, K, V):
        output[...] = 0
        return output, last, starts, updates
    integers = (
        heads, vheads // heads, K, V, time, width(log_decay), width(erase), 0 if columns else width(write),
        call.options[1], chunk, state is not None, columns is None, keeps, want_output,
    )  # fmt: skip
    lanes = lanes_of(dtype)
    read = (query, key, value, log_decay, erase, write, state)
    run(
        kernels.forward,
        dtype,
        plan.number * vheads * -(-V // (4 * lanes)),
        4.0 * batch * time * vheads * K * V,
        kernels.forward_memory(K, lanes),
        integers,
        (plan.table, _scale(call), *(flat(array, dtype) for array in read), output, last, starts, updates),
    )
    return output, last, starts, updates
