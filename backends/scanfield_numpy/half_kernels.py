"""float16 to float32 and back a register at a time: NumPy's own cast takes a number at a time.

A task is a piece of the numbers; what is left beyond whole registers stays as it is.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import config
from numba.extending import intrinsic

from scanfield_numpy.compiling import kernel
from scanfield_numpy.vector import (
    ONE,
    _host_features,
    _llvm,
    _vector_type,
    at,
    integers,
    lanes,
    load,
    numbers,
    store,
)

# Places in a kernel's block.
WHOLE, WIDE, HALF = range(3)

PIECE = 2**15
"""Numbers of a task, whole registers of any width."""

# Elsewhere, and for another processor than this one (NUMBA_CPU_NAME), the compiler calls functions that need not be there.
FAST = not config.CPU_NAME and any(_host_features().get(name, False) for name in ("f16c", "neon"))


def _halves(builder: Any, address: Any, offset: Any, vector: Any) -> Any:
    """Where a register's numbers lie in half precision."""
    half = ir.VectorType(ir.HalfType(), vector.width)
    place = builder.inttoptr(address, ir.HalfType().as_pointer())
    return builder.bitcast(builder.gep(place, [offset]), half.as_pointer())


@intrinsic
def load_half(typing: Any, address: Any, offset: Any, place: Any) -> Any:
    """A vector in the place's dtype, from half-precision numbers at an address."""
    vector = _vector_type(place.dtype, ONE)

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        value = builder.load(_halves(builder, values[0], values[1], vector), align=2)
        return builder.fpext(value, _llvm(vector))

    return vector(address, types.int64, place), generate


@intrinsic
def store_half(typing: Any, address: Any, offset: Any, vector: Any) -> Any:
    """Write a vector as half-precision numbers at an address, rounded to nearest, ties to even."""

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        value = builder.fptrunc(values[2], ir.VectorType(ir.HalfType(), vector.width))
        builder.store(value, _halves(builder, values[0], values[1], vector), align=2)
        return context.get_dummy_value()

    return types.void(address, types.int64, vector), generate


@kernel
def widen(first, last, block, memory, kind):
    """Half to wide."""
    n = integers(block)
    wide = numbers(at(n, WIDE), kind)
    for i in range(first * PIECE, min(last * PIECE, at(n, WHOLE)), lanes(wide, ONE)):
        store(wide, i, load_half(at(n, HALF), i, wide))


@kernel
def narrow(first, last, block, memory, kind):
    """Wide to half."""
    n = integers(block)
    wide = numbers(at(n, WIDE), kind)
    for i in range(first * PIECE, min(last * PIECE, at(n, WHOLE)), lanes(wide, ONE)):
        store_half(at(n, HALF), i, load(wide, i, ONE))
