"""What a process with four host devices does in the tests of JAX's shard_map."""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

from typing import Any

import jax
import numpy as np
import training
from examples import op_inputs, rng_of
from jax import numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import scanfield
from scanfield_jax.parallel import DeviceReducer, sequence_parallel

jax.config.update("jax_enable_x64", True)
WHOLE = ("A", "D", "delta_bias", "dt_bias", "initial_state")


def start(rank: int, size: int, folder: str) -> None:
    """Nothing to join."""
    assert jax.device_count() == 4


def mesh_of(devices: int) -> Any:
    """A line of devices."""
    return jax.make_mesh((devices,), ("time",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])


def sharded(
    op: str, inputs: dict[str, Any], devices: int, exchange: str, options: dict[str, Any], **how: Any
):
    """The operation over a mesh, of whole arrays."""

    def local(arrays: dict[str, Any]) -> Any:
        return tuple(
            sequence_parallel(
                getattr(scanfield, op), **arrays, axis_name="time", exchange=exchange, **options
            )
        )

    specs = {n: P() if n in WHOLE else P(None, "time") for n in inputs}
    return jax.shard_map(
        local, mesh=mesh_of(devices), in_specs=(specs,), out_specs=(P(None, "time"), P()), **how
    )


def agreement(
    op: str, devices: int, exchange: str, options: dict[str, Any], dtype: str, drop: tuple[str, ...]
):
    """The largest deviation of results and gradients from one device's, over the largest value of each."""
    given = op_inputs(op, f"{op} sharded", 2, 8)
    if options.pop("complex", False):
        given["A"] = given["A"] * (1 + 0.5j)
    inputs = {
        n: jnp.asarray(x, dtype=None if np.iscomplexobj(x) else dtype)
        for n, x in given.items()
        if n not in drop
    }
    plain = lambda arrays: tuple(getattr(scanfield, op)(**arrays, **options))  # noqa: E731
    rng = rng_of(f"{op} weights")
    weights = [jnp.asarray(rng.standard_normal(x.shape), x.dtype) for x in jax.eval_shape(plain, inputs)]

    def both(function: Any) -> Any:
        def loss(arrays: Any) -> Any:
            results = function(arrays)
            return sum((w * x).sum().real for w, x in zip(weights, results, strict=True)), results

        return jax.jit(jax.value_and_grad(loss, has_aux=True))

    (_, want), d_want = both(plain)(inputs)
    (_, got), d_got = both(sharded(op, inputs, devices, exchange, options))(inputs)
    found = {"output": (got[0], want[0]), "final_state": (got[1], want[1])}
    found |= {f"d {n}": (d_got[n], d_want[n]) for n in inputs}
    size = max(float(jnp.max(jnp.abs(g))) for g in d_want.values())
    return {
        n: float(jnp.max(jnp.abs(g - w))) / max(float(jnp.max(jnp.abs(w))), size * 1e-2 * (n[:2] == "d "))
        for n, (g, w) in found.items()
    }


def refused(what: str) -> Any:
    """Calls that are no calls over a mesh axis."""
    inputs = {n: jnp.asarray(x) for n, x in op_inputs("linear_scan", "refused", 2, 8).items()}
    if what == "outside":
        return sequence_parallel(scanfield.linear_scan, **inputs, axis_name="time")
    options = {"pack": {"cu_seqlens": [0, 8]}, "exchange": {}}.get(what, {})
    how = {"check_vma": False} if what == "unchecked" else {}
    exchange = "ring" if what == "exchange" else "scan"
    return sharded("linear_scan", inputs, 4, exchange, options, **how)(inputs)


def train(optimizer: str) -> dict[str, Any]:
    """A training over the devices, and on one."""
    return training.trained(optimizer, jnp, DeviceReducer(jax.devices()[:2])), training.trained(
        optimizer, jnp
    )
