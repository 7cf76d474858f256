"""Linear attention and what only forgets beside it: retention by a constant of the head, gated linear attention by data.

Nothing is erased: ``gdn2`` without its delta rule (the table of ``scans/rules.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log1p
from typing import Any

from scanfield.arrays import Array, device_of, dtype_of, sum_to
from scanfield.dispatch import Input
from scanfield.scans.canonical import Checked
from scanfield.scans.rules import (
    CHANNEL_DECAY,
    END,
    QKV,
    Arrays,
    Gates,
    common,
    decay_only,
    derive,
    unchanged,
)
from scanfield.scans.surface import ScanResult, public, run


def _retention_gates(checked: Checked) -> Arrays:
    xp, dims = checked.xp, checked.dims
    decay = checked.arrays["log_decay"]
    if decay is None:
        dtype = dtype_of(xp, checked.compute)
        # Python floats: not every device has float64, and torch.compile reads no NumPy array of them.
        values = [log1p(-(2.0 ** (-5 - head))) for head in range(dims["vheads"])]
        decay = xp.asarray(values, dtype=dtype, device=device_of(checked.arrays["query"]))
        decay = xp.reshape(decay, (1, 1, dims["vheads"], 1))
    shape = (dims["batch"], dims["time"], dims["vheads"], 1)
    return common(checked) | {"log_decay": xp.broadcast_to(decay, shape)}


def _retention_back(checked: Checked, grads: dict[str, Array]) -> dict[str, Array]:
    decay = checked.arrays["log_decay"]
    if "log_decay" in grads and decay is not None:
        grads = grads | {"log_decay": sum_to(checked.xp, grads["log_decay"], decay.shape)}
    return grads


_PLAIN = Gates(decay_only, unchanged, {})
_RETENTION_DECAY = Input(
    "log_decay", ("batch time vheads 1", "1 1 vheads 1"), optional=True, tied=frozenset({"batch", "time"})
)

LINEAR_ATTENTION = derive("linear_attention", (*QKV, *END), _PLAIN)
RETENTION = derive("retention", (*QKV, _RETENTION_DECAY, *END), Gates(_retention_gates, _retention_back, {}))
GLA = derive("gla", (*QKV, CHANNEL_DECAY, *END), _PLAIN)


@public(LINEAR_ATTENTION)
def linear_attention(
    query: Array,
    key: Array,
    value: Array,
    initial_state: Array | None = None,
    *,
    scale: float | None = None,
    qk_l2norm: bool = False,
    reverse: bool = False,
    cu_seqlens: Any = None,
    states_at: Sequence[int] | str | None = None,
    chunk_size: int | None = None,
    method: str | None = None,
) -> ScanResult:
    """Linear attention: S_t = S_(t-1) + k_t v_t^T, without a normaliser.

    Parameters
    ----------
    query, key : arrays (batch, time, heads, K)
    value : array (batch, time, vheads, V)
    initial_state : array (batch, vheads, K, V), optional
        Zeros if absent; with ``cu_seqlens`` one for each sequence.
    scale, qk_l2norm, reverse, cu_seqlens, states_at, chunk_size, method
        As in ``gdn2``.

    Returns
    -------
    ScanResult
        ``output`` (batch, time, vheads, V) and ``final_state`` (batch or sequences, vheads, K, V), as ``gdn2``.

    Raises
    ------
    ShapeError, DtypeError, BackendError, DeviceError, ArgumentError
        As ``gdn2``.

    Notes
    -----
    Katharopoulos et al. (arXiv 2006.16236), equation 18. The denominator is a second call with a value of ones.

    Examples
    --------
    >>> import numpy, scanfield
    >>> ones = numpy.ones((1, 3, 1, 1))
    >>> scanfield.linear_attention(ones, ones, ones).output.ravel()
    array([1., 2., 3.])
    """
    arrays = {
        "query": query,
        "key": key,
        "value": value,
        "initial_state": initial_state,
        "cu_seqlens": cu_seqlens,
    }
    options = {"scale": scale, "qk_l2norm": qk_l2norm, "reverse": reverse, "chunk_size": chunk_size}
    return run(LINEAR_ATTENTION, arrays, options, states_at, method)


@public(RETENTION)
def retention(
    query: Array,
    key: Array,
    value: Array,
    log_decay: Array | None = None,
    initial_state: Array | None = None,
    *,
    scale: float | None = None,
    qk_l2norm: bool = False,
    reverse: bool = False,
    cu_seqlens: Any = None,
    states_at: Sequence[int] | str | None = None,
    chunk_size: int | None = None,
    method: str | None = None,
) -> ScanResult:
    """Retention: S_t = gamma S_(t-1) + k_t v_t^T with a constant decay for each head.

    Parameters
    ----------
    query, key : arrays (batch, time, heads, K)
    value : array (batch, time, vheads, V)
    log_decay : array (vheads,) or (batch, time, vheads), optional
        The natural logarithm of gamma; log(1 - 2^(-5 - h)) for head h if absent.
    initial_state : array (batch, vheads, K, V), optional
        Zeros if absent; with ``cu_seqlens`` one for each sequence.
    scale, qk_l2norm, reverse, cu_seqlens, states_at, chunk_size, method
        As in ``gdn2``.

    Returns
    -------
    ScanResult
        ``output`` (batch, time, vheads, V) and ``final_state`` (batch or sequences, vheads, K, V), as ``gdn2``.

    Raises
    ------
    ShapeError, DtypeError, BackendError, DeviceError, ArgumentError
        As ``gdn2``.

    Notes
    -----
    Sun et al., "Retentive Network" (arXiv 2307.08621), equations 5 and 6.

    Examples
    --------
    >>> import numpy, scanfield
    >>> ones = numpy.ones((1, 3, 1, 1))
    >>> scanfield.retention(ones, ones, ones, numpy.log([0.5])).output.ravel()
    array([1.  , 1.5 , 1.75])
    """
    arrays = {
        "query": query,
        "key": key,
        "value": value,
        "log_decay": log_decay,
        "initial_state": initial_state,
        "cu_seqlens": cu_seqlens,
    }
    options = {"scale": scale, "qk_l2norm": qk_l2norm, "reverse": reverse, "chunk_size": chunk_size}
    return run(RETENTION, arrays, options, states_at, method)


@public(GLA)
def gla(
    query: Array,
    key: Array,
    value: Array,
    log_decay: Array,
    initial_state: Array | None = None,
    *,
    scale: float | None = None,
    qk_l2norm: bool = False,
    reverse: bool = False,
    cu_seqlens: Any = None,
    states_at: Sequence[int] | str | None = None,
    chunk_size: int | None = None,
    method: str | None = None,
) -> ScanResult:
    """Gated linear attention: S_t = diag(exp g_t) S_(t-1) + k_t v_t^T.

    Parameters
    ----------
    query, key : arrays (batch, time, heads, K)
    value : array (batch, time, vheads, V)
    log_decay : array (batch, time, vheads, K)
        The natural logarithm of the decay of each key channel.
    initial_state : array (batch, vheads, K, V), optional
        Zeros if absent; with ``cu_seqlens`` one for each sequence.
    scale, qk_l2norm, reverse, cu_seqlens, states_at, chunk_size, method
        As in ``gdn2``.

    Returns
    -------
    ScanResult
        ``output`` (batch, time, vheads, V) and ``final_state`` (batch or sequences, vheads, K, V), as ``gdn2``.

    Raises
    ------
    ShapeError, DtypeError, BackendError, DeviceError, ArgumentError
        As ``gdn2``.

    Notes
    -----
    Yang et al. (arXiv 2312.06635), equation 3.

    Examples
    --------
    >>> import numpy, scanfield
    >>> ones = numpy.ones((1, 3, 1, 1))
    >>> scanfield.gla(ones, ones, ones, numpy.log(0.5 * ones)).output.ravel()
    array([1.  , 1.5 , 1.75])
    """
    arrays = {
        "query": query,
        "key": key,
        "value": value,
        "log_decay": log_decay,
        "initial_state": initial_state,
        "cu_seqlens": cu_seqlens,
    }
    options = {"scale": scale, "qk_l2norm": qk_l2norm, "reverse": reverse, "chunk_size": chunk_size}
    return run(GLA, arrays, options, states_at, method)
