"""Mamba-2's whole inside, from the in-projection's output on, under mamba_ssm's name."""

from __future__ import annotations

from math import inf
from typing import Any

from scanfield.arrays import Array, Namespace, cast, library_of
from scanfield.compat import _arrays
from scanfield.compat._convolution import causal_conv1d_fn
from scanfield.compat._ssd import mamba_chunk_scan_combined
from scanfield.errors import ArgumentError, ShapeError
from scanfield.layers.linear import Norm
from scanfield.layers.parametrised import sizes
from scanfield.scans.canonical import quiet


def mamba_split_conv1d_scan_combined(
    zxbcdt: Array,
    conv1d_weight: Array,
    conv1d_bias: Array | None,
    dt_bias: Array,
    A: Array,
    D: Array,
    chunk_size: int,
    initial_states: Array | None = None,
    seq_idx: Array | None = None,
    dt_limit: tuple[float, float] = (0.0, inf),
    return_final_states: bool = False,
    activation: str | None = "silu",
    rmsnorm_weight: Array | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Array | None = None,
    outproj_bias: Array | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
    state_dtype: Any = None,
) -> Any:
    """``mamba_ssm.ops.triton.ssd_combined.mamba_split_conv1d_scan_combined``: convolution, scan, norm, out-projection.

    Parameters
    ----------
    zxbcdt : array (batch, time, 2 M + 2 channels + 2 ngroups N + heads)
        What the in-projection gives, in the order of the gate and value of an MLP beside the scan (M each, mostly 0), z, x,
        B, C, dt; channels are heads * headdim.
    conv1d_weight : array (channels + 2 ngroups N, width)
    conv1d_bias : array (channels + 2 ngroups N,), optional
    dt_bias, A : arrays (heads,)
    D : array (heads,) or (heads, headdim)
    chunk_size : int
        As in ``mamba_chunk_scan_combined``.
    initial_states : array (batch, heads, headdim, N), optional
        Of the scan; the convolution starts from nothing, as upstream.
    seq_idx : integers (batch, time), optional
        Scan and convolution start anew wherever this number changes.
    dt_limit : (lowest, highest)
        Clamp of the step, after softplus.
    return_final_states : bool
        Also return the scan's states after the last token.
    activation : None, "silu" or "swish"
        After the convolution.
    rmsnorm_weight : array (channels,), optional
        Weight of an RMS norm over each of ``ngroups`` parts of the channels; without it the scan is gated alone.
    rmsnorm_eps : float
    outproj_weight : array (width, M + channels), optional
    outproj_bias : array (width,), optional
    headdim : int, optional
        Needed where D has one axis.
    ngroups : int
    norm_before_gate : bool
        norm(y) silu(z) instead of norm(y silu(z)).
    state_dtype : dtype, optional
        As in ``mamba_chunk_scan_combined``.

    Returns
    -------
    output (batch, time, width, or M + channels without ``outproj_weight``), or (output, final states)

    Raises
    ------
    ShapeError, DtypeError, BackendError, DeviceError, ArgumentError
        As ``mamba_chunk_scan_combined`` and ``causal_conv1d_fn``; for sizes that do not fit each other, a ``headdim`` that
        is needed or that D contradicts, and ``outproj_bias`` without its weight.

    Notes
    -----
    The interface of mamba-ssm 2.3.2 with the ``state_dtype`` of its main branch; Dao and Gu, arXiv 2405.21060, section 7.

    Examples
    --------
    >>> import numpy
    >>> from scanfield.compat.mamba_ssm import mamba_split_conv1d_scan_combined
    >>> one = numpy.ones(1)
    >>> y = mamba_split_conv1d_scan_combined(
    ...     numpy.ones((1, 4, 5)), numpy.ones((3, 2)), None, one, -one, one, 256, headdim=1
    ... )
    >>> y.shape
    (1, 4, 1)
    """
    given = {
        "zxbcdt": zxbcdt, "conv1d_weight": conv1d_weight, "conv1d_bias": conv1d_bias, "dt_bias": dt_bias, "A": A, "D": D,
        "initial_states": initial_states, "rmsnorm_weight": rmsnorm_weight, "outproj_weight": outproj_weight,
        "outproj_bias": outproj_bias,
    }  # fmt: skip
    xp = _arrays.namespace(**given)
    _arrays.check_rank(zxbcdt, "zxbcdt", "batch time features")
    _arrays.check_rank(conv1d_weight, "conv1d_weight", "channels width")
    _arrays.check_rank(A, "A", "heads")
    _arrays.check_rank(D, "D", "heads", "heads headdim")
    sizes(ngroups=ngroups)
    batch, time, features = zxbcdt.shape
    heads, width = A.shape[0], _head_width(D, headdim)
    _arrays.check_shape(
        D, "D", **({"heads": heads} if len(D.shape) == 1 else {"heads": heads, "headdim": width})
    )
    channels, mixed = heads * width, conv1d_weight.shape[0]
    shared, odd = divmod(mixed - channels, 2 * ngroups)
    if shared < 0 or odd:
        raise ShapeError(
            f"conv1d_weight: {mixed} channels; {heads} heads of {width} and 2 N for each of {ngroups} groups are expected"
        )
    beside, odd = divmod(features - channels - mixed - heads, 2)
    if beside < 0 or odd:
        raise ShapeError(
            f"zxbcdt: {features} features; z {channels}, x, B and C {mixed}, dt {heads}, and before them an even number are "
            "expected"
        )
    if outproj_weight is None and outproj_bias is not None:
        raise ArgumentError("outproj_bias: given, but outproj_weight is None")
    if rmsnorm_weight is not None:
        _arrays.check_shape(rmsnorm_weight, "rmsnorm_weight", channels=channels)
        if channels % ngroups:
            raise ShapeError(f"rmsnorm_weight: {channels} channels do not part into {ngroups} groups")
    mlp, z, inner, dt = _split(zxbcdt, (2 * beside, channels, mixed, heads))
    inner = causal_conv1d_fn(
        _arrays.time_last(xp, inner), conv1d_weight, conv1d_bias, seq_idx, activation=activation
    )
    x, B, C = _split(_arrays.time_second(xp, inner), (channels, ngroups * shared, ngroups * shared))
    by_head, by_group = (batch, time, heads, width), (batch, time, ngroups, shared)
    y = mamba_chunk_scan_combined(
        xp.reshape(x, by_head), dt, A, xp.reshape(B, by_group), xp.reshape(C, by_group), chunk_size, D,
        xp.reshape(z, by_head) if rmsnorm_weight is None else None, dt_bias, initial_states, seq_idx, dt_softplus=True,
        dt_limit=dt_limit, return_final_states=return_final_states, state_dtype=state_dtype,
    )  # fmt: skip
    y, *states = y if return_final_states else (y,)
    y = xp.reshape(y, (batch, time, channels))
    if rmsnorm_weight is not None:
        norm = Norm(float(rmsnorm_eps), ngroups)
        y = _normed(xp, y, z, norm, _arrays.wide(xp, rmsnorm_weight), norm_before_gate)
    if beside:
        gate, value = _split(mlp, (beside, beside))
        y = xp.concat([_arrays.gated(xp, value, gate, y.dtype), y], axis=-1)
    if outproj_weight is not None:
        _arrays.check_shape(
            outproj_weight, "outproj_weight", width=outproj_weight.shape[0], channels=y.shape[-1]
        )
        y = xp.matmul(y, xp.matrix_transpose(cast(xp, outproj_weight, y.dtype)))
        if outproj_bias is not None:
            _arrays.check_shape(outproj_bias, "outproj_bias", width=outproj_weight.shape[0])
            y = y + cast(xp, outproj_bias, y.dtype)
    return (y, *states) if states else y


def _head_width(D: Array, headdim: int | None) -> int:
    if len(D.shape) == 2 and headdim in (None, D.shape[1]):
        return int(D.shape[1])
    if len(D.shape) == 2:
        raise ArgumentError(f"headdim: {headdim!r}, but D {tuple(D.shape)} has heads of {D.shape[1]}")
    if headdim is None:
        raise ArgumentError(f"headdim: None; with D {tuple(D.shape)} the width of a head is needed")
    sizes(headdim=headdim)
    return headdim


def _split(x: Array, widths: tuple[int, ...]) -> list[Array]:
    pieces, start = [], 0
    for width in widths:
        pieces.append(x[..., start : start + width])
        start += width
    return pieces


def _normed(xp: Namespace, y: Array, z: Array, norm: Norm, weight: Array, norm_before_gate: bool) -> Array:
    """norm(y) silu(z), or norm(y silu(z)), rounded once."""
    with quiet(library_of(y, "zxbcdt").name):
        gate, inside = _arrays.silu(xp, _arrays.wide(xp, z)), _arrays.wide(xp, y)
        if norm_before_gate:
            found = norm.forward(xp, inside, weight)[0] * gate
        else:
            (found,) = norm.forward(xp, inside * gate, weight)
    return cast(xp, found, y.dtype)
