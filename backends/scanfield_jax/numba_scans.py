"""The scans that numba compiles for NumPy arrays, called by XLA on its own memory.

To JAX they are calls into the unknown: gradients and second gradients are rules of ours. A gradient that is itself
differentiated is taken by ``jax.scan``'s operations, from the arrays anew.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp

from scanfield import dispatch
from scanfield.dispatch import Call, Operation, Verb
from scanfield_jax import ffi
from scanfield_jax.lift import Array, Arrays, Lifted, as_gradient, torch_rule
from scanfield_jax.scans import KERNELS

TARGET = "scanfield.numba"


class Compiled:
    """The compiled verbs as JAX calls them."""

    def __init__(self, operation: str) -> None:
        self.arrays: Any = dispatch.implementation(operation, "numpy.numba")
        self.plain = KERNELS[operation]()
        self._record = next(
            record
            for record in dispatch.operations()
            if isinstance(record, Operation) and record.name == operation
        )
        self._form: Any = next(iter(self._record.generic.values()))
        self._index = [entry.role for entry in self._record.inputs].index("index")

    def declines(self, call: Call, verb: Verb) -> str | None:
        """What no kernel takes."""
        reason: str | None = self.arrays.declines(call, verb)
        return reason

    def forward(self, call: Call) -> tuple[Array, Array]:
        """Output and final state."""
        static, arrays = self._opened(call)
        output, state = _forward(self, static, arrays)
        return output, state

    def save(self, call: Call) -> tuple[Array, Array, Arrays]:
        """Output, final state and residuals."""
        static, arrays = self._opened(call)
        output, state, residuals = _save(self, static, arrays)
        return output, state, residuals

    def backward(
        self,
        call: Call,
        residuals: Arrays,
        d_output: Array | None,
        d_final_state: Array | None,
        wanted: tuple[bool, ...],
    ) -> Arrays:
        """The wanted gradients."""
        static, arrays = self._opened(call)
        found = iter(_pull(self, static, wanted, (arrays, d_output, d_final_state), residuals))
        return tuple([next(found) if want else None for want in wanted])

    def summarise(self, call: Call) -> tuple[Array, Array]:
        """Transition and final state from zero, in operations of JAX's."""
        return self.plain.summarise(call)

    def _opened(self, call: Call) -> tuple[Call, Arrays]:
        """The call without its arrays, which is hashable, and those."""
        at = self._index
        bare = call._replace(arrays=(call.arrays[at],))
        return bare, (*call.arrays[:at], *call.arrays[at + 1 :])

    def closed(self, bare: Call, arrays: Arrays) -> Call:
        """The whole call again."""
        at = self._index
        return bare._replace(arrays=(*arrays[:at], *bare.arrays, *arrays[at:]))

    def present(self, arrays: Arrays) -> tuple[bool, ...]:
        """Which inputs are there and can have a gradient."""
        here = tuple([x is not None for x in arrays])
        return (*here[: self._index], False, *here[self._index :])

    def results(self, call: Call) -> list[jax.ShapeDtypeStruct]:
        """Shapes and dtypes of output and state."""
        output, state, output_dtype, state_dtype = self._form.shapes(call)
        bounds = call.arrays[self._index]
        if bounds is not None:
            state = (len(bounds) - 1, *state[1:])
        return [_shaped(output, output_dtype), _shaped(state, state_dtype)]

    def gradients(self, call: Call, wanted: tuple[bool, ...]) -> list[jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the wanted gradients: those of the arrays."""
        return [_shaped(x.shape, x.dtype) for x, want in zip(call.arrays, wanted, strict=True) if want]


# ---------------------------------------------------------------------------------------------------------------------
# in JAX's graph


def _asked(verb: str, bare: Call, arrays: Arrays, *more: Any) -> list[Any]:
    """A call as json writes it: which arrays there are, and everything but their numbers."""
    return [
        bare.operation,
        verb,
        bare.arrays[0],
        bare.options,
        bare.compute,
        [x is not None for x in arrays],
        *more,
    ]


def _shaped(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    made: jax.ShapeDtypeStruct = jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]  # JAX's own
    return made


def _given(*arrays: Array | None) -> list[Array]:
    return [x for x in arrays if x is not None]


def _forward(compiled: Compiled, bare: Call, arrays: Arrays) -> tuple[Array, Array]:
    results = compiled.results(compiled.closed(bare, arrays))
    output, state = ffi.call(TARGET, _asked("forward", bare, arrays), _given(*arrays), results)
    return output, state


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _save(compiled: Compiled, bare: Call, arrays: Arrays) -> tuple[Array, Array, Arrays]:
    call = compiled.closed(bare, arrays)
    kept = [_shaped(shape, jnp.dtype(name)) for shape, name in compiled.arrays.residuals(call)]
    results = [*compiled.results(call), *kept]
    output, state, *residuals = ffi.call(TARGET, _asked("save", bare, arrays), _given(*arrays), results)
    return output, state, tuple(residuals)


def _save_forward(compiled: Compiled, bare: Call, arrays: Arrays) -> tuple[Any, Any]:
    found = _save(compiled, bare, arrays)
    return found, (arrays, found[2])


def _save_backward(compiled: Compiled, bare: Call, kept: Any, cotangents: Any) -> tuple[Arrays]:
    """What residuals hold is a function of the arrays: ``_pull`` gives them no gradient, and the arrays the whole."""
    arrays, residuals = kept
    wanted = compiled.present(arrays)

    def pull(d_output: Array, d_final_state: Array) -> Arrays:
        found = iter(_pull(compiled, bare, wanted, (arrays, d_output, d_final_state), residuals))
        return tuple([None if x is None else next(found) for x in arrays])

    return (torch_rule(pull, arrays, cotangents[:2]),)


_save.defvjp(_save_forward, _save_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _pull(
    compiled: Compiled, bare: Call, wanted: tuple[bool, ...], given: Any, residuals: Arrays
) -> tuple[Array, ...]:
    """The wanted gradients and no others, each in its array's dtype."""
    arrays, d_output, d_final_state = given
    call = compiled.closed(bare, arrays)
    ends = [x is not None for x in (d_output, d_final_state)]
    what = _asked("backward", bare, arrays, ends, wanted)
    found = ffi.call(
        TARGET, what, _given(*arrays, *residuals, d_output, d_final_state), compiled.gradients(call, wanted)
    )
    return tuple(found)


def _pull_forward(
    compiled: Compiled, bare: Call, wanted: tuple[bool, ...], given: Any, residuals: Arrays
) -> tuple[Any, Any]:
    return _pull(compiled, bare, wanted, given, residuals), (given, residuals)


def _pull_backward(
    compiled: Compiled, bare: Call, wanted: tuple[bool, ...], kept: Any, cotangents: Any
) -> tuple[Any, Any]:
    given, residuals = kept

    def plain(given: Any) -> tuple[Array, ...]:
        arrays, d_output, d_final_state = given
        call = compiled.closed(bare, arrays)
        saved = compiled.plain.save(call)[2]
        grads = compiled.plain.backward(call, saved, d_output, d_final_state, wanted)
        return tuple(
            [as_gradient(grad, x) for grad, x, want in zip(grads, call.arrays, wanted, strict=True) if want]
        )

    (found,) = jax.vjp(plain, given)[1](tuple(cotangents))
    return found, jax.tree.map(jnp.zeros_like, residuals)


_pull.defvjp(_pull_forward, _pull_backward)


# ---------------------------------------------------------------------------------------------------------------------
# at the other end, on NumPy arrays


def _run(what: Any, arrays: list[Any]) -> list[Any]:
    """One verb of one operation."""
    operation, verb, bounds, options, compute, present, *more = what
    compiled = _compiled(operation)
    rest = iter(arrays)
    given = tuple([next(rest) if here else None for here in present])
    bare = Call(operation, (None if bounds is None else tuple(bounds),), tuple(options), compute)
    call = compiled.closed(bare, given)
    if verb == "forward":
        return list(compiled.arrays.forward(call))
    if verb == "save":
        output, state, residuals = compiled.arrays.save(call)
        return [output, state, *residuals]
    (has_output, has_state), wanted = more
    tail = list(rest)
    d_final_state = tail.pop() if has_state else None
    d_output = tail.pop() if has_output else None
    found = compiled.arrays.backward(call, tuple(tail), d_output, d_final_state, tuple(wanted))
    return [
        (grad.real if grad.dtype.kind == "c" != x.dtype.kind else grad).astype(x.dtype, copy=False)
        for grad, x, want in zip(found, call.arrays, wanted, strict=True)
        if want
    ]


@cache
def _compiled(operation: str) -> Compiled:
    """One for each process: JAX knows what it compiled by it."""
    if TARGET not in ffi.registered():
        ffi.register(TARGET, _run)
    return Compiled(operation)


@cache
def implementation(operation: str) -> Lifted:
    """The implementation of an operation."""
    return Lifted(operation, _compiled(operation))
