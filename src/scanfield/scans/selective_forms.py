"""The selective scan token by token; steps, skip and gate around it. Symbols as in ``selective``."""

from __future__ import annotations

from math import inf
from typing import Any

from scanfield.arrays import Array, Namespace, cast, dtype_of, is_complex, library_of, ones, zeros
from scanfield.dispatch import Call, Grads, loops
from scanfield.scans.generic import (
    GenericForm,
    Result,
    chunk_of,
    divide,
    merge,
    reduced,
    square_root_chunk,
    state_dtype,
    walk_back,
)

# ---------------------------------------------------------------------------------------------------------------------
# elementwise parts: step size, skip, gate


# where, not maximum or abs: at x = 0 all branches are those of x < 0, which are smooth, and so autodiff finds every
# derivative there. NaN is taken along by one branch at least.


def _magnitude(xp: Namespace, x: Array) -> Array:
    """The absolute value, with slope -1 at 0."""
    return xp.where(x > 0, x, -x)


def sigmoid(xp: Namespace, x: Array) -> Array:
    """1 / (1 + exp(-x)) without overflow."""
    return xp.exp(xp.where(x > 0, xp.zeros_like(x), x)) / (1 + xp.exp(-_magnitude(xp, x)))


def softplus(xp: Namespace, x: Array) -> Array:
    """log(1 + exp(x)), exact at both ends: positive down to the smallest number, no threshold."""
    return xp.where(x > 0, x, xp.zeros_like(x)) + xp.log1p(xp.exp(-_magnitude(xp, x)))


def step_sizes(xp: Namespace, raw: Array, use_softplus: bool, low: float, high: float) -> Array:
    """Softplus, then the clamp."""
    s = softplus(xp, raw) if use_softplus else raw
    if low > -inf:
        s = xp.where(s < low, xp.full_like(s, low), s)
    if high < inf:
        s = xp.where(s > high, xp.full_like(s, high), s)
    return s


def step_sizes_back(
    xp: Namespace, raw: Array, d_s: Array, use_softplus: bool, low: float, high: float
) -> Array:
    """The gradient before clamp (1 inside, 0 outside) and softplus (the sigmoid)."""
    if low > -inf or high < inf:
        s = softplus(xp, raw) if use_softplus else raw
        d_s = xp.where((s >= low) & (s <= high), d_s, xp.zeros_like(d_s))
    return d_s * sigmoid(xp, raw) if use_softplus else d_s


def raw_steps(xp: Namespace, call: Call, dtype: Any) -> Array:
    """delta + delta_bias"""
    _, delta, _, _, _, _, _, bias, _, _ = call.arrays
    raw = cast(xp, delta, dtype)
    return raw if bias is None else raw + bias


# ---------------------------------------------------------------------------------------------------------------------
# the recurrence over (s, u, B, C) with A shared


def token(xp: Any, constants: Any, h: Any, slices: Any) -> tuple[Any, Any]:
    """h_t = decay_t h_(t-1) + entering_t"""
    decay, x = slices
    h = decay * h + x
    return h, (h,)


def back_token(xp: Any, constants: Any, carry: Any, slices: Any) -> tuple[Any, Any]:
    """g_t = d_h_t + decay_(t+1) g_(t+1)"""
    decay, d_h = slices
    g = d_h + carry
    return decay * g, (g,)


def _grouped(xp: Namespace, x: Array, groups: int) -> Array:
    """(batch, time, channel[, state]) -> (batch, time, group, channel of the group[, state])"""
    channels = x.shape[2]
    return xp.reshape(x, (*x.shape[:2], groups, channels // groups, *x.shape[3:]))


def _ungrouped(xp: Namespace, x: Array) -> Array:
    """(batch, time, group, channel of the group[, state]) -> (batch, time, channel[, state])"""
    return xp.reshape(x, (*x.shape[:2], x.shape[2] * x.shape[3], *x.shape[4:]))


def decays(xp: Namespace, s: Array, A: Array) -> Array:
    """exp(s A), (batch, time, channel, state)"""
    return xp.exp(xp.expand_dims(s, axis=-1) * A)


def entering(xp: Namespace, x: Array, B: Array) -> Array:
    """x B over the states of a block, (batch, time, channel, state)"""
    grouped = xp.expand_dims(_grouped(xp, x, B.shape[2]), axis=-1) * xp.expand_dims(B, axis=3)
    return _ungrouped(xp, grouped)


def read(xp: Namespace, states: Array, C: Array) -> Array:
    """sum_n C h over the states of a block, (batch, time, channel)"""
    product = xp.matmul(_grouped(xp, states, C.shape[2]), xp.expand_dims(C, axis=-1))
    return _ungrouped(xp, xp.squeeze(product, axis=-1))


def _real_part(xp: Namespace, x: Array) -> Array:
    return xp.real(x) if is_complex(x) else x


def _conj(xp: Namespace, x: Array) -> Array:
    return xp.conj(x) if is_complex(x) else x


def _factor(xp: Namespace, A: Array) -> int:
    return 2 if is_complex(A) else 1


def _wide_token(xp: Any, constants: Any, h: Any, slices: Any) -> tuple[Any, Any]:
    A, *held = constants
    s, x, B, C = (moving if one is None else one for one, moving in zip(held, slices, strict=True))
    h = xp.exp(xp.expand_dims(s, axis=-1) * A) * h
    h = h + xp.squeeze(entering(xp, xp.expand_dims(x, axis=1), xp.expand_dims(B, axis=1)), axis=1)
    return h, (xp.squeeze(read(xp, xp.expand_dims(h, axis=1), xp.expand_dims(C, axis=1)), axis=1),)


def _forward_block(config: Any, constants: Any, h: Any, slices: Any) -> tuple[Any, Any]:
    xp, varying, dtype, wide, small = config
    *held, A = constants
    s, u, B, C = merge(varying, slices, held)
    B, C = cast(xp, B, wide), cast(xp, C, wide)
    x = s * cast(xp, u, dtype)
    start = h
    varying = tuple(v.shape[1] == s.shape[1] for v in (s, x, B, C))
    moving = tuple(v if vary else None for v, vary in zip((s, x, B, C), varying, strict=True))
    fixed = tuple(None if vary else v for v, vary in zip((s, x, B, C), varying, strict=True))
    if small < 4:  # a token's state fills the cache by itself
        held = tuple(None if v is None else v[:, 0, ...] for v in fixed)
        h, (read,) = loops.scan(_wide_token, xp, (A, *held), h, moving)
    else:
        # The state exists for a few tokens at a time: as many as fit in cache, however long the chunk is.
        h, (read,) = loops.blocks(_few_tokens, (xp, varying), (*fixed, A), h, moving, small, joined=1)
    return h, (_factor(xp, A) * _real_part(xp, read), start)


def _few_tokens(config: Any, constants: Any, h: Any, slices: Any) -> tuple[Any, Any]:
    xp, varying = config
    *fixed, A = constants
    s, x, B, C = merge(varying, slices, fixed)
    h, (states,) = loops.scan(token, None, (), h, (decays(xp, s, A), entering(xp, x, B)))
    return h, (read(xp, states, C),)


def _backward_block(config: Any, arrays: Any, h: Array, d_read: Array, carry: Array) -> tuple[Array, Any]:
    xp, dtype, wide, wanted, want_read = config
    s, u, B, C, A = arrays
    want_s, want_u, want_B, want_C, want_A = wanted
    u = cast(xp, u, dtype)
    B, C = cast(xp, B, wide), cast(xp, C, wide)
    x = s * u
    factor = _factor(xp, A)
    decay = decays(xp, s, A)
    d_read = cast(xp, d_read, dtype)
    if want_s or want_A or want_C or want_read:
        _, (states,) = loops.scan(token, None, (), h, (decay, entering(xp, x, B)))
    d_states = factor * entering(xp, d_read, _conj(xp, C))
    carry, (g,) = loops.scan(back_token, None, (), carry, (_conj(xp, decay), d_states), reverse=True)
    d_C = d_B = d_u = d_s = d_A = None
    if want_C:
        rows = xp.expand_dims(cast(xp, _grouped(xp, d_read, C.shape[2]), wide), axis=-2)
        product = factor * xp.matmul(rows, _conj(xp, _grouped(xp, states, C.shape[2])))
        d_C = reduced(xp, xp.squeeze(product, axis=-2), C)
    if want_B:
        rows = xp.expand_dims(cast(xp, _grouped(xp, x, B.shape[2]), wide), axis=-2)
        d_B = reduced(xp, xp.squeeze(xp.matmul(rows, _grouped(xp, g, B.shape[2])), axis=-2), B)
    if want_u or want_s:
        d_x = _real_part(xp, read(xp, g, _conj(xp, B)))
        d_u = s * d_x if want_u else None
    if want_s or want_A:
        before = xp.concat([xp.expand_dims(h, axis=1), states[:, :-1, ...]], axis=1)
        w = g * _conj(xp, decay * before)
        if want_s:
            d_s = u * d_x + _real_part(xp, xp.sum(w * _conj(xp, A), axis=-1))
        if want_A:
            d_A = xp.sum(xp.expand_dims(s, axis=-1) * w, axis=(0, 1))
    grads: tuple[Array | None, ...] = (d_s, d_u, d_B, d_C, d_A)
    if want_read:
        grads = (*grads, factor * _real_part(xp, read(xp, states, C)))
    return carry, grads


# A block of states of this many numbers (1 MiB in float32) stays in cache and still makes the loop's overhead small.
_CACHED = 2**18


class Recurrent(GenericForm):
    """The token recurrence, a few tokens' states at a time."""

    # u = 0 and, set below, a step of 0 leave the state as it is, whatever bias, softplus and limits do to delta.
    neutral = {"u": 0.0, "delta": 0.0}

    def shapes(self, call: Call) -> tuple[tuple[int, ...], tuple[int, ...], Any, Any]:
        """Output (batch, time, channel) and state (batch, channel, state)."""
        u, _, A, _, _, _, _, _, _, _ = call.arrays
        xp = library_of(u, "u").namespace
        return tuple(u.shape), (u.shape[0], *A.shape), u.dtype, state_dtype(xp, call, A)

    # The elementwise parts stand around the pack, so that its pads get a step of exactly 0.

    def forward(self, call: Call) -> tuple[Array, Array]:
        """Output and final state."""
        return self._around(call, keep=False)[:2]

    step = forward

    def save(self, call: Call) -> Result:
        """Output, final state, and the states at the start of each chunk."""
        return self._around(call, keep=True)

    def _around(self, call: Call, keep: bool) -> Result:
        xp = library_of(call.arrays[0], "u").namespace
        with self.quiet(call):
            dtype = dtype_of(xp, call.compute)
            u, _, _, _, _, D, z, _, _, _ = call.arrays
            s = step_sizes(xp, raw_steps(xp, call, dtype), *call.options[:3])
            y, last, residuals = self._run(on_steps(call, s), keep)
            if D is not None:
                y = y + D * cast(xp, u, dtype)
            if z is not None:
                wide_z = cast(xp, z, dtype)
                y = y * (wide_z * sigmoid(xp, wide_z))
            return cast(xp, y, u.dtype), last, residuals

    def backward(
        self,
        call: Call,
        residuals: tuple[Array, ...],
        d_output: Array | None,
        d_final_state: Array | None,
        wanted: tuple[bool, ...],
    ) -> Grads:
        """The wanted gradients."""
        xp = library_of(call.arrays[0], "u").namespace
        with self.quiet(call):
            dtype = dtype_of(xp, call.compute)
            u, D, z, bias = (call.arrays[i] for i in (0, 5, 6, 7))
            want_u, want_delta, want_A, want_B, want_C, want_D, want_z, want_bias, want_state, _ = wanted
            raw = raw_steps(xp, call, dtype)
            s = step_sizes(xp, raw, *call.options[:3])
            d_q = zeros(xp, u.shape, dtype, u) if d_output is None else cast(xp, d_output, dtype)
            u_wide = cast(xp, u, dtype)
            if z is not None:
                wide_z = cast(xp, z, dtype)
                gate = sigmoid(xp, wide_z)
                d_gate = d_q * gate * (1 + wide_z * (1 - gate))
                d_q = d_q * (wide_z * gate)
            want_step = want_delta or want_bias
            read_too = z is not None and want_z
            inner = on_steps(call, s, read=read_too)
            inner_wanted = (
                want_u,
                want_step,
                want_A,
                want_B,
                want_C,
                False,
                read_too,
                False,
                want_state,
                False,
            )
            d_u, d_s, d_A, d_B, d_C, _, read, _, d_state, _ = super().backward(
                inner, residuals, d_q, d_final_state, inner_wanted
            )
            d_D = d_z = d_delta = d_bias = None
            if D is not None:
                if want_D:
                    d_D = xp.sum(d_q * u_wide, axis=(0, 1))
                d_u = d_u + D * d_q if want_u else None
            if read_too:
                d_z = d_gate * (read if D is None else read + D * u_wide)
            if want_step:
                d_raw = step_sizes_back(xp, raw, d_s, *call.options[:3])
                d_delta = d_raw if want_delta else None
                d_bias = xp.sum(d_raw, axis=(0, 1)) if want_bias and bias is not None else None
            return d_u, d_delta, d_A, d_B, d_C, d_D, d_z, d_bias, d_state, None

    def summarise(self, call: Call) -> tuple[Array, Array]:
        """exp(A sum s) and the final state from zero."""
        xp = library_of(call.arrays[0], "u").namespace
        with self.quiet(call):
            raw = raw_steps(xp, call, dtype_of(xp, call.compute))
            return super().summarise(on_steps(call, step_sizes(xp, raw, *call.options[:3])))

    # -- dense calls: delta is the step, no bias, no softplus, no skip, no gate ------------------------------

    def scan(self, call: Call, keep: bool) -> Result:
        """Read-outs, final state and the states at the start of each chunk."""
        u, s, A, B, C, _, _, _, state, _ = call.arrays
        xp = library_of(u, "u").namespace
        _, state_shape, _, wide = self.shapes(call)
        if state is None:
            state = zeros(xp, state_shape, wide, u)
        time = u.shape[1]
        varying, xs, held = divide((s, u, B, C), time)
        size = chunk_of(call.options[3], time, square_root_chunk(time))
        lanes = state_shape[0] * state_shape[1] * state_shape[2]
        config = (xp, varying, s.dtype, wide, max(1, min(size, _CACHED // lanes)))
        last, (read, starts) = loops.blocks(_forward_block, config, (*held, A), state, xs, size, joined=1)
        return read, last, (starts,) if keep else ()

    def reverse(
        self,
        call: Call,
        residuals: tuple[Array, ...],
        d_output: Array | None,
        d_final_state: Array | None,
        wanted: tuple[bool, ...],
    ) -> Grads:
        """The adjoint scan; in the place of the gate's gradient stands the read-out, which the gate needs."""
        u, s, A, B, C, _, _, _, state, _ = call.arrays
        xp = library_of(u, "u").namespace
        _, state_shape, _, wide = self.shapes(call)
        time = u.shape[1]
        if d_output is None:
            d_output = zeros(xp, u.shape, s.dtype, u)
        carry = zeros(xp, state_shape, wide, u) if d_final_state is None else cast(xp, d_final_state, wide)
        core_wanted = (wanted[1], wanted[0], wanted[3], wanted[4], wanted[2])
        read_too = wanted[6]
        arrays: tuple[Array, ...] = (s, u, B, C, A)
        wants: tuple[bool, ...] = core_wanted
        varying = (*divide((s, u, B, C), time)[0], False)
        dtypes: tuple[Any, ...] = (s.dtype, s.dtype, wide, wide, wide)
        if read_too:  # an output beside the gradients, shaped like u
            arrays, wants, varying, dtypes = (
                (*arrays, u),
                (*wants, True),
                (*varying, True),
                (*dtypes, s.dtype),
            )
        carry, found = walk_back(
            _core_back,
            (xp, s.dtype, wide, core_wanted, read_too),
            arrays,
            varying,
            wants,
            residuals[0],
            d_output,
            carry,
            chunk_of(call.options[3], time, square_root_chunk(time)),
            dtypes,
            xp,
        )
        d_s, d_u, d_B, d_C, d_A = found[:5]
        read = found[5] if read_too else None
        d_state = carry if wanted[8] and state is not None else None
        return d_u, d_s, d_A, d_B, d_C, None, read, None, d_state, None

    def transition(self, call: Call) -> Array:
        """exp(A sum_t s_t): the steps are summed, then one exponential."""
        u, s, A, *_ = call.arrays
        xp = library_of(u, "u").namespace
        return xp.exp(xp.expand_dims(xp.sum(s, axis=1), axis=-1) * A)

    def identity(self, call: Call) -> Array:
        """Ones."""
        xp = library_of(call.arrays[0], "u").namespace
        _, state_shape, _, wide = self.shapes(call)
        return ones(xp, state_shape, wide, call.arrays[0])


def _core_back(config: Any, arrays: Any, h: Array, d_read: Array, carry: Array) -> tuple[Array, Any]:
    return _backward_block(config, arrays[:5], h, d_read, carry)


def on_steps(call: Call, s: Array, *, read: bool = False) -> Call:
    """The call on steps: what stays of it when the elementwise parts are taken off.

    With ``read``, u stands in the place of the gate: in the place of its gradient the read-out comes back.
    """
    u, _, A, B, C, _, _, _, state, bounds = call.arrays
    return call._replace(
        arrays=(u, s, A, B, C, None, u if read else None, None, state, bounds),
        options=(False, -inf, inf, call.options[3]),
    )
