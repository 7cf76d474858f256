"""JAX: the loop over time is ``lax.scan``, compiled once for each step and shape."""

from scanfield.dispatch import Candidate, Manifest

MANIFEST = Manifest(
    library="jax",
    requires="jax",
    install="pip install 'scanfield[jax]'",
    candidates=tuple(
        Candidate(
            name="jax.jit",
            operations=("pinn",),
            device=device,
            target="scanfield_jax.pinn_jets:kernels",
            note="compiled once for each set of shapes",
        )
        for device in ("cpu", "gpu", "tpu")
    ),
    loop="scanfield_jax.loops:scan",
)
