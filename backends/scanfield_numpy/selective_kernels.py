"""The selective scan, compiled: a register of channels at a time, the N rows of their state in cache.

A task is a sequence and a block of channels; backward stands in ``selective_backward``. Symbols as in Gu and Dao,
"Mamba", arXiv 2312.00752, equation 2: h_t = exp(s_t A) h_(t-1) + s_t u_t B_t. A comes multiplied by log2(e), since a
power of 2 is the cheaper exponential.
"""

from __future__ import annotations

from scanfield_numpy.compiling import kernel, part
from scanfield_numpy.elementary import clamp, exp2, sigmoid, softplus
from scanfield_numpy.layout import COLUMNS
from scanfield_numpy.turning import square
from scanfield_numpy.vector import (
    ONE,
    at,
    fetch_own,
    first_lanes,
    integers,
    lanes,
    least,
    load,
    numbers,
    put,
    put_lanes,
    shifted,
    store,
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
    TABLE, LIMITS, AT_U, AT_DELTA, AT_A, AT_B, AT_C, AT_D, AT_Z, AT_BIAS, AT_STATE, OUTPUT, LAST, STARTS, SUMS,
) = range(25, 25 + 15)  # fmt: skip


@part
def turned(to, place, count, N):
    """Rows of N numbers, one a channel, as N rows of lanes; zeros in the lanes that are not there."""
    step = lanes(to, ONE)
    done = 0
    if count == step:
        done = N - N % step
        for m in range(0, done, step):
            square(shifted(place, m), N, shifted(to, m * step), step)
    for m in range(done, N):
        store(to, m * step, zeros(to, ONE))
    for lane in range(count):
        for m in range(done, N):
            put(to, m * step + lane, at(place, lane * N + m))


@part
def turned_back(place, source, count, N):
    """The rows that ``turned`` made, as they were."""
    step = lanes(source, ONE)
    done = 0
    if count == step:
        done = N - N % step
        for m in range(0, done, step):
            square(shifted(source, m * step), step, shifted(place, m), N)
    for lane in range(count):
        for m in range(done, N):
            put(place, lane * N + m, at(source, m * step + lane))


@part
def gather(to, place, c0, count, per_group, by_group, N):
    """A token's B or C for channels of several groups, as N rows of lanes."""
    step = lanes(to, ONE)
    for m in range(N):
        store(to, m * step, zeros(to, ONE))
    for lane in range(count):
        row = (c0 + lane) // per_group * by_group
        for m in range(N):
            put(to, m * step + lane, at(place, row + m))


@part
def raw(delta, bias, has_bias, offset, c0, count):
    """A token's delta before softplus."""
    x = first_lanes(delta, offset, count, ONE)
    if has_bias:
        x = x + first_lanes(bias, c0, count, ONE)
    return x


@part
def _tokens(n, kind, row, first, end, c0, count, h, sums, gathered):
    """Some tokens of a block: the state moves on, and outputs are written; the steps are added to ``sums``."""
    channels, N = at(n, CHANNELS), at(n, N_SIZE)
    step = lanes(h, ONE)
    size = N * step
    a, b_lanes, c_lanes = shifted(h, size), shifted(h, 2 * size), shifted(h, 3 * size)
    u_time, delta_time, z_time = at(n, U_TIME), at(n, DELTA_TIME), at(n, Z_TIME)
    b_time, c_time = at(n, B_TIME), at(n, C_TIME)
    u = shifted(numbers(at(n, AT_U), kind), row * at(n, U_BATCH) + c0)
    delta = shifted(numbers(at(n, AT_DELTA), kind), row * at(n, DELTA_BATCH) + c0)
    z = shifted(numbers(at(n, AT_Z), kind), row * at(n, Z_BATCH) + c0)
    B = shifted(numbers(at(n, AT_B), kind), row * at(n, B_BATCH))
    C = shifted(numbers(at(n, AT_C), kind), row * at(n, C_BATCH))
    output = shifted(numbers(at(n, OUTPUT), kind), row * at(n, TIME) * channels + c0)
    bias = numbers(at(n, AT_BIAS), kind)
    limits = numbers(at(n, LIMITS), kind)
    low, high = at(limits, 0), at(limits, 1)
    has_bias, soft, has_D, has_z = at(n, HAS_BIAS), at(n, SOFTPLUS), at(n, HAS_D), at(n, HAS_Z)
    wants_output = at(n, WANTS_OUTPUT)
    D = zeros(h, ONE)
    if has_D:
        D = first_lanes(numbers(at(n, AT_D), kind), c0, count, ONE)
    b_group, c_group = channels // at(n, B_GROUPS), channels // at(n, C_GROUPS)
    if not gathered:
        B, C = shifted(B, c0 // b_group * at(n, B_GROUP)), shifted(C, c0 // c_group * at(n, C_GROUP))
    for t in range(first, end):
        s = raw(delta, bias, has_bias, t * delta_time, c0, count)
        if soft:
            s = softplus(s)
        s = clamp(s, low, high)
        sums = sums + s
        x = first_lanes(u, t * u_time, count, ONE)
        entering = s * x
        b, c = shifted(B, t * b_time), shifted(C, t * c_time)
        q = zeros(h, ONE)
        if gathered:
            if t == first or b_time:
                gather(b_lanes, b, c0, count, b_group, at(n, B_GROUP), N)
            if t == first or c_time:
                gather(c_lanes, c, c0, count, c_group, at(n, C_GROUP), N)
            for m in range(N):
                i = m * step
                y = exp2(s * load(a, i, ONE)) * load(h, i, ONE) + entering * load(b_lanes, i, ONE)
                store(h, i, y)
                q = q + y * load(c_lanes, i, ONE)
        else:
            for m in range(N):
                i = m * step
                y = exp2(s * load(a, i, ONE)) * load(h, i, ONE) + entering * at(b, m)
                store(h, i, y)
                q = q + y * at(c, m)
        if wants_output:
            if has_D:
                q = q + D * x
            if has_z:
                gate = first_lanes(z, t * z_time, count, ONE)
                q = q * (gate * sigmoid(gate))
            put_lanes(output, t * channels, count, q, ONE)
    return sums


@part
def _block(i_seq, block, blocks, n, kind, memory):
    """One sequence and one block of channels."""
    channels, N, chunk = at(n, CHANNELS), at(n, N_SIZE), at(n, CHUNK)
    starts = numbers(at(n, STARTS), kind)
    table = shifted(integers(at(n, TABLE)), i_seq * COLUMNS)
    row, first, end, saved = at(table, 0), at(table, 1), at(table, 2), at(table, 3)
    h = numbers(memory, kind)
    step = lanes(h, ONE)
    size = N * step
    c0 = block * step
    count = least(channels - c0, step)
    own = (i_seq * channels + c0) * N
    turned(shifted(h, size), shifted(numbers(at(n, AT_A), kind), c0 * N), count, N)
    if at(n, HAS_STATE):
        turned(h, shifted(numbers(at(n, AT_STATE), kind), own), count, N)
    else:
        for m in range(N):
            store(h, m * step, zeros(h, ONE))
    b_group, c_group = channels // at(n, B_GROUPS), channels // at(n, C_GROUPS)
    last = c0 + count - 1
    gathered = c0 // b_group != last // b_group or c0 // c_group != last // c_group
    sums = zeros(h, ONE)
    t = first
    while t < end:
        until = end
        if chunk:
            place = ((saved + (t - first) // chunk) * blocks + block) * size
            for m in range(N):
                store(starts, place + m * step, load(h, m * step, ONE))
                fetch_own(starts, place + blocks * size + m * step)  # the next chunk's, far from here
            until = least(end, t + chunk)
        sums = _tokens(n, kind, row, t, until, c0, count, h, sums, gathered)
        t = until
    turned_back(shifted(numbers(at(n, LAST), kind), own), h, count, N)
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
