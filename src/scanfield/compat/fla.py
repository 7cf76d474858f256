"""flash-linear-attention's functions with their signatures, layouts and conventions, on arrays of any library.

Layout (batch, time, heads, channels); decays are natural logarithms; every function returns (output, final state),
and the state is None unless ``output_final_state=True``. Arguments that upstream ignores silently raise here. The
chunk_ and fused_recurrent_ forms of a rule are one computation; mind that upstream orders their arguments
differently.

dplr and rwkv7 are refused by name.
"""

from scanfield.compat._fla_channel import chunk_gdn2, chunk_kda, fused_recurrent_gdn2, fused_recurrent_kda
from scanfield.compat._fla_delta import (
    chunk_delta_rule,
    chunk_gated_delta_rule,
    fused_recurrent_delta_rule,
    fused_recurrent_gated_delta_rule,
)
from scanfield.compat._fla_linear import (
    chunk_gla,
    chunk_simple_gla,
    fused_recurrent_gla,
    fused_recurrent_simple_gla,
)
from scanfield.compat._fla_plain import (
    chunk_linear_attn,
    chunk_retention,
    fused_recurrent_linear_attn,
    fused_recurrent_retention,
)
from scanfield.compat._fla_products import (
    chunk_comba,
    chunk_dplr_delta_rule,
    chunk_gated_delta_product,
    chunk_rwkv7,
    fused_recurrent_comba,
    fused_recurrent_dplr_delta_rule,
    fused_recurrent_rwkv7,
)

chunk_gdn = chunk_gated_delta_rule
fused_recurrent_gdn = fused_recurrent_gated_delta_rule

__all__ = [
    "chunk_comba",
    "chunk_delta_rule",
    "chunk_dplr_delta_rule",
    "chunk_gated_delta_product",
    "chunk_gated_delta_rule",
    "chunk_gdn",
    "chunk_gdn2",
    "chunk_gla",
    "chunk_kda",
    "chunk_linear_attn",
    "chunk_retention",
    "chunk_rwkv7",
    "chunk_simple_gla",
    "fused_recurrent_comba",
    "fused_recurrent_delta_rule",
    "fused_recurrent_dplr_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
    "fused_recurrent_gdn2",
    "fused_recurrent_gla",
    "fused_recurrent_kda",
    "fused_recurrent_linear_attn",
    "fused_recurrent_retention",
    "fused_recurrent_rwkv7",
    "fused_recurrent_simple_gla",
]
