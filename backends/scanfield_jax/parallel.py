"""One sequence over the devices of a mesh axis, under ``jax.shard_map``: forward and backward exact on each.

Every device runs the same program: it summarises its shard, exchanges maps (``scanfield.shards`` has the glossary), and runs
its shard from the state that comes in. The backward exchanges the adjoint maps the other way.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from scanfield import ScanResult
from scanfield.affine import Affine, advance, compose
from scanfield.dispatch import Call, operation_of, registry
from scanfield.errors import ArgumentError, StateError
from scanfield.shards import Place, Shard, adjoint, block_map, check_arguments, identity
from scanfield_jax.lift import axes_of, torch_rule, vary

Array = Any
Arrays = tuple[Array | None, ...]
Exchange = Literal["scan", "gather"]

__all__ = ["DeviceReducer", "sequence_parallel"]


def sequence_parallel(
    op: Any, *local_arrays: Array, axis_name: str, exchange: Exchange = "scan", **options: Any
) -> ScanResult:
    """Run a scan over a sequence that is sharded along time over a mesh axis; to be called inside ``jax.shard_map``.

    Parameters
    ----------
    op : a scan of scanfield
    *local_arrays, **options
        As in the call of ``op``: arrays with a time axis are this device's slice (``PartitionSpec(None, axis_name)``),
        the others (A, D, ``initial_state``) whole (``PartitionSpec()``). ``cu_seqlens`` and ``states_at`` are refused.
    axis_name : str
        The mesh axis over which time is cut.
    exchange : {"scan", "gather"}
        Maps travel in 1 + log2(devices) rounds of ``ppermute``, or by one ``all_gather``; the results agree to rounding.

    Returns
    -------
    ScanResult
        ``output`` of this device's tokens (``PartitionSpec(None, axis_name)``) and the whole's ``final_state``, the same
        on all devices (``PartitionSpec()``).

    Raises
    ------
    ArgumentError
        For ``cu_seqlens``: all devices run one program, and bounds would make it another on each. Else as ``op``.
    StateError
        Outside ``shard_map`` and where time is not cut over ``axis_name``; under ``check_vma=False``, without which JAX
        does not know which gradients to add up.

    Notes
    -----
    Call it under ``jit``: without, JAX's ``shard_map`` does not run a function with a gradient rule of its own
    (NotImplementedError). ``grad`` goes through it. JAX itself adds the gradients of whole arrays up over the devices.
    Devices are processes' own business: ``jax.distributed.initialize`` has the limits of time for those that do not
    come.

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
    if options.get("cu_seqlens") is not None:
        raise ArgumentError(
            "cu_seqlens: not under shard_map, where all devices run one program; lay sequences out as rows of the batch"
        )
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
    place = Place((0, 0), None, True, True, True)
    shard = Shard(bound._replace(arrays=arrays), place, None)
    call = shard.call
    roles = [entry.role for entry in operation_of(call).inputs]
    index = roles.index("index")
    if call.arrays[shard.at] is None:
        state = vary(shard.nothing(call), tuple(every))
        call = call._replace(arrays=(*call.arrays[: shard.at], state, *call.arrays[shard.at + 1 :]))
    static = _Static(
        call.operation,
        call.options,
        call.compute,
        bound.method if bound.method is not None else registry.forced_method(),
        (shard.at, index),
        _Line(axis_name, size, shard.reverse),
        exchange,
    )
    output, last = _sharded(static, (*call.arrays[:index], *call.arrays[index + 1 :]))
    return ScanResult(shard.prepared.output(output), shard.prepared.state(last))


class _Line(NamedTuple):
    """The devices in the order of the walk."""

    axis: str
    size: int
    reverse: bool

    def place(self) -> Array:
        """Where this device stands along the walk."""
        rank = lax.axis_index(self.axis)
        return self.size - 1 - rank if self.reverse else rank

    def rank(self, place: int) -> int:
        """The device at a place."""
        return self.size - 1 - place if self.reverse else place

    def turned(self) -> _Line:
        """The line backwards."""
        return self._replace(reverse=not self.reverse)

    def shifted(self, x: Array, distance: int) -> Array:
        """The array of the device so many places before; zeros where there is none."""
        pairs = [(self.rank(i), self.rank(i + distance)) for i in range(self.size - distance)]
        return cast(Any, lax).ppermute(x, self.axis, pairs)


class _Static(NamedTuple):
    """What is no array about a call: hashable."""

    operation: str
    options: tuple[Any, ...]
    compute: str
    method: str | None
    at: tuple[int, int]
    """Of the state and of ``cu_seqlens`` among the inputs."""
    line: _Line
    exchange: Exchange

    def call(self, arrays: Arrays, state: Array) -> Call:
        """The call from a state."""
        at, index = self.at
        whole = [*arrays[:index], None, *arrays[index:]]
        whole[at] = state
        return Call(self.operation, tuple(whole), self.options, self.compute)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sharded(static: _Static, arrays: Arrays) -> tuple[Array, Array]:
    return _forward(static, arrays, keep=False)[0]


def _forward(static: _Static, arrays: Arrays, *, keep: bool) -> tuple[tuple[Array, Array], Any]:
    line, first = static.line, cast(Any, arrays[static.at[0]])
    call = static.call(arrays, first)
    block = block_map(call, static.method)
    state = _incoming(static, block, first, identity(call))
    call = static.call(arrays, state)
    if keep:
        output, last, residuals, _ = registry.save(call, static.method)
    else:
        (output, last), residuals = registry.call(call, "forward", static.method), ()
    mine = line.place() == line.size - 1
    final = cast(Any, lax).psum(jnp.where(mine, last, jnp.zeros_like(last)), line.axis)
    return (output, final), (arrays, state, block.transition, residuals)


def _run_forward(static: _Static, given: Any) -> tuple[Any, Any]:
    arrays = tuple([None if x is None else x.value for x in given])
    return _forward(static, arrays, keep=True)


def _run_backward(static: _Static, kept: Any, cotangents: tuple[Any, Any]) -> tuple[Arrays]:
    arrays, state, transition, residuals = kept
    line, (at, index) = static.line, static.at
    call = static.call(arrays, state)
    chosen = registry.select(call, "save", static.method)
    place = line.place()

    def pull(d_output: Array | None, d_final: Array | None) -> Arrays:
        def run(d_last: Array | None, wanted: Sequence[bool]) -> Any:
            return registry.backward(chosen, call, residuals, d_output, d_last, wanted)

        last = (
            jnp.zeros_like(state)
            if d_final is None
            else vary(d_final, tuple(axes_of(state) - axes_of(d_final)))
        )
        gamma = jnp.zeros_like(state)
        if d_output is not None:
            gamma = run(None, [i == at for i in range(len(call.arrays))])[at].astype(state.dtype)
        diagonal = operation_of(call).diagonal(call)
        block = adjoint(Affine(transition, gamma, diagonal), gamma)
        turned = static._replace(line=line.turned())
        d_last = _incoming(turned, block, last, identity(call))
        grads = list(run(d_last, [x is not None and i != index for i, x in enumerate(call.arrays)]))
        # The given state is read by the first device alone.
        grads[at] = jnp.where(place == 0, grads[at], jnp.zeros_like(grads[at]))
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
    )


_sharded.defvjp(_run_forward, _run_backward, symbolic_zeros=True)


def _incoming(static: _Static, block: Affine, first: Array, unit: Affine) -> Array:
    """The state that comes into each device's block, from ``first`` before all blocks."""
    line, place = static.line, static.line.place()
    if static.exchange == "gather":
        parts = [lax.all_gather(x, line.axis) for x in (block.transition, block.state)]
        state = first
        for i in range(line.size - 1):
            before = Affine(parts[0][line.rank(i)], parts[1][line.rank(i)], block.diagonal)
            state = jnp.where(place > i, advance(before, state), state)
        return state
    held, distance = _shift(line, block, unit, place, 1), 1
    while distance < line.size - 1:
        arriving = _shift(line, held, unit, place, distance)
        held = compose(arriving, held)
        distance *= 2
    return advance(held, first)


def _shift(line: _Line, block: Affine, unit: Affine, place: Array, distance: int) -> Affine:
    """The block of the device so many places before; the identity where there is none."""
    there = place >= distance
    transition, state = (
        jnp.where(there, line.shifted(x, distance), other)
        for x, other in ((block.transition, unit.transition), (block.state, unit.state))
    )
    return Affine(transition, state, block.diagonal)


class DeviceReducer:
    """The reducer of ``scanfield.pinn.train`` on JAX: each device holds a share of the points.

    Parameters
    ----------
    devices : sequence of jax.Device, optional
        All devices of this process, if absent. The network's parameters stay where they are.

    Raises
    ------
    ArgumentError
        For no device.

    Examples
    --------
    >>> import jax
    >>> from scanfield_jax.parallel import DeviceReducer
    >>> DeviceReducer(jax.devices()[:1]).size
    1
    """

    def __init__(self, devices: Sequence[Any] | None = None) -> None:
        self.devices = tuple(jax.local_devices() if devices is None else devices)
        self.size = len(self.devices)
        if not self.size:
            raise ArgumentError("devices: none; at least one is needed")

    def build(self, network: Any, make: Any, told: Sequence[str]) -> Any:
        """A share on each device."""
        parts = []
        for shard, device in enumerate(self.devices):
            with jax.default_device(device):
                there = network.replace(
                    {name: jax.device_put(x, device) for name, x in network.parameters.items()}
                )
                parts.append(make(shard, self.size, there))
        return _OnDevices(self.devices, parts)


class _OnDevices:
    def __init__(self, devices: Sequence[Any], parts: Sequence[Any]) -> None:
        self._devices, self._parts = devices, parts

    def total(self, part: str, x: Array) -> Array:
        """All devices are asked before the first answer is waited for."""
        found = [
            getattr(own, part)(jax.device_put(x, device))
            for device, own in zip(self._devices, self._parts, strict=True)
        ]
        home = next(iter(x.devices()))
        total = jax.device_put(found[0], home)
        for other in found[1:]:
            total = total + jax.device_put(other, home)
        return total
