"""Where a token's row of an array lies, whatever the array's strides are."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from scanfield_numpy.vector import _ask


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


@intrinsic
def fetch_later(typing: Any, block: Any, steps: Any, place: Any, offset: Any, tokens: Any) -> Any:
    """``fetch`` for what lies so many tokens after ``offset`` in an array whose steps stand in ``block``."""

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        along = builder.gep(values[0], [builder.add(values[1], ir.Constant(ir.IntType(64), 1))])
        later = builder.mul(builder.load(along), values[4])
        _ask(builder, builder.gep(values[2], [builder.add(later, values[3])]), 0)
        return context.get_dummy_value()

    integer = types.int64
    return types.void(block, integer, place, integer, integer), generate
