"""Arrays whose types say how they are spread over devices: those on a mesh with explicit axes, as ``jax.make_mesh`` makes it.

A loop's carry may not change its type, and one that starts from zeros lies on one device while the arrays that it meets
are spread: it is spread before the loop as its step leaves it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

Array = Any

# JAX ships no types for it; versions without it have no explicit axes either.
_reshard: Any = getattr(jax.sharding, "reshard", None)

# A carry of several arrays may hand it on from one to the other, a step at a time.
_ROUNDS = 4


def scan(step: Callable[[Any, Any], tuple[Any, Any]], carry: Any, xs: Any, *, reverse: bool = False) -> Any:
    """``lax.scan``; axis 1 of ``xs`` is the batch, axis 0 of the carry too."""
    spread = [x for x in jax.tree.leaves(xs) if _spec(x)]
    if spread or any(_spec(x) for x in jax.tree.leaves(carry)):
        carry = _settled(step, carry, jax.tree.map(lambda x: x[0], xs), spread)
    return lax.scan(step, carry, xs, reverse=reverse)


def alike(x: Array, like: Array) -> Array:
    """``x``, of as many axes, spread as ``like`` is."""
    return _reshard(x, jax.typeof(like).sharding) if _spec(like) and not _spec(x) else x


def _settled(step: Callable[[Any, Any], tuple[Any, Any]], carry: Any, first: Any, spread: list[Array]) -> Any:
    def after(carry: Any) -> Any:
        return jax.eval_shape(lambda c, x: step(c, x)[0], carry, first)

    try:
        after(carry)
    except (TypeError, ValueError):  # a product of what is spread and what is not: JAX asks how that is meant
        carry = jax.tree.map(lambda x: _over_batch(x, spread), carry)
    for _ in range(_ROUNDS):
        found = after(carry)
        if jax.tree.all(jax.tree.map(lambda x, y: _spec(x) == _spec_of(y), carry, found)):
            break
        carry = jax.tree.map(
            lambda x, y: x if _spec(x) == _spec_of(y) else _reshard(x, y.sharding), carry, found
        )
    return carry


def _over_batch(x: Array, spread: list[Array]) -> Array:
    """A carry spread over the batch as the tokens are, which lie (time, batch, ...)."""
    for each in spread:
        sharding = jax.typeof(each).sharding
        batch = sharding.spec[1]
        if not _spec(x) and batch is not None and x.ndim and x.shape[0] == each.shape[1]:
            return _reshard(x, sharding.update(spec=(batch, *[None] * (x.ndim - 1))))
    return x


def _spec(x: Array) -> tuple[Any, ...]:
    return _spec_of(jax.typeof(x))


def _spec_of(kind: Any) -> tuple[Any, ...]:
    """The explicit mesh axes over which each axis is spread; empty where none is."""
    spec = tuple(getattr(getattr(kind, "sharding", None), "spec", None) or ())
    return spec if any(axis is not None for axis in spec) else ()
