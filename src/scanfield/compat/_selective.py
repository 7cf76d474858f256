"""Mamba-1 under mamba_ssm's names and layouts: time last, B and C in four forms, complex numbers as interleaved pairs."""

from __future__ import annotations

from typing import Any

from scanfield.arrays import REAL_OF, Array, Namespace, cast, dtype_name, dtype_of, is_complex
from scanfield.compat import _arrays
from scanfield.compat._convolution import causal_conv1d
from scanfield.errors import ArgumentError, ShapeError
from scanfield.scans.selective import selective_scan


def selective_scan_fn(
    u: Array,
    delta: Array,
    A: Array,
    B: Array,
    C: Array,
    D: Array | None = None,
    z: Array | None = None,
    delta_bias: Array | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    *,
    initial_state: Array | None = None,
    seq_idx: Array | None = None,
    cu_seqlens: Any = None,
) -> Any:
    """``mamba_ssm.ops.selective_scan_interface.selective_scan_fn``: Mamba's selective scan with time last.

    Parameters
    ----------
    u, delta : arrays (batch, channels, time)
    A : array (channels, state), real or complex
    B, C : arrays (channels, state), (batch, state, time) or (batch, groups, state, time)
        Told apart by rank, each for itself. With complex A, those with a time axis are real and twice as long: real
        and imaginary parts alternate along the last axis.
    D : array (channels,), optional
    z : array (batch, channels, time), optional
        Gate, multiplies the output by z sigmoid(z).
    delta_bias : array (channels,), optional
    delta_softplus : bool
    return_last_state : bool
        Also return the state after the last token.
    initial_state : array (batch, channels, state), optional
        Not upstream: the state before the first token; with ``cu_seqlens`` one for each sequence, with ``seq_idx``
        that of each row's first sequence.
    seq_idx : integers (batch, time), optional
        Not upstream: the state starts anew wherever this number changes.
    cu_seqlens : integers (sequences + 1,), optional
        Not upstream: bounds of sequences packed into one row; the last state is then one for each sequence.

    Returns
    -------
    array (batch, channels, time) in the dtype of ``u``, or with ``return_last_state`` that and the state (batch,
    channels, state), which has gradients here and is float32 at least

    Raises
    ------
    ShapeError, DtypeError, BackendError, DeviceError, ArgumentError
        As ``scanfield.selective_scan``; for both ``seq_idx`` and ``cu_seqlens``.

    Notes
    -----
    The interface of mamba-ssm 2.3.2. float64 is computed in float64; arrays that disagree in size raise.

    Examples
    --------
    >>> import numpy
    >>> from scanfield.compat.mamba_ssm import selective_scan_fn
    >>> u = delta = numpy.ones((1, 1, 3))
    >>> B = C = numpy.ones((1, 1, 3))
    >>> selective_scan_fn(u, delta, numpy.log([[0.5]]), B, C, return_last_state=True)
    (array([[[1.  , 1.5 , 1.75]]]), array([[[1.75]]]))
    """
    return _scan(
        u,
        delta,
        A,
        B,
        C,
        D,
        z,
        delta_bias,
        delta_softplus,
        return_last_state,
        initial_state,
        seq_idx,
        cu_seqlens,
    )


def selective_scan_ref(
    u: Array,
    delta: Array,
    A: Array,
    B: Array,
    C: Array,
    D: Array | None = None,
    z: Array | None = None,
    delta_bias: Array | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
) -> Any:
    """``mamba_ssm.ops.selective_scan_interface.selective_scan_ref``: ``selective_scan_fn`` by the generic token loop.

    Parameters, results and errors are those of ``selective_scan_fn``; what runs is ``method="generic.recurrent"``,
    the readable form that defines the result.

    Examples
    --------
    >>> import numpy
    >>> from scanfield.compat.mamba_ssm import selective_scan_ref
    >>> ones = numpy.ones((1, 1, 3))
    >>> selective_scan_ref(ones, ones, numpy.log([[0.5]]), ones, ones)
    array([[[1.  , 1.5 , 1.75]]])
    """
    return _scan(
        u, delta, A, B, C, D, z, delta_bias, delta_softplus, return_last_state, method="generic.recurrent"
    )


def _scan(
    u: Array,
    delta: Array,
    A: Array,
    B: Array,
    C: Array,
    D: Array | None,
    z: Array | None,
    delta_bias: Array | None,
    delta_softplus: bool,
    return_last_state: bool,
    initial_state: Array | None = None,
    seq_idx: Array | None = None,
    cu_seqlens: Any = None,
    method: str | None = None,
) -> Any:
    xp = _arrays.namespace(
        u=u, delta=delta, A=A, B=B, C=C, D=D, z=z, delta_bias=delta_bias, initial_state=initial_state
    )
    for name, array in {"u": u, "delta": delta, "z": z}.items():
        if array is not None or name != "z":
            _arrays.check_rank(array, name, "batch channels time")
    _arrays.check_rank(A, "A", "channels state")
    rows: dict[str, Any] = {
        "u": _arrays.time_second(xp, u),
        "delta": _arrays.time_second(xp, delta),
        "B": _time_of(xp, B, "B", A),
        "C": _time_of(xp, C, "C", A),
        "z": None if z is None else _arrays.time_second(xp, z),
    }
    shared: dict[str, Any] = {"A": A, "D": D, "delta_bias": delta_bias}
    batch, channels, time = u.shape
    if seq_idx is None:
        y, state = selective_scan(
            **rows, **shared, initial_state=initial_state, delta_softplus=delta_softplus, cu_seqlens=cu_seqlens,
            method=method,
        )  # fmt: skip
    else:
        if cu_seqlens is not None:
            raise ArgumentError("seq_idx: cu_seqlens cuts the row already; pass one of them")
        if initial_state is not None and initial_state.shape[0] != batch:
            raise ShapeError(f"initial_state: {initial_state.shape[0]} states for a batch of {batch}")
        pack = _arrays.pack_of(seq_idx, batch, time)
        lines: dict[str, Any] = {
            name: x if x is None or len(x.shape) == 2 else _arrays.folded(xp, x) for name, x in rows.items()
        }
        y, state = selective_scan(
            **lines, **shared, initial_state=_arrays.spread_states(xp, initial_state, pack),
            delta_softplus=delta_softplus, cu_seqlens=pack.bounds, method=method,
        )  # fmt: skip
        y = xp.reshape(y, (batch, time, channels))
        state = _arrays.take(xp, state, pack.last)
    y = _arrays.time_last(xp, y)
    return (y, state) if return_last_state else y


def _time_of(xp: Namespace, x: Array, name: str, A: Array) -> Array:
    """B or C in our layout: as it is without time, else (batch, time, state) or (batch, time, groups, state)."""
    _arrays.check_rank(x, name, "channels state", "batch state time", "batch groups state time")
    if len(x.shape) == 2:
        return x
    if is_complex(A) and not is_complex(x):
        x = _from_pairs(xp, x, name, A.dtype)
    return _arrays.time_second(xp, x)


def _from_pairs(xp: Namespace, x: Array, name: str, dtype: Any) -> Array:
    """(..., 2 n) real, parts alternating, to (..., n) complex."""
    if x.shape[-1] % 2:
        raise ShapeError(
            f"{name}: shape {tuple(x.shape)}; with complex A the last axis holds real and imaginary parts in turn, "
            "so its size must be even"
        )
    pairs = xp.reshape(x, (*x.shape[:-1], x.shape[-1] // 2, 2))
    pairs = cast(xp, pairs, dtype_of(xp, REAL_OF[dtype_name(dtype)]))
    return cast(xp, pairs[..., 0], dtype) + cast(xp, pairs[..., 1], dtype) * 1j


# ---------------------------------------------------------------------------------------------------------------------
# the whole inner part of a Mamba-1 block


def mamba_inner_fn(
    xz: Array,
    conv1d_weight: Array,
    conv1d_bias: Array | None,
    x_proj_weight: Array,
    delta_proj_weight: Array,
    out_proj_weight: Array,
    out_proj_bias: Array | None,
    A: Array,
    B: Array | None = None,
    C: Array | None = None,
    D: Array | None = None,
    delta_bias: Array | None = None,
    B_proj_bias: Array | None = None,
    C_proj_bias: Array | None = None,
    delta_softplus: bool = True,
    checkpoint_lvl: int = 1,
    b_rms_weight: Array | None = None,
    c_rms_weight: Array | None = None,
    dt_rms_weight: Array | None = None,
    b_c_dt_rms_eps: float = 1e-6,
) -> Array:
    """``mamba_ssm.ops.selective_scan_interface.mamba_inner_fn``: convolution, projections, scan and output of a block.

    Parameters
    ----------
    xz : array (batch, 2 channels, time)
        Input and gate, as the block's first projection makes them.
    conv1d_weight : array (channels, 1, W)
    conv1d_bias : array (channels,) or None
    x_proj_weight : array (rank + 2 state, channels)
        With complex A, 4 state: real and imaginary parts of B, then of C, in turn.
    delta_proj_weight : array (channels, rank)
    out_proj_weight : array (width, channels)
    out_proj_bias : array (width,) or None
    A : array (channels, state)
    B, C : arrays as in ``selective_scan_fn``, optional
        None: the token's own, from ``x_proj_weight``.
    D, delta_bias : arrays (channels,), optional
    B_proj_bias, C_proj_bias : arrays (state,), optional
    delta_softplus : bool
    checkpoint_lvl : 0 or 1
        How much upstream recomputes; it changes no result.
    b_rms_weight, c_rms_weight : arrays (state,), optional
    dt_rms_weight : array (channels,), optional
        Weights of a root-mean-square norm of B, C and the steps (FalconMamba).
    b_c_dt_rms_eps : float

    Returns
    -------
    array (batch, time, width)

    Raises
    ------
    ShapeError, DtypeError, BackendError, DeviceError, ArgumentError
        As ``selective_scan_fn`` and ``causal_conv1d``.

    Notes
    -----
    The interface of mamba-ssm 2.3.2.

    Examples
    --------
    >>> import numpy
    >>> from scanfield.compat.mamba_ssm import mamba_inner_fn
    >>> one = numpy.ones((1, 1))
    >>> y = mamba_inner_fn(
    ...     numpy.ones((1, 2, 4)), numpy.ones((1, 1, 2)), None, numpy.ones((3, 1)), one, one, None, -one
    ... )
    >>> y.shape
    (1, 4, 1)
    """
    if checkpoint_lvl not in (0, 1):
        raise ArgumentError(f"checkpoint_lvl: {checkpoint_lvl!r}; allowed are 0 and 1")
    xp = _arrays.namespace(
        xz=xz,
        conv1d_weight=conv1d_weight,
        conv1d_bias=conv1d_bias,
        x_proj_weight=x_proj_weight,
        delta_proj_weight=delta_proj_weight,
        out_proj_weight=out_proj_weight,
        out_proj_bias=out_proj_bias,
        A=A,
        B=B,
        C=C,
        D=D,
        delta_bias=delta_bias,
    )
    _arrays.check_rank(xz, "xz", "batch 2*channels time")
    _arrays.check_rank(A, "A", "channels state")
    _arrays.check_rank(conv1d_weight, "conv1d_weight", "channels 1 width")
    channels, state = A.shape[0], A.shape[-1] * (2 if is_complex(A) else 1)
    rank = delta_proj_weight.shape[1]
    _arrays.check_shape(xz, "xz", **{"batch": xz.shape[0], "2*channels": 2 * channels, "time": xz.shape[2]})
    _arrays.check_shape(
        x_proj_weight, "x_proj_weight", **{"rank+2*state": rank + 2 * state, "channels": channels}
    )
    rows = _arrays.time_second(xp, xz)
    x, z = rows[..., :channels], rows[..., channels:]
    x, _ = causal_conv1d(x, conv1d_weight[:, 0, :], conv1d_bias, activation="silu")
    parts = _linear(xp, x, x_proj_weight)  # (batch, time, rank + 2 state)
    delta = _linear(xp, parts[..., :rank], delta_proj_weight)
    if dt_rms_weight is not None:
        delta = _rms_norm(xp, delta, dt_rms_weight, b_c_dt_rms_eps)
    drawn = {
        "B": (B, parts[..., rank : rank + state], B_proj_bias, b_rms_weight),
        "C": (C, parts[..., rank + state :], C_proj_bias, c_rms_weight),
    }
    ready = {}
    for name, (own, projected, bias, norm) in drawn.items():
        if own is not None:
            ready[name] = _time_of(xp, own, name, A)
            continue
        projected = projected if bias is None else projected + cast(xp, bias, projected.dtype)
        if norm is not None:
            projected = _rms_norm(xp, projected, norm, b_c_dt_rms_eps)
        ready[name] = _from_pairs(xp, projected, name, A.dtype) if is_complex(A) else projected
    y, _ = selective_scan(
        x, delta, A, ready["B"], ready["C"], D, z, delta_bias, delta_softplus=delta_softplus
    )
    y = _linear(xp, y, out_proj_weight)
    return y if out_proj_bias is None else y + cast(xp, out_proj_bias, y.dtype)


def _linear(xp: Namespace, x: Array, weight: Array) -> Array:
    """(..., in) with weights (out, in)"""
    return xp.matmul(x, xp.matrix_transpose(cast(xp, weight, x.dtype)))


def _rms_norm(xp: Namespace, x: Array, weight: Array, epsilon: float) -> Array:
    """x / sqrt(mean of squares + epsilon), times the weight"""
    a = _arrays.wide(xp, x)
    a = a / xp.sqrt(xp.mean(a * a, axis=-1, keepdims=True) + epsilon)
    return cast(xp, a * _arrays.wide(xp, weight), x.dtype)
