"""The selective scan, compiled: a register of channels at a time, the N rows of their state in cache.

Forward, a task is a sequence and a block of channels. Backward, it is a sequence and a part of the blocks: for each
chunk, from the last to the first, each block's states and decays are computed once more from the state saved at the
chunk's start, and the gradients of B and C are summed lane by lane over the blocks before lanes are added up. Symbols
as in Gu and Dao, "Mamba", arXiv 2312.00752, equation 2: h_t = exp(s_t A) h_(t-1) + s_t u_t B_t. A comes multiplied by
log2(e), since a power of 2 is the cheaper exponential.
"""

from __future__ import annotations

from scanfield_numpy.compiling import kernel, part
from scanfield_numpy.elementary import clamp, exp2, sigmoid, softplus, within
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

# Places in a kernel's block of integers: sizes, flags and steps (numbers from one element to the next along an axis of
# an array as it lies), then addresses.
(
    CHANNELS, N_SIZE, TIME, CHUNK, B_GROUPS, B_BATCH, B_TIME, B_GROUP, C_GROUPS, C_BATCH, C_TIME, C_GROUP,
    U_BATCH, U_TIME, DELTA_BATCH, DELTA_TIME, Z_BATCH, Z_TIME, HAS_D, HAS_Z, HAS_BIAS, SOFTPLUS,
) = range(22)  # fmt: skip
HAS_STATE, WANTS_OUTPUT, WANTS_SUMS = range(22, 25)
(
    PARTS, SEQUENCES, BATCH, D_BATCH, D_TIME, B_EACH, C_EACH, HAS_D_OUTPUT, HAS_D_LAST, WANT_U, WANT_DELTA, WANT_Z,
    WANT_STATE, WANT_A, WANT_B, WANT_C,
) = range(22, 22 + 16)  # fmt: skip
(
    TABLE, LIMITS, AT_U, AT_DELTA, AT_A, AT_B, AT_C, AT_D, AT_Z, AT_BIAS, AT_STATE, OUTPUT, LAST, STARTS, SUMS,
) = range(25, 25 + 15)  # fmt: skip
(
    BACK_TABLE, BACK_LIMITS, BACK_U, BACK_DELTA, BACK_A, BACK_B, BACK_C, BACK_D, BACK_Z, BACK_BIAS, BACK_STARTS,
    D_OUTPUT, D_LAST, D_U, D_DELTA, D_A, D_B, D_C, D_D, D_Z, D_BIAS, D_STATE,
) = range(38, 38 + 22)  # fmt: skip


@part
def _turned(to, place, count, N):
    """Rows of N numbers, one a channel, as N rows of lanes; zeros in the lanes that are not there."""
    step = lanes(to, ONE)
    for m in range(N):
        store(to, m * step, zeros(to, ONE))
    for lane in range(count):
        for m in range(N):
            put(to, m * step + lane, at(place, lane * N + m))


@part
def _turned_back(place, source, count, N):
    step = lanes(source, ONE)
    for lane in range(count):
        for m in range(N):
            put(place, lane * N + m, at(source, m * step + lane))


@part
def _gather(to, place, c0, count, per_group, by_group, N):
    """A token's B or C for channels of several groups, as N rows of lanes."""
    step = lanes(to, ONE)
    for m in range(N):
        store(to, m * step, zeros(to, ONE))
    for lane in range(count):
        row = (c0 + lane) // per_group * by_group
        for m in range(N):
            put(to, m * step + lane, at(place, row + m))


@part
def _raw(delta, bias, has_bias, offset, c0, count):
    x = first_lanes(delta, offset, count, ONE)
    if has_bias:
        x = x + first_lanes(bias, c0, count, ONE)
    return x


@part
def _walk(N, h, a, s, x, b_row, c_row, b_lanes, c_lanes, gathered):
    """One token: the state moves on, and the read-out sum_n C_n h_n comes back."""
    step = lanes(h, ONE)
    r = zeros(h, ONE)
    if gathered:
        for m in range(N):
            i = m * step
            y = exp2(s * load(a, i, ONE)) * load(h, i, ONE) + x * load(b_lanes, i, ONE)
            store(h, i, y)
            r = r + y * load(c_lanes, i, ONE)
    else:
        for m in range(N):
            i = m * step
            y = exp2(s * load(a, i, ONE)) * load(h, i, ONE) + x * at(b_row, m)
            store(h, i, y)
            r = r + y * at(c_row, m)
    return r


@part
def _block(i_seq, block, blocks, n, kind, memory):
    """One sequence and one block of channels."""
    channels, N, time, chunk = at(n, CHANNELS), at(n, N_SIZE), at(n, TIME), at(n, CHUNK)
    u, delta, z = numbers(at(n, AT_U), kind), numbers(at(n, AT_DELTA), kind), numbers(at(n, AT_Z), kind)
    B, C, D = numbers(at(n, AT_B), kind), numbers(at(n, AT_C), kind), numbers(at(n, AT_D), kind)
    bias, output, starts = (
        numbers(at(n, AT_BIAS), kind),
        numbers(at(n, OUTPUT), kind),
        numbers(at(n, STARTS), kind),
    )
    limits = numbers(at(n, LIMITS), kind)
    low, high = at(limits, 0), at(limits, 1)
    table = shifted(integers(at(n, TABLE)), i_seq * COLUMNS)
    row, first, end, saved = at(table, 0), at(table, 1), at(table, 2), at(table, 3)
    h = numbers(memory, kind)
    step = lanes(h, ONE)
    size = N * step
    a, b_lanes, c_lanes = shifted(h, size), shifted(h, 2 * size), shifted(h, 3 * size)
    c0 = block * step
    count = min(channels - c0, step)
    own = (i_seq * channels + c0) * N
    _turned(a, shifted(numbers(at(n, AT_A), kind), c0 * N), count, N)
    if at(n, HAS_STATE):
        _turned(h, shifted(numbers(at(n, AT_STATE), kind), own), count, N)
    else:
        for m in range(N):
            store(h, m * step, zeros(h, ONE))
    b_group, c_group = channels // at(n, B_GROUPS), channels // at(n, C_GROUPS)
    last = c0 + count - 1
    gathered = c0 // b_group != last // b_group or c0 // c_group != last // c_group
    sums = zeros(h, ONE)
    for t in range(first, end):
        if chunk and (t - first) % chunk == 0:
            place = ((saved + (t - first) // chunk) * blocks + block) * size
            for m in range(N):
                store(starts, place + m * step, load(h, m * step, ONE))
        offset = (row * time + t) * channels + c0
        s = _raw(
            delta, bias, at(n, HAS_BIAS), row * at(n, DELTA_BATCH) + t * at(n, DELTA_TIME) + c0, c0, count
        )
        if at(n, SOFTPLUS):
            s = softplus(s)
        s = clamp(s, low, high)
        sums = sums + s
        x = first_lanes(u, row * at(n, U_BATCH) + t * at(n, U_TIME) + c0, count, ONE)
        b_row = shifted(B, row * at(n, B_BATCH) + t * at(n, B_TIME))
        c_row = shifted(C, row * at(n, C_BATCH) + t * at(n, C_TIME))
        if gathered:
            if t == first or at(n, B_TIME):
                _gather(b_lanes, b_row, c0, count, b_group, at(n, B_GROUP), N)
            if t == first or at(n, C_TIME):
                _gather(c_lanes, c_row, c0, count, c_group, at(n, C_GROUP), N)
        else:
            b_row, c_row = (
                shifted(b_row, c0 // b_group * at(n, B_GROUP)),
                shifted(c_row, c0 // c_group * at(n, C_GROUP)),
            )
        q = _walk(N, h, a, s, s * x, b_row, c_row, b_lanes, c_lanes, gathered)
        if at(n, WANTS_OUTPUT):
            if at(n, HAS_D):
                q = q + first_lanes(D, c0, count, ONE) * x
            if at(n, HAS_Z):
                gate = first_lanes(z, row * at(n, Z_BATCH) + t * at(n, Z_TIME) + c0, count, ONE)
                q = q * (gate * sigmoid(gate))
            put_lanes(output, offset, count, q, ONE)
    _turned_back(shifted(numbers(at(n, LAST), kind), own), h, count, N)
    if at(n, WANTS_SUMS):
        put_lanes(numbers(at(n, SUMS), kind), i_seq * channels + c0, count, sums, ONE)


def forward_memory(N: int, step: int) -> int:
    """Numbers of memory that a range of forward needs."""
    return 4 * N * step


@kernel
def forward(first, last_task, block, memory, kind):
    """Tasks (sequence, block of channels)."""
    n = integers(block)
    step = lanes(numbers(memory, kind), ONE)
    blocks = (at(n, CHANNELS) + step - 1) // step
    for task in range(first, last_task):
        _block(task // blocks, task % blocks, blocks, n, kind, memory)


# ---------------------------------------------------------------------------------------------------------------------
# backward


@part
def _again(N, h, a, s, x, b_row, c_row, b_lanes, c_lanes, gathered, states, decays):
    """``_walk``, keeping the state before the token and the decays."""
    step = lanes(h, ONE)
    r = zeros(h, ONE)
    for m in range(N):
        i = m * step
        before = load(h, i, ONE)
        decay = exp2(s * load(a, i, ONE))
        store(states, i, before)
        store(decays, i, decay)
        if gathered:
            y = decay * before + x * load(b_lanes, i, ONE)
            r = r + y * load(c_lanes, i, ONE)
        else:
            y = decay * before + x * at(b_row, m)
            r = r + y * at(c_row, m)
        store(h, i, y)
    return r


@part
def _token_back(
    n, N, g, a, s, x, dq, b_row, c_row, b_lanes, c_lanes, gathered, states, decays, d_A, d_B, d_C, sums
):  # fmt: skip
    """One token of the adjoint; dx and the decays' part of ds go to ``sums``."""
    step = lanes(g, ONE)
    want_A, want_B, want_C = at(n, WANT_A), at(n, WANT_B), at(n, WANT_C)
    dx = zeros(g, ONE)
    ds = zeros(g, ONE)
    for m in range(N):
        i = m * step
        if gathered:
            b, c = load(b_lanes, i, ONE), load(c_lanes, i, ONE)
        else:
            b, c = splat(g, at(b_row, m), ONE), splat(g, at(c_row, m), ONE)
        decay, before = load(decays, i, ONE), load(states, i, ONE)
        G = load(g, i, ONE) + dq * c
        decayed = decay * before
        if want_C:
            store(d_C, i, load(d_C, i, ONE) + dq * (decayed + x * b))
        if want_B:
            store(d_B, i, load(d_B, i, ONE) + G * x)
        dx = dx + G * b
        store(g, i, G * decay)
        # In this order: under growth the gradient may overflow where the state is zero.
        w = G * decayed
        ds = ds + w * load(a, i, ONE)
        if want_A:
            store(d_A, i, load(d_A, i, ONE) + w * s)
    store(sums, 0, dx)
    store(sums, step, ds)


@part
def _flush(lane_sums, tokens, N, target, stride, per_group, c0, count, gathered):
    """Add a chunk's gradients of B or C to ``target``, lanes added up, and clear them."""
    step = lanes(lane_sums, ONE)
    for t in range(tokens):
        place = t * stride
        rows = shifted(lane_sums, t * N * step)
        if gathered:
            for lane in range(count):
                to = place + (c0 + lane) // per_group * N
                for m in range(N):
                    put(target, to + m, at(target, to + m) + at(rows, m * step + lane))
        else:
            to = place + c0 // per_group * N
            if count < step:  # what lies in the lanes that are not there need be no number
                for m in range(N):
                    store(rows, m * step, first_lanes(rows, m * step, count, ONE))
            m = 0
            while m + step <= N:
                store(target, to + m, load(target, to + m, ONE) + totals(rows, m * step))
                m += step
            while m < N:
                put(target, to + m, at(target, to + m) + total(load(rows, m * step, ONE)))
                m += 1
        for m in range(N):
            store(rows, m * step, zeros(rows, ONE))


@part
def _prepare_back(
    n, kind, t, row, c0, count, N, h, a, b_row, c_row, b_lanes, c_lanes, gathered, states, decays, rows, d_D
):
    """One token forward again; its s, u and dq go to ``rows``, the gate's gradient to its place."""
    step = lanes(h, ONE)
    limits = numbers(at(n, BACK_LIMITS), kind)
    s = _raw(
        numbers(at(n, BACK_DELTA), kind), numbers(at(n, BACK_BIAS), kind), at(n, HAS_BIAS),
        row * at(n, DELTA_BATCH) + t * at(n, DELTA_TIME) + c0, c0, count,
    )  # fmt: skip
    if at(n, SOFTPLUS):
        s = softplus(s)
    s = clamp(s, at(limits, 0), at(limits, 1))
    u = first_lanes(numbers(at(n, BACK_U), kind), row * at(n, U_BATCH) + t * at(n, U_TIME) + c0, count, ONE)
    dq = zeros(h, ONE)
    if at(n, HAS_D_OUTPUT):
        place = numbers(at(n, D_OUTPUT), kind)
        dq = first_lanes(place, row * at(n, D_BATCH) + t * at(n, D_TIME) + c0, count, ONE)
    q = _again(N, h, a, s, s * u, b_row, c_row, b_lanes, c_lanes, gathered, states, decays)
    if at(n, HAS_Z):
        if at(n, HAS_D):
            q = q + first_lanes(numbers(at(n, BACK_D), kind), c0, count, ONE) * u
        z = first_lanes(
            numbers(at(n, BACK_Z), kind), row * at(n, Z_BATCH) + t * at(n, Z_TIME) + c0, count, ONE
        )
        gate = sigmoid(z)
        one = splat(h, at(limits, 2), ONE)
        if at(n, WANT_Z):
            offset = (row * at(n, TIME) + t) * at(n, CHANNELS) + c0
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
    d_raw = u * dx + load(sums, step, ONE) * at(limits, 4)
    raw = _raw(
        numbers(at(n, BACK_DELTA), kind), numbers(at(n, BACK_BIAS), kind), at(n, HAS_BIAS),
        row * at(n, DELTA_BATCH) + t * at(n, DELTA_TIME) + c0, c0, count,
    )  # fmt: skip
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
    size = N * step
    b_lanes, c_lanes, states = shifted(h, size), shifted(h, 2 * size), shifted(h, 3 * size)
    decays = shifted(states, chunk * size)
    lane_B = shifted(decays, chunk * size)
    lane_C = shifted(lane_B, chunk * size)
    rows = shifted(lane_C, chunk * size)
    sums = shifted(rows, 3 * chunk * step)
    held = shifted(sums, 2 * step)  # for each block A and the carried gradient
    block_first, block_last = blocks * part_index // parts, blocks * (part_index + 1) // parts
    for block in range(block_first, block_last):
        c0 = block * step
        count = min(channels - c0, step)
        a = shifted(held, (block - block_first) * 2 * size)
        _turned(a, shifted(numbers(at(n, BACK_A), kind), c0 * N), count, N)
        if at(n, HAS_D_LAST):
            place = shifted(numbers(at(n, D_LAST), kind), (i_seq * channels + c0) * N)
            _turned(shifted(a, size), place, count, N)
        else:
            for m in range(N):
                store(a, size + m * step, zeros(h, ONE))
    for i in range(0, 2 * chunk * size, step):
        store(lane_B, i, zeros(h, ONE))
    b_group, c_group = channels // at(n, B_GROUPS), channels // at(n, C_GROUPS)
    # Numbers from one token's gradient to the next; without a time axis the sequence has one.
    b_each, c_each = at(n, B_EACH), at(n, C_EACH)
    d_B, d_C = numbers(at(n, D_B), kind), numbers(at(n, D_C), kind)
    slot = part_index * at(n, SEQUENCES) + at(table, 4)
    line = (part_index * at(n, BATCH) + row) * at(n, TIME)
    b_first = (line if b_each else slot) * at(n, B_GROUPS) * N
    c_first = (line if c_each else slot) * at(n, C_GROUPS) * N
    d_B, d_C = shifted(d_B, b_first), shifted(d_C, c_first)
    for c_chunk in range((end - first + chunk - 1) // chunk - 1, -1, -1):
        t0 = first + c_chunk * chunk
        tokens = min(chunk, end - t0)
        to_B, to_C = shifted(d_B, t0 * b_each), shifted(d_C, t0 * c_each)
        for block in range(block_first, block_last):
            c0 = block * step
            count = min(channels - c0, step)
            last = c0 + count - 1
            gathered = c0 // b_group != last // b_group or c0 // c_group != last // c_group
            a = shifted(held, (block - block_first) * 2 * size)
            place = ((saved + c_chunk) * blocks + block) * size
            for m in range(N):
                store(h, m * step, load(starts, place + m * step, ONE))
            lane_row = (i_seq * blocks + block) * step
            d_A = shifted(numbers(at(n, D_A), kind), lane_row * N)
            d_D, d_bias = numbers(at(n, D_D), kind), numbers(at(n, D_BIAS), kind)
            for t in range(tokens):
                b_row = shifted(B, row * at(n, B_BATCH) + (t0 + t) * at(n, B_TIME))
                c_row = shifted(C, row * at(n, C_BATCH) + (t0 + t) * at(n, C_TIME))
                if gathered:
                    _gather(b_lanes, b_row, c0, count, b_group, at(n, B_GROUP), N)
                    _gather(c_lanes, c_row, c0, count, c_group, at(n, C_GROUP), N)
                else:
                    b_row, c_row = (
                        shifted(b_row, c0 // b_group * at(n, B_GROUP)),
                        shifted(c_row, c0 // c_group * at(n, C_GROUP)),
                    )
                _prepare_back(
                    n, kind, t0 + t, row, c0, count, N, h, a, b_row, c_row, b_lanes, c_lanes, gathered,
                    shifted(states, t * size), shifted(decays, t * size), shifted(rows, 3 * t * step),
                    shifted(d_D, lane_row),
                )  # fmt: skip
            for t in range(tokens - 1, -1, -1):
                b_row = shifted(B, row * at(n, B_BATCH) + (t0 + t) * at(n, B_TIME))
                c_row = shifted(C, row * at(n, C_BATCH) + (t0 + t) * at(n, C_TIME))
                if gathered:
                    _gather(b_lanes, b_row, c0, count, b_group, at(n, B_GROUP), N)
                    _gather(c_lanes, c_row, c0, count, c_group, at(n, C_GROUP), N)
                else:
                    b_row, c_row = (
                        shifted(b_row, c0 // b_group * at(n, B_GROUP)),
                        shifted(c_row, c0 // c_group * at(n, C_GROUP)),
                    )
                row_t = shifted(rows, 3 * t * step)
                s = load(row_t, 0, ONE)
                _token_back(
                    n, N, shifted(a, size), a, s, s * load(row_t, step, ONE), load(row_t, 2 * step, ONE), b_row, c_row,
                    b_lanes, c_lanes, gathered, shifted(states, t * size), shifted(decays, t * size), d_A,
                    shifted(lane_B, t * size), shifted(lane_C, t * size), sums,
                )  # fmt: skip
                _finish_back(n, kind, t0 + t, row, c0, count, row_t, sums, shifted(d_bias, lane_row))
            # The sums wait for the next block only where that is a whole one and lies in the same groups as this one.
            following = c0 + 2 * step - 1
            ends = block + 1 == block_last or following >= channels
            if (
                ends
                or gathered
                or following // b_group != c0 // b_group
                or following // c_group != c0 // c_group
            ):
                if at(n, WANT_B):
                    _flush(lane_B, tokens, N, to_B, b_each, b_group, c0, count, gathered)
                if at(n, WANT_C):
                    _flush(lane_C, tokens, N, to_C, c_each, c_group, c0, count, gathered)
    if at(n, WANT_STATE):
        for block in range(block_first, block_last):
            c0 = block * step
            g = shifted(held, (block - block_first) * 2 * size + size)
            place = shifted(numbers(at(n, D_STATE), kind), (i_seq * channels + c0) * N)
            _turned_back(place, g, min(channels - c0, step), N)


def backward_memory(N: int, blocks: int, chunk: int, step: int) -> int:
    """Numbers of memory that a range of backward needs; ``blocks`` is the most of one part."""
    return step * (N * (3 + 4 * chunk + 2 * blocks) + 3 * chunk + 2)


@kernel
def backward(first, last_task, block, memory, kind):
    """Tasks (sequence, part of the blocks of channels)."""
    n = integers(block)
    step = lanes(numbers(memory, kind), ONE)
    blocks = (at(n, CHANNELS) + step - 1) // step
    parts = at(n, PARTS)
    for task in range(first, last_task):
        _part_back(task // parts, task % parts, blocks, n, kind, memory)
