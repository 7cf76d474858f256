"""Whether the arguments of a call are of a kind that was met before, told by a few hundred machine instructions.

A *kind* is a list of facts about a tuple of arguments: the type of each, and of an array its shape, its strides, its
dtype and that it is aligned. A fact is three offsets, each followed to what stands there (from the tuple to an object,
to a field of it, to what the field points to; a negative one stays where it is), a mask, and the number found under it.
Python takes 2.4 us to ask ten arrays for as much, and 1 us for their addresses; here both take 0.1 us.

What is read are fields of Python's and NumPy's objects that C extensions read, once they are found where they should be.
Written for LLVM, which takes 15 ms to compile it; the same in numba's own language takes 140.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from array import array as Block
from collections.abc import Callable, Sequence
from typing import Any

import numpy
from llvmlite import ir
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target

from scanfield.threads import SLOW_LOCK

_HEADER = object.__basicsize__
_TYPE = _HEADER - 8
# Of a tuple its items, of bytes their first one, of a float its number; of an ``array.array`` where its numbers are.
_ITEMS, _BYTES, _FLOAT, _NUMBERS = (
    tuple.__basicsize__,
    bytes.__basicsize__ - 1,
    float.__basicsize__ - 8,
    _HEADER + 8,
)
# Of NumPy's array: address, number of axes, sizes, strides, base, dtype, flags.
_DATA, _AXES, _SHAPE, _STRIDES, _DTYPE, _FLAGS = (_HEADER + 8 * i for i in (0, 1, 2, 3, 5, 6))
_ALIGNED = 0x100
_STAY, _ALL, _LOW = -1, -1, 0xFFFFFFFF

Same = Callable[[tuple[Any, ...]], bool]


def kind_of(values: Sequence[Any], moves: Sequence[tuple[int, int]]) -> Same | None:
    """A function of ``(*values, *results, block)`` that says whether these values are alike; None where none can be made.

    If they are, it has written the addresses of arrays to the block (an ``array.array``, last in the tuple): ``moves`` are
    pairs of an array's place in the tuple and a place in the block. An option is alike if it is the same object or an
    equal float. The function keeps options and dtypes alive, and no array.
    """
    make = _maker()
    if make is None:
        return None
    facts: list[int] = []
    for i, value in enumerate(values):
        for field, then, mask, number in _facts(value):
            facts += (_ITEMS + 8 * i, field, then, mask, number)
    moved = [x for place, slot in moves for x in (_ITEMS + 8 * place, 8 * slot)]
    block = _ITEMS + 8 * (1 + max([len(values) - 1, *(place for place, _ in moves)]))
    start = 24
    middle = start + 8 * len(facts)
    listed = (block, middle, middle + 8 * len(moved), *facts, *moved)
    found = _Facts(struct.pack(f"{len(listed)}q", *listed))
    found.kept = tuple(value.dtype if type(value) is numpy.ndarray else value for value in values)
    return make(found)


class _Facts(bytes):
    """What the function looks at, and the objects whose addresses stand in it, so that no others come to lie there."""

    kept: tuple[Any, ...] = ()
    code: tuple[Any, ...] = ()
    """The machine code, for as long as a function runs it."""


def _facts(value: Any) -> list[tuple[int, int, int, int]]:
    """Field, place in what the field points to, mask, number."""
    if type(value) is float:
        return [
            (_TYPE, _STAY, _ALL, id(float)),
            (_FLOAT, _STAY, _ALL, *struct.unpack("q", struct.pack("d", value))),
        ]
    if type(value) is not numpy.ndarray:
        return [(_STAY, _STAY, _ALL, id(value))]
    found = [
        (_TYPE, _STAY, _ALL, id(numpy.ndarray)),
        (_AXES, _STAY, _LOW, value.ndim),
        (_DTYPE, _STAY, _ALL, id(value.dtype)),
        (_FLAGS, _STAY, _ALIGNED, _ALIGNED * value.flags.aligned),
    ]
    for axis, (count, step) in enumerate(zip(value.shape, value.strides, strict=True)):
        found.append((_SHAPE, 8 * axis, _ALL, count))
        if count != 1:  # otherwise no step is ever made
            found.append((_STRIDES, 8 * axis, _ALL, step))
    return found


_made: list[Callable[[_Facts], Same] | None] = []


def _maker() -> Callable[[_Facts], Same] | None:
    """What makes such a function from its facts; None where objects do not lie as they should."""
    if not _made:
        with SLOW_LOCK:
            if not _made:
                _made.append(_make_maker())
    return _made[0]


def _make_maker() -> Callable[[_Facts], Same] | None:
    if not _as_expected():
        return None
    with global_compiler_lock:
        library = cpu_target.target_context.codegen().create_library("scanfield_kinds")
        module = library.create_ir_module("scanfield_kinds")
        _write(module)
        library.add_ir_module(module)
        library.finalize()
        method = _Method(b"alike", library.get_pointer_to_function("scanfield_alike"), _ONE_ARGUMENT, None)
    api = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.POINTER(_Method), ctypes.py_object, ctypes.c_void_p)
    create = api(("PyCFunction_NewEx", ctypes.pythonapi))
    pointer = ctypes.pointer(method)

    def make(facts: _Facts) -> Same:
        facts.code = library, method
        return create(pointer, facts, None)  # type: ignore[no-any-return]  # a function in C has no other type

    return make if _tells_apart(make) else None


_ONE_ARGUMENT = 8  # METH_O


class _Method(ctypes.Structure):
    """PyMethodDef."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("about", ctypes.c_char_p),
    )


def _write(module: Any) -> None:
    """The function itself: ``PyObject *scanfield_alike(PyObject *facts, PyObject *given)``, of objects' addresses."""
    word = ir.IntType(64)
    function = ir.Function(module, ir.FunctionType(word, [word, word]), "scanfield_alike")
    facts, given = function.args
    names = ("entry", "fact", "next", "move", "moving", "end")
    entry, fact, after, move, moving, end = (function.append_basic_block(name) for name in names)
    builder = ir.IRBuilder(entry)

    def number(value: int) -> Any:
        return ir.Constant(word, value)

    def read(address: Any, offset: Any) -> Any:
        return builder.load(builder.inttoptr(builder.add(address, offset), word.as_pointer()))

    def follow(address: Any, offset: Any) -> Any:
        with builder.if_else(builder.icmp_signed("<", offset, number(0))) as (stays, goes):
            with stays:
                here = builder.block
            with goes:
                found, there = read(address, offset), builder.block
        joined = builder.phi(word)
        joined.add_incoming(address, here)
        joined.add_incoming(found, there)
        return joined

    start = builder.add(facts, number(_BYTES))
    block = read(read(given, read(start, number(0))), number(_NUMBERS))
    middle, last = (builder.add(start, read(start, number(8 * i))) for i in (1, 2))
    first = builder.add(start, number(24))
    builder.branch(fact)

    builder.position_at_end(fact)
    place = builder.phi(word)
    place.add_incoming(first, entry)
    offset, field, then, mask, wanted = (read(place, number(8 * i)) for i in range(5))
    found = builder.and_(follow(follow(read(given, offset), field), then), mask)
    differs = builder.block
    builder.cbranch(builder.icmp_signed("==", found, wanted), after, end)

    builder.position_at_end(after)
    following = builder.add(place, number(40))
    place.add_incoming(following, after)
    builder.cbranch(builder.icmp_signed("<", following, middle), fact, move)

    builder.position_at_end(move)
    pair = builder.phi(word)
    pair.add_incoming(middle, after)
    builder.cbranch(builder.icmp_signed("<", pair, last), moving, end)

    builder.position_at_end(moving)
    data = read(read(given, read(pair, number(0))), number(_DATA))
    slot = builder.add(block, read(pair, number(8)))
    builder.store(data, builder.inttoptr(slot, word.as_pointer()))
    pair.add_incoming(builder.add(pair, number(16)), moving)
    builder.branch(move)

    builder.position_at_end(end)
    flag = ir.IntType(8 * ctypes.sizeof(ctypes.c_long))
    alike = builder.phi(flag)
    alike.add_incoming(ir.Constant(flag, 0), differs)
    alike.add_incoming(ir.Constant(flag, 1), move)
    answer = ir.FunctionType(word, [flag]).as_pointer()
    from_long = ctypes.cast(ctypes.pythonapi.PyBool_FromLong, ctypes.c_void_p).value or 0
    builder.ret(builder.call(builder.inttoptr(number(from_long), answer), [alike]))


def _as_expected() -> bool:
    """Whether Python and NumPy lay out their objects as this module reads them; nothing is followed here."""
    if (
        sys.implementation.name != "cpython"
        or sys.byteorder != "little"
        or ctypes.sizeof(ctypes.c_void_p) != 8
    ):
        return False
    if not getattr(sys, "_is_gil_enabled", lambda: True)():  # objects have another header
        return False

    def read(value: Any, offset: int) -> int:
        return ctypes.c_int64.from_address(id(value) + offset).value

    askew = numpy.zeros(9, numpy.uint8)[1:].view(numpy.float64)  # not aligned
    for array in (numpy.zeros((2, 3), numpy.float32), numpy.zeros((4, 5, 6), numpy.float64)[1:, ::2], askew):
        fields = {
            _TYPE: id(numpy.ndarray),
            _DATA: array.__array_interface__["data"][0],
            _DTYPE: id(array.dtype),
        }
        if any(read(array, offset) != number for offset, number in fields.items()):
            return False
        if read(array, _AXES) & _LOW != array.ndim:
            return False
        if bool(read(array, _FLAGS) & _ALIGNED) != array.flags.aligned:
            return False
    items, numbers, real = (object(), 1.5), Block("q", [7]), 2.5
    return (
        read(items, _ITEMS) == id(items[0])
        and read(items, _ITEMS + 8) == id(items[1])
        and read(numbers, _NUMBERS) == numbers.buffer_info()[0]
        and read(real, _FLOAT) == struct.unpack("q", struct.pack("d", real))[0]
        and read(b"12345678", _BYTES) == int.from_bytes(b"12345678", "little")
    )


def _tells_apart(make: Callable[[_Facts], Same]) -> bool:
    """A last look before anything relies on it: the sizes and steps of arrays are where they should be."""
    array = numpy.zeros((4, 5, 6), numpy.float32)[1:, ::2]
    for value, field, numbers in ((array, _SHAPE, array.shape), (array, _STRIDES, array.strides)):
        for axis, number in enumerate(numbers):
            for wanted in (number, number + 1):
                facts = (_ITEMS + 8, 64, 64, _ITEMS, field, 8 * axis, _ALL, wanted)
                if make(_Facts(struct.pack("8q", *facts)))((value, Block("q", [0]))) != (wanted == number):
                    return False
    return True
