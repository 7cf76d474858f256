"""The loop over time as ``lax.scan``.

A Python loop is traced token by token and takes minutes to compile; ``lax.scan`` compiles its step once. The
step and its
configuration are static arguments of one jitted function, so that an eager call finds what an earlier one compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from scanfield_jax import spreading


@partial(jax.jit, static_argnames=("step", "config", "reverse"))
def scan(
    step: Callable[..., Any], config: Hashable, constants: Any, carry: Any, xs: Any, reverse: bool
) -> Any:
    """``step(config, constants, carry, slices)`` along axis 1 of every array in ``xs``, as in ``dispatch.loops``."""

    def body(state: Any, slices: Any) -> Any:
        return step(config, constants, state, slices)

    carry, outputs = spreading.scan(
        body, carry, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), xs), reverse=reverse
    )
    return carry, jax.tree.map(lambda y: jnp.moveaxis(y, 0, 1), outputs)
