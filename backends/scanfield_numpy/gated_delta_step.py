"""One token of the gated delta rule, compiled: a state is read and the next one written, at the speed of memory.

A token reads each state twice: for what it holds of the key, then, from cache, to make the next one of it. While that one
is written the next head's state is read, so that memory has both to do at all times; one after the other takes a
fifth longer. The arithmetic is that of a token in ``gated_delta_forward``.
"""

from __future__ import annotations

from scanfield_numpy.compiling import kernel, part
from scanfield_numpy.gated_delta_forward import (
    LAST,
    OUTPUT,
    PAST_CACHE,
    STATE,
    TASK_COLUMNS,
    value_of,
)
from scanfield_numpy.gated_delta_quad import B_WIDTH, GIVEN, GROUP, HEADS, K_SIZE, V_SIZE, take
from scanfield_numpy.vector import (
    FOUR,
    KEPT,
    ONE,
    PASSING,
    REGISTERS,
    at,
    first_lanes,
    integers,
    lanes,
    least,
    load,
    numbers,
    put_lanes,
    put_past_cache,
    put_whole,
    settle,
    shifted,
    store,
    zeros,
)

# With 32 registers: eight updates, eight sums of this head and eight of the next.
WIDE = (0,) * (8 if REGISTERS == 32 else 4)


@part
def _sums(n, given, source, held):
    """What the state holds of the key, to ``held``."""
    step, K, V = lanes(given, ONE), at(n, K_SIZE), at(n, V_SIZE)
    found = zeros(given, WIDE)
    for first in range(0, K, step):
        for lane in range(least(step, K - first)):
            x = shifted(given, first * GIVEN + lane)
            s = load(source, (first + lane) * V, WIDE) * at(x, 0)
            found = found + s * at(x, step)
    store(held, 0, found)


@part
def _together(n, kind, row, j, column, given, source, to, out, then, after, held, way):
    """The next state and the output of one head, and ``_sums`` of the head ``after``, whose token is ``then``."""
    step, K, V = lanes(given, ONE), at(n, K_SIZE), at(n, V_SIZE)
    new = value_of(n, kind, row, row - row, j, column, lanes(given, WIDE), WIDE)
    if at(n, B_WIDTH):
        new = new - load(held, 0, WIDE)
    found, read = zeros(given, WIDE), zeros(given, WIDE)
    for first in range(0, K, step):
        for lane in range(least(step, K - first)):
            x, i = shifted(then, first * GIVEN + lane), (first + lane) * V
            s = load(after, i, WIDE) * at(x, 0)
            found = found + s * at(x, step)
            x = shifted(given, first * GIVEN + lane)
            s = load(source, i, WIDE) * at(x, 0)
            s = s + new * at(x, 3 * step)
            put_whole(to, i, s, way)
            read = read + s * at(x, 2 * step)
    put_whole(out, column, read, KEPT)
    store(held, 0, found)


@part
def _columns(n, kind, row, j, column, left, given, source, to, out):
    """Some columns, of which ``left`` are there; ``source`` and ``to`` begin with them."""
    step, K, V = lanes(given, ONE), at(n, K_SIZE), at(n, V_SIZE)
    new = value_of(n, kind, row, row - row, j, column, left, FOUR)
    if at(n, B_WIDTH):
        found = zeros(given, FOUR)
        for first in range(0, K, step):
            for lane in range(least(step, K - first)):
                x = shifted(given, first * GIVEN + lane)
                s = first_lanes(source, (first + lane) * V, left, FOUR) * at(x, 0)
                found = found + s * at(x, step)
        new = new - found
    read = zeros(given, FOUR)
    for first in range(0, K, step):
        for lane in range(least(step, K - first)):
            x = shifted(given, first * GIVEN + lane)
            s = first_lanes(source, (first + lane) * V, left, FOUR) * at(x, 0)
            s = s + new * at(x, 3 * step)
            put_past_cache(to, (first + lane) * V, left, s, at(n, PAST_CACHE))
            read = read + s * at(x, 2 * step)
    put_lanes(out, column, left, read, FOUR)


def memory_of(K: int, step: int) -> int:
    """Numbers of memory that a range of tasks needs."""
    return len(WIDE) * step + 2 * -(-K // step) * step * GIVEN


@kernel
def step(first_task, last_task, block, memory, kind):
    """Tasks (sequence, value head, block of columns), of one token each, with a state."""
    n = integers(block)
    K, V, vheads, columns = at(n, K_SIZE), at(n, V_SIZE), at(n, HEADS) * at(n, GROUP), at(n, TASK_COLUMNS)
    state, last, out = (
        numbers(at(n, STATE), kind),
        numbers(at(n, LAST), kind),
        numbers(at(n, OUTPUT), kind),
    )
    held = numbers(memory, kind)
    given = shifted(held, lanes(held, WIDE))
    then = shifted(given, (K + lanes(held, ONE) - 1) // lanes(held, ONE) * lanes(held, ONE) * GIVEN)
    wide = lanes(held, WIDE)
    if V % columns or columns % wide:
        blocks = (V + columns - 1) // columns
        for task in range(first_task, last_task):
            head, c0 = task // blocks, task % blocks * columns
            row, j = head // vheads, head % vheads
            take(n, kind, given, row - row, row, row - row, j)
            source, to, y = shifted(state, head * K * V), shifted(last, head * K * V), shifted(out, head * V)
            for o in range(c0, least(V, c0 + columns), lanes(held, FOUR)):
                left = least(V, c0 + columns) - o
                _columns(n, kind, row, j, o, left, given, shifted(source, o), shifted(to, o), y)
    elif first_task < last_task:
        each = V // wide
        unit, end = first_task * (columns // wide), last_task * (columns // wide)
        head, o = unit // each, unit % each * wide
        take(n, kind, given, unit - unit, head // vheads, unit - unit, head % vheads)
        _sums(n, given, shifted(state, head * K * V + o), held)
        while unit < end:
            # The last one looks at itself once more.
            unit += 1
            next_head, next_o = head, o
            if unit < end:
                next_head, next_o = unit // each, unit % each * wide
            take(n, kind, then, unit - unit, next_head // vheads, unit - unit, next_head % vheads)
            row, j, at_head = head // vheads, head % vheads, head * K * V + o
            source, to, y = shifted(state, at_head), shifted(last, at_head), shifted(out, head * V)
            after = shifted(state, next_head * K * V + next_o)
            if at(n, PAST_CACHE):
                _together(n, kind, row, j, o, given, source, to, y, then, after, held, PASSING)
            else:
                _together(n, kind, row, j, o, given, source, to, y, then, after, held, KEPT)
            given, then = then, given
            head, o = next_head, next_o
    settle()
