"""Tokens side by side: a vector of a few tokens of as many lanes as a second tag is long; lanes beyond them are any."""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from scanfield_numpy.vector import (
    _call,
    _constant,
    _fused,
    _shuffled,
)


@intrinsic
def running(typing: Any, a: Any, b: Any, tag: Any) -> Any:
    """For each token the map h -> (A + A') h + B of all tokens up to it, from the tokens' own a and b.

    A' is what rounding has taken from A: the same error in every register would grow with their number.
    """

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        product, end = values[:2]
        kind = product.type
        lost = _constant(kind, 0.0)
        by = len(tag)
        while by < a.width:
            order = [(i - by) % a.width for i in range(a.width)]
            later = ir.Constant(ir.VectorType(ir.IntType(1), a.width), [i >= by for i in range(a.width)])
            before = _shuffled(builder, end, order)
            joined = _fused(builder, lost, before, end) if by > len(tag) else end
            end = builder.select(later, _fused(builder, product, before, joined), end)
            before = _shuffled(builder, product, order)
            whole = builder.fmul(product, before)
            error = _call(builder, "fma", product, before, builder.fneg(whole))
            if by > len(tag):  # tokens' own coefficients have lost nothing
                error = _fused(builder, lost, before, error)
                error = _fused(builder, product, _shuffled(builder, lost, order), error)
            product = builder.select(later, whole, product)
            lost = builder.select(later, error, lost)
            by *= 2
        return context.make_tuple(builder, sig.return_type, (product, lost, end))

    return types.UniTuple(a, 3)(a, b, tag), generate


@intrinsic
def last_token(typing: Any, x: Any, tag: Any) -> Any:
    """The last token in the place of each."""
    size = len(tag)

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        start = (x.width // size - 1) * size
        return _shuffled(builder, values[0], [start + i % size for i in range(x.width)])

    return x(x, tag), generate


@intrinsic
def mirrored(typing: Any, x: Any, tag: Any) -> Any:
    """The tokens in the other order."""
    size = len(tag)

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        whole = x.width // size * size
        order = [whole - size - i // size * size + i % size if i < whole else i for i in range(x.width)]
        return _shuffled(builder, values[0], order)

    return x(x, tag), generate


@intrinsic
def later_tokens(typing: Any, x: Any, first: Any, tag: Any) -> Any:
    """Each token in the place of the next; ``first`` has the first place."""
    size = len(tag)

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        order = [x.width + i if i < size else i - size for i in range(x.width)]
        places = ir.Constant(ir.VectorType(ir.IntType(32), x.width), order)
        return builder.shuffle_vector(values[0], values[1], places)

    return x(x, x, tag), generate


@intrinsic
def finite_lanes(typing: Any, x: Any) -> Any:
    """How many lanes are finite before one that is not; more than there are if all are."""

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        size = _call(builder, "fabs", values[0])
        wrong = builder.fcmp_unordered(">=", size, _constant(size.type, math.inf))
        bits = builder.zext(builder.bitcast(wrong, ir.IntType(x.width)), ir.IntType(64))
        return builder.cttz(bits, ir.Constant(ir.IntType(1), 0))

    return types.int64(x), generate
