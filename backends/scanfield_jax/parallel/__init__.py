"""Sequences over the devices of a mesh axis, and training sets over devices (``docs/parallel.md``)."""

from scanfield_jax.parallel.points import DeviceReducer
from scanfield_jax.parallel.sequence import sequence_parallel

__all__ = ["DeviceReducer", "sequence_parallel"]
