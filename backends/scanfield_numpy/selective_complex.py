"""The selective scan with complex A on NumPy arrays."""

from __future__ import annotations

from math import inf

import numpy

from scanfield.arrays import COMPLEX_OF
from scanfield.dispatch import Call, Grads, Verb
from scanfield_numpy import selective_complex_kernels as kernels
from scanfield_numpy.layout import (
    Array,
    Residuals,
    flat,
    flat_complex,
    lanes_of,
    reason_against,
    saved_states,
    sequences,
    stride,
)
from scanfield_numpy.selective import partial_sums
from scanfield_numpy.threads import run

# Tokens between two saved states: 16 make a chunk's rebuilt states fit in cache and the saved ones few.
_CHUNK = 16
# Backward runs in at most so many parts, whose sums are added up in their order, for any number of threads.
_PARTS = 8
# Multiplications and additions for a state's element, the exponential included.
_FORWARD_WORK, _BACKWARD_WORK = 48.0, 96.0


class SelectiveComplex:
    """Implementation of ``selective_scan`` for complex A: B, C and the state are complex too."""

    def declines(self, call: Call, verb: Verb) -> str | None:
        """Dtypes that no kernel takes."""
        return reason_against(call, 9)

    def forward(self, call: Call) -> tuple[Array, Array]:
        """Output and final state."""
        return _forward(call, 0)[:2]

    step = forward

    def save(self, call: Call) -> tuple[Array, Array, tuple[Array, ...]]:
        """Output, final state and the states at the chunks' starts."""
        output, last, starts, _ = _forward(call, _chunk(call))
        return output, last, (starts,)

    def residuals(self, call: Call) -> Residuals:
        """Shapes and dtypes of what ``save`` keeps."""
        u, _, A, _, _, _, _, _, _, bounds = call.arrays
        batch, time, channels = u.shape
        step, N = lanes_of(call.compute), A.shape[1]
        states = saved_states(batch, time, bounds, _chunk(call))
        return (((states, -(-channels // step), 2 * N, step), call.compute),)

    def backward(
        self,
        call: Call,
        residuals: tuple[Array, ...],
        d_output: Array | None,
        d_final_state: Array | None,
        wanted: tuple[bool, ...],
    ) -> Grads:
        """The wanted gradients."""
        u, _, A, B, C, _, _, _, _, bounds = call.arrays
        batch, time, channels = u.shape
        N = A.shape[1]
        dtype = call.compute
        wide = COMPLEX_OF[dtype]
        grads: list[Array | None] = [
            numpy.zeros(array.shape, array.dtype) if want and array is not None and i != 9 else None
            for i, (array, want) in enumerate(zip(call.arrays, wanted, strict=True))
        ]
        if 0 in (batch, channels, N):
            return grads
        chunk = _chunk(call)
        plan = sequences(batch, time, bounds, chunk)
        step = lanes_of(dtype)
        blocks = -(-channels // step)
        groups = B.shape[2] + C.shape[2]
        # The parts' sums of B's and C's gradients take no more memory than u.
        parts = max(1, min(_PARTS, blocks, channels // (2 * N * groups)))
        sums = {i: partial_sums(call.arrays[i], parts, plan.number, batch, wide) for i in (3, 4)}
        lanes = {
            i: numpy.zeros((plan.number, blocks, rows, step), dtype)
            for i, rows in ((2, 2 * N), (5, 1), (7, 1))
        }
        integers = (
            *_common(call, chunk), parts, plan.number, batch, d_output is not None,
            d_final_state is not None, *(grads[i] is not None for i in (0, 1, 6, 8)),
        )  # fmt: skip
        read = (*call.arrays[:8], *residuals, d_output, d_final_state)
        written = (
            grads[0], grads[1], lanes[2], sums[3], sums[4], lanes[5], grads[6], lanes[7], grads[8],
        )  # fmt: skip
        run(
            kernels.backward,
            dtype,
            plan.number * parts,
            _BACKWARD_WORK * batch * time * channels * N,
            kernels.backward_memory(N, -(-blocks // parts), chunk, step),
            integers,
            (plan.table, _limits(call), *(_flat(array, dtype) for array in (*read, *written))),
        )
        with numpy.errstate(all="ignore"):
            for i, partial in sums.items():
                if grads[i] is not None:
                    whole = partial.sum(axis=0)
                    same = whole.shape == call.arrays[i].shape
                    grads[i] = whole if same else whole.sum(axis=0, keepdims=True)
            for i, partial in lanes.items():
                if grads[i] is not None:
                    turned = partial.sum(axis=0).swapaxes(1, 2).reshape(blocks * step, -1)[:channels]
                    whole = numpy.ascontiguousarray(turned)
                    grads[i] = (whole.view(wide) if i == 2 else whole).reshape(call.arrays[i].shape)
        return grads

    def summarise(self, call: Call) -> tuple[Array, Array]:
        """exp(A sum s) and the final state from zero."""
        call = call._replace(arrays=(*call.arrays[:8], None, call.arrays[9]))
        _, state, _, sums = _forward(call, 0, want_output=False)
        if 0 in (*call.arrays[0].shape, state.size):
            return numpy.ones_like(state), state
        with numpy.errstate(all="ignore"):
            transition = numpy.exp(sums[:, :, None] * call.arrays[2])
        bounds = call.arrays[9]
        for i in sequences(call.arrays[0].shape[0], call.arrays[0].shape[1], bounds, 1).empty:
            transition[i] = 1
        return transition, state


def _flat(array: Array | None, dtype: str) -> Array:
    return (
        flat(array, dtype)
        if array is None or array.dtype.kind != "c"
        else flat_complex(array, COMPLEX_OF[dtype])
    )


def _chunk(call: Call) -> int:
    asked = call.options[3]
    return min(int(asked), _CHUNK) if asked else _CHUNK


def _limits(call: Call) -> Array:
    """Lowest and highest step, 1, and whether there are limits."""
    _, low, high, _ = call.options
    return numpy.array([low, high, 1, low > -inf or high < inf], call.compute)


def _common(call: Call, chunk: int) -> tuple[int, ...]:
    u, _, A, B, C, D, z, bias, _, _ = call.arrays
    return (
        u.shape[2], A.shape[1], u.shape[1], chunk, B.shape[2], 2 * stride(B, 0), 2 * stride(B, 1), C.shape[2],
        2 * stride(C, 0), 2 * stride(C, 1), D is not None, z is not None, bias is not None, call.options[0],
    )  # fmt: skip


def _forward(call: Call, chunk: int, *, want_output: bool = True) -> tuple[Array, Array, Array, Array]:
    """Output, final state, states at the chunks' starts, sums of the steps."""
    u, _, A, _, _, _, _, _, state, bounds = call.arrays
    batch, time, channels = u.shape
    N = A.shape[1]
    dtype = call.compute
    plan = sequences(batch, time, bounds, chunk or 1)
    step = lanes_of(dtype)
    blocks = -(-channels // step)
    output = numpy.empty(u.shape if want_output else (0,), dtype)
    last = numpy.empty((plan.number, channels, N), COMPLEX_OF[dtype])
    starts = numpy.empty((plan.states, blocks, 2 * N, step) if chunk else (0,), dtype)
    sums = numpy.empty((0,) if want_output else (plan.number, channels), dtype)
    if 0 in (batch, channels, N):
        output[...] = 0
        return output, last, starts, sums
    run(
        kernels.forward,
        dtype,
        plan.number * blocks,
        _FORWARD_WORK * batch * time * channels * N,
        kernels.forward_memory(N, step),
        (*_common(call, chunk), state is not None, want_output, not want_output),
        (
            plan.table,
            _limits(call),
            *(_flat(array, dtype) for array in call.arrays[:9]),
            output,
            _flat(last, dtype),
            starts,
            sums,
        ),
    )
    return output, last, starts, sums
