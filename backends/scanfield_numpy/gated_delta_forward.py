"""The gated delta rule forward, compiled: four tokens in one pass over a state that lies in cache.

What a quad (see ``gated_delta_quad``) does to the state is done by the pass of the next one. The lanes of a vector are
value columns; a task is a sequence, a value head and some columns.

Where a quad's results are not all finite its tokens are done once more one by one, as the recurrence has them: infinities
then meet in the same order, and what is NaN there is NaN here. The tokens after the last whole quad, and so a single
step, go the same way.
"""

from __future__ import annotations

from scanfield_numpy.addressing import fetch_later, offset_of
from scanfield_numpy.compiling import kernel, part
from scanfield_numpy.gated_delta_quad import (
    ADDRESSES,
    B_WIDTH,
    CHUNK,
    COMBINED,
    ERASE_PAIRS,
    FLAGS,
    GIVEN,
    GROUP,
    HEADS,
    K_SIZE,
    PAIRS,
    QUAD,
    SCALE,
    TABLE,
    TIME,
    V_SIZE,
    VALUE,
    VALUE_STEPS,
    W_WIDTH,
    WRITE,
    WRITE_STEPS,
    combine,
    take,
)
from scanfield_numpy.layout import COLUMNS
from scanfield_numpy.vector import (
    FOUR,
    ONE,
    REGISTERS,
    TWO,
    at,
    first_lanes,
    integers,
    lanes,
    least,
    load,
    numbers,
    put_lanes,
    shifted,
    splat,
    store,
    total,
    zero,
    zeros,
)

HAS_STATE, HAS_VALUE, KEEPS_UPDATES, WANTS_OUTPUT, TASK_COLUMNS, PAST_CACHE = range(FLAGS, FLAGS + 6)
STATE, OUTPUT, LAST, STARTS, UPDATES = range(ADDRESSES, ADDRESSES + 5)

# Two registers of columns need 16 accumulators.
WIDE = TWO if REGISTERS == 32 else ONE


@part
def _pass(tag, o, width, K, S, before, now, up, sums, erases):
    """All rows of the state, in the columns from ``o`` on: the quad before is done, and this one's sums over rows."""
    step = lanes(S, ONE)
    up, sums, S = shifted(up, o), shifted(sums, o), shifted(S, o)
    up1, up2 = load(up, 0, tag), load(up, width, tag)
    up3, up4 = load(up, 2 * width, tag), load(up, 3 * width, tag)
    z = zeros(S, tag)
    r1 = r2 = r3 = r4 = o1 = o2 = o3 = o4 = z
    for first in range(0, K, step):
        for lane in range(least(step, K - first)):
            b, c = shifted(before, first * COMBINED + lane), shifted(now, first * COMBINED + lane)
            i = (first + lane) * width
            s = load(S, i, tag) * at(b, 0)
            s = s + up1 * at(b, step)
            s = s + up2 * at(b, 2 * step)
            s = s + up3 * at(b, 3 * step)
            s = s + up4 * at(b, 4 * step)
            store(S, i, s)
            if erases:
                r1 = r1 + s * at(c, 5 * step)
                r2 = r2 + s * at(c, 6 * step)
                r3 = r3 + s * at(c, 7 * step)
                r4 = r4 + s * at(c, 8 * step)
            o1 = o1 + s * at(c, 9 * step)
            o2 = o2 + s * at(c, 10 * step)
            o3 = o3 + s * at(c, 11 * step)
            o4 = o4 + s * at(c, 12 * step)
    store(sums, 0, r1)
    store(sums, width, r2)
    store(sums, 2 * width, r3)
    store(sums, 3 * width, r4)
    store(sums, 4 * width, o1)
    store(sums, 5 * width, o2)
    store(sums, 6 * width, o3)
    store(sums, 7 * width, o4)


@part
def _settle(width, K, S, before, up, place, V, count):
    """The quad before is done to the state, which goes to ``place``, rows of V columns, too."""
    step = lanes(S, ONE)
    for first in range(0, K, step):
        for lane in range(least(step, K - first)):
            b = shifted(before, first * COMBINED + lane)
            for o in range(0, count, step):
                i = (first + lane) * width + o
                s = load(S, i, ONE) * at(b, 0)
                for j in range(QUAD):
                    s = s + load(up, j * width + o, ONE) * at(b, (1 + j) * step)
                store(S, i, s)
                put_lanes(place, (first + lane) * V + o, count - o, s, ONE)


@part
def _nothing(width, K, before, up, one):
    """A quad that leaves the state as it is."""
    step = lanes(up, ONE)
    for first in range(0, K, step):
        b = shifted(before, first * COMBINED)
        store(b, 0, splat(up, one, ONE))
        for j in range(QUAD):
            store(b, (1 + j) * step, zeros(up, ONE))
    for i in range(0, QUAD * width, step):
        store(up, i, zeros(up, ONE))


@part
def value_of(n, kind, row, t, j, column, count, tag):
    """y, the value times its write gate, for some columns of a token."""
    y = zeros(numbers(at(n, VALUE), kind), tag)
    if at(n, HAS_VALUE):
        value = shifted(numbers(at(n, VALUE), kind), offset_of(n, VALUE_STEPS, row, t, j))
        write = shifted(numbers(at(n, WRITE), kind), offset_of(n, WRITE_STEPS, row, t, j))
        # As in ``take``; what is asked for two quads before its use has left the first-level cache by then.
        fetch_later(n, VALUE_STEPS, value, column, QUAD)
        y = first_lanes(value, column, count, tag)
        if at(n, W_WIDTH) == 1:
            y = y * at(write, 0)
        elif at(n, W_WIDTH):
            fetch_later(n, WRITE_STEPS, write, column, QUAD)
            y = y * first_lanes(write, column, count, tag)
    return y


@part
def _token(n, kind, row, t, j, c0, count, K, S, width, given, out, update, writes):
    """One token as the recurrence has it, ``given`` in its places of the tiles; results are written where ``writes``."""
    step = lanes(S, ONE)
    place = ((row * at(n, TIME) + t) * at(n, HEADS) * at(n, GROUP) + j) * at(n, V_SIZE) + c0
    for o in range(0, count, 4 * step):
        left = count - o
        found = zeros(S, FOUR)
        for first in range(0, K, step):
            for lane in range(least(step, K - first)):
                x = shifted(given, first * GIVEN + lane)
                s = first_lanes(S, (first + lane) * width + o, left, FOUR) * at(x, 0)
                found = found + s * at(x, step)
        new = value_of(n, kind, row, t, j, c0 + o, left, FOUR)
        if at(n, B_WIDTH):
            new = new - found
        if writes and at(n, KEEPS_UPDATES):
            put_lanes(update, place + o, left, new, FOUR)
        read = zeros(S, FOUR)
        for first in range(0, K, step):
            for lane in range(least(step, K - first)):
                x = shifted(given, first * GIVEN + lane)
                i = (first + lane) * width + o
                s = first_lanes(S, i, left, FOUR) * at(x, 0)
                s = s + new * at(x, 3 * step)
                put_lanes(S, i, left, s, FOUR)
                read = read + s * at(x, 2 * step)
        if writes and at(n, WANTS_OUTPUT):
            put_lanes(out, place + o, left, read, FOUR)


@part
def _quad(n, kind, row, t, j, c0, count, width, up, sums, pairs, odd, out, update):
    """Updates and outputs of a quad from its sums over rows; how many tokens came before one that is not all finite."""
    step = lanes(up, ONE)
    erases, token = at(n, B_WIDTH), at(n, HEADS) * at(n, GROUP) * at(n, V_SIZE)
    place = (row * at(n, TIME) + t) * token + j * at(n, V_SIZE) + c0
    e, q = pairs, shifted(pairs, ERASE_PAIRS)
    z = zeros(up, ONE)
    odd1 = odd2 = odd3 = odd4 = z
    for o in range(0, count, step):
        left, to = count - o, place + o
        x, y = shifted(up, o), shifted(sums, o)
        u1 = value_of(n, kind, row, t, j, c0 + o, left, ONE)
        u2 = value_of(n, kind, row, t + 1, j, c0 + o, left, ONE)
        u3 = value_of(n, kind, row, t + 2, j, c0 + o, left, ONE)
        u4 = value_of(n, kind, row, t + 3, j, c0 + o, left, ONE)
        if erases:
            u1 = u1 - load(y, 0, ONE)
            u2 = u2 - load(y, width, ONE) - u1 * at(e, 0)
            u3 = u3 - load(y, 2 * width, ONE) - u1 * at(e, 1) - u2 * at(e, 2)
            u4 = u4 - load(y, 3 * width, ONE) - u1 * at(e, 3) - u2 * at(e, 4) - u3 * at(e, 5)
        store(x, 0, u1)
        store(x, width, u2)
        store(x, 2 * width, u3)
        store(x, 3 * width, u4)
        r1 = load(y, 4 * width, ONE) + u1 * at(q, 0)
        r2 = load(y, 5 * width, ONE) + u1 * at(q, 1) + u2 * at(q, 2)
        r3 = load(y, 6 * width, ONE) + u1 * at(q, 3) + u2 * at(q, 4) + u3 * at(q, 5)
        r4 = load(y, 7 * width, ONE) + u1 * at(q, 6) + u2 * at(q, 7) + u3 * at(q, 8) + u4 * at(q, 9)
        odd1, odd2 = odd1 + (u1 + r1) * zero(up), odd2 + (u2 + r2) * zero(up)
        odd3, odd4 = odd3 + (u3 + r3) * zero(up), odd4 + (u4 + r4) * zero(up)
        if at(n, WANTS_OUTPUT):
            put_lanes(out, to, left, r1, ONE)
            put_lanes(out, to + token, left, r2, ONE)
            put_lanes(out, to + 2 * token, left, r3, ONE)
            put_lanes(out, to + 3 * token, left, r4, ONE)
        if at(n, KEEPS_UPDATES):
            for m in range(QUAD):
                put_lanes(update, to + m * token, left, load(x, m * width, ONE), ONE)
    store(odd, 0, odd1)
    store(odd, step, odd2)
    store(odd, 2 * step, odd3)
    store(odd, 3 * step, odd4)
    good = 0
    while good < QUAD and total(load(odd, good * step, ONE)) == zero(up):
        good += 1
    return good


def memory_of(K: int, columns: int, step: int) -> int:
    """Numbers of memory that a range of forward needs."""
    tiles = -(-K // step)
    return columns * (K + 3 * QUAD) + PAIRS * (step + 1) + tiles * step * (GIVEN + 2 * COMBINED)


@kernel
def forward(first_task, last_task, block, memory, kind):
    """Tasks (sequence, value head, block of columns)."""
    n = integers(block)
    K, V = at(n, K_SIZE), at(n, V_SIZE)
    chunk, erases = at(n, CHUNK), at(n, B_WIDTH)
    state, last = numbers(at(n, STATE), kind), numbers(at(n, LAST), kind)
    out, starts, update = (
        numbers(at(n, OUTPUT), kind),
        numbers(at(n, STARTS), kind),
        numbers(at(n, UPDATES), kind),
    )
    vheads = at(n, HEADS) * at(n, GROUP)
    S = numbers(memory, kind)
    step, wide = lanes(S, ONE), lanes(S, WIDE)
    tiles = (K + step - 1) // step
    one = at(numbers(at(n, SCALE), kind), 1)
    blocks = (V + at(n, TASK_COLUMNS) - 1) // at(n, TASK_COLUMNS)
    for task in range(first_task, last_task):
        i_seq, j, c0 = task // (blocks * vheads), task // blocks % vheads, task % blocks * at(n, TASK_COLUMNS)
        count = least(V - c0, at(n, TASK_COLUMNS))
        table = shifted(integers(at(n, TABLE)), i_seq * COLUMNS)
        row, first = at(table, 0), at(table, 1)
        end, saved = at(table, 2), at(table, 3)
        width = (count + step - 1) // step * step
        up = shifted(S, K * width)
        sums = shifted(up, QUAD * width)
        partial = shifted(sums, 2 * QUAD * width)
        pairs = shifted(partial, PAIRS * step)
        given = shifted(pairs, PAIRS)
        before = shifted(given, tiles * GIVEN * step)
        now = shifted(before, tiles * COMBINED * step)
        own = ((i_seq * vheads + j) * K) * V + c0
        for i in range(K):
            for o in range(0, width, step):
                s = zeros(S, ONE)
                if at(n, HAS_STATE):
                    s = first_lanes(state, own + i * V + o, count - o, ONE)
                store(S, i * width + o, s)
        _nothing(width, K, before, up, one)
        pending, leading = False, True
        t = first
        while t < end:
            tokens = least(QUAD, end - t)
            if chunk:
                done = (t - first) % chunk
                tokens = least(tokens, chunk - done)
                if done == 0:
                    start = (((saved + (t - first) // chunk) * vheads + j) * K) * V + c0
                    _settle(width, K, S, before, up, shifted(starts, start), V, count)
                    _nothing(width, K, before, up, one)
                    pending = False
            for i in range(tokens):
                take(n, kind, given, i, row, t + i, j)
            if leading:
                # Padding on the left is no part of the first quad: what follows keeps every bit.
                odd = zeros(S, ONE)
                for i in range(0, tiles * GIVEN * step, GIVEN * step):
                    d, e = load(given, i, ONE) - one, load(given, i + step, ONE)
                    odd = odd + d * d + e * e
                for o in range(0, V, step):
                    y = value_of(n, kind, row, t, j, o, V - o, ONE)
                    odd = odd + y * y
                leading = total(odd) == zero(S)
                if leading:
                    tokens = 1
            good = 0
            if tokens == QUAD:
                combine(given, now, pairs, partial, tiles)
                for o in range(0, width - wide + 1, wide):
                    _pass(WIDE, o, width, K, S, before, now, up, sums, erases)
                for o in range(width // wide * wide, width, step):
                    _pass(ONE, o, width, K, S, before, now, up, sums, erases)
                good = _quad(n, kind, row, t, j, c0, count, width, up, sums, pairs, partial, out, update)
                now, before = before, now
                pending = good == QUAD
            elif pending:
                _settle(width, K, S, before, up, shifted(last, own), V, count)
                pending = False
            if good < tokens:
                for i in range(tokens):
                    x = shifted(given, i * 4 * step)
                    _token(n, kind, row, t + i, j, c0, count, K, S, width, x, out, update, i >= good)
                _nothing(width, K, before, up, one)
            t += tokens
        _settle(width, K, S, before, up, shifted(last, own), V, count)
