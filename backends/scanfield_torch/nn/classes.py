"""The layers of ``scanfield.layers`` by name, as modules: their arguments, and those of ``Module``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch

from scanfield import layers
from scanfield.errors import StateError
from scanfield.layers.checkpoint import upstream
from scanfield_torch.nn.module import Module


class SelectiveSSM(Module):
    """``scanfield.layers.SelectiveSSM``: the selective state space alone. Returns ``LayerResult(output, state)``."""

    layer_class = layers.SelectiveSSM


class MambaBlock(Module):
    """``scanfield.layers.MambaBlock``, with the state dict of mamba_ssm's ``Mamba`` and transformers' ``MambaMixer``.

    >>> import torch
    >>> from scanfield_torch import nn
    >>> block = nn.MambaBlock(4, state_size=2, seed=0)
    >>> output, state = block(torch.ones(1, 6, 4))
    >>> output.sum().backward()
    >>> block.in_proj.weight.grad.shape
    torch.Size([16, 4])
    """

    layer_class = layers.MambaBlock


class Mamba2Block(Module):
    """``scanfield.layers.Mamba2Block``, with the state dict of mamba_ssm's ``Mamba2`` and transformers' ``Mamba2Mixer``."""

    layer_class = layers.Mamba2Block


class GatedDeltaNet2(Module):
    """``scanfield.layers.GatedDeltaNet2``, with the state dict of flash-linear-attention's layer.

    >>> from scanfield_torch import nn
    >>> kda = nn.GatedDeltaNet2(6, nn.GatedDeltaNet2Config.kda(2, 4), seed=0)
    >>> kda.b_proj.weight.shape
    torch.Size([2, 6])
    """

    layer_class = layers.GatedDeltaNet2


class GatedMLP(Module):
    """``scanfield.layers.GatedMLP``, with the state dict of mamba_ssm's or, with ``fused=False``, of fla's."""

    layer_class = layers.GatedMLP


class Linear(Module):
    """``scanfield.layers.Linear``."""

    layer_class = layers.Linear


class Embedding(Module):
    """``scanfield.layers.Embedding``."""

    layer_class = layers.Embedding


class RMSNorm(Module):
    """``scanfield.layers.RMSNorm`` of x (batch, time, width). Returns the output alone."""

    layer_class = layers.RMSNorm


class CausalConv1d(Module):
    """``scanfield.layers.CausalConv1d``. Returns ``LayerResult(output, state)``."""

    layer_class = layers.CausalConv1d


class Activated(Module):
    """``scanfield.layers.Activated``."""

    layer_class = layers.Activated


class Sequential(Module):
    """``scanfield.layers.Sequential`` of layers or of modules, which it keeps, with their parameters.

    >>> from scanfield_torch import nn
    >>> norm = nn.RMSNorm(4)
    >>> row = nn.Sequential(norm, nn.MambaBlock(4, 2))
    >>> row[0] is norm, len(row)
    (True, 2)
    """

    layer_class = layers.Sequential

    def __getitem__(self, place: int) -> torch.nn.Module:
        """The module at a place."""
        return [*self.children()][place]

    def __len__(self) -> int:
        """How many there are."""
        return len(self._modules)

    def __iter__(self) -> Iterator[torch.nn.Module]:
        """One after the other."""
        return self.children()


class Residual(Module):
    """``scanfield.layers.Residual``: parameters and modules inside are its own."""

    layer_class = layers.Residual


class LanguageModel(Module):
    """``scanfield.layers.LanguageModel`` of mixers that are layers or modules.

    Parameters
    ----------
    vocabulary, width, mixers, mlps, tied, epsilon
        As of the layer.
    names : {"scanfield", "mamba_ssm", "transformers", "fla"}
        Whose names modules and parameters bear: with "transformers" the state dict of a ``MambaForCausalLM`` loads as it is,
        with "mamba_ssm" that of a ``MambaLMHeadModel``. Upstream's tied models list ``lm_head.weight`` beside their embedding
        or leave it out; both are taken.
    seed, device, dtype, scheme
        As of ``Module``.

    Raises
    ------
    ArgumentError, DtypeError
        As the layer.
    StateError
        From ``load_state_dict`` of a tied model for a head that is not the embedding; nothing is changed.

    >>> import torch
    >>> from scanfield_torch import nn
    >>> model = nn.LanguageModel(11, 4, [nn.MambaBlock(4, 2)], names="transformers", seed=0)
    >>> list(model.state_dict())[:2]
    ['backbone.embeddings.weight', 'backbone.layers.0.norm.weight']
    >>> logits, state = model(torch.tensor([[1, 5, 3]]))
    >>> model.step(torch.tensor([2]), state).output.shape
    torch.Size([1, 11])
    """

    layer_class = layers.LanguageModel
    settings: ClassVar[dict[str, Any]] = {**Module.settings, "names": "scanfield"}

    def _hold(self, layer: Any, known: Any, *, names: str = "scanfield", **place: Any) -> None:
        super()._hold(layer, known, names=names, **place)
        self._embedding = upstream(layer, "embedding.weight", names)
        self._second = "lm_head.weight" if layer.tied else None
        if layer.tied and names != "scanfield":
            head = torch.nn.Module()
            head.register_parameter("weight", self.get_parameter(self._embedding))
            self.add_module("lm_head", head)
            self.register_load_state_dict_post_hook(_tie)  # type: ignore[no-untyped-call]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Give a tied model both of its names, or the one that it has."""
        if self._second is not None:
            first, second = prefix + self._embedding, prefix + self._second
            if (
                first in state_dict
                and second in state_dict
                and not _same(state_dict[first], state_dict[second])
            ):
                raise StateError(f"{second}: differs from {first}, and this model is tied; pass tied=False")
            found = state_dict.get(first, state_dict.get(second))
            if found is not None and "lm_head" in self._modules:
                state_dict[first] = state_dict[second] = found
            elif found is not None:
                state_dict[first] = found
                state_dict.pop(second, None)
        super()._load_from_state_dict(state_dict, prefix, *rest)


def _tie(model: Any, keys: Any) -> None:
    """One parameter under both names again: ``load_state_dict(assign=True)`` makes two of them."""
    model.lm_head.weight = model.get_parameter(model._embedding)


def _same(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    return one is other or (one.shape == other.shape and bool((one == other).all()))
