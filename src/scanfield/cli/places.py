"""The places where arrays can live on this machine: a library and a device, with the way in and out of NumPy.

The commands make their data in NumPy and carry them to each place. Libraries are imported by name and only
here, when a command asks for them: the rest of scanfield imports none.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy

import scanfield
from scanfield.arrays import Array
from scanfield.errors import ArgumentError, BackendError

Pace = Literal["ready", "compiles", "builds a graph"]


def _no_wait(arrays: list[Array]) -> None:
    """Results are there when the call returns."""


@dataclass(frozen=True)
class Place:
    """One library on one kind of device."""

    library: str
    device: str
    dtypes: tuple[str, ...]
    array: Callable[[numpy.ndarray], Array]
    """A NumPy array, moved here."""
    numpy: Callable[[Array], numpy.ndarray]
    """An array of this place as a NumPy array."""
    scope: Callable[[], Any]
    """A context in which the library computes in the dtypes that it is given, in full precision."""
    pace: Pace = "ready"
    """Whether a call runs at once, compiles for each new shape, or builds a graph with a node for each token."""
    compiled: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function
    """A function of arrays as the users of this library run it: under `jax.jit` on JAX."""
    wait: Callable[[list[Array]], object] = _no_wait
    """Returns once these results are computed: what accelerators and lazy libraries leave for later."""

    def __str__(self) -> str:
        return self.library if self.device == "cpu" else f"{self.library}:{self.device}"


_BOTH = ("float32", "float64")


def places(wanted: Iterable[str] | None = None) -> list[Place]:
    """Every place on this machine, or those of the named libraries, which must be installed."""
    usable = {backend.name: backend for backend in scanfield.backends()}
    if wanted is None:
        names = [name for name in _FINDERS if name in usable and usable[name].status == "usable"]
    else:
        names = list(dict.fromkeys(wanted))
    found: list[Place] = []
    for name in names:
        if name not in _FINDERS:
            raise ArgumentError(f"unknown library {name!r}; known are {', '.join(_FINDERS)}")
        if name not in usable or usable[name].status != "usable":
            raise BackendError(f"{name} is not installed: {usable[name].install if name in usable else name}")
        here = list(_FINDERS[name]())
        if not here and wanted is not None:
            raise BackendError(f"{name} is installed and finds no device")
        found += here
    return found


def absent() -> dict[str, str]:
    """The libraries that have no place on this machine, and why."""
    known = {backend.name: backend for backend in scanfield.backends()}
    reasons: dict[str, str] = {}
    for name, find in _FINDERS.items():
        if name not in known or known[name].status != "usable":
            reasons[name] = known[name].detail if name in known else "not known"
        elif not list(find()):
            reasons[name] = "installed, and finds no device"
    return reasons


def _numpy() -> Iterator[Place]:
    yield Place("numpy", "cpu", _BOTH, numpy.asarray, numpy.asarray, ExitStack)


def _torch() -> Iterator[Place]:
    torch = importlib.import_module("torch")
    kinds = ["cpu"]
    if torch.cuda.is_available():
        kinds.append("cuda")
    if torch.backends.mps.is_available():
        kinds.append("mps")
    for kind in kinds:
        yield Place(
            "torch",
            kind,
            ("float32",) if kind == "mps" else _BOTH,
            partial(_to_torch, kind),
            lambda array: array.detach().cpu().resolve_conj().resolve_neg().numpy(),
            _torch_full_precision if kind == "cuda" else ExitStack,
            wait=_no_wait if kind == "cpu" else partial(_torch_wait, kind),
        )


def _torch_wait(kind: str, arrays: list[Array]) -> None:
    getattr(importlib.import_module("torch"), kind).synchronize()


def _to_torch(kind: str, array: numpy.ndarray) -> Array:
    # A copy: asarray shares memory with NumPy, and some arrays here are read-only.
    return importlib.import_module("torch").asarray(array.copy(), device=kind)


@contextmanager
def _torch_full_precision() -> Iterator[None]:
    """Compute float32 matrix products in float32: TF32 keeps ten bits, and the comparison would see it."""
    matmul = importlib.import_module("torch").backends.cuda.matmul
    before, matmul.allow_tf32 = matmul.allow_tf32, False
    try:
        yield
    finally:
        matmul.allow_tf32 = before


def _jax() -> Iterator[Place]:
    jax = importlib.import_module("jax")

    def scope() -> ExitStack:
        stack = ExitStack()
        # Without it JAX turns float64 into float32 silently.
        stack.enter_context(jax.enable_x64(True))
        stack.enter_context(jax.default_matmul_precision("highest"))
        return stack

    for kind in dict.fromkeys([jax.default_backend(), "cpu"]):
        device = jax.devices(kind)[0]
        yield Place(
            "jax",
            "cuda" if kind == "gpu" else kind,
            _BOTH,
            partial(jax.device_put, device=device),
            numpy.asarray,
            scope,
            "compiles",
            jax.jit,
            jax.block_until_ready,
        )


def _cupy() -> Iterator[Place]:
    cupy = importlib.import_module("cupy")
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError:
        count = 0  # installed without a driver: no place to put an array
    if count:
        yield Place(
            "cupy",
            "rocm" if cupy.cuda.runtime.is_hip else "cuda",
            _BOTH,
            cupy.asarray,
            cupy.asnumpy,
            ExitStack,
            wait=lambda arrays: cupy.cuda.get_current_stream().synchronize(),
        )


def _dask() -> Iterator[Place]:
    dask = importlib.import_module("dask.array")

    @contextmanager
    def scope() -> Iterator[None]:
        with warnings.catch_warnings():
            # It warns of many small blocks, which is what a token at a time makes of an array.
            warnings.simplefilter("ignore", dask.PerformanceWarning)
            yield

    yield Place(
        "dask",
        "cpu",
        _BOTH,
        lambda array: dask.from_array(array, chunks=-1),
        lambda array: numpy.asarray(array.compute(scheduler="synchronous")),
        scope,
        "builds a graph",
        wait=lambda arrays: importlib.import_module("dask").compute(*arrays),
    )


_FINDERS: dict[str, Callable[[], Iterator[Place]]] = {
    "numpy": _numpy,
    "torch": _torch,
    "jax": _jax,
    "cupy": _cupy,
    "dask": _dask,
}
