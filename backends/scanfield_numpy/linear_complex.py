"""The linear scan of complex numbers on NumPy arrays."""

from __future__ import annotations

import numpy

from scanfield.arrays import COMPLEX_OF
from scanfield.dispatch import Call, Grads, Verb
from scanfield_numpy import linear_complex_kernels as kernels
from scanfield_numpy.layout import (
    Array,
    Residuals,
    flat_complex,
    lanes_of,
    reason_against,
    saved_states,
    sequences,
    stride,
)
from scanfield_numpy.threads import run

# Tokens between two saved states: a chunk's rebuilt states fit in cache.
_CHUNK = 32


class LinearComplex:
    """Implementation of ``linear_scan`` for complex64 and complex128: all arrays are complex."""

    def declines(self, call: Call, verb: Verb) -> str | None:
        """Dtypes that no kernel takes."""
        return reason_against(call, 3)

    def forward(self, call: Call) -> tuple[Array, Array]:
        """Output and final state."""
        return _forward(call, 0, _shape(call))[:2]

    step = forward

    def save(self, call: Call) -> tuple[Array, Array, tuple[Array, ...]]:
        """Output, final state and the states at the chunks' starts."""
        output, last, starts = _forward(call, _chunk(call), _shape(call))
        return output, last, (starts,)

    def residuals(self, call: Call) -> Residuals:
        """Shapes and dtypes of what ``save`` keeps."""
        batch, time, width = _shape(call)
        states = saved_states(batch, time, call.arrays[3], _chunk(call))
        return (((states, width), COMPLEX_OF[call.compute]),)

    def backward(
        self,
        call: Call,
        residuals: tuple[Array, ...],
        d_output: Array | None,
        d_final_state: Array | None,
        wanted: tuple[bool, ...],
    ) -> Grads:
        """The wanted gradients, dL/dRe + i dL/dIm."""
        a, b, state, bounds = call.arrays
        batch, time, width = _shape(call)
        dtype = COMPLEX_OF[call.compute]
        chunk = _chunk(call)
        plan = sequences(batch, time, bounds, chunk)
        block = kernels.BLOCK * lanes_of(call.compute)
        blocks = -(-2 * width // block)
        sums = [
            _partial(array, blocks, plan.number, batch, dtype) if want else None
            for array, want in zip((a, b), wanted, strict=False)
        ]
        d_state = numpy.zeros(state.shape, dtype) if wanted[2] and state is not None else None
        if 0 not in (batch, width):
            integers = (
                *_sizes(a, b, (batch, time, width), chunk), batch, plan.number, d_output is not None,
                d_final_state is not None, wanted[0], wanted[1], d_state is not None,
            )  # fmt: skip
            arrays = (a, b, *residuals, d_output, d_final_state, *sums, d_state)
            run(
                kernels.backward,
                call.compute,
                plan.number * blocks,
                16.0 * batch * time * width,
                block * (1 + chunk),
                integers,
                (plan.table, *(flat_complex(array, dtype) for array in arrays)),
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
        shape = _shape(call)
        state = _forward(call._replace(arrays=(a, b, None, bounds)), 0, shape, want_output=False)[1]
        nothing, one = numpy.zeros((1, 1, 1), state.dtype), numpy.ones_like(state)
        call = call._replace(arrays=(a, nothing, one, bounds))
        return _forward(call, 0, shape, want_output=False)[1], state


def _shape(call: Call) -> tuple[int, int, int]:
    """Batch, time and lanes."""
    batch, time, width = (
        m if n == 1 else n for n, m in zip(call.arrays[0].shape, call.arrays[1].shape, strict=True)
    )
    return batch, time, width


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


def _sizes(a: Array, b: Array, shape: tuple[int, int, int], chunk: int) -> tuple[int, ...]:
    """Width, time, chunk and strides, in real numbers."""
    strides = (2 * stride(x, axis) for x in (a, b) for axis in range(3))
    return 2 * shape[2], shape[1], chunk, *strides


def _forward(
    call: Call, chunk: int, shape: tuple[int, int, int], *, want_output: bool = True
) -> tuple[Array, Array, Array]:
    """Output, final state, states at the chunks' starts."""
    a, b, state, bounds = call.arrays
    batch, time, width = shape
    dtype = COMPLEX_OF[call.compute]
    plan = sequences(batch, time, bounds, chunk or 1)
    output = numpy.empty(shape if want_output else (0,), dtype)
    last = numpy.empty((plan.number, width), dtype)
    starts = numpy.empty((plan.states, width) if chunk else (0,), dtype)
    if 0 in (batch, width):
        return output, last, starts
    block = kernels.BLOCK * lanes_of(call.compute)
    arrays = (a, b, state, output, last, starts)
    run(
        kernels.forward,
        call.compute,
        plan.number * -(-2 * width // block),
        8.0 * batch * time * width,
        block,
        (*_sizes(a, b, shape, chunk), state is not None, want_output),
        (plan.table, *(flat_complex(array, dtype) for array in arrays)),
    )
    return output, last, starts
