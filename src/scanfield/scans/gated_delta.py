"""Gated DeltaNet-2: a K x V state that decays per key channel, erases along the key and writes a gated value.

Glossary (Gated DeltaNet-2, arXiv 2605.22791, equations 5 to 8)
--------
q_t, k_t   ``query``, ``key``   (batch, time, heads, K)
v_t        ``value``            (batch, time, vheads, V)         head j uses query and key head j // (vheads / heads)
g_t        ``log_decay``        (batch, time, vheads[, K])       natural logarithm of the decay
b_t        ``erase``            (batch, time, vheads[, K])
w_t        ``write``            (batch, time, vheads[, V])
S_t        state                (batch, vheads, K, V)

S'_t = exp(g_t) S_(t-1);   up_t = w_t v_t - (b_t k_t)^T S'_t;   S_t = S'_t + k_t up_t^T;   o_t = scale q_t^T S_t

The decay comes first, the error is taken against the decayed state, and the output reads the updated one. The
forms stand in ``gated_delta_recurrent`` and ``gated_delta_chunk``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scanfield.arrays import Array, cast, dtype_of
from scanfield.dispatch import Call, Grads, Input, Operation, Option, Prepared, loops
from scanfield.errors import ShapeError
from scanfield.scans import gated_delta_chunk, gated_delta_recurrent, packing
from scanfield.scans.assemble import assemble
from scanfield.scans.canonical import Canonical, Checked, quiet, restore
from scanfield.scans.options import check_chunk_size, check_flag, check_number
from scanfield.scans.surface import ScanResult, public, run

QUERY = Input("query", ("batch time heads key",))
KEY = Input("key", ("batch time heads key",))
VALUE = Input("value", ("batch time vheads value",))
STATE = Input("initial_state", ("sequence vheads key value",), role="state", optional=True)
BOUNDS = Input("cu_seqlens", ("bound",), role="index", optional=True)
_KEY_GATE = ("batch time vheads key", "batch time vheads 1")

INPUTS = (
    QUERY,
    KEY,
    VALUE,
    Input("log_decay", _KEY_GATE, optional=True, tied=frozenset({"key"})),
    Input("erase", _KEY_GATE, optional=True, tied=frozenset({"key"})),
    Input(
        "write", ("batch time vheads value", "batch time vheads 1"), optional=True, tied=frozenset({"value"})
    ),
    STATE,
    BOUNDS,
)
OPTIONS = (Option("scale", float, None), Option("erase_vector", bool, False), Option("chunk", int, None))

LENGTH_EPSILON = 1e-6


def check_heads(
    dims: Mapping[str, int], value: str = "value", shared: str = "heads of query and key"
) -> None:
    """ShapeError unless the value heads are a multiple of the heads of query and key."""
    heads, vheads = dims["heads"], dims["vheads"]
    if (heads == 0 and vheads != 0) or (heads and vheads % heads):
        raise ShapeError(f"{value}: {vheads} heads, which is no multiple of the {heads} {shared}")


def assemble_rule(
    checked: Checked,
    arrays: Mapping[str, Any],
    options: Mapping[str, Any],
    *,
    bounds: packing.Bounds | None,
    sequences: int | None,
    erase_vector: bool = False,
) -> Prepared:
    """A call of the rule from canonical arrays: keys normalised if asked, scale resolved, time flipped.

    The gradients that ``pull`` returns are those of the canonical arrays.
    """
    xp, dims = checked.xp, checked.dims
    reverse = check_flag(options["reverse"], "reverse")
    chunk = check_chunk_size(options["chunk_size"])
    scale = options["scale"]
    width = dims["key"]
    scale = max(width, 1) ** -0.5 if scale is None else check_number(scale, "scale")
    ready = dict(arrays)
    norms: dict[str, tuple[Array, Array]] = {}
    if check_flag(options["qk_l2norm"], "qk_l2norm"):
        for name in ("query", "key"):
            x = cast(xp, ready[name], dtype_of(xp, checked.compute))
            with quiet(checked.library):
                inverse = 1 / xp.sqrt(xp.sum(x * x, axis=-1, keepdims=True) + LENGTH_EPSILON)
                ready[name] = x * inverse
            norms[name] = (ready[name], inverse)
    rows = dims["batch"] if sequences is None else sequences
    prepared = assemble(
        OPERATION,
        checked,
        ready,
        (scale, erase_vector, chunk),
        bounds=bounds,
        sequences=sequences,
        reverse=reverse,
        output_shape=(dims["batch"], dims["time"], dims["vheads"], dims["value"]),
        state_shape=(rows, dims["vheads"], width, dims["value"]),
    )
    if not norms:
        return prepared

    def pull(grads: Grads, d_output: Array | None) -> dict[str, Array]:
        found = prepared.pull(grads, d_output)
        for name, (y, inverse) in norms.items():
            if name in found:
                d_y = found[name]
                with quiet(checked.library):
                    found[name] = inverse * (d_y - y * xp.sum(y * d_y, axis=-1, keepdims=True))
        return found

    return prepared._replace(pull=pull)


def prepare(arrays: Mapping[str, Any], options: Mapping[str, Any], *, step: bool = False) -> Prepared:
    """Gates as (batch, time, vheads, channels or 1), heads checked."""
    bounds, sequences = packing.read_bounds(arrays["cu_seqlens"])
    checked = _CANONICAL(arrays, sequences=sequences, step=step)
    prepared = assemble_rule(checked, checked.arrays, options, bounds=bounds, sequences=sequences)
    return prepared._replace(pull=lambda grads, d_y: restore(checked, prepared.pull(grads, d_y)))


# Below this many tokens the chunk form's fixed cost outweighs the loop's; measured by benchmarks/generic.py.
_SHORT = 32


def _choose(call: Call) -> str:
    # Where the loop is compiled, the recurrence is as fast on a CPU and compiles several times faster.
    short = call.arrays[0].shape[1] < _SHORT or loops.is_compiled(call.arrays[0])
    return "generic.recurrent" if short else "generic.chunk"


OPERATION = Operation(
    name="gdn2",
    inputs=INPUTS,
    options=OPTIONS,
    main="query",
    relevant="value",
    prepare=prepare,
    generic={"recurrent": gated_delta_recurrent.Recurrent(), "chunk": gated_delta_chunk.Chunk()},
    choose=_choose,
    diagonal=lambda call: call.arrays[4] is None,
    notes=(
        "generic.chunk is for log decays <= 0: with growth it overflows before the state does, where generic.recurrent "
        "is exact; and it spreads a NaN within its chunk.",
    ),
    function="scanfield.gdn2",
    output="batch time vheads value",
    groups={"heads": "vheads"},
)
_CANONICAL = Canonical(INPUTS, "query", ("value", check_heads))


@public(OPERATION)
def gdn2(
    query: Array,
    key: Array,
    value: Array,
    log_decay: Array | None = None,
    erase: Array | None = None,
    write: Array | None = None,
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
    """Gated delta rule with a decay, an erase and a write gate of its own (Gated DeltaNet-2).

    Parameters
    ----------
    query, key : arrays (batch, time, heads, K)
        Read and write directions.
    value : array (batch, time, vheads, V)
        ``vheads`` is a multiple of ``heads``; value head j uses query and key head j // (vheads / heads).
    log_decay : array (batch, time, vheads, K) or (batch, time, vheads), optional
        Natural logarithm of the decay, usually <= 0; -inf resets. None is no decay.
    erase : array (batch, time, vheads, K) or (batch, time, vheads), optional
        How much of what the key finds is taken away, 0 to 1 (to 2 for negative eigenvalues). None erases nothing.
    write : array (batch, time, vheads, V) or (batch, time, vheads), optional
        How much of the value is written. None writes it whole.
    initial_state : array (batch, vheads, K, V), optional
        The state before the first token, zeros if absent; with ``cu_seqlens`` one for each sequence.
    scale : float, optional
        Factor of the output, K^(-1/2) if absent.
    qk_l2norm : bool
        Divide every query and key by sqrt(sum of squares + 1e-6) first.
    reverse, cu_seqlens, states_at, chunk_size, method
        As in ``linear_scan``; ``chunk_size`` is the number of rows of the chunk form.

    Returns
    -------
    ScanResult
        ``output`` (batch, time, vheads, V) in the dtype of ``query``; ``final_state`` (batch or sequences,
        vheads, K, V), carried in float32 at least. ``ScanStates`` with ``states_at``.

    Raises
    ------
    ShapeError, DtypeError, BackendError, DeviceError, ArgumentError
        For arrays that do not fit each other, value heads that are no multiple of the heads, integers, two libraries or
        devices, unknown keywords.

    Notes
    -----
    Gated DeltaNet-2 (arXiv 2605.22791), equations 5 to 8. Growth (log_decay > 0) is legal and exact with
    ``method="generic.recurrent"``; the chunk form multiplies the carried state by the exponential of the summed
    log decay and overflows earlier. A gate at token t changes no output before it, bit for bit.

    Examples
    --------
    >>> import numpy, scanfield
    >>> query = numpy.ones((1, 2, 1, 2))
    >>> key = numpy.array([[1.0, 0.0], [0.6, 0.8]]).reshape(1, 2, 1, 2)
    >>> value = numpy.array([2.0, 3.0]).reshape(1, 2, 1, 1)
    >>> log_decay = numpy.log([[1.0, 1.0], [0.5, 0.25]]).reshape(1, 2, 1, 2)
    >>> erase = numpy.array([[1.0, 1.0], [0.5, 1.0]]).reshape(1, 2, 1, 2)
    >>> result = scanfield.gdn2(query, key, value, log_decay, erase, scale=1.0)
    >>> result.output.ravel().round(12)
    array([2.  , 4.78])
    >>> result.final_state.ravel().round(12)
    array([2.62, 2.16])
    """
    arrays = {
        "query": query,
        "key": key,
        "value": value,
        "log_decay": log_decay,
        "erase": erase,
        "write": write,
        "initial_state": initial_state,
        "cu_seqlens": cu_seqlens,
    }
    options = {"scale": scale, "qk_l2norm": qk_l2norm, "reverse": reverse, "chunk_size": chunk_size}
    return run(OPERATION, arrays, options, states_at, method)
