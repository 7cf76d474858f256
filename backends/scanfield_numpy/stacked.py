"""Rows stacked: a vector of as many registers as a tag is long, one for each of that many rows."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from scanfield_numpy.vector import (
    ONE,
    TWO,
    _fused,
    _joined,
    _llvm,
    _splat,
    _vector_address,
    _vector_type,
)

NUMBERS, REGISTERS_OF = ONE, TWO
"""How ``spread`` reads a row: one number for all lanes, or a register."""


def _registers(builder: Any, value: Any, count: int) -> list[Any]:
    width = value.type.count // count
    none = ir.Constant(value.type, ir.Undefined)
    kind = ir.VectorType(ir.IntType(32), width)
    return [
        builder.shuffle_vector(value, none, ir.Constant(kind, list(range(i * width, (i + 1) * width))))
        for i in range(count)
    ]


@intrinsic
def repeated(typing: Any, register: Any, tag: Any) -> Any:
    """The same register for every row."""
    vector = _vector_type(register.dtype, tag)

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        return _joined(builder, [values[0]] * len(tag))

    return vector(register, tag), generate


@intrinsic
def spread(typing: Any, place: Any, first: Any, tag: Any, way: Any) -> Any:
    """Rows from ``first`` on, of which a place holds one number each (``NUMBERS``) or a register (``REGISTERS_OF``)."""
    vector = _vector_type(place.dtype, tag)
    one = _vector_type(place.dtype, ONE)
    size = place.dtype.bitwidth // 8

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        if len(way) == len(REGISTERS_OF):
            offset = builder.mul(values[1], ir.Constant(values[1].type, one.width))
            return builder.load(_vector_address(builder, values[0], offset, vector), align=size)
        rows = [builder.add(values[1], ir.Constant(values[1].type, i)) for i in range(len(tag))]
        numbers = [builder.load(builder.gep(values[0], [row]), align=size) for row in rows]
        return _joined(builder, [_splat(builder, number, _llvm(one)) for number in numbers])

    return vector(place, types.int64, tag, way), generate


@intrinsic
def folded(typing: Any, register: Any, x: Any, y: Any, tag: Any) -> Any:
    """A register and the products of two vectors, added up over their rows."""

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        found = values[0]
        rows = (_registers(builder, value, len(tag)) for value in values[1:3])
        for left, right in zip(*rows, strict=True):
            found = _fused(builder, left, right, found)
        return found

    return register(register, x, y, tag), generate
