"""The models of transformers that run on scanfield: which class is their mixer, and which functions it calls.

Two generations of transformers are known. Today a mixer calls module-level functions, of which each has a kernel. Up to
5.10 the mixers of the Mamba family have a whole method for kernels, and those of the gated delta rules hold their functions
as attributes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

from scanfield.compat import _hooked, _older, _one_token
from scanfield.errors import BackendError

TESTED = "5.24 and 5.9"
"""The versions of transformers."""


class Kind(NamedTuple):
    """How a family of mixers is sent to scanfield."""

    functions: Mapping[str, Callable[..., Any]]
    """Names of the module that the mixers read, and what stands in their place."""
    drops_state: bool = False
    """Whether the mixers drop the cached state of a prompt."""
    plain: str = ""
    """Of older mixers: the method in plain PyTorch that makes room for the one for kernels."""
    attributes: Mapping[str, Callable[..., Any]] = {}
    """Of older mixers: functions that the layer itself holds."""
    packs: bool = True
    """Whether sequences in one row are kept apart."""


_CONVOLUTION: Mapping[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _hooked.convolution,
    "causal_conv1d_update": _one_token.convolution,
}
_MAMBA = Kind(
    {
        "mamba_selective_scan": _hooked.scan,
        "mamba_selective_state_update": _one_token.update,
        "mamba_inner_fn": _hooked.nothing_fused,
        **_CONVOLUTION,
    },
    drops_state=True,
)
_ZAMBA = _MAMBA._replace(functions={n: f for n, f in _MAMBA.functions.items() if n != "mamba_inner_fn"})
_MAMBA2 = Kind(
    {
        "mamba2_chunk_scan": _hooked.chunk_scan,
        "mamba2_selective_state_update": _hooked.update,
        "mamba2_split_conv1d_scan_combined": _hooked.nothing_fused,
        **_CONVOLUTION,
    }
)
_GATED_DELTA = Kind(
    {
        "torch_chunk_gated_delta_rule": _hooked.gated_delta_rule,
        "torch_recurrent_gated_delta_rule": _hooked.gated_delta_rule,
        **_CONVOLUTION,
    }
)
_KIMI = Kind(
    {
        "chunk_kimi_delta_attention": _hooked.kimi_delta_attention,
        "recurrent_kimi_delta_attention": _hooked.kimi_delta_attention,
        **_CONVOLUTION,
    }
)
# model -> (class of its recurrent layers, their functions)
MODELS: Mapping[str, tuple[str, Kind]] = {
    "bailing_hybrid": ("BailingHybridDeltaAttention", _KIMI),
    "bamba": ("BambaMixer", _MAMBA2),
    "falcon_h1": ("FalconH1Mixer", _MAMBA2),
    "falcon_mamba": ("FalconMambaMixer", _MAMBA),
    "glm5_next": ("Glm5NextTextLinearAttention", _KIMI),
    "granitemoehybrid": ("GraniteMoeHybridMambaLayer", _MAMBA2),
    "jamba": ("JambaMambaMixer", _MAMBA),
    "kimi_linear": ("KimiLinearDeltaAttention", _KIMI),
    "lara_mini": ("LaraMiniGatedDeltaNet", _GATED_DELTA),
    "mamba": ("MambaMixer", _MAMBA),
    "mamba2": ("Mamba2Mixer", _MAMBA2),
    "nemotron_h": ("NemotronHMamba2Mixer", _MAMBA2),
    "olmo_hybrid": ("OlmoHybridGatedDeltaNet", _GATED_DELTA),
    "qwen3_5": ("Qwen3_5GatedDeltaNet", _GATED_DELTA),
    "qwen3_5_moe": ("Qwen3_5MoeGatedDeltaNet", _GATED_DELTA),
    "qwen3_next": ("Qwen3NextGatedDeltaNet", _GATED_DELTA),
    "qwen4_exp": ("Qwen4ExpTextGatedDeltaNet", _GATED_DELTA),
    "zamba": ("ZambaMambaMixer", _ZAMBA),
    "zamba2": ("Zamba2MambaMixer", _MAMBA2),
}

_OLD_MAMBA = Kind(
    {"causal_conv1d_fn": _older.convolution, "selective_scan_fn": _hooked.scan}, plain="slow_forward"
)
_OLD_MAMBA2 = Kind(
    {"causal_conv1d_fn": _older.convolution, "mamba_chunk_scan_combined": _older.chunk_scan},
    plain="torch_forward",
)
_RULE: Mapping[str, Callable[..., Any]] = {
    "chunk_gated_delta_rule": _hooked.gated_delta_rule,
    "recurrent_gated_delta_rule": _hooked.gated_delta_rule,
}
_OLD_QWEN = Kind({}, attributes={**_RULE, "causal_conv1d_fn": _older.convolution})
_OLD_OLMO = Kind({}, attributes=_RULE, packs=False)  # its convolutions are layers of their own
# Not here: falcon_h1, nemotron_h, zamba2, whose methods for kernels compute something else, or need a card.
OLDER: Mapping[str, Kind] = {
    "bamba": _OLD_MAMBA2,
    "falcon_mamba": _OLD_MAMBA,
    "granitemoehybrid": _OLD_MAMBA2,
    "jamba": _OLD_MAMBA,
    "mamba": _OLD_MAMBA,
    "mamba2": _OLD_MAMBA2,
    "olmo_hybrid": _OLD_OLMO,
    "qwen3_5": _OLD_QWEN,
    "qwen3_5_moe": _OLD_QWEN,
    "qwen3_next": _OLD_QWEN,
    "zamba": _OLD_MAMBA,
}
_KERNELS = "cuda_kernels_forward"
_PREFIX = "transformers.models."


class Mixer(NamedTuple):
    """A class of recurrent layers that was found in a model."""

    name: str
    """The model type."""
    cls: type
    """The class of transformers' own."""
    kind: Kind


_found: dict[type, Mixer | None] = {}  # asked at each layer of each token


def mixer_of(layer: Any) -> Mixer | None:
    """What a recurrent layer is, seen by its class or one that it inherits from; None for other layers.

    BackendError for a recurrent layer of a transformers version that is neither of the two generations.
    """
    kind = type(layer)
    if kind not in _found:
        _found[kind] = next(filter(None, (_by_name(cls, layer) for cls in kind.__mro__)), None)
    return _found[kind]


def _by_name(cls: type, layer: Any) -> Mixer | None:
    name = cls.__module__.removeprefix(_PREFIX).partition(".")[0]
    if not (cls.__module__.startswith(_PREFIX) and name in MODELS and cls.__name__ == MODELS[name][0]):
        return None
    return Mixer(name, cls, kind_of(name, cls, layer))


def kind_of(name: str, cls: type, layer: Any) -> Kind:
    """How layers of this class are sent to scanfield by the transformers version that is imported."""
    today, older = MODELS[name][1], OLDER.get(name)
    if older is not None:
        words = [older.plain, _KERNELS] if older.plain else list(older.attributes)
        if all(hasattr(layer, word) for word in words):
            return older
    module = module_of(name)
    missing = [word for word in today.functions if not hasattr(module, word)]
    if missing:
        version = getattr(sys.modules.get("transformers"), "__version__", "of this process")
        raise BackendError(
            f"model: {module.__name__} of transformers {version} has no {', '.join(missing)}; tested are {TESTED}, the "
            f"latter with {', '.join(OLDER)}"
        )
    return today


def module_of(name: str) -> ModuleType:
    """The module of a model type, which is imported if there is such a model."""
    return sys.modules[f"{_PREFIX}{name}.modeling_{name}"]
