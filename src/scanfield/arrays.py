"""Which library, device and dtype these arrays have, and the errors for a bad mix.

The types seen so far stand in a plain dictionary: looking one up costs a tenth of a microsecond, raises no warning and
can be traced by torch.compile. Only a type that was never seen goes through ``array_api_compat``. No framework is
imported here: an array of a framework can only come from a program that imported it.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeAlias

import array_api_compat
import numpy

from scanfield import refusals
from scanfield.advice import Like, floating, shown
from scanfield.errors import ArgumentError, BackendError, DeviceError, DtypeError, ShapeError, StateError
from scanfield.refusals import Beside
from scanfield.tracing import constant_for_compilers

Array: TypeAlias = Any
"""An array of any library. An own alias: ``jaxtyping.Array`` would import jax."""

Namespace: TypeAlias = Any
"""The array API namespace of a library (``numpy``, ``array_api_compat.torch``, ``jax.numpy``, ...)."""


class Library(NamedTuple):
    """One array library: its short name and its array API namespace."""

    name: str
    namespace: Namespace


_LIBRARIES: dict[type, Library] = {}
_forked = False
"""Whether this process was forked from one that had passed JAX arrays."""


def _after_fork() -> None:
    global _forked
    _forked = any(library.name == "jax" for library in _LIBRARIES.values())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

REAL = ("float16", "bfloat16", "float32", "float64", "float128")
COMPLEX = ("complex64", "complex128", "complex256")
HALF = ("float16", "bfloat16")
COMPLEX_OF = {"float32": "complex64", "float64": "complex128", "float128": "complex256"}
REAL_OF = {
    "float16": "float32",
    "bfloat16": "float32",
    "float32": "float32",
    "float64": "float64",
    "float128": "float128",
    "complex64": "float32",
    "complex128": "float64",
    "complex256": "float128",
}
_NAMES: dict[tuple[type, Any], str] = {}
_ENTERED: set[type] = set()
_RECORDED: dict[type, Callable[[], bool]] = {}
"""For the plain classes of torch: whether somebody records what is done to their tensors."""


def library_of(array: Array, argument: str) -> Library:
    """The library of ``array``; BackendError, naming ``argument``, for anything that is no array."""
    found = _LIBRARIES.get(type(array))
    return found if found is not None else _recognise(array, argument)


@constant_for_compilers
def _enter_tensors(kind: type) -> bool:
    """Enter a class of torch tensors, from the class alone, and the names of torch's dtypes.

    Called before the dictionaries are read: a compiler that traces the first call of all sees a dictionary as it is at
    its first reading.
    """
    if kind not in _ENTERED:
        torch = sys.modules.get("torch")
        if torch is not None and issubclass(kind, torch.Tensor):
            _LIBRARIES[kind] = Library("torch", importlib.import_module("array_api_compat.torch"))
            for name in (*REAL, *COMPLEX):
                dtype = getattr(torch, name, None)
                if dtype is not None:
                    _NAMES[type(dtype), dtype] = name
            if kind in (torch.Tensor, torch.nn.Parameter):
                _RECORDED[kind] = lambda: torch.compiler.is_compiling() or torch.jit.is_tracing()
        _ENTERED.add(kind)
    return True


def is_plain(kind: type) -> bool:
    """Whether a class is one of tensors whose shape, dtype and device tell all, while nobody records what is done."""
    _enter_tensors(kind)
    recorded = _RECORDED.get(kind)
    return recorded is not None and not recorded()


def _recognise(array: Array, argument: str, beside: Beside | None = None) -> Library:
    kind = type(array)
    refused = refusals.no_array(array, argument, beside)
    if refused is not None:
        raise refused
    try:
        namespace = array_api_compat.array_namespace(array)
    except TypeError:
        raise refusals.no_library(array, argument, beside) from None
    parts = namespace.__name__.split(".")
    name = parts[1] if parts[0] == "array_api_compat" else parts[0]
    library = Library(name, namespace)
    _LIBRARIES[kind] = library
    return library


def _described(name: str, array: Any) -> Like | None:
    """What a message has to know of an array; None for what is none."""
    try:
        library = library_of(array, name).name
    except BackendError:
        return None
    dtype = dtype_name(array.dtype)
    device = "cpu" if library in ("numpy", "dask") else device_of(array)
    return Like(
        library, name, dtype if dtype in REAL + COMPLEX else "", "" if device is None else str(device)
    )


def dtype_name(dtype: Any) -> str:
    """The name of a dtype, alike for all libraries: ``"float32"``, ``"bfloat16"``, ``"complex64"``, ..."""
    key = (type(dtype), dtype)  # dtypes of two libraries must not be compared with each other
    name = _NAMES.get(key)
    if name is None:
        name = getattr(dtype, "name", None) or str(dtype).rsplit(".", 1)[-1]
        _NAMES[key] = name
    return name


def asked_dtype(dtype: Any) -> str:
    """The name of a dtype that a user gives: a name, a dtype, or a class, as ``numpy.float32`` and ``jax.numpy.float32``."""
    if isinstance(dtype, str):
        return dtype
    return dtype.__name__ if isinstance(dtype, type) else dtype_name(dtype)


def dtype_of(xp: Namespace, name: str) -> Any:
    """The dtype called ``name`` in a namespace."""
    found = getattr(xp, name, None)
    if found is None and name == "bfloat16":
        try:
            importlib.import_module("ml_dtypes")  # which makes NumPy know the name
        except ImportError:
            raise DtypeError("bfloat16: NumPy has it from ml_dtypes; pip install ml_dtypes") from None
    return found if found is not None else numpy.dtype(name)


def is_complex(array: Array) -> bool:
    """Whether an array is complex. By name: NumPy's ``isdtype`` refuses dtypes that it did not make (bfloat16)."""
    return dtype_name(array.dtype) in COMPLEX


def check_floating(
    array: Array, argument: str, *, complex_allowed: bool, beside: Iterable[Array] = ()
) -> str:
    """The dtype's name, or DtypeError for integers, booleans and, unless allowed, complex numbers.

    The message casts integers to the widest of the dtypes of the arrays ``beside``, or to the library's own default.
    """
    name = dtype_name(array.dtype)
    if name in REAL or (complex_allowed and name in COMPLEX):
        return name
    library = library_of(array, argument).name
    allowed = ", ".join(floating_names(library) + (_complex_names(library) if complex_allowed else ()))
    mend = ""
    if name in COMPLEX:
        mend = "; pass its real part"
    elif name.startswith(("int", "uint", "bool", "object", "float")):
        others = {dtype_name(other.dtype) for other in beside}
        floats = [n for n in REAL if n in others or COMPLEX_OF.get(n) in others]
        dtype = floats[-1] if floats else ("float32" if library in ("torch", "jax") else "float64")
        mend = f"; cast it first: {argument} = {floating(argument, library, dtype)}"
    raise DtypeError(f"{argument}: dtype {name} is not taken; allowed are {allowed}{mend}")


def floating_names(library: str) -> tuple[str, ...]:
    """Of the real dtypes that are taken. The bits of ``longdouble``, and so its other name, are the machine's."""
    return REAL[:4] + (("longdouble",) if library in _EXTENDED else ())


def _complex_names(library: str) -> tuple[str, ...]:
    return COMPLEX[:2] + (("clongdouble",) if library in _EXTENDED else ())


_EXTENDED = ("numpy", "dask")


def widest(names: Iterable[str]) -> str:
    """The real dtype that carries a computation over arrays of these dtypes: at least float32."""
    order = ("float32", "float64", "float128")
    return order[max(order.index(REAL_OF[name]) for name in names)]


def cast(xp: Namespace, array: Array, dtype: Any) -> Array:
    """``array`` in ``dtype``; the same object where it has that dtype already."""
    return array if array.dtype == dtype else xp.astype(array, dtype)


def copy(array: Array) -> Array:
    """A fresh array of the same bits. By arithmetic, since ``asarray(copy=True)`` cuts the gradient in torch."""
    return array * 1


def zeros(xp: Namespace, shape: Sequence[int], dtype: Any, like: Array) -> Array:
    """Zeros on the device of ``like``; nothing is left to a library's default device or dtype."""
    return xp.zeros(tuple(shape), dtype=dtype, device=device_of(like))


def ones(xp: Namespace, shape: Sequence[int], dtype: Any, like: Array) -> Array:
    """Ones on the device of ``like``."""
    return xp.ones(tuple(shape), dtype=dtype, device=device_of(like))


def sum_to(xp: Namespace, array: Array, shape: Sequence[int]) -> Array:
    """``array`` summed, with kept axes, over each axis that has size 1 in ``shape`` and another size here."""
    axes = tuple(
        i for i, (have, want) in enumerate(zip(array.shape, shape, strict=True)) if want == 1 and have != 1
    )
    return xp.sum(array, axis=axes, keepdims=True) if axes else array


def device_of(array: Array) -> Any:
    """The device, for creation functions; None (leave unset) for a JAX tracer, and for an array over several of JAX's."""
    library = library_of(array, "array").name
    if library in ("numpy", "dask"):
        return "cpu"
    device = getattr(array, "device", None)
    # A sharding (see ``_are_apart``) says how this array's axes are spread, and not where another one belongs.
    return None if library == "jax" and not hasattr(device, "platform") else device


def current_device_of(array: Any) -> AbstractContextManager[Any]:
    """The device of a CuPy array as the current one, for a ``with`` block; for any other object a block that does nothing.

    CuPy computes, and makes arrays, on the current device, whatever device the arrays that it is given lie on.
    """
    return array.device if _on_current_device(type(array)) else nullcontext()


@constant_for_compilers
def _on_current_device(kind: type) -> bool:
    return issubclass(kind, getattr(sys.modules.get("cupy"), "ndarray", ()))


def device_kind(array: Array, library: str) -> str:
    """The kind of device as the dispatcher's table has it: ``"cpu"``, ``"cuda"``, ``"mps"``, ..."""
    if library in ("numpy", "dask"):
        return "cpu"
    if library == "torch":
        return str(array.device.type)
    if library == "cupy":
        runtime = sys.modules["cupy"].cuda.runtime
        return "rocm" if runtime.is_hip else "cuda"
    if library == "jax":
        platform = getattr(getattr(array, "device", None), "platform", None)
        # A tracer, or an array spread over a mesh, stands for the default backend.
        return str(platform or sys.modules["jax"].default_backend())
    return str(device_of(array))


def check_same_library(
    arrays: Sequence[tuple[str, Array]],
    *,
    peers: bool = False,
    held: tuple[str, Mapping[str, Array]] | None = None,
    tokens: bool = False,
    shape_of: Callable[[str], tuple[int, ...] | None] | None = None,
) -> Library:
    """The one library and device of all named arrays; BackendError or DeviceError, with the mending line, for a mix.

    The rest serves that line alone. The first array is one that cannot be another, a result or a parameter, unless all
    are ``peers``: then those of NumPy are converted, so that no gradient is cut and no tracer read. ``held`` are the
    parameters among them, behind the name of what holds them; ``tokens`` says that the first are integers; ``shape_of``
    gives the shape that an argument has if it is one number.
    """
    first_name, first = arrays[0]
    kind = type(first)
    _enter_tensors(kind)
    for _, array in arrays:
        if type(array) is not kind:  # a torch Parameter among tensors
            _enter_tensors(type(array))
    library = _LIBRARIES.get(kind)
    if library is None:
        library = _recognise(first, first_name, Beside(arrays, peers, held, tokens, shape_of, _described))
    for name, array in arrays:
        other = _LIBRARIES.get(type(array))
        if other is None:
            other = _recognise(array, name, Beside(arrays, peers, held, tokens, shape_of, _described))
        if other.namespace is not library.namespace:
            raise refusals.mixed(Beside(arrays, peers, held, tokens, shape_of, _described))
    if library.name not in _SIZED:
        _check_sizes_known(arrays)
    if library.name not in ("numpy", "dask"):
        if library.name == "torch":
            _check_dense(arrays, library.namespace.strided)
        elif _forked and library.name == "jax":
            raise StateError(
                f"{first_name}: this process was forked from one that had used JAX, whose threads a child lacks, so that "
                "JAX waits for ever; start the process by multiprocessing's 'spawn' or 'forkserver', or use NumPy in it"
            )
        device = device_of(first)
        for name, array in arrays:
            place = device_of(array)
            if place != device and place is not None and device is not None:
                raise refusals.apart(Beside(arrays, peers, held, tokens, shape_of, _described), name, array)
            if (place is None or device is None) and library.name == "jax" and _are_apart(first, array):
                raise DeviceError(
                    f"{name} and {first_name} lie on different sets of devices; nothing is copied between devices silently: "
                    "jax.device_put with a sharding over the same mesh brings both to one"
                )
    return library


def _are_apart(one: Array, other: Array) -> bool:
    """Whether two JAX arrays are bound to different sets of devices; a tracer, or one that nobody has placed, is not."""
    tracer = sys.modules["jax"].core.Tracer
    if any(isinstance(x, tracer) or not getattr(x, "committed", True) for x in (one, other)):
        return False
    return bool(one.sharding.device_set != other.sharding.device_set)


# Libraries whose arrays know their sizes, always.
_SIZED = frozenset({"numpy", "torch", "jax", "cupy"})


def _check_dense(arrays: Sequence[tuple[str, Array]], strided: Any) -> None:
    """BackendError for a torch tensor whose numbers do not lie in memory by strides."""
    for name, array in arrays:
        nested = array.is_nested
        if nested or array.layout != strided:
            kind = "a nested tensor" if nested else f"a tensor of layout {array.layout}"
            mend = f"torch.nested.to_padded_tensor({name}, 0.0)" if nested else f"{name}.to_dense()"
            more = ", or pack the sequences (cu_seqlens)" if nested else ""
            raise BackendError(
                f"{name}: {kind} is not taken; allowed are dense (strided) ones; {name} = {mend}{more}"
            )


def _check_sizes_known(arrays: Sequence[tuple[str, Array]]) -> None:
    """ShapeError for an array with a size that is None, and for Dask's unknown sizes, which equal no other."""
    for name, array in arrays:
        if any(size is None for size in array.shape):
            raise ShapeError(
                f"{name}: shape {tuple(array.shape)}, some sizes are unknown; they must be numbers, as a loop over time "
                f"is made for one length"
            )
        if any(size != size for size in array.shape):
            raise ShapeError(
                f"{name}: shape {tuple(array.shape)}, the sizes of its blocks are unknown; "
                f"{name} = {name}.compute_chunk_sizes()"
            )


def library_of_namespace(xp: Any) -> Library:
    """The library of an argument ``xp``, which is a module; ArgumentError for its name and for other things."""
    try:
        return library_of(xp.zeros(1, dtype=xp.float32), "xp")
    except AttributeError:
        way = f"; pass the module, not its name: import {xp}, then xp={xp}" if isinstance(xp, str) else ""
        raise ArgumentError(
            f"xp: {shown(xp)} is no array namespace; allowed are numpy, torch, jax.numpy, ...{way}"
        ) from None


def host_integers(values: Any, argument: str) -> Any:
    """Index values as a tuple of Python ints, or the array itself where they live on an accelerator.

    Taken are a host sequence, NumPy integers, or integers of any library whose values are at hand. JAX tracers and Dask
    arrays are refused: their values would have to be computed first.
    """
    if isinstance(values, numpy.ndarray):
        listed = _integer_array(values, argument).tolist()
    elif isinstance(values, Sequence) and not isinstance(values, str):
        listed = list(values)
        for value in listed:
            if isinstance(value, bool) or not isinstance(value, int | numpy.integer):
                raise DtypeError(
                    f"{argument}: expected integers, came {type(value).__name__} ({shown(value)})"
                )
    else:
        library = library_of(values, argument).name
        _integer_array(values, argument)
        if library == "dask":
            raise ArgumentError(
                f"{argument}: a Dask array has no values yet; {argument} = {argument}.compute()"
            )
        if library == "jax":
            try:
                listed = numpy.asarray(values).tolist()
            except TypeError:
                raise ArgumentError(
                    f"{argument}: a traced JAX array has no values; pass host integers (a tuple, made static under jit)"
                ) from None
        elif device_kind(values, library) != "cpu" and library in ("torch", "cupy"):
            return values
        else:
            listed = (
                values.tolist()
                if hasattr(values, "tolist")
                else [int(values[i]) for i in range(values.shape[0])]
            )
    return tuple(int(value) for value in listed)


def _integer_array(values: Array, argument: str) -> Array:
    name = dtype_name(values.dtype)
    if not name.startswith(("int", "uint")):
        raise DtypeError(f"{argument}: expected integers, came an array of {name}")
    if len(values.shape) != 1:
        raise ShapeError(f"{argument}: expected one axis, (sequences + 1,), came shape {tuple(values.shape)}")
    return values
