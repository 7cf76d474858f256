"""The C loops in c/scans.c, built into a temporary folder, and called on NumPy arrays."""

from __future__ import annotations

import atexit
import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

SOURCE = Path(__file__).resolve().parent / "c" / "scans.c"
IEEE = ("-O3", "-march=native", "-std=gnu11")
FAST = (*IEEE, "-ffast-math")


class Absent(Exception):
    """Why there is no compiled C."""


class Loops:
    """One build of the loops. Each makes its outputs anew, as a call of scanfield does."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.lanes: int = library.lanes()

    def _run(self, name: str, *arguments: Any) -> None:
        self._made(name, *arguments)()

    def _made(self, name: str, *arguments: Any) -> Callable[[], None]:
        """A call with its arguments converted, for what is so short that this would be seen."""
        convert = {
            int: ctypes.c_ssize_t,
            float: ctypes.c_float,
            np.ndarray: lambda x: ctypes.c_void_p(x.ctypes.data),
        }
        function, converted = getattr(self._library, name), [convert[type(x)](x) for x in arguments]
        return lambda held=arguments: function(*converted)

    def selective(self, u, delta, A, B, C):
        """The selective scan of one sequence."""
        _, time, channels = u.shape
        N = A.shape[1]
        output, last = np.empty_like(u), np.empty((1, channels, N), np.float32)
        work = np.empty(2 * N * self.lanes, np.float32)
        self._run("selective", time, channels, N, u, delta, A, B, C, output, last, work)
        return output, last

    def selective_training(self, u, delta, A, B, C, d_output):
        """The selective scan of one sequence and its gradients, by name."""
        _, time, channels = u.shape
        N = A.shape[1]
        found = {
            name: np.empty_like(x)
            for name, x in zip(["u", "delta", "A", "B", "C"], (u, delta, A, B, C), strict=True)
        }
        output, starts = np.empty_like(u), np.empty(time // 32 * channels * N, np.float32)
        work = np.empty(32 * self.lanes * (2 * N + 10) + 3 * N * channels, np.float32)
        arrays = (u, delta, A, B, C, d_output, output, *found.values(), starts, work)
        self._run("selective_training", time, channels, N, *arrays)
        return found

    def gdn2(self, query, key, value, log_decay, erase, write):
        """The gated delta rule of one sequence."""
        _, time, heads, K = query.shape
        V = value.shape[3]
        output, last = np.empty_like(value), np.empty((1, heads, K, V), np.float32)
        work = np.empty((K + 2) * 4 * self.lanes + 4 * K, np.float32)
        arrays = (query, key, value, log_decay, erase, write, output, last, work)
        self._run("gated_delta", time, heads, K, V, K**-0.5, *arrays)
        return output, last

    def gdn2_moves(self, query, key, value, log_decay, erase, write):
        """A call: what ``gdn2`` reads and writes, without its arithmetic."""
        _, time, heads, K = query.shape
        arrays = (query, key, value, log_decay, erase, write, np.empty_like(value))
        return self._made("gated_delta_moves", time, heads, K, value.shape[3], *arrays)

    def multiply_adds(self, count):
        """A call: at least so many multiply-adds in registers, as fast as the machine does them."""
        x, y = (np.full(self.lanes, number, np.float32) for number in (0.5, 1.0))
        rounds = -(-count // (12 * self.lanes))
        return self._made("multiply_adds", rounds, x, y, np.empty_like(x))

    def gdn2_step(self, state, query, key, value, log_decay, erase, write, *, output, last, past):
        """A call: one token of the gated delta rule into arrays that are there; ``past`` the cache or not."""
        batch, heads, K, V = state.shape
        work = np.empty(8 * K, np.float32)
        arrays = (query, key, value, log_decay, erase, write, state, output, last)
        return self._made("gated_delta_step", batch * heads, K, V, K**-0.5, *arrays, int(past), work)

    def copy(self, a, output, *, past):
        """A call: one array into another."""
        return self._made("copy", a.size, a, output, int(past))

    def linear(self, a, b):
        """The linear scan."""
        output, last = np.empty_like(a), np.empty((a.shape[0], a.shape[2]), np.float32)
        self._run("linear", *a.shape, a, b, output, last)
        return output, last

    def triad(self, a, b, output):
        """STREAM's triad into an array that is there."""
        self._run("triad", output.size, a, b, output)


@functools.cache
def loops(flags: tuple[str, ...]) -> Loops:
    """The loops built with these flags."""
    compiler = shutil.which("gcc")
    if compiler is None:
        raise Absent("no gcc here")
    folder = Path(tempfile.mkdtemp(prefix="scanfield-bench-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    target = folder / "scans.so"
    wide = ("-mprefer-vector-width=512",) if "avx512f" in _processor_flags() else ()
    command = [compiler, *flags, *wide, "-shared", "-fPIC", str(SOURCE), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Absent(f"gcc failed: {done.stderr.splitlines()[0]}")
    return Loops(ctypes.CDLL(str(target)))


def version() -> str | None:
    """Of the compiler."""
    compiler = shutil.which("gcc")
    if compiler is None:
        return None
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[0]


def _processor_flags() -> str:
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
