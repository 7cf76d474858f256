"""One sequence over the devices of a mesh axis, under ``jax.shard_map``: forward and backward exact on each.

Every device runs the same program: it summarises its shard, exchanges maps (``scanfield.shards`` has the glossary), and runs
its shard from the state that comes in. The backward exchanges the adjoint maps the other way. In a pack each device holds
all sequences, most of them empty there, so that bounds are data and one program serves every pack of one size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from scanfield import ScanResult
from scanfield.affine import Affine
from scanfield.dispatch import Call, operation_of, registry
from scanfield.errors import ArgumentError, DtypeError, ShapeError, StateError
from scanfield.shards import adjoint, block_map, check_arguments, identity, local_time, places, whole_bounds
from scanfield_jax.lift import Lifted, axes_of, torch_rule, vary
from scanfield_jax.parallel.line import Bounds, Exchange, Line, bounds_along, incoming, put, rows_of
from scanfield_jax.scans import implementation

Array = Any
Arrays = tuple[Array | None, ...]


def sequence_parallel(
    op: Any,
    *local_arrays: Array,
    axis_name: str,
    cu_seqlens: Any = None,
    exchange: Exchange = "scan",
    **options: Any,
) -> ScanResult:
    """Run a scan over a sequence that is sharded along time over a mesh axis; to be called inside ``jax.shard_map``.

    Parameters
    ----------
    op : a scan of scanfield
    *local_arrays, **options
        As in the call of ``op``: arrays with a time axis are this device's slice (``PartitionSpec(None, axis_name)``),
        the others (A, D, ``initial_state``) whole (``PartitionSpec()``). ``states_at`` is refused.
    axis_name : str
        The mesh axis over which time is cut.
    cu_seqlens : integers (sequences + 1,), optional
        Bounds of packed sequences in the whole, from 0 to the tokens of all devices. A sequence may lie on any number of
        devices. Host integers are checked, and become part of what is compiled; those of a JAX array, the same on all
        devices, may be traced: they are then not checked, and another pack of as many sequences compiles nothing.
    exchange : {"scan", "gather"}
        Maps travel in 1 + log2(devices) rounds of ``ppermute``, or by one ``all_gather``; the results agree to rounding.

    Returns
    -------
    ScanResult
        ``output`` of this device's tokens (``PartitionSpec(None, axis_name)``) and the whole's ``final_state``, the same
        on all devices (``PartitionSpec()``).

    Raises
    ------
    ShapeError, DtypeError, ArgumentError
        As ``op``; for ``cu_seqlens`` that do not end with the tokens of all devices, or differ from device to device; for a
        ``method`` other than "jax.scan" beside them.
    StateError
        Outside ``shard_map`` and where time is not cut over ``axis_name``; under ``check_vma=False``, without which JAX
        does not know which gradients to add up.

    Notes
    -----
    Call it under ``jit``: without, JAX's ``shard_map`` does not run a function with a gradient rule of its own
    (NotImplementedError). ``grad`` goes through it. JAX itself adds the gradients of whole arrays up over the devices.

    Shards are equally long; tokens that fill them up are one more sequence, the last of ``cu_seqlens``. Packs run by the
    loops of "jax.scan", whatever the device, and each device holds the states of all sequences.

    Devices are processes' own business: ``jax.distributed.initialize`` has the limits of time for those that do not come.

    Source: the affine form of the recurrence, ``docs/parallel.md``; Hillis and Steele, CACM 29 (1986).

    Examples
    --------
    >>> import jax, jax.numpy as jnp, scanfield
    >>> from jax.sharding import AxisType, PartitionSpec as P
    >>> from scanfield_jax.parallel import sequence_parallel
    >>> mesh = jax.make_mesh((1,), ("time",), axis_types=(AxisType.Auto,))
    >>> def scan(a, b):
    ...     return sequence_parallel(scanfield.linear_scan, a, b, axis_name="time")
    >>> cut = P(None, "time")
    >>> specs = {"in_specs": (cut, cut), "out_specs": scanfield.ScanResult(cut, P())}
    >>> sharded = jax.jit(jax.shard_map(scan, mesh=mesh, **specs))
    >>> sharded(jnp.full((1, 3, 1), 0.5), jnp.ones((1, 3, 1))).output.ravel().tolist()
    [1.0, 1.5, 1.75]
    """
    if exchange not in ("scan", "gather"):
        raise ArgumentError(f"exchange: {exchange!r}; allowed are 'scan' and 'gather'")
    try:
        size = int(cast(Any, lax).axis_size(axis_name))
    except NameError:
        raise StateError(
            f"axis_name: no mesh axis {axis_name!r} here; call sequence_parallel inside jax.shard_map over it"
        ) from None
    bound = check_arguments(op, local_arrays, options)
    cut = [
        bound.arrays[entry.name]
        for entry in bound.record.inputs
        if entry.role == "sequence" and bound.arrays[entry.name] is not None
    ]
    if not any(axis_name in axes_of(x) for x in cut):
        raise StateError(
            f"{bound.record.main}: the same on all devices along {axis_name!r}; cut time over it by in_specs, "
            "and leave check_vma of shard_map at True"
        )
    # The loop over time carries sums of all arrays: they vary together.
    every = frozenset([axis_name]).union(*[axes_of(x) for x in bound.arrays.values() if x is not None])
    arrays = {n: None if x is None else vary(x, tuple(every - axes_of(x))) for n, x in bound.arrays.items()}
    bound = bound._replace(arrays=arrays)
    line = Line(axis_name, size, bool(bound.options["reverse"]))
    method = bound.method if bound.method is not None else registry.forced_method()
    bounds, tokens = None, local_time(bound)
    if cu_seqlens is not None:
        cu_seqlens = _checked(cu_seqlens, size * tokens, axis_name, method)
        # What is prepared has as many sequences, and all its tokens in the last.
        bound.arrays["cu_seqlens"] = (*[0] * (len(cu_seqlens) - 1), tokens)
    prepared = bound.record.prepare(bound.arrays, bound.options)
    call = prepared.call
    roles = [entry.role for entry in operation_of(call).inputs]
    at, index = roles.index("state"), roles.index("index")
    if cu_seqlens is not None:
        bounds = bounds_along(cu_seqlens, tokens, line, prepared.stretch)
        bounds = Bounds(*(vary(x, tuple(every - axes_of(x))) for x in bounds))
    state = call.arrays[at]
    if state is None:
        state = identity(_without(call, index)).state
        state = (
            state if bounds is None else jnp.zeros_like(state, shape=(len(cu_seqlens) - 1, *state.shape[1:]))
        )
        state = vary(state, tuple(every - axes_of(state)))
    whole = (*call.arrays[:at], state, *call.arrays[at + 1 :])
    static = _Static(
        call.operation,
        call.options,
        call.compute,
        method,
        (at, index),
        line,
        tokens * prepared.stretch,
        exchange,
    )
    output, last = _run_sharded(static, (*whole[:index], *whole[index + 1 :]), bounds)
    return ScanResult(prepared.output(output), prepared.state(last))


def _checked(cu_seqlens: Any, tokens: int, axis: str, method: str | None) -> Any:
    """``cu_seqlens`` as host integers of the right whole, or as a traced array of the right kind."""
    if method not in (None, "jax.scan"):
        raise ArgumentError(f"method: {method!r}; packs over devices run by 'jax.scan' alone")
    if isinstance(cu_seqlens, jax.core.Tracer):
        if not jnp.issubdtype(cu_seqlens.dtype, jnp.integer):
            raise DtypeError(f"cu_seqlens: dtype {cu_seqlens.dtype}; integers are expected")
        if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2:
            raise ShapeError(
                f"cu_seqlens: shape {cu_seqlens.shape}; expected (sequences + 1,), of one sequence at least"
            )
        if axis in axes_of(cu_seqlens):
            raise ArgumentError(
                f"cu_seqlens: cut over {axis!r}; every device needs the bounds of the whole, PartitionSpec() in in_specs"
            )
        found: Any = cu_seqlens
    else:
        found = whole_bounds(cu_seqlens)
        if len(found) < 2:
            raise ShapeError(f"cu_seqlens: {list(found)}; two bounds at least, of one sequence")
        places((tokens,), found, False)
    return found


class _Static(NamedTuple):
    """What is no array about a call: hashable."""

    operation: str
    options: tuple[Any, ...]
    compute: str
    method: str | None
    at: tuple[int, int]
    """Of the state and of ``cu_seqlens`` among the inputs."""
    line: Line
    tokens: int
    exchange: Exchange

    def call(self, arrays: Arrays, state: Array, bounds: Array | None) -> Call:
        """The call from a state."""
        at, index = self.at
        whole = [*arrays[:index], bounds, *arrays[index:]]
        whole[at] = state
        return Call(self.operation, tuple(whole), self.options, self.compute)

    def is_pack(self, call: Call) -> bool:
        """Whether a call has bounds."""
        return call.arrays[self.at[1]] is not None

    @property
    def packed(self) -> Lifted:
        """What runs bounds that are data."""
        return implementation(self.operation)

    @property
    def has_inner(self) -> bool:
        """Whether a device may lie between two others: only through those do maps go on."""
        return self.line.size > 2


def _without(call: Call, index: int) -> Call:
    """The same tokens as one sequence."""
    return call._replace(arrays=(*call.arrays[:index], None, *call.arrays[index + 1 :]))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sharded(static: _Static, arrays: Arrays, bounds: Bounds | None) -> tuple[Array, Array]:
    return _forward(static, arrays, bounds, keep=False)[0]


def _forward(
    static: _Static, arrays: Arrays, bounds: Bounds | None, *, keep: bool
) -> tuple[tuple[Array, Array], Any]:
    line, given = static.line, cast(Any, arrays[static.at[0]])
    rows = rows_of(line, given.shape[0], bounds, static.tokens)
    transition, state = None, given
    if line.size > 1:
        # What goes on from here if nothing came in; in the place of an inner device, N of its map.
        begun = static.call(arrays, put(given, rows.enters, jnp.zeros_like(given)), rows.bounds)
        own = rows.take(_run(static, begun)[1], rows.leaves)
        if static.has_inner:
            transition = block_map(_without(begun, static.at[1]), static.method).transition
        diagonal = operation_of(begun).diagonal(begun)
        came = incoming(line, static.exchange, transition, own, diagonal, rows.before)
        state = put(given, rows.enters, came)
    call = static.call(arrays, state, rows.bounds)
    residuals: Arrays = ()
    if not keep:
        output, last = _run(static, call)
    elif static.is_pack(call):
        output, last, residuals = static.packed.save(call)
    else:
        output, last, residuals, _ = registry.save(call, static.method)
    final = cast(Any, lax).psum(put(jnp.zeros_like(last), rows.ended, last), line.axis)
    return (output, final), (arrays, bounds, state, transition, residuals)


def _run(static: _Static, call: Call) -> tuple[Array, Array]:
    output, last = (
        static.packed.forward(call) if static.is_pack(call) else registry.call(call, "forward", static.method)
    )
    return output, last


def _run_forward(static: _Static, given: Any, bounds: Any) -> tuple[Any, Any]:
    arrays = tuple([None if x is None else x.value for x in given])
    where = None if bounds is None else Bounds(*(x.value for x in bounds))
    return _forward(static, arrays, where, keep=True)


def _run_backward(static: _Static, kept: Any, cotangents: tuple[Any, Any]) -> tuple[Arrays, None]:
    arrays, bounds, state, transition, residuals = kept
    line, (at, index) = static.line, static.at
    rows = rows_of(line, state.shape[0], bounds, static.tokens)
    call = static.call(arrays, state, rows.bounds)

    def run(d_output: Array | None, d_last: Array, wanted: Sequence[bool]) -> Any:
        if static.is_pack(call):
            return static.packed.backward(call, residuals, d_output, d_last, tuple(wanted))
        chosen = registry.select(call, "save", static.method)
        return registry.backward(chosen, call, residuals, d_output, d_last, wanted)

    def pull(d_output: Array | None, d_final: Array | None) -> Arrays:
        d_last = jnp.zeros_like(state)
        if d_final is not None:
            d_last = put(d_last, rows.ended, vary(d_final, tuple(axes_of(state) - axes_of(d_final))))
        if line.size > 1:
            gamma = run(d_output, d_last, [i == at for i in range(len(call.arrays))])[at].astype(state.dtype)
            gamma = rows.take(gamma, rows.enters)
            diagonal = operation_of(call).diagonal(call)
            turned = (
                None if transition is None else adjoint(Affine(transition, gamma, diagonal), gamma).transition
            )
            going = incoming(line.turned(), static.exchange, turned, gamma, diagonal, rows.behind)
            d_last = put(d_last, rows.leaves, going)
        grads = list(run(d_output, d_last, [x is not None and i != index for i, x in enumerate(call.arrays)]))
        # The given state had no part in the sequence that comes in.
        grads[at] = put(grads[at], rows.enters, jnp.zeros_like(grads[at]))
        return (*grads[:index], *grads[index + 1 :])

    ends = [None if isinstance(x, SymbolicZero) else x for x in cotangents]
    found = torch_rule(pull, arrays, ends)
    return (
        tuple(
            [
                None if x is None else vary(grad, tuple(axes_of(x) - axes_of(grad)))
                for grad, x in zip(found, arrays, strict=True)
            ]
        ),
        None,
    )


_sharded.defvjp(_run_forward, _run_backward, symbolic_zeros=True)
_run_sharded = jax.jit(
    _sharded, static_argnums=0
)  # a shard_map that nobody compiles takes no symbolic zeros itself
