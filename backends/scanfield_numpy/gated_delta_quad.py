"""What the compiled gated delta rule makes of four tokens before it meets the state.

A *quad* is four tokens. With the state S at its start, the inclusive products D_j of its decays and the products G_jl of
the decays after token l up to token j (no division anywhere),

    up_j = y_j - (e_j D_j)^T S - sum_{l<j} (e_j . G_jl k_l) up_l
    o_j = (q_j D_j)^T S + sum_{l<=j} (q_j . G_jl k_l) up_l
    S' = D_4 S + sum_l (G_4l k_l) up_l^T

so one pass over the state serves four tokens, and what the quad does to it is done by the pass of the next quad. Symbols
as in equations 5 to 8 of arXiv 2605.22791; ``e`` is the erase vector b k, y the value times its write gate. The lanes
of a vector are key rows here.
"""

from __future__ import annotations

from scanfield_numpy.addressing import fetch_later, offset_of
from scanfield_numpy.compiling import part
from scanfield_numpy.elementary import exp
from scanfield_numpy.vector import (
    ONE,
    at,
    first_lanes,
    lanes,
    load,
    numbers,
    shifted,
    splat,
    store,
    totals,
    zeros,
)

# Places in a kernel's block of integers: sizes, flags of its own, the steps of the inputs along batch, time and heads, then
# addresses, some of its own again.
HEADS, GROUP, K_SIZE, V_SIZE, TIME, G_WIDTH, B_WIDTH, W_WIDTH, ERASE_VECTOR, CHUNK, FLAGS = range(11)
QUERY_STEPS, KEY_STEPS, VALUE_STEPS, DECAY_STEPS, ERASE_STEPS, WRITE_STEPS = range(FLAGS + 10, FLAGS + 28, 3)
TABLE, SCALE, QUERY, KEY, VALUE, DECAY, ERASE, WRITE, ADDRESSES = range(FLAGS + 28, FLAGS + 37)

QUAD = 4
# A tile is what one register of key rows needs, one register after the other, so that a row's numbers lie at constant
# offsets. Of the tokens as given: decay, e, q and k of each. Of the quad: D_4, then of each token G_4l k_l, e_j D_j, q_j D_j.
GIVEN, COMBINED = 4 * QUAD, 1 + 3 * QUAD
# Sums of two tokens of a quad: e_j . G_jl k_l for l < j, then q_j . G_jl k_l for l <= j.
PAIRS, ERASE_PAIRS = 16, 6
# Tokens from the one that is read to those that memory is asked for.
AHEAD = 2 * QUAD


@part
def take(n, kind, given, token, row, t, j):
    """Decay, e, q and k of token ``t`` of a row of the batch, to the tiles' places of the quad's token ``token``."""
    head, K = j // at(n, GROUP), at(n, K_SIZE)
    g_width, b_width = at(n, G_WIDTH), at(n, B_WIDTH)
    key = shifted(numbers(at(n, KEY), kind), offset_of(n, KEY_STEPS, row, t, head))
    query = shifted(numbers(at(n, QUERY), kind), offset_of(n, QUERY_STEPS, row, t, head))
    log_decay = shifted(numbers(at(n, DECAY), kind), offset_of(n, DECAY_STEPS, row, t, j))
    erase = shifted(numbers(at(n, ERASE), kind), offset_of(n, ERASE_STEPS, row, t, j))
    scale, one = at(numbers(at(n, SCALE), kind), 0), at(numbers(at(n, SCALE), kind), 1)
    step = lanes(given, ONE)
    d, b = splat(given, one, ONE), zeros(given, ONE)
    if g_width == 1:
        d = exp(splat(given, at(log_decay, 0), ONE))
    if b_width == 1:
        b = splat(given, at(erase, 0), ONE)
    to = token * 4 * step
    for i in range(0, K, step):
        # The lines of one token after the other are far apart, and no hardware foresees them.
        fetch_later(n, KEY_STEPS, key, i, AHEAD)
        fetch_later(n, QUERY_STEPS, query, i, AHEAD)
        k = first_lanes(key, i, K - i, ONE)
        if g_width > 1:
            fetch_later(n, DECAY_STEPS, log_decay, i, AHEAD)
            d = exp(first_lanes(log_decay, i, K - i, ONE))
        if b_width > 1:
            fetch_later(n, ERASE_STEPS, erase, i, AHEAD)
            b = first_lanes(erase, i, K - i, ONE)
        e = b
        if not at(n, ERASE_VECTOR):
            e = b * k
        store(given, to, d)
        store(given, to + step, e)
        store(given, to + 2 * step, first_lanes(query, i, K - i, ONE) * scale)
        store(given, to + 3 * step, k)
        to += GIVEN * step


@part
def combine(given, combined, pairs, partial, tiles):
    """A quad's decays multiplied into its keys, erase vectors and queries, and the sums of its pairs of tokens."""
    step = lanes(given, ONE)
    z = zeros(given, ONE)
    e21 = e31 = e32 = e41 = e42 = e43 = z
    q11 = q21 = q22 = q31 = q32 = q33 = q41 = q42 = q43 = q44 = z
    for i in range(tiles):
        x, c = shifted(given, i * GIVEN * step), shifted(combined, i * COMBINED * step)
        D, e = load(x, 0, ONE), load(x, step, ONE)
        q, k1 = load(x, 2 * step, ONE), load(x, 3 * step, ONE)
        q11 = q11 + q * k1
        store(c, 5 * step, e * D)
        store(c, 9 * step, q * D)
        d, e = load(x, 4 * step, ONE), load(x, 5 * step, ONE)
        q, k2 = load(x, 6 * step, ONE), load(x, 7 * step, ONE)
        D, k1 = D * d, k1 * d
        e21 = e21 + e * k1
        q21, q22 = q21 + q * k1, q22 + q * k2
        store(c, 6 * step, e * D)
        store(c, 10 * step, q * D)
        d, e = load(x, 8 * step, ONE), load(x, 9 * step, ONE)
        q, k3 = load(x, 10 * step, ONE), load(x, 11 * step, ONE)
        D, k1, k2 = D * d, k1 * d, k2 * d
        e31, e32 = e31 + e * k1, e32 + e * k2
        q31, q32, q33 = q31 + q * k1, q32 + q * k2, q33 + q * k3
        store(c, 7 * step, e * D)
        store(c, 11 * step, q * D)
        d, e = load(x, 12 * step, ONE), load(x, 13 * step, ONE)
        q, k4 = load(x, 14 * step, ONE), load(x, 15 * step, ONE)
        D, k1 = D * d, k1 * d
        k2, k3 = k2 * d, k3 * d
        e41, e42, e43 = e41 + e * k1, e42 + e * k2, e43 + e * k3
        q41, q42 = q41 + q * k1, q42 + q * k2
        q43, q44 = q43 + q * k3, q44 + q * k4
        store(c, 8 * step, e * D)
        store(c, 12 * step, q * D)
        store(c, 0, D)
        store(c, step, k1)
        store(c, 2 * step, k2)
        store(c, 3 * step, k3)
        store(c, 4 * step, k4)
    store(partial, 0, e21)
    store(partial, step, e31)
    store(partial, 2 * step, e32)
    store(partial, 3 * step, e41)
    store(partial, 4 * step, e42)
    store(partial, 5 * step, e43)
    store(partial, 6 * step, q11)
    store(partial, 7 * step, q21)
    store(partial, 8 * step, q22)
    store(partial, 9 * step, q31)
    store(partial, 10 * step, q32)
    store(partial, 11 * step, q33)
    store(partial, 12 * step, q41)
    store(partial, 13 * step, q42)
    store(partial, 14 * step, q43)
    store(partial, 15 * step, q44)
    for i in range(0, PAIRS, step):
        store(pairs, i, totals(partial, i * step))
