"""Mamba's selective scan by ``lax.scan``, its state laid (batch, group, state, channels of the group).

Channels lie side by side, so that a token's exponentials and products run over whole vector registers. Sums over
states or channels are matrix-vector products: XLA's own reductions inside of a loop are eight times slower on a CPU.
Steps, skip and gate are done a block of tokens at a time.

Symbols as in ``scanfield.selective_scan``; s is the step, x = s u, h the state, g its gradient; T is time, b batch,
G groups, N states, P channels of a group.
"""

from __future__ import annotations

from functools import partial
from math import inf, lcm
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from scanfield.arrays import COMPLEX_OF
from scanfield.dispatch import Call, Verb
from scanfield_jax.walking import (
    Array,
    Ends,
    batch_first,
    block_size,
    blocks,
    edges_of,
    sum_to,
    time_first,
    tokens,
    zeros,
)

_einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


class Selective:
    """Kernels of ``selective_scan``."""

    def declines(self, call: Call, verb: Verb) -> str | None:
        """Nothing: every kind of array that a call can have is taken."""
        return None

    def forward(self, call: Call) -> tuple[Array, Array]:
        """Output and final state."""
        return _forward(call)[:2]

    def save(self, call: Call) -> tuple[Array, Array, tuple[Array, ...]]:
        """Output, final state and the states at the starts of blocks."""
        output, last, starts = _forward(call)
        return output, last, (starts,)

    def backward(
        self,
        call: Call,
        residuals: tuple[Array, ...],
        d_output: Array | None,
        d_final_state: Array | None,
        wanted: tuple[bool, ...],
    ) -> tuple[Array | None, ...]:
        """From the last block to the first, each recomputed from the state at its start."""
        return _backward(call, residuals[0], d_output, d_final_state, wanted)

    def summarise(self, call: Call) -> tuple[Array, Array]:
        """What ones become when nothing enters, and the final state from zero."""
        u, delta, A, B, C, D, z, bias, _, bounds = call.arrays
        state = _forward(call._replace(arrays=(u, delta, A, B, C, D, z, bias, None, bounds)))[1]
        nothing, ones = jnp.zeros_like(u), jnp.ones_like(state)
        arrays = (nothing, delta, A, B, C, None, None, bias, ones, bounds)
        return _forward(call._replace(arrays=arrays))[1], state


class _Setup(NamedTuple):
    """What all blocks of a call have in common."""

    groups: int
    real: Any
    wide: Any
    factor: int
    A: Array
    """(G, N, P)"""
    ones: Array
    """(b, G, N)"""
    D: Array | None
    bias: Array | None
    options: tuple[Any, ...]
    held: tuple[Array | None, Array | None]
    """B and C where they are the same for all tokens, laid as those of a token."""


def _is_full(x: Array, channels: int) -> bool:
    """Whether B or C has numbers for every channel, not for groups of them."""
    return bool(x.shape[2] == channels)


def _setup(call: Call) -> _Setup:
    u, _, A, B, C, D, _, bias, _, _ = call.arrays
    batch, time, channels = u.shape
    groups = lcm(*(1 if _is_full(x, channels) else x.shape[2] for x in (B, C)))
    wide = jnp.dtype(COMPLEX_OF[call.compute] if jnp.iscomplexobj(A) else call.compute)
    ones = zeros((batch, groups, A.shape[1]), wide, u) + 1
    held_B, held_C = (
        None if x.shape[1] == time else _coefficient(groups, wide, time_first(x), channels, batch)[0]
        for x in (B, C)
    )
    return _Setup(
        groups,
        jnp.dtype(call.compute),
        wide,
        2 if jnp.iscomplexobj(A) else 1,
        _state_in(A, groups),
        ones,
        D,
        bias,
        call.options,
        (held_B, held_C),
    )


def _state_in(x: Array, groups: int) -> Array:
    """(..., channels, N) as (..., G, N, P)."""
    return jnp.swapaxes(
        x.reshape(*x.shape[:-2], groups, x.shape[-2] // max(groups, 1), x.shape[-1]), -1, -2
    )


def _state_out(x: Array) -> Array:
    """(..., G, N, P) as (..., channels, N)."""
    x = jnp.swapaxes(x, -1, -2)
    return x.reshape(*x.shape[:-3], x.shape[-3] * x.shape[-2], x.shape[-1])


def _grouped(x: Array, groups: int) -> Array:
    """(..., channels) as (..., G, P)."""
    return x.reshape(*x.shape[:-1], groups, x.shape[-1] // max(groups, 1))


def _ungrouped(x: Array) -> Array:
    """(..., G, P) as (..., channels)."""
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


# ---------------------------------------------------------------------------------------------------------------------
# B and C of a token: a vector of each group, (batch, G, N), or a number of each channel, (batch, G, N, P)


def _coefficient(groups: int, wide: Any, x: Array, channels: int, batch: int) -> Array:
    """B or C of a block as (T, batch, G, N), or (T, batch or 1, G, N, P) where each channel has its own."""
    x = x.astype(wide)
    if _is_full(x, channels):
        return _state_in(x, groups)
    x = jnp.repeat(x, groups // x.shape[2], axis=2)
    return jnp.broadcast_to(x, (x.shape[0], batch, *x.shape[2:]))


def _coefficient_back(setup: _Setup, grad: Array, like: Array, channels: int) -> Array:
    """The gradient of B or C of a block, summed to its shape; ``grad`` is laid as ``_coefficient`` laid it."""
    if _is_full(like, channels):
        return sum_to(_state_out(grad), like.shape)
    count = like.shape[2]
    grad = grad.reshape(*grad.shape[:2], count, setup.groups // count, grad.shape[3]).sum(axis=3)
    return sum_to(grad, like.shape)


def _spread(x: Array, coefficient: Array) -> Array:
    """coefficient times x: (batch, G, P) to (batch, G, N, P)."""
    return x[:, :, None, :] * (coefficient if coefficient.ndim == 4 else coefficient[..., None])


def _gathered(setup: _Setup, h: Array, coefficient: Array) -> Array:
    """The sum over N of coefficient times h: (batch, G, N, P) to (batch, G, P)."""
    if coefficient.ndim == 4:
        return _einsum("bgn,bgnp->bgp", setup.ones, coefficient * h)
    return _einsum("bgn,bgnp->bgp", coefficient, h)


def _weighed(x: Array, h: Array, full: bool) -> Array:
    """x times h for the gradient of a coefficient: (batch, G, N, P), or summed over P."""
    return x[:, :, None, :] * h if full else _einsum("bgp,bgnp->bgn", x, h)


# ---------------------------------------------------------------------------------------------------------------------
# steps and gates


def _sigmoid(x: Array) -> Array:
    return jnp.exp(jnp.minimum(x, 0)) / (1 + jnp.exp(-jnp.maximum(x, -x)))


def _steps(setup: _Setup, raw: Array) -> Array:
    """Softplus, then the clamp."""
    softplus, low, high, _ = setup.options
    # abs(x) written so that its slope at 0 is 0, and that of softplus 1/2.
    s = jnp.maximum(raw, 0) + jnp.log1p(jnp.exp(-jnp.maximum(raw, -raw))) if softplus else raw
    s = jnp.where(s < low, low, s) if low > -inf else s
    return jnp.where(s > high, high, s) if high < inf else s


def _steps_back(setup: _Setup, raw: Array, d_s: Array) -> Array:
    """The gradient before clamp (1 inside, 0 outside) and softplus (the sigmoid)."""
    softplus, low, high, _ = setup.options
    if low > -inf or high < inf:
        s = _steps(setup._replace(options=(softplus, -inf, inf, None)), raw)
        d_s = jnp.where((s >= low) & (s <= high), d_s, 0)
    return d_s * _sigmoid(raw) if softplus else d_s


class _Block(NamedTuple):
    """One block: raw and final steps, u, x = s u, B and C, (T, batch, ...)."""

    raw: Array
    s: Array
    u: Array
    x: Array
    B: Array | None
    C: Array | None


def _opened(setup: _Setup, u: Array, delta: Array, B: Array | None, C: Array | None) -> _Block:
    channels, batch = u.shape[2], u.shape[1]
    raw = delta.astype(setup.real)
    raw = raw if setup.bias is None else raw + setup.bias
    u = _grouped(u.astype(setup.real), setup.groups)
    s = _grouped(_steps(setup, raw), setup.groups)
    B, C = (
        None if x is None else _coefficient(setup.groups, setup.wide, x, channels, batch) for x in (B, C)
    )
    return _Block(raw, s, u, s * u, B, C)


def _of_token(setup: _Setup, B: Array | None, C: Array | None) -> tuple[Array, Array]:
    """B and C of a token."""
    return setup.held[0] if B is None else B, setup.held[1] if C is None else C


# ---------------------------------------------------------------------------------------------------------------------
# forward


def _enter(setup: _Setup, h: Array, s: Array, x: Array, B: Array) -> tuple[Array, Array]:
    """The decayed state, and the one with the token's input."""
    decayed = jnp.exp(s[:, :, None, :] * setup.A) * h
    return decayed, decayed + _spread(x.astype(setup.wide), B)


def _forward(call: Call) -> tuple[Array, Array, Array]:
    u, delta, _, B, C, _, z, _, state, bounds = call.arrays
    setup = _setup(call)
    batch, time, channels = u.shape
    carry, ends = _started(setup, call, state)
    if time == 0:
        return zeros(u.shape, u.dtype, u), _left(carry, ends), carry[0][None][:0]

    def step(carry: Any, slices: Any) -> tuple[Any, Any]:
        h, _ = carry
        s, x, *moving = slices
        B, C = _of_token(setup, *moving)
        _, h = _enter(setup, h, s, x, B)
        return (h, ()), setup.factor * _gathered(setup, h, C).real

    def body(given: Any, slices: Any, _: Any) -> Any:
        carry, ends = given
        u, delta, B, C, z, edges = slices
        block = _opened(setup, u, delta, B, C)
        after, ends, read = tokens(step, carry, (block.s, block.x, block.B, block.C), edges, ends)
        y = _ungrouped(read)
        if setup.D is not None:
            y = y + setup.D * u.astype(setup.real)
        if z is not None:
            gate = z.astype(setup.real)
            y = y * (gate * _sigmoid(gate))
        return (after, ends), y.astype(u.dtype), carry[0]

    xs = (*_moving(call), time_first(z), edges_of(bounds))
    (carry, ends), y, starts = blocks(body, (carry, ends), xs, None, block_size(call.options[3], time))
    return batch_first(y), _left(carry, ends), starts


def _moving(call: Call) -> tuple[Array | None, ...]:
    """u, delta, B and C with time first; None where one is the same for all tokens."""
    u, delta, _, B, C = call.arrays[:5]
    time = u.shape[1]
    return (
        time_first(u),
        time_first(delta),
        *(time_first(x) if x.shape[1] == time else None for x in (B, C)),
    )


def _started(setup: _Setup, call: Call, state: Array | None) -> tuple[Any, Ends | None]:
    """The carry before the first token, and what packed sequences begin with."""
    u, _, A = call.arrays[:3]
    bounds = call.arrays[9]
    rows = u.shape[0] if bounds is None else len(bounds) - 1
    if state is None:
        h = zeros((rows, *setup.A.shape), setup.wide, u)
    else:
        h = _state_in(state.astype(setup.wide), setup.groups)
    if bounds is None:
        return (h, ()), None
    return (zeros((1, *setup.A.shape), setup.wide, u), ()), Ends(h, h)


def _left(carry: Any, ends: Ends | None) -> Array:
    """The states that come out of the last token, or of each sequence's."""
    return _state_out(carry[0] if ends is None else ends.leaving)


# ---------------------------------------------------------------------------------------------------------------------
# backward


def _backward(
    call: Call, starts: Array, d_output: Array | None, d_final_state: Array | None, wanted: tuple[bool, ...]
) -> tuple[Array | None, ...]:
    u, delta, A, B, C, D, z, bias, state, bounds = call.arrays
    want_u, want_delta, want_A, want_B, want_C, want_D, want_z, want_bias, want_state, _ = wanted
    setup = _setup(call)
    batch, time, channels = u.shape
    want_step = want_delta or want_bias
    need_x = want_u or want_step
    need_w = want_step or want_A
    read_too = want_z and z is not None
    need_h = need_w or want_C or read_too
    held_B, held_C = (x is not None for x in setup.held)
    carry, ends = _started(setup, call, d_final_state)
    if time == 0:
        found = [jnp.zeros(x.shape, x.dtype) if want else None for x, want in zip(call.arrays, wanted, strict=True)]
        return (*found[:8], _left(carry, ends) if want_state else None, None)
    d_output = zeros(u.shape, setup.real, u) if d_output is None else d_output
    rows = zeros((batch, *setup.A.shape), setup.wide, u)
    full_B, full_C = _is_full(B, channels), _is_full(C, channels)

    def sum_like(want: bool, held: bool, full: bool) -> Array | None:
        return (rows if full else rows[..., 0]) if want and held else None

    # Summed over the tokens: the gradients of A, and of B and C where they are the same for all tokens.
    sums = (
        rows if want_A else None,
        sum_like(want_B, held_B, full_B),
        sum_like(want_C, held_C, full_C),
    )
    whole = zeros((channels,), setup.real, u)
    shared = (whole if want_D else None, whole if want_bias else None)
    entering = None if ends is None else Ends(_started(setup, call, state)[1].entering, None)

    def replay(carry: Any, slices: Any) -> tuple[Any, Any]:
        h, _ = carry
        s, x, *moving = slices
        B, C = _of_token(setup, *moving)
        decayed, after = _enter(setup, h, s, x, B)
        read = setup.factor * _gathered(setup, after, C).real if read_too else None
        return (after, ()), (decayed, read)

    def back(carry: Any, slices: Any) -> tuple[Any, Any]:
        g, (d_A, d_B_all, d_C_all) = carry
        s, u, x, *moving, d_read, decayed = slices
        B, C = _of_token(setup, *moving)
        wide_read = d_read.astype(setup.wide)
        g = g + setup.factor * _spread(wide_read, jnp.conj(C))
        d_u = d_s = d_B = d_C = None
        x_wide = x.astype(setup.wide)
        if want_C:
            d_C = setup.factor * _weighed(wide_read, jnp.conj(decayed + _spread(x_wide, B)), full_C)
            d_C, d_C_all = (d_C, None) if d_C_all is None else (None, d_C_all + d_C)
        if want_B:
            d_B = _weighed(x_wide, g, full_B)
            d_B, d_B_all = (d_B, None) if d_B_all is None else (None, d_B_all + d_B)
        if need_x:
            d_x = _gathered(setup, g, jnp.conj(B)).real
            d_u = s * d_x
        if need_w:
            w = g * jnp.conj(decayed)
            if want_A:
                d_A = d_A + s.astype(setup.wide)[:, :, None, :] * w
            if want_step:
                d_s = u * d_x + _einsum("bgn,bgnp->bgp", setup.ones, w * jnp.conj(setup.A)).real
        g = jnp.conj(jnp.exp(s[:, :, None, :] * setup.A)) * g
        return (g, (d_A, d_B_all, d_C_all)), (d_u, d_s, d_B, d_C)

    def body(given: Any, slices: Any, start: Array) -> Any:
        carry, ends, (d_D, d_bias) = given
        u, delta, B, C, z, d_y, edges = slices
        block = _opened(setup, u, delta, B, C)
        d_q = d_y.astype(setup.real)
        d_z = d_delta = None
        u_wide = u.astype(setup.real)
        if z is not None:
            wide_z = z.astype(setup.real)
            gate = _sigmoid(wide_z)
            d_gate = d_q * gate * (1 + wide_z * (1 - gate))
            d_q = d_q * (wide_z * gate)
        kept = read = None
        if need_h:
            xs = (block.s, block.x, block.B, block.C)
            _, _, (kept, read) = tokens(replay, (start, ()), xs, edges, entering)
        xs = (block.s, block.u, block.x, block.B, block.C, _grouped(d_q, setup.groups), kept)
        carry, ends, (d_u, d_s, d_B, d_C) = tokens(back, carry, xs, edges, ends, reverse=True)
        if want_u:
            d_u = _ungrouped(d_u)
            d_u = d_u if setup.D is None else d_u + setup.D * d_q
        if d_D is not None:
            d_D = d_D + jnp.sum(d_q * u_wide, axis=(0, 1))
        if read_too:
            q = _ungrouped(read)
            d_z = d_gate * (q if setup.D is None else q + setup.D * u_wide)
        if want_step:
            d_raw = _steps_back(setup, block.raw, _ungrouped(d_s))
            d_delta = d_raw if want_delta else None
            d_bias = None if d_bias is None else d_bias + jnp.sum(d_raw, axis=(0, 1))
        if d_B is not None:
            d_B = _coefficient_back(setup, d_B, B, channels)
        if d_C is not None:
            d_C = _coefficient_back(setup, d_C, C, channels)
        return (carry, ends, (d_D, d_bias)), (d_u if want_u else None, d_delta, d_B, d_C, d_z), None

    xs = (*_moving(call), time_first(z), time_first(d_output), edges_of(bounds))
    given = ((carry[0], sums), ends, shared)
    size = block_size(call.options[3], time)
    ((g, (d_A, d_B_all, d_C_all)), ends, (d_D, d_bias)), moving, _ = blocks(
        body, given, xs, starts, size, reverse=True
    )
    d_u, d_delta, d_B, d_C, d_z = map(batch_first, moving)
    if d_B_all is not None:
        d_B = batch_first(_coefficient_back(setup, d_B_all[None], time_first(B), channels))
    if d_C_all is not None:
        d_C = batch_first(_coefficient_back(setup, d_C_all[None], time_first(C), channels))
    d_A = None if d_A is None else _state_out(d_A.sum(axis=0))
    d_state = _left((g, ()), ends) if want_state else None
    return d_u, d_delta, d_A, d_B, d_C, d_D, d_z, d_bias, d_state, None
