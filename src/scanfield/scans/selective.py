"""Mamba's selective scan: a diagonal state-space recurrence whose step size, input and read-out depend on the token.

Glossary (Gu and Dao, "Mamba", arXiv 2312.00752, equations 2 and 4, algorithm 2)
--------
u_t           ``u``              (batch, time, channels)             input
delta_t       ``delta``          (batch, time, channels)             step before bias and softplus
s_t           (no name)          (batch, time, channels)             step, after bias, softplus and clamp
A             ``A``              (channels, state)                   real or complex, finite
B_t, C_t      ``B``, ``C``       (batch, time, groups, state), (batch, time, state) or (channels, state)
D, z, bias    ``D``, ``z``, ``delta_bias``                           skip, gate, bias of the step
h_t           (no name)          (batch, channels, state)            state
r_t, q_t      (no name)          (batch, time, channels)             read-out, read-out and skip

h_t = exp(s_t A) h_(t-1) + s_t u_t B_t;   r_t = f Re sum_n C_t h_t;   q_t = r_t + D u_t;   out_t = q_t z_t sigmoid(z_t)
with f = 1 for real A and f = 2 for complex A (the conjugate half of the spectrum is implied).

Steps, skip and gate are elementwise and done on whole (batch, time, channels) arrays; the state exists for one block of
tokens at a time. Backward keeps the state at the start of every chunk and recomputes the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from scanfield.advice import shown
from scanfield.arrays import Array, cast, is_complex
from scanfield.dispatch import Input, Operation, Option, Prepared
from scanfield.errors import ArgumentError, DtypeError, ShapeError
from scanfield.scans import packing, selective_forms
from scanfield.scans.assemble import assemble
from scanfield.scans.canonical import Canonical, restore
from scanfield.scans.options import check_chunk_size, check_flag, check_number
from scanfield.scans.surface import ScanResult, public, run

_TIED = frozenset({"batch", "time"})
_LAYOUTS = ("batch time groups_{} state", "batch time 1 state", "1 1 channels state")
INPUTS = (
    Input("u", ("batch time channels",)),
    Input("delta", ("batch time channels",)),
    Input("A", ("channels state",), role="shared", complex_allowed=True),
    Input("B", tuple(text.format("B") for text in _LAYOUTS), tied=_TIED, complex_allowed=True),
    Input("C", tuple(text.format("C") for text in _LAYOUTS), tied=_TIED, complex_allowed=True),
    Input("D", ("channels",), role="shared", optional=True),
    Input("z", ("batch time channels",), optional=True),
    Input("delta_bias", ("channels",), role="shared", optional=True),
    Input("initial_state", ("sequence channels state",), role="state", optional=True, complex_allowed=True),
    Input("cu_seqlens", ("bound",), role="index", optional=True),
)
OPTIONS = (
    Option("delta_softplus", bool, False),
    Option("delta_min", float, -inf),
    Option("delta_max", float, inf),
    Option("chunk", int, None),
)


# ---------------------------------------------------------------------------------------------------------------------
# prepare


def prepare(arrays: Mapping[str, Any], options: Mapping[str, Any], *, step: bool = False) -> Prepared:
    """B and C as (batch, time, groups, state), time flipped for ``reverse``, complex partners made alike."""
    reverse = check_flag(options["reverse"], "reverse")
    chunk = check_chunk_size(options["chunk_size"])
    use_softplus = check_flag(options["delta_softplus"], "delta_softplus")
    low, high = check_limits(options["dt_limit"], "dt_limit")
    bounds, sequences = packing.read_bounds(arrays["cu_seqlens"])
    checked = _CANONICAL(arrays, sequences=sequences, step=step)
    xp = checked.xp
    ready = dict(checked.arrays)
    channels, state_size = checked.dims["channels"], checked.dims["state"]
    for name in ("B", "C"):
        groups = ready[name].shape[2]
        if (groups == 0 and channels != 0) or (groups and channels % groups):
            raise ShapeError(
                f"{name}: shape {tuple(arrays[name].shape)} has {groups} groups, "
                f"which do not divide {channels} channels"
            )
    complex_model = is_complex(ready["A"])
    for name in ("B", "C", "initial_state"):
        if ready[name] is None:
            continue
        if complex_model:
            ready[name] = cast(xp, ready[name], ready["A"].dtype)
        elif is_complex(ready[name]):
            raise DtypeError(
                f"{name}: complex, but A is real; A = xp.astype(A, {name}.dtype) makes the model complex "
                f"(its read-out is then twice the real part)"
            )
    rows = checked.dims["batch"] if sequences is None else sequences
    prepared = assemble(
        OPERATION,
        checked,
        ready,
        (use_softplus, low, high, chunk),
        bounds=bounds,
        sequences=sequences,
        reverse=reverse,
        output_shape=(checked.dims["batch"], checked.dims["time"], channels),
        state_shape=(rows, channels, state_size),
        complex_state=complex_model,
    )
    return prepared._replace(pull=lambda grads, d_y: restore(checked, prepared.pull(grads, d_y)))


def check_limits(value: Any, name: str) -> tuple[float, float]:
    """(lowest, highest) of a step size as Python floats; None is no limit."""
    if value is None:
        return -inf, inf
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ArgumentError(
            f"{name}: {shown(value)}; allowed is a pair (lowest, highest) of numbers, or None"
        )
    low, high = (check_number(limit, name) for limit in value)
    if not low <= high:
        raise ArgumentError(f"{name}: ({low}, {high}); the lowest must not exceed the highest")
    return low, high


OPERATION = Operation(
    name="selective_scan",
    inputs=INPUTS,
    options=OPTIONS,
    main="u",
    relevant="u",
    prepare=prepare,
    generic={"recurrent": selective_forms.Recurrent()},
    choose=lambda call: "generic.recurrent",
    function="scanfield.selective_scan",
    output="batch time channels",
    groups={"groups_B": "channels", "groups_C": "channels"},
)
_CANONICAL = Canonical(INPUTS, "u")


@public(OPERATION)
def selective_scan(
    u: Array,
    delta: Array,
    A: Array,
    B: Array,
    C: Array,
    D: Array | None = None,
    z: Array | None = None,
    delta_bias: Array | None = None,
    initial_state: Array | None = None,
    *,
    delta_softplus: bool = False,
    dt_limit: tuple[float, float] | None = None,
    reverse: bool = False,
    cu_seqlens: Any = None,
    states_at: Sequence[int] | str | None = None,
    chunk_size: int | None = None,
    method: str | None = None,
) -> ScanResult:
    """Selective state-space scan of Mamba: h_t = exp(s_t A) h_(t-1) + s_t u_t B_t, read out by C_t.

    Parameters
    ----------
    u, delta : arrays (batch, time, channels)
        Input and step size (before bias and softplus).
    A : array (channels, state)
        Diagonal of the state matrix, real or complex; with complex A the read-out is 2 Re sum(C h).
    B, C : arrays (batch, time, groups, state), (batch, time, state) or (channels, state)
        Input and read-out vectors, told apart by rank; channel c uses group c // (channels / groups).
    D : array (channels,), optional
        Skip connection, adds D u.
    z : array (batch, time, channels), optional
        Gate, multiplies the output by z sigmoid(z).
    delta_bias : array (channels,), optional
        Added to ``delta`` before softplus.
    initial_state : array (batch, channels, state), optional
        The state before the first token, zeros if absent; with ``cu_seqlens`` one for each sequence.
    delta_softplus : bool
        Steps are log(1 + exp(delta + delta_bias)), exact for every argument (no threshold).
    dt_limit : (lowest, highest), optional
        Clamp of the step size, after softplus.
    reverse, cu_seqlens, states_at, chunk_size, method
        As in ``linear_scan``.

    Returns
    -------
    ScanResult
        ``output`` (batch, time, channels) in the dtype of ``u``; ``final_state`` (batch or sequences, channels, state),
        carried in float32 at least, complex if A is. ``ScanStates`` with ``states_at``.

    Raises
    ------
    ShapeError, DtypeError, BackendError, DeviceError, ArgumentError
        For arrays that do not fit each other, groups that do not divide the channels, complex B, C or state with a real
        A, integers, two libraries or devices, unknown keywords.

    Notes
    -----
    Gu and Dao, "Mamba" (arXiv 2312.00752), algorithm 2, with exp(s A) for A and s B for B; S4D (arXiv 2206.11893) for
    complex A. Mixed dtypes are computed in the widest, at least float32, and the output comes in the dtype of ``u``:
    float16 outputs overflow to inf beyond 65504.

    Examples
    --------
    >>> import numpy, scanfield
    >>> u = delta = numpy.ones((1, 2, 1))
    >>> A = numpy.log([[0.5, 0.25]])
    >>> B, C = numpy.array([[2.0, 3.0]]), numpy.array([[1.0, 1.0]])
    >>> result = scanfield.selective_scan(u, delta, A, B, C)
    >>> result.output[0, :, 0]
    array([5.  , 6.75])
    >>> result.final_state[0, 0]
    array([3.  , 3.75])
    """
    arrays = {
        "u": u,
        "delta": delta,
        "A": A,
        "B": B,
        "C": C,
        "D": D,
        "z": z,
        "delta_bias": delta_bias,
        "initial_state": initial_state,
        "cu_seqlens": cu_seqlens,
    }
    options = {
        "delta_softplus": delta_softplus,
        "dt_limit": dt_limit,
        "reverse": reverse,
        "chunk_size": chunk_size,
    }
    return run(OPERATION, arrays, options, states_at, method)
