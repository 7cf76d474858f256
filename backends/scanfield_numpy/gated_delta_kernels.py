"""The gated delta rule, compiled: token by token, the state in cache.

Forward, the lanes of a vector are value columns, and one pass over the K rows of the state does a token: the update of
the token before is still pending when a row is read,

    s = (S_i + k'_i up') exp(g_i);   S_i = s;   r += e_i s;   o += q_i s

and then up = y - r, o += (q . k) up, with k' and up' the key and update of the token before. A task is a sequence, a
value head and a block of at most four registers of columns.

Backward, the lanes are key rows, so that of all sums over columns and over rows only dup = dS^T k crosses lanes. A
task is a sequence and a query head. Within a chunk the decayed states S' are rebuilt from the state saved at its start
and the saved updates. Symbols as in equations 5 to 8 of arXiv 2605.22791; ``e`` is the erase vector b k.
"""

from __future__ import annotations

from scanfield_numpy.compiling import kernel, part
from scanfield_numpy.lanes import first_lanes, put_lanes
from scanfield_numpy.layout import COLUMNS
from scanfield_numpy.vector import (
    FOUR,
    ONE,
    at,
    exp,
    fold,
    integers,
    lanes,
    load,
    numbers,
    put,
    shifted,
    splat,
    store,
    total,
    totals,
    zero,
    zeros,
)

# Places in a kernel's block of integers: sizes and flags, then addresses.
HEADS, GROUP, K_SIZE, V_SIZE, TIME, G_WIDTH, B_WIDTH, W_WIDTH, ERASE_VECTOR, CHUNK = range(10)
HAS_STATE, HAS_VALUE, KEEPS_UPDATES, WANTS_OUTPUT = range(10, 14)
HAS_D_OUTPUT, HAS_D_LAST, WANT_Q, WANT_K, WANT_V, WANT_G, WANT_B, WANT_W, WANT_STATE = range(10, 19)
_FIRST_FORWARD, _FIRST_BACKWARD = 14, 19
(
    TABLE, SCALE, QUERY, KEY, VALUE, DECAY, ERASE, WRITE, STATE, OUTPUT, LAST, STARTS, UPDATES,
) = range(_FIRST_FORWARD, _FIRST_FORWARD + 13)  # fmt: skip
(
    B_TABLE, B_SCALE, B_QUERY, B_KEY, B_VALUE, B_DECAY, B_ERASE, B_WRITE, B_STARTS, B_UPDATES, D_OUTPUT, D_LAST,
    D_QUERY, D_KEY, D_VALUE, D_DECAY, D_ERASE, D_WRITE, D_STATE,
) = range(_FIRST_BACKWARD, _FIRST_BACKWARD + 19)  # fmt: skip

BACK_COLUMNS = 2
"""Registers of columns that backward takes at a time: their rebuilt states stay in cache."""


@part
def _row(rows, to, place, offset, width, count, factor):
    """A row of ``count`` numbers times a factor, from a row of that width or from one number."""
    step = lanes(rows, ONE)
    if width == 1:
        x = splat(rows, at(place, offset), ONE) * factor
        for i in range(0, count, step):
            store(rows, to + i, x)
    else:
        for i in range(0, count, step):
            store(rows, to + i, first_lanes(place, offset + i, count - i, ONE) * factor)


@part
def _exp_row(rows, to, count):
    for i in range(0, count, lanes(rows, ONE)):
        store(rows, to + i, exp(load(rows, to + i, ONE)))


@part
def _multiply_row(rows, to, by, count):
    for i in range(0, count, lanes(rows, ONE)):
        store(rows, to + i, load(rows, to + i, ONE) * load(rows, by + i, ONE))


@part
def _product(rows, first, second, count):
    """The scalar product of two rows."""
    x = zeros(rows, ONE)
    for i in range(0, count, lanes(rows, ONE)):
        x = x + load(rows, first + i, ONE) * load(rows, second + i, ONE)
    return total(x)


@part
def _pass(tag, o, width, K, padded, S, before, now, up, sums, erases):
    """All rows of the state, in the columns from ``o`` on: the pending update, the decay, and both sums over rows.

    ``before`` is the key of the pending update ``up``; ``now`` the rows decay, e and q of the token.
    """
    pending = load(up, o, tag)
    out = zeros(S, tag)
    S = shifted(S, o)
    e, q = shifted(now, padded), shifted(now, 2 * padded)
    if erases:
        found = zeros(S, tag)
        for i in range(K):
            s = (load(S, i * width, tag) + at(before, i) * pending) * at(now, i)
            store(S, i * width, s)
            found = found + s * at(e, i)
            out = out + s * at(q, i)
        store(sums, o, found)
    else:
        for i in range(K):
            s = (load(S, i * width, tag) + at(before, i) * pending) * at(now, i)
            store(S, i * width, s)
            out = out + s * at(q, i)
    store(sums, width + o, out)


@part
def _put_state(place, V, count, K, S, width, before, up):
    """The state with its pending update, to rows of V columns."""
    for i in range(K):
        k = at(before, i)
        for o in range(0, count, lanes(S, ONE)):
            s = load(S, i * width + o, ONE) + k * load(up, o, ONE)
            put_lanes(place, i * V + o, count - o, s, ONE)


@part
def _read_out(S, width, count, K, before, up, q, place):
    """A token's output as the recurrence has it, q^T (S + k up^T), where an infinity tells it from the shorter sum."""
    for o in range(0, count, lanes(S, ONE)):
        out = zeros(S, ONE)
        for i in range(K):
            out = out + (load(S, i * width + o, ONE) + at(before, i) * load(up, o, ONE)) * at(q, i)
        put_lanes(place, o, count - o, out, ONE)


@part
def _columns(i_seq, j, c0, count, n, kind, memory):
    """One sequence, value head and block of columns."""
    heads, group, K, V = at(n, HEADS), at(n, GROUP), at(n, K_SIZE), at(n, V_SIZE)
    g_width, b_width, w_width, chunk = at(n, G_WIDTH), at(n, B_WIDTH), at(n, W_WIDTH), at(n, CHUNK)
    query, key, value = numbers(at(n, QUERY), kind), numbers(at(n, KEY), kind), numbers(at(n, VALUE), kind)
    log_decay, erase, write = (
        numbers(at(n, DECAY), kind),
        numbers(at(n, ERASE), kind),
        numbers(at(n, WRITE), kind),
    )
    state, output, last = (
        numbers(at(n, STATE), kind),
        numbers(at(n, OUTPUT), kind),
        numbers(at(n, LAST), kind),
    )
    starts, updates = numbers(at(n, STARTS), kind), numbers(at(n, UPDATES), kind)
    factors = numbers(at(n, SCALE), kind)
    scale, one = at(factors, 0), at(factors, 1)
    table = shifted(integers(at(n, TABLE)), i_seq * COLUMNS)
    row, first, end, saved = at(table, 0), at(table, 1), at(table, 2), at(table, 3)
    vheads = heads * group
    step = lanes(query, ONE)
    padded = (K + step - 1) // step * step
    width = (count + step - 1) // step * step
    S = numbers(memory, kind)
    up = shifted(S, K * width)
    sums = shifted(up, width)
    rows = shifted(sums, 2 * width)  # decay, e, q, key, the key before
    now, before = 3 * padded, 4 * padded
    own = ((i_seq * vheads + j) * K) * V + c0
    for i in range(0, K * width + 3 * width + 5 * padded, step):
        store(S, i, zeros(S, ONE))
    if at(n, HAS_STATE):
        for i in range(K):
            _row(S, i * width, state, own + i * V, 0, count, one)
    if not g_width:
        _row(rows, 0, factors, 1, 1, K, one)
    for t in range(first, end):
        if chunk and (t - first) % chunk == 0:
            place = (((saved + (t - first) // chunk) * vheads + j) * K) * V + c0
            _put_state(shifted(starts, place), V, count, K, S, width, shifted(rows, before), up)
        qk_row = ((row * at(n, TIME) + t) * heads + j // group) * K
        v_row = (row * at(n, TIME) + t) * vheads + j
        _row(rows, now, key, qk_row, 0, K, one)
        _row(rows, 2 * padded, query, qk_row, 0, K, scale)
        if g_width:
            _row(rows, 0, log_decay, v_row * g_width, g_width, K, one)
            _exp_row(rows, 0, K)
        if b_width:
            _row(rows, padded, erase, v_row * b_width, b_width, K, one)
            if not at(n, ERASE_VECTOR):
                _multiply_row(rows, padded, now, K)
        o = 0
        while o + 4 * step <= width:
            _pass(FOUR, o, width, K, padded, S, shifted(rows, before), rows, up, sums, b_width)
            o += 4 * step
        while o < width:
            _pass(ONE, o, width, K, padded, S, shifted(rows, before), rows, up, sums, b_width)
            o += step
        dot = zero(rows)
        if at(n, WANTS_OUTPUT):
            dot = _product(rows, 2 * padded, now, K)
        odd = zeros(S, ONE)
        for o in range(0, count, step):
            y = zeros(S, ONE)
            if at(n, HAS_VALUE):
                y = first_lanes(value, v_row * V + c0 + o, count - o, ONE)
                if w_width == 1:
                    y = y * at(write, v_row)
                elif w_width:
                    y = y * first_lanes(write, v_row * V + c0 + o, count - o, ONE)
            if b_width:
                y = y - load(sums, o, ONE)
                if at(n, KEEPS_UPDATES):
                    put_lanes(updates, v_row * V + c0 + o, count - o, y, ONE)
            store(up, o, y)
            if at(n, WANTS_OUTPUT):
                out = load(sums, width + o, ONE) + y * dot
                put_lanes(output, v_row * V + c0 + o, count - o, out, ONE)
                odd = odd + out * zero(rows)
        if total(odd) != zero(rows):
            place = shifted(output, v_row * V + c0)
            _read_out(S, width, count, K, shifted(rows, now), up, shifted(rows, 2 * padded), place)
        now, before = before, now
    _put_state(shifted(last, own), V, count, K, S, width, shifted(rows, before), up)


def forward_memory(K: int, step: int) -> int:
    """Numbers of memory that a range of forward needs."""
    padded = -(-K // step) * step
    return 4 * step * (K + 3) + 5 * padded


@kernel
def forward(first, last_task, block, memory, kind):
    """Tasks (sequence, value head, block of columns)."""
    n = integers(block)
    V = at(n, V_SIZE)
    vheads = at(n, HEADS) * at(n, GROUP)
    most = 4 * lanes(numbers(memory, kind), ONE)
    blocks = (V + most - 1) // most
    for task in range(first, last_task):
        c0 = task % blocks * most
        _columns(task // (blocks * vheads), task // blocks % vheads, c0, min(V - c0, most), n, kind, memory)


# ---------------------------------------------------------------------------------------------------------------------
# backward


@part
def _rebuild(tag, o, padded, tokens, columns, decay, keys, ups, start, kept):
    """The decayed states of a chunk for some key rows: S'_t = exp(g_t) S_(t-1), S_t = S'_t + k_t up_t^T."""
    for c in range(columns):
        s = load(start, c * padded + o, tag)
        for t in range(tokens):
            s = s * load(decay, t * padded + o, tag)
            store(kept, (t * columns + c) * padded + o, s)
            s = s + load(keys, t * padded + o, tag) * at(ups, t * columns + c)


@part
def _enter(tag, o, padded, block, columns, rows, ups, d_outs, kept, dS, partial):
    """dS += q do^T; dq += S' do; dk += dS up; and the lanes' parts of dup = dS^T k. ``rows`` as in ``_head_back``."""
    step = lanes(rows, ONE)
    q = load(rows, 2 * block + o, tag)
    k = load(rows, 3 * block + o, tag)
    dq = load(rows, 4 * block + o, tag)
    dk = load(rows, 5 * block + o, tag)
    for c in range(columns):
        d_o = at(d_outs, c)
        x = load(dS, c * padded + o, tag) + q * d_o
        store(dS, c * padded + o, x)
        dq = dq + load(kept, c * padded + o, tag) * d_o
        dk = dk + x * at(ups, c)
        p = fold(x * k)
        if o:
            p = p + load(partial, c * step, ONE)
        store(partial, c * step, p)
    store(rows, 4 * block + o, dq)
    store(rows, 5 * block + o, dk)


@part
def _leave(tag, o, padded, block, columns, rows, d_ups, kept, dS, erases):
    """de += S' dup (its negative is the gradient); dS' = dS - e dup^T; dg += dS' S'; the carry exp(g) dS'."""
    d = load(rows, o, tag)
    dg = load(rows, 6 * block + o, tag)
    if erases:
        e = load(rows, block + o, tag)
        de = load(rows, 7 * block + o, tag)
        for c in range(columns):
            d_up = at(d_ups, c)
            s = load(kept, c * padded + o, tag)
            de = de + s * d_up
            x = load(dS, c * padded + o, tag) - e * d_up
            dg = dg + x * s
            store(dS, c * padded + o, x * d)
        store(rows, 7 * block + o, de)
    else:
        for c in range(columns):
            x = load(dS, c * padded + o, tag)
            dg = dg + x * load(kept, c * padded + o, tag)
            store(dS, c * padded + o, x * d)
    store(rows, 6 * block + o, dg)


@part
def _add(place, offset, count, x):
    """Add a register, of which ``count`` lanes are there."""
    put_lanes(place, offset, count, first_lanes(place, offset, count, ONE) + x, ONE)


@part
def _finish(n, kind, rows, block, dot, qk_row, v_row):
    """A token's gradients from its sums over the columns; ``dot`` is up . do."""
    K, g_width, b_width = at(n, K_SIZE), at(n, G_WIDTH), at(n, B_WIDTH)
    scale = at(numbers(at(n, B_SCALE), kind), 0)
    d_decay, d_erase = numbers(at(n, D_DECAY), kind), numbers(at(n, D_ERASE), kind)
    erase = numbers(at(n, B_ERASE), kind)
    all_g = zeros(rows, ONE)
    all_b = zeros(rows, ONE)
    for i in range(0, K, lanes(rows, ONE)):
        k = load(rows, 3 * block + i, ONE)
        dk = load(rows, 5 * block + i, ONE)
        if at(n, WANT_Q):
            dq = (load(rows, 4 * block + i, ONE) + k * dot) * scale
            _add(numbers(at(n, D_QUERY), kind), qk_row + i, K - i, dq)
        if b_width:
            de = zeros(rows, ONE) - load(rows, 7 * block + i, ONE)
            if not at(n, ERASE_VECTOR):
                if b_width == 1:
                    dk = dk + de * at(erase, v_row)
                else:
                    dk = dk + de * first_lanes(erase, v_row * K + i, K - i, ONE)
                de = de * k
            if at(n, WANT_B):
                if b_width == 1:
                    all_b = all_b + de
                else:
                    put_lanes(d_erase, v_row * K + i, K - i, de, ONE)
        if at(n, WANT_K):
            _add(numbers(at(n, D_KEY), kind), qk_row + i, K - i, dk)
        if at(n, WANT_G):
            dg = load(rows, 6 * block + i, ONE)
            if g_width == 1:
                all_g = all_g + dg
            else:
                put_lanes(d_decay, v_row * K + i, K - i, dg, ONE)
    if at(n, WANT_G) and g_width == 1:
        put(d_decay, v_row, total(all_g))
    if at(n, WANT_B) and b_width == 1:
        put(d_erase, v_row, total(all_b))


@part
def _value_back(n, kind, v_row, c0, columns, partial, d_ups):
    """dup from the lanes' parts; the gradients of value and write."""
    V, w_width = at(n, V_SIZE), at(n, W_WIDTH)
    value, write = numbers(at(n, B_VALUE), kind), numbers(at(n, B_WRITE), kind)
    d_value, d_write = numbers(at(n, D_VALUE), kind), numbers(at(n, D_WRITE), kind)
    step = lanes(partial, ONE)
    all_w = zeros(partial, ONE)
    for c in range(0, columns, step):
        d_up = totals(partial, c * step)
        store(d_ups, c, d_up)
        place, left = v_row * V + c0 + c, columns - c
        if at(n, WANT_V):
            if w_width == 0:
                d_v = d_up
            elif w_width == 1:
                d_v = d_up * at(write, v_row)
            else:
                d_v = d_up * first_lanes(write, place, left, ONE)
            put_lanes(d_value, place, left, d_v, ONE)
        if at(n, WANT_W):
            # Lanes beyond the last column are sums of rows that no column wrote.
            d_w = first_lanes(d_ups, c, left, ONE) * first_lanes(value, place, left, ONE)
            if w_width == 1:
                all_w = all_w + d_w
            else:
                put_lanes(d_write, place, left, d_w, ONE)
    if at(n, WANT_W) and w_width == 1:
        put(d_write, v_row, at(d_write, v_row) + total(all_w))


@part
def _head_back(i_seq, j, n, kind, memory):
    """One sequence and value head."""
    heads, group, K, V, time = at(n, HEADS), at(n, GROUP), at(n, K_SIZE), at(n, V_SIZE), at(n, TIME)
    g_width, b_width, w_width, chunk = at(n, G_WIDTH), at(n, B_WIDTH), at(n, W_WIDTH), at(n, CHUNK)
    query, key, value = (
        numbers(at(n, B_QUERY), kind),
        numbers(at(n, B_KEY), kind),
        numbers(at(n, B_VALUE), kind),
    )
    log_decay, erase = numbers(at(n, B_DECAY), kind), numbers(at(n, B_ERASE), kind)
    write, updates = numbers(at(n, B_WRITE), kind), numbers(at(n, B_UPDATES), kind)
    starts, d_output = numbers(at(n, B_STARTS), kind), numbers(at(n, D_OUTPUT), kind)
    d_last, d_state = numbers(at(n, D_LAST), kind), numbers(at(n, D_STATE), kind)
    scale = at(numbers(at(n, B_SCALE), kind), 0)
    one = at(numbers(at(n, B_SCALE), kind), 1)
    table = shifted(integers(at(n, B_TABLE)), i_seq * COLUMNS)
    row, first, end, saved = at(table, 0), at(table, 1), at(table, 2), at(table, 3)
    vheads = heads * group
    step = lanes(query, ONE)
    most = BACK_COLUMNS * step
    padded = (K + step - 1) // step * step
    block = chunk * padded
    # Rows of the chunk's tokens: decay, e, q, k, dq, dk, dg, de.
    rows = numbers(memory, kind)
    dS = shifted(rows, 8 * block)
    start = shifted(dS, V * padded)
    kept = shifted(start, most * padded)
    partial = shifted(kept, chunk * most * padded)
    ups = shifted(partial, most * step)
    d_outs = shifted(ups, chunk * most)
    d_ups = shifted(d_outs, most)
    dots = shifted(d_ups, most)
    for i in range(0, 8 * block + V * padded + most * padded, step):
        store(rows, i, zeros(rows, ONE))
    for i in range(0, most * step, step):
        store(partial, i, zeros(rows, ONE))
    own = (i_seq * vheads + j) * K * V
    if at(n, HAS_D_LAST):
        for i in range(K):
            for c in range(V):
                put(dS, c * padded + i, at(d_last, own + i * V + c))
    chunks = (end - first + chunk - 1) // chunk
    for c_chunk in range(chunks - 1, -1, -1):
        t0 = first + c_chunk * chunk
        tokens = min(chunk, end - t0)
        for t in range(tokens):
            qk_row = ((row * time + t0 + t) * heads + j // group) * K
            v_row = (row * time + t0 + t) * vheads + j
            to = t * padded
            _row(rows, 3 * block + to, key, qk_row, 0, K, one)
            _row(rows, 2 * block + to, query, qk_row, 0, K, scale)
            if g_width:
                _row(rows, to, log_decay, v_row * g_width, g_width, K, one)
                _exp_row(rows, to, K)
            else:
                _row(rows, to, numbers(at(n, B_SCALE), kind), 1, 1, K, one)
            if b_width:
                _row(rows, block + to, erase, v_row * b_width, b_width, K, one)
                if not at(n, ERASE_VECTOR):
                    _multiply_row(rows, block + to, 3 * block + to, K)
            put(dots, t, zero(dots))
        for i in range(4 * block, 8 * block, step):
            store(rows, i, zeros(rows, ONE))
        for c0 in range(0, V, most):
            columns = min(most, V - c0)
            place = ((saved + c_chunk) * vheads + j) * K * V + c0
            for i in range(K):
                for c in range(columns):
                    put(start, c * padded + i, at(starts, place + i * V + c))
            for t in range(tokens):
                v_row = (row * time + t0 + t) * vheads + j
                for c in range(columns):
                    if b_width:
                        up = at(updates, v_row * V + c0 + c)
                    else:
                        up = at(value, v_row * V + c0 + c)
                        if w_width == 1:
                            up = up * at(write, v_row)
                        elif w_width:
                            up = up * at(write, v_row * V + c0 + c)
                    put(ups, t * columns + c, up)
            o = 0
            while o + 4 * step <= padded:
                _rebuild(FOUR, o, padded, tokens, columns, rows, shifted(rows, 3 * block), ups, start, kept)
                o += 4 * step
            while o < padded:
                _rebuild(ONE, o, padded, tokens, columns, rows, shifted(rows, 3 * block), ups, start, kept)
                o += step
            for t in range(tokens - 1, -1, -1):
                v_row = (row * time + t0 + t) * vheads + j
                dot = zero(dots)
                for c in range(columns):
                    d_o = zero(dots)
                    if at(n, HAS_D_OUTPUT):
                        d_o = at(d_output, v_row * V + c0 + c)
                    put(d_outs, c, d_o)
                    dot = dot + d_o * at(ups, t * columns + c)
                put(dots, t, at(dots, t) + dot)
                up_row, kept_row = shifted(ups, t * columns), shifted(kept, t * columns * padded)
                dS_row, token = shifted(dS, c0 * padded), shifted(rows, t * padded)
                o = 0
                while o + 4 * step <= padded:
                    _enter(FOUR, o, padded, block, columns, token, up_row, d_outs, kept_row, dS_row, partial)
                    o += 4 * step
                while o < padded:
                    _enter(ONE, o, padded, block, columns, token, up_row, d_outs, kept_row, dS_row, partial)
                    o += step
                _value_back(n, kind, v_row, c0, columns, partial, d_ups)
                o = 0
                while o + 4 * step <= padded:
                    _leave(FOUR, o, padded, block, columns, token, d_ups, kept_row, dS_row, b_width)
                    o += 4 * step
                while o < padded:
                    _leave(ONE, o, padded, block, columns, token, d_ups, kept_row, dS_row, b_width)
                    o += step
        for t in range(tokens):
            place = row * time + t0 + t
            qk_row, v_row = (place * heads + j // group) * K, place * vheads + j
            _finish(n, kind, shifted(rows, t * padded), block, at(dots, t), qk_row, v_row)
    if at(n, WANT_STATE):
        for i in range(K):
            for c in range(V):
                put(d_state, own + i * V + c, at(dS, c * padded + i))


def backward_memory(K: int, V: int, chunk: int, step: int) -> int:
    """Numbers of memory that a range of backward needs."""
    padded = -(-K // step) * step
    most = BACK_COLUMNS * step
    return padded * (8 * chunk + V + most + chunk * most) + most * (step + chunk + 2) + chunk


@kernel
def backward(first, last_task, block, memory, kind):
    """Tasks (sequence, query head): the value heads of one query head add to the same gradients, in their order."""
    n = integers(block)
    heads, group = at(n, HEADS), at(n, GROUP)
    for task in range(first, last_task):
        for g in range(group):
            _head_back(task // heads, task % heads * group + g, n, kind, memory)
