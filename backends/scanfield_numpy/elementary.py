"""Elementary functions of vectors: exp to one unit in the last place, softplus and sigmoid without overflow, limits."""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from scanfield_numpy.vector import (
    _SCALES,
    _bits,
    _call,
    _constant,
    _fused,
    _halves,
    _joined,
    _splat,
)

_LOG2_HIGH = {32: 0.693145751953125, 64: 6.93147180369123816490e-01}
_LOG2_LOW = {32: 1.42860682030941723212e-6, 64: 1.90821492927058770002e-10}
# Beyond these exp is 0 or infinity; between them the power of two splits into two that are normal numbers.
_LOWEST = {32: -104.0, 64: -746.0}
_HIGHEST = {32: 89.0, 64: 710.0}
_EXP_DEGREE = {32: 7, 64: 13}
# The same for powers of 2. 2^x on [-1/2, 1/2]: for float32 the polynomial of least relative error (2e-9), which needs a
# product less than the series.
_LOWEST_POWER = {32: -151.0, 64: -1076.0}
_HIGHEST_POWER = {32: 129.0, 64: 1025.0}
_EXP2_TERMS = {
    32: [1.0, 0.6931472, 0.24022648, 0.055503325, 0.009618437, 0.0013398874, 0.00015353371],
    64: [math.log(2) ** power / math.factorial(power) for power in range(14)],
}
_LOG_TERMS = {32: 8, 64: 17}
# AVX-512 looks the power of a fraction of 1/16 (1/8) up in a register: (2^r - 1) / r for what is left, |r| <= 1/32 (1/16).
_FRACTION_BITS = {32: 4, 64: 3}
_FRACTION_TERMS = {
    32: [0.6931471824645996, 0.24023355543613434, 0.05550508573651314],
    64: [math.log(2) ** power / math.factorial(power) for power in range(1, 9)],
}


def _exp(builder: Any, x: Any) -> Any:
    """exp to one unit in the last place, subnormal results included."""
    kind = x.type
    bits = _bits(kind)
    x = _limited(builder, x, _LOWEST[bits], _HIGHEST[bits])
    n = _call(builder, "rint", builder.fmul(x, _constant(kind, 1 / math.log(2))))
    r = _fused(builder, n, _constant(kind, -_LOG2_HIGH[bits]), x)
    r = _fused(builder, n, _constant(kind, -_LOG2_LOW[bits]), r)
    terms = [1 / math.factorial(power) for power in range(_EXP_DEGREE[bits] + 1)]
    return _times_power(builder, _polynomial(builder, terms, r), n)


def _exp2(builder: Any, x: Any) -> Any:
    """2^x to one unit in the last place, subnormal results included."""
    kind = x.type
    bits = _bits(kind)
    if _SCALES and kind.count * bits > 512:
        return _joined(builder, [_exp2(builder, half) for half in _halves(builder, x)])
    if _SCALES and kind.count * bits == 512:
        return _exp2_looked_up(builder, x)
    x = _limited(builder, x, _LOWEST_POWER[bits], _HIGHEST_POWER[bits])
    n = _call(builder, "rint", x)
    return _times_power(builder, _polynomial(builder, _EXP2_TERMS[bits], builder.fsub(x, n)), n)


def _exp2_looked_up(builder: Any, x: Any) -> Any:
    """``_exp2`` by AVX-512's instructions: x = n + r with a fraction n, whose last bits are a place in a table."""
    kind = x.type
    bits = _bits(kind)
    letter, mask = ("ps", ir.IntType(16)) if bits == 32 else ("pd", ir.IntType(8))
    word, whole = ir.IntType(32), ir.VectorType(ir.IntType(bits), kind.count)
    every, current = ir.Constant(mask, -1), ir.Constant(word, 4)
    places = _FRACTION_BITS[bits]

    def call(name: str, *values: Any) -> Any:
        shape = ir.FunctionType(kind, [value.type for value in values])
        function = cgutils.get_or_insert_function(builder.module, shape, f"llvm.x86.avx512.{name}.512")
        return builder.call(function, values)

    n = call(f"mask.rndscale.{letter}", x, ir.Constant(word, places << 4 | 8), x, every, current)
    # Far out the whole of x is n, and r of an infinity, which is no number, is made 0; NaN stays.
    r = builder.fsub(x, n)
    r = call(
        f"mask.fixupimm.{letter}", r, x, _constant(whole, 0x00880000), ir.Constant(word, 0), every, current
    )  # fmt: skip
    last_bits = builder.fadd(n, _constant(kind, 1.5 * 2.0 ** ((23 if bits == 32 else 52) - places)))
    table = ir.Constant(kind, [2.0 ** (i / kind.count) for i in range(kind.count)])
    found = call(f"permvar.{'sf' if bits == 32 else 'df'}", table, builder.bitcast(last_bits, whole))
    p = builder.fmul(_polynomial(builder, _FRACTION_TERMS[bits], r), r)
    return _scaled(builder, _fused(builder, p, found, found), n)


def _limited(builder: Any, x: Any, low: float, high: float) -> Any:
    """x within [low, high]; in this order of operands a NaN passes."""
    least, most = _constant(x.type, low), _constant(x.type, high)
    x = builder.select(builder.fcmp_ordered("<", x, least), least, x)
    return builder.select(builder.fcmp_ordered(">", x, most), most, x)


def _polynomial(builder: Any, terms: list[float], r: Any) -> Any:
    p = _constant(r.type, terms[-1])
    for term in terms[-2::-1]:
        p = _fused(builder, p, r, _constant(r.type, term))
    return p


def _times_power(builder: Any, p: Any, n: Any) -> Any:
    """p 2^n for a whole n, subnormal results included."""
    kind = p.type
    bits = _bits(kind)
    if _SCALES and kind.count * bits == 512:
        return _scaled(builder, p, n)
    word = ir.IntType(bits)
    whole = ir.VectorType(word, kind.count)
    # NaN has no whole part: 0 stands for it, and p is NaN anyway.
    n = builder.select(builder.fcmp_ordered("ord", n, n), n, _constant(kind, 0.0))
    n = builder.fptosi(n, whole)
    first = builder.ashr(n, _constant(whole, 1))
    for part in (first, builder.sub(n, first)):
        mantissa, bias = (23, 127) if bits == 32 else (52, 1023)
        power = builder.shl(builder.add(part, _constant(whole, bias)), _constant(whole, mantissa))
        p = builder.fmul(p, builder.bitcast(power, kind))
    return p


def _scaled(builder: Any, p: Any, n: Any) -> Any:
    """p 2^n by AVX-512's instruction."""
    kind = p.type
    letter, mask = ("ps", ir.IntType(16)) if _bits(kind) == 32 else ("pd", ir.IntType(8))
    shape = ir.FunctionType(kind, [kind, kind, kind, mask, ir.IntType(32)])
    function = cgutils.get_or_insert_function(
        builder.module, shape, f"llvm.x86.avx512.mask.scalef.{letter}.512"
    )
    nearest = ir.Constant(ir.IntType(32), 4)
    return builder.call(function, [p, n, p, ir.Constant(mask, -1), nearest])


def _log1p_small(builder: Any, y: Any) -> Any:
    """log(1 + y) for y in [0, 1]: t (1 + r^2/3 + r^4/5 + ...) with t = 2 y / (2 + y) and r = t / 2"""
    kind = y.type
    t = builder.fdiv(builder.fadd(y, y), builder.fadd(y, _constant(kind, 2.0)))
    r = builder.fmul(t, _constant(kind, 0.5))
    square = builder.fmul(r, r)
    terms = _LOG_TERMS[_bits(kind)]
    p = _constant(kind, 1 / (2 * terms + 1))
    for i in range(terms - 1, 0, -1):
        p = _fused(builder, p, square, _constant(kind, 1 / (2 * i + 1)))
    return _fused(builder, builder.fmul(t, square), p, t)


def _fall(builder: Any, x: Any) -> Any:
    """exp(-|x|)"""
    return _exp(builder, builder.fneg(_call(builder, "fabs", x)))


def _softplus(builder: Any, x: Any) -> Any:
    """max(x, 0) + log1p(exp(-|x|))"""
    zero = _constant(x.type, 0.0)
    positive = builder.select(builder.fcmp_ordered("<", x, zero), zero, x)
    return builder.fadd(positive, _log1p_small(builder, _fall(builder, x)))


def _sigmoid(builder: Any, x: Any) -> Any:
    """1 / (1 + exp(-x)), from exp(-|x|)"""
    one = _constant(x.type, 1.0)
    e = _fall(builder, x)
    top = builder.select(builder.fcmp_ordered("<", x, _constant(x.type, 0.0)), e, one)
    return builder.fdiv(top, builder.fadd(e, one))


def _elementary(code: Any, name: str, about: str) -> Any:
    def function(typing: Any, vector: Any) -> Any:
        def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            return code(builder, values[0])

        return vector(vector), generate

    function.__name__ = function.__qualname__ = name
    function.__doc__ = about
    return intrinsic(function)


exp = _elementary(_exp, "exp", "The exponential.")
exp2 = _elementary(_exp2, "exp2", "The power of 2.")
softplus = _elementary(_softplus, "softplus", "log(1 + exp(x)) without overflow or threshold.")
sigmoid = _elementary(_sigmoid, "sigmoid", "1 / (1 + exp(-x)) without overflow.")


@intrinsic
def clamp(typing: Any, vector: Any, low: Any, high: Any) -> Any:
    """Each lane within [low, high]; a NaN stays."""

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        x = values[0]
        low, high = (_splat(builder, value, x.type) for value in values[1:])
        x = builder.select(builder.fcmp_ordered("<", x, low), low, x)
        return builder.select(builder.fcmp_ordered(">", x, high), high, x)

    return vector(vector, vector.dtype, vector.dtype), generate


@intrinsic
def within(typing: Any, x: Any, y: Any, low: Any, high: Any) -> Any:
    """y where low <= x <= high, else 0."""

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        x, y = values[0], values[1]
        low, high = (_splat(builder, value, x.type) for value in values[2:])
        inside = builder.and_(builder.fcmp_ordered(">=", x, low), builder.fcmp_ordered("<=", x, high))
        return builder.select(inside, y, _constant(y.type, 0.0))

    return x(x, x, x.dtype, x.dtype), generate
