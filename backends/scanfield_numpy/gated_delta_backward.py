"""The gated delta rule backward, compiled: four tokens in two passes over the carried gradient.

Notation of ``gated_delta_quad``; S is the state at a quad's start, dS the gradient of the state at its end, do_j the
gradient of an output and dup_j that of an update. Per quad, from the last to the first,

    dup_j = (G_4j k_j)^T dS + sum_{i>=j} (q_i . G_ij k_j) do_i - sum_{i>j} (e_i . G_ij k_j) dup_i
    dS_before = D_4 dS + sum_j (q_j D_j) do_j^T - (e_j D_j) dup_j^T

and all other gradients follow, without a division and without a difference of large numbers, from the products S do_j,
S dup_j and dS up_j, from the sums over columns of S * dS, and from the products of the updates with the do and dup.

The lanes of a vector are key rows, so that only the first product of dup crosses lanes. A task is a sequence and a query
head; one whose gradients are not all finite says so. The states at the quads' starts are computed once more from the one
saved at the chunk's start, for some columns (a *panel*) at a time.
"""

from __future__ import annotations

from scanfield_numpy import turning
from scanfield_numpy.addressing import offset_of
from scanfield_numpy.compiling import kernel, part
from scanfield_numpy.gated_delta_quad import (
    ADDRESSES,
    B_WIDTH,
    CHUNK,
    COMBINED,
    ERASE,
    ERASE_PAIRS,
    ERASE_STEPS,
    ERASE_VECTOR,
    FLAGS,
    G_WIDTH,
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
    ONE,
    at,
    first_lanes,
    integers,
    lanes,
    least,
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

HAS_D_OUTPUT, HAS_D_LAST, WANT_Q, WANT_K, WANT_V, WANT_G, WANT_B, WANT_W, WANT_STATE, PANEL = range(
    FLAGS, FLAGS + 10
)
STARTS, UPDATES, D_OUTPUT, D_LAST, D_QUERY, D_KEY, D_VALUE, D_DECAY, D_ERASE, D_WRITE, D_STATE, ODD = range(
    ADDRESSES, ADDRESSES + 12
)

# Of a column: do, dup and up of each token of a quad. Of a row: the sums S do, S dup, dS up of each token, and of S * dS;
# then the gradients of q, e, k and the log decay of each token.
COLUMN, ROW = 3 * QUAD, 4 * QUAD
# Products of decays, and of decays and keys, of a row.
WEIGHTS = QUAD + ERASE_PAIRS


@part
def _turn_in(source, K, columns, V, to, width, square):
    """Some columns of rows of V to tiles [register of rows][column][lane], zeros where there are none."""
    step = lanes(to, ONE)
    for first in range(0, K, step):
        for o in range(0, columns, step):
            for i in range(step):
                x = zeros(to, ONE)
                if first + i < K:
                    x = first_lanes(source, (first + i) * V + o, columns - o, ONE)
                store(square, i * step, x)
            turning.square(square, step, shifted(to, first * width + o * step), step)


@part
def _turn_out(source, K, columns, V, to, width, square):
    """The way back."""
    step = lanes(source, ONE)
    for first in range(0, K, step):
        for o in range(0, columns, step):
            turning.square(shifted(source, first * width + o * step), step, square, step)
            for i in range(least(step, K - first)):
                put_lanes(to, (first + i) * V + o, columns - o, load(square, i * step, ONE), ONE)


@part
def _rebuild(tiles, width, combined, columns, S, to):
    """The state at the next quad's start."""
    step = lanes(S, ONE)
    for i in range(tiles):
        c = shifted(combined, i * COMBINED * step)
        D, k1, k2 = load(c, 0, ONE), load(c, step, ONE), load(c, 2 * step, ONE)
        k3, k4 = load(c, 3 * step, ONE), load(c, 4 * step, ONE)
        x, y = shifted(S, i * width * step), shifted(to, i * width * step)
        for o in range(0, width, step):
            for lane in range(step):
                u = shifted(columns, o * COLUMN + 2 * QUAD * step + lane)
                s = load(x, (o + lane) * step, ONE) * D
                s = s + k1 * at(u, 0)
                s = s + k2 * at(u, step)
                s = s + k3 * at(u, 2 * step)
                s = s + k4 * at(u, 3 * step)
                store(y, (o + lane) * step, s)


@part
def _updates_back(tiles, width, whole, combined, pairs, columns, dS, partial, dots):
    """dup of a quad's tokens, and the products of its updates with do and dup. ``whole`` are all columns of dS."""
    step = lanes(dS, ONE)
    for o in range(0, width, step):
        for lane in range(0, step, 2):
            z = zeros(dS, ONE)
            a1, a2, a3, a4, b1, b2, b3, b4 = z, z, z, z, z, z, z, z
            for i in range(tiles):
                c = shifted(combined, (i * COMBINED + 1) * step)
                k1, k2, k3, k4 = (
                    load(c, 0, ONE),
                    load(c, step, ONE),
                    load(c, 2 * step, ONE),
                    load(c, 3 * step, ONE),
                )
                place = (i * whole + o + lane) * step
                a, b = load(dS, place, ONE), load(dS, place + step, ONE)
                a1, a2, a3, a4 = a1 + a * k1, a2 + a * k2, a3 + a * k3, a4 + a * k4
                b1, b2, b3, b4 = b1 + b * k1, b2 + b * k2, b3 + b * k3, b4 + b * k4
            to = shifted(partial, lane * step)
            size = step * step
            store(to, 0, a1)
            store(to, size, a2)
            store(to, 2 * size, a3)
            store(to, 3 * size, a4)
            store(to, step, b1)
            store(to, size + step, b2)
            store(to, 2 * size + step, b3)
            store(to, 3 * size + step, b4)
        x = shifted(columns, o * COLUMN)
        for j in range(QUAD - 1, -1, -1):
            d_up = totals(partial, j * step * step)
            for i in range(j, QUAD):
                d_up = d_up + load(x, i * step, ONE) * at(pairs, ERASE_PAIRS + i * (i + 1) // 2 + j)
            for i in range(j + 1, QUAD):
                d_up = d_up - load(x, (QUAD + i) * step, ONE) * at(pairs, i * (i - 1) // 2 + j)
            store(x, (QUAD + j) * step, d_up)
        for i in range(QUAD):
            for j in range(i + 1):
                up = load(x, (2 * QUAD + j) * step, ONE)
                to = (ERASE_PAIRS + i * (i + 1) // 2 + j) * step
                store(dots, to, load(dots, to, ONE) + up * load(x, i * step, ONE))
                if j < i:
                    to = (i * (i - 1) // 2 + j) * step
                    store(dots, to, load(dots, to, ONE) + up * load(x, (QUAD + i) * step, ONE))


@part
def _state_back(tiles, width, whole, combined, columns, S, dS, sums, wants_rows, erases):
    """The sums over columns, and dS at the quad's start."""
    step = lanes(dS, ONE)
    for i in range(tiles):
        r = shifted(sums, i * ROW * step)
        x, y = shifted(S, i * width * step), shifted(dS, i * whole * step)
        if wants_rows:
            o1, o2, o3, o4 = (
                load(r, 0, ONE),
                load(r, step, ONE),
                load(r, 2 * step, ONE),
                load(r, 3 * step, ONE),
            )
            u1, u2 = load(r, 4 * step, ONE), load(r, 5 * step, ONE)
            u3, u4, both = load(r, 6 * step, ONE), load(r, 7 * step, ONE), load(r, 12 * step, ONE)
            for o in range(0, width, step):
                for lane in range(step):
                    c = shifted(columns, o * COLUMN + lane)
                    s = load(x, (o + lane) * step, ONE)
                    both = both + s * load(y, (o + lane) * step, ONE)
                    o1, o2 = o1 + s * at(c, 0), o2 + s * at(c, step)
                    o3, o4 = o3 + s * at(c, 2 * step), o4 + s * at(c, 3 * step)
                    if erases:
                        u1, u2 = u1 + s * at(c, 4 * step), u2 + s * at(c, 5 * step)
                        u3, u4 = u3 + s * at(c, 6 * step), u4 + s * at(c, 7 * step)
            store(r, 0, o1)
            store(r, step, o2)
            store(r, 2 * step, o3)
            store(r, 3 * step, o4)
            store(r, 4 * step, u1)
            store(r, 5 * step, u2)
            store(r, 6 * step, u3)
            store(r, 7 * step, u4)
            store(r, 12 * step, both)
        w1, w2, w3, w4 = (
            load(r, 8 * step, ONE),
            load(r, 9 * step, ONE),
            load(r, 10 * step, ONE),
            load(r, 11 * step, ONE),
        )
        k = shifted(combined, i * COMBINED * step)
        D = load(k, 0, ONE)
        e1, e2, e3, e4 = (
            load(k, 5 * step, ONE), load(k, 6 * step, ONE), load(k, 7 * step, ONE), load(k, 8 * step, ONE)
        )  # fmt: skip
        q1, q2, q3, q4 = (
            load(k, 9 * step, ONE), load(k, 10 * step, ONE), load(k, 11 * step, ONE), load(k, 12 * step, ONE)
        )  # fmt: skip
        for o in range(0, width, step):
            for lane in range(step):
                c = shifted(columns, o * COLUMN + lane)
                g = load(y, (o + lane) * step, ONE)
                w1, w2 = w1 + g * at(c, 8 * step), w2 + g * at(c, 9 * step)
                w3, w4 = w3 + g * at(c, 10 * step), w4 + g * at(c, 11 * step)
                g = g * D + q1 * at(c, 0)
                g = g + q2 * at(c, step)
                g = g + q3 * at(c, 2 * step)
                g = g + q4 * at(c, 3 * step)
                if erases:
                    g = g - e1 * at(c, 4 * step)
                    g = g - e2 * at(c, 5 * step)
                    g = g - e3 * at(c, 6 * step)
                    g = g - e4 * at(c, 7 * step)
                store(y, (o + lane) * step, g)
        store(r, 8 * step, w1)
        store(r, 9 * step, w2)
        store(r, 10 * step, w3)
        store(r, 11 * step, w4)


@part
def _quad_rows(tiles, given, sums, pairs, weights):
    """A quad's gradients of q, e, k and the log decay, in place of the sums; k's still lacks what comes through e.

    ``pairs`` are the products of updates with do and dup. With dS' the gradient of a decayed state S' = D_j S + ...,
    ``alpha`` is the sum over columns of S dS' and ``beta`` that of up_l dS'.
    """
    step = lanes(sums, ONE)
    for i in range(tiles):
        x, r = shifted(given, i * GIVEN * step), shifted(sums, i * ROW * step)
        D = load(x, 0, ONE)
        store(weights, 0, D)
        for j in range(1, QUAD):
            d = load(x, 4 * j * step, ONE)
            D = D * d
            store(weights, j * step, D)
            for m in range(j):
                k = load(x, (4 * m + 3) * step, ONE)
                if m < j - 1:
                    k = load(weights, (QUAD + (j - 1) * (j - 2) // 2 + m) * step, ONE)
                store(weights, (QUAD + j * (j - 1) // 2 + m) * step, k * d)
        alpha = load(r, 3 * QUAD * step, ONE)
        following = D
        for j in range(QUAD - 1, -1, -1):
            e, q = load(x, (4 * j + 1) * step, ONE), load(x, (4 * j + 2) * step, ONE)
            s_do, s_d_up, D = (
                load(r, j * step, ONE),
                load(r, (QUAD + j) * step, ONE),
                load(weights, j * step, ONE),
            )
            if j < QUAD - 1:
                following = load(x, 4 * (j + 1) * step, ONE)
                alpha = alpha * following
            alpha = alpha + q * s_do
            alpha = alpha - e * s_d_up
            dq = D * s_do + load(x, (4 * j + 3) * step, ONE) * at(pairs, ERASE_PAIRS + j * (j + 1) // 2 + j)
            de, dg = D * s_d_up, D * alpha
            for m in range(j + 1):
                up_do = at(pairs, ERASE_PAIRS + j * (j + 1) // 2 + m)
                beta = load(r, (2 * QUAD + m) * step, ONE)
                if j < QUAD - 1:
                    beta = beta * following
                beta = beta + q * up_do
                if m < j:
                    up_d_up = at(pairs, j * (j - 1) // 2 + m)
                    beta = beta - e * up_d_up
                    w = load(weights, (QUAD + j * (j - 1) // 2 + m) * step, ONE)
                    dq, de, dg = dq + w * up_do, de + w * up_d_up, dg + w * beta
                store(r, (2 * QUAD + m) * step, beta)
            store(r, j * step, dq)
            store(r, (QUAD + j) * step, zeros(r, ONE) - de)
            store(r, (3 * QUAD + j) * step, dg)


@part
def _give(place, offset, count, x, adds):
    """A gradient's register to its place, or added to what stands there."""
    if adds:
        x = x + first_lanes(place, offset, count, ONE)
    put_lanes(place, offset, count, x, ONE)


@part
def _token_rows(n, kind, given, sums, token, row, t, j, adds, odd):
    """A token's gradients of query, key, log decay and erase; its places in the tiles are given by ``token``."""
    heads, group, K = at(n, HEADS), at(n, GROUP), at(n, K_SIZE)
    g_width, b_width = at(n, G_WIDTH), at(n, B_WIDTH)
    d_query, d_key = numbers(at(n, D_QUERY), kind), numbers(at(n, D_KEY), kind)
    d_decay, d_erase = numbers(at(n, D_DECAY), kind), numbers(at(n, D_ERASE), kind)
    erase = shifted(numbers(at(n, ERASE), kind), offset_of(n, ERASE_STEPS, row, t, j))
    scale = at(numbers(at(n, SCALE), kind), 0)
    step, place = lanes(sums, ONE), row * at(n, TIME) + t
    qk_row, v_row = (place * heads + j // group) * K, place * heads * group + j
    all_g, all_b, b = zeros(sums, ONE), zeros(sums, ONE), zeros(sums, ONE)
    wrong = load(odd, 0, ONE)
    if b_width == 1:
        b = splat(sums, at(erase, 0), ONE)
    for i in range(0, K, step):
        r = shifted(sums, i * ROW + token * step)
        if at(n, WANT_Q):
            _give(d_query, qk_row + i, K - i, load(r, 0, ONE) * scale, adds)
        dk, de = load(r, 2 * QUAD * step, ONE), load(r, QUAD * step, ONE)
        wrong = wrong + (load(r, 0, ONE) + dk + de + load(r, 3 * QUAD * step, ONE)) * zero(sums)
        if b_width and not at(n, ERASE_VECTOR):
            if b_width > 1:
                b = first_lanes(erase, i, K - i, ONE)
            dk = dk + de * b
            de = de * load(given, i * GIVEN + (4 * token + 3) * step, ONE)
        if at(n, WANT_K):
            _give(d_key, qk_row + i, K - i, dk, adds)
        if at(n, WANT_B):
            if b_width == 1:
                all_b = all_b + de
            else:
                put_lanes(d_erase, v_row * K + i, K - i, de, ONE)
        if at(n, WANT_G):
            dg = load(r, 3 * QUAD * step, ONE)
            if g_width == 1:
                all_g = all_g + dg
            else:
                put_lanes(d_decay, v_row * K + i, K - i, dg, ONE)
    store(odd, 0, wrong)
    if at(n, WANT_G) and g_width == 1:
        put(d_decay, v_row, total(all_g))
    if at(n, WANT_B) and b_width == 1:
        put(d_erase, v_row, total(all_b))


@part
def _columns_in(n, kind, columns, token, row, t, j, c0, count, there):
    """A token's do and up, to its places in the columns; zeros for a token that is not there."""
    V, w_width = at(n, V_SIZE), at(n, W_WIDTH)
    value = shifted(numbers(at(n, VALUE), kind), offset_of(n, VALUE_STEPS, row, t, j) + c0)
    write = shifted(numbers(at(n, WRITE), kind), offset_of(n, WRITE_STEPS, row, t, j) + c0 * (w_width > 1))
    update, d_output = numbers(at(n, UPDATES), kind), numbers(at(n, D_OUTPUT), kind)
    step, place = lanes(columns, ONE), ((row * at(n, TIME) + t) * at(n, HEADS) * at(n, GROUP) + j) * V + c0
    for o in range(0, count, step):
        d_o, up = zeros(columns, ONE), zeros(columns, ONE)
        if there:
            if at(n, HAS_D_OUTPUT):
                d_o = first_lanes(d_output, place + o, count - o, ONE)
            if at(n, B_WIDTH):
                up = first_lanes(update, place + o, count - o, ONE)
            else:
                up = first_lanes(value, o, count - o, ONE)
                if w_width == 1:
                    up = up * at(write, 0)
                elif w_width:
                    up = up * first_lanes(write, o, count - o, ONE)
        store(columns, o * COLUMN + token * step, d_o)
        store(columns, o * COLUMN + (2 * QUAD + token) * step, up)


@part
def _columns_out(n, kind, columns, token, row, t, j, c0, count, odd):
    """A token's gradients of value and write, from its dup."""
    w_width, v_row = at(n, W_WIDTH), (row * at(n, TIME) + t) * at(n, HEADS) * at(n, GROUP) + j
    value = shifted(numbers(at(n, VALUE), kind), offset_of(n, VALUE_STEPS, row, t, j) + c0)
    write = shifted(numbers(at(n, WRITE), kind), offset_of(n, WRITE_STEPS, row, t, j) + c0 * (w_width > 1))
    d_value, d_write = numbers(at(n, D_VALUE), kind), numbers(at(n, D_WRITE), kind)
    step, place = lanes(columns, ONE), v_row * at(n, V_SIZE) + c0
    all_w = zeros(columns, ONE)
    for o in range(0, count, step):
        d_up = load(columns, o * COLUMN + (QUAD + token) * step, ONE)
        store(odd, 0, load(odd, 0, ONE) + d_up * zero(columns))
        if at(n, WANT_W):
            d_w = d_up * first_lanes(value, o, count - o, ONE)
            if w_width == 1:
                all_w = all_w + d_w
            else:
                put_lanes(d_write, place + o, count - o, d_w, ONE)
        if at(n, WANT_V):
            if w_width == 1:
                d_up = d_up * at(write, 0)
            elif w_width:
                d_up = d_up * first_lanes(write, o, count - o, ONE)
            put_lanes(d_value, place + o, count - o, d_up, ONE)
    if at(n, WANT_W) and w_width == 1:
        put(d_write, v_row, at(d_write, v_row) + total(all_w))


def memory_of(K: int, V: int, chunk: int, panel: int, step: int) -> int:
    """Numbers of memory that a range of backward needs."""
    rows, quads = -(-K // step) * step, chunk // QUAD
    quad = rows * (GIVEN + COMBINED + ROW + panel) + panel * COLUMN + PAIRS * (step + 1)
    return (
        rows * (-(-V // step) * step)
        + quads * quad
        + (PAIRS + QUAD * step) * step
        + (step + WEIGHTS + 1) * step
    )


@kernel
def backward(first_task, last_task, block, memory, kind):
    """Tasks (sequence, query head): the value heads of one query head add to the same gradients, in their order."""
    n = integers(block)
    heads, group, K, V = at(n, HEADS), at(n, GROUP), at(n, K_SIZE), at(n, V_SIZE)
    chunk, panel, wants_rows = (
        at(n, CHUNK),
        at(n, PANEL),
        at(n, WANT_Q) + at(n, WANT_K) + at(n, WANT_G) + at(n, WANT_B),
    )
    starts, d_last, d_state = (
        numbers(at(n, STARTS), kind),
        numbers(at(n, D_LAST), kind),
        numbers(at(n, D_STATE), kind),
    )
    vheads = heads * group
    dS = numbers(memory, kind)
    step = lanes(dS, ONE)
    tiles, whole = (K + step - 1) // step, (V + step - 1) // step * step
    most = chunk // QUAD
    # For each quad of a chunk:
    given_size, combined_size, sums_size = tiles * GIVEN * step, tiles * COMBINED * step, tiles * ROW * step
    columns_size, state_size = panel * COLUMN, tiles * panel * step
    given = shifted(dS, tiles * whole * step)
    combined = shifted(given, most * given_size)
    sums = shifted(combined, most * combined_size)
    columns = shifted(sums, most * sums_size)
    states = shifted(columns, most * columns_size)
    pairs = shifted(states, most * state_size)
    dots = shifted(pairs, most * PAIRS)
    # For all:
    partial = shifted(dots, most * PAIRS * step)
    square = shifted(partial, (PAIRS + QUAD * step) * step)
    weights = shifted(square, step * step)
    odd = shifted(weights, WEIGHTS * step)
    for task in range(first_task * group, last_task * group):
        i_seq, j = task // vheads, task % vheads
        adds = j % group
        store(odd, 0, zeros(dS, ONE))
        table = shifted(integers(at(n, TABLE)), i_seq * COLUMNS)
        row, first, end, saved = at(table, 0), at(table, 1), at(table, 2), at(table, 3)
        own = (i_seq * vheads + j) * K * V
        if at(n, HAS_D_LAST):
            _turn_in(shifted(d_last, own), K, V, V, dS, whole, square)
        else:
            for i in range(0, tiles * whole * step, step):
                store(dS, i, zeros(dS, ONE))
        for i_chunk in range((end - first + chunk - 1) // chunk - 1, -1, -1):
            t0 = first + i_chunk * chunk
            tokens = least(chunk, end - t0)
            quads = (tokens + QUAD - 1) // QUAD
            for i in range(0, quads * sums_size, step):
                store(sums, i, zeros(dS, ONE))
            for i in range(0, quads * PAIRS * step, step):
                store(dots, i, zeros(dS, ONE))
            if tokens % QUAD:
                # The tokens that the last quad lacks leave all as it is.
                for i in range((quads - 1) * given_size, quads * given_size, step):
                    store(given, i, zeros(dS, ONE))
                for i in range((quads - 1) * given_size, quads * given_size, 4 * step):
                    store(given, i, splat(dS, at(numbers(at(n, SCALE), kind), 1), ONE))
            for i in range(tokens):
                take(n, kind, shifted(given, i // QUAD * given_size), i % QUAD, row, t0 + i, j)
            for i in range(quads):
                combine(
                    shifted(given, i * given_size), shifted(combined, i * combined_size), shifted(pairs, i * PAIRS),
                    partial, tiles,
                )  # fmt: skip
            for c0 in range(0, V, panel):
                count = least(panel, V - c0)
                width = (count + step - 1) // step * step
                for i in range(quads * QUAD):
                    _columns_in(
                        n,
                        kind,
                        shifted(columns, i // QUAD * columns_size),
                        i % QUAD,
                        row,
                        t0 + i,
                        j,
                        c0,
                        count,
                        i < tokens,
                    )
                if wants_rows:
                    place = ((saved + i_chunk) * vheads + j) * K * V + c0
                    _turn_in(shifted(starts, place), K, count, V, states, width, square)
                    for i in range(quads - 1):
                        _rebuild(
                            tiles, width, shifted(combined, i * combined_size), shifted(columns, i * columns_size),
                            shifted(states, i * state_size), shifted(states, (i + 1) * state_size),
                        )  # fmt: skip
                carry = shifted(dS, c0 * step)
                for i in range(quads - 1, -1, -1):
                    x, c = shifted(columns, i * columns_size), shifted(combined, i * combined_size)
                    _updates_back(
                        tiles, width, whole, c, shifted(pairs, i * PAIRS), x, carry, partial,
                        shifted(dots, i * PAIRS * step),
                    )  # fmt: skip
                    for m in range(least(QUAD, tokens - i * QUAD)):
                        _columns_out(n, kind, x, m, row, t0 + i * QUAD + m, j, c0, count, odd)
                    _state_back(
                        tiles, width, whole, c, x, shifted(states, i * state_size), carry,
                        shifted(sums, i * sums_size), wants_rows, at(n, B_WIDTH),
                    )  # fmt: skip
            if wants_rows:
                for i in range(quads):
                    x, r = shifted(given, i * given_size), shifted(sums, i * sums_size)
                    for m in range(0, PAIRS, step):
                        store(pairs, m, totals(dots, (i * PAIRS + m) * step))
                    _quad_rows(tiles, x, r, pairs, weights)
                    for m in range(least(QUAD, tokens - i * QUAD)):
                        _token_rows(n, kind, x, r, m, row, t0 + i * QUAD + m, j, adds, odd)
        wrong = load(odd, 0, ONE)
        for i in range(0, tiles * whole * step, step):
            wrong = wrong + load(dS, i, ONE) * zero(dS)
        put(numbers(at(n, ODD), kind), task, total(wrong))
        if at(n, WANT_STATE):
            _turn_out(dS, K, V, V, shifted(d_state, own), whole, square)
