"""``lrp.explain`` for transformers' models: the same parameters, where they lie, in ``layers.LanguageModel``.

A model is taken where all that its layers do is known here: its class is one of those below, its configuration is one that
they read, and its parameters are all of those, and no more. Everything else is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from scanfield.arrays import Array
from scanfield.compat import _explain
from scanfield.compat.transformers import supported
from scanfield.errors import BackendError, StateError
from scanfield.layers import LanguageModel, Mamba2Block, MambaBlock, RMSNorm
from scanfield.layers.checkpoint import upstream
from scanfield.layers.layer import Layer
from scanfield.lrp.tokens import TokenRelevance


def explain(model: Any, *args: Any, **kwargs: Any) -> TokenRelevance:
    """As ``scanfield.lrp.explain``."""
    return _explain.explain(language_model(model), *args, **kwargs)


def language_model(model: Any) -> LanguageModel:
    """A language model that shares the parameters of transformers' one; BackendError for what has no rules here.

    Examples
    --------
    ::

        ours = language_model(MambaForCausalLM.from_pretrained(path))
        ours(input_ids).output  # the logits
    """
    name = _name_of(model)
    config = model.config
    _check(name, config)
    mixers = [_MIXERS[name](config, layer.mixer) for layer in model.backbone.layers]
    tied = model.lm_head.weight is model.backbone.embeddings.weight
    ours = LanguageModel(
        config.vocab_size, config.hidden_size, mixers, tied=tied, epsilon=config.layer_norm_epsilon
    )
    found: dict[str, Array] = {n: p.detach() for n, p in model.named_parameters()}
    wanted = {upstream(ours, full, "transformers"): full for full, _, _ in ours.owners()}
    missing, unknown = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    if missing or unknown:
        raise BackendError(
            f"model: {type(model).__name__} has other parameters than its type: without {missing}, and with {unknown}; "
            "merge adapters, and undo what replaced its layers"
        )
    try:
        return ours.adopt({wanted[n]: p for n, p in found.items()})
    except StateError as error:  # names were compared above
        raise BackendError(f"model: {error}") from error


def _name_of(model: Any) -> str:
    """The model type, seen by a class that the model inherits from."""
    for cls in type(model).__mro__:
        parts = cls.__module__.split(".")
        if parts[:2] != ["transformers", "models"]:
            continue
        name = parts[2]
        if name not in _MIXERS:
            reason = (
                "its attention layers, experts or other blocks have no rules here"
                if name in supported()
                else "its layers are none of scanfield's"
            )
            raise BackendError(
                f"model: {type(model).__name__} ({name}) is not explained: {reason}; explained are {', '.join(_MIXERS)}"
            )
        if not hasattr(model, "lm_head"):
            raise BackendError(
                f"model: {type(model).__name__} ({name}) has no logits; pass the one with a language model's head"
            )
        return name
    raise BackendError(
        f"model: {type(model).__name__} is no model of a type; explained are {', '.join(_MIXERS)}"
    )


def _check(name: str, config: Any) -> None:
    """BackendError for a configuration that the layers here do not have."""
    if config.hidden_act not in ("silu", "swish"):
        raise BackendError(f"model: hidden_act={config.hidden_act!r}; {name} is explained with 'silu'")
    if config.expand != int(config.expand):
        raise BackendError(f"model: expand={config.expand!r}; {name} is explained with integers")


def _mamba(config: Any, mixer: Any) -> Layer:
    return MambaBlock(config.hidden_size, config.state_size, **_selective(config))


def _falcon_mamba(config: Any, mixer: Any) -> Layer:
    return MambaBlock(
        config.hidden_size,
        config.state_size,
        dt_bc_norm="plain",
        norm_epsilon=config.mixer_rms_eps,
        **_selective(config),
    )


def _selective(config: Any) -> Mapping[str, Any]:
    return {
        "conv_width": config.conv_kernel,
        "expand": int(config.expand),
        "dt_rank": int(config.time_step_rank),
        "conv_bias": bool(config.use_conv_bias),
        "bias": bool(config.use_bias),
    }


def _mamba2(config: Any, mixer: Any) -> Layer:
    block = Mamba2Block(
        config.hidden_size,
        config.state_size,
        head_dim=config.head_dim,
        groups=config.n_groups,
        conv_width=config.conv_kernel,
        expand=int(config.expand),
        dt_limit=tuple(config.time_step_limit),
        norm_epsilon=config.layer_norm_epsilon,
        conv_bias=bool(config.use_conv_bias),
        bias=bool(config.use_bias),
    )
    # Before 5.10 the norm went over all channels, whatever the groups.
    width = mixer.norm.weight.shape[0]
    groups = width // getattr(mixer.norm, "group_size", width)
    if groups != config.n_groups:
        block.children["norm"] = RMSNorm(width, epsilon=config.layer_norm_epsilon, groups=groups)
    return block


_MIXERS: Mapping[str, Callable[[Any, Any], Layer]] = {
    "falcon_mamba": _falcon_mamba,
    "mamba": _mamba,
    "mamba2": _mamba2,
}
