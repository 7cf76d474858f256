"""The PINN's sweeps on JAX arrays: an evaluation is one compiled function, its chunks one ``lax.scan``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from scanfield.pinn.kernels import Kernels


class Jitted(Kernels):
    """Kernels whose whole evaluation is compiled once for its shapes and its static part."""

    name = "jax.jit"

    def run(self, function: Callable[..., Any], static: Any, *arrays: Any, store: Any = None) -> Any:
        """``function(self, static, None, *arrays)``, compiled."""
        return _run(function, self, static, arrays)

    def fold(
        self, body: Callable[..., Any], carry: Any, rows: Any, count: int, chunk: int
    ) -> tuple[Any, Any]:
        """A scan over the whole chunks, and what is left after them."""
        full = count // chunk
        if full <= 1 and count <= chunk:
            return body(carry, rows)  # type: ignore[no-any-return]  # as the body has it
        whole = jax.tree.map(lambda x: x[: full * chunk].reshape(full, chunk, *x.shape[1:]), rows)
        carry, outs = lax.scan(body, carry, whole)
        outs = jax.tree.map(lambda y: y.reshape(full * chunk, *y.shape[2:]), outs)
        if count > full * chunk:
            carry, last = body(carry, jax.tree.map(lambda x: x[full * chunk :], rows))
            outs = jax.tree.map(lambda y, end: jnp.concatenate([y, end]), outs, last)
        return carry, outs


@partial(jax.jit, static_argnums=(0, 1, 2))
def _run(function: Callable[..., Any], kernels: Jitted, static: Any, arrays: tuple[Any, ...]) -> Any:
    return function(kernels, static, None, *arrays)


def kernels(family: str) -> Jitted:
    """The kernels of the family."""
    return Jitted(jnp, jax.scipy.special.erf)
