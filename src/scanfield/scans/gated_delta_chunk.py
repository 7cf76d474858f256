"""The gated delta rule a chunk at a time, in matrix products with bisection anchors.

With c the running sum of g over the C rows of a chunk, S_0 the state at its start, and the strictly lower L and
the lower P of ``blocks``: U = (I + L)^(-1) (y - Eb S_0), o = Qb S_0 + P U, S_C = exp(c_C) S_0 + Kb^T U, where

    Eb = e exp(c)      Qb = q exp(c)      Kb_r = k_r exp(sum_(i>r) g_i)

Any log decay <= 0 works, down to -inf. Growth (log decay > 0) is exact in the recurrent form only: here the state is
multiplied by exp(c), which overflows before the state itself does. A NaN or infinity spreads within its chunk. Symbols
as in ``gated_delta_block``; rows are axis -2.
"""

from __future__ import annotations

from typing import Any

from scanfield.arrays import Array, Namespace, cast, sum_to
from scanfield.scans import blocks
from scanfield.scans.gated_delta_block import (
    Block,
    BlockGrads,
    GatedDeltaForm,
    Setup,
    close_block,
    open_block,
)


def _rows_last(xp: Namespace, x: Array | None, rows: int) -> Any:
    """(batch, time, head, group, n) -> (batch, head, group, rows, n), padded with zeros, which leave the state alone"""
    if x is None:
        return None
    x = xp.permute_dims(x, (0, 2, 3, 1, 4))
    missing = rows - x.shape[3]
    if missing == 0:
        return x
    nothing = xp.zeros_like(x[..., :1, :])
    return xp.concat([x, *([nothing] * missing)], axis=3)


def _tokens_second(xp: Namespace, x: Array, count: int) -> Array:
    """The inverse of ``_rows_last``, without the padding."""
    return xp.permute_dims(x[..., :count, :], (0, 3, 1, 2, 4))


class _Chunk:
    """The products of one chunk that forward and backward share."""

    def __init__(self, setup: Setup, block: Block) -> None:
        xp = self.xp = setup.xp
        self.count = block.q.shape[1]
        rows = self.rows = blocks.power_of_two(self.count)
        self.q, self.k, self.y, self.g, self.e = (_rows_last(xp, x, rows) for x in block[:5])
        self.levels = blocks.anchored(xp, self.g, rows)
        self.decay = None if self.g is None else xp.exp(blocks.inclusive(xp, self.g))
        self.decay_after = None if self.g is None else xp.exp(blocks.reverse_exclusive(xp, self.g))
        self.total = (
            None if self.decay is None else xp.matrix_transpose(self.decay[..., -1:, :])
        )  # (..., K or 1, 1)
        self.Qb = blocks.scaled(self.q, self.decay)
        self.Kb = blocks.scaled(self.k, self.decay_after)
        self.Eb = None if self.e is None else blocks.scaled(self.e, self.decay)
        diagonal = xp.sum(self.q * self.k, axis=-1, keepdims=True)[..., None]  # (..., rows, 1, 1)
        lower = blocks.lower_blocks(xp, self.q, self.k, self.levels)
        if lower:
            diagonal = xp.broadcast_to(diagonal, (*lower[0].shape[:-3], rows, 1, 1))
        self.P = blocks.assemble_lower(xp, diagonal, lower) if lower else xp.squeeze(diagonal, axis=-1)
        self.triangle = None
        if self.e is not None and rows > 1:
            self.triangle = blocks.UnitLower(xp, blocks.lower_blocks(xp, self.e, self.k, self.levels))

    def updates(self, S: Array) -> Array:
        """U, the row that each token adds to the state."""
        if self.Eb is None:
            return self.y
        right = self.y - self.xp.matmul(self.Eb, S)
        return right if self.triangle is None else self.triangle.solve(right)

    def kept(self, S: Array) -> Array:
        """What is left of a state at the chunk's start at its end, erasure aside."""
        return blocks.scaled(S, self.total)


def _forward_block(setup: Setup, constants: Any, S: Any, slices: Any) -> tuple[Any, Any]:
    xp = setup.xp
    chunk = _Chunk(setup, open_block(setup, slices))
    U = chunk.updates(S)
    output = xp.matmul(chunk.Qb, S) + xp.matmul(chunk.P, U)
    after = chunk.kept(S) + xp.matmul(xp.matrix_transpose(chunk.Kb), U)
    return after, (cast(xp, _tokens_second(xp, output, chunk.count), setup.output), S)


def _backward_block(setup: Setup, slices: Any, S: Any, d_output: Any, carry: Any) -> tuple[Any, Any]:
    xp = setup.xp
    want_q, want_k, _, want_g, want_b, _ = setup.wanted
    block = open_block(setup, slices)
    chunk = _Chunk(setup, block)
    d_o = cast(xp, d_output, setup.compute)
    d_o = xp.reshape(d_o, (*d_o.shape[:2], setup.heads, setup.group, d_o.shape[3]))
    d_O = _rows_last(xp, d_o, chunk.rows)
    turned = xp.matrix_transpose
    d_U = xp.matmul(turned(chunk.P), d_O) + xp.matmul(chunk.Kb, carry)
    d_X = d_U if chunk.triangle is None else chunk.triangle.solve_transposed(d_U)
    before = chunk.kept(carry) + xp.matmul(turned(chunk.Qb), d_O)
    if chunk.Eb is not None:
        before = before - xp.matmul(turned(chunk.Eb), d_X)
    grads = BlockGrads(None, None, d_X, None, None)
    # The value's gradient alone (relevance) needs no more.
    if want_q or want_k or want_g or want_b:
        grads = _all_gradients(xp, chunk, S, carry, d_O, d_X)
    named = (None if x is None else _tokens_second(xp, x, chunk.count) for x in grads)
    return before, close_block(setup, block, BlockGrads(*named))


def _all_gradients(xp: Namespace, chunk: _Chunk, S: Array, d_S: Array, d_O: Array, d_X: Array) -> BlockGrads:
    """The gradients of q, k, y, g, e; that of g level by level, as the shorter closed form loses three digits."""
    turned = xp.matrix_transpose
    U = chunk.updates(S)
    d_Qb = xp.matmul(d_O, turned(S))
    d_Kb = xp.matmul(U, turned(d_S))
    d_q = blocks.scaled(d_Qb, chunk.decay)
    d_k = blocks.scaled(d_Kb, chunk.decay_after)
    d_diagonal, d_lower = blocks.take_apart(xp, xp.matmul(d_O, turned(U)))
    d_diagonal = xp.squeeze(d_diagonal, axis=-1)
    d_q = d_q + d_diagonal * chunk.k
    d_k = d_k + d_diagonal * chunk.q
    parts: list[tuple[Array, Array]] = []
    if d_lower:
        from_q, from_k, parts = blocks.lower_blocks_back(xp, d_lower, chunk.q, chunk.k, chunk.levels)
        d_q, d_k = d_q + from_q, d_k + from_k
    through_start = chunk.Qb * d_Qb
    d_e = None
    if chunk.Eb is not None:
        d_Eb = -xp.matmul(d_X, turned(S))
        d_e = blocks.scaled(d_Eb, chunk.decay)
        through_start = through_start + chunk.Eb * d_Eb
        if d_lower:
            _, d_L = blocks.take_apart(xp, -xp.matmul(d_X, turned(U)))
            from_e, from_k, more = blocks.lower_blocks_back(xp, d_L, chunk.e, chunk.k, chunk.levels)
            d_e, d_k = d_e + from_e, d_k + from_k
            parts = [(a + c, b + d) for (a, b), (c, d) in zip(parts, more, strict=True)]
    d_g = None
    if chunk.g is not None:
        d_g = _decay_gradient(
            xp, chunk, parts, through_start, chunk.Kb * d_Kb, xp.sum(chunk.kept(S) * d_S, axis=-1)
        )
    d_q, d_k = sum_to(xp, d_q, chunk.q.shape), sum_to(xp, d_k, chunk.k.shape)
    return BlockGrads(d_q, d_k, d_X, d_g, d_e)


def _decay_gradient(
    xp: Namespace,
    chunk: _Chunk,
    parts: list[tuple[Array, Array]],
    through_start: Array,
    to_end: Array,
    across: Array,
) -> Array:
    def of_gate(x: Array) -> Array:
        """Summed over the key axis where one decay serves it all."""
        return xp.sum(x, axis=-1, keepdims=True) if chunk.g.shape[-1] == 1 else x

    d_g = blocks.reverse_inclusive(xp, of_gate(through_start)) + blocks.exclusive(xp, of_gate(to_end))
    d_g = d_g + xp.expand_dims(of_gate(across), axis=-2)
    for first, second in parts:
        level = blocks.join_halves(
            xp, blocks.exclusive(xp, of_gate(first)), blocks.reverse_inclusive(xp, of_gate(second))
        )
        d_g = d_g + level
    return d_g


class Chunk(GatedDeltaForm):
    """The chunk form."""

    forward_block = staticmethod(_forward_block)
    backward_block = staticmethod(_backward_block)

    def default_chunk(self, time: int) -> int:
        """Rows of a chunk."""
        return 32
