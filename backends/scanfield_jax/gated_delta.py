"""The gated delta rule token by token by ``lax.scan``, its vectors made a block of tokens at a time.

S' = exp(g) S, up = y - e^T S', S = S' + k up^T, o = q^T S, and o = q^T S' + (q^T k) up: a token reads the decayed state
once, for e and q together, and writes it once. On a CPU that is as fast as the chunk form (K = V = 64) and exact for growth
as the recurrence is; the same outputs are not finite, though inf may stand where the recurrence has NaN. What the gradients
of q and e need is one product over the block.

Symbols as in ``scanfield.gdn2``: q and k are scaled and repeated for all value heads of their group, e = b k the erase
vector, y = w v, S' the decayed state; T is time, b batch, h value heads.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from scanfield.dispatch import Call, Verb
from scanfield_jax.walking import (
    Array,
    Ends,
    batch_first,
    block_size,
    blocks,
    edges_of,
    entering_only,
    time_first,
    tokens,
    zeros,
)

_einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


class GatedDelta:
    """Kernels of ``gdn2``."""

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
        """What a unit matrix (ones, where nothing is erased) becomes without values, and the final state from zero."""
        query, key, value, log_decay, erase, _, _, bounds = call.arrays
        state = _forward(call._replace(arrays=(*call.arrays[:6], None, bounds)))[1]
        unit = (
            jnp.ones((state.shape[2], 1), state.dtype)
            if erase is None
            else jnp.eye(state.shape[2], dtype=state.dtype)
        )
        start = jnp.zeros_like(state, shape=(*state.shape[:2], *unit.shape)) + unit
        nothing = jnp.zeros_like(value, shape=(*value.shape[:3], unit.shape[1]))
        arrays = (query, key, nothing, log_decay, erase, None, start, bounds)
        return _forward(call._replace(arrays=arrays))[1], state


class _Block(NamedTuple):
    """One block, (T, batch, vheads, ...) each; decay and e are None without decay and erasure."""

    q: Array
    k: Array
    y: Array
    decay: Array | None
    e: Array | None
    b: Array | None
    v: Array
    w: Array | None
    qk: Array


def _opened(call: Call, slices: Any) -> _Block:
    """The vectors of a block, in the carry's dtype."""
    vheads = call.arrays[2].shape[2]
    scale, erase_vector, _ = call.options
    wide: list[Any] = [None if x is None else x.astype(call.compute) for x in slices]
    query, key, v, g, b, w = wide
    q, k = (jnp.repeat(x, vheads // max(x.shape[2], 1), axis=2) for x in (query * scale, key))
    e = b if b is None or erase_vector else b * k
    qk = jnp.sum(q * k, axis=-1, keepdims=True)
    return _Block(q, k, v if w is None else w * v, None if g is None else jnp.exp(g), e, b, v, w, qk)


def _moving(call: Call) -> tuple[Array | None, ...]:
    return tuple(map(time_first, call.arrays[:6]))


def _started(call: Call, state: Array | None) -> tuple[Any, Ends | None]:
    """The carry before the first token, and what packed sequences begin with."""
    query, _, value = call.arrays[:3]
    bounds = call.arrays[7]
    one = (value.shape[2], query.shape[3], value.shape[3])
    rows = value.shape[0] if bounds is None else len(bounds) - 1
    S = zeros((rows, *one), call.compute, query) if state is None else state.astype(call.compute)
    if bounds is None:
        return (S, ()), None
    return (zeros((1, *one), call.compute, query), ()), Ends(S, S)


def _left(carry: Any, ends: Ends | None) -> Any:
    """The states that come out of the last token, or of each sequence's."""
    return carry[0] if ends is None else ends.leaving


def _decayed(S: Array, decay: Array | None) -> Array:
    return S if decay is None else decay[..., None] * S


def _outer(x: Array, y: Array) -> Array:
    return x[..., None] * y[..., None, :]


def _read(x: Array, S: Array) -> Array:
    """x^T S."""
    return _einsum("bhk,bhkv->bhv", x, S)


# ---------------------------------------------------------------------------------------------------------------------
# forward


def _forward(call: Call) -> tuple[Array, Array, Array]:
    query, _, value = call.arrays[:3]
    bounds = call.arrays[7]
    carry, ends = _started(call, call.arrays[6])
    time = value.shape[1]
    if time == 0:
        return zeros(value.shape, query.dtype, query), _left(carry, ends), carry[0][None][:0]

    def step(carry: Any, slices: Any) -> tuple[Any, Any]:
        S, _ = carry
        q, k, y, decay, e, qk = slices
        S = _decayed(S, decay)
        if e is None:
            up, output = y, _read(q, S)
        else:
            both = _einsum("bhrk,bhkv->bhrv", jnp.stack([e, q], axis=2), S)
            up, output = y - both[:, :, 0], both[:, :, 1]
        return (S + _outer(k, up), ()), output + qk * up

    def body(given: Any, slices: Any, _: Any) -> Any:
        carry, ends = given
        *arrays, edges = slices
        block = _opened(call, arrays)
        xs = (block.q, block.k, block.y, block.decay, block.e, block.qk)
        after, ends, output = tokens(step, carry, xs, edges, ends)
        return (after, ends), output.astype(query.dtype), carry[0]

    xs = (*_moving(call), edges_of(bounds, time))
    (carry, ends), output, starts = blocks(body, (carry, ends), xs, None, block_size(call.options[2], time))
    return batch_first(output), _left(carry, ends), starts


# ---------------------------------------------------------------------------------------------------------------------
# backward


def _backward(
    call: Call, starts: Array, d_output: Array | None, d_final_state: Array | None, wanted: tuple[bool, ...]
) -> tuple[Array | None, ...]:
    query, _, value, _, _, _, state, bounds = call.arrays
    want_q, want_k, _, want_g, want_b, *_ = wanted
    # The value's gradient alone (relevance) needs no state.
    need_S = want_q or want_k or want_g or want_b
    carry, ends = _started(call, d_final_state)
    time = value.shape[1]
    if time == 0:
        found = [
            jnp.zeros_like(x) if want else None for x, want in zip(call.arrays[:6], wanted, strict=False)
        ]
        return (*found, _left(carry, ends) if wanted[6] else None, None)
    d_output = zeros(value.shape, call.compute, query) if d_output is None else d_output
    entering = entering_only(_started(call, state)[1])

    def replay(carry: Any, slices: Any) -> tuple[Any, Any]:
        S, _ = carry
        k, y, decay, e = slices
        S = _decayed(S, decay)
        up = y if e is None else y - _read(e, S)
        return (S + _outer(k, up), ()), (S, up)

    def back(carry: Any, slices: Any) -> tuple[Any, Any]:
        d_S, _ = carry
        q, k, decay, e, d_o, qk, up, d_o_up, S = slices
        d_up = _read(k, d_S) + qk * d_o
        d_k = _einsum("bhkv,bhv->bhk", d_S, up) + d_o_up * q if need_S else None
        d_S = d_S + _outer(q, d_o)
        d_S = d_S if e is None else d_S - _outer(e, d_up)
        d_g = None
        if want_g:
            d_g = _einsum("bhkv,v->bhk", d_S * S, jnp.ones(S.shape[3], S.dtype))
        return (_decayed(d_S, decay), ()), (d_up, d_k, d_g)

    def body(given: Any, slices: Any, start: Array) -> Any:
        carry, ends = given
        *arrays, d_o, edges = slices
        block = _opened(call, arrays)
        d_o = d_o.astype(call.compute)
        S: Any = None
        up = d_o_up = d_q_and_e = None
        if need_S:
            _, _, (S, up) = tokens(
                replay, (start, ()), (block.k, block.y, block.decay, block.e), edges, entering
            )
            d_o_up = jnp.sum(d_o * up, axis=-1, keepdims=True)
        xs = (block.q, block.k, block.decay, block.e, d_o, block.qk, up, d_o_up, S)
        carry, ends, (d_y, d_k, d_g) = tokens(back, carry, xs, edges, ends, reverse=True)
        if need_S:
            two = _einsum("tbhkv,tbhvr->tbhkr", S, jnp.stack([d_o, d_y], axis=-1))
            d_q_and_e = (two[..., 0] + d_o_up * block.k, None if block.e is None else -two[..., 1])
        return (carry, ends), _closed(call, block, arrays, wanted, d_q_and_e, d_k, d_y, d_g), None

    xs = (*_moving(call), time_first(d_output), edges_of(bounds, time))
    size = block_size(call.options[2], time)
    (carry, ends), grads, _ = blocks(body, (carry, ends), xs, starts, size, reverse=True)
    return (*map(batch_first, grads), _left(carry, ends) if wanted[6] else None, None)


def _closed(
    call: Call,
    block: _Block,
    arrays: Any,
    wanted: tuple[bool, ...],
    d_q_and_e: Any,
    d_k: Any,
    d_y: Array,
    d_g: Any,
) -> tuple[Array | None, ...]:
    """The wanted gradients of a block's arrays, in their shapes, from those of its vectors."""
    query, key, _, log_decay, erase, write = arrays
    want_q, want_k, want_v, want_g, want_b, want_w, *_ = wanted
    scale, erase_vector, _ = call.options
    d_q, d_e = (None, None) if d_q_and_e is None else d_q_and_e
    d_b = d_e
    if d_e is not None and not erase_vector:
        d_b = _narrowed(d_e * block.k, erase)
        d_k = d_k + d_e * block.b
    return (
        _regrouped(d_q * scale, query) if want_q else None,
        _regrouped(d_k, key) if want_k else None,
        (d_y if block.w is None else d_y * block.w) if want_v else None,
        _narrowed(d_g, log_decay) if want_g else None,
        d_b if want_b else None,
        _narrowed(d_y * block.v, write) if want_w else None,
    )


def _narrowed(grad: Array, like: Array) -> Array:
    """Summed over the last axis where one number serves it all."""
    return jnp.sum(grad, axis=-1, keepdims=True) if like.shape[-1] != grad.shape[-1] else grad


def _regrouped(grad: Array, like: Array) -> Array:
    """Summed over the value heads of each group."""
    heads = like.shape[2]
    if heads == grad.shape[2]:
        return grad
    return grad.reshape(*grad.shape[:2], heads, grad.shape[2] // heads, grad.shape[3]).sum(axis=3)
