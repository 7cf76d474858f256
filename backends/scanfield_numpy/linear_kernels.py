"""The linear scan, compiled: h_t = a_t h_(t-1) + b_t, a block of lanes at a time so that rows stream through memory.

Forward, a task is a sequence and a block of lanes. Backward, it is a group of sequences and a block: from the last
chunk to the first, the states are computed once more from the one saved at the chunk's start; G_t = dh_t + a_(t+1)
G_(t+1), db_t = G_t, da_t = G_t h_(t-1). A gradient that several sequences share has a row for each group.
"""

from __future__ import annotations

from scanfield_numpy.compiling import kernel, part
from scanfield_numpy.layout import COLUMNS
from scanfield_numpy.vector import (
    ONE,
    at,
    fetch,
    first_lanes,
    fused,
    integers,
    lanes,
    load,
    numbers,
    pick,
    put,
    put_lanes,
    put_past_cache,
    settle,
    shifted,
    store,
    total,
    zeros,
)

# Places in a kernel's block of integers: sizes and flags, then addresses.
LANES, BLOCK, TIME, CHUNK, A_BATCH, A_TIME, A_LANE, B_BATCH, B_TIME, B_LANE = range(10)
HAS_STATE, WANTS_OUTPUT, PAST_CACHE = range(10, 13)
TABLE, AT_A, AT_B, STATE, OUTPUT, LAST, STARTS = range(13, 13 + 7)
GROUPS, SEQUENCES, HAS_D_OUTPUT, D_BATCH, D_TIME, HAS_D_LAST, WANT_STATE = range(10, 17)
# Of a gradient: is it wanted; has each group a row, or each row of the batch; numbers from one block of lanes, row and
# token to the next; has it lanes; is it added to what stands there; is it written past the cache.
WANT, BY_GROUP, EACH_BLOCK, EACH_ROW, EACH_TOKEN, EACH_LANE, ADDS, PAST = range(8)
OF_A, OF_B = 17, 17 + 8
BACK_TABLE, BACK_A, BACK_B, BACK_STARTS, D_OUTPUT, D_LAST, D_A, D_B, D_STATE = range(33, 33 + 9)

AHEAD = 4
"""Rows are asked for so many tokens before: backward the processor does not foresee which comes next."""


@part
def _copy(to, source, count, clear):
    """A row of lanes, to or from an array; zeros if ``clear``."""
    for i in range(0, count, lanes(to, ONE)):
        x = zeros(to, ONE)
        if not clear:
            x = first_lanes(source, i, count - i, ONE)
        put_lanes(to, i, count - i, x, ONE)


@part
def _token(to, h, a, a_lane, b, b_lane, count):
    """The state of the lanes moves on by one token."""
    for i in range(0, count, lanes(h, ONE)):
        x = fused(pick(a, i, count - i, a_lane, ONE), load(h, i, ONE), pick(b, i, count - i, b_lane, ONE))
        store(to, i, x)


@part
def _walk(n, h, a, b, out, tokens, count):
    """So many tokens, each written as it is computed."""
    wants = at(n, WANTS_OUTPUT)
    a_lane, b_lane, past = at(n, A_LANE), at(n, B_LANE), at(n, PAST_CACHE)
    a_time, b_time, out_time = at(n, A_TIME), at(n, B_TIME), at(n, LANES)
    for t in range(tokens):
        a_t, b_t, out_t = shifted(a, t * a_time), shifted(b, t * b_time), shifted(out, t * out_time)
        for i in range(0, count, lanes(h, ONE)):
            a_i, b_i = pick(a_t, i, count - i, a_lane, ONE), pick(b_t, i, count - i, b_lane, ONE)
            x = fused(a_i, load(h, i, ONE), b_i)
            store(h, i, x)
            fetch(a_t, i * a_lane + AHEAD * a_time)
            fetch(b_t, i * b_lane + AHEAD * b_time)
            if wants:
                put_past_cache(out_t, i, count - i, x, past)


@part
def _block(i_seq, c0, count, n, kind, h):
    width, time, chunk = at(n, LANES), at(n, TIME), at(n, CHUNK)
    table = shifted(integers(at(n, TABLE)), i_seq * COLUMNS)
    row, first, end, saved = at(table, 0), at(table, 1), at(table, 2), at(table, 3)
    a_time, b_time, a_lane, b_lane = at(n, A_TIME), at(n, B_TIME), at(n, A_LANE), at(n, B_LANE)
    a = shifted(numbers(at(n, AT_A), kind), row * at(n, A_BATCH) + c0 * a_lane)
    b = shifted(numbers(at(n, AT_B), kind), row * at(n, B_BATCH) + c0 * b_lane)
    output = shifted(numbers(at(n, OUTPUT), kind), row * time * width + c0)
    starts = shifted(numbers(at(n, STARTS), kind), saved * width + c0)
    own = i_seq * width + c0
    step = lanes(h, ONE)
    # Whole registers: what lies in the lanes that are not there must be a number.
    store(h, (count - 1) // step * step, zeros(h, ONE))
    _copy(h, shifted(numbers(at(n, STATE), kind), own), count, not at(n, HAS_STATE))
    t = first
    while t < end:
        stop = end
        if chunk:
            stop = min(end, t + chunk)
            _copy(shifted(starts, (t - first) // chunk * width), h, count, False)
        _walk(
            n, h, shifted(a, t * a_time), shifted(b, t * b_time), shifted(output, t * width), stop - t, count
        )
        t = stop
    _copy(shifted(numbers(at(n, LAST), kind), own), h, count, False)


@kernel
def forward(first, last_task, block, memory, kind):
    """Tasks (sequence, block of lanes)."""
    n = integers(block)
    most, width = at(n, BLOCK), at(n, LANES)
    blocks = (width + most - 1) // most
    for task in range(first, last_task):
        c0 = task % blocks * most
        _block(task // blocks, c0, min(width - c0, most), n, kind, numbers(memory, kind))
    settle()


# ---------------------------------------------------------------------------------------------------------------------
# backward


@part
def _give(place, i, count, x, of):
    """A gradient's lanes from i on: to their places, or added to what stands there."""
    if at(of, ADDS):
        x = x + first_lanes(place, i, count, ONE)
    put_past_cache(place, i, count, x, at(of, PAST))


@part
def _token_back(n, g, d_out, a, before, d_a, d_b, count):
    step = lanes(g, ONE)
    of_a, of_b = shifted(n, OF_A), shifted(n, OF_B)
    a_lane, a_ahead, d_ahead = at(n, A_LANE), AHEAD * at(n, A_TIME), AHEAD * at(n, D_TIME)
    sum_a, sum_b = zeros(g, ONE), zeros(g, ONE)
    for i in range(0, count, step):
        x = load(g, i, ONE)
        fetch(a, i * a_lane - a_ahead)
        if at(n, HAS_D_OUTPUT):
            fetch(d_out, i - d_ahead)
            x = x + first_lanes(d_out, i, count - i, ONE)
        store(g, i, x * pick(a, i, count - i, a_lane, ONE))
        if at(of_a, WANT):
            y = x * load(before, i, ONE)
            sum_a = sum_a + y
            if at(of_a, EACH_LANE):
                _give(d_a, i, count - i, y, of_a)
        if at(of_b, WANT):
            sum_b = sum_b + x
            if at(of_b, EACH_LANE):
                _give(d_b, i, count - i, x, of_b)
    if at(of_a, WANT) and not at(of_a, EACH_LANE):
        put(d_a, 0, at(d_a, 0) + total(sum_a))
    if at(of_b, WANT) and not at(of_b, EACH_LANE):
        put(d_b, 0, at(d_b, 0) + total(sum_b))


@part
def _flush(place, sums, count):
    """A chunk's sums over time join those of the chunks before."""
    for i in range(0, count, lanes(place, ONE)):
        put_lanes(place, i, count - i, first_lanes(place, i, count - i, ONE) + load(sums, i, ONE), ONE)
        store(sums, i, zeros(sums, ONE))


@part
def gradient_place(of, place, group, row, block, c0):
    """Where a gradient's row begins."""
    if at(of, BY_GROUP):
        row = group
    return shifted(place, block * at(of, EACH_BLOCK) + row * at(of, EACH_ROW) + c0 * at(of, EACH_LANE))


@part
def _block_back(i_seq, group, block, c0, count, n, kind, g):
    width, chunk, size = at(n, LANES), at(n, CHUNK), at(n, BLOCK)
    table = shifted(integers(at(n, BACK_TABLE)), i_seq * COLUMNS)
    row, first, end, saved = at(table, 0), at(table, 1), at(table, 2), at(table, 3)
    a_time, b_time, a_lane, b_lane = at(n, A_TIME), at(n, B_TIME), at(n, A_LANE), at(n, B_LANE)
    of_a, of_b = shifted(n, OF_A), shifted(n, OF_B)
    a = shifted(numbers(at(n, BACK_A), kind), row * at(n, A_BATCH) + c0 * a_lane)
    b = shifted(numbers(at(n, BACK_B), kind), row * at(n, B_BATCH) + c0 * b_lane)
    d_output = shifted(numbers(at(n, D_OUTPUT), kind), row * at(n, D_BATCH) + c0)
    starts = shifted(numbers(at(n, BACK_STARTS), kind), saved * width + c0)
    d_a = gradient_place(of_a, numbers(at(n, D_A), kind), group, row, block, c0)
    d_b = gradient_place(of_b, numbers(at(n, D_B), kind), group, row, block, c0)
    sum_a, sum_b, states = shifted(g, size), shifted(g, 2 * size), shifted(g, 3 * size)
    over_time_a = at(of_a, WANT) and not at(of_a, EACH_TOKEN)
    over_time_b = at(of_b, WANT) and not at(of_b, EACH_TOKEN)
    own = i_seq * width + c0
    edge = (count - 1) // lanes(g, ONE) * lanes(g, ONE)
    store(g, edge, zeros(g, ONE))
    store(states, edge, zeros(g, ONE))
    _copy(g, shifted(numbers(at(n, D_LAST), kind), own), count, not at(n, HAS_D_LAST))
    _copy(sum_a, g, 2 * size, True)
    for c_chunk in range((end - first + chunk - 1) // chunk - 1, -1, -1):
        t0 = first + c_chunk * chunk
        tokens = min(chunk, end - t0)
        if at(of_a, WANT):
            _copy(states, shifted(starts, c_chunk * width), count, False)
            for t in range(tokens - 1):
                h = shifted(states, t * size)
                a_t, b_t = shifted(a, (t0 + t) * a_time), shifted(b, (t0 + t) * b_time)
                _token(shifted(h, size), h, a_t, a_lane, b_t, b_lane, count)
        for t in range(t0 + tokens - 1, t0 - 1, -1):
            to_a, to_b = shifted(d_a, t * at(of_a, EACH_TOKEN)), shifted(d_b, t * at(of_b, EACH_TOKEN))
            if over_time_a:
                to_a = sum_a
            if over_time_b:
                to_b = sum_b
            _token_back(
                n, g, shifted(d_output, t * at(n, D_TIME)), shifted(a, t * a_time), shifted(states, (t - t0) * size),
                to_a, to_b, count,
            )  # fmt: skip
        if over_time_a:
            _flush(d_a, sum_a, count if at(of_a, EACH_LANE) else 1)
        if over_time_b:
            _flush(d_b, sum_b, count if at(of_b, EACH_LANE) else 1)
    if at(n, WANT_STATE):
        _copy(shifted(numbers(at(n, D_STATE), kind), own), g, count, False)


@kernel
def backward(first, last_task, block, memory, kind):
    """Tasks (group of sequences, block of lanes)."""
    n = integers(block)
    most, width, groups, count = at(n, BLOCK), at(n, LANES), at(n, GROUPS), at(n, SEQUENCES)
    blocks = (width + most - 1) // most
    for task in range(first, last_task):
        group, i = task // blocks, task % blocks
        for i_seq in range(group * count // groups, (group + 1) * count // groups):
            _block_back(
                i_seq, group, i, i * most, min(width - i * most, most), n, kind, numbers(memory, kind)
            )
    settle()
