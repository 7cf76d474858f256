"""The linear scan h_t = a_t * h_(t-1) + b_t, elementwise over lanes.

Glossary
--------
a_t, b_t   ``a``, ``b``             (batch, time, ...)   coefficient and input
h_0, h_T   ``initial_state``, final (batch, ...)         state before the first and after the last token
G_t        (no name)                (batch, ...)         cotangent of h_t, all later tokens included

Backward: G_T = dh_T + ds, G_t = dh_t + conj(a_(t+1)) G_(t+1); db_t = G_t, da_t = G_t conj(h_(t-1)), dh_0 = conj(a_1) G_1.
The adjoint of a scan is the scan in the other direction with the decay shifted by one token and conjugated. Nothing is
ever divided by a product of coefficients: zeros, negative and tiny coefficients are as good as any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isqrt, prod
from typing import Any

from scanfield.arrays import (
    COMPLEX,
    COMPLEX_OF,
    HALF,
    Array,
    cast,
    check_same_library,
    dtype_name,
    dtype_of,
    is_complex,
    library_of,
    ones,
    sum_to,
    zeros,
)
from scanfield.dispatch import Call, Grads, Input, Operation, Option, Prepared, loops
from scanfield.errors import ArgumentError, ShapeError
from scanfield.scans import packing
from scanfield.scans.assemble import assemble
from scanfield.scans.canonical import Canonical, restore
from scanfield.scans.generic import (
    GenericForm,
    Result,
    chunk_of,
    divide,
    merge,
    reduced,
    square_root_chunk,
    walk_back,
)
from scanfield.scans.surface import ScanResult, check_chunk_size, check_flag, public, run

_TIED = frozenset({"batch", "time", "feature"})
INPUTS = (
    Input("a", ("batch time feature",), tied=_TIED, complex_allowed=True),
    Input("b", ("batch time feature",), tied=_TIED, complex_allowed=True),
    Input("initial_state", ("sequence feature",), role="state", optional=True, complex_allowed=True),
    Input("cu_seqlens", ("bound",), role="index", optional=True),
)
OPTIONS = (Option("chunk", int, None),)


# ---------------------------------------------------------------------------------------------------------------------
# the recurrence


def _token(xp: Any, constants: Any, carry: Any, slices: Any) -> tuple[Any, Any]:
    a_t, b_t = (held if moving is None else moving for held, moving in zip(constants, slices, strict=True))
    h = a_t * carry + b_t
    return h, (h,)


def _states(xp: Any, a: Array, b: Array, state: Array) -> tuple[Array, Array]:
    """Every state of one block, and the last."""
    length = max(a.shape[1], b.shape[1])
    xs = tuple(x if x.shape[1] == length else None for x in (a, b))
    held = tuple(x[:, 0, ...] if x.shape[1] != length else None for x in (a, b))
    last, (all_states,) = loops.scan(_token, xp, held, state, xs)
    return all_states, last


def _back_token(config: Any, constants: Any, carry: Any, slices: Any) -> tuple[Any, Any]:
    (held,) = constants
    d_h, a_t = slices
    g = d_h + carry
    return (held if a_t is None else a_t) * g, (g,)


def _forward_block(config: Any, constants: Any, state: Any, slices: Any) -> tuple[Any, Any]:
    xp, varying, carry_dtype, output_dtype = config
    a, b = (cast(xp, x, carry_dtype) for x in merge(varying, slices, constants))
    states, last = _states(xp, a, b, state)
    return last, (cast(xp, states, output_dtype), state)


def _backward_block(config: Any, arrays: Any, state: Array, d_output: Array, carry: Array) -> tuple[Array, Any]:
    xp, carry_dtype, wanted = config
    a, b = (cast(xp, x, carry_dtype) for x in arrays)
    conj_a = xp.conj(a) if is_complex(a) else a
    length = d_output.shape[1]
    varies = a.shape[1] == length
    carry, (g,) = loops.scan(
        _back_token,
        None,
        (None if varies else conj_a[:, 0, ...],),
        carry,
        (cast(xp, d_output, carry_dtype), conj_a if varies else None),
        reverse=True,
    )
    d_a = None
    if wanted[0]:
        states, _ = _states(xp, a, xp.broadcast_to(b, (b.shape[0], length, b.shape[2])), state)
        before = xp.concat([xp.expand_dims(state, axis=1), states[:, :-1, ...]], axis=1)
        if is_complex(before):
            before = xp.conj(before)
        d_a = reduced(xp, g * before, a)
    return carry, (d_a, reduced(xp, g, b) if wanted[1] else None)


class _LinearForm(GenericForm):
    """What the two forms share."""

    neutral = {"a": 1.0, "b": 0.0}

    def shapes(self, call: Call) -> tuple[tuple[int, ...], tuple[int, ...], Any, Any]:
        """Output (batch, time, feature) and state (batch, feature)."""
        a, b, state, _ = call.arrays
        xp = library_of(a, "a").namespace
        shape = tuple(m if n == 1 else n for n, m in zip(a.shape, b.shape, strict=True))
        names = {dtype_name(x.dtype) for x in (a, b, state) if x is not None}
        carry = dtype_of(xp, COMPLEX_OF[call.compute] if names & set(COMPLEX) else call.compute)
        half = dtype_name(a.dtype) in HALF and not names & set(COMPLEX)
        return shape, (shape[0], shape[2]), a.dtype if half else carry, carry

    def transition(self, call: Call) -> Array:
        """The product of the coefficients."""
        a, b, _, _ = call.arrays
        xp = library_of(a, "a").namespace
        shape, state_shape, _, carry_dtype = self.shapes(call)
        return xp.prod(xp.broadcast_to(cast(xp, a, carry_dtype), shape), axis=1)

    def identity(self, call: Call) -> Array:
        """Ones."""
        xp = library_of(call.arrays[0], "a").namespace
        _, state_shape, _, carry_dtype = self.shapes(call)
        return ones(xp, state_shape, carry_dtype, call.arrays[1])


class Recurrent(_LinearForm):
    """The token recurrence."""

    def scan(self, call: Call, keep: bool) -> Result:
        """Blocks of tokens; the state at each block's start is what backward needs."""
        a, b, state, _ = call.arrays
        xp = library_of(a, "a").namespace
        output_shape, state_shape, output_dtype, carry_dtype = self.shapes(call)
        if state is None:
            state = zeros(xp, state_shape, carry_dtype, b)
        time = output_shape[1]
        if a.shape[1] == b.shape[1] == 1 != time:  # nothing to walk over
            b = xp.broadcast_to(b, (b.shape[0], time, b.shape[2]))
        varying, xs, constants = divide((a, b), time)
        size = chunk_of(call.options[0], time, square_root_chunk(time))
        last, (output, starts) = loops.blocks(
            _forward_block, (xp, varying, carry_dtype, output_dtype), constants, state, xs, size, joined=1
        )
        return output, last, (starts,) if keep else ()

    def reverse(
        self,
        call: Call,
        residuals: tuple[Array, ...],
        d_output: Array | None,
        d_final_state: Array | None,
        wanted: tuple[bool, ...],
    ) -> Grads:
        """The scan in the other direction, block by block."""
        a, b, state, _ = call.arrays
        xp = library_of(a, "a").namespace
        output_shape, state_shape, _, carry_dtype = self.shapes(call)
        time = output_shape[1]
        if d_output is None:
            d_output = zeros(xp, output_shape, carry_dtype, b)
        carry = zeros(xp, state_shape, carry_dtype, b) if d_final_state is None else cast(xp, d_final_state, carry_dtype)
        varying = divide((a, b), time)[0]
        carry, (d_a, d_b) = walk_back(
            _backward_block,
            (xp, carry_dtype, wanted[:2]),
            (a, b),
            varying,
            wanted[:2],
            residuals[0],
            d_output,
            carry,
            chunk_of(call.options[0], time, square_root_chunk(time)),
            (carry_dtype, carry_dtype),
            xp,
        )
        return d_a, d_b, carry if wanted[2] and state is not None else None, None

class Blocked(_LinearForm):
    """Two passes over blocks of sqrt(time) tokens: all blocks side by side from zero, the chain of their summaries, and
    all blocks again from their true starts.

    Some 3 sqrt(time) steps instead of time, for long series of few lanes, and a sum of many small numbers loses few
    digits. Exact but for one case: coefficients whose product over a block overflows, where the state does not.
    """

    def scan(self, call: Call, keep: bool) -> Result:
        """Output, final state and the states at the start of each block."""
        a, b, state, _ = call.arrays
        xp = library_of(a, "a").namespace
        output_shape, state_shape, output_dtype, carry_dtype = self.shapes(call)
        if state is None:
            state = zeros(xp, state_shape, carry_dtype, a)
        a_cut, b_cut = _cut(xp, a, b, output_shape, carry_dtype)
        states, last, starts = _two_passes(xp, a_cut, b_cut, state)
        output = _uncut(xp, states, output_shape)
        return cast(xp, output, output_dtype), last, (starts,) if keep else ()

    def reverse(
        self,
        call: Call,
        residuals: tuple[Array, ...],
        d_output: Array | None,
        d_final_state: Array | None,
        wanted: tuple[bool, ...],
    ) -> Grads:
        """The states once more from the blocks' starts, and the scan in the other direction by the same two passes."""
        a, b, state, _ = call.arrays
        xp = library_of(a, "a").namespace
        output_shape, state_shape, _, carry_dtype = self.shapes(call)
        if d_output is None:
            d_output = zeros(xp, output_shape, carry_dtype, a)
        if d_final_state is None:
            d_final_state = zeros(xp, state_shape, carry_dtype, a)
        coefficient = xp.conj(a) if is_complex(a) else a
        full = xp.broadcast_to(cast(xp, coefficient, carry_dtype), output_shape)
        # G_t = dh_t + a_(t+1) G_(t+1): flipped time, and the coefficient of the token after.
        flipped = xp.flip(full, axis=1)
        shifted = xp.concat([xp.ones_like(flipped[:, :1, :]), flipped[:, :-1, :]], axis=1)
        d_flipped = xp.flip(cast(xp, d_output, carry_dtype), axis=1)
        a_cut, d_cut = _cut(xp, shifted, d_flipped, output_shape, carry_dtype)
        g, last, _ = _two_passes(xp, a_cut, d_cut, cast(xp, d_final_state, carry_dtype))
        g = xp.flip(_uncut(xp, g, output_shape), axis=1)
        d_a = None
        if wanted[0]:
            (starts,) = residuals
            a_cut, b_cut = _cut(xp, a, b, output_shape, carry_dtype)
            states = _in_blocks(xp, a_cut, b_cut, starts)[0]
            before = _uncut(xp, xp.concat([xp.expand_dims(starts, axis=2), states[:, :, :-1, :]], axis=2), output_shape)
            d_a = reduced(xp, g * (xp.conj(before) if is_complex(before) else before), a)
        d_b = reduced(xp, g, b) if wanted[1] else None
        d_state = full[:, 0, :] * g[:, 0, :] if wanted[2] and state is not None else None
        return d_a, d_b, d_state, None


def _cut(xp: Any, a: Array, b: Array, shape: Sequence[int], dtype: Any) -> tuple[Array, Array]:
    """a and b in blocks, (batch, blocks, block, lanes), the last block filled with a = 1, b = 0."""
    batch, time, width = shape
    size = max(1, isqrt(time))
    count = -(-time // size)
    found = []
    for x, neutral in ((a, 1.0), (b, 0.0)):
        x = xp.broadcast_to(cast(xp, x, dtype), tuple(shape))
        if count * size != time:
            pad = xp.broadcast_to(xp.full_like(x[:, :1, :], neutral), (batch, count * size - time, width))
            x = xp.concat([x, pad], axis=1)
        found.append(xp.reshape(x, (batch, count, size, width)))
    return found[0], found[1]


def _uncut(xp: Any, x: Array, shape: Sequence[int]) -> Array:
    return xp.reshape(x, (x.shape[0], x.shape[1] * x.shape[2], x.shape[3]))[:, : shape[1], :]


def _in_blocks(xp: Any, a: Array, b: Array, starts: Array) -> tuple[Array, Array]:
    """All blocks side by side from their starts (batch, blocks, lanes): every state, and each block's last."""
    batch, count, size, width = a.shape
    states, last = _states(
        xp,
        xp.reshape(a, (batch * count, size, width)),
        xp.reshape(b, (batch * count, size, width)),
        xp.reshape(starts, (batch * count, width)),
    )
    return xp.reshape(states, (batch, count, size, width)), xp.reshape(last, (batch, count, width))


def _chain(xp: Any, constants: Any, carry: Any, slices: Any) -> tuple[Any, Any]:
    product, local = slices
    # A product that overflowed meets a state that is exactly 0: nothing came in, nothing goes out.
    moved = xp.where(carry == 0, xp.zeros_like(carry), product * carry)
    return moved + local, (carry,)


def _two_passes(xp: Any, a: Array, b: Array, state: Array) -> tuple[Array, Array, Array]:
    """Every state (batch, blocks, block, lanes), the last one, and the states at the blocks' starts."""
    nothing = xp.zeros_like(b[:, :, 0, :])
    _, local = _in_blocks(xp, a, b, nothing)
    last, (starts,) = loops.scan(_chain, xp, (), state, (xp.prod(a, axis=2), local))
    states, _ = _in_blocks(xp, a, b, starts)
    return states, last, starts


# A series is long and narrow when a step's arithmetic on all lanes is cheaper than the step of a Python loop.
_LONG, _NARROW = 1024, 512


def _choose(call: Call) -> str:
    a, b, _, _ = call.arrays
    time, lanes = max(a.shape[1], b.shape[1]), max(a.shape[0], b.shape[0]) * max(a.shape[2], b.shape[2])
    return "generic.blocked" if time >= _LONG and lanes <= _NARROW else "generic.recurrent"


# ---------------------------------------------------------------------------------------------------------------------
# prepare


def prepare(arrays: Mapping[str, Array | None], options: Mapping[str, Any], *, step: bool = False) -> Prepared:
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
    arrays: Mapping[str, Array | None], sequences: int | None, step: bool
) -> tuple[dict[str, Array | None], tuple[int, int], tuple[int, ...]]:
    """a and b as (batch, time, lanes), the state as (rows, lanes), and the whole size of batch, time and each lane axis."""
    a, b, state = arrays["a"], arrays["b"], arrays["initial_state"]
    for name in ("a", "b"):
        if arrays[name] is None:
            raise ArgumentError(f"{name}: an array is needed, came None")
    given = [("a", a), ("b", b), *([("initial_state", state)] if state is not None else [])]
    xp = check_same_library(given).namespace
    lead = ("batch",) if step else ("batch", "time")
    named = f"({', '.join(lead)}, ...)"
    for name, array in given[:2]:
        if len(array.shape) < len(lead):
            raise ShapeError(f"{name}: shape {tuple(array.shape)} has {len(array.shape)} axes; expected {named}")
    if len(a.shape) != len(b.shape):
        raise ShapeError(
            f"a: shape {tuple(a.shape)} and b: shape {tuple(b.shape)} differ in rank; expected are two arrays {named} of "
            f"one rank, each axis equal or 1: reshape one with axes of size 1"
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
            f"initial_state: shape {tuple(state.shape)}, but {(rows, *lanes)} is expected "
            f"({'sequences' if sequences is not None else 'batch'}, and the lanes of a and b)"
        )
    flat: dict[str, Array | None] = {"initial_state": state}
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
    generic={"recurrent": Recurrent(), "blocked": Blocked()},
    choose=_choose,
    notes=(
        "generic.blocked overflows where the product of a over sqrt(time) tokens does; generic.recurrent is exact.",
    ),
    function="scanfield.linear_scan",
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
    float32. A NaN at token t leaves the outputs before t untouched.

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
