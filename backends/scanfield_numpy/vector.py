"""Vectors of one, two or four registers as a type of numba's, so that a kernel says itself what is SIMD.

numba leaves vectorisation to LLVM's loop passes, which depend on what they can prove about aliases; here a load is a
load of a whole register. Glossary: a *place* is a pointer to numbers, and offsets from it count numbers. A *tag* is a
tuple whose length is the number of registers of a vector: ``ONE``, ``TWO``, ``FOUR``.

The arithmetic may fuse a product and a sum, and may do nothing else: NaN, infinities, signed zeros and subnormal
numbers come out as IEEE 754 says.
"""

from __future__ import annotations

import operator
import os
import platform
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils, config
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model

ONE = (0,)
TWO = (0, 0)
FOUR = (0, 0, 0, 0)

_FUSED = ("contract",)


def _host_features() -> dict[str, bool]:
    """What the processor has that numba compiles for: this machine's, unless numba was told another one."""
    if config.CPU_FEATURES is not None:
        told = [word.strip() for word in config.CPU_FEATURES.split(",")]
        return {word[1:]: word[0] == "+" for word in told if word[:1] in ("+", "-")}
    if config.CPU_NAME is not None:
        return {}
    found = dict(binding.get_host_cpu_features())
    if not config.ENABLE_AVX:
        # NUMBA_ENABLE_AVX=0, and numba's own choice on some processors. What the other two do is encoded as AVX is.
        found |= {name: False for name in found if name.startswith("avx") or name in ("fma", "f16c")}
    return found


def _register_bytes() -> int:
    """Of this machine's vector registers; ``SCANFIELD_VECTOR_BYTES`` (16, 32 or 64) says otherwise."""
    asked = os.environ.get("SCANFIELD_VECTOR_BYTES", "")
    if asked:
        if asked not in ("16", "32", "64"):
            raise ValueError(f"SCANFIELD_VECTOR_BYTES: {asked!r}; allowed are 16, 32 and 64")
        return int(asked)
    features = _host_features()
    return 64 if features.get("avx512f") else 32 if features.get("avx") else 16


REGISTER_BYTES = _register_bytes()
REGISTERS = 32 if _host_features().get("avx512vl", platform.machine() in ("aarch64", "arm64")) else 16
"""How many there are."""
# One instruction scales by a power of two, subnormal results and overflow included.
_SCALES = REGISTER_BYTES == 64 and _host_features().get("avx512f", False)


class Vector(types.Type):  # type: ignore[misc]  # numba ships no types
    """So many numbers of one floating type, side by side in registers."""

    def __init__(self, dtype: Any, width: int) -> None:
        self.dtype = dtype
        self.width = width
        super().__init__(name=f"Vector({dtype}, {width})")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]  # numba ships no types
    def __init__(self, manager: Any, kind: Any) -> None:
        element = manager.lookup(kind.dtype).get_value_type()
        super().__init__(manager, kind, ir.VectorType(element, kind.width))


def lane_count(itemsize: int) -> int:
    """Numbers of this size in one register."""
    return REGISTER_BYTES // itemsize


def _vector_type(dtype: Any, tag: Any) -> Vector:
    return Vector(dtype, len(tag) * lane_count(dtype.bitwidth // 8))


def _llvm(kind: Vector) -> Any:
    return ir.VectorType(ir.FloatType() if kind.dtype.bitwidth == 32 else ir.DoubleType(), kind.width)


def _constant(kind: Any, value: float) -> Any:
    return ir.Constant(kind, [value] * kind.count)


def _suffix(kind: Any) -> str:
    names = {"float": "f32", "double": "f64", "i32": "i32", "i64": "i64"}
    return f"v{kind.count}{names[str(kind.element)]}"


def _vector_address(builder: Any, place: Any, offset: Any, vector: Any) -> Any:
    return builder.bitcast(builder.gep(place, [offset]), _llvm(vector).as_pointer())


def _splat(builder: Any, value: Any, kind: Any) -> Any:
    single = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    order = ir.Constant(ir.VectorType(ir.IntType(32), kind.count), [0] * kind.count)
    return builder.shuffle_vector(single, ir.Constant(kind, ir.Undefined), order)


# ---------------------------------------------------------------------------------------------------------------------
# memory


@intrinsic
def lanes(typing: Any, place: Any, tag: Any) -> Any:
    """Numbers in a vector of this tag and the place's dtype, a constant."""
    width = _vector_type(place.dtype, tag).width

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        return ir.Constant(ir.IntType(64), width)

    return types.int64(place, tag), generate


@intrinsic
def at(typing: Any, place: Any, offset: Any) -> Any:
    """One number."""

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        return builder.load(builder.gep(values[0], [values[1]]), align=place.dtype.bitwidth // 8)

    return place.dtype(place, types.int64), generate


@intrinsic
def put(typing: Any, place: Any, offset: Any, number: Any) -> Any:
    """Write one number."""

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        builder.store(values[2], builder.gep(values[0], [values[1]]), align=place.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(place, types.int64, place.dtype), generate


@intrinsic
def load(typing: Any, place: Any, offset: Any, tag: Any) -> Any:
    """A vector."""
    vector = _vector_type(place.dtype, tag)

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        pointer = _vector_address(builder, values[0], values[1], vector)
        return builder.load(pointer, align=place.dtype.bitwidth // 8)

    return vector(place, types.int64, tag), generate


@intrinsic
def store(typing: Any, place: Any, offset: Any, vector: Any) -> Any:
    """Write a vector."""

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        pointer = _vector_address(builder, values[0], values[1], vector)
        builder.store(values[2], pointer, align=place.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(place, types.int64, vector), generate


def _first_lanes(builder: Any, count: Any, width: int) -> Any:
    kind = ir.VectorType(ir.IntType(32), width)
    short = _splat(builder, builder.trunc(count, ir.IntType(32)), kind)
    return builder.icmp_signed("<", ir.Constant(kind, list(range(width))), short)


def _aligned(place: Any) -> Any:
    return ir.Constant(ir.IntType(32), place.dtype.bitwidth // 8)


def _load_first(builder: Any, place: Any, pointer: Any, count: Any, kind: Any) -> Any:
    mask = _first_lanes(builder, count, kind.count)
    shape = ir.FunctionType(kind, [pointer.type, ir.IntType(32), mask.type, kind])
    function = cgutils.get_or_insert_function(builder.module, shape, f"llvm.masked.load.{_suffix(kind)}.p0")
    return builder.call(function, [pointer, _aligned(place), mask, ir.Constant(kind, None)])


def _store_first(builder: Any, place: Any, pointer: Any, count: Any, value: Any) -> None:
    mask = _first_lanes(builder, count, value.type.count)
    shape = ir.FunctionType(ir.VoidType(), [value.type, pointer.type, ir.IntType(32), mask.type])
    name = f"llvm.masked.store.{_suffix(value.type)}.p0"
    function = cgutils.get_or_insert_function(builder.module, shape, name)
    builder.call(function, [value, pointer, _aligned(place), mask])


def _either(builder: Any, condition: Any, whole: Any, edge: Any) -> Any:
    """The value of one of two pieces of code."""
    with builder.if_else(condition) as (then, otherwise):
        with then:
            first = whole()
            first_block = builder.block
        with otherwise:
            second = edge()
            second_block = builder.block
    value = builder.phi(first.type)
    value.add_incoming(first, first_block)
    value.add_incoming(second, second_block)
    return value


def _is_whole(builder: Any, count: Any, width: int) -> Any:
    return builder.icmp_signed(">=", count, ir.Constant(count.type, width))


def _lanes_there(builder: Any, place: Any, pointer: Any, count: Any, kind: Any) -> Any:
    return _either(
        builder,
        _is_whole(builder, count, kind.count),
        lambda: builder.load(pointer, align=place.dtype.bitwidth // 8),
        lambda: _load_first(builder, place, pointer, count, kind),
    )


@intrinsic
def first_lanes(typing: Any, place: Any, offset: Any, count: Any, tag: Any) -> Any:
    """A vector of which ``count`` lanes are there; zeros in the others, whose memory is not read."""
    vector = _vector_type(place.dtype, tag)

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        pointer = _vector_address(builder, values[0], values[1], vector)
        return _lanes_there(builder, place, pointer, values[2], _llvm(vector))

    return vector(place, types.int64, types.int64, tag), generate


@intrinsic
def put_lanes(typing: Any, place: Any, offset: Any, count: Any, vector: Any, tag: Any) -> Any:
    """Write the first ``count`` lanes of a vector."""

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        pointer = _vector_address(builder, values[0], values[1], vector)
        with builder.if_else(_is_whole(builder, values[2], vector.width)) as (whole, edge):
            with whole:
                builder.store(values[3], pointer, align=place.dtype.bitwidth // 8)
            with edge:
                _store_first(builder, place, pointer, values[2], values[3])
        return context.get_dummy_value()

    return types.void(place, types.int64, types.int64, vector, tag), generate


@intrinsic
def put_past_cache(typing: Any, place: Any, offset: Any, count: Any, vector: Any, past: Any) -> Any:
    """``put_lanes``; where ``past`` is not 0 the place is one of a whole register, and the cache does not keep it."""

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        pointer = _vector_address(builder, values[0], values[1], vector)
        past = builder.icmp_signed("!=", values[4], ir.Constant(values[4].type, 0))
        with builder.if_else(past) as (streamed, kept):
            with streamed:
                written = builder.store(values[3], pointer, align=REGISTER_BYTES)
                one = ir.Constant(ir.IntType(32), 1)
                written.set_metadata("nontemporal", builder.module.add_metadata([one]))
            with kept, builder.if_else(_is_whole(builder, values[2], vector.width)) as (whole, edge):
                with whole:
                    builder.store(values[3], pointer, align=place.dtype.bitwidth // 8)
                with edge:
                    _store_first(builder, place, pointer, values[2], values[3])
        return context.get_dummy_value()

    return types.void(place, types.int64, types.int64, vector, types.int64), generate


KEPT, PASSING = ONE, TWO
"""How ``put_whole`` writes: as stores do, or past the cache, to a place of a whole register."""


@intrinsic
def put_whole(typing: Any, place: Any, offset: Any, vector: Any, way: Any) -> Any:
    """Write a vector the one way or the other, which a kernel is compiled for."""

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        pointer = _vector_address(builder, values[0], values[1], vector)
        passing = len(way) == len(PASSING)
        align = REGISTER_BYTES if passing else place.dtype.bitwidth // 8
        written = builder.store(values[2], pointer, align=align)
        if passing:
            one = ir.Constant(ir.IntType(32), 1)
            written.set_metadata("nontemporal", builder.module.add_metadata([one]))
        return context.get_dummy_value()

    return types.void(place, types.int64, vector, way), generate


def _ask(builder: Any, pointer: Any, writes: int) -> None:
    """For a line of the cache."""
    pointer, flag = builder.bitcast(pointer, ir.IntType(8).as_pointer()), ir.IntType(32)
    shape = ir.FunctionType(ir.VoidType(), [pointer.type, flag, flag, flag])
    asked = cgutils.get_or_insert_function(builder.module, shape, "llvm.prefetch.p0")
    builder.call(asked, [pointer, *(ir.Constant(flag, value) for value in (writes, 3, 1))])


def _asking(name: str, about: str, writes: int) -> Any:
    def function(typing: Any, place: Any, offset: Any) -> Any:
        def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            _ask(builder, builder.gep(values[0], [values[1]]), writes)
            return context.get_dummy_value()

        return types.void(place, types.int64), generate

    function.__name__ = function.__qualname__ = name
    function.__doc__ = about
    return intrinsic(function)


fetch = _asking("fetch", "Ask for what lies there, which will be read soon; it need not be any array's.", 0)
fetch_own = _asking("fetch_own", "``fetch`` for what will be written.", 1)


@intrinsic
def settle(typing: Any) -> Any:
    """Everything that was written past the cache is there for other threads."""

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def pick(typing: Any, place: Any, offset: Any, count: Any, each: Any, tag: Any) -> Any:
    """``first_lanes``; where ``each`` is 0 one number for all lanes, the place's first."""
    vector = _vector_type(place.dtype, tag)

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        kind = _llvm(vector)
        pointer = _vector_address(builder, values[0], values[1], vector)
        single = builder.icmp_signed("==", values[3], ir.Constant(values[3].type, 0))
        return _either(
            builder,
            single,
            lambda: _splat(builder, builder.load(values[0], align=place.dtype.bitwidth // 8), kind),
            lambda: _lanes_there(builder, place, pointer, values[2], kind),
        )

    return vector(place, types.int64, types.int64, types.int64, tag), generate


@intrinsic
def integers(typing: Any, address: Any) -> Any:
    """A place of int64, from its address."""

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], ir.IntType(64).as_pointer())

    return types.CPointer(types.int64)(types.int64), generate


@intrinsic
def numbers(typing: Any, address: Any, kind: Any) -> Any:
    """A place of numbers of the type of ``kind``, from its address."""

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], context.get_value_type(kind).as_pointer())

    return types.CPointer(kind)(types.int64, kind), generate


@intrinsic
def shifted(typing: Any, place: Any, offset: Any) -> Any:
    """The place so many numbers further on."""

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        return builder.gep(values[0], [values[1]])

    return place(place, types.int64), generate


@intrinsic
def zero(typing: Any, place: Any) -> Any:
    """0 in the place's dtype."""

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        return context.get_constant(place.dtype, 0)

    return place.dtype(place), generate


# ---------------------------------------------------------------------------------------------------------------------
# arithmetic


@intrinsic
def least(typing: Any, a: Any, b: Any) -> Any:
    """The smaller of two integers (Python's own min is a function to compile)."""

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        return builder.select(builder.icmp_signed("<", values[0], values[1]), values[0], values[1])

    return types.int64(types.int64, types.int64), generate


@intrinsic
def zeros(typing: Any, place: Any, tag: Any) -> Any:
    """0, in the place's dtype, in every lane."""
    vector = _vector_type(place.dtype, tag)

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        return ir.Constant(_llvm(vector), None)

    return vector(place, tag), generate


@intrinsic
def splat(typing: Any, place: Any, number: Any, tag: Any) -> Any:
    """One number, in the place's dtype, in every lane."""
    vector = _vector_type(place.dtype, tag)

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        return _splat(builder, values[1], _llvm(vector))

    return vector(place, place.dtype, tag), generate


def _fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a b + c"""
    return builder.fadd(builder.fmul(a, b, flags=_FUSED), c, flags=_FUSED)


def _call(builder: Any, name: str, *values: Any) -> Any:
    kind = values[0].type
    shape = ir.FunctionType(kind, [value.type for value in values])
    return builder.call(
        cgutils.get_or_insert_function(builder.module, shape, f"llvm.{name}.{_suffix(kind)}"), values
    )


def _bits(kind: Any) -> int:
    return 32 if isinstance(kind.element, ir.FloatType) else 64


def _operator(symbol: Any, instruction: str) -> None:
    class Template(AbstractTemplate):  # type: ignore[misc]  # numba ships no types
        def generic(self, args: Any, keywords: Any) -> Any:
            left, right = args
            if isinstance(left, Vector) and right in (left, left.dtype):
                return signature(left, left, right)
            if isinstance(right, Vector) and left == right.dtype:
                return signature(right, left, right)
            return None

    infer_global(symbol)(Template)

    def lower(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        kind = _llvm(sig.return_type)
        wide = [
            value if isinstance(given, Vector) else _splat(builder, value, kind)
            for given, value in zip(sig.args, values, strict=True)
        ]
        return getattr(builder, instruction)(*wide, flags=_FUSED)

    lower_builtin(symbol, Vector, Vector)(lower)
    lower_builtin(symbol, Vector, types.Float)(lower)
    lower_builtin(symbol, types.Float, Vector)(lower)


for _symbol, _instruction in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _operator(_symbol, _instruction)


@intrinsic
def fused(typing: Any, x: Any, y: Any, z: Any) -> Any:
    """x y + z, everywhere with one rounding or everywhere with two.

    The operators fuse only where no branch comes between them, so that two ways through a kernel may differ in a bit.
    """

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        return _call(builder, "fmuladd", *values)

    return x(x, y, z), generate


def _shuffled(builder: Any, value: Any, order: list[int]) -> Any:
    places = ir.Constant(ir.VectorType(ir.IntType(32), len(order)), order)
    return builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), places)


def _halves(builder: Any, value: Any) -> tuple[Any, ...]:
    """The lower and the upper half of a vector."""
    count = value.type.count // 2
    none = ir.Constant(value.type, ir.Undefined)
    order = ir.VectorType(ir.IntType(32), count)
    return tuple(
        builder.shuffle_vector(value, none, ir.Constant(order, list(range(start, start + count))))
        for start in (0, count)
    )


def _joined(builder: Any, parts: list[Any]) -> Any:
    """Vectors end to end; as many as a power of two."""
    while len(parts) > 1:
        order = ir.Constant(
            ir.VectorType(ir.IntType(32), 2 * parts[0].type.count), list(range(2 * parts[0].type.count))
        )
        parts = [builder.shuffle_vector(a, b, order) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


@intrinsic
def total(typing: Any, vector: Any) -> Any:
    """The sum of all lanes, by halves."""

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        value = values[0]
        while value.type.count > 1:
            value = builder.fadd(*_halves(builder, value))
        return builder.extract_element(value, ir.Constant(ir.IntType(32), 0))

    return vector.dtype(vector), generate


@intrinsic
def totals(typing: Any, place: Any, offset: Any) -> Any:
    """The sums of as many registers as a register has lanes, which lie one after the other, in one register."""
    vector = _vector_type(place.dtype, ONE)

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        width = vector.width
        word = ir.IntType(64)
        rows = [
            builder.load(
                _vector_address(
                    builder, values[0], builder.add(values[1], ir.Constant(word, i * width)), vector
                ),
                align=place.dtype.bitwidth // 8,
            )
            for i in range(width)
        ]
        order = ir.VectorType(ir.IntType(32), width)
        even, odd = (ir.Constant(order, list(range(start, 2 * width, 2))) for start in (0, 1))
        while len(rows) > 1:
            rows = [
                builder.fadd(builder.shuffle_vector(a, b, even), builder.shuffle_vector(a, b, odd))
                for a, b in zip(rows[::2], rows[1::2], strict=True)
            ]
        return rows[0]

    return vector(place, types.int64), generate
