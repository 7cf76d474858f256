"""Models of every type that compat.transformers takes, with random weights and a few thousand parameters each."""

from __future__ import annotations

import importlib
import importlib.util
from importlib.metadata import version
from typing import Any

VOCABULARY = 37
_SSM = {"state_size": 4, "hidden_size": 16, "num_hidden_layers": 2}
_ATTENTION = {"num_attention_heads": 2, "num_key_value_heads": 2}
_HYBRID = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, **_ATTENTION}
_MAMBA2 = {
    "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 6, "mamba_n_groups": 2, "mamba_chunk_size": 8,
}  # fmt: skip
_LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 5, "linear_value_head_dim": 6,
    "layer_types": ["linear_attention", "full_attention"], "head_dim": 8,
}  # fmt: skip
_EXPERTS = {
    "moe_intermediate_size": 8, "num_experts": 3, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 8,
}  # fmt: skip
_LATENT = {
    "kv_lora_rank": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "qk_nope_head_dim": 4, "moe_intermediate_size": 8,
    "num_local_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1,
    "layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["dense", "dense"],
}  # fmt: skip

# type -> (name of the model's class, of its configuration's, and what makes it small)
SIZES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bailing_hybrid": (
        "BailingHybridForCausalLM", "BailingHybridConfig",
        {**_HYBRID, **_LATENT, "head_dim": 8, "num_mtp_layers": 0, "first_k_dense_replace": 2},
    ),
    "bamba": ("BambaForCausalLM", "BambaConfig", {**_HYBRID, **_MAMBA2, "attn_layer_indices": [1]}),
    "falcon_h1": ("FalconH1ForCausalLM", "FalconH1Config", {**_HYBRID, **_MAMBA2, "mamba_d_ssm": 32}),
    "falcon_mamba": ("FalconMambaForCausalLM", "FalconMambaConfig", _SSM),
    "glm5_next": (
        "Glm5NextTextModel", "Glm5NextTextConfig",
        {**_HYBRID, "layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["dense", "dense"],
         "kv_lora_rank": 8, "q_lora_rank": 8, "v_head_dim": 8, "qk_nope_head_dim": 8, "index_head_dim": 8,
         "index_n_heads": 2, "index_topk": 64, "linear_head_dim": 6, "linear_num_heads": 3, "hc_mult": 2,
         "n_routed_experts": 2, "indexer_types": None},
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridForCausalLM", "GraniteMoeHybridConfig",
        {**_HYBRID, **_MAMBA2, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 8,
         "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    "jamba": (
        "JambaForCausalLM", "JambaConfig",
        {**_HYBRID, "mamba_d_state": 4, "mamba_dt_rank": 3, "num_experts": 1, "num_experts_per_tok": 1,
         "attn_layer_period": 2, "attn_layer_offset": 1},
    ),
    "kimi_linear": (
        "KimiLinearForCausalLM", "KimiLinearConfig", {**_HYBRID, **_LATENT, "linear_head_dim": 6, "linear_num_heads": 3}
    ),
    "lara_mini": ("LaraMiniForCausalLM", "LaraMiniConfig", {**_HYBRID, **_LINEAR, **_EXPERTS}),
    "mamba": ("MambaForCausalLM", "MambaConfig", _SSM),
    "mamba2": (
        "Mamba2ForCausalLM", "Mamba2Config", {**_SSM, "num_heads": 4, "head_dim": 8, "n_groups": 2, "chunk_size": 8}
    ),
    "nemotron_h": (
        "NemotronHForCausalLM", "NemotronHConfig",
        {"hidden_size": 16, "intermediate_size": 24, **_ATTENTION, "head_dim": 8, "ssm_state_size": 4,
         "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2, "chunk_size": 8,
         "layers_block_type": ["mamba", "attention"]},
    ),
    "olmo_hybrid": ("OlmoHybridForCausalLM", "OlmoHybridConfig", {**_HYBRID, **_LINEAR}),
    "qwen3_5": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", {**_HYBRID, **_LINEAR}),
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", {**_HYBRID, **_LINEAR, **_EXPERTS}),
    "qwen3_next": ("Qwen3NextForCausalLM", "Qwen3NextConfig", {**_HYBRID, **_LINEAR, **_EXPERTS}),
    "qwen4_exp": (
        "Qwen4ExpForCausalLM", "Qwen4ExpTextConfig",
        {**_HYBRID, **_LINEAR, **_EXPERTS, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8,
         "indexer_budget": 64, "indexer_compress_ratio": 4},
    ),
    "zamba": (
        "ZambaForCausalLM", "ZambaConfig",
        {**_HYBRID, "n_mamba_heads": 2, "mamba_d_state": 4, "mamba_dt_rank": 3, "attention_hidden_size": 32,
         "attention_head_dim": 16, "num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "hybrid"]},
    ),
    "zamba2": (
        "Zamba2ForCausalLM", "Zamba2Config",
        {**_HYBRID, "mamba_d_state": 6, "mamba_ngroups": 1, "n_mamba_heads": 4, "chunk_size": 8,
         "layers_block_type": ["mamba", "hybrid"], "num_mem_blocks": 1, "adapter_rank": 4},
    ),
}  # fmt: skip

OLDER = tuple(map(int, version("transformers").split(".")[:2])) < (5, 11)
"""Whether mixers have methods for kernels, and fewer types exist."""
REFUSED = ("falcon_h1", "nemotron_h", "zamba2") if OLDER else ()
"""Types that the installed version has, and scanfield does not take from it."""
TYPES = [n for n in SIZES if importlib.util.find_spec(f"transformers.models.{n}") and n not in REFUSED]
"""Types that are taken from the installed version."""


def build(name: str, **more: Any) -> Any:
    """The model in float32, weights drawn, in evaluation mode."""
    import torch

    model_name, config_name, sizes = SIZES[name]
    parent = f"transformers.models.{name}"
    config_class = getattr(importlib.import_module(f"{parent}.configuration_{name}"), config_name)
    model_class = getattr(importlib.import_module(f"{parent}.modeling_{name}"), model_name)
    torch.manual_seed(0)
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    kernels = {"use_mamba_kernels": False} if OLDER and name in ("jamba", "zamba") else {}
    config = config_class(**{"vocab_size": VOCABULARY, **special, **sizes, **kernels, **more})
    config._attn_implementation = "eager"
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in sorted(model.named_parameters()):
            if parameter.ndim >= 2 and "A_log" not in parameter_name:
                parameter.normal_(std=0.3)  # transformers' own draw leaves states that hardly matter
    return model
