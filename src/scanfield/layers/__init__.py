"""Layers with parameters for arrays of every library: they run, learn by hand-derived gradients, and explain themselves."""

from scanfield.layers.basic import Activated, CausalConv1d, Embedding, Linear, Residual, RMSNorm, Sequential
from scanfield.layers.checkpoint import load, load_state_dict, save, state_dict
from scanfield.layers.explain import BlockReport, Composite, LayerRelevance
from scanfield.layers.gated_delta_net import GatedDeltaNet2, GatedDeltaNet2Config
from scanfield.layers.language_model import LanguageModel
from scanfield.layers.layer import Layer, LayerResult
from scanfield.layers.mamba import MambaBlock, SelectiveSSM
from scanfield.layers.mamba2 import Mamba2Block
from scanfield.layers.mlp import GatedMLP
from scanfield.layers.short_convolution import causal_conv1d, causal_conv1d_step, causal_conv1d_vjp
from scanfield.layers.trace import Explanation, GraphNode, Trace

__all__ = [
    "Activated",
    "BlockReport",
    "CausalConv1d",
    "Composite",
    "Embedding",
    "Explanation",
    "GatedDeltaNet2",
    "GatedDeltaNet2Config",
    "GatedMLP",
    "GraphNode",
    "LanguageModel",
    "Layer",
    "LayerRelevance",
    "LayerResult",
    "Linear",
    "Mamba2Block",
    "MambaBlock",
    "RMSNorm",
    "Residual",
    "SelectiveSSM",
    "Sequential",
    "Trace",
    "causal_conv1d",
    "causal_conv1d_step",
    "causal_conv1d_vjp",
    "load",
    "load_state_dict",
    "save",
    "state_dict",
]
