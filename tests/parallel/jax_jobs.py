"""What a process with four host devices does in the tests of JAX's shard_map."""

from __future__ import annotations

import os

from arrays import quick_xla

# Four devices; and programs that run once are not worth optimising.
os.environ["XLA_FLAGS"] = quick_xla(
    "--xla_force_host_platform_device_count=4",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
)

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import training
from examples import op_inputs, rng_of
from gates import changed
from jax import numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import scanfield
from scanfield_jax.parallel import DeviceReducer, sequence_parallel
from scanfield_jax.parallel.line import Line, bounds_along

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_traceback_in_locations_limit", 0)
WHOLE = ("A", "D", "delta_bias", "dt_bias", "initial_state")


def start(rank: int, size: int, folder: str) -> None:
    """Nothing to join."""
    assert jax.device_count() == 4


def mesh_of(devices: int) -> Any:
    """A line of devices."""
    return jax.make_mesh((devices,), ("time",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])


def sharded(op: str, names: Sequence[str], devices: int, options: dict[str, Any], **how: Any) -> Any:
    """The operation over a mesh, of whole arrays; bounds that are an array are an argument too."""

    def local(arrays: dict[str, Any], bounds: Any) -> Any:
        given = options if bounds is None else options | {"cu_seqlens": bounds}
        return tuple(sequence_parallel(getattr(scanfield, op), **arrays, axis_name="time", **given))

    specs = {n: P() if n in WHOLE else P(None, "time") for n in names}
    return jax.shard_map(
        local, mesh=mesh_of(devices), in_specs=(specs, P()), out_specs=(P(None, "time"), P()), **how
    )


def agreement(
    op: str,
    devices: int,
    dtype: str,
    options: dict[str, Any],
    how: dict[str, Any],
) -> dict[str, tuple[float, str]]:
    """The largest deviation of results and gradients from NumPy's on the whole, over the largest value of each.

    One program for all packs, or of a batch where there is none.
    """
    packs, changes, drop = how.get("packs", ()), how.get("changes", ("",)), how.get("drop", ())
    states, time = (len(packs[0]) - 1, packs[0][-1]) if packs else (None, how.get("time", 8))
    drawn = op_inputs(op, f"{op} sharded", 1 if packs else 2, time, states=states)
    if options.get("complex"):
        drawn["A"] = drawn["A"] * (1 + 0.5j)
    drawn = {n: x for n, x in drawn.items() if n not in drop}
    own = {n: x for n, x in options.items() if n not in ("exchange", "complex")}
    over = sharded(op, drawn, devices, {n: x for n, x in options.items() if n != "complex"})
    rng, weights = rng_of(f"{op} weights"), []

    def loss(arrays: Any, bounds: Any) -> Any:
        results = over(arrays, bounds)
        return sum((w * x).sum().real for w, x in zip(weights, results, strict=True)), results

    both = jax.jit(jax.value_and_grad(loss, has_aux=True))
    worst: dict[str, tuple[float, str]] = {}
    for pack, change in [(pack, change) for change in changes for pack in packs or (None,)]:
        inputs = changed(drawn, change)
        with np.errstate(all="ignore"):
            want, pull = scanfield.vjp(getattr(scanfield, op), **inputs, cu_seqlens=pack, **own)
        weights = weights or [rng.standard_normal(x.shape) for x in want]
        d_want = {
            n: np.conj(g) for n, g in pull(*weights).items()
        }  # JAX's gradients are conjugates of torch's
        arrays = {n: jnp.asarray(x, None if np.iscomplexobj(x) else dtype) for n, x in inputs.items()}
        (_, got), d_got = both(arrays, None if pack is None else jnp.asarray(pack))
        assert got[0].dtype == dtype and got[1].dtype in ("float32", "float64", "complex128")
        found = {"output": (got[0], want[0]), "final_state": (got[1], want[1])}
        found |= {f"d {n}": (d_got[n], d_want[n]) for n in inputs}
        size = max(float(np.max(np.abs(g))) for g in d_want.values())
        for name, (g, w) in found.items():
            scale = max(float(np.max(np.abs(w))), size * 1e-2 * (name[:2] == "d "))
            error = float(np.max(np.abs(np.asarray(g, w.dtype) - w))) / scale
            if not error <= worst.get(name, (-1.0, ""))[0]:
                worst[name] = (error, f"{name} of {pack} {change}")
    return worst


def exchanged(op: str, devices: int, exchange: str) -> dict[str, int]:
    """Bytes that a device hands to the exchange, counted in what JAX traced; and those of a state."""
    drawn = {n: jnp.asarray(x, "float32") for n, x in op_inputs(op, f"{op} counted", 2, 12).items()}
    over = sharded(op, drawn, devices, {"exchange": exchange})

    def gradient(arrays: dict[str, Any]) -> Any:
        results, pull = jax.vjp(lambda given: over(given, None), arrays)
        return results, pull(results)

    forward = jax.make_jaxpr(over)(drawn, None)
    return {
        "state": forward.out_avals[1].size * 4,
        "forward": sent(forward.jaxpr),
        "both": sent(jax.make_jaxpr(gradient)(drawn).jaxpr),
    }


def sent(jaxpr: Any) -> int:
    """Bytes of what goes into ``ppermute`` and ``all_gather`` in a program and in those that it calls, on one device."""
    found = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("ppermute", "all_gather"):
            found += sum(x.aval.size * x.aval.dtype.itemsize for x in equation.invars)
        found += sum(sent(inner) for inner in _inside(equation.params))
    return found


def _inside(params: dict[str, Any]) -> list[Any]:
    """The programs among an equation's parameters; the function that lists them is JAX's own business since 0.12."""
    given = [x for value in params.values() for x in (value if isinstance(value, list | tuple) else (value,))]
    return [getattr(x, "jaxpr", x) for x in given if hasattr(getattr(x, "jaxpr", x), "eqns")]


def other_axes() -> dict[str, float]:
    """The linear scan over a mesh of two axes and over one device; outputs, final states and gradients."""
    found = {}
    for name, sizes in {"lanes": (2, 2), "one": (1, 1)}.items():
        mesh = jax.make_mesh(
            sizes,
            ("other", "time"),
            axis_types=(AxisType.Auto,) * 2,
            devices=jax.devices()[: sizes[0] * sizes[1]],
        )
        pack = [0, 1, 7, 8] if name == "lanes" else None
        inputs = op_inputs("linear_scan", f"axes {name}", 1 if pack else 2, 8, states=3 if pack else None)
        inputs = {n: np.concatenate([x, -x], axis=-1) for n, x in inputs.items()}
        cut, whole = (
            (P(None, "time", "other"), P(None, "other")) if pack else (P("other", "time"), P("other"))
        )

        def local(arrays: dict[str, Any], pack: Any = pack) -> Any:
            return tuple(
                sequence_parallel(scanfield.linear_scan, **arrays, cu_seqlens=pack, axis_name="time")
            )

        specs = {n: whole if n in WHOLE else cut for n in inputs}
        over = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=(cut, whole))
        want, pull = scanfield.vjp(scanfield.linear_scan, **inputs, cu_seqlens=pack)
        d_want = pull(*want)
        given = {n: jnp.asarray(x) for n, x in inputs.items()}
        if pack is None:  # one device, where nobody compiles the shard_map
            alone = over(given)
            found["eager"] = max(float(np.max(np.abs(g - w))) for g, w in zip(alone, want, strict=True))
        both = jax.jit(lambda x, d, over=over: (over(x), jax.vjp(over, x)[1](d)))
        got, (d_got,) = both(given, (want[0], want[1]))
        rows = [*zip(got, want, strict=True), *[(d_got[n], d_want[n]) for n in inputs]]
        found[name] = max(float(np.max(np.abs(g - w))) for g, w in rows)
    return found


def far_bounds() -> list[bool]:
    """Places along the walk, put together again; x64 off, as most users have it."""
    whole, each = [0, 5, 3 * 2**31 + 1, 3 * 2**31 + 1, 10**10 - 3, 10**7 * 1024], 10**7
    right = []
    with jax.enable_x64(False):
        for reverse in (False, True):
            place, token = bounds_along(tuple(whole), each, Line("time", 1024, reverse), 1)
            back = [int(p) * each + int(t) for p, t in zip(place, token, strict=True)]
            want = [whole[-1] - bound for bound in reversed(whole)] if reverse else whole
            right.append(back == want and place.dtype == token.dtype == jnp.int32)
    return right


def refused(what: str) -> Any:
    """Calls that are no calls over a mesh axis."""
    inputs = {n: jnp.asarray(x) for n, x in op_inputs("linear_scan", "refused", 2, 8).items()}
    if what == "outside":
        return sequence_parallel(scanfield.linear_scan, **inputs, axis_name="time")
    packs = {"short": [0, 3, 7], "falls": [0, 5, 3, 8], "batch": [0, 8], "floats": [0.0, 8.0], "none": [0]}
    how = {"check_vma": False} if what == "unchecked" else {}
    options = {"exchange": "ring"} if what == "exchange" else {}
    bounds = None
    if what in (*packs, "traced batch", "traced floats", "cut", "method"):
        inputs = {n: x[:1] for n, x in inputs.items()}
        options["cu_seqlens"] = packs.get(what, (0, 8))
    if what == "method":
        options["method"] = "generic.recurrent"
    if what.startswith("traced") or what == "cut":
        del options["cu_seqlens"]
        bounds = jnp.asarray([0, 8], float if what == "traced floats" else None)
    if "batch" in what:
        inputs = {n: jnp.concatenate([x, x]) for n, x in inputs.items() if n != "initial_state"}
    if what == "cut":

        def local(arrays: dict[str, Any], bounds: Any) -> Any:
            return sequence_parallel(
                scanfield.linear_scan, **arrays, cu_seqlens=bounds, axis_name="time"
            ).output

        specs = ({n: P() if n in WHOLE else P(None, "time") for n in inputs}, P("time"))
        cut = jax.shard_map(local, mesh=mesh_of(2), in_specs=specs, out_specs=P(None, "time"))
        return cut(inputs, jnp.asarray([0, 0, 0, 8]))
    return sharded("linear_scan", inputs, 4, options, **how)(inputs, bounds)


def train(optimizer: str) -> dict[str, Any]:
    """A training over the devices."""
    return training.trained(optimizer, jnp, DeviceReducer(jax.devices()[:2]))
