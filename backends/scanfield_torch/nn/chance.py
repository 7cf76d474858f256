"""Numbers that chance has drawn: those of a module that was made without seed and scheme and not changed since.

A module around it may draw them anew, as nobody has chosen them. What was drawn is not kept but drawn again to compare: so
copies and pickles are told from what was trained, loaded or set.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from scanfield.layers import Layer
from scanfield.layers import parameters as drawing

Tensor = torch.Tensor


class Draw(NamedTuple):
    """How a parameter was drawn."""

    parameter: drawing.Parameter
    seed: int
    name: str
    scheme: str
    depth: int


def draws(layer: Layer, seed: int, scheme: str) -> dict[str, Draw]:
    """What ``layer.init`` draws for parameters that have no array yet, by dotted name."""
    depths = layer._depths(1)
    entries = [entry for entry in layer.owners() if entry[2] not in entry[1]._values]
    # Of a layer in several places the last one counts.
    names = {(id(owner), name): full for full, owner, name in entries}
    return {
        full: Draw(owner.parameters[name], seed, names[id(owner), name], scheme, depths[id(owner)])
        for full, owner, name in entries
    }


def untouched(chance: Mapping[str, Draw], tensors: Mapping[str, Tensor]) -> set[str]:
    """The names of the parameters that are as they were drawn, and all that were drawn with them."""
    changed: set[int] = set()
    for name, draw in chance.items():
        if draw.seed not in changed and not _is(draw, tensors[name]):
            changed.add(draw.seed)
    return {name for name, draw in chance.items() if draw.seed not in changed}


def _is(draw: Draw, tensor: Tensor) -> bool:
    if not isinstance(tensor, torch.nn.Parameter):  # a parametrization stands before it
        return False
    if tensor.is_meta:
        return True
    here = tensor.detach().cpu()
    return any(torch.equal(here, drawn.to(here.dtype)) for drawn in numbers(draw))


def numbers(draw: Draw) -> Iterator[Tensor]:
    """As they are made in float64, and by way of float32, from where ``.double()`` may have brought them."""
    # Whatever the default device is.
    drawn: Any = torch.as_tensor(drawing.numbers(*draw), dtype=torch.float64, device="cpu")
    yield drawn
    yield drawn.float()
