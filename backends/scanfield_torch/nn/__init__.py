"""Layers as ``torch.nn.Module``, by the names of ``scanfield.layers``.

``Module(layer)`` makes a module of any layer; the classes are those of the layers with a name. Import it by itself:
``from scanfield_torch import nn``.
"""

from scanfield.layers import GatedDeltaNet2Config, LayerResult
from scanfield_torch.nn.classes import (
    Activated,
    CausalConv1d,
    Embedding,
    GatedDeltaNet2,
    GatedMLP,
    LanguageModel,
    Linear,
    Mamba2Block,
    MambaBlock,
    Residual,
    RMSNorm,
    SelectiveSSM,
    Sequential,
)
from scanfield_torch.nn.module import Module

__all__ = [
    "Activated",
    "CausalConv1d",
    "Embedding",
    "GatedDeltaNet2",
    "GatedDeltaNet2Config",
    "GatedMLP",
    "LanguageModel",
    "LayerResult",
    "Linear",
    "Mamba2Block",
    "MambaBlock",
    "Module",
    "RMSNorm",
    "Residual",
    "SelectiveSSM",
    "Sequential",
]
