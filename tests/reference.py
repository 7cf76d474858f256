"""The readable truth: every recurrence token by token in plain NumPy, float64 or wider.

Nothing here is shared with the library: no chunks, no canonical forms, one Python loop over time. Each
operation is written from its own paper's recurrence, the derived ones too (they do not call `gdn2`). The
three base operations also have their gradients written out token by token. `numeric_vjp` differentiates any
of these functions by differences in extended precision; it is the check of the written gradients and the
truth for the derived operations.

Symbols (shapes; a leading `B` is batch, `T` time)

    linear_scan     a, b (B, T, ...)  h state (B, ...)
    selective_scan  u, delta, z (B, T, D)  A (D, N)  B, C (D, N) | (B, T, N) | (B, T, G, N)  D, delta_bias (D,)
                    s step size after bias, softplus and limit   h state (B, D, N)   G groups
    gdn2            q, k (B, T, H, K)  v, w (B, T, J, V)  g, b (B, T, J, K)   S state (B, J, K, V)
                    J value heads; value head j reads query and key head j // (J / H)

Gradients follow the rule dL = Re(sum conj(gradient) * dx), so a complex gradient is dL/dRe + i dL/dIm.

Options every operation takes: `reverse` walks time from the last token to the first; `cu_seqlens` cuts time
into sequences that do not see each other, each with its own state along the first axis of `initial_state` and
`final_state`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray
Arrays = Mapping[str, Any]

L2NORM_EPS = 1e-6  # of every qk_l2norm: x / sqrt(sum x^2 + 1e-6)


class Truth(NamedTuple):
    output: Array
    final_state: Array
    states: Array  # (B, T + 1, ...): states[:, t] is the state at the boundary before token t; index T is the other end


# -- shared by all: width, and the two ways to walk time -----------------------------------------------------
def wide(x: Any) -> Array:
    """float64 or complex128; longer floats stay, so that differences can be taken in extended precision."""
    x = np.asarray(x)
    if x.dtype in (np.longdouble, np.clongdouble):
        return x
    return x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)


def _given(arrays: Arrays) -> dict[str, Array]:
    return {name: wide(x) for name, x in arrays.items() if x is not None}


def _real_like(x: Array, example: Array) -> Array:
    """The gradient of a real input is real, whatever it was multiplied with."""
    return x.real if example.dtype.kind != "c" else x


def _spans(time: int, cu_seqlens: Any) -> list[tuple[int, int]]:
    if cu_seqlens is None:
        return [(0, time)]
    cuts = [int(c) for c in cu_seqlens]
    assert cuts[0] == 0 and cuts[-1] == time
    return list(pairwise(cuts))


def _cut(timed: Mapping[str, Array], lo: int, hi: int, reverse: bool) -> dict[str, Array]:
    return {n: x[:, lo:hi][:, ::-1] if reverse else x[:, lo:hi] for n, x in timed.items()}


def _forward(
    walk: Callable, timed: Arrays, shared: Arrays, state: Array, reverse: bool, cu_seqlens: Any
) -> Truth:
    """Run `walk` over each sequence. walk(timed, shared, state) -> output (B, T, ...), states (B, T + 1,
    ...).
    """
    timed, shared = _given(timed), _given(shared)
    time = next(iter(timed.values())).shape[1]
    outputs, finals, states = [], [], []
    spans = _spans(time, cu_seqlens)
    for i, (lo, hi) in enumerate(spans):
        start = state if cu_seqlens is None else state[i : i + 1]
        out, walked = walk(_cut(timed, lo, hi, reverse), shared, start)
        outputs.append(out[:, ::-1] if reverse else out)
        finals.append(walked[:, -1])
        along = walked[:, ::-1] if reverse else walked  # back in time order
        states.append(along if i == len(spans) - 1 else along[:, :-1])
    return Truth(
        np.concatenate(outputs, axis=1), np.concatenate(finals, axis=0), np.concatenate(states, axis=1)
    )


def _backward(
    walk_vjp: Callable,
    timed: Arrays,
    shared: Arrays,
    state: Array,
    d_output: Array,
    d_final_state: Array,
    reverse: bool,
    cu_seqlens: Any,
) -> dict[str, Array]:
    """walk_vjp(timed, shared, state, d_output, d_final) -> gradient of each; shared gradients add up over
    sequences.
    """
    timed, shared = _given(timed), _given(shared)
    time = next(iter(timed.values())).shape[1]
    parts: dict[str, list[Array]] = {name: [] for name in (*timed, *shared, "initial_state")}
    for i, (lo, hi) in enumerate(_spans(time, cu_seqlens)):
        one = slice(None) if cu_seqlens is None else slice(i, i + 1)
        d_out = _cut({"d": d_output}, lo, hi, reverse)["d"]
        got = walk_vjp(_cut(timed, lo, hi, reverse), shared, state[one], d_out, d_final_state[one])
        for name, gradient in got.items():
            parts[name].append(gradient[:, ::-1] if reverse and name in timed else gradient)
    total: dict[str, Array] = {}
    for name, pieces in parts.items():
        if name in shared:
            total[name] = sum(pieces[1:], start=pieces[0])
        else:
            total[name] = np.concatenate(pieces, axis=0 if name == "initial_state" else 1)
    return total


def _state(initial_state: Any, shape: tuple[int, ...], kind: np.dtype, cu_seqlens: Any) -> Array:
    """The given state, or zeros: one a batch row, or one a packed sequence."""
    if cu_seqlens is not None:
        shape = (len(cu_seqlens) - 1, *shape[1:])
    if initial_state is None:
        return np.zeros(shape, dtype=kind)
    state = wide(initial_state)
    assert state.shape == shape, (state.shape, shape)
    return state.astype(np.result_type(state, kind))


def _cotangents(d_output: Any, d_final_state: Any, truth: Truth) -> tuple[Array, Array]:
    d_out = np.zeros_like(truth.output) if d_output is None else wide(d_output)
    d_fin = np.zeros_like(truth.final_state) if d_final_state is None else wide(d_final_state)
    assert d_out.shape == truth.output.shape and d_fin.shape == truth.final_state.shape
    return d_out, d_fin


def _sum_to(x: Array, shape: tuple[int, ...]) -> Array:
    """Undo broadcasting: sum over every axis that was 1 (or absent on the left)."""
    while x.ndim > len(shape):
        x = x.sum(axis=0)
    for axis, size in enumerate(shape):
        if size == 1 and x.shape[axis] != 1:
            x = x.sum(axis=axis, keepdims=True)
    return x


def sigmoid(x: Array) -> Array:
    return np.exp(np.minimum(x, 0)) / (1 + np.exp(-np.abs(x)))


def softplus(x: Array) -> Array:
    """log(1 + e^x), exact everywhere: no threshold above which it turns into x."""
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def l2norm(x: Array) -> Array:
    return x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + L2NORM_EPS)


def l2norm_vjp(x: Array, dy: Array) -> Array:
    r = 1 / np.sqrt((x * x).sum(axis=-1, keepdims=True) + L2NORM_EPS)
    y = x * r
    return r * (dy - y * (y * dy).sum(axis=-1, keepdims=True))


# -- linear_scan: h_t = a_t h_(t-1) + b_t --------------------------------------------------------------------
def linear_scan(a, b, initial_state=None, *, reverse=False, cu_seqlens=None) -> Truth:
    a, b = np.broadcast_arrays(wide(a), wide(b))
    state = _state(initial_state, (a.shape[0], *a.shape[2:]), np.result_type(a, b), cu_seqlens)
    return _forward(_linear_walk, {"a": a, "b": b}, {}, state, reverse, cu_seqlens)


def _linear_walk(timed: Arrays, shared: Arrays, h: Array) -> tuple[Array, Array]:
    a, b = timed["a"], timed["b"]
    states = [h]
    for t in range(a.shape[1]):
        h = a[:, t] * h + b[:, t]
        states.append(h)
    states = np.stack(states, axis=1)
    return states[:, 1:], states


def linear_scan_vjp(
    d_output, d_final_state, a, b, initial_state=None, *, reverse=False, cu_seqlens=None
) -> dict[str, Array]:
    a0, b0 = wide(a), wide(b)
    truth = linear_scan(a0, b0, initial_state, reverse=reverse, cu_seqlens=cu_seqlens)
    d_out, d_fin = _cotangents(d_output, d_final_state, truth)
    a, b = np.broadcast_arrays(a0, b0)
    state = _state(initial_state, (a.shape[0], *a.shape[2:]), np.result_type(a, b), cu_seqlens)
    got = _backward(_linear_walk_vjp, {"a": a, "b": b}, {}, state, d_out, d_fin, reverse, cu_seqlens)
    grads = {
        "a": _real_like(_sum_to(got["a"], a0.shape), a0),
        "b": _real_like(_sum_to(got["b"], b0.shape), b0),
    }
    if initial_state is not None:
        grads["initial_state"] = _real_like(got["initial_state"], wide(initial_state))
    return grads


def _linear_walk_vjp(
    timed: Arrays, shared: Arrays, h0: Array, d_out: Array, d_fin: Array
) -> dict[str, Array]:
    a = timed["a"]
    _, states = _linear_walk(timed, shared, h0)
    G = d_fin  # cotangent of the state after token t
    da, db = np.zeros_like(states[:, 1:]), np.zeros_like(states[:, 1:])
    for t in reversed(range(a.shape[1])):
        G = G + d_out[:, t]
        db[:, t] = G
        da[:, t] = G * np.conj(states[:, t])
        G = np.conj(a[:, t]) * G
    return {"a": da, "b": db, "initial_state": G}


# -- selective_scan (Mamba) ----------------------------------------------------------------------------------
def _is_constant(x: Array) -> bool:
    return x.ndim == 2


def _per_channel(x: Array, t: int, channels: int) -> Array:
    """B or C at token t as (batch or 1, channels, state), from any of its three layouts."""
    if _is_constant(x):
        return x[None]
    if x.ndim == 3:
        return np.broadcast_to(x[:, t][:, None, :], (x.shape[0], channels, x.shape[2]))
    return np.repeat(x[:, t], channels // x.shape[2], axis=1)


def _of_layout(gradient: Array, x: Array) -> Array:
    """The adjoint of `_per_channel`, for one token: (batch, channels, state) summed to what x has a token."""
    if _is_constant(x):
        return gradient.sum(axis=0)
    if x.ndim == 3:
        return gradient.sum(axis=1)
    batch, channels, state = gradient.shape
    groups = x.shape[2]
    return gradient.reshape(batch, groups, channels // groups, state).sum(axis=2)


def _step_size(delta: Array, bias: Array | None, use_softplus: bool, limit: Any) -> tuple[Array, Array]:
    """s, and its derivative with respect to delta."""
    zd = delta if bias is None else delta + bias
    s, ds = (softplus(zd), sigmoid(zd)) if use_softplus else (zd, np.ones_like(zd))
    if limit is not None:
        low, high = limit
        ds = np.where((s < low) | (s > high), 0, ds)
        s = np.clip(s, low, high)
    return s, ds


def selective_scan(
    u, delta, A, B, C, D=None, z=None, delta_bias=None, initial_state=None,
    *, delta_softplus=False, dt_limit=None, reverse=False, cu_seqlens=None,
) -> Truth:  # fmt: skip
    timed, shared, state = _selective_inputs(u, delta, A, B, C, D, z, delta_bias, initial_state, cu_seqlens)
    walk = _selective_walk(delta_softplus, dt_limit)
    return _forward(walk, timed, shared, state, reverse, cu_seqlens)


def _selective_inputs(u, delta, A, B, C, D, z, delta_bias, initial_state, cu_seqlens):
    u, A, B, C = wide(u), wide(A), wide(B), wide(C)
    timed = {"u": u, "delta": delta, "z": z}
    shared = {"A": A, "D": D, "delta_bias": delta_bias}
    for name, x in (("B", B), ("C", C)):
        (shared if _is_constant(x) else timed)[name] = x
    state = _state(initial_state, (u.shape[0], *A.shape), np.result_type(A, u), cu_seqlens)
    return timed, shared, state


def _selective_walk(delta_softplus: bool, dt_limit: Any) -> Callable:
    def walk(timed: Arrays, shared: Arrays, h: Array) -> tuple[Array, Array]:
        u, A, D, z = timed["u"], shared["A"], shared.get("D"), timed.get("z")
        B, C = (timed.get(n, shared.get(n)) for n in "BC")
        s, _ = _step_size(timed["delta"], shared.get("delta_bias"), delta_softplus, dt_limit)
        batch, time, channels = u.shape
        outputs, states = np.zeros((batch, time, channels), dtype=u.dtype), [h]
        for t in range(time):
            h = np.exp(s[:, t, :, None] * A) * h + (s[:, t] * u[:, t])[..., None] * _per_channel(
                B, t, channels
            )
            r = (_per_channel(C, t, channels) * h).sum(axis=-1)
            r = 2 * r.real if A.dtype.kind == "c" else r  # the conjugate half is implied
            q = r if D is None else r + D * u[:, t]
            outputs[:, t] = q if z is None else q * z[:, t] * sigmoid(z[:, t])
            states.append(h)
        return outputs, np.stack(states, axis=1)

    return walk


def selective_scan_vjp(
    d_output, d_final_state,
    u, delta, A, B, C, D=None, z=None, delta_bias=None, initial_state=None,
    *, delta_softplus=False, dt_limit=None, reverse=False, cu_seqlens=None,
) -> dict[str, Array]:  # fmt: skip
    timed, shared, state = _selective_inputs(u, delta, A, B, C, D, z, delta_bias, initial_state, cu_seqlens)
    truth = _forward(_selective_walk(delta_softplus, dt_limit), timed, shared, state, reverse, cu_seqlens)
    d_out, d_fin = _cotangents(d_output, d_final_state, truth)
    walk_vjp = _selective_walk_vjp(delta_softplus, dt_limit)
    grads = _backward(walk_vjp, timed, shared, state, d_out, d_fin, reverse, cu_seqlens)
    given = _given({**timed, **shared, "initial_state": initial_state})
    return {name: _real_like(grads[name], x) for name, x in given.items()}


def _selective_walk_vjp(delta_softplus: bool, dt_limit: Any) -> Callable:
    def walk_vjp(timed: Arrays, shared: Arrays, h0: Array, d_out: Array, d_fin: Array) -> dict[str, Array]:
        u, A, D, z = timed["u"], shared["A"], shared.get("D"), timed.get("z")
        B, C = (timed.get(n, shared.get(n)) for n in "BC")
        s, ds_ddelta = _step_size(timed["delta"], shared.get("delta_bias"), delta_softplus, dt_limit)
        _, h = _selective_walk(delta_softplus, dt_limit)(timed, shared, h0)  # h[:, t + 1] is after token t
        _, time, channels = u.shape
        f = 2 if A.dtype.kind == "c" else 1
        grads = {name: np.zeros_like(x, dtype=np.result_type(x, A) if name in "ABC" else None)
                 for name, x in {**timed, **shared}.items()}  # fmt: skip
        G = d_fin
        for t in reversed(range(time)):
            Bt, Ct = _per_channel(B, t, channels), _per_channel(C, t, channels)
            r = (Ct * h[:, t + 1]).sum(axis=-1)
            q = (2 * r.real if f == 2 else r) + (0 if D is None else D * u[:, t])
            dq = d_out[:, t]
            if z is not None:
                sg = sigmoid(z[:, t])
                grads["z"][:, t] = dq * q * sg * (1 + z[:, t] * (1 - sg))
                dq = dq * z[:, t] * sg
            if D is not None:
                grads["D"] += (dq * u[:, t]).sum(axis=0)
                grads["u"][:, t] += D * dq
            G = G + f * np.conj(Ct) * dq[..., None]
            _add(grads["C"], t, _of_layout(f * dq[..., None] * np.conj(h[:, t + 1]), C), _is_constant(C))
            x = s[:, t] * u[:, t]
            _add(grads["B"], t, _of_layout(G * x[..., None], B), _is_constant(B))
            dx = (G * np.conj(Bt)).real.sum(axis=-1)
            grads["u"][:, t] += s[:, t] * dx
            decay = np.exp(s[:, t, :, None] * A)
            W = G * np.conj(decay * h[:, t])
            grads["delta"][:, t] = (u[:, t] * dx + (W * np.conj(A)).real.sum(axis=-1)) * ds_ddelta[:, t]
            grads["A"] += (s[:, t, :, None] * W).sum(axis=0)
            G = np.conj(decay) * G
        if "delta_bias" in shared:
            grads["delta_bias"] = grads["delta"].sum(axis=(0, 1))
        return {**grads, "initial_state": G}

    return walk_vjp


def _add(total: Array, t: int, part: Array, constant: bool) -> None:
    if constant:
        total += part
    else:
        total[:, t] += part


# -- gdn2 (Gated DeltaNet-2, arXiv 2605.22791) ---------------------------------------------------------------
def _per_value_head(x: Array, vheads: int) -> Array:
    """(B, T, H, ...) to (B, T, J, ...): consecutive value heads share a query head."""
    assert vheads % x.shape[2] == 0
    return np.repeat(x, vheads // x.shape[2], axis=2)


def _sum_groups(gradient: Array, heads: int) -> Array:
    """The adjoint of `_per_value_head`."""
    batch, time, vheads, *rest = gradient.shape
    return gradient.reshape(batch, time, heads, vheads // heads, *rest).sum(axis=3)


def _gate(x: Any, like: Array, missing: float) -> Array:
    """A gate written out to the shape of `like`: None is a constant, a gate a head holds for every channel."""
    if x is None:
        return np.full(like.shape, missing, dtype=like.dtype)
    x = wide(x)
    return np.broadcast_to(x if x.ndim == like.ndim else x[..., None], like.shape)


def _gdn2_inputs(query, key, value, log_decay, erase, write, initial_state, scale, qk_l2norm, cu_seqlens):
    q, k, v = wide(query), wide(key), wide(value)
    if qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k = _per_value_head(q, v.shape[2]), _per_value_head(k, v.shape[2])
    timed = {
        "q": q,
        "k": k,
        "v": v,
        "g": _gate(log_decay, k, 0.0),
        "b": _gate(erase, k, 0.0),
        "w": _gate(write, v, 1.0),
    }
    kind = np.result_type(*timed.values())
    state = _state(initial_state, (v.shape[0], v.shape[2], k.shape[3], v.shape[3]), kind, cu_seqlens)
    return timed, state, scale


def gdn2(
    query, key, value, log_decay=None, erase=None, write=None, initial_state=None,
    *, scale=None, qk_l2norm=False, reverse=False, cu_seqlens=None,
) -> Truth:  # fmt: skip
    timed, state, scale = _gdn2_inputs(
        query, key, value, log_decay, erase, write, initial_state, scale, qk_l2norm, cu_seqlens
    )
    return _forward(_gdn2_walk(scale), timed, {}, state, reverse, cu_seqlens)


def _gdn2_token(q, k, v, g, b, w, S, scale):
    """One token: (decayed state, what is written, new state, output); vectors (B, J, K or V), S (B, J, K, V)."""
    decayed = np.exp(g)[..., None] * S
    up = w * v - ((b * k)[..., None] * decayed).sum(axis=-2)
    S = decayed + k[..., None] * up[..., None, :]
    return decayed, up, S, scale * (q[..., None] * S).sum(axis=-2)


def _gdn2_walk(scale: float) -> Callable:
    def walk(timed: Arrays, shared: Arrays, S: Array) -> tuple[Array, Array]:
        outputs, states = np.zeros_like(timed["v"]), [S]
        for t in range(outputs.shape[1]):
            q, k, v, g, b, w = (timed[n][:, t] for n in "qkvgbw")
            _, _, S, outputs[:, t] = _gdn2_token(q, k, v, g, b, w, S, scale)
            states.append(S)
        return outputs, np.stack(states, axis=1)

    return walk


def gdn2_vjp(
    d_output, d_final_state,
    query, key, value, log_decay=None, erase=None, write=None, initial_state=None,
    *, scale=None, qk_l2norm=False, reverse=False, cu_seqlens=None,
) -> dict[str, Array]:  # fmt: skip
    timed, state, scale = _gdn2_inputs(
        query, key, value, log_decay, erase, write, initial_state, scale, qk_l2norm, cu_seqlens
    )
    truth = _forward(_gdn2_walk(scale), timed, {}, state, reverse, cu_seqlens)
    d_out, d_fin = _cotangents(d_output, d_final_state, truth)
    got = _backward(_gdn2_walk_vjp(scale), timed, {}, state, d_out, d_fin, reverse, cu_seqlens)
    query, key = wide(query), wide(key)
    dq, dk = _sum_groups(got["q"], query.shape[2]), _sum_groups(got["k"], key.shape[2])
    if qk_l2norm:
        dq, dk = l2norm_vjp(query, dq), l2norm_vjp(key, dk)
    grads = {"query": dq, "key": dk, "value": got["v"]}
    for name, letter, gate in (("log_decay", "g", log_decay), ("erase", "b", erase), ("write", "w", write)):
        if gate is not None:  # a gate a head: the sum over its channels
            grads[name] = _sum_to_gate(got[letter], wide(gate).shape)
    if initial_state is not None:
        grads["initial_state"] = got["initial_state"]
    return grads


def _sum_to_gate(gradient: Array, shape: tuple[int, ...]) -> Array:
    """The adjoint of `_gate`."""
    if len(shape) == 3:
        return gradient.sum(axis=-1)
    return _sum_to(gradient, shape)


def _gdn2_walk_vjp(scale: float) -> Callable:
    def walk_vjp(timed: Arrays, shared: Arrays, S0: Array, d_out: Array, d_fin: Array) -> dict[str, Array]:
        _, states = _gdn2_walk(scale)(timed, shared, S0)
        grads = {name: np.zeros_like(x) for name, x in timed.items()}
        carry = d_fin
        for t in reversed(range(d_out.shape[1])):
            q, k, v, g, b, w = (timed[n][:, t] for n in "qkvgbw")
            do = d_out[:, t]
            decayed, up, S, _ = _gdn2_token(q, k, v, g, b, w, states[:, t], scale)
            dS = carry + scale * q[..., None] * do[..., None, :]
            dup = (dS * k[..., None]).sum(axis=-2)
            de = -(decayed * dup[..., None, :]).sum(axis=-1)
            d_decayed = dS - (b * k)[..., None] * dup[..., None, :]
            grads["q"][:, t] = scale * (S * do[..., None, :]).sum(axis=-1)
            grads["k"][:, t] = (dS * up[..., None, :]).sum(axis=-1) + de * b
            grads["v"][:, t] = dup * w
            grads["w"][:, t] = dup * v
            grads["b"][:, t] = de * k
            grads["g"][:, t] = (d_decayed * decayed).sum(axis=-1)
            carry = np.exp(g)[..., None] * d_decayed
        return {**grads, "initial_state": carry}

    return walk_vjp


# -- the derived operations, each by its own paper's recurrence ----------------------------------------------
def _matrix_state(
    token: Callable,
    timed: Arrays,
    q: Array,
    vheads: int,
    sizes: tuple[int, int],
    initial_state: Any,
    reverse: bool,
    cu_seqlens: Any,
    output: tuple[int, ...],
) -> Truth:
    """Walk a (B, J, K, V) state; token(S, inputs of one token) -> (S, output of the token)."""
    given = _given(timed)
    state = _state(initial_state, (q.shape[0], vheads, *sizes), np.result_type(*given.values()), cu_seqlens)

    def walk(timed: Arrays, shared: Arrays, S: Array) -> tuple[Array, Array]:
        some = next(iter(timed.values()))
        outputs = np.zeros((*some.shape[:2], *output), dtype=S.dtype)
        states = [S]
        for t in range(some.shape[1]):
            S, outputs[:, t] = token(S, {n: x[:, t] for n, x in timed.items()})
            states.append(S)
        return outputs, np.stack(states, axis=1)

    return _forward(walk, given, {}, state, reverse, cu_seqlens)


def _heads(query, key, value, qk_l2norm, scale):
    """query and key a value head, and the scale."""
    q, k, v = wide(query), wide(key), wide(value)
    if qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    vheads = v.shape[-2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k_axis = k.ndim - 2
    k = np.repeat(k, vheads // k.shape[k_axis], axis=k_axis)
    return _per_value_head(q, vheads), k, v, scale


def _outer(k: Array, v: Array) -> Array:
    return k[..., :, None] * v[..., None, :]


def _read(q: Array, S: Array) -> Array:
    return np.einsum("bhk,bhkv->bhv", q, S)


def linear_attention(query, key, value, initial_state=None, *, scale=None, qk_l2norm=False, reverse=False,
                     cu_seqlens=None) -> Truth:  # fmt: skip
    """Katharopoulos et al. 2020 without a denominator: S += k v^T, o = scale q^T S."""
    q, k, v, scale = _heads(query, key, value, qk_l2norm, scale)

    def token(S, x):
        S = S + _outer(x["k"], x["v"])
        return S, scale * _read(x["q"], S)

    return _matrix_state(
        token,
        {"q": q, "k": k, "v": v},
        q,
        v.shape[2],
        (k.shape[-1], v.shape[-1]),
        initial_state,
        reverse,
        cu_seqlens,
        v.shape[2:],
    )


def retention(
    query,
    key,
    value,
    log_decay=None,
    initial_state=None,
    *,
    scale=None,
    qk_l2norm=False,
    reverse=False,
    cu_seqlens=None,
) -> Truth:
    """RetNet (arXiv 2307.08621): S = gamma S + k v^T with one gamma a head, 1 - 2^(-5-h) unless given."""
    q, k, v, scale = _heads(query, key, value, qk_l2norm, scale)
    if log_decay is None:
        gamma = 1 - np.exp2(-5.0 - np.arange(v.shape[2]))
    else:
        gamma = np.exp(wide(log_decay))
    gamma = np.broadcast_to(gamma, v.shape[:3])

    def token(S, x):
        S = x["gamma"][..., None, None] * S + _outer(x["k"], x["v"])
        return S, scale * _read(x["q"], S)

    timed = {"q": q, "k": k, "v": v, "gamma": gamma}
    return _matrix_state(
        token,
        timed,
        q,
        v.shape[2],
        (k.shape[-1], v.shape[-1]),
        initial_state,
        reverse,
        cu_seqlens,
        v.shape[2:],
    )


def gla(query, key, value, log_decay, initial_state=None, *, scale=None, qk_l2norm=False, reverse=False,
        cu_seqlens=None) -> Truth:  # fmt: skip
    """Gated linear attention (arXiv 2312.06635): S = diag(alpha) S + k v^T."""
    q, k, v, scale = _heads(query, key, value, qk_l2norm, scale)

    def token(S, x):
        S = x["alpha"][..., None] * S + _outer(x["k"], x["v"])
        return S, scale * _read(x["q"], S)

    timed = {"q": q, "k": k, "v": v, "alpha": np.exp(_gate(log_decay, k, 0.0))}
    return _matrix_state(
        token,
        timed,
        q,
        v.shape[2],
        (k.shape[-1], v.shape[-1]),
        initial_state,
        reverse,
        cu_seqlens,
        v.shape[2:],
    )


def ssd(
    x,
    dt,
    A,
    B,
    C,
    D=None,
    dt_bias=None,
    initial_state=None,
    *,
    dt_softplus=False,
    dt_limit=None,
    reverse=False,
    cu_seqlens=None,
) -> Truth:
    """Mamba-2 (arXiv 2405.21060): h = exp(dt A) h + dt x B^T, y = h C + D x; state (B, heads, P, N)."""
    x, A, B, C = wide(x), wide(A), wide(B), wide(C)
    heads = x.shape[2]
    s, _ = _step_size(wide(dt), None if dt_bias is None else wide(dt_bias), dt_softplus, dt_limit)
    D = None if D is None else wide(D)
    timed = {"x": x, "s": s, "B": _per_value_head(B, heads), "C": _per_value_head(C, heads)}

    def token(h, t):
        h = np.exp(t["s"] * A)[..., None, None] * h + _outer(t["s"][..., None] * t["x"], t["B"])
        y = (h * t["C"][..., None, :]).sum(axis=-1)
        return h, y if D is None else y + (D if D.ndim == 2 else D[:, None]) * t["x"]

    return _matrix_state(token, timed, x, heads, (x.shape[3], B.shape[3]), initial_state, reverse, cu_seqlens,
                         x.shape[2:])  # fmt: skip


def delta_rule(query, key, value, beta, initial_state=None, *, scale=None, qk_l2norm=False, reverse=False,
               cu_seqlens=None) -> Truth:  # fmt: skip
    """DeltaNet (arXiv 2406.06484): S = S + beta k (v - S^T k)^T."""
    q, k, v, scale = _heads(query, key, value, qk_l2norm, scale)

    def token(S, x):
        S = S + _outer(x["k"], x["beta"][..., None] * (x["v"] - _read(x["k"], S)))
        return S, scale * _read(x["q"], S)

    timed = {"q": q, "k": k, "v": v, "beta": beta}
    return _matrix_state(
        token,
        timed,
        q,
        v.shape[2],
        (k.shape[-1], v.shape[-1]),
        initial_state,
        reverse,
        cu_seqlens,
        v.shape[2:],
    )


def gated_delta_rule(query, key, value, log_decay, beta, initial_state=None, *, scale=None, qk_l2norm=False,
                     reverse=False, cu_seqlens=None) -> Truth:  # fmt: skip
    """Gated DeltaNet (arXiv 2412.06464): S = alpha S, then the delta rule; alpha one number a head."""
    q, k, v, scale = _heads(query, key, value, qk_l2norm, scale)

    def token(S, x):
        S = np.exp(x["g"])[..., None, None] * S
        S = S + _outer(x["k"], x["beta"][..., None] * (x["v"] - _read(x["k"], S)))
        return S, scale * _read(x["q"], S)

    timed = {"q": q, "k": k, "v": v, "g": log_decay, "beta": beta}
    return _matrix_state(
        token,
        timed,
        q,
        v.shape[2],
        (k.shape[-1], v.shape[-1]),
        initial_state,
        reverse,
        cu_seqlens,
        v.shape[2:],
    )


def kda(query, key, value, log_decay, beta, initial_state=None, *, scale=None, qk_l2norm=False, reverse=False,
        cu_seqlens=None) -> Truth:  # fmt: skip
    """Kimi Delta Attention (arXiv 2510.26692): S = (I - beta k k^T) diag(alpha) S + beta k v^T."""
    q, k, v, scale = _heads(query, key, value, qk_l2norm, scale)

    def token(S, x):
        k, beta = x["k"], x["beta"]
        keep = np.eye(k.shape[-1]) - beta[..., None, None] * _outer(k, k)
        S = np.einsum("bhij,bhjv->bhiv", keep, np.exp(x["g"])[..., None] * S)
        S = S + _outer(beta[..., None] * k, x["v"])
        return S, scale * _read(x["q"], S)

    timed = {"q": q, "k": k, "v": v, "g": log_decay, "beta": beta}
    return _matrix_state(
        token,
        timed,
        q,
        v.shape[2],
        (k.shape[-1], v.shape[-1]),
        initial_state,
        reverse,
        cu_seqlens,
        v.shape[2:],
    )


def comba(query, key, value, erase_key, log_decay, beta, initial_state=None, *, scale=None, qk_l2norm=False,
          reverse=False, cu_seqlens=None) -> Truth:  # fmt: skip
    """Comba (arXiv 2506.02475): what is erased is read with its own key p: S = alpha S, S += beta k (v - S^T
    p)^T.
    """
    q, k, v, scale = _heads(query, key, value, qk_l2norm, scale)
    p = wide(erase_key)
    p = _per_value_head(p, v.shape[2])  # qk_l2norm is of query and key, not of this

    def token(S, x):
        S = np.exp(x["g"])[..., None, None] * S
        S = S + _outer(x["k"], x["beta"][..., None] * (x["v"] - _read(x["p"], S)))
        return S, scale * _read(x["q"], S)

    timed = {"q": q, "k": k, "v": v, "p": p, "g": log_decay, "beta": beta}
    return _matrix_state(
        token,
        timed,
        q,
        v.shape[2],
        (k.shape[-1], v.shape[-1]),
        initial_state,
        reverse,
        cu_seqlens,
        v.shape[2:],
    )


def gated_delta_product(
    query,
    key,
    value,
    log_decay,
    beta,
    initial_state=None,
    *,
    scale=None,
    qk_l2norm=False,
    reverse=False,
    cu_seqlens=None,
) -> Truth:
    """Gated DeltaProduct (arXiv 2502.10297): one decay, then several delta-rule updates a token, then one
    read.
    """
    q, k, v, scale = _heads(query, key, value, qk_l2norm, scale)
    g = np.zeros(v.shape[:2] + v.shape[3:4], dtype=v.dtype) if log_decay is None else wide(log_decay)

    def token(S, x):
        S = np.exp(x["g"])[..., None, None] * S
        for j in range(x["k"].shape[1]):
            k, v, beta = x["k"][:, j], x["v"][:, j], x["beta"][:, j]
            S = S + _outer(k, beta[..., None] * (v - _read(k, S)))
        return S, scale * _read(x["q"], S)

    timed = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    return _matrix_state(
        token,
        timed,
        q,
        v.shape[3],
        (k.shape[-1], v.shape[-1]),
        initial_state,
        reverse,
        cu_seqlens,
        v.shape[3:],
    )


_ALL = (
    linear_scan,
    selective_scan,
    gdn2,
    linear_attention,
    retention,
    gla,
    ssd,
    delta_rule,
    gated_delta_rule,
    kda,
    comba,
)
OPERATIONS: dict[str, Callable[..., Truth]] = {f.__name__: f for f in (*_ALL, gated_delta_product)}
WRITTEN_VJPS: dict[str, Callable[..., dict[str, Array]]] = {
    "linear_scan": linear_scan_vjp,
    "selective_scan": selective_scan_vjp,
    "gdn2": gdn2_vjp,
}


# -- gradients of anything here ------------------------------------------------------------------------------
def forward(op: str, inputs: Arrays, **options: Any) -> Truth:
    """`inputs` by name; None means not given."""
    return OPERATIONS[op](**inputs, **options)


def vjp(op: str, inputs: Arrays, d_output: Any, d_final_state: Any, **options: Any) -> dict[str, Array]:
    """The gradient of every array given: written out for the base operations, by differences for the derived
    ones.
    """
    if op in WRITTEN_VJPS:
        return WRITTEN_VJPS[op](d_output, d_final_state, **inputs, **options)
    return numeric_vjp(op, inputs, d_output, d_final_state, **options)


def numeric_vjp(
    op: str, inputs: Arrays, d_output: Any, d_final_state: Any, **options: Any
) -> dict[str, Array]:
    """Entry by entry, by a fourth-order central difference in extended precision: good to about 1e-13.

    Costs four forward passes an entry, so it is for small arrays. An entry of -inf (a reset) does not move:
    its difference is 0, which is its gradient.
    """
    eps = np.finfo(np.longdouble).eps
    h = np.longdouble(eps) ** np.longdouble(0.2)
    long = {}
    for name, x in inputs.items():
        x = None if x is None else wide(x)
        long[name] = x if x is None else x.astype(np.clongdouble if x.dtype.kind == "c" else np.longdouble)

    def loss(name: str, moved: Array) -> np.longdouble:
        got = OPERATIONS[op](**{**long, name: moved}, **options)
        total = np.longdouble(0)
        for cotangent, result in ((d_output, got.output), (d_final_state, got.final_state)):
            if cotangent is not None:
                total += np.real(np.conj(wide(cotangent)) * result).sum()
        return total

    def slope(name: str, x: Array, index: tuple[int, ...], unit: complex) -> np.longdouble:
        values = []
        for step in (h, -h, 2 * h, -2 * h):
            moved = x.copy()
            moved[index] += step * unit
            values.append(loss(name, moved))
        return (8 * (values[0] - values[1]) - (values[2] - values[3])) / (12 * h)

    grads = {}
    for name, x in long.items():
        if x is None:
            continue
        gradient = np.zeros(x.shape, dtype=np.complex128 if x.dtype.kind == "c" else np.float64)
        for index in np.ndindex(*x.shape):
            gradient[index] = slope(name, x, index, 1.0)
            if x.dtype.kind == "c":
                gradient[index] += 1j * np.float64(slope(name, x, index, 1j))
        grads[name] = gradient
    return grads
