"""What all of flash-linear-attention's functions share: the rule they call, state layouts, packs, and words they refuse."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

from scanfield.arrays import Array, Namespace, library_of
from scanfield.compat import _arrays
from scanfield.errors import ArgumentError, ShapeError
from scanfield.scans.gated_delta import gdn2

CHUNK = 64  # upstream's, for the states between chunks
WORDS = (
    "A_log",
    "dt_bias",
    "chunk_size",
    "transpose_state_layout",
)  # what the chunk forms take beyond their signature


class Words(NamedTuple):
    """What came as further keywords, sorted."""

    A_log: Array | None = None
    dt_bias: Array | None = None
    chunk_size: int | None = None
    use_gate_in_kernel: bool = False
    state_v_first: bool = False


def read_words(function: str, words: Mapping[str, Any], *known: str, state_v_first: bool = False) -> Words:
    """Further keywords as upstream reads them; what nobody reads raises instead of being lost."""
    found = dict(words)
    if "transpose_state_layout" in known and "transpose_state_layout" in found:
        if state_v_first:
            raise ArgumentError("transpose_state_layout: state_v_first is given too, and means the same")
        warnings.warn(
            "transpose_state_layout is the old name of state_v_first", DeprecationWarning, stacklevel=3
        )
        state_v_first = found.pop("transpose_state_layout")
    if "head_first" in found:
        raise ArgumentError(
            f"head_first: {function} takes (batch, time, heads, ...) only, as upstream does now"
        )
    for word in found:
        if word not in known:
            more = f"; beside its own arguments it takes {', '.join(known)}" if known else ""
            raise ArgumentError(f"{word}: {function} has no such argument{more}")
    return Words(**found, state_v_first=bool(state_v_first))


def refuse(function: str, **arguments: Any) -> None:
    """ArgumentError for an argument that upstream has and this function cannot honour, unless it is None."""
    for name, value in arguments.items():
        if value is not None:
            raise ArgumentError(
                f"{name}: not supported by scanfield's {function}; pass None. {_INSTEAD.get(name, '')}"
            )


_INSTEAD = {
    "cp_context": "A sequence is split over machines with scanfield.summarise, compose and apply.",
}


def bounds_of(cu_seqlens: Any, cu_seqlens_cpu: Any = None) -> Any:
    """The bounds of a pack: the copy on the host where there is one, so that no device is waited for."""
    if cu_seqlens_cpu is None:
        return cu_seqlens
    if cu_seqlens is None:
        raise ArgumentError("cu_seqlens_cpu: it is the host's copy of cu_seqlens, which is None")
    host = _arrays.host_tuple(cu_seqlens_cpu, "cu_seqlens_cpu")
    if len(host) != len(cu_seqlens):
        raise ShapeError(f"cu_seqlens_cpu: {len(host)} bounds, but cu_seqlens has {len(cu_seqlens)}")
    return host


def turned(xp: Namespace, state: Array | None, state_v_first: bool) -> Array | None:
    """A state between (..., K, V) and (..., V, K)."""
    return xp.matrix_transpose(state) if state_v_first and state is not None else state


def check_qkv(q: Array, k: Array, v: Array, *, grouped: bool) -> None:
    """ShapeError unless q and k are alike and v has the heads of k, or with ``grouped`` a multiple of them."""
    for name, array in {"q": q, "k": k, "v": v}.items():
        _arrays.check_rank(array, name, "batch time heads width")
    if tuple(q.shape) != tuple(k.shape):
        raise ShapeError(
            f"k: shape {tuple(k.shape)}, but q has {tuple(q.shape)}; both are (batch, time, heads, K)"
        )
    heads, vheads = k.shape[2], v.shape[2]
    if tuple(v.shape[:2]) != tuple(k.shape[:2]):
        raise ShapeError(f"v: shape {tuple(v.shape)}, but batch and time are {tuple(k.shape[:2])} by k")
    if vheads != heads and (not grouped or heads == 0 or vheads % heads):
        wanted = f"a multiple of {heads}" if grouped else str(heads)
        raise ShapeError(
            f"v: shape {tuple(v.shape)} has {vheads} heads; allowed is {wanted} (k {tuple(k.shape)})"
        )


def fitted(
    q: Array,
    k: Array,
    v: Array,
    gates: Mapping[str, tuple[Array | None, str | None]],
    initial_state: Array | None,
    *,
    grouped: bool,
    hints: Mapping[str, str] | None = None,
) -> Namespace:
    """The namespace of a call whose arrays fit each other.

    ``gates`` are pairs by name: an array or None, and the names of its axes, or None where the caller checks them.
    """
    arrays = {name: array for name, (array, _) in gates.items()}
    xp = _arrays.namespace(q=q, k=k, v=v, **arrays, initial_state=initial_state)
    check_qkv(q, k, v, grouped=grouped)
    names = ("batch", "time", "heads", "vheads", "K", "V")
    sizes = dict(zip(names, (*k.shape[:3], v.shape[2], k.shape[3], v.shape[3]), strict=True))
    for name, (array, axes) in gates.items():
        if axes is not None:
            wanted = {axis: sizes[axis] for axis in axes.split()}
            check_gate_shape(array, name, (hints or {}).get(name, ""), **wanted)
    return xp


def check_gate_shape(array: Array | None, name: str, hint: str = "", **sizes: int) -> None:
    """ShapeError, with a hint, unless a gate has these sizes."""
    if array is None:
        return
    library_of(array, name)
    if tuple(array.shape) != tuple(sizes.values()):
        raise ShapeError(
            f"{name}: shape {tuple(array.shape)}, but ({', '.join(sizes)}) = {tuple(sizes.values())} is expected{hint}"
        )


def run(
    xp: Namespace,
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array | None,
    *,
    erase: Array | None = None,
    write: Array | None = None,
    beta: Array | None = None,
    value_decay: Array | None = None,
    scale: float | None,
    initial_state: Array | None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False,
    bounds: Any = None,
    reverse: bool = False,
    chunk_size: int | None = None,
    return_intermediate_states: bool = False,
) -> tuple[Any, ...]:
    """``gdn2`` with upstream's conventions for states and results; ``beta`` is both erase and write.

    ``value_decay`` (batch, time, vheads, V) decays value channels, and ``beta`` may have an axis of them: the
    columns of a state do not know each other, so each is then a head of its own.
    """
    width = v.shape[-1]
    state = turned(xp, initial_state, state_v_first)
    split = value_decay is not None or (beta is not None and len(beta.shape) == 4)
    if split:
        v, log_decay, beta, state = _columns(xp, v, log_decay, value_decay, beta, state)
    if beta is not None:
        erase = write = beta
    result: tuple[Any, ...] = gdn2(
        q, k, v, log_decay, erase, write, state, scale=scale, qk_l2norm=use_qk_l2norm_in_kernel, reverse=reverse,
        cu_seqlens=bounds, chunk_size=chunk_size, states_at="chunks" if return_intermediate_states else None,
    )  # fmt: skip
    output, state = result[:2]
    if split:
        rows, key, heads = state.shape[0], state.shape[2], v.shape[2] // max(width, 1)
        output = xp.reshape(output, (*output.shape[:2], heads, width))
        state = xp.matrix_transpose(xp.reshape(state, (rows, heads, width, key)))
    final = turned(xp, state, state_v_first) if output_final_state else None
    if return_intermediate_states:
        return output, final, turned(xp, result[2], state_v_first)
    return output, final


def _columns(
    xp: Namespace,
    v: Array,
    log_decay: Array | None,
    value_decay: Array | None,
    beta: Array | None,
    state: Array | None,
) -> tuple[Array, Array | None, Array | None, Array | None]:
    """Value head j of width V as V heads of width 1; gates spread over them."""
    batch, time, vheads, width = v.shape

    def spread(x: Array) -> Array:
        """(batch, time, vheads, 1 or V, ...) -> (batch, time, vheads * V, ...)"""
        whole = xp.broadcast_to(x, (batch, time, vheads, width, *x.shape[4:]))
        return xp.reshape(whole, (batch, time, vheads * width, *x.shape[4:]))

    decay = None if log_decay is None else _arrays.wide(xp, xp.expand_dims(log_decay, axis=3))
    if value_decay is not None:
        own = _arrays.wide(xp, value_decay)
        if decay is not None:
            own = decay + (own if len(decay.shape) == 4 else xp.expand_dims(own, axis=-1))
        decay = own
    if beta is not None:
        beta = spread(beta if len(beta.shape) == 4 else xp.expand_dims(beta, axis=-1))
    if state is not None:
        if len(state.shape) != 4 or (state.shape[1], state.shape[3]) != (vheads, width):
            raise ShapeError(
                f"initial_state: shape {tuple(state.shape)}; {vheads} value heads and a width of {width} are expected"
            )
        rows, key = state.shape[0], state.shape[2]
        state = xp.reshape(xp.matrix_transpose(state), (rows, vheads * width, key, 1))
    return spread(xp.expand_dims(v, axis=-1)), None if decay is None else spread(decay), beta, state
