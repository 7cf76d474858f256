"""Layers as nodes of JAX's trees: their parameters are the leaves, by dotted name; what they compute is the structure.

A class of layers is registered when one first gets JAX arrays, so that ``jit``, ``grad``, ``vmap`` and ``jax.tree.map``
take a layer as they take a dictionary of its parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

_KNOWN: set[type] = set()
# Of a layer: its arrays, and what it has only read off itself.
_NO_STRUCTURE = ("_values", "_state_names")


def register(kind: type) -> None:
    """Make a class of layers a node of JAX's trees; once is enough.

    Parameters
    ----------
    kind : type
        A class of ``scanfield.layers`` or one derived from ``Layer``. ``layer.init(seed, jax.numpy)`` does it for every class
        in the layer; only a layer that was unpickled needs it said.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from scanfield.layers import Linear
    >>> layer = Linear(2, 1, bias=False).init(0, jnp)
    >>> slope = jax.grad(lambda layer: layer(jnp.ones((1, 3, 2))).output.sum())(layer)
    >>> slope.named_parameters()["weight"].tolist()
    [[3.0, 3.0]]
    """
    if kind in _KNOWN:
        return
    _KNOWN.add(kind)
    try:
        jax.tree_util.register_pytree_with_keys(kind, _with_keys, _unflatten, _flatten)
    except ValueError:
        # Its author has registered it already.
        return


class Structure:
    """A layer without its arrays. Two are equal if the layers are built alike, wherever each was made."""

    __slots__ = ("layer",)

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def __eq__(self, other: object) -> bool:
        """Whether both compute the same."""
        return isinstance(other, Structure) and _alike(self.layer, other.layer)

    def __hash__(self) -> int:
        """By class and names."""
        return hash((type(self.layer), tuple(name for name, _, _ in self.layer.owners())))

    def __repr__(self) -> str:
        """As the class that it is of."""
        return f"Structure({type(self.layer).__name__})"


def _alike(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other) or one.children.keys() != other.children.keys():
        return False
    left, right = (
        {name: value for name, value in vars(layer).items() if name not in (*_NO_STRUCTURE, "children")}
        for layer in (one, other)
    )
    return left == right and all(_alike(one.children[name], other.children[name]) for name in one.children)


def _flatten(layer: Any) -> tuple[tuple[Any, ...], Structure]:
    return tuple(layer.named_parameters().values()), Structure(layer.bare())


def _with_keys(layer: Any) -> tuple[tuple[tuple[Any, Any], ...], Structure]:
    named = layer.named_parameters()
    keyed = tuple((jax.tree_util.DictKey(name), leaf) for name, leaf in named.items())
    return keyed, Structure(layer.bare())


def _unflatten(structure: Structure, leaves: Iterable[Any]) -> Any:
    # Leaves may be anything: JAX puts placeholders there, gradients, axes of a vmap.
    return structure.layer.holding(leaves)
