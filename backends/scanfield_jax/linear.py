"""The linear scan by ``lax.scan``. Symbols as in ``scanfield.linear_scan``: h_t = a_t h_(t-1) + b_t.

A token is two operations on what memory brings, so a plain loop over tokens is as fast as a CPU's memory, and
``lax.associative_scan``, which reads and writes everything log(time) times, is slower at every size (1.5 to 3.5 times)
and takes five times as long to compile. Long series in half precision, whose sums need more care, go by the generic
form in two passes.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import jax.numpy as jnp

from scanfield.arrays import COMPLEX_OF
from scanfield.dispatch import Call, Verb, operation_of
from scanfield_jax.spreading import alike
from scanfield_jax.walking import (
    Array,
    Edges,
    Ends,
    batch_first,
    edges_of,
    sum_to,
    time_first,
    tokens,
    zeros,
)


class Linear:
    """Kernels of ``linear_scan``."""

    generic_form = True

    def declines(self, call: Call, verb: Verb) -> str | None:
        """Nothing: every kind of array that a call can have is taken."""
        return None

    def forward(self, call: Call) -> tuple[Array, Array]:
        """Output and final state."""
        form = _careful(call)
        if form is not None:
            output, last = form.forward(call)
            return output, last
        states, last = _states(call, rounded=True)
        return batch_first(states), last

    def save(self, call: Call) -> tuple[Array, Array, tuple[Array, ...]]:
        """Output, final state, and every state: which is the output, where that is not rounded."""
        form = _careful(call)
        if form is not None:
            output, last, residuals = form.save(call)
            return output, last, residuals
        states, last = _states(call)
        output = batch_first(states)
        return output.astype(_output_dtype(call)), last, (output,)

    def backward(
        self,
        call: Call,
        residuals: tuple[Array, ...],
        d_output: Array | None,
        d_final_state: Array | None,
        wanted: tuple[bool, ...],
    ) -> tuple[Array | None, ...]:
        """The scan in the other direction."""
        form = _careful(call)
        if form is not None:
            grads: tuple[Array | None, ...] = form.backward(call, residuals, d_output, d_final_state, wanted)
            return grads
        a, b, _, bounds = call.arrays
        shape, rows, dtype = _sizes(call)
        (states,) = residuals
        d_final_state = zeros((rows, shape[2]), dtype, a) if d_final_state is None else d_final_state
        want_a, want_b, want_state, _ = wanted
        if 0 in shape:
            d_state = jnp.broadcast_to(d_final_state, (rows, shape[2]))
            return (
                jnp.zeros(a.shape, dtype) if want_a else None,
                jnp.zeros(b.shape, dtype) if want_b else None,
                d_state if want_state else None,
                None,
            )
        d_output = zeros(shape, dtype, a) if d_output is None else d_output
        before = _before(call, states) if want_a else None
        held, moving = _parted(jnp.conj(a), shape[1])

        def step(carry: Any, slices: Any) -> tuple[Any, Any]:
            g, _ = carry
            a_t, d_h, h = slices
            a_t = (held if a_t is None else a_t).astype(dtype)
            g = g + d_h.astype(dtype)
            d_a = None if h is None else g * jnp.conj(h)
            return (a_t * g, ()), (d_a, g if want_b else None)

        xs = (moving, time_first(d_output), time_first(before))
        d_state, (d_a, d_b) = _walk(step, d_final_state, xs, bounds, shape, dtype, reverse=True)
        return (
            sum_to(batch_first(d_a), a.shape) if want_a else None,
            sum_to(batch_first(d_b), b.shape) if want_b else None,
            d_state if want_state else None,
            None,
        )

    def summarise(self, call: Call) -> tuple[Array, Array]:
        """The product of the coefficients, and the final state from zero."""
        a, b, _, bounds = call.arrays
        shape, rows, dtype = _sizes(call)
        ones = zeros((rows, shape[2]), dtype, a) + 1
        transition = _states(call._replace(arrays=(a, jnp.zeros_like(b), ones, bounds)))[1]
        return transition, _states(call._replace(arrays=(a, b, None, bounds)))[1]


def _careful(call: Call) -> Any:
    """The generic form that the operation itself chooses for long sums in half precision, else None."""
    operation = operation_of(call)
    name = operation.choose(call)
    return operation.generic["blocked"] if name == "generic.blocked" else None


def _sizes(call: Call) -> tuple[tuple[int, int, int], int, Any]:
    """(batch, time, lanes), the number of states, and the carry's dtype."""
    a, b, state, bounds = call.arrays
    batch, time, width = (m if n == 1 else n for n, m in zip(a.shape, b.shape, strict=True))
    several = any(jnp.iscomplexobj(x) for x in (a, b, state) if x is not None)
    dtype = jnp.dtype(COMPLEX_OF[call.compute] if several else call.compute)
    return (batch, time, width), batch if bounds is None else len(bounds) - 1, dtype


def _output_dtype(call: Call) -> Any:
    """Half precision goes out as it came in."""
    dtype, a = _sizes(call)[2], call.arrays[0]
    return a.dtype if a.dtype.itemsize == 2 and not jnp.iscomplexobj(jnp.zeros((), dtype)) else dtype


def _parted(x: Array, time: int) -> tuple[Any, Any]:
    """(what is the same for all tokens, what changes), the latter with time first."""
    return (None, time_first(x)) if x.shape[1] == time else (x[:, 0], None)


def _states(call: Call, *, rounded: bool = False) -> tuple[Array, Array]:
    """Every state, with time first, and those at the ends."""
    a, b, state, bounds = call.arrays
    shape, rows, dtype = _sizes(call)
    kept = _output_dtype(call) if rounded else dtype
    state = zeros((rows, shape[2]), dtype, a) if state is None else state.astype(dtype)
    if 0 in shape:
        return zeros((shape[1], shape[0], shape[2]), kept, a), state
    a_held, a = _parted(a, shape[1])
    b_held, b = _parted(b, shape[1])

    def step(carry: Any, slices: Any) -> tuple[Any, Any]:
        h, _ = carry
        a_t, b_t = (
            (held if moves is None else moves).astype(dtype)
            for held, moves in zip((a_held, b_held), slices, strict=True)
        )
        h = a_t * h + b_t
        return (h, ()), h.astype(kept)

    last, states = _walk(step, state, (a, b), bounds, shape, dtype)
    return states, last


def _walk(
    step: Any,
    state: Array,
    xs: Any,
    bounds: tuple[int, ...] | None,
    shape: tuple[int, int, int],
    dtype: Any,
    *,
    reverse: bool = False,
) -> tuple[Array, Any]:
    """From the states that enter to those that leave, and what the tokens give."""
    if bounds is None:
        (last, _), _, outputs = tokens(step, (state, ()), xs, reverse=reverse)
        return last, outputs
    nothing = zeros((1, shape[2]), dtype, state)
    ends = Ends(state, state)
    _, ends_after, outputs = tokens(
        step, (nothing, ()), xs, edges_of(bounds, shape[1]), ends, reverse=reverse
    )
    return (ends if ends_after is None else ends_after).leaving, outputs


def _before(call: Call, states: Array) -> Array:
    """The state that each token's coefficient was multiplied with."""
    _, _, state, bounds = call.arrays
    shape, rows, dtype = _sizes(call)
    state = zeros((rows, shape[2]), dtype, states) if state is None else state.astype(dtype)
    if bounds is None:
        return jnp.concatenate([alike(state[:, None], states), states[:, :-1]], axis=1)
    shifted = jnp.concatenate([states[:, :1], states[:, :-1]], axis=1)
    if not isinstance(bounds, tuple):
        edges = cast(Edges, edges_of(bounds, shape[1]))
        return jnp.where(edges.first[:, None], state[edges.sequence], shifted)
    starts = [(i, first) for i, (first, last) in enumerate(pairwise(bounds)) if first < last]
    sequences, places = (jnp.asarray(x) for x in zip(*starts, strict=True))
    return shifted.at[:, places].set(state[sequences][None])
