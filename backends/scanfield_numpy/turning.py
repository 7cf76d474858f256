"""Square blocks of registers turned about: rows become columns."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from scanfield_numpy.vector import lane_count


@intrinsic
def square(typing: Any, source: Any, apart: Any, to: Any, stride: Any) -> Any:
    """Write to ``to``, ``stride`` numbers apart, the columns of as many registers as a register has lanes.

    The registers lie ``apart`` numbers apart in ``source``. Perfect shuffles of both halves, log2(lanes) of them.
    """
    width = lane_count(source.dtype.bitwidth // 8)

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        word, align = ir.IntType(64), source.dtype.bitwidth // 8
        vector = ir.VectorType(context.get_value_type(source.dtype), width)
        order = ir.VectorType(ir.IntType(32), width)

        def place(base: Any, offset: Any) -> Any:
            return builder.bitcast(builder.gep(base, [offset]), vector.as_pointer())

        rows = [
            builder.load(place(values[0], builder.mul(values[1], ir.Constant(word, i))), align=align)
            for i in range(width)
        ]
        half = width // 2
        low, high = (
            ir.Constant(order, [start + i // 2 + (width if i % 2 else 0) for i in range(width)])
            for start in (0, half)
        )
        done = 1
        while done < width:
            rows = [
                builder.shuffle_vector(rows[i // 2], rows[i // 2 + half], high if i % 2 else low)
                for i in range(width)
            ]
            done *= 2
        for i, row in enumerate(rows):
            builder.store(row, place(values[2], builder.mul(values[3], ir.Constant(word, i))), align=align)
        return context.get_dummy_value()

    return types.void(source, types.int64, to, types.int64), generate
