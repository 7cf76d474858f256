"""JAX: the loop over time is ``lax.scan``, compiled once for each step and shape."""

from scanfield.dispatch import Manifest

MANIFEST = Manifest(
    library="jax",
    requires="jax",
    install="pip install 'scanfield[jax]'",
    loop="scanfield_jax.loops:scan",
)
