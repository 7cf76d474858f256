"""The selective scan backward, compiled: two rows of the state in registers through a whole chunk of tokens.

A task is a sequence and a part of its blocks of channels (a block is a register of them). For each chunk, from the
last to the first, and each block, two rows at a time go forward once more from the state saved at the chunk's start,
and leave their decays and decayed states in the first-level cache; then their adjoint walks back. The gradients of
B and C are summed lane by lane over the blocks before lanes are added up. Symbols as in ``selective_kernels``.
"""

from __future__ import annotations

from scanfield_numpy.compiling import kernel, part
from scanfield_numpy.elementary import clamp, exp2, sigmoid, softplus, within
from scanfield_numpy.layout import COLUMNS
from scanfield_numpy.selective_kernels import (
    B_BATCH,
    B_GROUP,
    B_GROUPS,
    B_TIME,
    C_BATCH,
    C_GROUP,
    C_GROUPS,
    C_TIME,
    CHANNELS,
    CHUNK,
    DELTA_BATCH,
    DELTA_TIME,
    HAS_BIAS,
    HAS_D,
    HAS_Z,
    N_SIZE,
    SOFTPLUS,
    TIME,
    U_BATCH,
    U_TIME,
    Z_BATCH,
    Z_TIME,
    gather,
    raw,
    turned,
    turned_back,
)
from scanfield_numpy.stacked import NUMBERS, REGISTERS_OF, folded, repeated, spread
from scanfield_numpy.vector import (
    ONE,
    TWO,
    at,
    fetch,
    fetch_own,
    first_lanes,
    integers,
    lanes,
    least,
    load,
    numbers,
    put,
    put_past_cache,
    settle,
    shifted,
    splat,
    store,
    totals,
    zero,
    zeros,
)

# Places in the kernel's block of integers behind those that it has in common with forward.
(
    PARTS, SEQUENCES, BATCH, D_BATCH, D_TIME, B_EACH, C_EACH, HAS_D_OUTPUT, HAS_D_LAST, WANT_U, WANT_DELTA, WANT_Z,
    WANT_STATE, WANT_A, WANT_B, WANT_C, PAST_CACHE,
) = range(22, 22 + 17)  # fmt: skip
(
    TABLE, LIMITS, AT_U, AT_DELTA, AT_A, AT_B, AT_C, AT_D, AT_Z, AT_BIAS, STARTS,
    D_OUTPUT, D_LAST, D_U, D_DELTA, D_A, D_B, D_C, D_D, D_Z, D_BIAS, D_STATE,
) = range(39, 39 + 22)  # fmt: skip

# What a token's channels need and get, a register each: s, s u, u, the cotangent of the read-out, the gradients of s u
# and (by the decays) of s, the read-out itself and the gate's gradient for a read-out of 1. The last two only with z.
S, X, U, DQ, DX, DS, READ, DZ, PER_TOKEN = range(9)
# Numbers that keep the gradients of B and C out of each other's places in the first-level cache.
_APART = 2
# Registers to a row whose tokens lie far apart.
_FAR = 16


@part
def _prepare(n, kind, t, row, c0, count, rows, d_D):
    """One token's s, u and cotangent, to ``rows``."""
    step = lanes(rows, ONE)
    limits = numbers(at(n, LIMITS), kind)
    s = raw(
        numbers(at(n, AT_DELTA), kind), numbers(at(n, AT_BIAS), kind), at(n, HAS_BIAS),
        row * at(n, DELTA_BATCH) + t * at(n, DELTA_TIME) + c0, c0, count,
    )  # fmt: skip
    if at(n, SOFTPLUS):
        s = softplus(s)
    s = clamp(s, at(limits, 0), at(limits, 1))
    u = first_lanes(numbers(at(n, AT_U), kind), row * at(n, U_BATCH) + t * at(n, U_TIME) + c0, count, ONE)
    dq = zeros(rows, ONE)
    if at(n, HAS_D_OUTPUT):
        place = numbers(at(n, D_OUTPUT), kind)
        dq = first_lanes(place, row * at(n, D_BATCH) + t * at(n, D_TIME) + c0, count, ONE)
    if at(n, HAS_Z):
        z = first_lanes(numbers(at(n, AT_Z), kind), row * at(n, Z_BATCH) + t * at(n, Z_TIME) + c0, count, ONE)
        gate = sigmoid(z)
        one = splat(rows, at(limits, 2), ONE)
        store(rows, DZ * step, dq * gate * (one + z * (one - gate)))
        store(rows, READ * step, zeros(rows, ONE))
        dq = dq * (z * gate)
    store(rows, S * step, s)
    store(rows, X * step, s * u)
    store(rows, U * step, u)
    store(rows, DQ * step, dq)
    store(rows, DX * step, zeros(rows, ONE))
    store(rows, DS * step, zeros(rows, ONE))
    store(d_D, 0, load(d_D, 0, ONE) + dq * u)


@part
def _ask(n, kind, t, row, c0):
    """Ask for what one token of the next block will read and write: the rows of a chunk lie far apart."""
    fetch(numbers(at(n, AT_U), kind), row * at(n, U_BATCH) + t * at(n, U_TIME) + c0)
    fetch(numbers(at(n, AT_DELTA), kind), row * at(n, DELTA_BATCH) + t * at(n, DELTA_TIME) + c0)
    if at(n, HAS_D_OUTPUT):
        fetch(numbers(at(n, D_OUTPUT), kind), row * at(n, D_BATCH) + t * at(n, D_TIME) + c0)
    if at(n, HAS_Z):
        fetch(numbers(at(n, AT_Z), kind), row * at(n, Z_BATCH) + t * at(n, Z_TIME) + c0)
    if not at(n, PAST_CACHE):
        offset = (row * at(n, TIME) + t) * at(n, CHANNELS) + c0
        if at(n, WANT_U):
            fetch_own(numbers(at(n, D_U), kind), offset)
        if at(n, WANT_DELTA):
            fetch_own(numbers(at(n, D_DELTA), kind), offset)
        if at(n, WANT_Z):
            fetch_own(numbers(at(n, D_Z), kind), offset)


@part
def _again(tag, way, n, kind, row_b, next_t, next_c0, m, tokens, h, a, rows, b, b_each, decays, decayed):
    """The rows of the state from ``m`` on, forward once more: each token's decays and decayed state.

    The first rows of a block ask for what the next one (tokens from ``next_t``, channels from ``next_c0``) needs.
    """
    step, size = lanes(rows, ONE), lanes(rows, tag)
    state, powers = load(h, m * step, tag), load(a, m * step, tag)
    asks = m == 0 and at(n, CHANNELS) >= _FAR * step  # of narrow rows the hardware brings what lies beside
    for t in range(tokens):
        if asks:
            _ask(n, kind, next_t + t, row_b, next_c0)
        row = shifted(rows, t * PER_TOKEN * step)
        decay = exp2(repeated(load(row, S * step, ONE), tag) * powers)
        kept = decay * state
        store(decays, t * size, decay)
        store(decayed, t * size, kept)
        state = kept + repeated(load(row, X * step, ONE), tag) * spread(b, t * b_each + m, tag, way)


@part
def _read(tag, way, m, tokens, rows, b, b_each, c, c_each, decayed):
    """What these rows add to the read-out."""
    step, size = lanes(rows, ONE), lanes(rows, tag)
    for t in range(tokens):
        row = shifted(rows, t * PER_TOKEN * step)
        x = repeated(load(row, X * step, ONE), tag)
        state = load(decayed, t * size, tag) + x * spread(b, t * b_each + m, tag, way)
        read = folded(load(row, READ * step, ONE), state, spread(c, t * c_each + m, tag, way), tag)
        store(row, READ * step, read)


@part
def _back(tag, way, m, tokens, g, a, d_A, rows, b, b_each, c, c_each, decays, decayed, lane_B, lane_C):
    """The adjoint of these rows, from the last token to the first."""
    step, size = lanes(rows, ONE), lanes(rows, tag)
    G, powers, sums = load(g, m * step, tag), load(a, m * step, tag), load(d_A, m * step, tag)
    for t in range(tokens - 1, -1, -1):
        row = shifted(rows, t * PER_TOKEN * step)
        s, x = repeated(load(row, S * step, ONE), tag), repeated(load(row, X * step, ONE), tag)
        dq = repeated(load(row, DQ * step, ONE), tag)
        b_t, c_t = spread(b, t * b_each + m, tag, way), spread(c, t * c_each + m, tag, way)
        decay, kept = load(decays, t * size, tag), load(decayed, t * size, tag)
        from_B, from_C = load(lane_B, t * size, tag), load(lane_C, t * size, tag)
        G = G + dq * c_t
        store(lane_C, t * size, from_C + dq * (kept + x * b_t))
        store(lane_B, t * size, from_B + G * x)
        store(row, DX * step, folded(load(row, DX * step, ONE), G, b_t, tag))
        # In this order: under growth the gradient may overflow where the state is zero.
        w = G * kept
        store(row, DS * step, folded(load(row, DS * step, ONE), w, powers, tag))
        sums = sums + w * s
        G = G * decay
    store(g, m * step, G)
    store(d_A, m * step, sums)


@part
def _rows(
    tag, way, n, kind, row_b, next_t, next_c0, m, tokens, h, a, d_A, rows, b, b_each, c, c_each, scratch, lane_B, lane_C,
):  # fmt: skip
    """One block's rows from ``m`` on through a chunk, forth and back; the carried gradient lies behind ``a``."""
    step, chunk = lanes(rows, ONE), at(n, CHUNK)
    g = shifted(a, at(n, N_SIZE) * step)
    decayed = shifted(scratch, chunk * lanes(rows, tag))
    lane_B, lane_C = shifted(lane_B, m * chunk * step), shifted(lane_C, m * chunk * step)
    _again(tag, way, n, kind, row_b, next_t, next_c0, m, tokens, h, a, rows, b, b_each, scratch, decayed)
    if at(n, WANT_Z):
        _read(tag, way, m, tokens, rows, b, b_each, c, c_each, decayed)
    _back(tag, way, m, tokens, g, a, d_A, rows, b, b_each, c, c_each, scratch, decayed, lane_B, lane_C)


@part
def _finish(n, kind, t, row, c0, count, rows, d_bias):
    """A token's gradients of u, delta and z."""
    step = lanes(rows, ONE)
    limits = numbers(at(n, LIMITS), kind)
    offset = (row * at(n, TIME) + t) * at(n, CHANNELS) + c0
    past = at(n, PAST_CACHE)
    s, u, dx = load(rows, S * step, ONE), load(rows, U * step, ONE), load(rows, DX * step, ONE)
    D = zeros(rows, ONE)
    if at(n, HAS_D):
        D = first_lanes(numbers(at(n, AT_D), kind), c0, count, ONE)
    if at(n, WANT_U):
        du = s * dx
        if at(n, HAS_D):
            du = du + D * load(rows, DQ * step, ONE)
        put_past_cache(numbers(at(n, D_U), kind), offset, count, du, past)
    if at(n, WANT_Z):
        read = load(rows, READ * step, ONE)
        if at(n, HAS_D):
            read = read + D * u
        put_past_cache(numbers(at(n, D_Z), kind), offset, count, load(rows, DZ * step, ONE) * read, past)
    d_raw = u * dx + load(rows, DS * step, ONE) * at(limits, 4)
    if at(n, SOFTPLUS) or at(limits, 3) != zero(rows):
        given = raw(
            numbers(at(n, AT_DELTA), kind), numbers(at(n, AT_BIAS), kind), at(n, HAS_BIAS),
            row * at(n, DELTA_BATCH) + t * at(n, DELTA_TIME) + c0, c0, count,
        )  # fmt: skip
        unclamped = given
        if at(n, SOFTPLUS):
            unclamped = softplus(given)
        if at(limits, 3) != zero(rows):
            d_raw = within(unclamped, d_raw, at(limits, 0), at(limits, 1))
        if at(n, SOFTPLUS):
            d_raw = d_raw * sigmoid(given)
    store(d_bias, 0, load(d_bias, 0, ONE) + d_raw)
    if at(n, WANT_DELTA):
        put_past_cache(numbers(at(n, D_DELTA), kind), offset, count, d_raw, past)


@part
def _flush_pair(lane_sums, m, tokens, target, each, count, spare):
    """Add a chunk's gradients of B or C, for two rows from ``m`` on, to ``target``, lanes added up, and clear them."""
    step = lanes(lane_sums, ONE)
    for i in range(0, 2 * tokens, step):
        many = least(step, 2 * tokens - i)
        if count < step:  # what lies in the lanes that are not there need be no number
            for j in range(many):
                store(lane_sums, (i + j) * step, first_lanes(lane_sums, (i + j) * step, count, ONE))
        # Beyond the last token lie sums that were cleared, or other rows', which are not looked at.
        store(spare, 0, totals(lane_sums, i * step))
        for j in range(many):
            to = (i + j) // 2 * each + m + (i + j) % 2
            put(target, to, at(target, to) + at(spare, j))
            store(lane_sums, (i + j) * step, zeros(lane_sums, ONE))


@part
def _flush(lane_sums, tokens, chunk, N, pairs, target, each, per_group, c0, count, spare):
    """All rows' gradients of B or C: the first ``pairs`` two by two, the others lane by lane, each to its group."""
    step = lanes(lane_sums, ONE)
    own = shifted(target, c0 // per_group * N)
    for m in range(0, pairs, 2):
        _flush_pair(shifted(lane_sums, m * chunk * step), m, tokens, own, each, count, spare)
    for m in range(pairs, N):
        for t in range(tokens):
            sums = shifted(lane_sums, (m * chunk + t) * step)
            for lane in range(count):
                to = t * each + (c0 + lane) // per_group * N + m
                put(target, to, at(target, to) + at(sums, lane))
            store(sums, 0, zeros(sums, ONE))


@part
def _part_back(i_seq, part_index, blocks, n, kind, memory):
    """One sequence and one part of the blocks of channels."""
    channels, N, chunk, parts = at(n, CHANNELS), at(n, N_SIZE), at(n, CHUNK), at(n, PARTS)
    starts = numbers(at(n, STARTS), kind)
    table = shifted(integers(at(n, TABLE)), i_seq * COLUMNS)
    row, first, end, saved = at(table, 0), at(table, 1), at(table, 2), at(table, 3)
    B = shifted(numbers(at(n, AT_B), kind), row * at(n, B_BATCH))
    C = shifted(numbers(at(n, AT_C), kind), row * at(n, C_BATCH))
    b_time, c_time = at(n, B_TIME), at(n, C_TIME)
    spare = numbers(memory, kind)
    step = lanes(spare, ONE)
    size = N * step
    scratch = shifted(spare, step)
    rows = shifted(scratch, 4 * chunk * step)
    lane_B = shifted(rows, PER_TOKEN * chunk * step)
    lane_C = shifted(lane_B, (chunk * N + _APART) * step)
    b_lanes = shifted(lane_C, chunk * size)
    c_lanes = shifted(b_lanes, chunk * size)
    held = shifted(c_lanes, chunk * size)  # for each block A and the carried gradient
    block_first, block_last = blocks * part_index // parts, blocks * (part_index + 1) // parts
    for block in range(block_first, block_last):
        c0 = block * step
        count = least(channels - c0, step)
        a = shifted(held, (block - block_first) * 2 * size)
        turned(a, shifted(numbers(at(n, AT_A), kind), c0 * N), count, N)
        if at(n, HAS_D_LAST):
            place = shifted(numbers(at(n, D_LAST), kind), (i_seq * channels + c0) * N)
            turned(shifted(a, size), place, count, N)
        else:
            for m in range(N):
                store(a, size + m * step, zeros(a, ONE))
    for i in range(0, chunk * size, step):
        store(lane_B, i, zeros(lane_B, ONE))
        store(lane_C, i, zeros(lane_C, ONE))
    b_group, c_group = channels // at(n, B_GROUPS), channels // at(n, C_GROUPS)
    # Numbers from one token's gradient to the next; without a time axis the sequence has one.
    b_each, c_each = at(n, B_EACH), at(n, C_EACH)
    slot = part_index * at(n, SEQUENCES) + at(table, 4)
    line = (part_index * at(n, BATCH) + row) * at(n, TIME)
    d_B = shifted(numbers(at(n, D_B), kind), (line if b_each else slot) * at(n, B_GROUPS) * N)
    d_C = shifted(numbers(at(n, D_C), kind), (line if c_each else slot) * at(n, C_GROUPS) * N)
    d_A, d_D, d_bias = numbers(at(n, D_A), kind), numbers(at(n, D_D), kind), numbers(at(n, D_BIAS), kind)
    for c_chunk in range((end - first + chunk - 1) // chunk - 1, -1, -1):
        t0 = first + c_chunk * chunk
        tokens = least(chunk, end - t0)
        for block in range(block_first, block_last):
            c0 = block * step
            count = least(channels - c0, step)
            last = c0 + count - 1
            gathered = c0 // b_group != last // b_group or c0 // c_group != last // c_group
            a = shifted(held, (block - block_first) * 2 * size)
            h = shifted(starts, ((saved + c_chunk) * blocks + block) * size)
            lane_row = (i_seq * blocks + block) * step
            next_c0, next_t = c0 + step, t0
            if block + 1 == block_last:
                next_c0, next_t = block_first * step, t0 - chunk
            for t in range(tokens):
                token = shifted(rows, t * PER_TOKEN * step)
                _prepare(n, kind, t0 + t, row, c0, count, token, shifted(d_D, lane_row))
            b, c = shifted(B, t0 * b_time), shifted(C, t0 * c_time)
            own = shifted(d_A, lane_row * N)
            pairs = 0
            if gathered:
                for t in range(tokens):
                    b_to, c_to = shifted(b_lanes, t * size), shifted(c_lanes, t * size)
                    gather(b_to, shifted(b, t * b_time), c0, count, b_group, at(n, B_GROUP), N)
                    gather(c_to, shifted(c, t * c_time), c0, count, c_group, at(n, C_GROUP), N)
            else:
                pairs = N - N % 2
                b = shifted(b, c0 // b_group * at(n, B_GROUP))
                c = shifted(c, c0 // c_group * at(n, C_GROUP))
                for m in range(0, pairs, 2):
                    _rows(
                        TWO, NUMBERS, n, kind, row, next_t, next_c0, m, tokens, h, a, own, rows, b, b_time, c, c_time,
                        scratch, lane_B, lane_C,
                    )  # fmt: skip
                if N % 2:
                    for t in range(tokens):
                        place = t * size + pairs * step
                        store(b_lanes, place, splat(b_lanes, at(b, t * b_time + pairs), ONE))
                        store(c_lanes, place, splat(c_lanes, at(c, t * c_time + pairs), ONE))
            for m in range(pairs, N):
                _rows(
                    ONE, REGISTERS_OF, n, kind, row, next_t, next_c0, m, tokens, h, a, own, rows, b_lanes, N, c_lanes, N,
                    scratch, lane_B, lane_C,
                )  # fmt: skip
            for t in range(tokens):
                token = shifted(rows, t * PER_TOKEN * step)
                _finish(n, kind, t0 + t, row, c0, count, token, shifted(d_bias, lane_row))
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
                    to = shifted(d_B, t0 * b_each)
                    _flush(lane_B, tokens, chunk, N, pairs, to, b_each, b_group, c0, count, spare)
                if at(n, WANT_C):
                    to = shifted(d_C, t0 * c_each)
                    _flush(lane_C, tokens, chunk, N, pairs, to, c_each, c_group, c0, count, spare)
    if at(n, WANT_STATE):
        for block in range(block_first, block_last):
            c0 = block * step
            g = shifted(held, (block - block_first) * 2 * size + size)
            place = shifted(numbers(at(n, D_STATE), kind), (i_seq * channels + c0) * N)
            turned_back(place, g, least(channels - c0, step), N)


def backward_memory(N: int, blocks: int, chunk: int, step: int) -> int:
    """Numbers of memory that a range of backward needs; ``blocks`` is the most of one part."""
    return step * (1 + step + (4 + PER_TOKEN) * chunk + N * (4 * chunk + 2 * blocks) + _APART)


@kernel
def backward(first, last_task, block, memory, kind):
    """Tasks (sequence, part of the blocks of channels)."""
    n = integers(block)
    step = lanes(numbers(memory, kind), ONE)
    blocks = (at(n, CHANNELS) + step - 1) // step
    parts = at(n, PARTS)
    for task in range(first, last_task):
        _part_back(task // parts, task % parts, blocks, n, kind, memory)
    settle()
