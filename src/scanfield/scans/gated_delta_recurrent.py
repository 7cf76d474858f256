"""The gated delta rule token by token: S' = exp(g) S, up = y - e^T S', S = S' + k up^T, o = q^T S.

Exact for every gate, growth (g > 0) included, and causal for NaN and infinities. Symbols as in ``gated_delta_block``.
"""

from __future__ import annotations

from typing import Any

from scanfield.arrays import Array, cast, sum_to
from scanfield.dispatch import loops
from scanfield.scans.gated_delta_block import BlockGrads, GatedDeltaForm, Setup, close_block, open_block
from scanfield.scans.generic import square_root_chunk


def _rows(xp: Any, x: Array, matrix: Array) -> Array:
    """x^T M for vectors x (..., K) and matrices (..., K, V)"""
    return xp.squeeze(xp.matmul(xp.expand_dims(x, axis=-2), matrix), axis=-2)


def _columns(xp: Any, matrix: Array, x: Array) -> Array:
    """M x for matrices (..., K, V) and vectors (..., V)"""
    return xp.squeeze(xp.matmul(matrix, xp.expand_dims(x, axis=-1)), axis=-1)


def _outer(xp: Any, x: Array, y: Array) -> Array:
    return xp.expand_dims(x, axis=-1) * xp.expand_dims(y, axis=-2)


def _token(config: Any, constants: Any, S: Any, slices: Any) -> tuple[Any, Any]:
    xp, keep = config
    q, k, y, decay, e = slices
    S = S if decay is None else xp.expand_dims(decay, axis=-1) * S
    up = y if e is None else y - _rows(xp, e, S)
    S = S + _outer(xp, k, up)
    return S, (S, up) if keep else (_rows(xp, q, S),)


def _forward_block(setup: Setup, constants: Any, S: Any, slices: Any) -> tuple[Any, Any]:
    xp = setup.xp
    block = open_block(setup, slices)
    decay = None if block.g is None else xp.exp(block.g)
    start = S
    S, (output,) = loops.scan(_token, (xp, False), (), S, (block.q, block.k, block.y, decay, block.e))
    return S, (cast(xp, output, setup.output), start)


def _back_token(config: Any, constants: Any, carry: Any, slices: Any) -> tuple[Any, Any]:
    xp, gate_width, all_wanted = config
    q, k, up, decay, e, d_o, decayed = slices
    d_S = carry + _outer(xp, q, d_o)
    d_up = _rows(xp, k, d_S)
    d_k = _columns(xp, d_S, up) if all_wanted else None
    d_S = d_S if e is None else d_S - _outer(xp, e, d_up)
    d_g = None
    if gate_width and all_wanted:
        d_g = xp.sum(d_S * decayed, axis=-1)
        d_g = xp.sum(d_g, axis=-1, keepdims=True) if gate_width == 1 else d_g
    return d_S if decay is None else xp.expand_dims(decay, axis=-1) * d_S, (d_up, d_k, d_g)


def _backward_block(setup: Setup, slices: Any, S: Any, d_output: Any, carry: Any) -> tuple[Any, Any]:
    xp = setup.xp
    want_q, want_k, _, want_g, want_b, _ = setup.wanted
    block = open_block(setup, slices)
    q, k, y, g, e = block[:5]
    decay = None if g is None else xp.exp(g)
    d_o = cast(xp, d_output, setup.compute)
    d_o = xp.reshape(d_o, (*d_o.shape[:2], setup.heads, setup.group, d_o.shape[3]))
    # The value's gradient alone (relevance) needs no state.
    all_wanted = want_q or want_k or want_g or want_b
    states = decayed = up = None
    if all_wanted:
        _, (states, up) = loops.scan(_token, (xp, True), (), S, (q, k, y, decay, e))
        before = xp.concat([xp.expand_dims(S, axis=1), states[:, :-1, ...]], axis=1)
        decayed = before if decay is None else xp.expand_dims(decay, axis=-1) * before
    config = (xp, 0 if g is None else g.shape[-1], all_wanted)
    carry, (d_y, d_k, d_g) = loops.scan(
        _back_token, config, (), carry, (q, k, up, decay, e, d_o, decayed), reverse=True
    )
    d_q = sum_to(xp, _columns(xp, states, d_o), q.shape) if want_q else None
    d_e = -_columns(xp, decayed, d_y) if e is not None and all_wanted else None
    d_k = None if d_k is None else sum_to(xp, d_k, k.shape)
    return carry, close_block(setup, block, BlockGrads(d_q, d_k, d_y, d_g, d_e))


class Recurrent(GatedDeltaForm):
    """The token recurrence."""

    forward_block = staticmethod(_forward_block)
    backward_block = staticmethod(_backward_block)

    def default_chunk(self, time: int) -> int:
        """As many tokens as balance the kept states with the recomputed ones."""
        return square_root_chunk(time)
