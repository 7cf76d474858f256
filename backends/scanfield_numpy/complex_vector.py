"""Vectors of complex numbers: real and imaginary parts side by side in one vector, as an array has them; sine, cosine.

Symbols: a complex number is two lanes, the even one real, the odd one imaginary.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from scanfield_numpy.elementary import _elementary
from scanfield_numpy.vector import (
    _FUSED,
    _bits,
    _call,
    _constant,
    _fused,
    _halves,
    _llvm,
    _shuffled,
    _vector_type,
)


def _product(builder: Any, a: Any, x: Any, signs: tuple[float, float]) -> Any:
    """Re a * x + signs * Im a * (x with its parts swapped)"""
    count = a.type.count
    even = [i // 2 * 2 for i in range(count)]
    real = _shuffled(builder, a, even)
    imaginary = _shuffled(builder, a, [i + 1 for i in even])
    swapped = _shuffled(builder, x, [i ^ 1 for i in range(count)])
    signed = builder.fmul(imaginary, ir.Constant(a.type, list(signs) * (count // 2)))
    return _fused(builder, signed, swapped, builder.fmul(real, x, flags=_FUSED))


@intrinsic
def product(typing: Any, a: Any, x: Any) -> Any:
    """a x"""

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        return _product(builder, values[0], values[1], (-1.0, 1.0))

    return a(a, x), generate


@intrinsic
def conjugate_product(typing: Any, a: Any, x: Any) -> Any:
    """conj(a) x"""

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        return _product(builder, values[0], values[1], (1.0, -1.0))

    return a(a, x), generate


@intrinsic
def every(typing: Any, place: Any, tag: Any) -> Any:
    """The complex number at a place, as often as a vector of this tag holds it."""
    vector = _vector_type(place.dtype, tag)

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        pair = ir.VectorType(_llvm(vector).element, 2)
        pointer = builder.bitcast(values[0], pair.as_pointer())
        value = builder.load(pointer, align=place.dtype.bitwidth // 8)
        return _shuffled(builder, value, [0, 1] * (vector.width // 2))

    return vector(place, tag), generate


@intrinsic
def add_total(typing: Any, place: Any, vector: Any) -> Any:
    """Add the sum of a vector's complex numbers, by halves, to the one at a place."""

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        value = values[1]
        while value.type.count > 2:
            value = builder.fadd(*_halves(builder, value))
        pointer = builder.bitcast(values[0], value.type.as_pointer())
        align = place.dtype.bitwidth // 8
        builder.store(builder.fadd(builder.load(pointer, align=align), value), pointer, align=align)
        return context.get_dummy_value()

    return types.void(place, vector), generate


# ---------------------------------------------------------------------------------------------------------------------
# sine and cosine

# pi / 2 as a sum of three numbers of the dtype: with fused products the remainder of n pi / 2 loses nothing that shows.
_HALF_PI = {
    32: (1.5707963705062866, -4.371138828673793e-08, -1.7151245100058819e-15),
    64: (1.5707963267948966, 6.123233995736766e-17, -1.4973849048591698e-33),
}
# Added to a number, these round it to a whole one, which then stands in the last bits.
_ROUNDER = {32: 1.5 * 2.0**23, 64: 1.5 * 2.0**52}
# Beyond these the nearest multiple of pi / 2 is no longer found by one product.
_FAR = {32: 2.0**15, 64: 2.0**30}
_SINE_DEGREE = {32: 9, 64: 17}


def _terms(builder: Any, square: Any, first: int) -> Any:
    """1/first! - square/(first + 2)! + ..., with the sign of the sine's and the cosine's series at r^first."""
    kind = square.type
    last = _SINE_DEGREE[_bits(kind)] + (first + 1) % 2
    p = None
    for power in range(last, first - 1, -2):
        coefficient = _constant(kind, (-1) ** (power // 2) / math.factorial(power))
        p = coefficient if p is None else _fused(builder, p, square, coefficient)
    return p


def _turn(builder: Any, x: Any, quarters: int) -> Any:
    """sin(x + quarters pi / 2) to about one unit in the last place, for |x| that is not far; NaN of what is not finite.

    x = n pi / 2 + r with |r| <= pi / 4 and a little; both series at r, of which n chooses one and its sign.
    """
    kind = x.type
    bits = _bits(kind)
    whole = ir.VectorType(ir.IntType(bits), kind.count)
    rounder = _constant(kind, _ROUNDER[bits])
    shifted = _call(builder, "fma", x, _constant(kind, 2 / math.pi), rounder)
    n = builder.fsub(shifted, rounder)
    r = x
    for part in _HALF_PI[bits]:
        r = _call(builder, "fma", n, _constant(kind, -part), r)
    square = builder.fmul(r, r)
    odd = _fused(builder, builder.fmul(r, square), _terms(builder, square, 3), r)
    even = _fused(builder, square, _terms(builder, square, 2), _constant(kind, 1.0))
    place = builder.add(builder.bitcast(shifted, whole), ir.Constant(whole, [quarters] * kind.count))
    one, two = (ir.Constant(whole, [i] * kind.count) for i in (1, 2))
    takes_even = builder.icmp_signed("==", builder.and_(place, one), one)
    value = builder.bitcast(builder.select(takes_even, even, odd), whole)
    sign = builder.shl(builder.and_(place, two), ir.Constant(whole, [bits - 2] * kind.count))
    return builder.bitcast(builder.xor(value, sign), kind)


def _sine(builder: Any, x: Any) -> Any:
    return _turn(builder, x, 0)


def _cosine(builder: Any, x: Any) -> Any:
    return _turn(builder, x, 1)


sine = _elementary(_sine, "sine", "The sine of what is not far.")
cosine = _elementary(_cosine, "cosine", "The cosine of what is not far.")


@intrinsic
def far(typing: Any, vector: Any) -> Any:
    """Whether any lane is too large for ``sine`` and ``cosine``; a NaN is not."""

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        x = _call(builder, "fabs", values[0])
        mask = builder.fcmp_ordered(">", x, _constant(x.type, _FAR[_bits(x.type)]))
        word = ir.IntType(x.type.count)
        return builder.icmp_unsigned("!=", builder.bitcast(mask, word), ir.Constant(word, 0))

    return types.boolean(vector), generate


@intrinsic
def damped(typing: Any, exponent: Any, size: Any, x: Any) -> Any:
    """size x, for size = exp(exponent) and a part x of exp(i y).

    As of a complex exponential: 0 where the exponent is -inf, whatever the angle; x where x is 0, though size be
    infinite.
    """

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        exponent, size, x = values
        zero, lowest = _constant(x.type, 0.0), _constant(x.type, -math.inf)
        value = builder.select(builder.fcmp_ordered("==", x, zero), x, builder.fmul(size, x))
        return builder.select(builder.fcmp_ordered("==", exponent, lowest), zero, value)

    return size(exponent, size, x), generate
