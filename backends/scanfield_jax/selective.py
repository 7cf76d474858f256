"""Mamba's selective scan by ``lax.scan``, its state laid (batch, group, state, channels of the group).

Channels lie side by side, so that a token's exponentials and products run over whole vector registers. Sums over
states or channels are matrix-vector products: XLA's own reductions inside of a loop are eight times slower on a CPU.
Steps, skip and gate are done a block of tokens at a time.

Symbols as in ``scanfield.selective_scan``; s is the step, x = s u, h the state, g its gradient; T is time, b batch,
G groups, N states, P channels of a group.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from scanfield.dispatch import Call, Verb
from scanfield_jax.selective_parts import (
    coefficient_back,
    einsum,
    enter,
    gathered,
    grouped,
    is_full,
    left,
    moving_of,
    of_token,
    opened,
    setup_of,
    sigmoid,
    spread,
    started,
    state_out,
    steps_back,
    ungrouped,
    weighed,
)
from scanfield_jax.walking import (
    Array,
    batch_first,
    block_size,
    blocks,
    edges_of,
    entering_only,
    time_first,
    tokens,
    zeros,
)


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


# ---------------------------------------------------------------------------------------------------------------------
# forward


def _forward(call: Call) -> tuple[Array, Array, Array]:
    u, _, _, _, _, _, z, _, state, bounds = call.arrays
    setup = setup_of(call)
    time = u.shape[1]
    carry, ends = started(setup, call, state)
    if time == 0:
        return zeros(u.shape, u.dtype, u), left(carry, ends), carry[0][None][:0]

    def step(carry: Any, slices: Any) -> tuple[Any, Any]:
        h, _ = carry
        s, x, *moving = slices
        B, C = of_token(setup, *moving)
        _, h = enter(setup, h, s, x, B)
        return (h, ()), setup.factor * gathered(setup, h, C).real

    def body(given: Any, slices: Any, _: Any) -> Any:
        carry, ends = given
        u, delta, B, C, z, edges = slices
        block = opened(setup, u, delta, B, C)
        after, ends, read = tokens(step, carry, (block.s, block.x, block.B, block.C), edges, ends)
        y = ungrouped(read)
        if setup.D is not None:
            y = y + setup.D * u.astype(setup.real)
        if z is not None:
            gate = z.astype(setup.real)
            y = y * (gate * sigmoid(gate))
        return (after, ends), y.astype(u.dtype), carry[0]

    xs = (*moving_of(call), time_first(z), edges_of(bounds, time))
    (carry, ends), y, starts = blocks(body, (carry, ends), xs, None, block_size(call.options[3], time))
    return batch_first(y), left(carry, ends), starts


# ---------------------------------------------------------------------------------------------------------------------
# backward


def _backward(
    call: Call, starts: Array, d_output: Array | None, d_final_state: Array | None, wanted: tuple[bool, ...]
) -> tuple[Array | None, ...]:
    u, _, _, B, C, _, z, _, state, bounds = call.arrays
    want_u, want_delta, want_A, want_B, want_C, want_D, want_z, want_bias, want_state, _ = wanted
    setup = setup_of(call)
    batch, time, channels = u.shape
    want_step = want_delta or want_bias
    need_x = want_u or want_step
    need_w = want_step or want_A
    read_too = want_z and z is not None
    need_h = need_w or want_C or read_too
    held_B, held_C = (x is not None for x in setup.held)
    carry, ends = started(setup, call, d_final_state)
    if time == 0:
        found = [
            jnp.zeros(x.shape, x.dtype) if want else None for x, want in zip(call.arrays, wanted, strict=True)
        ]
        return (*found[:8], left(carry, ends) if want_state else None, None)
    d_output = zeros(u.shape, setup.real, u) if d_output is None else d_output
    rows = zeros((batch, *setup.A.shape), setup.wide, u)
    full_B, full_C = is_full(B, channels), is_full(C, channels)

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
    entering = entering_only(started(setup, call, state)[1])

    def replay(carry: Any, slices: Any) -> tuple[Any, Any]:
        h, _ = carry
        s, x, *moving = slices
        B, C = of_token(setup, *moving)
        decayed, after = enter(setup, h, s, x, B)
        read = setup.factor * gathered(setup, after, C).real if read_too else None
        return (after, ()), (decayed, read)

    def back(carry: Any, slices: Any) -> tuple[Any, Any]:
        g, (d_A, d_B_all, d_C_all) = carry
        s, u, x, *moving, d_read, decayed = slices
        B, C = of_token(setup, *moving)
        wide_read = d_read.astype(setup.wide)
        g = g + setup.factor * spread(wide_read, jnp.conj(C))
        d_u = d_s = d_B = d_C = None
        x_wide = x.astype(setup.wide)
        if want_C:
            d_C = setup.factor * weighed(wide_read, jnp.conj(decayed + spread(x_wide, B)), full_C)
            d_C, d_C_all = (d_C, None) if d_C_all is None else (None, d_C_all + d_C)
        if want_B:
            d_B = weighed(x_wide, g, full_B)
            d_B, d_B_all = (d_B, None) if d_B_all is None else (None, d_B_all + d_B)
        if need_x:
            d_x = gathered(setup, g, jnp.conj(B)).real
            d_u = s * d_x
        if need_w:
            w = g * jnp.conj(decayed)
            if want_A:
                d_A = d_A + s.astype(setup.wide)[:, :, None, :] * w
            if want_step:
                d_s = u * d_x + einsum("bgn,bgnp->bgp", setup.ones, w * jnp.conj(setup.A)).real
        g = jnp.conj(jnp.exp(s[:, :, None, :] * setup.A)) * g
        return (g, (d_A, d_B_all, d_C_all)), (d_u, d_s, d_B, d_C)

    def body(given: Any, slices: Any, start: Array) -> Any:
        carry, ends, (d_D, d_bias) = given
        u, delta, B, C, z, d_y, edges = slices
        block = opened(setup, u, delta, B, C)
        d_q = d_y.astype(setup.real)
        d_z = d_delta = None
        u_wide = u.astype(setup.real)
        if z is not None:
            wide_z = z.astype(setup.real)
            gate = sigmoid(wide_z)
            d_gate = d_q * gate * (1 + wide_z * (1 - gate))
            d_q = d_q * (wide_z * gate)
        kept = read = None
        if need_h:
            _, _, (kept, read) = tokens(
                replay, (start, ()), (block.s, block.x, block.B, block.C), edges, entering
            )
        xs = (block.s, block.u, block.x, block.B, block.C, grouped(d_q, setup.groups), kept)
        carry, ends, (d_u, d_s, d_B, d_C) = tokens(back, carry, xs, edges, ends, reverse=True)
        if want_u:
            d_u = ungrouped(d_u)
            d_u = d_u if setup.D is None else d_u + setup.D * d_q
        if d_D is not None:
            d_D = d_D + jnp.sum(d_q * u_wide, axis=(0, 1))
        if read_too:
            q = ungrouped(read)
            d_z = d_gate * (q if setup.D is None else q + setup.D * u_wide)
        if want_step:
            d_raw = steps_back(setup, block.raw, ungrouped(d_s))
            d_delta = d_raw if want_delta else None
            d_bias = None if d_bias is None else d_bias + jnp.sum(d_raw, axis=(0, 1))
        if d_B is not None:
            d_B = coefficient_back(setup, d_B, B, channels)
        if d_C is not None:
            d_C = coefficient_back(setup, d_C, C, channels)
        return (carry, ends, (d_D, d_bias)), (d_u if want_u else None, d_delta, d_B, d_C, d_z), None

    xs = (*moving_of(call), time_first(z), time_first(d_output), edges_of(bounds, time))
    given = ((carry[0], sums), ends, shared)
    size = block_size(call.options[3], time)
    ((g, (d_A, d_B_all, d_C_all)), ends, (d_D, d_bias)), moving, _ = blocks(
        body, given, xs, starts, size, reverse=True
    )
    d_u, d_delta, d_B, d_C, d_z = map(batch_first, moving)
    if d_B_all is not None:
        d_B = batch_first(coefficient_back(setup, d_B_all[None], time_first(B), channels))
    if d_C_all is not None:
        d_C = batch_first(coefficient_back(setup, d_C_all[None], time_first(C), channels))
    d_A = None if d_A is None else state_out(d_A.sum(axis=0))
    d_state = left((g, ()), ends) if want_state else None
    return d_u, d_delta, d_A, d_B, d_C, d_D, d_z, d_bias, d_state, None
