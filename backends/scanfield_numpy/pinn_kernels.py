"""A jet through an activation, compiled: all blocks of a point's row in one pass, forward and back.

    forward   h = sigma(z), h_i = s1 z_i, h_c = s2 sum_i a_i z_i^2 + s1 z_c
    back      zbar = s1 hbar + s2 sum_i z_i hbar_i + sum_c (s3 sum_i a_i z_i^2 + s2 z_c) hbar_c
              zbar_i = s1 hbar_i + 2 s2 z_i sum_c a_i hbar_c,   zbar_c = s1 hbar_c          in the place of hbar

A task is a row (a point); blocks lie one after the other, each of all rows.
"""

from __future__ import annotations

from scanfield_numpy.compiling import kernel, part
from scanfield_numpy.pinn_vector import sigma, slopes
from scanfield_numpy.vector import ONE, at, first_lanes, integers, lanes, numbers, put_lanes, zeros

# Places in a kernel's block of integers. BLOCK: numbers from one block to the next; BESIDE, WEIGHTED: are they there.
WIDTH, BLOCK, FIRST, CHANNELS, HAS_VALUE, HAS_BESIDE, WEIGHTED = range(7)
Z, H, BAR, AT_BESIDE, WEIGHTS = range(7, 12)


@part
def _bent(n, z, weights, row, place, count):
    """sum_i a_i z_i^2"""
    total = zeros(z, ONE)
    d, step = at(n, FIRST), at(n, BLOCK)
    for i in range(d):
        y = first_lanes(z, (1 + i) * step + place, count, ONE)
        y = y * y
        if at(n, WEIGHTED):
            y = y * at(weights, row * d + i)
        total = total + y
    return total


@kernel
def forward(first, last, block, memory, kind, tag):
    """Rows of h from z. Where HAS_VALUE is set, sigma(z) stands in h already."""
    n = integers(block)
    width, step, d, channels = at(n, WIDTH), at(n, BLOCK), at(n, FIRST), at(n, CHANNELS)
    z, h, beside = numbers(at(n, Z), kind), numbers(at(n, H), kind), numbers(at(n, AT_BESIDE), kind)
    for row in range(first, last):
        for i in range(0, width, lanes(z, ONE)):
            place, count = row * width + i, width - i
            x = first_lanes(z, place, count, ONE)
            y = x
            if at(n, HAS_BESIDE):
                y = first_lanes(beside, place, count, ONE)
            if at(n, HAS_VALUE):
                s1, s2, _ = slopes(x, first_lanes(h, place, count, ONE), y, tag)
            else:
                s0, s1, s2 = sigma(x, y, tag)
                put_lanes(h, place, count, s0, ONE)
            for j in range(1, 1 + d):
                put_lanes(h, j * step + place, count, s1 * first_lanes(z, j * step + place, count, ONE), ONE)
            for c in range(channels):
                at_c = (1 + d + c) * step + place
                bent = _bent(n, z, numbers(at(n, WEIGHTS + c), kind), row, place, count)
                put_lanes(h, at_c, count, s2 * bent + s1 * first_lanes(z, at_c, count, ONE), ONE)


@kernel
def backward(first, last, block, memory, kind, tag):
    """Rows of zbar in the place of hbar."""
    n = integers(block)
    width, step, d, channels = at(n, WIDTH), at(n, BLOCK), at(n, FIRST), at(n, CHANNELS)
    z, h, bar = numbers(at(n, Z), kind), numbers(at(n, H), kind), numbers(at(n, BAR), kind)
    beside = numbers(at(n, AT_BESIDE), kind)
    for row in range(first, last):
        for i in range(0, width, lanes(z, ONE)):
            place, count = row * width + i, width - i
            x = first_lanes(z, place, count, ONE)
            y = x
            if at(n, HAS_BESIDE):
                y = first_lanes(beside, place, count, ONE)
            s1, s2, s3 = slopes(x, first_lanes(h, place, count, ONE), y, tag)
            crossed = zeros(z, ONE)
            for j in range(1, 1 + d):
                at_j = j * step + place
                crossed = crossed + first_lanes(z, at_j, count, ONE) * first_lanes(bar, at_j, count, ONE)
            total = s1 * first_lanes(bar, place, count, ONE) + s2 * crossed
            for c in range(channels):
                at_c = (1 + d + c) * step + place
                bent = _bent(n, z, numbers(at(n, WEIGHTS + c), kind), row, place, count)
                own = s3 * bent + s2 * first_lanes(z, at_c, count, ONE)
                total = total + own * first_lanes(bar, at_c, count, ONE)
            put_lanes(bar, place, count, total, ONE)
            for j in range(1, 1 + d):
                at_j = j * step + place
                pulled = zeros(z, ONE)
                for c in range(channels):
                    end = first_lanes(bar, (1 + d + c) * step + place, count, ONE)
                    if at(n, WEIGHTED):
                        end = end * at(numbers(at(n, WEIGHTS + c), kind), row * d + j - 1)
                    pulled = pulled + end
                pulled = s2 * first_lanes(z, at_j, count, ONE) * pulled
                put_lanes(bar, at_j, count, s1 * first_lanes(bar, at_j, count, ONE) + pulled + pulled, ONE)
            for c in range(channels):
                at_c = (1 + d + c) * step + place
                put_lanes(bar, at_c, count, s1 * first_lanes(bar, at_c, count, ONE), ONE)
