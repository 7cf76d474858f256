"""The linear scan, compiled: h_t = a_t h_(t-1) + b_t, a block of lanes at a time so that rows stream through memory.

A task is a sequence and a block of lanes. Backward, from the last chunk to the first, the states are computed once more
from the one saved at the chunk's start; G_t = dh_t + a_(t+1) G_(t+1), db_t = G_t, da_t = G_t h_(t-1).
"""

from __future__ import annotations

from scanfield_numpy.compiling import kernel, part
from scanfield_numpy.lanes import first_lanes, put_lanes
from scanfield_numpy.layout import COLUMNS
from scanfield_numpy.vector import (
    ONE,
    at,
    integers,
    lanes,
    load,
    numbers,
    put,
    shifted,
    splat,
    store,
    total,
    zeros,
)

# Places in a kernel's block of integers: sizes and flags, then addresses.
LANES, TIME, CHUNK, A_BATCH, A_TIME, A_LANE, B_BATCH, B_TIME, B_LANE = range(9)
HAS_STATE, WANTS_OUTPUT = range(9, 11)
BATCH, SEQUENCES, HAS_D_OUTPUT, HAS_D_LAST, WANT_A, WANT_B, WANT_STATE = range(9, 16)
TABLE, AT_A, AT_B, STATE, OUTPUT, LAST, STARTS = range(11, 11 + 7)
BACK_TABLE, BACK_A, BACK_B, BACK_STARTS, D_OUTPUT, D_LAST, D_A, D_B, D_STATE = range(16, 16 + 9)

BLOCK = 64
"""Registers of lanes in a task."""


@part
def _pick(place, i, count, each):
    """Lanes from i on; one number for all of them unless there is one for each."""
    if each:
        return first_lanes(place, i, count - i, ONE)
    return splat(place, at(place, 0), ONE)


@part
def _token(h, a, each_a, b, each_b, count):
    """The state of the lanes moves on by one token."""
    step = lanes(h, ONE)
    if each_a and each_b:
        whole = count // step * step
        for i in range(0, whole, step):
            store(h, i, load(a, i, ONE) * load(h, i, ONE) + load(b, i, ONE))
        if whole < count:
            x = _pick(a, whole, count, True) * load(h, whole, ONE) + _pick(b, whole, count, True)
            store(h, whole, x)
    else:
        for i in range(0, count, step):
            store(h, i, _pick(a, i, count, each_a) * load(h, i, ONE) + _pick(b, i, count, each_b))


@part
def _copy(to, source, count):
    for i in range(0, count, lanes(to, ONE)):
        put_lanes(to, i, count - i, first_lanes(source, i, count - i, ONE), ONE)


@part
def _token_out(out, h, a, b, count):
    """One token of lanes that all have their own a and b, written as it is computed."""
    step = lanes(h, ONE)
    whole = count // step * step
    for i in range(0, whole, step):
        x = load(a, i, ONE) * load(h, i, ONE) + load(b, i, ONE)
        store(h, i, x)
        store(out, i, x)
    if whole < count:
        x = _pick(a, whole, count, True) * load(h, whole, ONE) + _pick(b, whole, count, True)
        store(h, whole, x)
        put_lanes(out, whole, count - whole, x, ONE)


@part
def _single(h, a, a_time, b, b_time, out, lanes_each, tokens, wants_output):
    """One lane alone: no vectors."""
    x = at(h, 0)
    for t in range(tokens):
        x = at(a, t * a_time) * x + at(b, t * b_time)
        if wants_output:
            put(out, t * lanes_each, x)
    put(h, 0, x)


@part
def _block(i_seq, c0, count, n, kind, memory):
    width, time, chunk = at(n, LANES), at(n, TIME), at(n, CHUNK)
    table = shifted(integers(at(n, TABLE)), i_seq * COLUMNS)
    row, first, end, saved = at(table, 0), at(table, 1), at(table, 2), at(table, 3)
    a_time, b_time, a_lane, b_lane = at(n, A_TIME), at(n, B_TIME), at(n, A_LANE), at(n, B_LANE)
    a = shifted(numbers(at(n, AT_A), kind), row * at(n, A_BATCH) + c0 * a_lane)
    b = shifted(numbers(at(n, AT_B), kind), row * at(n, B_BATCH) + c0 * b_lane)
    output = shifted(numbers(at(n, OUTPUT), kind), row * time * width + c0)
    starts = shifted(numbers(at(n, STARTS), kind), saved * width + c0)
    h = numbers(memory, kind)
    for i in range(0, count, lanes(h, ONE)):
        store(h, i, zeros(h, ONE))
    own = i_seq * width + c0
    if at(n, HAS_STATE):
        _copy(h, shifted(numbers(at(n, STATE), kind), own), count)
    t = first
    while t < end:
        stop = end
        if chunk:
            stop = min(end, t + chunk)
            _copy(shifted(starts, (t - first) // chunk * width), h, count)
        if count == 1:
            _single(
                h, shifted(a, t * a_time), a_time, shifted(b, t * b_time), b_time, shifted(output, t * width), width,
                stop - t, at(n, WANTS_OUTPUT),
            )  # fmt: skip
            t = stop
        while t < stop:
            a_t, b_t = shifted(a, t * a_time), shifted(b, t * b_time)
            if a_lane and b_lane and at(n, WANTS_OUTPUT):
                _token_out(shifted(output, t * width), h, a_t, b_t, count)
            else:
                _token(h, a_t, a_lane, b_t, b_lane, count)
                if at(n, WANTS_OUTPUT):
                    _copy(shifted(output, t * width), h, count)
            t += 1
    _copy(shifted(numbers(at(n, LAST), kind), own), h, count)


@kernel
def forward(first, last_task, block, memory, kind):
    """Tasks (sequence, block of lanes)."""
    n = integers(block)
    most = BLOCK * lanes(numbers(memory, kind), ONE)
    width = at(n, LANES)
    blocks = (width + most - 1) // most
    for task in range(first, last_task):
        c0 = task % blocks * most
        _block(task // blocks, c0, min(width - c0, most), n, kind, memory)


# ---------------------------------------------------------------------------------------------------------------------
# backward


@part
def _give(place, i, count, x, each, adds):
    """A gradient's lanes from i on: to their places, or added to what stands there."""
    if each:
        if adds:
            x = x + first_lanes(place, i, count - i, ONE)
        put_lanes(place, i, count - i, x, ONE)


@part
def _token_back(n, g, d_out, a, before, d_a, d_b, count):
    step = lanes(g, ONE)
    a_lane, b_lane = at(n, A_LANE), at(n, B_LANE)
    sum_a, sum_b = zeros(g, ONE), zeros(g, ONE)
    for i in range(0, count, step):
        x = load(g, i, ONE)
        if at(n, HAS_D_OUTPUT):
            x = x + first_lanes(d_out, i, count - i, ONE)
        store(g, i, x * _pick(a, i, count, a_lane))
        if at(n, WANT_A):
            y = x * load(before, i, ONE)
            sum_a = sum_a + y
            _give(d_a, i, count, y, a_lane, at(n, A_TIME) == 0)
        if at(n, WANT_B):
            sum_b = sum_b + x
            _give(d_b, i, count, x, b_lane, at(n, B_TIME) == 0)
    if at(n, WANT_A) and not a_lane:
        put(d_a, 0, at(d_a, 0) + total(sum_a))
    if at(n, WANT_B) and not b_lane:
        put(d_b, 0, at(d_b, 0) + total(sum_b))


@part
def _place_of(n, block, slot, row, c0, by_time, by_lane):
    """Where the sums of a gradient begin: (blocks if one number serves all lanes, rows, time or 1, lanes or 1)."""
    place = row
    rows = at(n, BATCH)
    length = at(n, TIME)
    if not by_time:
        place, rows, length = slot, at(n, SEQUENCES), 1
    if by_lane:
        return place * length * at(n, LANES) + c0
    return (block * rows + place) * length


@part
def _block_back(i_seq, block, c0, count, n, kind, memory):
    width, time, chunk = at(n, LANES), at(n, TIME), at(n, CHUNK)
    table = shifted(integers(at(n, BACK_TABLE)), i_seq * COLUMNS)
    row, first, end, saved, slot = at(table, 0), at(table, 1), at(table, 2), at(table, 3), at(table, 4)
    a_time, b_time, a_lane, b_lane = at(n, A_TIME), at(n, B_TIME), at(n, A_LANE), at(n, B_LANE)
    a = shifted(numbers(at(n, BACK_A), kind), row * at(n, A_BATCH) + c0 * a_lane)
    b = shifted(numbers(at(n, BACK_B), kind), row * at(n, B_BATCH) + c0 * b_lane)
    d_output = shifted(numbers(at(n, D_OUTPUT), kind), row * time * width + c0)
    starts = shifted(numbers(at(n, BACK_STARTS), kind), saved * width + c0)
    d_a = shifted(numbers(at(n, D_A), kind), _place_of(n, block, slot, row, c0, a_time, a_lane))
    d_b = shifted(numbers(at(n, D_B), kind), _place_of(n, block, slot, row, c0, b_time, b_lane))
    a_next = (width if a_lane else 1) if a_time else 0
    b_next = (width if b_lane else 1) if b_time else 0
    g = numbers(memory, kind)
    step = lanes(g, ONE)
    size = BLOCK * step
    h, states = shifted(g, size), shifted(g, 2 * size)
    for i in range(0, (2 + chunk) * size, step):
        store(g, i, zeros(g, ONE))
    own = i_seq * width + c0
    if at(n, HAS_D_LAST):
        _copy(g, shifted(numbers(at(n, D_LAST), kind), own), count)
    for c_chunk in range((end - first + chunk - 1) // chunk - 1, -1, -1):
        t0 = first + c_chunk * chunk
        tokens = min(chunk, end - t0)
        if at(n, WANT_A):
            _copy(h, shifted(starts, c_chunk * width), count)
            for t in range(tokens):
                _copy(shifted(states, t * size), h, count)
                _token(h, shifted(a, (t0 + t) * a_time), a_lane, shifted(b, (t0 + t) * b_time), b_lane, count)
        for t in range(t0 + tokens - 1, t0 - 1, -1):
            _token_back(
                n, g, shifted(d_output, t * width), shifted(a, t * a_time), shifted(states, (t - t0) * size),
                shifted(d_a, t * a_next), shifted(d_b, t * b_next), count,
            )  # fmt: skip
    if at(n, WANT_STATE):
        _copy(shifted(numbers(at(n, D_STATE), kind), own), g, count)


@kernel
def backward(first, last_task, block, memory, kind):
    """Tasks (sequence, block of lanes)."""
    n = integers(block)
    most = BLOCK * lanes(numbers(memory, kind), ONE)
    width = at(n, LANES)
    blocks = (width + most - 1) // most
    for task in range(first, last_task):
        c0 = task % blocks * most
        _block_back(task // blocks, task % blocks, c0, min(width - c0, most), n, kind, memory)
