"""JAX: scans with gradients of their own, and the loop over time of generic code as ``lax.scan``."""

from scanfield.dispatch import Candidate, Manifest

MANIFEST = Manifest(
    library="jax",
    requires="jax",
    install="pip install 'scanfield[jax]'",
    candidates=(
        Candidate(
            name="jax.scan",
            operations=("linear_scan", "selective_scan", "gdn2"),
            device="cpu",
            target="scanfield_jax.scans:implementation",
            dtypes=("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
            transforms=frozenset({"jit", "grad", "double grad", "vmap", "checkpoint", "shard_map"}),
            note="forward-mode derivatives (jvp) need method='generic'",
        ),
        Candidate(
            name="jax.numba",
            operations=("linear_scan", "selective_scan", "gdn2"),
            device="cpu",
            target="scanfield_jax.numba_scans:implementation",
            requires=("numba",),
            dtypes=("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
            transforms=frozenset({"jit", "grad", "double grad", "vmap", "checkpoint"}),
            note="vmap runs its elements one after the other; jvp needs method='generic'",
            default=False,
        ),
        *(
            Candidate(
                name="jax.jit",
                operations=("pinn",),
                device=device,
                target="scanfield_jax.pinn_jets:kernels",
                note="compiled once for each set of shapes",
            )
            for device in ("cpu", "gpu", "tpu")
        ),
    ),
    loop="scanfield_jax.loops:scan",
    classes="scanfield_jax.pytrees:register",
)
