"""One block of tokens of the gated delta rule, as both of its forms want it.

Glossary (Gated DeltaNet-2, arXiv 2605.22791)
--------
q, k   (batch, time, head, 1, K)         scaled query, key; one for all value heads of the group
g, b   (batch, time, head, group, K or 1) log decay, erase gate
e      (batch, time, head, group, K)     erase vector b * k
w, v   (batch, time, head, group, V)     write gate (or V = 1), value
y      (batch, time, head, group, V)     w * v
S      (batch, head, group, K, V)        state
"""

from __future__ import annotations

from typing import Any, NamedTuple

from scanfield.arrays import Array, Namespace, cast, device_of, dtype_of, library_of, sum_to, zeros
from scanfield.dispatch import Call, Grads, loops
from scanfield.scans.generic import GenericForm, Result, chunk_of, walk_back


class Setup(NamedTuple):
    """What is static about a call; hashable, so that a compiling library knows a block again."""

    xp: Namespace
    compute: Any
    output: Any
    heads: int
    group: int
    scale: float
    erase_vector: bool
    wanted: tuple[bool, ...] = ()


class Block(NamedTuple):
    """The arrays of one block, in the compute dtype; g and e are None without decay and without erasure."""

    q: Array
    k: Array
    y: Array
    g: Any
    e: Any
    b: Any
    v: Array
    w: Any


class BlockGrads(NamedTuple):
    """Gradients of a block's q, k, y, g and e; what was not wanted is None."""

    q: Array | None
    k: Array | None
    y: Array
    g: Array | None
    e: Array | None


def open_block(setup: Setup, slices: Any) -> Block:
    """(batch, time, head, ...) slices in the compute dtype, heads split into groups, gates multiplied in."""
    query, key, value, log_decay, erase, write = slices
    q = _split(setup, query, 1) * setup.scale
    k = _split(setup, key, 1)
    v = _split(setup, value, setup.group)
    g = None if log_decay is None else _split(setup, log_decay, setup.group)
    b = None if erase is None else _split(setup, erase, setup.group)
    w = None if write is None else _split(setup, write, setup.group)
    e = b if b is None or setup.erase_vector else b * k
    return Block(q, k, v if w is None else w * v, g, e, b, v, w)


def _split(setup: Setup, x: Array, group: int) -> Array:
    x = cast(setup.xp, x, setup.compute)
    return setup.xp.reshape(x, (*x.shape[:2], setup.heads, group, x.shape[3]))


def close_block(setup: Setup, block: Block, grads: BlockGrads) -> tuple[Array | None, ...]:
    """Gradients of query, key, value, log_decay, erase and write of the block, in their canonical shapes."""
    want_q, want_k, want_v, want_g, want_b, want_w = setup.wanted
    xp = setup.xp
    d_k, d_b = grads.k, None
    if grads.e is not None and (want_k or want_b):
        if setup.erase_vector:
            d_b = grads.e
        else:
            d_b = grads.e * block.k
            d_k = None if d_k is None else d_k + sum_to(xp, grads.e * block.b, block.k.shape)
    d_v = grads.y if block.w is None else grads.y * block.w
    d_w = None if block.w is None else grads.y * block.v
    return (
        _joined(setup, None if grads.q is None else grads.q * setup.scale, block.q) if want_q else None,
        _joined(setup, d_k, block.k) if want_k else None,
        _joined(setup, d_v, block.v) if want_v else None,
        _joined(setup, grads.g, block.g) if want_g else None,
        _joined(setup, d_b, block.b) if want_b else None,
        _joined(setup, d_w, block.w) if want_w else None,
    )


def _joined(setup: Setup, gradient: Array | None, like: Array | None) -> Array | None:
    if gradient is None or like is None:
        return None
    x = sum_to(setup.xp, gradient, like.shape)
    return setup.xp.reshape(x, (*x.shape[:2], x.shape[2] * x.shape[3], x.shape[4]))


class GatedDeltaForm(GenericForm):
    """What the two forms share; they differ in how a block runs forward and back."""

    neutral: dict[str, float] = {}  # zeros leave the state as it is

    forward_block: Any
    """``(setup, constants, S, slices) -> (S, (output, S at the start))``"""
    backward_block: Any
    """``(setup, slices, S, d_output, dS) -> (dS, gradients of the slices)``"""

    def default_chunk(self, time: int) -> int:
        """Tokens in a block if the call does not say."""
        raise NotImplementedError

    def shapes(self, call: Call) -> tuple[tuple[int, ...], tuple[int, ...], Any, Any]:
        """Output (batch, time, vhead, V) and state (batch, vhead, K, V)."""
        query, _, value = call.arrays[:3]
        xp = library_of(query, "query").namespace
        batch, time, vheads, width = value.shape
        shape = (batch, time, vheads, width)
        return shape, (batch, vheads, query.shape[3], width), query.dtype, dtype_of(xp, call.compute)

    def _setup(self, call: Call, wanted: tuple[bool, ...] = ()) -> Setup:
        query, _, value = call.arrays[:3]
        xp = library_of(query, "query").namespace
        scale, erase_vector, _ = call.options
        heads = query.shape[2]
        return Setup(
            xp,
            dtype_of(xp, call.compute),
            query.dtype,
            heads,
            value.shape[2] // max(heads, 1),
            scale,
            erase_vector,
            wanted,
        )

    def _state(self, setup: Setup, state: Array) -> Array:
        return setup.xp.reshape(state, (state.shape[0], setup.heads, setup.group, *state.shape[2:]))

    def scan(self, call: Call, keep: bool) -> Result:
        """Blocks of tokens; the state at each block's start is what backward needs."""
        setup = self._setup(call)
        xp = setup.xp
        output_shape, state_shape, _, _ = self.shapes(call)
        state = call.arrays[6]
        start = zeros(xp, state_shape, setup.compute, call.arrays[0]) if state is None else state
        size = chunk_of(call.options[2], output_shape[1], self.default_chunk(output_shape[1]))
        last, (output, starts) = loops.blocks(
            self.forward_block, setup, (), self._state(setup, start), call.arrays[:6], size, joined=1
        )
        output = xp.reshape(output, output_shape)
        return output, xp.reshape(last, state_shape), (starts,) if keep else ()

    def reverse(
        self,
        call: Call,
        residuals: tuple[Array, ...],
        d_output: Array | None,
        d_final_state: Array | None,
        wanted: tuple[bool, ...],
    ) -> Grads:
        """From the last block to the first, each recomputed from the state at its start."""
        arrays = call.arrays[:6]
        wants = tuple(want and array is not None for want, array in zip(wanted, arrays, strict=False))
        setup = self._setup(call, wants)
        xp = setup.xp
        output_shape, state_shape, _, _ = self.shapes(call)
        if d_output is None:
            d_output = zeros(xp, output_shape, setup.compute, call.arrays[0])
        if d_final_state is None:
            d_final_state = zeros(xp, state_shape, setup.compute, call.arrays[0])
        carry, grads = walk_back(
            self.backward_block,
            setup,
            arrays,
            (True,) * 6,
            wants,
            residuals[0],
            d_output,
            self._state(setup, d_final_state),
            chunk_of(call.options[2], output_shape[1], self.default_chunk(output_shape[1])),
            (setup.compute,) * 6,
            xp,
        )
        d_state = xp.reshape(carry, state_shape) if wanted[6] and call.arrays[6] is not None else None
        return (*grads, d_state, None)

    def transition(self, call: Call) -> Array:
        """exp(sum g) where nothing is erased, else the matrix that identity columns beside the value come out as."""
        query, key, value, log_decay, erase, _, _, bounds = call.arrays
        setup = self._setup(call)
        xp = setup.xp
        batch, time, vheads, _ = value.shape
        width = query.shape[3]
        if erase is None:
            if log_decay is None:
                return self.identity(call)
            total = xp.sum(cast(xp, log_decay, setup.compute), axis=1)  # (batch, vhead, K or 1)
            return xp.expand_dims(xp.broadcast_to(xp.exp(total), (batch, vheads, width)), axis=-1)
        nothing = zeros(xp, (batch, time, vheads, width), setup.compute, query)
        call = call._replace(
            arrays=(query, key, nothing, log_decay, erase, None, self.identity(call), bounds)
        )
        return self.scan(call, keep=False)[1]

    def identity(self, call: Call) -> Array:
        """Ones (batch, vhead, K, 1) where nothing is erased, else unit matrices (batch, vhead, K, K)."""
        query, _, value, _, erase, _, _, _ = call.arrays
        setup = self._setup(call)
        xp = setup.xp
        width = query.shape[3]
        lead = (value.shape[0], value.shape[2])
        if erase is None:
            return zeros(xp, (*lead, width, 1), setup.compute, query) + 1
        unit = xp.eye(width, dtype=setup.compute, device=device_of(query))
        return zeros(xp, (*lead, width, width), setup.compute, query) + unit
