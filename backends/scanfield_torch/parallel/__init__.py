"""Sequences and training sets over the ranks of a ``torch.distributed`` group (``docs/parallel.md``)."""

from scanfield_torch.parallel.link import Traffic, traffic
from scanfield_torch.parallel.sequence import sequence_parallel

__all__ = ["Traffic", "sequence_parallel", "traffic"]
