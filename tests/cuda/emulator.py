"""Compiles a kernel's source for the CPU and launches it on NumPy arrays, as CuPy's ``RawModule`` does on a card.

What CuPy and CUDA leave to chance is an error here: an argument of another type than the kernel's parameter, a grid that
is too large, shared memory beyond what a function asked for, and a result that depends on the order of the threads.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

HEADER = Path(__file__).with_name("emulator.h")
HEADERS = (HEADER, HEADER.with_name("races.h"))
OPTIONS = ("-O1", "-g0")
# A read past an array or of shared memory past its end, a shift too far: the process ends with a report.
SANITIZED = (
    "-O0",
    "-g1",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-fno-omit-frame-pointer",
)
# Two threads at the same memory without a barrier in between (races.h), which not every order of threads shows.
RACES = (
    "-O1", "-g0", "-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0", "-fno-threadsafe-statics",
    "-DSCANFIELD_RACES",
)  # fmt: skip

FORWARD, REVERSE = 0, 3
GRID_LIMITS = (2**31 - 1, 65535, 65535)
SHARED_WITHOUT_ASKING, SHARED_AT_MOST = 48 * 1024, 227 * 1024


def missing() -> str | None:
    """Why kernels cannot be emulated on this machine, or None."""
    if platform.machine() not in ("x86_64", "AMD64") or os.name == "nt":
        return f"the emulator of CUDA kernels runs on x86-64 with a POSIX system, not on {platform.machine()}"
    return None if shutil.which("g++") else "the emulator of CUDA kernels needs g++"


def folder() -> Path:
    """Where compiled kernels are kept, for all processes of a run and for later runs of the same sources."""
    made = Path(tempfile.gettempdir()) / f"scanfield-emulated-{os.getuid()}"
    made.mkdir(exist_ok=True)
    return made


def sanitizer_environment() -> dict[str, str]:
    """Variables for a process that loads sanitized kernels: the sanitizer has to be there first."""
    found = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    options = "detect_leaks=0:detect_stack_use_after_return=0"  # Python's own leaks; fibers have stacks of their own
    return {**os.environ, "LD_PRELOAD": os.path.realpath(found.stdout.strip()), "ASAN_OPTIONS": options}


def _plain_environment() -> dict[str, str]:
    """For g++: a sanitizer that this process has would slow it too."""
    return {name: x for name, x in os.environ.items() if name != "LD_PRELOAD"}


def names_of(code: str, options: Sequence[str]) -> list[str]:
    """The kernels of a source: macros are expanded first, as they may make kernels."""
    command = ["g++", "-E", "-P", "-x", "c++", "-DSCANFIELD_EMULATED", "-D__launch_bounds__(...)="]
    command += [*(x for x in options if x.startswith("-D")), "-"]
    made = subprocess.run(
        command, input=code, capture_output=True, text=True, check=True, env=_plain_environment()
    )
    return re.findall(r'extern\s+"C"\s+__global__\s+void\s+(\w+)\s*\(', made.stdout)


def compile_source(code: str, options: Sequence[str] = OPTIONS) -> Path:
    """A shared library with a launcher for each kernel; compiled once for each source and options."""
    whole = b"".join([code.encode(), *(each.read_bytes() for each in HEADERS), repr(tuple(options)).encode()])
    target = folder() / f"{hashlib.sha256(whole).hexdigest()[:20]}.so"
    if target.exists():
        return target
    exports = "\n".join(f"SCANFIELD_EMULATOR_EXPORT({name})" for name in names_of(code, options))
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        source = Path(scratch) / "kernels.cpp"
        source.write_text(f'#include "{HEADER}"\n{code}\n{exports}\n')
        made = Path(scratch) / "kernels.so"
        command = ["g++", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing"]
        # Without the sanitizer's own library, whose functions races.h has.
        libraries = (
            ("-nodefaultlibs", "-lstdc++", "-lm", "-lc", "-lgcc") if options[: len(RACES)] == RACES else ()
        )
        done = subprocess.run(
            [*command, *options, str(source), "-o", str(made), *libraries], capture_output=True, text=True, check=False,
            env=_plain_environment(),
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"g++ refuses the kernels:\n{done.stderr[:4000]}")
        made.replace(target)  # in one step: another process may be looking
    return target


class LaunchError(RuntimeError):
    """A launch that a card would refuse, or that would go wrong there."""


class Kernel:
    """One kernel. Called as CuPy's: ``kernel(grid, block, arguments, shared_mem=bytes)``."""

    def __init__(self, library: ctypes.CDLL, name: str, *, both_orders: bool = True) -> None:
        self.name = name
        self.max_dynamic_shared_size_bytes = SHARED_WITHOUT_ASKING
        self.both_orders = both_orders
        self._launch = getattr(library, f"launch_{name}")
        self._launch.restype = ctypes.c_char_p
        kinds = getattr(library, f"kinds_{name}")
        kinds.restype = ctypes.c_char_p
        self.kinds = kinds().decode().split()
        self._watch = getattr(library, "watch_arrays", None)

    def __call__(self, grid: Any, block: Any, arguments: Sequence[Any], *, shared_mem: int = 0) -> None:
        grid, block = ((*tuple(size), 1, 1)[:3] for size in (grid, block))
        self._check(grid, block, shared_mem)
        held = self._arguments(arguments)
        if self._watch is not None:
            self._watch_arrays(arguments)
        if not self.both_orders:
            self._run(grid, block, held, shared_mem, FORWARD)
            return
        arrays = [x for x in arguments if isinstance(x, np.ndarray) and x.flags.writeable]
        before = [x.copy() for x in arrays]
        self._run(grid, block, held, shared_mem, FORWARD)
        forward = [x.copy() for x in arrays]
        for array, kept in zip(arrays, before, strict=True):
            array[...] = kept
        self._run(grid, block, held, shared_mem, REVERSE)
        for i, (array, kept) in enumerate(zip(arrays, forward, strict=True)):
            if array.tobytes() != kept.tobytes():
                raise LaunchError(f"{self.name}: array {i} depends on the order in which threads run")

    def _check(self, grid: tuple[int, ...], block: tuple[int, ...], shared: int) -> None:
        for axis, size, most in zip("xyz", grid, GRID_LIMITS, strict=True):
            if not 1 <= size <= most:
                raise LaunchError(f"{self.name}: grid {axis} is {size}, allowed are 1 to {most}")
        if not 1 <= block[0] * block[1] * block[2] <= 1024 or min(block) < 1 or block[2] > 64:
            raise LaunchError(f"{self.name}: block {block} has no threads, or more than 1024")
        if shared > min(self.max_dynamic_shared_size_bytes, SHARED_AT_MOST):
            raise LaunchError(
                f"{self.name}: {shared} bytes of shared memory, {self.max_dynamic_shared_size_bytes} were asked for"
            )

    def _arguments(self, arguments: Sequence[Any]) -> list[Any]:
        if len(arguments) != len(self.kinds):
            raise LaunchError(f"{self.name}: {len(arguments)} arguments for {len(self.kinds)} parameters")
        held: list[Any] = []
        for i, (kind, x) in enumerate(zip(self.kinds, arguments, strict=True)):
            if isinstance(x, np.ndarray):
                came, value = "p", ctypes.c_void_p(x.ctypes.data)
            elif isinstance(x, np.uintp) and x == 0 and kind == "p":
                came, value = "p", ctypes.c_void_p(0)
            elif isinstance(x, np.generic):
                came, value = (
                    f"{x.dtype.kind}{x.dtype.itemsize}",
                    np.ctypeslib.as_ctypes_type(x.dtype)(x.item()),
                )
            elif isinstance(x, int | float):  # CuPy passes 8 bytes, whatever the kernel reads
                kinds = ("i8", ctypes.c_longlong) if isinstance(x, int) else ("f8", ctypes.c_double)
                came, value = kinds[0], kinds[1](x)
            else:
                raise LaunchError(f"{self.name}: argument {i} is a {type(x).__name__}")
            if came != kind:
                raise LaunchError(f"{self.name}: argument {i} is {came}, the kernel's parameter {kind}")
            held.append(value)
        return held

    def _watch_arrays(self, arguments: Sequence[Any]) -> None:
        """Tells races.h where the arrays lie; those that share memory (slices of one) as one range."""
        found: list[list[int]] = []
        for i, x in enumerate(arguments):
            if isinstance(x, np.ndarray) and x.size:
                ends = [(n - 1) * step for n, step in zip(x.shape, x.strides, strict=True)]
                low = x.ctypes.data + sum(min(0, end) for end in ends)
                found.append([low, x.ctypes.data + sum(max(0, end) for end in ends) + x.itemsize, i])
        ranges: list[list[int]] = []
        for low, high, i in sorted(found):
            if ranges and low < ranges[-1][1]:
                ranges[-1][1] = max(high, ranges[-1][1])
            else:
                ranges.append([low, high, i])
        count = len(ranges)
        self._watch(
            (ctypes.c_void_p * count)(*(low for low, _, _ in ranges)),
            (ctypes.c_size_t * count)(*(high - low for low, high, _ in ranges)),
            (ctypes.c_int * count)(*(i for _, _, i in ranges)),
            ctypes.c_int(count),
        )

    def _run(self, grid: Any, block: Any, held: list[Any], shared: int, order: int) -> None:
        pointers = (ctypes.c_void_p * len(held))(*(ctypes.addressof(x) for x in held))
        three = ctypes.c_uint * 3
        error = self._launch(
            three(*grid), three(*block), ctypes.c_size_t(shared), pointers, ctypes.c_int(order)
        )
        if error:
            raise LaunchError(f"{self.name}: {error.decode()}")


class Module:
    """All kernels of a source."""

    def __init__(self, code: str, options: Sequence[str] = OPTIONS, *, both_orders: bool = True) -> None:
        self._library = ctypes.CDLL(str(compile_source(code, options)))
        self._both_orders = both_orders and options[: len(RACES)] != RACES  # races need no second order

    def get_function(self, name: str) -> Kernel:
        return Kernel(self._library, name, both_orders=self._both_orders)
