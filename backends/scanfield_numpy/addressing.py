"""Where a token's row of an array lies, whatever the array's strides are."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic


@intrinsic
def offset_of(typing: Any, block: Any, steps: Any, row: Any, token: Any, head: Any) -> Any:
    """``row``, ``token`` and ``head`` times the three steps that stand in ``block`` from place ``steps`` on."""

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        place = builder.gep(values[0], [values[1]])
        total = ir.Constant(ir.IntType(64), 0)
        for i, index in enumerate(values[2:]):
            step = builder.load(builder.gep(place, [ir.Constant(ir.IntType(64), i)]))
            total = builder.add(total, builder.mul(step, index))
        return total

    integer = types.int64
    return integer(block, integer, integer, integer, integer), generate
