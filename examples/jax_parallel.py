"""One sequence over the devices of a JAX mesh: forward and gradient under jit; points of a PINN over the same devices.

XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/jax_parallel.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import scanfield
from scanfield import pinn
from scanfield_jax.parallel import DeviceReducer, sequence_parallel


def main() -> None:
    """Compare with one call on the whole; train a PINN."""
    jax.config.update("jax_enable_x64", True)
    mesh = jax.make_mesh((jax.device_count(),), ("time",), axis_types=(AxisType.Auto,))
    cut, whole = P(None, "time"), P()

    def local(a: jax.Array, b: jax.Array, state: jax.Array) -> scanfield.ScanResult:
        return sequence_parallel(scanfield.linear_scan, a, b, state, axis_name="time")

    sharded = jax.shard_map(
        local, mesh=mesh, in_specs=(cut, cut, whole), out_specs=scanfield.ScanResult(cut, whole)
    )
    keys = jax.random.split(jax.random.key(0), 3)
    a = jax.random.uniform(keys[0], (2, 64, 3))
    b, state = jax.random.normal(keys[1], (2, 64, 3)), jax.random.normal(keys[2], (2, 3))

    def loss(scan, *arrays: jax.Array) -> jax.Array:
        output, final_state = scan(*arrays)
        return jnp.sum(output**2) + jnp.sum(final_state**3)

    found = jax.jit(jax.grad(lambda *x: loss(sharded, *x), argnums=(0, 1, 2)))(a, b, state)
    want = jax.jit(jax.grad(lambda *x: loss(scanfield.linear_scan, *x), argnums=(0, 1, 2)))(a, b, state)
    worst = max(float(jnp.max(jnp.abs(x - y))) for x, y in zip(found, want, strict=True))
    assert worst < 1e-11

    problem = pinn.Helmholtz(pinn.Interval(0, 1), 5.0, source=1.0, boundary=pinn.Dirichlet(0.0))
    features = pinn.FourierFeatures(1, 12, scale=1.0, trainable=False)
    network = pinn.Network.create(features, hidden=[], outputs=1, xp=jnp, dtype="float64")
    fit = pinn.train(
        problem, network, points=64, sampling="uniform", iterations=10, held_out=16, reducer=DeviceReducer()
    )
    print(f"{jax.device_count()} devices: gradients within {worst:.1e}, PINN {fit.loss:.1e}")  # noqa: T201


if __name__ == "__main__":
    main()
