"""The one seam for a loop over time: a Python loop, or the library's own scan.

Steps are functions at module level that take everything they need as arguments. A library that compiles can then
recognise a step it has seen and reuse what it compiled; a closure made anew for each call would compile anew.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

from scanfield.arrays import Array, library_of

Arrays = tuple[Array | None, ...]
Step = Callable[[Any, Any, Any, Any], tuple[Any, Any]]
"""``step(config, constants, carry, slices) -> (carry, outputs)``; config is hashable, the rest are tuples of arrays."""

LOOPS: dict[str, Callable[..., tuple[Any, tuple[Any, ...]]]] = {}
"""Library name -> the scan that a backend brought for it; filled by the registry."""

Compiler = Callable[[Step, int], Step]
"""``compiler(step, size) -> step``: what takes the place of a step on blocks of so many tokens."""
_LOCAL = threading.local()


@contextmanager
def steps_by(compiler: Compiler | None) -> Iterator[None]:
    """In this thread, walk over whole blocks by what ``compiler`` makes of their step; None is the step itself.

    A last block that is shorter runs by the step itself: whatever the length of time, blocks of one size are compiled.
    """
    before = getattr(_LOCAL, "compiler", None)
    _LOCAL.compiler = compiler
    try:
        yield
    finally:
        _LOCAL.compiler = before


def is_compiled(array: Array) -> bool:
    """Whether the library of ``array`` brought a scan of its own, whose steps cost no Python."""
    return library_of(array, "array").name in LOOPS


def scan(
    step: Step, config: Hashable, constants: Any, carry: Any, xs: Arrays, *, reverse: bool = False
) -> tuple[Any, tuple[Any, ...]]:
    """Walk axis 1 of every array in ``xs`` (at least one token) and stack what each step returns along axis 1."""
    library = library_of(next(x for x in xs if x is not None), "xs")
    native = LOOPS.get(library.name)
    if native is not None:
        return native(step, config, constants, carry, xs, reverse)
    xp = library.namespace
    columns = [None if x is None else _unstack(xp, x) for x in xs]
    length = next(len(column) for column in columns if column is not None)
    outputs = []
    for t in range(length - 1, -1, -1) if reverse else range(length):
        carry, y = step(
            config, constants, carry, tuple([None if column is None else column[t] for column in columns])
        )
        outputs.append(y)
    if reverse:
        outputs.reverse()
    stacked = (
        None if column[0] is None else xp.stack(column, axis=1) for column in zip(*outputs, strict=True)
    )
    return carry, tuple(stacked)


def _unstack(xp: Any, x: Array) -> Any:
    # torch's own method, as its vmap knows no rule for the moveaxis that array_api_compat's unstack calls.
    own = getattr(x, "unbind", None)
    return xp.unstack(x, axis=1) if own is None else own(1)


def blocks(
    step: Step,
    config: Hashable,
    constants: Any,
    carry: Any,
    xs: Arrays,
    size: int,
    *,
    joined: int,
    each: Arrays = (),
    reverse: bool = False,
) -> tuple[Any, tuple[Any, ...]]:
    """Walk axis 1 in blocks of ``size`` tokens; the last one is shorter where the length asks for it.

    ``step`` gets as slices the block of every array in ``xs``, followed by this block's entry of every array in
    ``each`` (which have one entry a block on axis 1). The first ``joined`` arrays that it returns hold the block's
    tokens on axis 1 and are joined; the others hold one entry for the block and are stacked on axis 1.
    """
    xp = library_of(next(x for x in xs if x is not None), "xs").namespace
    length = next(x.shape[1] for x in xs if x is not None)
    full, rest = divmod(length, size)
    parts: list[Arrays] = []
    compiler = getattr(_LOCAL, "compiler", None)
    whole_step = step if compiler is None else compiler(step, size)

    def single(step: Step, carry: Any, start: int, index: int) -> Any:
        slices = tuple([None if x is None else x[:, start : min(start + size, length), ...] for x in xs])
        entries = tuple([None if x is None else x[:, index, ...] for x in each])
        carry, outputs = step(config, constants, carry, slices + entries)
        parts.append(
            tuple(
                [y if y is None or i < joined else xp.expand_dims(y, axis=1) for i, y in enumerate(outputs)]
            )
        )
        return carry

    if rest and reverse:
        carry = single(step, carry, full * size, full)
    if full == 1:
        carry = single(whole_step, carry, 0, 0)
    elif full:
        split = [None if x is None else _split(xp, x, full, size) for x in xs]
        whole = [None if x is None else x[:, :full, ...] for x in each]
        carry, outputs = scan(whole_step, config, constants, carry, tuple(split + whole), reverse=reverse)
        parts.append(tuple([y if y is None or i >= joined else _merge(xp, y) for i, y in enumerate(outputs)]))
    if rest and not reverse:
        carry = single(step, carry, full * size, full)
    if reverse:
        parts.reverse()
    if len(parts) == 1:
        return carry, parts[0]
    together = zip(*parts, strict=True)
    return carry, tuple([None if column[0] is None else xp.concat(column, axis=1) for column in together])


def _split(xp: Any, x: Array, count: int, size: int) -> Array:
    """(batch, time, ...) -> (batch, blocks, block, ...), the ragged tail left out."""
    return xp.reshape(x[:, : count * size, ...], (x.shape[0], count, size, *x.shape[2:]))


def _merge(xp: Any, y: Array) -> Array:
    """(batch, blocks, block, ...) -> (batch, time, ...)"""
    return xp.reshape(y, (y.shape[0], y.shape[1] * y.shape[2], *y.shape[3:]))
