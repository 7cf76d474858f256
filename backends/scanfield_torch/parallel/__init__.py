"""Sequences and training sets over the ranks of a ``torch.distributed`` group (``docs/parallel.md``)."""

from scanfield_torch.parallel.halo import halo
from scanfield_torch.parallel.layers import layer_parallel
from scanfield_torch.parallel.link import Traffic, traffic
from scanfield_torch.parallel.points import GroupReducer
from scanfield_torch.parallel.sequence import sequence_parallel

__all__ = ["GroupReducer", "Traffic", "halo", "layer_parallel", "sequence_parallel", "traffic"]
