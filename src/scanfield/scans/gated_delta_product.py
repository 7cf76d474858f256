"""Gated DeltaProduct: several delta-rule updates a token, the decay before the first, one read after the last.

Siems et al., DeltaProduct (arXiv 2502.10297), section 3. It is ``gdn2`` on a time that is longer by the number of
updates, the paper's Householder factors: a token's decay stands at its first sub-step, its query at the last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scanfield.arrays import Array
from scanfield.dispatch import Derived, Grads, Input, Option, Prepared
from scanfield.errors import ShapeError
from scanfield.scans import packing
from scanfield.scans.canonical import Canonical, cotangent, restore
from scanfield.scans.gated_delta import BOUNDS, OPERATION, QUERY, STATE, assemble_rule, check_heads
from scanfield.scans.options import check_flag
from scanfield.scans.surface import ScanResult, public, run

_PRODUCT_INPUTS = (
    QUERY,
    Input("key", ("batch time householders heads key",)),
    Input("value", ("batch time householders vheads value",)),
    Input("log_decay", ("batch time vheads 1",), optional=True),
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
    if x.shape[1] == 0:  # Dask reshapes no array without elements
        return x[:, :, 0, ...]
    return xp.reshape(x, (x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:]))


def _parted(xp: Any, x: Array, count: int) -> Array:
    if x.shape[1] == 0:
        return xp.stack([x] * count, axis=2)
    return xp.reshape(x, (x.shape[0], x.shape[1] // count, count, *x.shape[2:]))


def _prepare_product(
    arrays: Mapping[str, Any], options: Mapping[str, Any], *, step: bool = False
) -> Prepared:
    bounds, sequences = packing.read_bounds(arrays["cu_seqlens"])
    checked = _PRODUCT_CANONICAL(arrays, sequences=sequences, step=step)
    xp, dims, given = checked.xp, checked.dims, checked.arrays
    count = dims["householders"]
    if count == 0:
        raise ShapeError(
            f"key: shape {tuple(arrays['key'].shape)} has no householder; at least one is needed"
        )
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
        found = inner.pull(grads, d_output)
        if "erase" in found:
            found = found | {"beta": found["erase"] + found["write"]}
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


GATED_DELTA_PRODUCT = Derived(
    "gated_delta_product",
    OPERATION,
    _PRODUCT_INPUTS,
    (Option("scale", float, None), Option("chunk", int, None)),
    "query",
    "value",
    _prepare_product,
    "scanfield.gated_delta_product",
)


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
