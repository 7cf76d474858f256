"""A call of a kind that was met before, straight from its arguments to the kernel: no more Python than a step is worth.

What shapes, dtypes, strides and options decide was decided by an earlier call of the kind. Left are: whether the kind is
that one, memory for the results, and the kernel, in the caller's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy

from scanfield.threads import get_num_threads
from scanfield_numpy.compiling import Kernel
from scanfield_numpy.kinds import kind_of
from scanfield_numpy.layout import ABSENT, OWN
from scanfield_numpy.memory import taking_turns
from scanfield_numpy.threads import WORTH_A_THREAD, addresses_of, block_of

Array = Any
Launcher = Callable[[tuple[Any, ...]], tuple[Array, Array] | None]

OUTPUT, STATE = -1, -2
"""Results, among the arrays of a ``Launch``."""

_LARGEST = 2 << 20
"""Bytes of a result; to write more takes many times as long as to ask for it."""


class Launch(NamedTuple):
    """What ``threads.run`` is given by a call of this kind."""

    kernel: Kernel
    dtype: str
    tasks: int
    work: float
    memory: int
    integers: Sequence[int]
    arrays: Sequence[Array | int]
    """Arrays that are the same in all calls of the kind; an array of the call is its place there, a result its name."""
    output: tuple[int, ...]
    state: tuple[int, ...]
    size: int = 0
    derived: tuple[int, Callable[[Array, Array], None]] | None = None
    """An array of the call, in whose place the kernel gets one that is made of it, and what writes that one."""
    streams: bool = False
    """Whether larger results pay too: memory that streams past leaves nothing of Python in the caches."""


def launcher(
    launch: Launch,
    given: Sequence[Array | None],
    values: tuple[Any, ...],
    places: Sequence[int | None],
    shaped: Callable[[Array, Array], tuple[Array, Array]],
) -> Launcher | None:
    """What runs calls of the kind of ``values`` and returns None for other ones, or None if there is no such thing.

    ``places`` says where among the values each array that the call was ``given`` stands; ``shaped`` gives results the
    user's shapes.
    """
    kernel, dtype, tasks, work, memory, integers, arrays, output, state, size, derived, streams = launch
    own = OWN[dtype]
    # What several threads do is long beside any Python.
    many = min(tasks, int(work // WORTH_A_THREAD)) > 1
    large = max(prod(output), prod(state)) * own.itemsize > _LARGEST
    if not tasks or (many and get_num_threads() > 1) or (large and not streams):
        return None
    shapes = _shapes(shaped, numpy.empty(output, own), numpy.empty(state, own))
    if shapes is None:
        return None
    results = {OUTPUT: len(values), STATE: len(values) + 1}
    moves: list[tuple[int, int]] = []
    constant: list[Array] = []
    source, write, made = -1, None, -1
    for slot, array in enumerate(arrays, len(integers)):
        constant.append(ABSENT[dtype] if isinstance(array, int) else array)
        if not isinstance(array, int):
            continue
        place = results[array] if array in results else places[array]
        # An array that had to be copied into its shape lies elsewhere.
        if place is None or (array >= 0 and addresses_of((given[array],)) != addresses_of((values[place],))):
            return None
        if derived is not None and array == derived[0]:
            (source, write), made = (place, derived[1]), slot
        else:
            moves.append((place, slot))
    found = kind_of(values, moves)
    if found is None:
        return None
    alike, compiled, zero = found, kernel.entry(dtype, size), own.type(0)
    tag = ((0,) * size,) if size else ()
    made_shape = values[source].shape if write is not None else ()
    make_output, make_state = (taking_turns(shape, own) for shape in shapes)

    def held() -> tuple[Any, ...]:
        """A block, its address, that of memory for the kernel, a derived array; and that memory."""
        block, scratch = block_of(integers, constant), numpy.empty(memory * own.itemsize + 64, numpy.uint8)
        (address,) = addresses_of((scratch,))
        computed = None
        if write is not None:
            computed = numpy.empty(made_shape, own)
            (block[made],) = addresses_of((computed,))
        return block, block.buffer_info()[0], address + -address % 64, computed, scratch

    free = [held()]

    def run(values: tuple[Any, ...]) -> tuple[Array, Array] | None:
        if many and get_num_threads() > 1:
            return None
        output, state = make_output(), make_state()
        try:
            ready = free.pop()
        except IndexError:  # another thread is in the middle of a call
            ready = held()
        if not alike((*values, output, state, ready[0])):
            free.append(ready)
            return None
        if write is not None:
            write(values[source], ready[3])
        compiled(0, tasks, ready[1], ready[2], zero, *tag)
        free.append(ready)
        return output, state

    return run


def _shapes(
    shaped: Callable[[Array, Array], tuple[Array, Array]], output: Array, state: Array
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The shapes of what the user gets; None if that is more than other shapes of the same numbers."""
    found = shaped(output, state)
    for array, given in zip(found, (output, state), strict=True):
        same = array.dtype is given.dtype and array.size == given.size and array.flags.c_contiguous
        if not same or addresses_of((array,)) != addresses_of((given,)):
            return None
    return found[0].shape, found[1].shape
