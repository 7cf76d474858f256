"""From an operation's kernels to an implementation that JAX differentiates, compiles and maps.

What is static about a call (options, bounds of a pack) is one hashable argument of jitted functions, so that an eager
call finds what an earlier one compiled. Arrays that are absent stay None. Bounds that are an array, which only a program
that serves several packs has, travel behind the other arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from scanfield.dispatch import Call, Grads, Operation, Verb, operations

Array = Any
Arrays = tuple[Array | None, ...]


class Kernels(Protocol):
    """The verbs on JAX arrays. ``cu_seqlens`` of a call is a tuple of host integers, an array of them, or None."""

    def declines(self, call: Call, verb: Verb) -> str | None:
        """Why these kernels do not take the call, or None."""

    def forward(self, call: Call) -> tuple[Array, Array]:
        """Output and final state."""

    def save(self, call: Call) -> tuple[Array, Array, Arrays]:
        """Output, final state and residuals."""

    def backward(
        self,
        call: Call,
        residuals: Arrays,
        d_output: Array | None,
        d_final_state: Array | None,
        wanted: tuple[bool, ...],
    ) -> Arrays:
        """The wanted gradients, None for the others."""

    def summarise(self, call: Call) -> tuple[Array, Array]:
        """Transition and final state from zero."""


class Static(NamedTuple):
    """What JAX sees of a call beside its arrays: hashable, and so a static argument."""

    kernels: Kernels
    operation: str
    place: int
    """Of ``cu_seqlens`` among the inputs."""
    bounds: tuple[int, ...] | Literal["array"] | None
    """``"array"``: the last of the arrays."""
    options: tuple[Any, ...]
    compute: str

    def call(self, arrays: Arrays) -> Call:
        """The call whose arrays, ``cu_seqlens`` aside, are these."""
        bounds: Any = self.bounds
        if bounds == "array":
            *others, bounds = arrays
            arrays = tuple(others)
        whole = (*arrays[: self.place], bounds, *arrays[self.place :])
        return Call(self.operation, whole, self.options, self.compute)

    def inputs(self, arrays: Arrays) -> Arrays:
        """The arrays that can have gradients: all but bounds."""
        return arrays[:-1] if self.bounds == "array" else arrays


class Lifted:
    """Implementation of an operation on JAX arrays."""

    def __init__(self, operation: str, kernels: Kernels) -> None:
        record = next(
            record for record in operations() if isinstance(record, Operation) and record.name == operation
        )
        self.kernels = kernels
        self._index = [entry.role for entry in record.inputs].index("index")

    def declines(self, call: Call, verb: Verb) -> str | None:
        """As the kernels say."""
        return self.kernels.declines(call, verb)

    def forward(self, call: Call) -> tuple[Array, Array]:
        """Output and final state."""
        static, arrays = self._opened(call)
        output, state = _run(static, arrays)
        return output, state

    step = forward

    def save(self, call: Call) -> tuple[Array, Array, tuple[Array, ...]]:
        """Output, final state and residuals."""
        output, state, residuals = _save(*self._opened(call))
        return output, state, residuals

    def backward(
        self,
        call: Call,
        residuals: tuple[Array, ...],
        d_output: Array | None,
        d_final_state: Array | None,
        wanted: tuple[bool, ...],
    ) -> Grads:
        """The wanted gradients, by torch's rule where they are complex."""
        static, arrays = self._opened(call)
        given = self._without(tuple(bool(want) for want in wanted))
        found = _pull(static, given, arrays, residuals, d_output, d_final_state)
        return (*found[: self._index], None, *found[self._index :])

    def summarise(self, call: Call) -> tuple[Array, Array]:
        """Transition and final state from zero."""
        transition, state = _summarise(*self._opened(call))
        return transition, state

    def _opened(self, call: Call) -> tuple[Static, Arrays]:
        arrays, bounds = self._without(call.arrays), call.arrays[self._index]
        if bounds is not None and not isinstance(bounds, tuple):
            arrays, bounds = (*arrays, bounds), "array"
        static = Static(self.kernels, call.operation, self._index, bounds, call.options, call.compute)
        return static, _alike(arrays)

    def _without(self, entries: tuple[Any, ...]) -> tuple[Any, ...]:
        """The entries of all inputs but the index."""
        return (*entries[: self._index], *entries[self._index + 1 :])


# ---------------------------------------------------------------------------------------------------------------------
# what JAX transforms


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(static: Static, arrays: Arrays) -> tuple[Array, Array]:
    return static.kernels.forward(static.call(arrays))


def _run_forward(static: Static, given: Any) -> tuple[Any, Any]:
    # Which arrays are differentiated must not reach the way back: JAX keeps what the first trace said of it, and
    # gradients that a later one asks for would be zeros. What nobody asks for, jit leaves out by itself.
    arrays = tuple([None if x is None else x.value for x in given])
    output, state, residuals = _save(static, arrays)
    return (output, state), (arrays, residuals)


def _run_backward(static: Static, kept: Any, cotangents: tuple[Any, Any]) -> tuple[Arrays]:
    arrays, residuals = kept
    inputs = static.inputs(arrays)
    wanted = tuple([x is not None for x in inputs])

    def pull(d_output: Array | None, d_final_state: Array | None) -> Arrays:
        found: Arrays = _pull(static, wanted, arrays, residuals, d_output, d_final_state)
        return found

    ends = [None if isinstance(x, SymbolicZero) else x for x in cotangents]
    return ((*torch_rule(pull, inputs, ends), *[None] * (len(arrays) - len(inputs))),)


def torch_rule(
    pull: Callable[[Array | None, Array | None], Arrays], arrays: Arrays, cotangents: Sequence[Array | None]
) -> Arrays:
    """JAX's gradients of arrays by a ``pull`` that follows torch's rule: JAX's are conjugates of torch's.

    Each comes in its array's dtype; zeros where there is no cotangent or ``pull`` gives none.
    """
    if all(x is None for x in cotangents):
        return tuple([None if x is None else jnp.zeros_like(x) for x in arrays])
    d_output, d_final_state = (None if x is None else jnp.conj(x) for x in cotangents)
    found = pull(d_output, d_final_state)
    return tuple([_cotangent(grad, x) for grad, x in zip(found, arrays, strict=True)])


def _cotangent(grad: Array | None, array: Array | None) -> Array | None:
    if array is None or grad is None:
        return None if array is None else jnp.zeros_like(array)
    return jnp.conj(as_gradient(grad, array))


def as_gradient(grad: Array, array: Array) -> Array:
    """A gradient in the dtype of its array; the real part for a real one."""
    return (grad if jnp.iscomplexobj(array) else grad.real).astype(array.dtype)


_differentiable.defvjp(_run_forward, _run_backward, symbolic_zeros=True)
_run = jax.jit(_differentiable, static_argnums=0)


@partial(jax.jit, static_argnums=0)
def _save(static: Static, arrays: Arrays) -> tuple[Array, Array, Arrays]:
    return static.kernels.save(static.call(arrays))


@partial(jax.jit, static_argnums=(0, 1))
def _pull(
    static: Static,
    wanted: tuple[bool, ...],
    arrays: Arrays,
    residuals: Arrays,
    d_output: Array | None,
    d_final_state: Array | None,
) -> Arrays:
    given = tuple([want and x is not None for want, x in zip(wanted, static.inputs(arrays), strict=True)])
    whole = (*given[: static.place], False, *given[static.place :])
    found = static.kernels.backward(static.call(arrays), residuals, d_output, d_final_state, whole)
    kept = tuple([grad if want else None for grad, want in zip(found, whole, strict=True)])
    return (*kept[: static.place], *kept[static.place + 1 :])


@partial(jax.jit, static_argnums=0)
def _summarise(static: Static, arrays: Arrays) -> tuple[Array, Array]:
    return static.kernels.summarise(static.call(arrays))


def _alike(arrays: Arrays) -> Arrays:
    """Within ``shard_map``, arrays that are the same on all devices marked as varying where any array varies.

    The loop over time carries sums of all of them, and JAX adds the gradient of a marked one up over the devices.
    """
    present = [x for x in arrays if x is not None]
    axes = [axes_of(x) for x in present]
    every = frozenset[Any]().union(*axes)
    if all(mine == every for mine in axes):
        return arrays
    return tuple([None if x is None else vary(x, tuple(every - axes_of(x))) for x in arrays])


def axes_of(x: Array) -> frozenset[Any]:
    """The mesh axes along which an array varies; each few versions of JAX give them another name."""
    kind: Any = jax.typeof(x)
    found: Any = getattr(kind, "vma", None)
    if found is None:
        found = getattr(getattr(kind, "mat", None), "varying", ())
    return frozenset(found)


def vary(x: Array, axes: tuple[Any, ...]) -> Array:
    """An array marked as varying along more mesh axes."""
    if not axes:
        return x
    cast: Any = getattr(lax, "pcast", None)
    if cast is not None:
        return cast(x, axes, to="varying")
    older: Any = lax
    return older.pvary(x, axes)
