"""Moves test data into an array library and back.

Tests make their data in NumPy float64, hand it to one `Library` and compare what comes back with a float64
truth:

    x = library.array(numpy_array, "float32")      # on the library's test device
    library.numpy(x)                               # float64 or complex128 NumPy again (integers stay)
    library.dtype(x)                               # "float32", "bfloat16", ... as a plain word

Every library is met in its least forgiving form: NumPy arrays are read-only, array-api-strict has all
optional parts switched off and sits on a device that is not the default one, Dask counts how often it is
computed.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from typing import Any

import numpy as np

# What `--backend` takes; `readonly` is not one of them because a numpy session runs it as a second parameter.
SESSIONS = ("numpy", "strict", "torch", "jax", "dask", "cupy")


def numpy_dtype(name: str) -> np.dtype:
    """The NumPy dtype of a plain name; bfloat16 is the one of ml_dtypes."""
    if name == "bfloat16":
        return np.dtype(importlib.import_module("ml_dtypes").bfloat16)
    return np.dtype(name)


def complex_of(name: str) -> str:
    """The complex dtype whose parts have the real dtype `name`."""
    return {"float32": "complex64", "float64": "complex128"}[name]


def wide(x: Any) -> np.ndarray:
    """float64 or complex128 copy of any NumPy array of floats (ml_dtypes included); integers and bools stay."""
    x = np.asarray(x)
    if x.dtype.kind in "iub":
        return x
    return x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)


class Library:
    """NumPy with writable arrays; the base of the others."""

    name = "numpy"
    dtypes: tuple[str, ...] = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
    device: Any = None  # None: the library's only or default device
    short = False  # True where every time step is expensive, so that tests use a few steps only

    def __init__(self) -> None:
        self.xp = importlib.import_module("array_api_compat.numpy")

    def __repr__(self) -> str:
        return f"Library({self.name})"

    # -- to the library --------------------------------------------------------------------------------------
    def array(self, x: Any, dtype: str | None = None) -> Any:
        """`x` (NumPy data, or None) as an array of this library.

        `dtype` names a real float type; complex data get the complex type of the same width, integers stay
        what they are, so that one call serves a whole mapping of inputs.
        """
        if x is None:
            return None
        x = np.asarray(x)
        if dtype is None or x.dtype.kind in "iub":
            target = x.dtype
        elif x.dtype.kind == "c":
            target = numpy_dtype(complex_of(dtype))
        else:
            target = numpy_dtype(dtype)
        return self._from_numpy(np.array(x, dtype=target, order="C"))  # always a fresh copy

    def arrays(self, mapping: Mapping[str, Any], dtype: str | None = None) -> dict[str, Any]:
        return {name: self.array(x, dtype) for name, x in mapping.items()}

    def _from_numpy(self, x: np.ndarray) -> Any:
        return x

    # -- and back --------------------------------------------------------------------------------------------
    def raw(self, x: Any) -> np.ndarray:
        """NumPy array with the very bits of `x` (bfloat16 stays bfloat16)."""
        return np.asarray(x)

    def numpy(self, x: Any) -> np.ndarray:
        """float64 or complex128 NumPy array of `x`."""
        return wide(self.raw(x))

    def numpys(self, mapping: Mapping[str, Any]) -> dict[str, np.ndarray]:
        return {name: self.numpy(x) for name, x in mapping.items()}

    def dtype(self, x: Any) -> str:
        return str(x.dtype).rpartition(".")[2]

    def is_array(self, x: Any) -> bool:
        """True when `x` is an array of this library (a result that changed library would slip through
        otherwise).
        """
        return isinstance(x, np.ndarray)

    def on_device(self, x: Any) -> bool:
        """True when `x` lies on the device the inputs were made on."""
        return True

    # -- calls ---------------------------------------------------------------------------------------
    def run(self, function: Any, *arguments: Any) -> Any:
        """`function(*arguments)`, compiled where the library compiles. Arguments are trees of arrays."""
        return function(*arguments)

    def forget(self) -> None:
        """Give back what was compiled so far, if anything."""

    @contextmanager
    def as_users_compile(self) -> Iterator[None]:
        """Within, `run` compiles as a user's program is compiled, where tests do it in less time otherwise."""
        yield

    # -- sizes -----------------------------------------------------------------------------------------------
    def time(self, steps: int) -> int:
        """The number of time steps to test with; fewer where a step is expensive."""
        return min(steps, 5) if self.short else steps


class Readonly(Library):
    """NumPy arrays that raise when anyone writes into them."""

    name = "readonly"

    def _from_numpy(self, x: np.ndarray) -> np.ndarray:
        x.flags.writeable = False
        return x


class Strict(Library):
    """array-api-strict without any optional part, on a device that is not the default."""

    name = "strict"
    dtypes = ("float32", "float64", "complex64", "complex128")

    def __init__(self) -> None:
        self.xp = importlib.import_module("array_api_strict")
        self.xp.set_array_api_strict_flags(
            boolean_indexing=False, data_dependent_shapes=False, enabled_extensions=()
        )
        self.device = self.xp.Device("device1")

    def _from_numpy(self, x: np.ndarray) -> Any:
        return self.xp.asarray(x, device=self.device)

    def raw(self, x: Any) -> np.ndarray:
        return np.array(x.to_device(self.xp.Device("CPU_DEVICE")))

    def is_array(self, x: Any) -> bool:
        return type(x).__module__.startswith("array_api_strict")

    def on_device(self, x: Any) -> bool:
        return bool(x.device == self.device)


class Torch(Library):
    """CPU tensors. Half precision included; `raw` detaches."""

    name = "torch"

    def __init__(self) -> None:
        self.torch = importlib.import_module("torch")
        self.xp = importlib.import_module("array_api_compat.torch")
        self.torch.set_num_threads(1)  # repeatable sums, and two slow cores are shared
        self.torch.use_deterministic_algorithms(True)
        self.device = self.torch.device("cpu")

    def _from_numpy(self, x: np.ndarray) -> Any:
        if x.dtype.name == "bfloat16":  # torch does not know the NumPy extension type
            return self.torch.asarray(x.astype(np.float32)).to(self.torch.bfloat16)
        return self.torch.asarray(x)

    def raw(self, x: Any) -> np.ndarray:
        x = x.detach().resolve_conj().resolve_neg()
        if x.dtype is self.torch.bfloat16:
            return x.to(self.torch.float32).numpy().astype(numpy_dtype("bfloat16"))
        return x.numpy().copy()

    def is_array(self, x: Any) -> bool:
        return isinstance(x, self.torch.Tensor)

    def on_device(self, x: Any) -> bool:
        return bool(x.device == self.device)


# XLA compiles small programs in a third of the time by its older generator of loops and in one piece. Numbers may be
# rounded another way.
_QUICK = {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}
# What of that, and of `jax_disable_most_optimizations`, changes the instructions that run: as it is for users.
_USERS = {
    "xla_cpu_use_fusion_emitters": True,
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
}


def _are_known() -> bool:
    """Whether this jaxlib lies between two that take these flags: XLA ends a process at one that it does not know."""
    return metadata.version("jaxlib").startswith(("0.6.", "0.7.", "0.8.", "0.9.", "0.10."))


def quick_xla(*more: str) -> str:
    """XLA_FLAGS for a process before it imports JAX, with `more`; what was set before comes last and holds."""
    quick = _QUICK if _are_known() else {}
    flags = [f"--{name}={str(value).lower()}" for name, value in quick.items()]
    return " ".join([*flags, *more, *os.environ.get("XLA_FLAGS", "").split()])


class Jax(Library):
    """JAX on the CPU with 64-bit types on, which only a program's main may switch, never the library."""

    name = "jax"
    KEPT = 50  # compiled functions

    def __init__(self) -> None:
        os.environ["XLA_FLAGS"] = quick_xla()
        self.jax = importlib.import_module("jax")
        self.jax.config.update("jax_enable_x64", True)
        self.jax.config.update("jax_default_matmul_precision", "highest")
        # Hundreds of small functions are compiled once and run once: half the time would go into optimising.
        self.jax.config.update("jax_disable_most_optimizations", True)
        # Nobody reads which line of Python an instruction comes from.
        self.jax.config.update("jax_traceback_in_locations_limit", 0)
        # A trace makes many objects that live: seldom look for those that do not.
        gc.set_threshold(50_000, 20, 50)
        self.xp = importlib.import_module("jax.numpy")
        self._compiled: dict[Any, Any] = {}
        self._options: dict[str, Any] = {}

    def run(self, function: Any, *arguments: Any) -> Any:
        key = function, bool(self._options)
        if key not in self._compiled:
            if len(self._compiled) == self.KEPT:
                self.forget()
            self._compiled[key] = self.jax.jit(function, compiler_options=self._options or None)
        return self._compiled[key](*arguments)

    @contextmanager
    def as_users_compile(self) -> Iterator[None]:
        known = _are_known()
        self._options = {name: value for name, value in _USERS.items() if known or name not in _QUICK}
        try:
            yield
        finally:
            self._options = {}

    def forget(self) -> None:
        """Give back what compiled functions hold, megabytes each; glibc keeps freed memory until it is asked."""
        self._compiled.clear()
        self.jax.clear_caches()
        gc.collect()
        if sys.platform.startswith("linux") and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
            trim(0)

    def _from_numpy(self, x: np.ndarray) -> Any:
        return self.xp.asarray(x)

    def is_array(self, x: Any) -> bool:
        return isinstance(x, self.jax.Array)


class Dask(Library):
    """Dask with one thread. An array is one block unless `chunks` says otherwise."""

    name = "dask"
    dtypes = ("float32", "float64", "complex64", "complex128")
    short = True

    def __init__(self) -> None:
        self.dask = importlib.import_module("dask")
        self.da = importlib.import_module("dask.array")
        self.xp = importlib.import_module("array_api_compat.dask.array")
        self.dask.config.set(scheduler="synchronous")

    def _from_numpy(self, x: np.ndarray) -> Any:
        return self.da.from_array(x, chunks=-1)

    def raw(self, x: Any) -> np.ndarray:
        return np.asarray(x.compute())

    def is_array(self, x: Any) -> bool:
        return isinstance(x, self.da.Array)


class Cupy(Library):
    """The current CUDA device."""

    name = "cupy"
    dtypes = ("float16", "float32", "float64", "complex64", "complex128")

    def __init__(self) -> None:
        self.cupy = importlib.import_module("cupy")
        self.xp = importlib.import_module("array_api_compat.cupy")
        self.device = self.cupy.cuda.Device()

    def _from_numpy(self, x: np.ndarray) -> Any:
        return self.cupy.asarray(x)

    def raw(self, x: Any) -> np.ndarray:
        return self.cupy.asnumpy(x)

    def is_array(self, x: Any) -> bool:
        return isinstance(x, self.cupy.ndarray)

    def on_device(self, x: Any) -> bool:
        return bool(x.device == self.device)


_CLASSES = {c.name: c for c in (Library, Readonly, Strict, Torch, Jax, Dask, Cupy)}
_made: dict[str, Library] = {}


def library(name: str) -> Library:
    """The one `Library` of that name; imports the array library at first use."""
    if name not in _made:
        _made[name] = _CLASSES[name]()
    return _made[name]


def has_gpu(name: str) -> bool:
    """Whether a session of that backend can put arrays on a GPU."""
    try:
        if name == "cupy":
            return bool(importlib.import_module("cupy").cuda.is_available())
        if name == "torch":
            return bool(importlib.import_module("torch").cuda.is_available())
        if name == "jax":
            return any(d.platform == "gpu" for d in importlib.import_module("jax").devices())
    except Exception:  # no such library, or a driver that does not start: no GPU either way
        return False
    return False


# -- comparing -----------------------------------------------------------------------------------------------
def deviation(got: Any, want: Any, floor: float = 0.0) -> float:
    """Largest absolute difference over the largest absolute value of the truth.

    Infinite for a wrong shape and for any NaN or infinity that the truth does not have at that place. `floor`
    replaces a smaller largest value, for truths that are zero.
    """
    got, want = wide(got), wide(want)
    if got.shape != want.shape:
        return float("inf")
    if got.size == 0:
        return 0.0
    finite = np.isfinite(want)
    same = np.where(np.isnan(want), np.isnan(got), got == want)
    if not np.all(np.where(finite, np.isfinite(got), same)):
        return float("inf")
    want, got = np.where(finite, want, 0.0), np.where(finite, got, 0.0)
    size = max(float(np.max(np.abs(want))), floor)
    worst = float(np.max(np.abs(got - want)))
    if worst == 0.0:
        return 0.0
    return worst / size if size > 0 else float("inf")


def same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    """Equal dtype, shape and every bit (so 0.0 differs from -0.0, and a NaN equals itself)."""
    left, right = np.ascontiguousarray(left), np.ascontiguousarray(right)
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
