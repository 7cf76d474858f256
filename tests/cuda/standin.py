"""A CuPy made of NumPy arrays that nobody can mistake for NumPy arrays, and of kernels that run on the emulator.

``install()`` puts it in CuPy's place. What CuPy refuses is refused: NumPy arrays among its own, and to become a NumPy
array unasked. Copies between "host" and "device" are counted in ``TRANSFERS``, launches listed in ``LAUNCHES``. New
memory is full of NaN. Computing with an array of another device than the current one, which CuPy does across the bus or not
at all, is an error; views are not computed.
"""

from __future__ import annotations

import sys
import time
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import emulator
import numpy as np

TRANSFERS: Counter[str] = Counter()


class Launch(NamedTuple):
    name: str
    grid: tuple[int, ...]
    device: int
    stream: Any


LAUNCHES: list[Launch] = []
_ALLOCATORS: list[Any] = [None]


class Device:
    """A device of which there are two; ``with`` makes it the current one."""

    _current = [0]

    def __init__(self, number: int | Device | None = None) -> None:
        self.id = self._current[-1] if number is None else getattr(number, "id", number)

    @property
    def attributes(self) -> dict[str, int]:
        return {"MaxSharedMemoryPerBlockOptin": emulator.SHARED_AT_MOST, "MultiProcessorCount": 132}

    compute_capability = "90"

    def synchronize(self) -> None:
        """Everything has run already."""

    def __enter__(self) -> Device:
        self._current.append(self.id)
        return self

    def __exit__(self, *error: object) -> None:
        self._current.pop()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and self.id == other.id

    def __hash__(self) -> int:
        return self.id

    def __repr__(self) -> str:
        return f"<CUDA Device {self.id}>"


class Stream:
    """A stream, made from another library's or new; ``with`` makes it the current one of the current device."""

    _entered: dict[int, list[Any]] = {}

    def __init__(self, external: Any = "own") -> None:
        self.external = external

    @classmethod
    def current(cls) -> Any:
        return (cls._entered.get(Device().id) or ["default"])[-1]

    @property
    def ptr(self) -> Any:
        return id(self) if self.external == "own" else self.external

    @classmethod
    def from_external(cls, stream: Any) -> Stream:
        return cls(stream)

    def synchronize(self) -> None:
        """Everything has run already."""

    def __enter__(self) -> Stream:
        self._entered.setdefault(Device().id, []).append(self.external)
        return self

    def __exit__(self, *error: object) -> None:
        self._entered[Device().id].pop()


class Event:
    """A mark in a stream: of the time on the host."""

    def record(self) -> None:
        self.time = time.perf_counter()

    def synchronize(self) -> None:
        """Everything has run already."""


class OtherDevice(RuntimeError):
    """Arrays of another device than the current one are computed with."""


def check_devices(what: str, values: Any) -> None:
    for x in values:
        if isinstance(x, tuple | list):
            check_devices(what, x)
        elif isinstance(x, ndarray) and x.device != Device():
            raise OtherDevice(f"{what}: an array on {x.device}, the current device is {Device()}")


def made(what: str, found: Any, arguments: Any) -> Any:
    """A result: a view stays where its array is; what was computed lies on the current device, as all it was made from."""
    if isinstance(found, np.ndarray):
        flat = [y for x in arguments for y in (x if isinstance(x, tuple | list) else (x,))]
        for x in flat:
            if isinstance(x, ndarray) and found is x.host:  # written into
                check_devices(what, arguments)
                return x
            if isinstance(x, ndarray) and np.may_share_memory(found, x.host):
                return ndarray(found, x.device)
    check_devices(what, arguments)
    return wrapped(found)


def unwrapped(x: Any) -> Any:
    if isinstance(x, ndarray):
        return x.host
    if isinstance(x, np.ndarray):
        raise TypeError("Unsupported type <class 'numpy.ndarray'>")  # CuPy's words
    if isinstance(x, tuple | list):
        return type(x)(unwrapped(y) for y in x)
    return x


def wrapped(x: Any, device: Device | None = None) -> Any:
    if isinstance(x, np.ndarray | np.generic):
        return ndarray(np.asarray(x), device)
    if isinstance(x, tuple | list) and not hasattr(x, "_fields"):
        return type(x)(wrapped(y, device) for y in x)
    return x


class ndarray:
    __module__ = "cupy"
    __array_priority__ = 100

    def __init__(self, host: np.ndarray, device: Device | None = None) -> None:
        self.host = host
        self.device = device or Device()

    shape = property(lambda self: self.host.shape)
    dtype = property(lambda self: self.host.dtype)
    ndim = property(lambda self: self.host.ndim)
    size = property(lambda self: self.host.size)
    nbytes = property(lambda self: self.host.nbytes)
    itemsize = property(lambda self: self.host.itemsize)
    strides = property(lambda self: self.host.strides)
    flags = property(lambda self: self.host.flags)
    data = property(lambda self: types.SimpleNamespace(ptr=self.host.ctypes.data))
    T = property(lambda self: wrapped(self.host.T, self.device))
    real = property(lambda self: wrapped(self.host.real, self.device))
    imag = property(lambda self: wrapped(self.host.imag, self.device))

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. Please use `.get()`"
        )  # CuPy's words

    def __dlpack__(self, **asked: Any) -> Any:
        return self.host.__dlpack__()

    def __dlpack_device__(self) -> Any:
        return self.host.__dlpack_device__()

    def get(self) -> np.ndarray:
        TRANSFERS["to host"] += 1
        return self.host.copy()

    def tolist(self) -> Any:
        return self.get().tolist()

    def item(self) -> Any:
        return self.get().item()

    __bool__ = lambda self: bool(self.get())  # noqa: E731
    __int__ = lambda self: int(self.get())  # noqa: E731
    __float__ = lambda self: float(self.get())  # noqa: E731
    __complex__ = lambda self: complex(self.get())  # noqa: E731
    __index__ = lambda self: int(self.get())  # noqa: E731
    __hash__ = None

    def __len__(self) -> int:
        return len(self.host)

    def __iter__(self) -> Iterator[Any]:
        return (wrapped(x, self.device) for x in self.host)

    def __getitem__(self, key: Any) -> Any:
        return wrapped(self.host[unwrapped(key)], self.device)

    def __setitem__(self, key: Any, value: Any) -> None:
        check_devices("[...] =", (self, value))
        self.host[unwrapped(key)] = unwrapped(value)

    def __repr__(self) -> str:
        return repr(self.host)


def _method(name: str) -> Any:
    def method(self: ndarray, *args: Any, **kwargs: Any) -> Any:
        with np.errstate(all="ignore"):  # a card warns of nothing
            found = getattr(self.host, name)(*unwrapped(args), **{k: unwrapped(x) for k, x in kwargs.items()})
        return found if found is NotImplemented else made(name, found, (self, *args, *kwargs.values()))

    return method


_OPERATORS = """
    add radd iadd sub rsub isub mul rmul imul truediv rtruediv itruediv floordiv rfloordiv mod rmod pow rpow matmul
    rmatmul and rand or ror xor rxor invert neg pos abs eq ne lt le gt ge lshift rshift
"""
_METHODS = """
    astype reshape sum prod max min mean all any copy ravel transpose swapaxes squeeze view fill conj
"""
for _name in [*(f"__{name}__" for name in _OPERATORS.split()), *_METHODS.split()]:
    setattr(ndarray, _name, _method(_name))


class RawModule:
    """A source that the emulator compiles; the options that it shares with CuPy's compiler are its macros."""

    def __init__(self, *, code: str, options: tuple[str, ...] = ()) -> None:
        assert options[:1] == ("-std=c++17",)
        macros = tuple(x for x in options if x.startswith("-D"))
        self._module = emulator.Module(code, (*emulator.OPTIONS, *macros))

    def get_function(self, name: str) -> RawKernel:
        return RawKernel(self._module.get_function(name))


class RawKernel:
    def __init__(self, kernel: emulator.Kernel) -> None:
        object.__setattr__(self, "_kernel", kernel)

    def __setattr__(self, name: str, value: Any) -> None:
        assert name == "max_dynamic_shared_size_bytes"
        self._kernel.max_dynamic_shared_size_bytes = value

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: Any, *, shared_mem: int = 0
    ) -> None:
        LAUNCHES.append(Launch(self._kernel.name, grid, Device().id, Stream.current()))
        check_devices(self._kernel.name, args)
        self._kernel(
            grid, block, [x.host if isinstance(x, ndarray) else x for x in args], shared_mem=shared_mem
        )


def _wrap_function(function: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device", None)
        if kwargs.get("stream", 0) is None:
            del kwargs["stream"]
        with np.errstate(all="ignore"):
            found = function(*unwrapped(args), **{k: unwrapped(x) for k, x in kwargs.items()})
        return made(call.__name__, found, (*args, *kwargs.values()))

    call.__name__ = getattr(function, "__name__", "function")
    return call


def _asarray(x: Any, dtype: Any = None, copy: bool | None = None, **ignored: Any) -> ndarray:
    if isinstance(x, ndarray):
        return x if dtype in (None, x.dtype) and not copy else x.astype(dtype or x.dtype)
    TRANSFERS["to device"] += 1
    return ndarray(np.array(x, dtype=dtype))


def _array(x: Any, dtype: Any = None, copy: bool = True, **ignored: Any) -> ndarray:
    return _asarray(x, dtype, copy)


def _empty(shape: Any, dtype: Any = float, **ignored: Any) -> ndarray:
    made = np.empty(shape, dtype)
    if _ALLOCATORS[-1] is not None and made.nbytes:
        _ALLOCATORS[-1](made.nbytes, Device().id)
    made.reshape(-1).view(np.uint8)[...] = 0xFF
    return ndarray(made)


def _asnumpy(x: Any, **ignored: Any) -> np.ndarray:
    return x.get() if isinstance(x, ndarray) else np.asarray(x)


class PythonFunctionAllocator:
    """Memory by another library's functions; what they return is not used here, that they are asked is what counts."""

    def __init__(self, malloc: Any, free: Any) -> None:
        self.malloc = malloc


@contextmanager
def _using_allocator(allocator: Any) -> Iterator[None]:
    _ALLOCATORS.append(allocator)
    try:
        yield
    finally:
        _ALLOCATORS.pop()


class _CuPy(types.ModuleType):
    """NumPy's functions on the stand-in's arrays; a function is wrapped when it is first asked for."""

    def __init__(self, name: str, source: types.ModuleType) -> None:
        super().__init__(name)
        self.__path__ = []
        self.__all__ = [each for each in source.__all__ if not each.startswith("_")]
        self._source = source

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._source, name)  # AttributeError, with NumPy's words
        if isinstance(found, type) or not callable(found):
            return found
        setattr(self, name, _wrap_function(found))
        return getattr(self, name)


def make() -> types.ModuleType:
    cupy = _CuPy("cupy", np)
    cupy.__version__ = "14.0.0"
    own: dict[str, Any] = {
        "ndarray": ndarray,
        "RawModule": RawModule,
        "asarray": _asarray,
        "array": _array,
        "empty": _empty,
        "empty_like": lambda x, dtype=None, **ignored: _empty(x.shape, dtype or x.dtype),
        "asnumpy": _asnumpy,
        "get_default_memory_pool": lambda: types.SimpleNamespace(free_all_blocks=lambda: None),
        "from_dlpack": lambda x: ndarray(np.from_dlpack(x)),
    }

    class CUDARuntimeError(RuntimeError):
        pass

    cuda = types.ModuleType("cupy.cuda")
    runtime = types.SimpleNamespace(
        is_hip=False,
        getDeviceCount=lambda: 2,
        CUDARuntimeError=CUDARuntimeError,
        runtimeGetVersion=lambda: 13000,
        getDeviceProperties=lambda device: {"name": b"stand-in"},
    )
    cuda.__dict__.update(Device=Device, Stream=Stream, runtime=runtime, is_available=lambda: True)
    cuda.PythonFunctionAllocator, cuda.using_allocator = PythonFunctionAllocator, _using_allocator
    cuda.Event, cuda.get_elapsed_time = Event, lambda start, stop: 1e3 * (stop.time - start.time)
    cuda.get_current_stream = lambda: Stream(Stream.current())
    cuda.__path__ = []
    cuda.device = types.ModuleType("cupy.cuda.device")
    cuda.device.Device = Device
    parts = {name: _CuPy(f"cupy.{name}", getattr(np, name)) for name in ("linalg", "fft", "random")}
    cupy.__dict__.update(own, cuda=cuda, **parts)
    return cupy


_INSTANCE = make()


@contextmanager
def installed() -> Iterator[types.ModuleType]:
    """The stand-in in CuPy's place, for as long as the context lasts."""
    parts = (
        _INSTANCE,
        _INSTANCE.cuda,
        _INSTANCE.cuda.device,
        _INSTANCE.linalg,
        _INSTANCE.fft,
        _INSTANCE.random,
    )
    modules = {module.__name__: module for module in parts}
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield _INSTANCE
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
