"""The linear scan of a few lanes, compiled: several tokens side by side in a register.

A token at a time, one register's product and sum must end before the next begin, for a few numbers each. Here the maps
h -> a h + b of a register's tokens are composed in log2(tokens) rounds, and only the last state of the register waits
for that of the register before. Products of several a overflow where the states need not, and meet what is not finite
in another order: from the first token at which a lane is not finite, the register's tokens of that lane are computed
one after the other. So a state depends on its own lane and the tokens up to it alone, bit for bit.

Backward, E_t = a_t (dh_t + E_(t+1)) is such a scan too, from the last token to the first; db_t = dh_t + E_(t+1).
"""

from __future__ import annotations

from scanfield_numpy.compiling import kernel, part
from scanfield_numpy.layout import COLUMNS
from scanfield_numpy.linear_kernels import (
    A_BATCH,
    A_LANE,
    A_TIME,
    ADDS,
    AT_A,
    AT_B,
    B_BATCH,
    B_LANE,
    B_TIME,
    BACK_A,
    BACK_B,
    BACK_STARTS,
    BACK_TABLE,
    CHUNK,
    D_A,
    D_B,
    D_BATCH,
    D_LAST,
    D_OUTPUT,
    D_STATE,
    D_TIME,
    EACH_LANE,
    EACH_TOKEN,
    GROUPS,
    HAS_D_LAST,
    HAS_D_OUTPUT,
    HAS_STATE,
    LAST,
    OF_A,
    OF_B,
    OUTPUT,
    SEQUENCES,
    STARTS,
    STATE,
    TABLE,
    TIME,
    WANT,
    WANT_STATE,
    WANTS_OUTPUT,
    gradient_place,
)
from scanfield_numpy.side_by_side import finite_lanes, last_token, later_tokens, mirrored, running
from scanfield_numpy.vector import (
    ONE,
    at,
    first_lanes,
    fused,
    integers,
    lanes,
    load,
    numbers,
    put,
    put_lanes,
    shifted,
    store,
    zero,
    zeros,
)

REGISTERS = 16
"""Tokens are taken so many registers at a time, where they must first be put side by side."""


@part
def _beside(to, source, by_time, by_lane, tokens, width):
    """Tokens put side by side; they stay where they lie if they are so already."""
    if by_time == width and (by_lane == 1 or width == 1):
        return source
    for t in range(tokens):
        for i in range(width):
            put(to, t * width + i, at(source, t * by_time + i * by_lane))
    return to


@part
def _serial(h, a, b, out, i, first, tokens, width, wants):
    """One lane's tokens one after the other, from and to its place in h."""
    x = at(h, i)
    for t in range(first, tokens):
        x = at(a, t * width + i) * x + at(b, t * width + i)
        if wants:
            put(out, t * width + i, x)
    put(h, i, x)


@part
def _repeated(h, width):
    """The first token in the place of each."""
    for i in range(width, lanes(h, ONE)):
        put(h, i, at(h, i - width))
    return load(h, 0, ONE)


@part
def _finite(place, i, by, most):
    """How many numbers are finite before one that is not."""
    count = 0
    while count < most and at(place, i + count * by) - at(place, i + count * by) == zero(place):
        count += 1
    return count


@part
def _registers(carry, a, b, out, count, wants, tag):
    """So many registers of tokens as if all were finite: the state after them, and NaN for a lane that was not."""
    width = len(tag)
    lane = lanes(a, ONE) // width * width
    wrong = zeros(a, ONE)
    for i in range(0, count * lane, lane):
        product, lost, end = running(first_lanes(a, i, lane, ONE), first_lanes(b, i, lane, ONE), tag)
        x = fused(product, carry, fused(lost, carry, end))
        wrong = x * zero(a) + wrong
        # The last token of x, without waiting for x.
        carry = fused(
            last_token(product, tag), carry, fused(last_token(lost, tag), carry, last_token(end, tag))
        )
        if wants:
            put_lanes(out, i, lane, x, ONE)
    return carry, wrong


@part
def _tokens(h, carry, a, b, out, tokens, wants, tag):
    """Tokens that are not all finite, or too few for a register: the state after them."""
    width = len(tag)
    per = lanes(h, ONE) // width
    lane = per * width
    states = shifted(h, lanes(h, ONE))
    store(h, 0, carry)
    for t in range(0, tokens, per):
        i, most = t * width, 0
        if t + per <= tokens:
            most = per
            product, lost, end = running(first_lanes(a, i, lane, ONE), first_lanes(b, i, lane, ONE), tag)
            x = fused(product, carry, fused(lost, carry, end))
            store(states, 0, x)
            if wants:
                put_lanes(out, i, lane, x, ONE)
        for j in range(width):
            right = _finite(states, j, width, most)
            if right:
                put(h, j, at(states, (right - 1) * width + j))
            left = min(per, tokens - t)
            _serial(h, shifted(a, i), shifted(b, i), shifted(out, i), j, right, left, width, wants)
        carry = _repeated(h, width)
    return carry


@part
def _series(i_seq, n, kind, h, tag):
    width, step = len(tag), lanes(h, ONE)
    per = step // width
    table = shifted(integers(at(n, TABLE)), i_seq * COLUMNS)
    row, first, end, saved = at(table, 0), at(table, 1), at(table, 2), at(table, 3)
    a_time, a_lane, b_time, b_lane = at(n, A_TIME), at(n, A_LANE), at(n, B_TIME), at(n, B_LANE)
    a = shifted(numbers(at(n, AT_A), kind), row * at(n, A_BATCH))
    b = shifted(numbers(at(n, AT_B), kind), row * at(n, B_BATCH))
    state = shifted(numbers(at(n, STATE), kind), i_seq * width)
    output = shifted(numbers(at(n, OUTPUT), kind), row * at(n, TIME) * width)
    starts = shifted(numbers(at(n, STARTS), kind), saved * width)
    wants, chunk = at(n, WANTS_OUTPUT), at(n, CHUNK)
    own_a, own_b = shifted(h, 2 * step), shifted(h, (2 + REGISTERS) * step)
    for i in range(step):
        put(h, i, at(state, i % width) if at(n, HAS_STATE) else zero(h))
    carry = load(h, 0, ONE)
    if chunk and end > first:
        put_lanes(starts, 0, width, carry, ONE)
    for t in range(first, end, REGISTERS * per):
        tokens = min(REGISTERS * per, end - t)
        a_t = _beside(own_a, shifted(a, t * a_time), a_time, a_lane, tokens, width)
        b_t = _beside(own_b, shifted(b, t * b_time), b_time, b_lane, tokens, width)
        out = shifted(output, t * width)
        done = tokens // per * per
        following, wrong = _registers(carry, a_t, b_t, out, tokens // per, wants, tag)
        if finite_lanes(wrong) < step:
            following, done = carry, 0
        if done < tokens:
            i = done * width
            a_t, b_t, out = shifted(a_t, i), shifted(b_t, i), shifted(out, i)
            following = _tokens(h, following, a_t, b_t, out, tokens - done, wants, tag)
        carry = following
    put_lanes(numbers(at(n, LAST), kind), i_seq * width, width, carry, ONE)
    if chunk:
        for t in range(first + chunk, end, chunk):
            for i in range(width):
                put(starts, (t - first) // chunk * width + i, at(output, (t - 1) * width + i))


@kernel
def forward(first, last_task, block, memory, kind, tag):
    """Tasks are sequences of as many lanes as the tag is long."""
    for task in range(first, last_task):
        _series(task, integers(block), kind, numbers(memory, kind), tag)


def forward_memory(step: int) -> int:
    """Numbers of memory that a range of forward needs."""
    return (2 + 2 * REGISTERS) * step


# ---------------------------------------------------------------------------------------------------------------------
# backward


@part
def _registers_back(carry, a, d, before, d_a, d_b, count, want_a, tag):
    """``_registers`` of the adjoint, from the last to the first."""
    width = len(tag)
    lane = lanes(a, ONE) // width * width
    wrong = zeros(a, ONE)
    for i in range((count - 1) * lane, -1, -lane):
        x = mirrored(first_lanes(d, i, lane, ONE), tag)
        factor = mirrored(first_lanes(a, i, lane, ONE), tag)
        product, lost, end = running(factor, factor * x, tag)
        after = later_tokens(fused(product, carry, fused(lost, carry, end)), carry, tag)
        carry = fused(
            last_token(product, tag), carry, fused(last_token(lost, tag), carry, last_token(end, tag))
        )
        x = x + after
        wrong = (x + carry) * zero(a) + wrong
        x = mirrored(x, tag)
        put_lanes(d_b, i, lane, x, ONE)
        if want_a:
            put_lanes(d_a, i, lane, x * load(before, i, ONE), ONE)
    return carry, wrong


@part
def _serial_back(e, a, d, before, d_a, d_b, i, first, tokens, width):
    """One lane's tokens one after the other, from the last to the first; E from and to the lane's place in e."""
    y = at(e, i)
    for t in range(tokens - 1, first - 1, -1):
        j = t * width + i
        x = at(d, j) + y
        put(d_b, j, x)
        put(d_a, j, x * at(before, j))
        y = x * at(a, j)
    put(e, i, y)


@part
def _add(to, source, of, tokens, width):
    """Gradients that several tokens, lanes or sequences share."""
    by_time, by_lane = at(of, EACH_TOKEN), at(of, EACH_LANE)
    if by_time:
        for t in range(tokens):
            for i in range(width):
                j = t * by_time + i * by_lane
                put(to, j, at(to, j) + at(source, t * width + i))
    else:
        for i in range(width):
            x = zero(to)
            for t in range(tokens):
                x += at(source, t * width + i)
            put(to, i * by_lane, at(to, i * by_lane) + x)


@part
def _series_back(i_seq, group, n, kind, h, tag):
    width, step, chunk = len(tag), lanes(h, ONE), at(n, CHUNK)
    per, block = step // width, REGISTERS * step
    table = shifted(integers(at(n, BACK_TABLE)), i_seq * COLUMNS)
    row, first, end, saved = at(table, 0), at(table, 1), at(table, 2), at(table, 3)
    a_time, a_lane, b_time, b_lane = at(n, A_TIME), at(n, A_LANE), at(n, B_TIME), at(n, B_LANE)
    of_a, of_b = shifted(n, OF_A), shifted(n, OF_B)
    want_a, want_b = at(of_a, WANT), at(of_b, WANT)
    own_a = at(of_a, EACH_TOKEN) == width and at(of_a, ADDS) == 0
    own_b = at(of_b, EACH_TOKEN) == width and at(of_b, ADDS) == 0
    a = shifted(numbers(at(n, BACK_A), kind), row * at(n, A_BATCH))
    b = shifted(numbers(at(n, BACK_B), kind), row * at(n, B_BATCH))
    d_output = shifted(numbers(at(n, D_OUTPUT), kind), row * at(n, D_BATCH))
    starts = shifted(numbers(at(n, BACK_STARTS), kind), saved * width)
    d_a = gradient_place(of_a, numbers(at(n, D_A), kind), group, row, 0, 0)
    d_b = gradient_place(of_b, numbers(at(n, D_B), kind), group, row, 0, 0)
    room_a = shifted(h, 3 * step)
    room_b, room_d, sums_a = shifted(room_a, block), shifted(room_a, 2 * block), shifted(room_a, 3 * block)
    sums_b, states = shifted(room_a, 4 * block), shifted(room_a, 5 * block)
    last = shifted(numbers(at(n, D_LAST), kind), i_seq * width)
    for i in range(0, 6 * block, step):
        store(room_a, i, zeros(h, ONE))
    for i in range(step):
        put(h, i, at(last, i % width) if at(n, HAS_D_LAST) else zero(h))
    carry = load(h, 0, ONE)
    for c in range((end - first + chunk - 1) // chunk - 1, -1, -1):
        t = first + c * chunk
        tokens = min(chunk, end - t)
        whole = tokens // per
        done = whole * per
        a_t = _beside(room_a, shifted(a, t * a_time), a_time, a_lane, tokens, width)
        d_t = room_d
        if at(n, HAS_D_OUTPUT):
            d_t = _beside(room_d, shifted(d_output, t * at(n, D_TIME)), at(n, D_TIME), 1, tokens, width)
        if want_a:
            b_t = _beside(room_b, shifted(b, t * b_time), b_time, b_lane, tokens, width)
            for i in range(step):
                put(h, i, at(starts, c * width + i % width))
            start = load(h, 0, ONE)
            put_lanes(states, 0, width, start, ONE)
            out = shifted(states, width)
            following, wrong = _registers(start, a_t, b_t, out, whole, 1, tag)
            if finite_lanes(wrong) < step:
                _tokens(h, start, a_t, b_t, out, tokens, 1, tag)
            elif done < tokens:
                i = done * width
                _tokens(
                    h, following, shifted(a_t, i), shifted(b_t, i), shifted(out, i), tokens - done, 1, tag
                )
        to_a = shifted(d_a, t * width) if own_a and want_a else sums_a
        to_b = shifted(d_b, t * width) if own_b and want_b else sums_b
        store(h, 0, carry)
        for j in range(width):
            _serial_back(h, a_t, d_t, states, to_a, to_b, j, done, tokens, width)
        carry, wrong = _registers_back(_repeated(h, width), a_t, d_t, states, to_a, to_b, whole, want_a, tag)
        if finite_lanes(wrong) < step:
            marks, ends = shifted(h, step), shifted(h, 2 * step)
            store(marks, 0, wrong)
            store(ends, 0, carry)
            for j in range(width):
                if _finite(marks, j, width, per) < per:
                    _serial_back(h, a_t, d_t, states, to_a, to_b, j, 0, done, width)
                else:
                    put(h, j, at(ends, j))
            carry = _repeated(h, width)
        if want_a and not own_a:
            _add(shifted(d_a, t * at(of_a, EACH_TOKEN)), sums_a, of_a, tokens, width)
        if want_b and not own_b:
            _add(shifted(d_b, t * at(of_b, EACH_TOKEN)), sums_b, of_b, tokens, width)
    if at(n, WANT_STATE):
        put_lanes(numbers(at(n, D_STATE), kind), i_seq * width, width, carry, ONE)


@kernel
def backward(first, last_task, block, memory, kind, tag):
    """Tasks are groups of sequences of as many lanes as the tag is long."""
    n = integers(block)
    count, groups = at(n, SEQUENCES), at(n, GROUPS)
    for group in range(first, last_task):
        for i_seq in range(group * count // groups, (group + 1) * count // groups):
            _series_back(i_seq, group, n, kind, numbers(memory, kind), tag)


def backward_memory(step: int) -> int:
    """Numbers of memory that a range of backward needs."""
    return (4 + 6 * REGISTERS) * step
