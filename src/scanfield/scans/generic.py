"""What the generic forms share: packs, empty arrays, and the walk back over blocks.

A form says how a dense call runs (``scan``) and how its gradients come back (``reverse``); this base class cuts packs
into dense calls, answers calls without elements, and keeps NumPy's floating-point warnings quiet.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from scanfield.arrays import (
    COMPLEX_OF,
    Array,
    Namespace,
    copy,
    dtype_of,
    is_complex,
    library_of,
    sum_to,
    zeros,
)
from scanfield.dispatch import Call, Grads, Operation, Verb, loops, operation_of
from scanfield.scans import packing
from scanfield.scans.canonical import quiet

Result = tuple[Array, Array, tuple[Array, ...]]


class GenericForm(ABC):
    """One generic form of an operation: an Implementation with every verb."""

    neutral: dict[str, float]
    """Per ``sequence`` input, the value that leaves the state as it is (pads of a pack)."""

    def declines(self, call: Call, verb: Verb) -> str | None:
        """Generic code takes every call: it defines the meaning."""
        return None

    @abstractmethod
    def scan(self, call: Call, keep: bool) -> Result:
        """Output, final state and, with ``keep``, the residuals of a dense call that has elements."""

    @abstractmethod
    def reverse(
        self,
        call: Call,
        residuals: tuple[Array, ...],
        d_output: Array | None,
        d_final_state: Array | None,
        wanted: tuple[bool, ...],
    ) -> Grads:
        """The wanted gradients of a dense call that has elements."""

    @abstractmethod
    def shapes(self, call: Call) -> tuple[tuple[int, ...], tuple[int, ...], Any, Any]:
        """Shape of output and state, dtype of output and state."""

    @abstractmethod
    def transition(self, call: Call) -> Array:
        """The map of the state over a dense call that has elements: elementwise, or a matrix."""

    @abstractmethod
    def identity(self, call: Call) -> Array:
        """The transition of a call without tokens."""

    def quiet(self, call: Call) -> AbstractContextManager[Any]:
        """No floating-point warnings while NumPy computes; torch without autocast."""
        return quiet(_context(call)[2], _main(call))

    # -- verbs ---------------------------------------------------------------------------------------------------------

    def forward(self, call: Call) -> tuple[Array, Array]:
        """Output and final state."""
        return self._run(call, keep=False)[:2]

    def step(self, call: Call) -> tuple[Array, Array]:
        """One token: the forward of a sequence of length one."""
        return self._run(call, keep=False)[:2]

    def save(self, call: Call) -> Result:
        """Output, final state, and the states at the start of each chunk."""
        return self._run(call, keep=True)

    def backward(
        self,
        call: Call,
        residuals: tuple[Array, ...],
        d_output: Array | None,
        d_final_state: Array | None,
        wanted: tuple[bool, ...],
    ) -> Grads:
        """The wanted gradients, from the residuals that ``save`` returned."""
        operation, xp, library = _context(call)
        with quiet(library, _main(call)):
            if _bounds(operation, call) is None:
                return self._dense_reverse(call, residuals, d_output, d_final_state, wanted)
            return self._packed_reverse(operation, xp, call, residuals, d_output, d_final_state, wanted)

    def summarise(self, call: Call) -> tuple[Array, Array]:
        """Transition and final state from zero."""
        operation, xp, library = _context(call)
        place = _state_place(operation)
        call = _with(call, place, None)
        with quiet(library, _main(call)):
            bounds = _bounds(operation, call)
            if bounds is None:
                return self._dense_summary(call)
            plan = packing.plan_of(bounds)
            pairs = [self._dense_summary(part) for part in self._split(operation, xp, call, plan)]
            if plan.empty:
                nothing = self._nothing(operation, call, len(plan.empty))
                pairs.insert(0, self._dense_summary(nothing))
            if not pairs:  # a pack of no sequences
                transition, state = self._dense_summary(self._nothing(operation, call, 1))
                return transition[:0, ...], state[:0, ...]
            return (
                packing.join_states(xp, [pair[0] for pair in pairs], plan),
                packing.join_states(xp, [pair[1] for pair in pairs], plan),
            )

    # -- dense or packed -----------------------------------------------------------------------------------------------

    def _run(self, call: Call, keep: bool) -> Result:
        operation, xp, library = _context(call)
        with quiet(library, _main(call)):
            bounds = _bounds(operation, call)
            if bounds is None:
                return self._dense(call, keep)
            plan = packing.plan_of(bounds)
            outputs: list[Array] = []
            states: list[Array] = []
            residuals: list[Array] = []
            if plan.empty:
                _, state, _ = self._dense(
                    self._nothing(operation, call, len(plan.empty), plan.empty), keep=False
                )
                states.append(state)
            for part in self._split(operation, xp, call, plan):
                output, state, kept = self._dense(part, keep)
                outputs.append(output)
                states.append(state)
                residuals.extend(kept)
            if not outputs:  # every sequence is empty
                output = self._dense(self._nothing(operation, call, 1, ()), keep=False)[0]
            else:
                output = packing.scatter(xp, outputs, plan)
            return output, self._state_rows(call, xp, states, plan), tuple(residuals)

    def _state_rows(self, call: Call, xp: Namespace, states: list[Array], plan: packing.Plan) -> Array:
        if states:
            return packing.join_states(xp, states, plan)
        _, shape, _, dtype = self.shapes(call)
        return zeros(xp, (0, *shape[1:]), dtype, _main(call))

    def _dense(self, call: Call, keep: bool) -> Result:
        output_shape, state_shape, output_dtype, state_dtype = self.shapes(call)
        if 0 not in (*output_shape, *state_shape):
            return self.scan(call, keep)
        operation, xp, _ = _context(call)
        state = call.arrays[_state_place(operation)]
        if state is None or output_shape[1] != 0:
            state = zeros(xp, state_shape, state_dtype, _main(call))
        return zeros(xp, output_shape, output_dtype, _main(call)), copy(state), ()

    def _dense_reverse(
        self,
        call: Call,
        residuals: tuple[Array, ...],
        d_output: Array | None,
        d_final_state: Array | None,
        wanted: tuple[bool, ...],
    ) -> Grads:
        output_shape, state_shape, _, _ = self.shapes(call)
        if 0 not in (*output_shape, *state_shape):
            return self.reverse(call, residuals, d_output, d_final_state, wanted)
        operation, xp, _ = _context(call)
        place = _state_place(operation)
        grads: list[Array | None] = [
            None if array is None or not want else zeros(xp, array.shape, array.dtype, array)
            for array, want in zip(call.arrays, wanted, strict=True)
        ]
        if grads[place] is not None and output_shape[1] == 0 and d_final_state is not None:
            grads[place] = copy(d_final_state)
        return grads

    def _dense_summary(self, call: Call) -> tuple[Array, Array]:
        output_shape, state_shape, _, state_dtype = self.shapes(call)
        if 0 not in (*output_shape, *state_shape):
            return self.transition(call), self.scan(call, keep=False)[1]
        _, xp, _ = _context(call)
        state, transition = zeros(xp, state_shape, state_dtype, _main(call)), self.identity(call)
        # Values without columns leave no state to map; what their tokens would do with one is what it is.
        if 0 not in (*output_shape[:2], *transition.shape):
            transition = self.transition(call)
        return transition, state

    def _split(self, operation: Operation, xp: Namespace, call: Call, plan: packing.Plan) -> list[Call]:
        """The pack as one dense call a group."""
        return [
            call._replace(
                arrays=tuple(
                    self._part(xp, entry.name, entry.role, array, group)
                    for entry, array in zip(operation.inputs, call.arrays, strict=True)
                )
            )
            for group in plan.groups
        ]

    def _part(
        self, xp: Namespace, name: str, role: str, array: Array | None, group: packing.Group
    ) -> Array | None:
        if array is None or role == "index":
            return None
        if role == "state":
            return packing.take_states(xp, array, group.sequences)
        if role == "sequence" and array.shape[1] != 1:
            return packing.gather(xp, array, group, self.neutral.get(name, 0.0))
        return array  # one for all tokens, or the only token

    def _nothing(
        self, operation: Operation, call: Call, count: int, sequences: Sequence[int] | None = None
    ) -> Call:
        """The empty sequences of a pack as one dense call of ``count`` rows without tokens."""
        arrays: list[Array | None] = []
        for entry, array in zip(operation.inputs, call.arrays, strict=True):
            if array is None or entry.role == "index":
                arrays.append(None)
            elif entry.role == "sequence":
                _, xp, _ = _context(call)
                arrays.append(zeros(xp, (count, 0, *array.shape[2:]), array.dtype, array))
            elif entry.role == "state":
                _, xp, _ = _context(call)
                arrays.append(packing.take_states(xp, array, sequences) if sequences else None)
            else:
                arrays.append(array)
        return call._replace(arrays=tuple(arrays))

    def _packed_reverse(
        self,
        operation: Operation,
        xp: Namespace,
        call: Call,
        residuals: tuple[Array, ...],
        d_output: Array | None,
        d_final_state: Array | None,
        wanted: tuple[bool, ...],
    ) -> Grads:
        plan = packing.plan_of(_bounds(operation, call))
        place = _state_place(operation)
        parts = self._split(operation, xp, call, plan)
        share = len(residuals) // len(parts) if parts else 0
        found: list[list[Array]] = [[] for _ in operation.inputs]
        if plan.empty and wanted[place] and call.arrays[place] is not None:
            if d_final_state is None:
                rows = packing.take_states(xp, call.arrays[place], plan.empty)
                found[place].append(zeros(xp, rows.shape, rows.dtype, rows))
            else:
                found[place].append(packing.take_states(xp, d_final_state, plan.empty))
        for i, (part, group) in enumerate(zip(parts, plan.groups, strict=True)):
            grads = self._dense_reverse(
                part,
                residuals[i * share : (i + 1) * share],
                None if d_output is None else packing.gather(xp, d_output, group, 0.0),
                None if d_final_state is None else packing.take_states(xp, d_final_state, group.sequences),
                wanted,
            )
            for pieces, grad in zip(found, grads, strict=True):
                if grad is not None:
                    pieces.append(grad)
        joined: list[Array | None] = []
        for entry, array, pieces, want in zip(operation.inputs, call.arrays, found, wanted, strict=True):
            if array is None or not want:
                joined.append(None)
            elif not pieces:  # a pack without tokens
                joined.append(zeros(xp, array.shape, array.dtype, array))
            elif entry.role == "state":
                joined.append(packing.join_states(xp, pieces, plan))
            elif entry.role == "sequence" and array.shape[1] != 1:
                joined.append(packing.scatter(xp, pieces, plan))
            else:
                joined.append(sum(pieces[1:], pieces[0]))
        return joined


def _context(call: Call) -> tuple[Operation, Namespace, str]:
    operation = operation_of(call)
    library = library_of(call.arrays[operation.main_index], operation.main)
    return operation, library.namespace, library.name


def _main(call: Call) -> Array:
    return call.arrays[operation_of(call).main_index]


def _state_place(operation: Operation) -> int:
    return next(i for i, entry in enumerate(operation.inputs) if entry.role == "state")


def _bounds(operation: Operation, call: Call) -> packing.Bounds | None:
    return next(
        (array for entry, array in zip(operation.inputs, call.arrays, strict=True) if entry.role == "index"),
        None,
    )


def _with(call: Call, place: int, array: Array | None) -> Call:
    return call._replace(arrays=(*call.arrays[:place], array, *call.arrays[place + 1 :]))


# ---------------------------------------------------------------------------------------------------------------------
# walking over blocks of time


def chunk_of(chunk: Any, time: int, default: int) -> int:
    """Tokens between two saved states: as asked, else ``default``, never more than there are."""
    return max(1, min(int(chunk) if chunk else default, time))


def square_root_chunk(time: int) -> int:
    """The chunk that balances saved states (time / chunk) against one chunk's recomputed ones, within 16 to 64."""
    return min(64, max(16, int(time**0.5)))


def divide(
    arrays: Sequence[Array | None], time: int
) -> tuple[tuple[bool, ...], tuple[Array | None, ...], tuple[Array | None, ...]]:
    """Which arrays vary over time, those, and the others (which the loop holds constant)."""
    varying = tuple(array is not None and array.shape[1] == time for array in arrays)
    return (
        varying,
        tuple(array if vary else None for array, vary in zip(arrays, varying, strict=True)),
        tuple(None if vary else array for array, vary in zip(arrays, varying, strict=True)),
    )


def merge(
    varying: Sequence[bool], slices: Sequence[Array | None], constants: Sequence[Array | None]
) -> tuple[Any, ...]:
    """What ``divide`` took apart, for one block or token."""
    return tuple(s if vary else c for vary, s, c in zip(varying, slices, constants, strict=True))


def walk_back(
    core: Any,
    config: Any,
    arrays: tuple[Array | None, ...],
    varying: tuple[bool, ...],
    wanted: tuple[bool, ...],
    states: Array,
    d_output: Array,
    carry: Array,
    size: int,
    dtypes: tuple[Any, ...],
    xp: Namespace,
) -> tuple[Array, tuple[Array | None, ...]]:
    """Gradients over time from last block to first.

    ``core(config, arrays, state, d_output, carry)`` returns the carry and one gradient per array, each in the shape of
    the array's block. Gradients of arrays that vary are joined, those of the others summed over the blocks (one running
    sum in a fixed order).
    """
    sums = tuple(
        zeros(xp, array.shape, dtype, array) if want and not vary and array is not None else None
        for array, want, vary, dtype in zip(arrays, wanted, varying, dtypes, strict=True)
    )
    xs = tuple(array if vary else None for array, vary in zip(arrays, varying, strict=True))
    constants = tuple(None if vary else array for array, vary in zip(arrays, varying, strict=True))
    (carry, sums), joined = loops.blocks(
        _block_back,
        (core, config, varying, wanted),
        constants,
        (carry, sums),
        (*xs, d_output),
        size,
        joined=len(arrays),
        each=(states,),
        reverse=True,
    )
    return carry, merge(varying, joined, sums)


def _block_back(config: Any, constants: Any, carry: Any, slices: Any) -> tuple[Any, Any]:
    core, core_config, varying, wanted = config
    *xs, d_output, state = slices
    cotangent, sums = carry
    cotangent, grads = core(core_config, merge(varying, xs, constants), state, d_output, cotangent)
    sums = tuple(None if total is None else total + grad for total, grad in zip(sums, grads, strict=True))
    joined = tuple(
        grad if vary and want else None for grad, vary, want in zip(grads, varying, wanted, strict=True)
    )
    return (cotangent, sums), joined


def reduced(xp: Namespace, gradient: Array, array: Array) -> Array:
    """A gradient summed over the axes along which its array was broadcast."""
    return sum_to(xp, gradient, array.shape)


def state_dtype(xp: Namespace, call: Call, *arrays: Array | None) -> Any:
    """The carry's dtype: complex if any of these arrays is."""
    complex_state = any(array is not None and is_complex(array) for array in arrays)
    return dtype_of(xp, COMPLEX_OF[call.compute] if complex_state else call.compute)
