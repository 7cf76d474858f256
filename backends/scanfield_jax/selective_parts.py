"""What forward and backward of the selective scan by ``lax.scan`` share: coefficients, steps, and how states lie.

Symbols as in ``selective``: T is time, b batch, G groups, N states, P channels of a group.
"""

from __future__ import annotations

from functools import partial
from math import inf, lcm
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from scanfield.arrays import COMPLEX_OF
from scanfield.dispatch import Call
from scanfield_jax.walking import Array, Ends, sum_to, time_first, zeros

einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


class Setup(NamedTuple):
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


def is_full(x: Array, channels: int) -> bool:
    """Whether B or C has numbers for every channel, not for groups of them."""
    return bool(x.shape[2] == channels)


def setup_of(call: Call) -> Setup:
    """The setup of a call."""
    u, _, A, B, C, D, _, bias, _, _ = call.arrays
    batch, time, channels = u.shape
    groups = lcm(*(1 if is_full(x, channels) else x.shape[2] for x in (B, C)))
    wide = jnp.dtype(COMPLEX_OF[call.compute] if jnp.iscomplexobj(A) else call.compute)
    ones = zeros((batch, groups, A.shape[1]), wide, u) + 1
    held_B, held_C = (
        None if x.shape[1] == time else coefficient(groups, wide, time_first(x), channels, batch)[0]
        for x in (B, C)
    )
    return Setup(
        groups,
        jnp.dtype(call.compute),
        wide,
        2 if jnp.iscomplexobj(A) else 1,
        state_in(A, groups),
        ones,
        D,
        bias,
        call.options,
        (held_B, held_C),
    )


def state_in(x: Array, groups: int) -> Array:
    """(..., channels, N) as (..., G, N, P)."""
    return jnp.swapaxes(x.reshape(*x.shape[:-2], groups, x.shape[-2] // max(groups, 1), x.shape[-1]), -1, -2)


def state_out(x: Array) -> Array:
    """(..., G, N, P) as (..., channels, N)."""
    x = jnp.swapaxes(x, -1, -2)
    return x.reshape(*x.shape[:-3], x.shape[-3] * x.shape[-2], x.shape[-1])


def grouped(x: Array, groups: int) -> Array:
    """(..., channels) as (..., G, P)."""
    return x.reshape(*x.shape[:-1], groups, x.shape[-1] // max(groups, 1))


def ungrouped(x: Array) -> Array:
    """(..., G, P) as (..., channels)."""
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


# ---------------------------------------------------------------------------------------------------------------------
# B and C of a token: a vector of each group, (batch, G, N), or a number of each channel, (batch, G, N, P)


def coefficient(groups: int, wide: Any, x: Array, channels: int, batch: int) -> Array:
    """B or C of a block as (T, batch, G, N), or (T, batch or 1, G, N, P) where each channel has its own."""
    x = x.astype(wide)
    if is_full(x, channels):
        return state_in(x, groups)
    x = jnp.repeat(x, groups // x.shape[2], axis=2)
    return jnp.broadcast_to(x, (x.shape[0], batch, *x.shape[2:]))


def coefficient_back(setup: Setup, grad: Array, like: Array, channels: int) -> Array:
    """The gradient of B or C of a block, summed to its shape; ``grad`` is laid as ``coefficient`` laid it."""
    if is_full(like, channels):
        return sum_to(state_out(grad), like.shape)
    count = like.shape[2]
    grad = grad.reshape(*grad.shape[:2], count, setup.groups // count, grad.shape[3]).sum(axis=3)
    return sum_to(grad, like.shape)


def spread(x: Array, coefficient: Array) -> Array:
    """coefficient times x: (batch, G, P) to (batch, G, N, P)."""
    return x[:, :, None, :] * (coefficient if coefficient.ndim == 4 else coefficient[..., None])


def gathered(setup: Setup, h: Array, coefficient: Array) -> Array:
    """The sum over N of coefficient times h: (batch, G, N, P) to (batch, G, P)."""
    if coefficient.ndim == 4:
        return einsum("bgn,bgnp->bgp", setup.ones, coefficient * h)
    return einsum("bgn,bgnp->bgp", coefficient, h)


def weighed(x: Array, h: Array, full: bool) -> Array:
    """x times h for the gradient of a coefficient: (batch, G, N, P), or summed over P."""
    return x[:, :, None, :] * h if full else einsum("bgp,bgnp->bgn", x, h)


# ---------------------------------------------------------------------------------------------------------------------
# steps and gates


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)) without overflow."""
    return jnp.exp(jnp.minimum(x, 0)) / (1 + jnp.exp(-jnp.maximum(x, -x)))


def steps(setup: Setup, raw: Array) -> Array:
    """Softplus, then the clamp."""
    softplus, low, high, _ = setup.options
    # abs(x) written so that its slope at 0 is 0, and that of softplus 1/2.
    s = jnp.maximum(raw, 0) + jnp.log1p(jnp.exp(-jnp.maximum(raw, -raw))) if softplus else raw
    s = jnp.where(s < low, low, s) if low > -inf else s
    return jnp.where(s > high, high, s) if high < inf else s


def steps_back(setup: Setup, raw: Array, d_s: Array) -> Array:
    """The gradient before clamp (1 inside, 0 outside) and softplus (the sigmoid)."""
    softplus, low, high, _ = setup.options
    if low > -inf or high < inf:
        s = steps(setup._replace(options=(softplus, -inf, inf, None)), raw)
        d_s = jnp.where((s >= low) & (s <= high), d_s, 0)
    return d_s * sigmoid(raw) if softplus else d_s


class Block(NamedTuple):
    """One block: raw and final steps, u, x = s u, B and C, (T, batch, ...)."""

    raw: Array
    s: Array
    u: Array
    x: Array
    B: Array | None
    C: Array | None


def opened(setup: Setup, u: Array, delta: Array, B: Array | None, C: Array | None) -> Block:
    """A block of arrays with time first, made ready."""
    channels, batch = u.shape[2], u.shape[1]
    raw = delta.astype(setup.real)
    raw = raw if setup.bias is None else raw + setup.bias
    u = grouped(u.astype(setup.real), setup.groups)
    s = grouped(steps(setup, raw), setup.groups)
    B, C = (None if x is None else coefficient(setup.groups, setup.wide, x, channels, batch) for x in (B, C))
    return Block(raw, s, u, s * u, B, C)


def of_token(setup: Setup, B: Array | None, C: Array | None) -> tuple[Array, Array]:
    """B and C of a token."""
    return setup.held[0] if B is None else B, setup.held[1] if C is None else C


def enter(setup: Setup, h: Array, s: Array, x: Array, B: Array) -> tuple[Array, Array]:
    """The decayed state, and the one with the token's input."""
    decayed = jnp.exp(s[:, :, None, :] * setup.A) * h
    return decayed, decayed + spread(x.astype(setup.wide), B)


# ---------------------------------------------------------------------------------------------------------------------
# walks


def moving_of(call: Call) -> tuple[Array | None, ...]:
    """u, delta, B and C with time first; None where one is the same for all tokens."""
    u, delta, _, B, C = call.arrays[:5]
    time = u.shape[1]
    return (
        time_first(u),
        time_first(delta),
        *(time_first(x) if x.shape[1] == time else None for x in (B, C)),
    )


def started(setup: Setup, call: Call, state: Array | None) -> tuple[Any, Ends | None]:
    """The carry before the first token, and what packed sequences begin with."""
    u = call.arrays[0]
    bounds = call.arrays[9]
    rows = u.shape[0] if bounds is None else len(bounds) - 1
    if state is None:
        h = zeros((rows, *setup.A.shape), setup.wide, u)
    else:
        h = state_in(state.astype(setup.wide), setup.groups)
    if bounds is None:
        return (h, ()), None
    return (zeros((1, *setup.A.shape), setup.wide, u), ()), Ends(h, h)


def left(carry: Any, ends: Ends | None) -> Array:
    """The states that come out of the last token, or of each sequence's."""
    return state_out(carry[0] if ends is None else ends.leaving)
