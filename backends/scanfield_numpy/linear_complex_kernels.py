"""The linear scan of complex numbers, compiled: the kernels of ``linear_kernels`` with two numbers to a lane.

h_t = a_t h_(t-1) + b_t; backward G_t = dh_t + conj(a_(t+1)) G_(t+1), db_t = G_t, da_t = G_t conj(h_(t-1)). Counts and
strides are of real numbers: a complex one is two, its real and its imaginary part.
"""

from __future__ import annotations

from scanfield_numpy.compiling import kernel, part
from scanfield_numpy.complex_vector import add_total, conjugate_product, every, product
from scanfield_numpy.layout import COLUMNS
from scanfield_numpy.vector import (
    ONE,
    at,
    first_lanes,
    integers,
    lanes,
    load,
    numbers,
    put,
    put_lanes,
    shifted,
    store,
    zeros,
)

# Places in a kernel's block of integers: sizes, strides and flags, then addresses.
WIDTH, TIME, CHUNK, A_BATCH, A_TIME, A_LANE, B_BATCH, B_TIME, B_LANE = range(9)
HAS_STATE, WANTS_OUTPUT = range(9, 11)
TABLE, AT_A, AT_B, STATE, OUTPUT, LAST, STARTS = range(11, 11 + 7)
BATCH, SEQUENCES, HAS_D_OUTPUT, HAS_D_LAST, WANT_A, WANT_B, WANT_STATE = range(9, 16)
BACK_TABLE, BACK_A, BACK_B, BACK_STARTS, D_OUTPUT, D_LAST, D_A, D_B, D_STATE = range(16, 16 + 9)

BLOCK = 64
"""Registers of lanes in a task."""


@part
def _pick(place, i, count, each):
    """Numbers from i on; one complex number for all of them unless there is one for each."""
    if each:
        return first_lanes(place, i, count - i, ONE)
    return every(place, ONE)


@part
def _copy(to, source, count):
    for i in range(0, count, lanes(to, ONE)):
        put_lanes(to, i, count - i, first_lanes(source, i, count - i, ONE), ONE)


@part
def _single(h, a, a_time, b, b_time, out, out_time, tokens, wants_output):
    """One complex lane alone: no vectors."""
    x, y = at(h, 0), at(h, 1)
    for t in range(tokens):
        c, d = at(a, t * a_time), at(a, t * a_time + 1)
        x, y = (c * x - d * y) + at(b, t * b_time), (c * y + d * x) + at(b, t * b_time + 1)
        if wants_output:
            put(out, t * out_time, x)
            put(out, t * out_time + 1, y)
    put(h, 0, x)
    put(h, 1, y)


@part
def _tokens(h, a, a_time, a_lane, b, b_time, b_lane, out, out_time, tokens, wants_output, count):
    """The state of the lanes moves on by some tokens, written as it is computed if ``wants_output``."""
    if count == 2:
        _single(h, a, a_time, b, b_time, out, out_time, tokens, wants_output)
        return
    for t in range(tokens):
        a_t, b_t, out_t = shifted(a, t * a_time), shifted(b, t * b_time), shifted(out, t * out_time)
        for i in range(0, count, lanes(h, ONE)):
            x = product(_pick(a_t, i, count, a_lane), load(h, i, ONE)) + _pick(b_t, i, count, b_lane)
            store(h, i, x)
            if wants_output:
                put_lanes(out_t, i, count - i, x, ONE)


@kernel
def forward(first_task, last_task, block, memory, kind):
    """Tasks (sequence, block of lanes)."""
    n = integers(block)
    width, time, chunk = at(n, WIDTH), at(n, TIME), at(n, CHUNK)
    a_time, b_time, a_lane, b_lane = at(n, A_TIME), at(n, B_TIME), at(n, A_LANE), at(n, B_LANE)
    h = numbers(memory, kind)
    most = BLOCK * lanes(h, ONE)
    blocks = (width + most - 1) // most
    for task in range(first_task, last_task):
        i_seq, c0 = task // blocks, task % blocks * most
        count = min(width - c0, most)
        table = shifted(integers(at(n, TABLE)), i_seq * COLUMNS)
        row, first, end, saved = at(table, 0), at(table, 1), at(table, 2), at(table, 3)
        a = shifted(numbers(at(n, AT_A), kind), row * at(n, A_BATCH) + c0 // 2 * a_lane)
        b = shifted(numbers(at(n, AT_B), kind), row * at(n, B_BATCH) + c0 // 2 * b_lane)
        output = shifted(numbers(at(n, OUTPUT), kind), row * time * width + c0)
        starts = shifted(numbers(at(n, STARTS), kind), saved * width + c0)
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
            _tokens(
                h, shifted(a, t * a_time), a_time, a_lane, shifted(b, t * b_time), b_time, b_lane,
                shifted(output, t * width), width, stop - t, at(n, WANTS_OUTPUT), count,
            )  # fmt: skip
            t = stop
        _copy(shifted(numbers(at(n, LAST), kind), own), h, count)


# ---------------------------------------------------------------------------------------------------------------------
# backward


@part
def _give(place, i, count, x, adds):
    """A gradient's numbers from i on: to their places, or added to what stands there."""
    if adds:
        x = x + first_lanes(place, i, count - i, ONE)
    put_lanes(place, i, count - i, x, ONE)


@part
def _token_back(n, g, d_out, a, before, d_a, d_b, count):
    a_lane, b_lane, want_a, want_b = at(n, A_LANE), at(n, B_LANE), at(n, WANT_A), at(n, WANT_B)
    sum_a, sum_b = zeros(g, ONE), zeros(g, ONE)
    for i in range(0, count, lanes(g, ONE)):
        # Only lanes that are there: an infinite a that all share makes NaN in the others.
        x = first_lanes(g, i, count - i, ONE)
        if at(n, HAS_D_OUTPUT):
            x = x + first_lanes(d_out, i, count - i, ONE)
        store(g, i, conjugate_product(_pick(a, i, count, a_lane), x))
        if want_a:
            y = conjugate_product(first_lanes(before, i, count - i, ONE), x)
            sum_a = sum_a + y
            if a_lane:
                _give(d_a, i, count, y, at(n, A_TIME) == 0)
        if want_b:
            sum_b = sum_b + x
            if b_lane:
                _give(d_b, i, count, x, at(n, B_TIME) == 0)
    if want_a and not a_lane:
        add_total(d_a, sum_a)
    if want_b and not b_lane:
        add_total(d_b, sum_b)


@part
def _place_of(n, block, slot, row, c0, by_time, by_lane):
    """Where the sums of a gradient begin: (blocks if one number serves all lanes, rows, time or 1, lanes or 1)."""
    place = row
    rows = at(n, BATCH)
    length = at(n, TIME)
    if not by_time:
        place, rows, length = slot, at(n, SEQUENCES), 1
    if by_lane:
        return place * length * at(n, WIDTH) + c0
    return (block * rows + place) * length * 2


@part
def _block_back(i_seq, block, c0, count, n, kind, memory):
    width, time, chunk = at(n, WIDTH), at(n, TIME), at(n, CHUNK)
    table = shifted(integers(at(n, BACK_TABLE)), i_seq * COLUMNS)
    row, first, end, saved, slot = at(table, 0), at(table, 1), at(table, 2), at(table, 3), at(table, 4)
    a_time, b_time, a_lane, b_lane = at(n, A_TIME), at(n, B_TIME), at(n, A_LANE), at(n, B_LANE)
    a = shifted(numbers(at(n, BACK_A), kind), row * at(n, A_BATCH) + c0 // 2 * a_lane)
    b = shifted(numbers(at(n, BACK_B), kind), row * at(n, B_BATCH) + c0 // 2 * b_lane)
    d_output = shifted(numbers(at(n, D_OUTPUT), kind), row * time * width + c0)
    starts = shifted(numbers(at(n, BACK_STARTS), kind), saved * width + c0)
    d_a = shifted(numbers(at(n, D_A), kind), _place_of(n, block, slot, row, c0, a_time, a_lane))
    d_b = shifted(numbers(at(n, D_B), kind), _place_of(n, block, slot, row, c0, b_time, b_lane))
    a_next = (width if a_lane else 2) if a_time else 0
    b_next = (width if b_lane else 2) if b_time else 0
    g = numbers(memory, kind)
    step = lanes(g, ONE)
    size = BLOCK * step
    states = shifted(g, size)  # the state before each token of a chunk, and after the last
    for i in range(0, size, step):
        store(g, i, zeros(g, ONE))
    own = i_seq * width + c0
    if at(n, HAS_D_LAST):
        _copy(g, shifted(numbers(at(n, D_LAST), kind), own), count)
    for c_chunk in range((end - first + chunk - 1) // chunk - 1, -1, -1):
        t0 = first + c_chunk * chunk
        tokens = min(chunk, end - t0)
        if at(n, WANT_A):
            _copy(states, shifted(starts, c_chunk * width), count)
            for t in range(tokens - 1):
                before, after = shifted(states, t * size), shifted(states, (t + 1) * size)
                a_t, b_t = shifted(a, (t0 + t) * a_time), shifted(b, (t0 + t) * b_time)
                for i in range(0, count, step):
                    x = product(_pick(a_t, i, count, a_lane), first_lanes(before, i, count - i, ONE))
                    store(after, i, x + _pick(b_t, i, count, b_lane))
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
    width = at(n, WIDTH)
    blocks = (width + most - 1) // most
    for task in range(first, last_task):
        c0 = task % blocks * most
        _block_back(task // blocks, task % blocks, c0, min(width - c0, most), n, kind, memory)
