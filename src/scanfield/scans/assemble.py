"""The last step of every ``prepare``: time flipped for ``reverse``, packs checked, and the way back to the user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scanfield.arrays import Array, cast
from scanfield.dispatch import Call, Grads, Operation, Prepared
from scanfield.scans import packing
from scanfield.scans.canonical import Checked, cotangent, quiet


def assemble(
    operation: Operation,
    checked: Checked,
    arrays: Mapping[str, Any],
    options: tuple[Any, ...],
    *,
    bounds: packing.Bounds | None,
    sequences: int | None,
    reverse: bool,
    output_shape: Sequence[int],
    state_shape: Sequence[int],
    canonical_output: Sequence[int] | None = None,
    canonical_state: Sequence[int] | None = None,
    complex_output: bool = False,
    complex_state: bool = False,
) -> Prepared:
    """A call from canonical arrays in the order of time; the gradients that ``pull`` returns are theirs, by name.

    ``output_shape`` and ``state_shape`` are the user's; the canonical ones are given where they differ.
    """
    xp = checked.xp
    batch, time = checked.dims["batch"], checked.dims["time"]
    packing.check_bounds(bounds, batch, time)
    # In a pack, flipping time puts the sequences in the opposite order, and their states with them.
    flipped: dict[str, int] = {}
    ready: list[Any] = []
    for entry in operation.inputs:
        array: Any = bounds if entry.role == "index" else arrays[entry.name]
        if reverse and array is not None:
            if entry.role == "index":
                array = packing.flip_bounds(xp, bounds, time)
            elif entry.role == "sequence" and array.shape[1] != 1:
                flipped[entry.name] = 1
            elif entry.role == "state" and sequences is not None:
                flipped[entry.name] = 0
            if entry.name in flipped:
                array = xp.flip(array, axis=flipped[entry.name])
        ready.append(array)
    flip_states = reverse and sequences is not None
    output_shape, state_shape = tuple(output_shape), tuple(state_shape)
    # What makes the results is kept longer than this call (see ``plans``), and so holds none of its arrays.
    main_dtype, library = checked.main_dtype, checked.library

    def output(y: Array) -> Array:
        if canonical_output is not None:
            y = xp.reshape(y, output_shape)
        y = xp.flip(y, axis=1) if reverse else y
        if not complex_output and y.dtype != main_dtype:
            with quiet(library):
                y = cast(xp, y, main_dtype)
        return y

    def state(last: Array) -> Array:
        if canonical_state is not None:
            last = xp.reshape(last, (last.shape[0], *state_shape[1:]))
        return xp.flip(last, axis=0) if flip_states else last

    def cotangents(d_output: Array | None, d_final_state: Array | None) -> tuple[Array | None, Array | None]:
        d_y = cotangent(checked, d_output, "d_output", output_shape, complex_output)
        d_last = cotangent(checked, d_final_state, "d_final_state", state_shape, complex_state)
        if d_y is not None:
            d_y = xp.flip(d_y, axis=1) if reverse else d_y
            d_y = d_y if canonical_output is None else xp.reshape(d_y, tuple(canonical_output))
        if d_last is not None:
            d_last = xp.flip(d_last, axis=0) if flip_states else d_last
            d_last = d_last if canonical_state is None else xp.reshape(d_last, tuple(canonical_state))
        return d_y, d_last

    def pull(grads: Grads, d_output: Array | None) -> dict[str, Array]:
        return {
            entry.name: xp.flip(grad, axis=flipped[entry.name]) if entry.name in flipped else grad
            for entry, grad in zip(operation.inputs, grads, strict=True)
            if grad is not None
        }

    def wanted(names: frozenset[str]) -> tuple[bool, ...]:
        return tuple(entry.name in names for entry in operation.inputs)

    return Prepared(
        Call(operation.name, tuple(ready), options, checked.compute), output, state, cotangents, pull, wanted
    )
