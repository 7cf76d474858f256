"""The forms of the linear scan: token by token, and in two passes over blocks. Symbols as in ``linear``."""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt
from typing import Any

from scanfield.arrays import (
    COMPLEX,
    COMPLEX_OF,
    HALF,
    Array,
    cast,
    dtype_name,
    dtype_of,
    is_complex,
    library_of,
    ones,
    zeros,
)
from scanfield.dispatch import Call, Grads, loops
from scanfield.scans.generic import (
    GenericForm,
    Result,
    chunk_of,
    divide,
    merge,
    reduced,
    square_root_chunk,
    walk_back,
)

# ---------------------------------------------------------------------------------------------------------------------
# the recurrence


def _token(xp: Any, constants: Any, carry: Any, slices: Any) -> tuple[Any, Any]:
    a_t, b_t = (held if moving is None else moving for held, moving in zip(constants, slices, strict=True))
    h = a_t * carry + b_t
    return h, (h,)


def _states(xp: Any, a: Array, b: Array, state: Array) -> tuple[Array, Array]:
    """Every state of one block, and the last."""
    length = max(a.shape[1], b.shape[1])
    xs = tuple(x if x.shape[1] == length else None for x in (a, b))
    held = tuple(x[:, 0, ...] if x.shape[1] != length else None for x in (a, b))
    last, (all_states,) = loops.scan(_token, xp, held, state, xs)
    return all_states, last


def _back_token(config: Any, constants: Any, carry: Any, slices: Any) -> tuple[Any, Any]:
    (held,) = constants
    d_h, a_t = slices
    g = d_h + carry
    return (held if a_t is None else a_t) * g, (g,)


def _forward_block(config: Any, constants: Any, state: Any, slices: Any) -> tuple[Any, Any]:
    xp, varying, carry_dtype, output_dtype = config
    a, b = (cast(xp, x, carry_dtype) for x in merge(varying, slices, constants))
    states, last = _states(xp, a, b, state)
    return last, (cast(xp, states, output_dtype), state)


def _backward_block(
    config: Any, arrays: Any, state: Array, d_output: Array, carry: Array
) -> tuple[Array, Any]:
    xp, carry_dtype, wanted = config
    a, b = (cast(xp, x, carry_dtype) for x in arrays)
    conj_a = xp.conj(a) if is_complex(a) else a
    length = d_output.shape[1]
    varies = a.shape[1] == length
    carry, (g,) = loops.scan(
        _back_token,
        None,
        (None if varies else conj_a[:, 0, ...],),
        carry,
        (cast(xp, d_output, carry_dtype), conj_a if varies else None),
        reverse=True,
    )
    d_a = None
    if wanted[0]:
        states, _ = _states(xp, a, xp.broadcast_to(b, (b.shape[0], length, b.shape[2])), state)
        before = xp.concat([xp.expand_dims(state, axis=1), states[:, :-1, ...]], axis=1)
        if is_complex(before):
            before = xp.conj(before)
        d_a = reduced(xp, g * before, a)
    return carry, (d_a, reduced(xp, g, b) if wanted[1] else None)


class _LinearForm(GenericForm):
    """What the two forms share."""

    neutral = {"a": 1.0, "b": 0.0}

    def shapes(self, call: Call) -> tuple[tuple[int, ...], tuple[int, ...], Any, Any]:
        """Output (batch, time, feature) and state (batch, feature)."""
        a, b, state, _ = call.arrays
        xp = library_of(a, "a").namespace
        shape = tuple(m if n == 1 else n for n, m in zip(a.shape, b.shape, strict=True))
        names = {dtype_name(x.dtype) for x in (a, b, state) if x is not None}
        carry = dtype_of(xp, COMPLEX_OF[call.compute] if names & set(COMPLEX) else call.compute)
        half = dtype_name(a.dtype) in HALF and not names & set(COMPLEX)
        return shape, (shape[0], shape[2]), a.dtype if half else carry, carry

    def transition(self, call: Call) -> Array:
        """The product of the coefficients."""
        a = call.arrays[0]
        xp = library_of(a, "a").namespace
        shape, _, _, carry_dtype = self.shapes(call)
        return xp.prod(xp.broadcast_to(cast(xp, a, carry_dtype), shape), axis=1)

    def identity(self, call: Call) -> Array:
        """Ones."""
        xp = library_of(call.arrays[0], "a").namespace
        _, state_shape, _, carry_dtype = self.shapes(call)
        return ones(xp, state_shape, carry_dtype, call.arrays[1])


class Recurrent(_LinearForm):
    """The token recurrence."""

    def scan(self, call: Call, keep: bool) -> Result:
        """Blocks of tokens; the state at each block's start is what backward needs."""
        a, b, state, _ = call.arrays
        xp = library_of(a, "a").namespace
        output_shape, state_shape, output_dtype, carry_dtype = self.shapes(call)
        if state is None:
            state = zeros(xp, state_shape, carry_dtype, b)
        time = output_shape[1]
        varying, xs, constants = divide((a, b), time)
        size = chunk_of(call.options[0], time, square_root_chunk(time))
        last, (output, starts) = loops.blocks(
            _forward_block, (xp, varying, carry_dtype, output_dtype), constants, state, xs, size, joined=1
        )
        return output, last, (starts,) if keep else ()

    def reverse(
        self,
        call: Call,
        residuals: tuple[Array, ...],
        d_output: Array | None,
        d_final_state: Array | None,
        wanted: tuple[bool, ...],
    ) -> Grads:
        """The scan in the other direction, block by block."""
        a, b, state, _ = call.arrays
        xp = library_of(a, "a").namespace
        output_shape, state_shape, _, carry_dtype = self.shapes(call)
        time = output_shape[1]
        if d_output is None:
            d_output = zeros(xp, output_shape, carry_dtype, b)
        carry = (
            zeros(xp, state_shape, carry_dtype, b)
            if d_final_state is None
            else cast(xp, d_final_state, carry_dtype)
        )
        varying = divide((a, b), time)[0]
        carry, (d_a, d_b) = walk_back(
            _backward_block,
            (xp, carry_dtype, wanted[:2]),
            (a, b),
            varying,
            wanted[:2],
            residuals[0],
            d_output,
            carry,
            chunk_of(call.options[0], time, square_root_chunk(time)),
            (carry_dtype, carry_dtype),
            xp,
        )
        return d_a, d_b, carry if wanted[2] and state is not None else None, None


class Blocked(_LinearForm):
    """Two passes over blocks of sqrt(time) tokens.

    All blocks side by side from zero, the chain of their summaries, and all blocks again from their true starts: some
    3 sqrt(time) steps instead of time, for long series of few lanes; and a sum of many small numbers loses few digits.
    The chain multiplies by the product of a block's coefficients, which may underflow or overflow where the state does
    not; zeros among them (resets) are exact.
    """

    def scan(self, call: Call, keep: bool) -> Result:
        """Output, final state and the states at the start of each block."""
        a, b, state, _ = call.arrays
        xp = library_of(a, "a").namespace
        output_shape, state_shape, output_dtype, carry_dtype = self.shapes(call)
        if state is None:
            state = zeros(xp, state_shape, carry_dtype, a)
        a_cut, b_cut = _cut(xp, a, b, output_shape, carry_dtype)
        states, last, starts = _two_passes(xp, a_cut, b_cut, state)
        output = _uncut(xp, states, output_shape)
        return cast(xp, output, output_dtype), last, (starts,) if keep else ()

    def reverse(
        self,
        call: Call,
        residuals: tuple[Array, ...],
        d_output: Array | None,
        d_final_state: Array | None,
        wanted: tuple[bool, ...],
    ) -> Grads:
        """The states once more from the blocks' starts, and the scan in the other direction by the same two passes."""
        a, b, state, _ = call.arrays
        xp = library_of(a, "a").namespace
        output_shape, state_shape, _, carry_dtype = self.shapes(call)
        if d_output is None:
            d_output = zeros(xp, output_shape, carry_dtype, a)
        if d_final_state is None:
            d_final_state = zeros(xp, state_shape, carry_dtype, a)
        coefficient = xp.conj(a) if is_complex(a) else a
        full = xp.broadcast_to(cast(xp, coefficient, carry_dtype), output_shape)
        # G_t = dh_t + a_(t+1) G_(t+1): flipped time, and the coefficient of the token after.
        flipped = xp.flip(full, axis=1)
        shifted = xp.concat([xp.ones_like(flipped[:, :1, :]), flipped[:, :-1, :]], axis=1)
        d_flipped = xp.flip(cast(xp, d_output, carry_dtype), axis=1)
        a_cut, d_cut = _cut(xp, shifted, d_flipped, output_shape, carry_dtype)
        g, _, _ = _two_passes(xp, a_cut, d_cut, cast(xp, d_final_state, carry_dtype))
        g = xp.flip(_uncut(xp, g, output_shape), axis=1)
        d_a = None
        if wanted[0]:
            (starts,) = residuals
            a_cut, b_cut = _cut(xp, a, b, output_shape, carry_dtype)
            states = _in_blocks(xp, a_cut, b_cut, starts)[0]
            before = _uncut(
                xp, xp.concat([xp.expand_dims(starts, axis=2), states[:, :, :-1, :]], axis=2), output_shape
            )
            d_a = reduced(xp, g * (xp.conj(before) if is_complex(before) else before), a)
        d_b = reduced(xp, g, b) if wanted[1] else None
        d_state = full[:, 0, :] * g[:, 0, :] if wanted[2] and state is not None else None
        return d_a, d_b, d_state, None


def _cut(xp: Any, a: Array, b: Array, shape: Sequence[int], dtype: Any) -> tuple[Array, Array]:
    """a and b in blocks, (batch, blocks, block, lanes), the last block filled with a = 1, b = 0."""
    batch, time, width = shape
    size = max(1, isqrt(time))
    count = -(-time // size)
    found = []
    for x, neutral in ((a, 1.0), (b, 0.0)):
        x = xp.broadcast_to(cast(xp, x, dtype), tuple(shape))
        if count * size != time:
            pad = xp.broadcast_to(xp.full_like(x[:, :1, :], neutral), (batch, count * size - time, width))
            x = xp.concat([x, pad], axis=1)
        found.append(xp.reshape(x, (batch, count, size, width)))
    return found[0], found[1]


def _uncut(xp: Any, x: Array, shape: Sequence[int]) -> Array:
    return xp.reshape(x, (x.shape[0], x.shape[1] * x.shape[2], x.shape[3]))[:, : shape[1], :]


def _in_blocks(xp: Any, a: Array, b: Array, starts: Array) -> tuple[Array, Array]:
    """All blocks side by side from their starts (batch, blocks, lanes): every state, and each block's last."""
    batch, count, size, width = a.shape
    states, last = _states(
        xp,
        xp.reshape(a, (batch * count, size, width)),
        xp.reshape(b, (batch * count, size, width)),
        xp.reshape(starts, (batch * count, width)),
    )
    return xp.reshape(states, (batch, count, size, width)), xp.reshape(last, (batch, count, width))


def _chain(xp: Any, constants: Any, carry: Any, slices: Any) -> tuple[Any, Any]:
    product, local = slices
    # A product that overflowed meets a state that is exactly 0: nothing came in, nothing goes out.
    product = xp.where((carry == 0) & ~xp.isfinite(product), xp.zeros_like(product), product)
    return product * carry + local, (carry,)


def _two_passes(xp: Any, a: Array, b: Array, state: Array) -> tuple[Array, Array, Array]:
    """Every state (batch, blocks, block, lanes), the last one, and the states at the blocks' starts."""
    nothing = xp.zeros_like(b[:, :, 0, :])
    _, local = _in_blocks(xp, a, b, nothing)
    reset = xp.any(a == 0, axis=2)  # whatever else overflows in the block
    product = xp.prod(a, axis=2)
    product = xp.where(reset, xp.zeros_like(product), product)
    last, (starts,) = loops.scan(_chain, xp, (), state, (product, local))
    states, _ = _in_blocks(xp, a, b, starts)
    return states, last, starts
