"""The delta rule with one strength beta: alone, with a decay (a head's, a channel's), and with an erase vector of its own.

``gdn2`` with erase = write = beta, or for ``comba`` erase = beta times its vector (the table of ``scans/rules.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scanfield.arrays import Array, cast, dtype_of
from scanfield.dispatch import Input
from scanfield.scans.canonical import Checked
from scanfield.scans.rules import CHANNEL_DECAY, END, HEAD_DECAY, QKV, Arrays, Gates, decay_only, derive
from scanfield.scans.surface import ScanResult, public, run


def _beta_gates(checked: Checked) -> Arrays:
    beta = checked.arrays["beta"]
    return decay_only(checked) | {"erase": beta, "write": beta}


def _beta_back(checked: Checked, grads: dict[str, Array]) -> dict[str, Array]:
    if "erase" in grads and "write" in grads:
        grads = grads | {"beta": grads["erase"] + grads["write"]}
    return grads


# -- comba: an erase vector of its own -------------------------------------------------------------------------------


def _by_head(checked: Checked, array: Array) -> Array:
    """(batch, time, vheads or heads, width) -> (batch, time, heads, value heads of a head or 1, width)"""
    heads = checked.dims["heads"]
    array = cast(checked.xp, array, dtype_of(checked.xp, checked.compute))
    return checked.xp.reshape(
        array, (*array.shape[:2], heads, array.shape[2] // max(heads, 1), array.shape[3])
    )


def _comba_gates(checked: Checked) -> Arrays:
    dims, given = checked.dims, checked.arrays
    erase = _by_head(checked, given["beta"]) * _by_head(checked, given["erase_key"])
    erase = checked.xp.reshape(erase, (dims["batch"], dims["time"], dims["vheads"], dims["key"]))
    return decay_only(checked) | {"erase": erase, "write": given["beta"]}


def _comba_back(checked: Checked, grads: dict[str, Array]) -> dict[str, Array]:
    if "erase" not in grads:
        return grads
    xp, given = checked.xp, checked.arrays
    d_erase = _by_head(checked, grads["erase"])
    found = grads | {"erase_key": xp.sum(d_erase * _by_head(checked, given["beta"]), axis=3)}
    if "write" in grads:
        d_beta = xp.sum(d_erase * _by_head(checked, given["erase_key"]), axis=-1)
        found["beta"] = xp.reshape(d_beta, grads["write"].shape) + grads["write"]
    return found


# -- the records -----------------------------------------------------------------------------------------------------

_BETA = Input("beta", ("batch time vheads 1",))
_ERASE_KEY = Input("erase_key", ("batch time heads key",))
_BETA_GATES = Gates(_beta_gates, _beta_back, {"beta": ("erase", "write")})
_COMBA_GATES = Gates(
    _comba_gates, _comba_back, {"beta": ("erase", "write"), "erase_key": ("erase",)}, erase_vector=True
)

DELTA_RULE = derive("delta_rule", (*QKV, _BETA, *END), _BETA_GATES)
GATED_DELTA_RULE = derive("gated_delta_rule", (*QKV, HEAD_DECAY, _BETA, *END), _BETA_GATES)
KDA = derive("kda", (*QKV, CHANNEL_DECAY, _BETA, *END), _BETA_GATES)
COMBA = derive("comba", (*QKV, _ERASE_KEY, HEAD_DECAY, _BETA, *END), _COMBA_GATES)


# -- the functions ---------------------------------------------------------------------------------------------------


@public(DELTA_RULE)
def delta_rule(
    query: Array,
    key: Array,
    value: Array,
    beta: Array,
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
    """Delta rule: S_t = (I - beta_t k_t k_t^T) S_(t-1) + beta_t k_t v_t^T.

    Parameters
    ----------
    query, key : arrays (batch, time, heads, K)
    value : array (batch, time, vheads, V)
    beta : array (batch, time, vheads)
        Strength of erasing and writing, 0 to 1 (to 2 for negative eigenvalues).
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
    Yang et al., DeltaNet (arXiv 2406.06484), equation 2.

    Examples
    --------
    >>> import numpy, scanfield
    >>> ones = numpy.ones((1, 3, 1, 1))
    >>> values = numpy.array([1.0, 2.0, 3.0]).reshape(1, 3, 1, 1)
    >>> scanfield.delta_rule(ones, ones, values, ones[..., 0]).output.ravel()
    array([1., 2., 3.])
    """
    arrays = {
        "query": query,
        "key": key,
        "value": value,
        "beta": beta,
        "initial_state": initial_state,
        "cu_seqlens": cu_seqlens,
    }
    options = {"scale": scale, "qk_l2norm": qk_l2norm, "reverse": reverse, "chunk_size": chunk_size}
    return run(DELTA_RULE, arrays, options, states_at, method)


@public(GATED_DELTA_RULE)
def gated_delta_rule(
    query: Array,
    key: Array,
    value: Array,
    log_decay: Array,
    beta: Array,
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
    """Gated delta rule: the delta rule on a state that decays, one decay for each head.

    Parameters
    ----------
    query, key : arrays (batch, time, heads, K)
    value : array (batch, time, vheads, V)
    log_decay : array (batch, time, vheads)
        The natural logarithm of the decay of each head.
    beta : array (batch, time, vheads)
        Strength of erasing and writing, 0 to 1 (to 2 for negative eigenvalues).
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
    Yang et al., Gated DeltaNet (arXiv 2412.06464), equation 10.

    Examples
    --------
    >>> import numpy, scanfield
    >>> ones = numpy.ones((1, 2, 1, 1))
    >>> half = 0.5 * ones[..., 0]
    >>> scanfield.gated_delta_rule(ones, ones, ones, numpy.log(half), half).output.ravel()
    array([0.5  , 0.625])
    """
    arrays = {
        "query": query,
        "key": key,
        "value": value,
        "log_decay": log_decay,
        "beta": beta,
        "initial_state": initial_state,
        "cu_seqlens": cu_seqlens,
    }
    options = {"scale": scale, "qk_l2norm": qk_l2norm, "reverse": reverse, "chunk_size": chunk_size}
    return run(GATED_DELTA_RULE, arrays, options, states_at, method)


@public(KDA)
def kda(
    query: Array,
    key: Array,
    value: Array,
    log_decay: Array,
    beta: Array,
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
    """Kimi delta attention: the delta rule on a state that decays by key channel.

    Parameters
    ----------
    query, key : arrays (batch, time, heads, K)
    value : array (batch, time, vheads, V)
    log_decay : array (batch, time, vheads, K)
        The natural logarithm of the decay of each key channel.
    beta : array (batch, time, vheads)
        Strength of erasing and writing, 0 to 1 (to 2 for negative eigenvalues).
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
    Kimi Linear (arXiv 2510.26692), equation 1.

    Examples
    --------
    >>> import numpy, scanfield
    >>> ones = numpy.ones((1, 2, 1, 1))
    >>> half = 0.5 * ones
    >>> scanfield.kda(ones, ones, ones, numpy.log(half), half[..., 0]).output.ravel()
    array([0.5  , 0.625])
    """
    arrays = {
        "query": query,
        "key": key,
        "value": value,
        "log_decay": log_decay,
        "beta": beta,
        "initial_state": initial_state,
        "cu_seqlens": cu_seqlens,
    }
    options = {"scale": scale, "qk_l2norm": qk_l2norm, "reverse": reverse, "chunk_size": chunk_size}
    return run(KDA, arrays, options, states_at, method)


@public(COMBA)
def comba(
    query: Array,
    key: Array,
    value: Array,
    erase_key: Array,
    log_decay: Array,
    beta: Array,
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
    """Comba: the gated delta rule that erases along a vector of its own.

    Parameters
    ----------
    query, key : arrays (batch, time, heads, K)
    value : array (batch, time, vheads, V)
    erase_key : array (batch, time, heads, K)
        Direction along which is erased (the paper's scaled key).
    log_decay : array (batch, time, vheads)
        The natural logarithm of the decay of each head.
    beta : array (batch, time, vheads)
        Strength of erasing and writing, 0 to 1 (to 2 for negative eigenvalues).
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
    Comba (arXiv 2506.02475), equation 6. The output correction of the query stays outside.

    Examples
    --------
    >>> import numpy, scanfield
    >>> ones = numpy.ones((1, 2, 1, 1))
    >>> half = 0.5 * ones[..., 0]
    >>> scanfield.comba(ones, ones, ones, ones, numpy.log(half), half).output.ravel()
    array([0.5  , 0.625])
    """
    arrays = {
        "query": query,
        "key": key,
        "value": value,
        "erase_key": erase_key,
        "log_decay": log_decay,
        "beta": beta,
        "initial_state": initial_state,
        "cu_seqlens": cu_seqlens,
    }
    options = {"scale": scale, "qk_l2norm": qk_l2norm, "reverse": reverse, "chunk_size": chunk_size}
    return run(COMBA, arrays, options, states_at, method)
