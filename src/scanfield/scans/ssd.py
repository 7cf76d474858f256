"""Mamba-2's state-space dual: a scalar decay a head, queries and keys shared by a group of heads.

Glossary (Dao and Gu, arXiv 2405.21060)
--------
x_t          ``x``        (batch, time, heads, P)     input
s_t          (no name)    (batch, time, heads)        step: dt_t + dt_bias, softplus, clamp
A            ``A``        (heads,)                    decay rate
B_t, C_t     ``B``, ``C`` (batch, time, groups, N)    input and read-out vectors
h_t          state        (batch, heads, P, N)

h_t = exp(s_t A) h_(t-1) + s_t x_t B_t^T;   y_t = h_t C_t + D x_t

It is ``gdn2`` with query C, key B, value s x, log decay s A and nothing erased; the state is transposed on its last two
axes, D and the steps stay outside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from scanfield.arrays import Array, cast, dtype_of, sum_to
from scanfield.dispatch import Derived, Grads, Input, Option, Prepared
from scanfield.scans import packing
from scanfield.scans.canonical import Canonical, Checked, cotangent, quiet, restore
from scanfield.scans.gated_delta import BOUNDS, OPERATION, assemble_rule, check_heads
from scanfield.scans.options import check_flag
from scanfield.scans.selective import check_limits
from scanfield.scans.selective_forms import step_sizes, step_sizes_back
from scanfield.scans.surface import ScanResult, public, run

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
_SSD_CANONICAL = Canonical(
    _SSD_INPUTS, "x", ("B", partial(check_heads, value="x", shared="groups of B and C"))
)
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


def _prepare_ssd(arrays: Mapping[str, Any], options: Mapping[str, Any], *, step: bool = False) -> Prepared:
    limits = (
        check_flag(options["dt_softplus"], "dt_softplus"),
        *check_limits(options["dt_limit"], "dt_limit"),
    )
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
    rule_options = {
        "scale": 1.0,
        "qk_l2norm": False,
        "reverse": options["reverse"],
        "chunk_size": options["chunk_size"],
    }
    # The skip is added before the rounding to the dtype of x.
    inner = assemble_rule(
        checked if rounded else checked._replace(main_dtype=dtype),
        base,
        rule_options,
        bounds=bounds,
        sequences=sequences,
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
    checked: Checked,
    grads: dict[str, Array],
    d_y: Array | None,
    raw: Array,
    s: Array,
    limits: tuple[bool, float, float],
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


SSD = Derived(
    "ssd", OPERATION, _SSD_INPUTS, (Option("chunk", int, None),), "x", "x", _prepare_ssd, "scanfield.ssd"
)


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
