"""The family of the gated delta rule: published recurrences that are ``gdn2`` under their papers' own arguments.

=====================  ====================  ==============  =======  =========================================
function               log_decay             erase           write    source
=====================  ====================  ==============  =======  =========================================
linear_attention       0                     0               1        arXiv 2006.16236, equation 18 (no normaliser)
retention              per head              0               1        arXiv 2307.08621, equation 6
gla                    per channel           0               1        arXiv 2312.06635, equation 3
ssd                    dt A                  0               1        arXiv 2405.21060, equation 1
delta_rule             0                     beta            beta     arXiv 2406.06484, equation 2
gated_delta_rule       per head              beta            beta     arXiv 2412.06464, equation 10
kda                    per channel           beta            beta     arXiv 2510.26692, equation 1
comba                  per head              beta (vector)   beta     arXiv 2506.02475, equation 6
gated_delta_product    first sub-step only   beta            beta     arXiv 2502.10297, section 3
=====================  ====================  ==============  =======  =========================================

None has kernels of its own. What a rule does not have (erase, decay) reaches the kernel as None, so that its work is
not done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import log1p
from typing import Any, NamedTuple

import numpy

from scanfield.arrays import Array, cast, device_of, dtype_of, sum_to
from scanfield.dispatch import Derived, Grads, Input, Option, Prepared
from scanfield.errors import ShapeError
from scanfield.scans import packing
from scanfield.scans.canonical import Canonical, Checked, cotangent, quiet, restore
from scanfield.scans.gated_delta import BOUNDS, KEY, OPERATION, QUERY, STATE, VALUE, assemble_rule, check_heads
from scanfield.scans.selective import check_limits, step_sizes, step_sizes_back
from scanfield.scans.surface import ScanResult, check_flag, public, run

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

    def prepare(arrays: Mapping[str, Array | None], options: Mapping[str, Any], *, step: bool = False) -> Prepared:
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
            return prepared.wanted(frozenset(base for name in names for base in gates.needs.get(name, (name,))))

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


# -- retention: a constant decay a head ---------------------------------------------------------------------------------


def _retention_gates(checked: Checked) -> Arrays:
    xp, dims = checked.xp, checked.dims
    decay = checked.arrays["log_decay"]
    if decay is None:
        values = numpy.asarray([log1p(-(2.0 ** (-5 - head))) for head in range(dims["vheads"])], dtype=numpy.float64)
        dtype = dtype_of(xp, checked.compute)
        # As Python floats: not every device has float64.
        decay = xp.asarray(values.tolist(), dtype=dtype, device=device_of(checked.arrays["query"]))
        decay = xp.reshape(decay, (1, 1, dims["vheads"], 1))
    shape = (dims["batch"], dims["time"], dims["vheads"], 1)
    return _common(checked) | {"log_decay": xp.broadcast_to(decay, shape)}


def _retention_back(checked: Checked, grads: dict[str, Array]) -> dict[str, Array]:
    decay = checked.arrays["log_decay"]
    if "log_decay" in grads and decay is not None:
        grads = grads | {"log_decay": sum_to(checked.xp, grads["log_decay"], decay.shape)}
    return grads


# -- comba: an erase vector of its own ----------------------------------------------------------------------------------


def _by_head(checked: Checked, array: Array) -> Array:
    """(batch, time, vheads or heads, width) -> (batch, time, heads, value heads of a head or 1, width)"""
    heads = checked.dims["heads"]
    array = cast(checked.xp, array, dtype_of(checked.xp, checked.compute))
    return checked.xp.reshape(array, (*array.shape[:2], heads, array.shape[2] // max(heads, 1), array.shape[3]))


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


# -- ssd: Mamba-2 -------------------------------------------------------------------------------------------------------

_SSD_INPUTS = (
    Input("x", ("batch time vheads value",)),
    Input("dt", ("batch time vheads",)),
    Input("A", ("vheads",), role="shared"),
    Input("B", ("batch time heads key",)),
    Input("C", ("batch time heads key",)),
    Input("D", ("vheads value", "vheads 1"), role="shared", optional=True, tied=frozenset({"value"})),
    Input("dt_bias", ("vheads",), role="shared", optional=True),
    Input("initial_state", ("sequence vheads value key",), role="state", optional=True),
    BOUNDS,
)
_SSD_CANONICAL = Canonical(_SSD_INPUTS, "x", ("B", partial(check_heads, value="x", shared="groups of B and C")))
_SSD_NEEDS = {
    "x": ("value",),
    "dt": ("value", "log_decay"),
    "A": ("log_decay",),
    "B": ("key",),
    "C": ("query",),
    "D": (),
    "dt_bias": ("value", "log_decay"),
    "initial_state": ("initial_state",),
}


def _prepare_ssd(arrays: Mapping[str, Array | None], options: Mapping[str, Any], *, step: bool = False) -> Prepared:
    limits = (check_flag(options["dt_softplus"], "dt_softplus"), *check_limits(options["dt_limit"], "dt_limit"))
    bounds, sequences = packing.read_bounds(arrays["cu_seqlens"])
    checked = _SSD_CANONICAL(arrays, sequences=sequences, step=step)
    xp, given = checked.xp, checked.arrays
    dtype = dtype_of(xp, checked.compute)
    x, A, D = cast(xp, given["x"], dtype), given["A"], given["D"]
    with quiet(checked.library):
        raw = cast(xp, given["dt"], dtype)
        raw = raw if given["dt_bias"] is None else raw + given["dt_bias"]
        s = step_sizes(xp, raw, *limits)  # (batch, time, vhead)
        value, decay = xp.expand_dims(s, axis=-1) * x, xp.expand_dims(s * A, axis=-1)
    # The read-out is rounded once, after the skip.
    rounded = D is None and given["C"].dtype == given["x"].dtype
    state = given["initial_state"]
    base = {
        "query": given["C"] if rounded else cast(xp, given["C"], dtype),
        "key": given["B"],
        "value": value,
        "log_decay": decay,
        "initial_state": None if state is None else xp.matrix_transpose(state),
    } | dict.fromkeys(("erase", "write"))
    rule_options = {"scale": 1.0, "qk_l2norm": False, "reverse": options["reverse"], "chunk_size": options["chunk_size"]}
    # The skip is added before the rounding to the dtype of x.
    inner = assemble_rule(
        checked if rounded else checked._replace(main_dtype=dtype), base, rule_options, bounds=bounds, sequences=sequences
    )
    reverse = rule_options["reverse"]

    def output(y: Array) -> Array:
        y = inner.output(y)
        with quiet(checked.library):
            return cast(xp, y if D is None else y + D * x, checked.main_dtype)

    def cotangents(d_output: Array | None, d_final_state: Array | None) -> tuple[Array | None, Array | None]:
        dims = checked.dims
        rows = dims["batch"] if sequences is None else sequences
        shape = (rows, dims["vheads"], dims["value"], dims["key"])
        d_state = cotangent(checked, d_final_state, "d_final_state", shape, False)
        return inner.cotangents(d_output, None if d_state is None else xp.matrix_transpose(d_state))

    def pull(grads: Grads, d_output: Array | None) -> dict[str, Array]:
        with quiet(checked.library):
            found = inner.pull(grads, d_output)
            d_y = None
            if d_output is not None and D is not None:
                d_y = xp.flip(d_output, axis=1) if reverse else d_output
            return restore(checked, _ssd_back(checked, found, d_y, raw, s, limits))

    def wanted(names: frozenset[str]) -> tuple[bool, ...]:
        return inner.wanted(frozenset(base for name in names for base in _SSD_NEEDS[name]))

    return Prepared(
        inner.call, output, lambda last: xp.matrix_transpose(inner.state(last)), cotangents, pull, wanted
    )


def _ssd_back(
    checked: Checked, grads: dict[str, Array], d_y: Array | None, raw: Array, s: Array, limits: tuple[bool, float, float]
) -> dict[str, Array]:
    xp, given = checked.xp, checked.arrays
    x, A, D = cast(xp, given["x"], s.dtype), given["A"], given["D"]
    found = {ours: grads[base] for ours, base in (("B", "key"), ("C", "query")) if base in grads}
    if "initial_state" in grads:
        found["initial_state"] = xp.matrix_transpose(grads["initial_state"])
    if D is not None:
        d_D = xp.zeros_like(D) if d_y is None else sum_to(xp, xp.sum(d_y * x, axis=(0, 1)), D.shape)
        found["D"] = d_D
    if "value" in grads:
        d_x = xp.expand_dims(s, axis=-1) * grads["value"]
        found["x"] = d_x if D is None or d_y is None else d_x + D * d_y
    if "log_decay" in grads:
        d_g = xp.squeeze(grads["log_decay"], axis=-1)
        found["A"] = xp.sum(s * d_g, axis=(0, 1))
        if "value" in grads:
            d_s = xp.sum(x * grads["value"], axis=-1) + A * d_g
            found["dt"] = step_sizes_back(xp, raw, d_s, *limits)
            if given["dt_bias"] is not None:
                found["dt_bias"] = xp.sum(found["dt"], axis=(0, 1))
    return found


# -- gated delta product: several sub-steps a token ----------------------------------------------------------------------

_PRODUCT_INPUTS = (
    QUERY,
    Input("key", ("batch time householders heads key",)),
    Input("value", ("batch time householders vheads value",)),
    Input("log_decay", _HEAD_GATE, optional=True),
    Input("beta", ("batch time householders vheads 1",)),
    STATE,
    BOUNDS,
)
_PRODUCT_CANONICAL = Canonical(_PRODUCT_INPUTS, "query", ("value", check_heads))


def _at(xp: Any, x: Array, count: int, place: int) -> Array:
    """(batch, time, ...) -> (batch, time * count, ...): each token's array at one sub-step, zeros at the others."""
    nothing = xp.zeros_like(x)
    spread = xp.stack([x if i == place else nothing for i in range(count)], axis=2)
    return _merged(xp, spread)


def _merged(xp: Any, x: Array) -> Array:
    return xp.reshape(x, (x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:]))


def _parted(xp: Any, x: Array, count: int) -> Array:
    return xp.reshape(x, (x.shape[0], x.shape[1] // count, count, *x.shape[2:]))


def _prepare_product(arrays: Mapping[str, Array | None], options: Mapping[str, Any], *, step: bool = False) -> Prepared:
    bounds, sequences = packing.read_bounds(arrays["cu_seqlens"])
    checked = _PRODUCT_CANONICAL(arrays, sequences=sequences, step=step)
    xp, dims, given = checked.xp, checked.dims, checked.arrays
    count = dims["householders"]
    if count == 0:
        raise ShapeError(f"key: shape {tuple(arrays['key'].shape)} has no householder; at least one is needed")
    packing.check_bounds(bounds, dims["batch"], dims["time"])
    # The rule flips the stretched time as a whole; sub-steps flipped beforehand come out in their own order.
    reverse = check_flag(options["reverse"], "reverse")
    first, last = (count - 1, 0) if reverse else (0, count - 1)

    def ordered(x: Array) -> Array:
        return xp.flip(x, axis=2) if reverse else x

    beta = _merged(xp, ordered(given["beta"]))
    base = {
        "query": _at(xp, given["query"], count, last),
        "key": _merged(xp, ordered(given["key"])),
        "value": _merged(xp, ordered(given["value"])),
        "log_decay": None if given["log_decay"] is None else _at(xp, given["log_decay"], count, first),
        "erase": beta,
        "write": beta,
        "initial_state": given["initial_state"],
    }
    stretched = checked._replace(dims={**dims, "time": dims["time"] * count})
    if bounds is not None:
        bounds = tuple(bound * count for bound in bounds) if isinstance(bounds, tuple) else bounds * count
    inner = assemble_rule(stretched, base, options, bounds=bounds, sequences=sequences)
    shape = (dims["batch"], dims["time"], dims["vheads"], dims["value"])

    def output(y: Array) -> Array:
        return _parted(xp, inner.output(y), count)[:, :, last, ...]

    def cotangents(d_output: Array | None, d_final_state: Array | None) -> tuple[Array | None, Array | None]:
        d_y = cotangent(checked, d_output, "d_output", shape, False)
        return inner.cotangents(None if d_y is None else _at(xp, d_y, count, last), d_final_state)

    def pull(grads: Grads, d_output: Array | None) -> dict[str, Array]:
        found = _beta_back(checked, inner.pull(grads, d_output))
        back = {name: found[name] for name in ("initial_state",) if name in found}
        for name, place in (("query", last), ("log_decay", first)):
            if name in found:
                back[name] = _parted(xp, found[name], count)[:, :, place, ...]
        for name in ("key", "value", "beta"):
            if name in found:
                back[name] = ordered(_parted(xp, found[name], count))
        return restore(checked, back)

    def wanted(names: frozenset[str]) -> tuple[bool, ...]:
        return inner.wanted(names | ({"erase", "write"} if "beta" in names else frozenset()))

    return Prepared(inner.call, output, inner.state, cotangents, pull, wanted, stretch=count)


# -- the records ---------------------------------------------------------------------------------------------------------

_QKV = (QUERY, KEY, VALUE)
_END = (STATE, BOUNDS)
_RETENTION_DECAY = Input(
    "log_decay", ("batch time vheads 1", "1 1 vheads 1"), optional=True, tied=frozenset({"batch", "time"})
)
_CHANNEL_DECAY = Input("log_decay", _CHANNEL_GATE)
_HEAD_DECAY = Input("log_decay", _HEAD_GATE)
_ERASE_KEY = Input("erase_key", ("batch time heads key",))

LINEAR_ATTENTION = _derive("linear_attention", (*_QKV, *_END), _PLAIN)
RETENTION = _derive("retention", (*_QKV, _RETENTION_DECAY, *_END), Gates(_retention_gates, _retention_back, {}))
GLA = _derive("gla", (*_QKV, _CHANNEL_DECAY, *_END), _PLAIN)
DELTA_RULE = _derive("delta_rule", (*_QKV, _BETA, *_END), _BETA_GATES)
GATED_DELTA_RULE = _derive("gated_delta_rule", (*_QKV, _HEAD_DECAY, _BETA, *_END), _BETA_GATES)
KDA = _derive("kda", (*_QKV, _CHANNEL_DECAY, _BETA, *_END), _BETA_GATES)
COMBA = _derive(
    "comba",
    (*_QKV, _ERASE_KEY, _HEAD_DECAY, _BETA, *_END),
    Gates(_comba_gates, _comba_back, {"beta": ("erase", "write"), "erase_key": ("erase",)}, erase_vector=True),
)
SSD = Derived(
    "ssd", OPERATION, _SSD_INPUTS, (Option("chunk", int, None),), "x", "x", _prepare_ssd, "scanfield.ssd"
)
GATED_DELTA_PRODUCT = Derived(
    "gated_delta_product",
    OPERATION,
    _PRODUCT_INPUTS,
    _OPTIONS,
    "query",
    "value",
    _prepare_product,
    "scanfield.gated_delta_product",
)


# -- the functions -------------------------------------------------------------------------------------------------------


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


@public(GATED_DELTA_PRODUCT)
def gated_delta_product(
    query: Array,
    key: Array,
    value: Array,
    log_decay: Array | None,
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
    """Gated DeltaProduct: several delta-rule updates a token, the decay before the first, one read after the last.

    Parameters
    ----------
    query : array (batch, time, heads, K)
    key : array (batch, time, householders, heads, K)
    value : array (batch, time, householders, vheads, V)
    log_decay : array (batch, time, vheads) or None
        The natural logarithm of the decay of each head, once a token; None is no decay (DeltaProduct).
    beta : array (batch, time, householders, vheads)
        Strength of each update, 0 to 1 (to 2 for negative eigenvalues).
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
    Siems et al., DeltaProduct (arXiv 2502.10297), section 3. ``chunk_size`` counts updates, ``states_at`` tokens.

    Examples
    --------
    >>> import numpy, scanfield
    >>> query = numpy.ones((1, 1, 1, 1))
    >>> key, value = numpy.ones((1, 1, 2, 1, 1)), numpy.array([1.0, 2.0]).reshape(1, 1, 2, 1, 1)
    >>> scanfield.gated_delta_product(query, key, value, None, numpy.full((1, 1, 2, 1), 0.5)).output.ravel()
    array([1.25])
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
    return run(GATED_DELTA_PRODUCT, arrays, options, states_at, method)


@public(SSD)
def ssd(
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    D: Array | None = None,
    dt_bias: Array | None = None,
    initial_state: Array | None = None,
    *,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] | None = None,
    reverse: bool = False,
    cu_seqlens: Any = None,
    states_at: Sequence[int] | str | None = None,
    chunk_size: int | None = None,
    method: str | None = None,
) -> ScanResult:
    """State-space dual of Mamba-2: h_t = exp(dt_t A) h_(t-1) + dt_t x_t B_t^T, y_t = h_t C_t + D x_t.

    Parameters
    ----------
    x : array (batch, time, heads, P)
    dt : array (batch, time, heads)
        Step size, before bias and softplus.
    A : array (heads,)
        Decay rate of each head, usually negative.
    B, C : arrays (batch, time, groups, N)
        Head h uses group h // (heads / groups).
    D : array (heads,) or (heads, P), optional
        Skip connection.
    dt_bias : array (heads,), optional
        Added to ``dt`` before softplus.
    initial_state : array (batch, heads, P, N), optional
        Zeros if absent; with ``cu_seqlens`` one for each sequence.
    dt_softplus : bool
        Steps are log(1 + exp(dt + dt_bias)).
    dt_limit : (lowest, highest), optional
        Clamp of the step size, after softplus.
    reverse, cu_seqlens, states_at, chunk_size, method
        As in ``gdn2``.

    Returns
    -------
    ScanResult
        ``output`` (batch, time, heads, P) in the dtype of ``x``; ``final_state`` (batch or sequences, heads, P, N).

    Raises
    ------
    ShapeError, DtypeError, BackendError, DeviceError, ArgumentError
        As ``gdn2``; heads must be a multiple of the groups.

    Notes
    -----
    Dao and Gu (arXiv 2405.21060), equation 1 with scalar-times-identity A. It is ``gdn2`` with query C, key B, value
    dt x, log decay dt A, nothing erased; the state is transposed on its last two axes.

    Examples
    --------
    >>> import numpy, scanfield
    >>> x, dt = numpy.ones((1, 3, 1, 1)), numpy.ones((1, 3, 1))
    >>> B = C = numpy.ones((1, 3, 1, 1))
    >>> scanfield.ssd(x, dt, numpy.log([0.5]), B, C).output.ravel()
    array([1.  , 1.5 , 1.75])
    """
    arrays = {
        "x": x,
        "dt": dt,
        "A": A,
        "B": B,
        "C": C,
        "D": D,
        "dt_bias": dt_bias,
        "initial_state": initial_state,
        "cu_seqlens": cu_seqlens,
    }
    options = {"dt_softplus": dt_softplus, "dt_limit": dt_limit, "reverse": reverse, "chunk_size": chunk_size}
    return run(SSD, arrays, options, states_at, method)
