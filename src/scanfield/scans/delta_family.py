"""The family of the gated delta rule: published recurrences that are ``gdn2`` under their papers' own arguments.

=====================  ====================  ==============  =======  =========================================
function               log_decay             erase           write    source
=====================  ====================  ==============  =======  =========================================
linear_attention       0                     0               1        arXiv 2006.16236, equation 18 (no normaliser)
retention              per head              0               1        arXiv 2307.08621, equation 6
gla                    per channel           0               1        arXiv 2312.06635, equation 3
delta_rule             0                     beta            beta     arXiv 2406.06484, equation 2
gated_delta_rule       per head              beta            beta     arXiv 2412.06464, equation 10
kda                    per channel           beta            beta     arXiv 2510.26692, equation 1
comba                  per head              beta (vector)   beta     arXiv 2506.02475, equation 6
=====================  ====================  ==============  =======  =========================================

None has kernels of its own. What a rule does not have (erase, decay) reaches the kernel as None, so that its work is
not done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import log1p
from typing import Any, NamedTuple

from scanfield.arrays import Array, cast, device_of, dtype_of, sum_to
from scanfield.dispatch import Derived, Grads, Input, Option, Prepared
from scanfield.scans import packing
from scanfield.scans.canonical import Canonical, Checked, quiet, restore
from scanfield.scans.gated_delta import (
    BOUNDS,
    KEY,
    OPERATION,
    QUERY,
    STATE,
    VALUE,
    assemble_rule,
    check_heads,
)
from scanfield.scans.surface import ScanResult, public, run

_HEAD_GATE = ("batch time vheads 1",)
_CHANNEL_GATE = ("batch time vheads key",)
_BETA = Input("beta", _HEAD_GATE)
_OPTIONS = (Option("scale", float, None), Option("chunk", int, None))

Arrays = dict[str, Any]
Build = Callable[[Checked], Arrays]
Back = Callable[[Checked, dict[str, Array]], dict[str, Array]]


class Gates(NamedTuple):
    """How a rule's arguments become the gates of ``gdn2``, how gradients come back, and what each argument needs."""

    build: Build
    back: Back
    needs: Mapping[str, tuple[str, ...]]
    erase_vector: bool = False


def _derive(name: str, inputs: tuple[Input, ...], gates: Gates) -> Derived:
    canonical = Canonical(inputs, "query", ("value", check_heads))

    def prepare(arrays: Mapping[str, Any], options: Mapping[str, Any], *, step: bool = False) -> Prepared:
        bounds, sequences = packing.read_bounds(arrays["cu_seqlens"])
        checked = canonical(arrays, sequences=sequences, step=step)
        with quiet(checked.library):
            base = gates.build(checked)
        prepared = assemble_rule(
            checked, base, options, bounds=bounds, sequences=sequences, erase_vector=gates.erase_vector
        )

        def pull(grads: Grads, d_output: Array | None) -> dict[str, Array]:
            with quiet(checked.library):
                return restore(checked, gates.back(checked, prepared.pull(grads, d_output)))

        def wanted(names: frozenset[str]) -> tuple[bool, ...]:
            return prepared.wanted(
                frozenset(base for name in names for base in gates.needs.get(name, (name,)))
            )

        return prepared._replace(pull=pull, wanted=wanted)

    return Derived(name, OPERATION, inputs, _OPTIONS, "query", "value", prepare, f"scanfield.{name}")


def _common(checked: Checked) -> Arrays:
    names = ("query", "key", "value", "initial_state")
    return {name: checked.arrays[name] for name in names} | dict.fromkeys(("log_decay", "erase", "write"))


def _decay_only(checked: Checked) -> Arrays:
    return _common(checked) | {"log_decay": checked.arrays.get("log_decay")}


def _unchanged(checked: Checked, grads: dict[str, Array]) -> dict[str, Array]:
    return grads


def _beta_gates(checked: Checked) -> Arrays:
    beta = checked.arrays["beta"]
    return _decay_only(checked) | {"erase": beta, "write": beta}


def _beta_back(checked: Checked, grads: dict[str, Array]) -> dict[str, Array]:
    if "erase" in grads and "write" in grads:
        grads = grads | {"beta": grads["erase"] + grads["write"]}
    return grads


_PLAIN = Gates(_decay_only, _unchanged, {})
_BETA_GATES = Gates(_beta_gates, _beta_back, {"beta": ("erase", "write")})


# -- retention: a constant decay a head ------------------------------------------------------------------------------


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
    return _common(checked) | {"log_decay": xp.broadcast_to(decay, shape)}


def _retention_back(checked: Checked, grads: dict[str, Array]) -> dict[str, Array]:
    decay = checked.arrays["log_decay"]
    if "log_decay" in grads and decay is not None:
        grads = grads | {"log_decay": sum_to(checked.xp, grads["log_decay"], decay.shape)}
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
    return _decay_only(checked) | {"erase": erase, "write": given["beta"]}


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

_QKV = (QUERY, KEY, VALUE)
_END = (STATE, BOUNDS)
_RETENTION_DECAY = Input(
    "log_decay", ("batch time vheads 1", "1 1 vheads 1"), optional=True, tied=frozenset({"batch", "time"})
)
_CHANNEL_DECAY = Input("log_decay", _CHANNEL_GATE)
_HEAD_DECAY = Input("log_decay", _HEAD_GATE)
_ERASE_KEY = Input("erase_key", ("batch time heads key",))

LINEAR_ATTENTION = _derive("linear_attention", (*_QKV, *_END), _PLAIN)
RETENTION = _derive(
    "retention", (*_QKV, _RETENTION_DECAY, *_END), Gates(_retention_gates, _retention_back, {})
)
GLA = _derive("gla", (*_QKV, _CHANNEL_DECAY, *_END), _PLAIN)
DELTA_RULE = _derive("delta_rule", (*_QKV, _BETA, *_END), _BETA_GATES)
GATED_DELTA_RULE = _derive("gated_delta_rule", (*_QKV, _HEAD_DECAY, _BETA, *_END), _BETA_GATES)
KDA = _derive("kda", (*_QKV, _CHANNEL_DECAY, _BETA, *_END), _BETA_GATES)
COMBA = _derive(
    "comba",
    (*_QKV, _ERASE_KEY, _HEAD_DECAY, _BETA, *_END),
    Gates(
        _comba_gates, _comba_back, {"beta": ("erase", "write"), "erase_key": ("erase",)}, erase_vector=True
    ),
)
# -- the functions ---------------------------------------------------------------------------------------------------


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
