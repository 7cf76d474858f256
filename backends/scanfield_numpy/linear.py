"""The linear scan on NumPy arrays."""

from __future__ import annotations

import numpy

from scanfield.dispatch import Call, Grads, Verb
from scanfield_numpy import linear_kernels as kernels
from scanfield_numpy.layout import Array, flat, lanes_of, reason_against, sequences, stride
from scanfield_numpy.memory import fresh
from scanfield_numpy.threads import run

# Tokens between two saved states: a chunk's rebuilt states fit in cache.
_CHUNK = 32


class Linear:
    """Implementation of ``linear_scan``."""

    def declines(self, call: Call, verb: Verb) -> str | None:
        """Dtypes other than float32 and float64."""
        return reason_against(call, 3)

    def forward(self, call: Call) -> tuple[Array, Array]:
        """Output and final state."""
        return _forward(call, 0)[:2]

    step = forward

    def save(self, call: Call) -> tuple[Array, Array, tuple[Array, ...]]:
        """Output, final state and the states at the chunks' starts."""
        output, last, starts = _forward(call, _chunk(call))
        return output, last, (starts,)

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
        batch, time, width = _shape(call)
        dtype = call.compute
        chunk = _chunk(call)
        plan = sequences(batch, time, bounds, chunk)
        blocks = -(-width // (kernels.BLOCK * lanes_of(dtype)))
        sums = [
            _partial(array, blocks, plan.number, batch, dtype) if want else None
            for array, want in zip((a, b), wanted, strict=False)
        ]
        d_state = numpy.zeros(state.shape, dtype) if wanted[2] and state is not None else None
        if 0 not in (batch, width):
            integers = (
                *_common(call, chunk), batch, plan.number, d_output is not None, d_final_state is not None, wanted[0],
                wanted[1], d_state is not None,
            )  # fmt: skip
            arrays = (a, b, *residuals, d_output, d_final_state, *sums, d_state)
            run(
                kernels.backward,
                dtype,
                plan.number * blocks,
                4.0 * batch * time * width,
                kernels.BLOCK * lanes_of(dtype) * (2 + chunk),
                integers,
                (plan.table, *(flat(array, dtype) for array in arrays)),
            )
        with numpy.errstate(all="ignore"):
            d_a, d_b = (
                None if partial is None else _summed(partial, array)
                for partial, array in zip(sums, (a, b), strict=True)
            )
        return d_a, d_b, d_state, None

    def summarise(self, call: Call) -> tuple[Array, Array]:
        """The product of the coefficients, and the final state from zero."""
        a, b, _, bounds = call.arrays
        call = call._replace(arrays=(a, b, None, bounds))
        state = _forward(call, 0, want_output=False)[1]
        nothing = numpy.zeros((1, 1, 1), call.compute)
        call = call._replace(arrays=(a, nothing, numpy.ones(state.shape, call.compute), bounds))
        return _forward(call, 0, want_output=False, shape=_shape_of(a, b))[1], state


def _shape_of(a: Array, b: Array) -> tuple[int, ...]:
    return tuple(m if n == 1 else n for n, m in zip(a.shape, b.shape, strict=True))


def _shape(call: Call) -> tuple[int, ...]:
    """Batch, time and lanes."""
    return _shape_of(*call.arrays[:2])


def _chunk(call: Call) -> int:
    asked = call.options[0]
    return min(int(asked), _CHUNK) if asked else _CHUNK


def _partial(array: Array, blocks: int, count: int, batch: int, dtype: str) -> Array:
    """Zeros for the tasks' sums of a gradient: (blocks if one number serves all lanes, rows, time or 1, lanes or 1)."""
    rows = count if array.shape[1] == 1 else batch
    return numpy.zeros((blocks if array.shape[2] == 1 else 1, rows, *array.shape[1:]), dtype)


def _summed(partial: Array, array: Array) -> Array:
    """The gradient of an array from the tasks' sums, added up in their order."""
    whole = partial[0] if partial.shape[0] == 1 else partial.sum(axis=0)
    return whole if whole.shape == array.shape else whole.sum(axis=0, keepdims=True)


def _common(call: Call, chunk: int) -> tuple[int, ...]:
    a, b, _, _ = call.arrays
    return _strides(a, b, _shape(call), chunk)


def _strides(a: Array, b: Array, shape: tuple[int, ...], chunk: int) -> tuple[int, ...]:
    return shape[2], shape[1], chunk, *(stride(x, axis) for x in (a, b) for axis in range(3))


def _forward(
    call: Call, chunk: int, *, want_output: bool = True, shape: tuple[int, ...] | None = None
) -> tuple[Array, Array, Array]:
    """Output, final state, states at the chunks' starts."""
    a, b, state, bounds = call.arrays
    shape = _shape(call) if shape is None else shape
    batch, time, width = shape
    dtype = call.compute
    plan = sequences(batch, time, bounds, chunk or 1)
    output = fresh(shape if want_output else (0,), dtype)
    last = fresh((plan.number, width), dtype)
    starts = fresh((plan.states, width) if chunk else (0,), dtype)
    if 0 in (batch, width):
        return output, last, starts
    lanes = kernels.BLOCK * lanes_of(dtype)
    run(
        kernels.forward,
        dtype,
        plan.number * -(-width // lanes),
        2.0 * batch * time * width,
        lanes,
        (*_strides(a, b, shape, chunk), state is not None, want_output),
        (plan.table, *(flat(array, dtype) for array in (a, b, state)), output, last, starts),
    )
    return output, last, starts
