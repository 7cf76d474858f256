"""mamba_ssm's and causal_conv1d's functions with their signatures, layouts and conventions, on arrays of any library.

The scans are ``scanfield.selective_scan`` and ``scanfield.ssd``, whose gradients PyTorch's autograd and JAX find by
themselves. What upstream does in place is done in place. Beyond upstream: initial states, packed sequences,
gradients through final states, float64, no GPU.
"""

from scanfield.compat._convolution import causal_conv1d, causal_conv1d_fn, causal_conv1d_update
from scanfield.compat._selective import mamba_inner_fn, selective_scan_fn, selective_scan_ref
from scanfield.compat._split import mamba_split_conv1d_scan_combined
from scanfield.compat._ssd import mamba_chunk_scan_combined, ssd_minimal_discrete
from scanfield.compat._state_update import selective_state_update

__all__ = [
    "causal_conv1d",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "mamba_chunk_scan_combined",
    "mamba_inner_fn",
    "mamba_split_conv1d_scan_combined",
    "selective_scan_fn",
    "selective_scan_ref",
    "selective_state_update",
    "ssd_minimal_discrete",
]
