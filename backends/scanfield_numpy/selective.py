"""The selective scan on NumPy arrays."""

from __future__ import annotations

from math import inf, isfinite, log

import numpy

from scanfield.dispatch import Call, Grads, Verb
from scanfield_numpy import selective_backward
from scanfield_numpy import selective_kernels as kernels
from scanfield_numpy.launching import OUTPUT, STATE, Launch
from scanfield_numpy.layout import (
    ABSENT,
    Array,
    Residuals,
    flat,
    lanes_of,
    reason_against,
    rows,
    saved_states,
    sequences,
)
from scanfield_numpy.memory import cleared, fresh, past_cache
from scanfield_numpy.threads import run

# Tokens between two saved states: a chunk's rebuilt states and decays fit in the second cache, and the saved are few.
_CHUNK, _ROWS = 32, 2048
# Backward runs in at most so many parts, whose sums are added up in their order, for any number of threads.
_PARTS = 8
# The arrays whose gradients the kernel writes as they are: u, delta, z and the state. Others are sums.
_WHOLE = (0, 1, 6, 8)
_A = 2
# Multiplications and additions for a state's element, the exponential included.
_FORWARD_WORK, _BACKWARD_WORK = 16.0, 32.0


class Selective:
    """Implementation of ``selective_scan``."""

    def declines(self, call: Call, verb: Verb) -> str | None:
        """Dtypes other than float32 and float64."""
        return reason_against(call, 9)

    def forward(self, call: Call) -> tuple[Array, Array]:
        """Output and final state."""
        return _forward(call, 0)[:2]

    step = forward

    def launch(self, call: Call) -> Launch | None:
        """What a call of this kind gives its kernel; None if arrays are copied for it."""
        u, _, A, _, _, _, _, _, state, bounds = call.arrays
        batch, time, channels = u.shape
        N, dtype = A.shape[1], call.compute
        if bounds is not None or 0 in (batch, time, channels, N) or flat(A, dtype) is not A:
            return None
        given, common = _common(call, 0)
        lying = (*given, flat(state, dtype))
        pairs = enumerate(zip(call.arrays, lying, strict=False))
        if any(x is not y for i, (x, y) in pairs if x is not None and i != _A):
            return None
        places = [array if call.arrays[i] is None else i for i, array in enumerate(lying)]
        step = lanes_of(dtype)
        blocks = -(-channels // step)
        return Launch(
            kernels.forward,
            dtype,
            batch * blocks,
            _FORWARD_WORK * batch * time * channels * N,
            kernels.forward_memory(N, step),
            (*common, state is not None, True, False),
            (
                sequences(batch, time, None, 1).table,
                _limits(call),
                *places,
                OUTPUT,
                STATE,
                ABSENT[dtype],
                ABSENT[dtype],
            ),
            u.shape,
            (batch, channels, N),
            derived=(_A, _powers_to),
        )

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
        return (((states, -(-channels // step), N, step), call.compute),)

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
        asked = [want and x is not None for x, want in zip(call.arrays, wanted, strict=True)]
        asked[9] = False
        if 0 in (batch, channels, N):
            return [
                numpy.zeros(x.shape, dtype) if want else None
                for x, want in zip(call.arrays, asked, strict=True)
            ]
        grads: list[Array | None] = [
            fresh(x.shape, dtype) if want and i in _WHOLE else None
            for i, (x, want) in enumerate(zip(call.arrays, asked, strict=True))
        ]
        chunk = _chunk(call)
        plan = sequences(batch, time, bounds, chunk)
        step = lanes_of(dtype)
        blocks = -(-channels // step)
        groups = B.shape[2] + C.shape[2]
        # The parts' sums of B's and C's gradients take no more memory than u.
        parts = max(1, min(_PARTS, blocks, channels // (N * groups)))
        sums = {i: partial_sums(call.arrays[i], parts, plan.number, batch, dtype) for i in (3, 4) if asked[i]}
        lanes = {
            i: cleared((plan.number, blocks, rows, step), dtype)
            for i, rows in ((2, N), (5, 1), (7, 1))  # computed in any case
        }
        cotangent, d_steps = rows(d_output, dtype, repeated=False)
        wide = [grads[i] for i in (0, 1, 6) if grads[i] is not None]
        # If all that is read and written once does not fit into the cache, no gradient would be found there later.
        moved = sum(
            x.nbytes
            for x in (u, call.arrays[1], call.arrays[6], d_output, *residuals, *wide)
            if x is not None
        )
        past = channels % step == 0 and all(past_cache(x, moved) for x in wide)
        given, common = _common(call, chunk)
        each = (x.shape[2] * N if x.shape[1] > 1 else 0 for x in (B, C))
        integers = (
            *common, parts, plan.number, batch, *d_steps[:2], *each, d_output is not None,
            d_final_state is not None, *(asked[i] for i in (0, 1, 6, 8, 2, 3, 4)), past,
        )  # fmt: skip
        arrays = (
            d_final_state, grads[0], grads[1], lanes[2], sums.get(3), sums.get(4), lanes[5], grads[6], lanes[7], grads[8],
        )  # fmt: skip
        run(
            selective_backward.backward,
            dtype,
            plan.number * parts,
            _BACKWARD_WORK * batch * time * channels * N,
            selective_backward.backward_memory(N, -(-blocks // parts), chunk, step),
            integers,
            (
                plan.table,
                _limits(call),
                *given,
                *(flat(array, dtype) for array in residuals),
                cotangent,
                *(flat(array, dtype) for array in arrays),
            ),
        )
        with numpy.errstate(all="ignore"):
            for i, partial in sums.items():
                whole = partial.sum(axis=0)
                same = whole.shape == call.arrays[i].shape
                grads[i] = whole if same else whole.sum(axis=0, keepdims=True)
            for i, partial in lanes.items():
                if asked[i]:
                    turned = partial.sum(axis=0).swapaxes(1, 2).reshape(blocks * step, -1)[:channels]
                    grads[i] = numpy.ascontiguousarray(turned).reshape(call.arrays[i].shape)
        return grads

    def summarise(self, call: Call) -> tuple[Array, Array]:
        """exp(A sum s) and the final state from zero."""
        call = call._replace(arrays=(*call.arrays[:8], None, call.arrays[9]))
        _, state, _, sums = _forward(call, 0, want_output=False)
        if 0 in (*call.arrays[0].shape, state.size):
            return numpy.ones(state.shape, call.compute), state
        with numpy.errstate(all="ignore"):
            transition = numpy.exp(sums[:, :, None] * call.arrays[2])
        bounds = call.arrays[9]
        for i in sequences(call.arrays[0].shape[0], call.arrays[0].shape[1], bounds, 1).empty:
            transition[i] = 1
        return transition, state


def partial_sums(array: Array, parts: int, count: int, batch: int, dtype: str) -> Array:
    """Zeros for the parts' sums of a gradient: with a time axis for each row of the batch, else for each sequence."""
    rows = count if array.shape[1] == 1 else batch
    return cleared((parts, rows, *array.shape[1:]), dtype)


def _chunk(call: Call) -> int:
    """Tokens between two saved states."""
    asked = call.options[3]
    most: int = max(1, min(_CHUNK, _ROWS // max(1, call.arrays[2].shape[1])))
    return min(int(asked), most) if asked else most


def _limits(call: Call) -> Array:
    """Lowest and highest step, 1, whether there are limits, and log(2)."""
    _, low, high, _ = call.options
    with numpy.errstate(all="ignore"):
        return numpy.array([low, high, 1, low > -inf or high < inf, log(2)], call.compute)


def _powers(A: Array) -> Array:
    """A log2(e); a finite number stays finite."""
    with numpy.errstate(all="ignore"):
        scaled = A * A.dtype.type(1 / log(2))
    most = numpy.finfo(A.dtype).max
    return numpy.where(numpy.isfinite(A), numpy.clip(scaled, -most, most), A)


def _powers_to(A: Array, scaled: Array) -> None:
    """``_powers``, written to an array."""
    with numpy.errstate(all="ignore"):
        numpy.multiply(A, A.dtype.type(1 / log(2)), out=scaled)
        finite = isfinite(numpy.add.reduce(scaled, axis=None))
    if not finite:
        scaled[...] = _powers(A)


def _common(call: Call, chunk: int) -> tuple[tuple[Array, ...], tuple[int, ...]]:
    """The first eight arrays as kernels take them; the integers that kernels have in common."""
    u, delta, A, B, C, D, z, bias, _, _ = call.arrays
    dtype = call.compute
    (u, u_steps), (delta, delta_steps), (z_given, z_steps) = (
        rows(x, dtype, repeated=False) for x in (u, delta, z)
    )
    (b, b_steps), (c, c_steps) = (rows(x, dtype, repeated=False) for x in (B, C))
    given = (u, delta, _powers(A), b, c, D, z_given, bias)
    return tuple(x if i in (0, 1, 3, 4, 6) else flat(x, dtype) for i, x in enumerate(given)), (
        u.shape[2], A.shape[1], u.shape[1], chunk, B.shape[2], *b_steps[:3], C.shape[2], *c_steps[:3],
        *u_steps[:2], *delta_steps[:2], *z_steps[:2], D is not None, z is not None, bias is not None, call.options[0],
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
    output = fresh(u.shape if want_output else (0,), dtype)
    last = fresh((plan.number, channels, N), dtype)
    starts = fresh((plan.states, blocks, N, step) if chunk else (0,), dtype)
    sums = numpy.empty((0,) if want_output else (plan.number, channels), dtype)
    if 0 in (batch, channels, N):
        output[...] = 0
        return output, last, starts, sums
    given, common = _common(call, chunk)
    run(
        kernels.forward,
        dtype,
        plan.number * blocks,
        _FORWARD_WORK * batch * time * channels * N,
        kernels.forward_memory(N, step),
        (*common, state is not None, want_output, not want_output),
        (
            plan.table,
            _limits(call),
            *given,
            flat(state, dtype),
            output,
            last,
            starts,
            sums,
        ),
    )
    return output, last, starts, sums
