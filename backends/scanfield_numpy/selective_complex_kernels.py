"""The selective scan with complex A, compiled: the kernels of ``selective_kernels`` with two registers to a state.

A state's real parts fill one register of channels and its imaginary parts the next, so a row of N complex numbers is
2 N registers. Symbols as in ``selective_kernels``; the read-out is 2 Re sum_n C_n h_n. Backward, k is the cotangent of
the state before the token: k = conj(decay) G, w = k conj(before), ds = u dx + Re sum w conj(A), dA = sum s w.
"""

from __future__ import annotations

import math

from scanfield_numpy.compiling import kernel, part
from scanfield_numpy.complex_vector import cosine, damped, far, sine
from scanfield_numpy.elementary import clamp, exp, sigmoid, softplus, within
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
    splat,
    store,
    total,
    totals,
    zero,
    zeros,
)

# Places in a kernel's block of integers: sizes, strides (in real numbers) and flags, then addresses.
(
    CHANNELS, N_SIZE, TIME, CHUNK, B_GROUPS, B_BATCH, B_TIME, C_GROUPS, C_BATCH, C_TIME,
    HAS_D, HAS_Z, HAS_BIAS, SOFTPLUS,
) = range(14)  # fmt: skip
HAS_STATE, WANTS_OUTPUT, WANTS_SUMS = range(14, 17)
PARTS, SEQUENCES, BATCH, HAS_D_OUTPUT, HAS_D_LAST, WANT_U, WANT_DELTA, WANT_Z, WANT_STATE = range(14, 23)
(
    TABLE, LIMITS, AT_U, AT_DELTA, AT_A, AT_B, AT_C, AT_D, AT_Z, AT_BIAS, AT_STATE, OUTPUT, LAST, STARTS, SUMS,
) = range(17, 17 + 15)  # fmt: skip
(
    BACK_TABLE, BACK_LIMITS, BACK_U, BACK_DELTA, BACK_A, BACK_B, BACK_C, BACK_D, BACK_Z, BACK_BIAS, BACK_STARTS,
    D_OUTPUT, D_LAST, D_U, D_DELTA, D_A, D_B, D_C, D_D, D_Z, D_BIAS, D_STATE,
) = range(23, 23 + 22)  # fmt: skip


@part
def _turned_back(place, source, count, rows):
    step = lanes(source, ONE)
    for lane in range(count):
        for m in range(rows):
            put(place, lane * rows + m, at(source, m * step + lane))


@part
def _turned(to, place, c0, count, per_group, rows):
    """So many numbers for each channel, or for each group of channels, as rows of lanes; zeros in the others."""
    step = lanes(to, ONE)
    for m in range(rows):
        store(to, m * step, zeros(to, ONE))
    for lane in range(count):
        row = (c0 + lane) // per_group * rows
        for m in range(rows):
            put(to, m * step + lane, at(place, row + m))


@part
def _token(N, h, a, s, x, b_row, c_row, b_lanes, c_lanes, gathered, angles, keeps, states, decays):
    """One token: the state moves on, and Re sum_n C_n h_n comes back.

    With ``keeps`` the state before the token and the decays are kept.
    """
    step = lanes(h, ONE)
    r = zeros(h, ONE)
    for m in range(N):
        i = 2 * m * step
        j = i + step
        exponent = s * load(a, i, ONE)
        size = exp(exponent)
        y = s * load(a, j, ONE)
        if far(y):
            store(angles, 0, y)
            for lane in range(step):
                angle = at(angles, lane)
                put(angles, lane, math.cos(angle))
                put(angles, step + lane, math.sin(angle))
            c, d = load(angles, 0, ONE), load(angles, step, ONE)
        else:
            c, d = cosine(y), sine(y)
        c, d = damped(exponent, size, c), damped(exponent, size, d)
        p, q = load(h, i, ONE), load(h, j, ONE)
        if keeps:
            store(states, i, p)
            store(states, j, q)
            store(decays, i, c)
            store(decays, j, d)
        real, imaginary = c * p - d * q, c * q + d * p
        if gathered:
            real = real + x * load(b_lanes, i, ONE)
            imaginary = imaginary + x * load(b_lanes, j, ONE)
            r = r + (real * load(c_lanes, i, ONE) - imaginary * load(c_lanes, j, ONE))
        else:
            real = real + x * at(b_row, 2 * m)
            imaginary = imaginary + x * at(b_row, 2 * m + 1)
            r = r + (real * at(c_row, 2 * m) - imaginary * at(c_row, 2 * m + 1))
        store(h, i, real)
        store(h, j, imaginary)
    return r


def forward_memory(N: int, step: int) -> int:
    """Numbers of memory that a range of forward needs."""
    return (8 * N + 2) * step


@kernel
def forward(first_task, last_task, block_address, memory, kind):
    """Tasks (sequence, block of channels)."""
    n = integers(block_address)
    channels, N, time, chunk = at(n, CHANNELS), at(n, N_SIZE), at(n, TIME), at(n, CHUNK)
    u, delta, z = numbers(at(n, AT_U), kind), numbers(at(n, AT_DELTA), kind), numbers(at(n, AT_Z), kind)
    B, C, D = numbers(at(n, AT_B), kind), numbers(at(n, AT_C), kind), numbers(at(n, AT_D), kind)
    bias, output = numbers(at(n, AT_BIAS), kind), numbers(at(n, OUTPUT), kind)
    starts, limits = numbers(at(n, STARTS), kind), numbers(at(n, LIMITS), kind)
    h = numbers(memory, kind)
    step = lanes(h, ONE)
    size = 2 * N * step
    a, b_lanes, c_lanes, angles = (
        shifted(h, size),
        shifted(h, 2 * size),
        shifted(h, 3 * size),
        shifted(h, 4 * size),
    )
    b_group, c_group = channels // at(n, B_GROUPS), channels // at(n, C_GROUPS)
    blocks = (channels + step - 1) // step
    for task in range(first_task, last_task):
        i_seq, block = task // blocks, task % blocks
        table = shifted(integers(at(n, TABLE)), i_seq * COLUMNS)
        row, first, end, saved = at(table, 0), at(table, 1), at(table, 2), at(table, 3)
        c0 = block * step
        count = min(channels - c0, step)
        own = (i_seq * channels + c0) * 2 * N
        _turned(a, numbers(at(n, AT_A), kind), c0, count, 1, 2 * N)
        if at(n, HAS_STATE):
            _turned(h, shifted(numbers(at(n, AT_STATE), kind), own), 0, count, 1, 2 * N)
        else:
            for i in range(0, size, step):
                store(h, i, zeros(h, ONE))
        last = c0 + count - 1
        gathered = c0 // b_group != last // b_group or c0 // c_group != last // c_group
        sums = zeros(h, ONE)
        for t in range(first, end):
            if chunk and (t - first) % chunk == 0:
                place = ((saved + (t - first) // chunk) * blocks + block) * size
                for i in range(0, size, step):
                    store(starts, place + i, load(h, i, ONE))
            offset = (row * time + t) * channels + c0
            s = first_lanes(delta, offset, count, ONE)
            if at(n, HAS_BIAS):
                s = s + first_lanes(bias, c0, count, ONE)
            if at(n, SOFTPLUS):
                s = softplus(s)
            s = clamp(s, at(limits, 0), at(limits, 1))
            sums = sums + s
            x = first_lanes(u, offset, count, ONE)
            b_row = shifted(B, row * at(n, B_BATCH) + t * at(n, B_TIME))
            c_row = shifted(C, row * at(n, C_BATCH) + t * at(n, C_TIME))
            if gathered:
                if t == first or at(n, B_TIME):
                    _turned(b_lanes, b_row, c0, count, b_group, 2 * N)
                if t == first or at(n, C_TIME):
                    _turned(c_lanes, c_row, c0, count, c_group, 2 * N)
            else:
                b_row, c_row = shifted(b_row, c0 // b_group * 2 * N), shifted(c_row, c0 // c_group * 2 * N)
            r = _token(N, h, a, s, s * x, b_row, c_row, b_lanes, c_lanes, gathered, angles, False, h, h)
            if at(n, WANTS_OUTPUT):
                q = r + r
                if at(n, HAS_D):
                    q = q + first_lanes(D, c0, count, ONE) * x
                if at(n, HAS_Z):
                    gate = first_lanes(z, offset, count, ONE)
                    q = q * (gate * sigmoid(gate))
                put_lanes(output, offset, count, q, ONE)
        _turned_back(shifted(numbers(at(n, LAST), kind), own), h, count, 2 * N)
        if at(n, WANTS_SUMS):
            put_lanes(numbers(at(n, SUMS), kind), i_seq * channels + c0, count, sums, ONE)


# ---------------------------------------------------------------------------------------------------------------------
# backward


@part
def _token_back(
    N, g, a, s, x, d_r, b_row, c_row, b_lanes, c_lanes, gathered, states, decays, d_A, d_B, d_C, sums
):  # fmt: skip
    """One token of the adjoint, from d_r = 2 dq; dx and the decays' part of ds go to ``sums``."""
    step = lanes(g, ONE)
    dx = zeros(g, ONE)
    ds = zeros(g, ONE)
    for m in range(N):
        i = 2 * m * step
        j = i + step
        if gathered:
            b, b_i, c, c_i = (
                load(b_lanes, i, ONE),
                load(b_lanes, j, ONE),
                load(c_lanes, i, ONE),
                load(c_lanes, j, ONE),
            )
        else:
            b, b_i = splat(g, at(b_row, 2 * m), ONE), splat(g, at(b_row, 2 * m + 1), ONE)
            c, c_i = splat(g, at(c_row, 2 * m), ONE), splat(g, at(c_row, 2 * m + 1), ONE)
        e, e_i = load(decays, i, ONE), load(decays, j, ONE)
        p, p_i = load(states, i, ONE), load(states, j, ONE)
        G, G_i = load(g, i, ONE) + d_r * c, load(g, j, ONE) - d_r * c_i
        store(d_C, i, load(d_C, i, ONE) + d_r * ((e * p - e_i * p_i) + x * b))
        store(d_C, j, load(d_C, j, ONE) - d_r * ((e * p_i + e_i * p) + x * b_i))
        store(d_B, i, load(d_B, i, ONE) + G * x)
        store(d_B, j, load(d_B, j, ONE) + G_i * x)
        dx = dx + (G * b + G_i * b_i)
        k, k_i = e * G + e_i * G_i, e * G_i - e_i * G
        store(g, i, k)
        store(g, j, k_i)
        w, w_i = k * p + k_i * p_i, k_i * p - k * p_i
        ds = ds + (w * load(a, i, ONE) + w_i * load(a, j, ONE))
        store(d_A, i, load(d_A, i, ONE) + w * s)
        store(d_A, j, load(d_A, j, ONE) + w_i * s)
    store(sums, 0, dx)
    store(sums, step, ds)


@part
def _flush(lane_sums, tokens, rows, target, stride, per_group, c0, count, gathered):
    """Add a chunk's gradients of B or C to ``target``, lanes added up, and clear them."""
    step = lanes(lane_sums, ONE)
    for t in range(tokens):
        place = t * stride
        line = shifted(lane_sums, t * rows * step)
        if gathered:
            for lane in range(count):
                to = place + (c0 + lane) // per_group * rows
                for m in range(rows):
                    put(target, to + m, at(target, to + m) + at(line, m * step + lane))
        else:
            to = place + c0 // per_group * rows
            m = 0
            while m + step <= rows:
                store(target, to + m, load(target, to + m, ONE) + totals(line, m * step))
                m += step
            while m < rows:
                put(target, to + m, at(target, to + m) + total(load(line, m * step, ONE)))
                m += 1
        for m in range(rows):
            store(line, m * step, zeros(line, ONE))


@part
def _prepare_back(
    n, kind, t, row, c0, count, N, h, a, b_row, c_row, b_lanes, c_lanes, gathered, angles, states, decays, rows, d_D
):  # fmt: skip
    """One token forward again; its s, u, dq and raw step go to ``rows``, the gate's gradient to its place."""
    step = lanes(h, ONE)
    limits = numbers(at(n, BACK_LIMITS), kind)
    offset = (row * at(n, TIME) + t) * at(n, CHANNELS) + c0
    raw = first_lanes(numbers(at(n, BACK_DELTA), kind), offset, count, ONE)
    if at(n, HAS_BIAS):
        raw = raw + first_lanes(numbers(at(n, BACK_BIAS), kind), c0, count, ONE)
    store(rows, 3 * step, raw)
    s = raw
    if at(n, SOFTPLUS):
        s = softplus(raw)
    s = clamp(s, at(limits, 0), at(limits, 1))
    u = first_lanes(numbers(at(n, BACK_U), kind), offset, count, ONE)
    dq = zeros(h, ONE)
    if at(n, HAS_D_OUTPUT):
        dq = first_lanes(numbers(at(n, D_OUTPUT), kind), offset, count, ONE)
    r = _token(N, h, a, s, s * u, b_row, c_row, b_lanes, c_lanes, gathered, angles, True, states, decays)
    if at(n, HAS_Z):
        q = r + r
        if at(n, HAS_D):
            q = q + first_lanes(numbers(at(n, BACK_D), kind), c0, count, ONE) * u
        z = first_lanes(numbers(at(n, BACK_Z), kind), offset, count, ONE)
        gate = sigmoid(z)
        one = splat(h, at(limits, 2), ONE)
        if at(n, WANT_Z):
            put_lanes(numbers(at(n, D_Z), kind), offset, count, dq * gate * (one + z * (one - gate)) * q, ONE)
        dq = dq * (z * gate)
    store(rows, 0, s)
    store(rows, step, u)
    store(rows, 2 * step, dq)
    store(d_D, 0, load(d_D, 0, ONE) + dq * u)


@part
def _finish_back(n, kind, t, row, c0, count, rows, sums, d_bias):
    """A token's gradients of u and delta."""
    step = lanes(rows, ONE)
    limits = numbers(at(n, BACK_LIMITS), kind)
    offset = (row * at(n, TIME) + t) * at(n, CHANNELS) + c0
    s, u, dq, dx = load(rows, 0, ONE), load(rows, step, ONE), load(rows, 2 * step, ONE), load(sums, 0, ONE)
    if at(n, WANT_U):
        du = s * dx
        if at(n, HAS_D):
            du = du + first_lanes(numbers(at(n, BACK_D), kind), c0, count, ONE) * dq
        put_lanes(numbers(at(n, D_U), kind), offset, count, du, ONE)
    d_raw = u * dx + load(sums, step, ONE)
    raw = load(rows, 3 * step, ONE)
    unclamped = raw
    if at(n, SOFTPLUS):
        unclamped = softplus(raw)
    if at(limits, 3) != zero(rows):
        d_raw = within(unclamped, d_raw, at(limits, 0), at(limits, 1))
    if at(n, SOFTPLUS):
        d_raw = d_raw * sigmoid(raw)
    store(d_bias, 0, load(d_bias, 0, ONE) + d_raw)
    if at(n, WANT_DELTA):
        put_lanes(numbers(at(n, D_DELTA), kind), offset, count, d_raw, ONE)


@part
def _part_back(i_seq, part_index, blocks, n, kind, memory):
    """One sequence and one part of the blocks of channels."""
    channels, N, chunk, parts = at(n, CHANNELS), at(n, N_SIZE), at(n, CHUNK), at(n, PARTS)
    starts = numbers(at(n, BACK_STARTS), kind)
    B, C = numbers(at(n, BACK_B), kind), numbers(at(n, BACK_C), kind)
    table = shifted(integers(at(n, BACK_TABLE)), i_seq * COLUMNS)
    row, first, end, saved = at(table, 0), at(table, 1), at(table, 2), at(table, 3)
    h = numbers(memory, kind)
    step = lanes(h, ONE)
    size = 2 * N * step
    b_lanes, c_lanes, states = shifted(h, size), shifted(h, 2 * size), shifted(h, 3 * size)
    decays = shifted(states, chunk * size)
    lane_B = shifted(decays, chunk * size)
    lane_C = shifted(lane_B, chunk * size)
    rows = shifted(lane_C, chunk * size)
    sums = shifted(rows, 4 * chunk * step)
    angles = shifted(sums, 2 * step)
    held = shifted(angles, 2 * step)  # for each block A and the carried gradient
    block_first, block_last = blocks * part_index // parts, blocks * (part_index + 1) // parts
    for block in range(block_first, block_last):
        c0 = block * step
        count = min(channels - c0, step)
        a = shifted(held, (block - block_first) * 2 * size)
        _turned(a, numbers(at(n, BACK_A), kind), c0, count, 1, 2 * N)
        if at(n, HAS_D_LAST):
            place = shifted(numbers(at(n, D_LAST), kind), (i_seq * channels + c0) * 2 * N)
            _turned(shifted(a, size), place, 0, count, 1, 2 * N)
        else:
            for i in range(0, size, step):
                store(a, size + i, zeros(h, ONE))
    for i in range(0, 2 * chunk * size, step):
        store(lane_B, i, zeros(h, ONE))
    b_group, c_group = channels // at(n, B_GROUPS), channels // at(n, C_GROUPS)
    b_stride, c_stride = at(n, B_TIME), at(n, C_TIME)
    # A gradient's row is as long as its array's; without a time axis the sequence has one.
    d_B, d_C = numbers(at(n, D_B), kind), numbers(at(n, D_C), kind)
    slot = part_index * at(n, SEQUENCES) + at(table, 4)
    line = (part_index * at(n, BATCH) + row) * at(n, TIME)
    d_B = shifted(d_B, (line if b_stride else slot) * at(n, B_GROUPS) * 2 * N)
    d_C = shifted(d_C, (line if c_stride else slot) * at(n, C_GROUPS) * 2 * N)
    for c_chunk in range((end - first + chunk - 1) // chunk - 1, -1, -1):
        t0 = first + c_chunk * chunk
        tokens = min(chunk, end - t0)
        to_B, to_C = shifted(d_B, t0 * b_stride), shifted(d_C, t0 * c_stride)
        for block in range(block_first, block_last):
            c0 = block * step
            count = min(channels - c0, step)
            last = c0 + count - 1
            gathered = c0 // b_group != last // b_group or c0 // c_group != last // c_group
            a = shifted(held, (block - block_first) * 2 * size)
            place = ((saved + c_chunk) * blocks + block) * size
            for i in range(0, size, step):
                store(h, i, load(starts, place + i, ONE))
            lane_row = (i_seq * blocks + block) * step
            d_A = shifted(numbers(at(n, D_A), kind), lane_row * 2 * N)
            d_D, d_bias = numbers(at(n, D_D), kind), numbers(at(n, D_BIAS), kind)
            # All tokens forward, then all of them back.
            for turn in range(2 * tokens):
                t = turn if turn < tokens else 2 * tokens - 1 - turn
                b_row = shifted(B, row * at(n, B_BATCH) + (t0 + t) * b_stride)
                c_row = shifted(C, row * at(n, C_BATCH) + (t0 + t) * c_stride)
                if gathered:
                    _turned(b_lanes, b_row, c0, count, b_group, 2 * N)
                    _turned(c_lanes, c_row, c0, count, c_group, 2 * N)
                else:
                    b_row, c_row = (
                        shifted(b_row, c0 // b_group * 2 * N),
                        shifted(c_row, c0 // c_group * 2 * N),
                    )
                row_t, states_t, decays_t = (
                    shifted(rows, 4 * t * step),
                    shifted(states, t * size),
                    shifted(decays, t * size),
                )
                if turn < tokens:
                    _prepare_back(
                        n, kind, t0 + t, row, c0, count, N, h, a, b_row, c_row, b_lanes, c_lanes, gathered, angles,
                        states_t, decays_t, row_t, shifted(d_D, lane_row),
                    )  # fmt: skip
                else:
                    s, dq = load(row_t, 0, ONE), load(row_t, 2 * step, ONE)
                    _token_back(
                        N, shifted(a, size), a, s, s * load(row_t, step, ONE), dq + dq, b_row, c_row, b_lanes, c_lanes,
                        gathered, states_t, decays_t, d_A, shifted(lane_B, t * size), shifted(lane_C, t * size), sums,
                    )  # fmt: skip
                    _finish_back(n, kind, t0 + t, row, c0, count, row_t, sums, shifted(d_bias, lane_row))
            # The sums wait for the next block only where that lies in the same groups as this one.
            following = min(c0 + count + step, channels) - 1
            b_ends = block + 1 == block_last or following // b_group != c0 // b_group
            c_ends = block + 1 == block_last or following // c_group != c0 // c_group
            if gathered or b_ends or c_ends:
                _flush(lane_B, tokens, 2 * N, to_B, b_stride, b_group, c0, count, gathered)
                _flush(lane_C, tokens, 2 * N, to_C, c_stride, c_group, c0, count, gathered)
    if at(n, WANT_STATE):
        for block in range(block_first, block_last):
            c0 = block * step
            g = shifted(held, (block - block_first) * 2 * size + size)
            place = shifted(numbers(at(n, D_STATE), kind), (i_seq * channels + c0) * 2 * N)
            _turned_back(place, g, min(channels - c0, step), 2 * N)


def backward_memory(N: int, blocks: int, chunk: int, step: int) -> int:
    """Numbers of memory that a range of backward needs; ``blocks`` is the most of one part."""
    return step * (2 * N * (3 + 4 * chunk + 2 * blocks) + 4 * chunk + 4)


@kernel
def backward(first, last_task, block, memory, kind):
    """Tasks (sequence, part of the blocks of channels)."""
    n = integers(block)
    step = lanes(numbers(memory, kind), ONE)
    blocks = (at(n, CHANNELS) + step - 1) // step
    parts = at(n, PARTS)
    for task in range(first, last_task):
        _part_back(task // parts, task % parts, blocks, n, kind, memory)
