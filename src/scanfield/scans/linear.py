"""The linear scan h_t = a_t * h_(t-1) + b_t, elementwise over lanes.

Glossary
--------
a_t, b_t   ``a``, ``b``             (batch, time, ...)   coefficient and input
h_0, h_T   ``initial_state``, final (batch, ...)         state before the first and after the last token
G_t        (no name)                (batch, ...)         cotangent of h_t, all later tokens included

Backward: G_T = dh_T + ds, G_t = dh_t + conj(a_(t+1)) G_(t+1);
db_t = G_t, da_t = G_t conj(h_(t-1)), dh_0 = conj(a_1) G_1.
The adjoint of a scan is the scan in the other direction with the decay shifted by one token and conjugated. Nothing is
ever divided by a product of coefficients: zeros, negative and tiny coefficients are as good as any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from scanfield import advice
from scanfield.arrays import (
    COMPLEX_OF,
    HALF,
    Array,
    cast,
    check_same_library,
    dtype_name,
    dtype_of,
    is_complex,
    sum_to,
)
from scanfield.dispatch import Call, Grads, Input, Operation, Option, Prepared
from scanfield.errors import ArgumentError, ShapeError
from scanfield.scans import linear_forms, packing
from scanfield.scans.assemble import assemble
from scanfield.scans.canonical import Canonical, add_axes, axes_text, restore
from scanfield.scans.options import check_chunk_size, check_flag
from scanfield.scans.surface import ScanResult, public, run

_TIED = frozenset({"batch", "time", "feature"})
INPUTS = (
    Input("a", ("batch time feature",), tied=_TIED, complex_allowed=True),
    Input("b", ("batch time feature",), tied=_TIED, complex_allowed=True),
    Input("initial_state", ("sequence feature",), role="state", optional=True, complex_allowed=True),
    Input("cu_seqlens", ("bound",), role="index", optional=True),
)
OPTIONS = (Option("chunk", int, None),)


# A series is long and narrow when a step's arithmetic on all lanes is cheaper than the step of a Python loop.
_LONG, _NARROW = 1024, 512


def _choose(call: Call) -> str:
    # In half precision a long sum needs the blocked form's accuracy, and its limits lie outside what half precision
    # can hold. Elsewhere the recurrence, which has no limits.
    a, b, _, _ = call.arrays
    time = max(a.shape[1], b.shape[1])
    lanes = max(a.shape[0], b.shape[0]) * max(a.shape[2], b.shape[2])
    blocked = dtype_name(a.dtype) in HALF and time >= _LONG and lanes <= _NARROW
    return "generic.blocked" if blocked else "generic.recurrent"


# ---------------------------------------------------------------------------------------------------------------------
# prepare


def prepare(arrays: Mapping[str, Any], options: Mapping[str, Any], *, step: bool = False) -> Prepared:
    """Lanes flattened to one axis, time flipped for ``reverse``, all arrays in one kind of number."""
    reverse = check_flag(options["reverse"], "reverse")
    chunk = check_chunk_size(options["chunk_size"])
    bounds, sequences = packing.read_bounds(arrays["cu_seqlens"])
    flat, whole, lanes = _flatten(arrays, sequences, step)
    width = prod(lanes)
    known = {"batch": whole[0], "time": whole[1], "feature": width}
    checked = _CANONICAL(flat, sequences=sequences, known=known)
    xp = checked.xp
    ready = {name: checked.arrays[name] for name in ("a", "b", "initial_state")}
    complex_numbers = any(x is not None and is_complex(x) for x in ready.values())
    if complex_numbers:
        dtype = dtype_of(xp, COMPLEX_OF[checked.compute])
        ready = {name: None if x is None else cast(xp, x, dtype) for name, x in ready.items()}
    if bounds is not None:  # the pads of a pack need values of their own
        for name in ("a", "b"):
            ready[name] = xp.broadcast_to(ready[name], (whole[0], whole[1], ready[name].shape[2]))
    rows = whole[0] if sequences is None else sequences
    prepared = assemble(
        OPERATION,
        checked,
        ready,
        (chunk,),
        bounds=bounds,
        sequences=sequences,
        reverse=reverse,
        output_shape=(*whole[:2], *lanes),
        state_shape=(rows, *lanes),
        canonical_output=None if len(lanes) == 1 else (*whole[:2], width),
        canonical_state=None if len(lanes) == 1 else (rows, width),
        complex_output=complex_numbers,
        complex_state=complex_numbers,
    )

    def pull(grads: Grads, d_output: Array | None) -> dict[str, Array]:
        found = prepared.pull(grads, d_output)
        summed = {name: sum_to(xp, grad, flat[name].shape) for name, grad in found.items()}
        return {
            name: _unflatten(xp, grad, arrays[name], lanes, 1 if name == "initial_state" or step else 2)
            for name, grad in restore(checked, summed).items()
        }

    return prepared._replace(pull=pull)


def _flatten(
    arrays: Mapping[str, Any], sequences: int | None, step: bool
) -> tuple[dict[str, Any], tuple[int, int], tuple[int, ...]]:
    """a and b as (batch, time, lanes), the state as (rows, lanes); the whole batch and time; the lanes' own axes."""
    a, b, state = arrays["a"], arrays["b"], arrays["initial_state"]
    for name in ("a", "b"):
        if arrays[name] is None:
            raise ArgumentError(f"{name}: an array is needed, came None")
    if (
        not step
    ):  # arrays that lie as the kernels take them: nothing to do, and a small call feels all that is done
        shape = _shape(a)
        if len(shape) == 3 and _shape(b) == shape:
            rows = shape[0] if sequences is None else sequences
            if state is None or _shape(state) == (rows, shape[2]):
                return {"a": a, "b": b, "initial_state": state}, (shape[0], shape[1]), (shape[2],)
    given = [
        ("a", a),
        ("b", b),
        *([("state" if step else "initial_state", state)] if state is not None else []),
    ]
    lead = ("batch",) if step else ("batch", "time")
    xp = check_same_library(
        given, peers=True, shape_of=lambda name: _constant(name, a, b, sequences, len(lead))
    ).namespace
    named = f"({', '.join(lead)}, ...)"
    for name, array in given[:2]:
        if len(array.shape) < len(lead):
            other = len((b if name == "a" else a).shape)
            raise ShapeError(
                f"{name}: shape {tuple(array.shape)} has {axes_text(len(array.shape))}; expected {named}"
                f"{_raised(name, len(array.shape), len(lead), other)}"
            )
    if len(a.shape) != len(b.shape):
        raise ShapeError(
            f"a: shape {tuple(a.shape)} and b: shape {tuple(b.shape)} differ in rank; expected are two arrays "
            f"{named} of one rank, each axis equal or 1: {_levelled(a.shape, b.shape)}"
        )
    for m, n in zip(a.shape, b.shape, strict=True):
        if m != n and 1 not in (m, n):
            raise ShapeError(
                f"b: shape {tuple(b.shape)} does not fit a: shape {tuple(a.shape)}; each axis must be equal or 1"
            )
    shape = tuple(n if m == 1 else m for m, n in zip(a.shape, b.shape, strict=True))
    lanes = shape[len(lead) :]
    rows = shape[0] if sequences is None else sequences
    if state is not None and tuple(state.shape) != (rows, *lanes):
        raise ShapeError(
            f"{given[2][0]}: shape {tuple(state.shape)}, but {(rows, *lanes)} is expected "
            f"({'sequences' if sequences is not None else 'batch'}, and the lanes of a and b)"
        )
    flat: dict[str, Any] = {"initial_state": state}
    if state is not None and len(lanes) != 1:
        flat["initial_state"] = xp.reshape(state, (rows, prod(lanes)))
    for name, array in given[:2]:
        own = tuple(array.shape[len(lead) :])
        if own != lanes and prod(own) != 1:
            array = xp.broadcast_to(array, (*array.shape[: len(lead)], *lanes))
            own = lanes
        if step or len(own) != 1:
            array = xp.reshape(array, (array.shape[0], 1 if step else array.shape[1], prod(own)))
        flat[name] = array
    return flat, (shape[0], 1 if step else shape[1]), lanes


def _constant(name: str, a: Any, b: Any, sequences: int | None, lead: int) -> tuple[int, ...] | None:
    """The shape of an argument that is one number everywhere: axes of size 1 beside a or b, the lanes of a state."""
    shapes = [shape for array in (a, b) if len(shape := advice.shape_of(array) or ()) >= lead]
    if name in ("a", "b"):
        return (1,) * max(map(len, shapes), default=lead + 1)
    if len({len(shape) for shape in shapes}) != 1:
        return None
    whole = [max(sizes) for sizes in zip(*shapes, strict=True)]
    return (whole[0] if sequences is None else sequences, *whole[lead:])


def _raised(name: str, axes: int, lead: int, other: int) -> str:
    """The line that gives an array its batch and time, and as many axes as the other one has."""
    wanted = other if other >= lead else lead + 1
    if axes == 0:
        return f"; the same everywhere: {name} = {name}[{'None, ' * wanted}...]"
    return add_axes(name, axes, wanted) if lead == 2 else ""


def _levelled(a: Sequence[int], b: Sequence[int]) -> str:
    """The line by which the array of lower rank gets the axes that it lacks: lanes behind, or else those in front."""
    name, low, high = ("a", a, b) if len(a) < len(b) else ("b", b, a)
    more = len(high) - len(low)
    for shape, line in (
        ((*low, *(1,) * more), f"{name} = {name}[...{', None' * more}]"),
        (((1,) * more + tuple(low)), f"{name} = {name}[{'None, ' * more}...]"),
    ):
        if all(m == n or 1 in (m, n) for m, n in zip(shape, high, strict=True)):
            return line
    return "reshape one with axes of size 1"


def _shape(array: Any) -> tuple[int, ...]:
    """The shape of what may be no array; torch's nested tensors have none, and raise when they are asked for it."""
    return () if getattr(array, "is_nested", False) else getattr(array, "shape", ())


def _unflatten(xp: Any, gradient: Array, array: Array, lanes: tuple[int, ...], lead: int) -> Array:
    """A gradient (batch, time, lanes or 1) in the shape of the user's array, summed where that was broadcast."""
    if gradient.shape == array.shape:
        return gradient
    shape = tuple(array.shape)
    if prod(shape[lead:]) == gradient.shape[-1]:
        return xp.reshape(gradient, shape)
    return sum_to(xp, xp.reshape(gradient, (*shape[:lead], *lanes)), shape)


OPERATION = Operation(
    name="linear_scan",
    inputs=INPUTS,
    options=OPTIONS,
    main="a",
    relevant="b",
    prepare=prepare,
    generic={"recurrent": linear_forms.Recurrent(), "blocked": linear_forms.Blocked()},
    choose=_choose,
    notes=(
        "generic.blocked carries the state by products of a over sqrt(time) tokens, which may underflow or overflow "
        "where the state does not; generic.recurrent is exact.",
    ),
    function="scanfield.linear_scan",
    output="batch time feature",
)
_CANONICAL = Canonical(INPUTS, "a")


@public(OPERATION)
def linear_scan(
    a: Array,
    b: Array,
    initial_state: Array | None = None,
    *,
    reverse: bool = False,
    cu_seqlens: Any = None,
    states_at: Sequence[int] | str | None = None,
    chunk_size: int | None = None,
    method: str | None = None,
) -> ScanResult:
    """Linear recurrence h_t = a_t h_(t-1) + b_t, elementwise.

    Parameters
    ----------
    a, b : arrays (batch, time, ...)
        Coefficient and input, real or complex, of one rank; each axis equal or 1 (an axis of size 1 is broadcast and
        never copied). Any value of ``a`` is legal: zeros (resets), negative numbers, growth.
    initial_state : array (batch, ...), optional
        The state before the first token, zeros if absent; with ``cu_seqlens`` one for each sequence.
    reverse : bool
        Run time backwards: h_t = a_t h_(t+1) + b_t; the final state is then the one at token 0.
    cu_seqlens : integers (sequences + 1,), optional
        Bounds of sequences that lie end to end in one row (batch 1): first 0, last ``time``, not decreasing.
    states_at : sequence of int or "chunks", optional
        Also return the states at these boundaries (before token t), or at the start of every chunk.
    chunk_size : int, optional
        Tokens between two states kept for the gradient; at least 1. It changes no result beyond rounding.
    method : str, optional
        Force an implementation by its name, see ``explain``.

    Returns
    -------
    ScanResult
        ``output`` (batch, time, ...), every h_t, in the dtype of ``a`` (complex if any array is); ``final_state``
        (batch or sequences, ...), carried in float32 at least. ``ScanStates`` with ``states_at``.

    Raises
    ------
    ShapeError, DtypeError, BackendError, DeviceError, ArgumentError
        For arrays that do not fit each other, integers, two libraries or devices, unknown keywords.

    Notes
    -----
    Blelloch, "Prefix sums and their applications" (1990), section 1.4. Half precision goes in and out; the carry is
    float32. A NaN at token t leaves the outputs before t untouched. ``method="generic.blocked"`` runs a long series of
    few lanes in some 3 sqrt(time) steps instead of time; it is the choice for half precision, and limited to
    coefficients whose product over sqrt(time) tokens neither underflows nor overflows. Its blocks are its own: it takes
    no notice of ``chunk_size`` and keeps some sqrt(time) states for the gradient. Compiled scans of very few lanes
    (``numpy.numba``) multiply the coefficients of 2 to 16 tokens, which must not underflow either.

    Examples
    --------
    >>> import numpy, scanfield
    >>> a, b = numpy.full((1, 4, 1), 0.5), numpy.ones((1, 4, 1))
    >>> result = scanfield.linear_scan(a, b)
    >>> result.output[0, :, 0]
    array([1.   , 1.5  , 1.75 , 1.875])
    >>> result.final_state
    array([[1.875]])
    """
    arrays = {"a": a, "b": b, "initial_state": initial_state, "cu_seqlens": cu_seqlens}
    return run(OPERATION, arrays, {"reverse": reverse, "chunk_size": chunk_size}, states_at, method)
