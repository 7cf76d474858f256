"""Kernel sources, compiled once for each device and kind of number, and their launch.

CuPy checks neither the types of a kernel's arguments nor their layout. Kernels here take addresses, 64-bit integers and
numbers of a type that the caller names; ``launch`` makes them so.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import cupy
import numpy

from scanfield_cupy.sources import source

Array = Any

THREADS = 256
# Blocks along y and z of a grid. Kernels walk on by the grid's size where there are more sequences than this.
MOST_ROWS = 65535
# And along x.
MOST_BLOCKS = 2**31 - 1

# The C++ type of a dtype, as a kernel's source names it.
STORED = {
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float32": "float",
    "float64": "double",
    "complex64": "complex64",
    "complex128": "complex128",
}


def options(**defined: str) -> tuple[str, ...]:
    """What the run-time compiler is told: the language, and a file's macros."""
    return ("-std=c++17", *(f"-D{name}={value}" for name, value in sorted(defined.items())))


@cache
def _function(device: int, file: str, defined: tuple[tuple[str, str], ...], name: str, shared: int) -> Any:
    function = _module(device, file, defined).get_function(name)
    if shared > 48 * 1024:  # more has to be asked for
        function.max_dynamic_shared_size_bytes = shared
    return function


@cache
def _module(device: int, file: str, defined: tuple[tuple[str, str], ...]) -> Any:
    return cupy.RawModule(code=source(file), options=options(**dict(defined)))


def launch(
    file: str,
    defined: dict[str, str],
    name: str,
    grid: Sequence[int],
    arguments: Sequence[Array | int | numpy.generic | None],
    shared: int,
    threads: int = THREADS,
) -> None:
    """Run a kernel on the current device and stream. Python's integers become 64-bit ones, None a null address."""
    device = cupy.cuda.Device().id
    function = _function(device, file, tuple(sorted(defined.items())), name, shared)
    function(tuple(grid), (threads,), tuple(_argument(x) for x in arguments), shared_mem=shared)


def blocks_for(elements: int) -> int:
    """Blocks of a launch in which threads take elements in turns; no more than a grid has."""
    return min(-(-elements // THREADS), 2**31 - 1)


def _argument(x: Array | int | numpy.generic | None) -> Any:
    if x is None:
        return numpy.uintp(0)
    if isinstance(x, bool | int):
        return numpy.int64(x)
    return x
