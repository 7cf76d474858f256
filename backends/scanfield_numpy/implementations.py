"""The compiled implementation of each operation, by its name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from scanfield.dispatch import Call, Grads, Verb, operation_of
from scanfield_numpy.compiling import reason_against_compiling
from scanfield_numpy.gated_delta import GatedDelta
from scanfield_numpy.half import Half, Verbs
from scanfield_numpy.launching import Launcher, launcher
from scanfield_numpy.layout import OWN, Residuals
from scanfield_numpy.linear import Linear
from scanfield_numpy.linear_complex import LinearComplex
from scanfield_numpy.selective import Selective
from scanfield_numpy.selective_complex import SelectiveComplex
from scanfield_numpy.widening import is_half

Array = Any

_REAL: dict[str, type[Verbs]] = {
    "linear_scan": Linear,
    "selective_scan": Selective,
    "gdn2": GatedDelta,
}
_COMPLEX: dict[str, type[Verbs]] = {
    "linear_scan": LinearComplex,
    "selective_scan": SelectiveComplex,
}


class _Stateless:
    """``selective_scan`` with no state: nothing for a kernel to do, and nothing to keep beside the inputs.

    The generic form does what is left, the skip connection and the gate.
    """

    def declines(self, call: Call, verb: Verb) -> str | None:
        """Nothing."""
        return None

    def forward(self, call: Call) -> tuple[Array, Array]:
        """Output and final state."""
        return self._generic(call).forward(call)

    step = forward

    def save(self, call: Call) -> tuple[Array, Array, tuple[Array, ...]]:
        """Output and final state; no residuals."""
        return *self._generic(call).forward(call), ()

    def residuals(self, call: Call) -> Residuals:
        """None."""
        return ()

    def backward(
        self,
        call: Call,
        residuals: tuple[Array, ...],
        d_output: Array | None,
        d_final_state: Array | None,
        wanted: tuple[bool, ...],
    ) -> Grads:
        """The wanted gradients."""
        generic = self._generic(call)
        return generic.backward(call, generic.save(call)[2], d_output, d_final_state, wanted)

    def summarise(self, call: Call) -> tuple[Array, Array]:
        """Transition and final state from zero."""
        return self._generic(call).summarise(call)

    def _generic(self, call: Call) -> Verbs:
        return cast(Verbs, operation_of(call).generic["recurrent"])


_STATELESS = _Stateless()


class Compiled:
    """Implementation of an operation for all kinds of numbers that it takes."""

    def __init__(self, operation: str) -> None:
        self._real = _REAL[operation]()
        self._complex = _COMPLEX.get(operation, _REAL[operation])()
        self._half = Half(self)

    def _chosen(self, call: Call) -> Verbs:
        if call.operation == "selective_scan" and call.arrays[2].shape[1] == 0:
            return _STATELESS
        own = OWN.get(call.compute)
        others = [x for x in call.arrays if x is not None and not isinstance(x, tuple) and x.dtype is not own]
        if not others:
            return self._real
        if any(is_half(array) for array in others):
            return self._half
        return self._complex if any(array.dtype.kind == "c" for array in others) else self._real

    def declines(self, call: Call, verb: Verb) -> str | None:
        """Dtypes that no kernel takes, and everything while numba is switched off."""
        return reason_against_compiling() or self._real.declines(call, verb)

    def forward(self, call: Call) -> tuple[Array, Array]:
        """Output and final state."""
        return self._chosen(call).forward(call)

    def step(self, call: Call) -> tuple[Array, Array]:
        """Output and state after one token."""
        return self._chosen(call).step(call)

    def launcher(
        self,
        call: Call,
        verb: Verb,
        values: tuple[Any, ...],
        places: Sequence[int | None],
        shaped: Callable[[Array, Array], tuple[Array, Array]],
    ) -> Launcher | None:
        """What runs later calls of this kind with nothing between their arguments and the kernel."""
        find = getattr(self._chosen(call), "launch", None)
        launch = None if find is None else find(call)
        return None if launch is None else launcher(launch, call.arrays, values, places, shaped)

    def save(self, call: Call) -> tuple[Array, Array, tuple[Array, ...]]:
        """Output, final state and residuals."""
        return self._chosen(call).save(call)

    def residuals(self, call: Call) -> Residuals:
        """Shapes and dtypes of what ``save`` keeps."""
        return self._chosen(call).residuals(call)

    def backward(
        self,
        call: Call,
        residuals: tuple[Array, ...],
        d_output: Array | None,
        d_final_state: Array | None,
        wanted: tuple[bool, ...],
    ) -> Grads:
        """The wanted gradients."""
        return self._chosen(call).backward(call, residuals, d_output, d_final_state, wanted)

    def summarise(self, call: Call) -> tuple[Array, Array]:
        """Transition and final state from zero."""
        return self._chosen(call).summarise(call)


def implementation(operation: str) -> Compiled:
    """The implementation of an operation."""
    return Compiled(operation)
