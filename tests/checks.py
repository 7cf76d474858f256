"""What tests of every operation do: call it on one library's arrays and hold all that comes back to the truth.

Calls go through `library.run`, which on JAX compiles them: a jitted call costs one compilation, an eager one
costs one for each of its dozens of steps. Functions are made once for each operation and set of options, so
that calls that differ in their values alone share a compilation.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from arrays import Library, complex_of, deviation
from examples import COMPILED, Example, call_options, main_of

import scanfield

# Allowed deviation relative to the largest value of the truth. float64: rounding over a few tokens. float32:
# the bound the project states for agreement of implementations.
TOLERANCE = {"float64": 1e-12, "float32": 4e-6}


def operation(op: str) -> Any:
    return getattr(scanfield, op)


class Got(NamedTuple):
    """Arrays of the library, as they came."""

    output: Any
    final_state: Any
    gradients: dict[str, Any]


Options = tuple[tuple[str, Any], ...]


def _frozen(options: Mapping[str, Any]) -> Options:
    return tuple((name, tuple(x) if isinstance(x, list) else x) for name, x in sorted(options.items()))


@functools.cache
def _forward_of(op: str, options: Options) -> Callable[[dict[str, Any]], Any]:
    return lambda arrays: operation(op)(**arrays, **dict(options))


@functools.cache
def _vjp_of(op: str, options: Options) -> Callable[[dict[str, Any], tuple[Any, Any]], Got]:
    def both(arrays: dict[str, Any], cotangents: tuple[Any, Any]) -> Got:
        result, pullback = scanfield.vjp(operation(op), **arrays, **dict(options))
        return Got(result.output, result.final_state, pullback(*cotangents))

    return both


@functools.cache
def _step_of(op: str, options: Options) -> Callable[[Any, dict[str, Any]], Any]:
    return lambda state, token: operation(op).step(state, **token, **dict(options))


def call_on(library: Library, op: str, arrays: dict[str, Any], **options: Any) -> Any:
    """The operation on arrays of `library`, all by name."""
    return library.run(_forward_of(op, _frozen(options)), arrays)


def call(library: Library, op: str, inputs: Mapping[str, Any], dtype: str = "float64", **options: Any) -> Any:
    """The same on NumPy data, which become arrays of that width first."""
    return call_on(library, op, library.arrays(inputs, dtype), **options)


def vjp_on(
    library: Library, op: str, arrays: dict[str, Any], cotangents: tuple[Any, Any], **options: Any
) -> Got:
    """Result and gradients on arrays of `library`; a cotangent may be None."""
    return library.run(_vjp_of(op, _frozen(options)), arrays, cotangents)


def vjp(
    library: Library,
    op: str,
    inputs: Mapping[str, Any],
    cotangents: tuple[Any, Any],
    dtype: str = "float64",
    **options: Any,
) -> Got:
    """The same on NumPy data."""
    d_output, d_final_state = (library.array(c, dtype) for c in cotangents)
    return vjp_on(library, op, library.arrays(inputs, dtype), (d_output, d_final_state), **options)


def step(library: Library, op: str, state: Any, token: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    """One token, on arrays of `library`."""
    return library.run(_step_of(op, _frozen(options)), state, token)


def before_tracing(function: Any, inputs: Mapping[str, Any], method: str | None = None) -> None:
    """What a trace of a call's memory must not see or miss, if the compiled scans run it.

    A compiler that is traced takes many times as long; and memory that waits for a next result is traced by nobody.
    """
    if method != COMPILED:
        return
    _once(function, inputs)
    importlib.import_module("scanfield_numpy.memory").pool.clear()


def _once(function: Any, inputs: Mapping[str, Any]) -> None:
    result, pullback = scanfield.vjp(function, **inputs, method=COMPILED)
    pullback(result.output)


def run_example(
    library: Library, example: Example, dtype: str, method: str | None = None, chunk_size: int | None = None
) -> Got:
    options = call_options(example.options, method, chunk_size)
    return vjp(library, example.op, example.inputs, example.cotangents(dtype), dtype, **options)


def carry_dtype(dtype: str) -> str:
    return "float64" if dtype == "float64" else "float32"


def check_kind(library: Library, got: Got, op: str, inputs: Mapping[str, np.ndarray], dtype: str) -> None:
    """Library, device, dtype and shape of everything that came back."""

    def expected(x: np.ndarray, of: str = dtype) -> str:
        return complex_of(of) if np.asarray(x).dtype.kind == "c" else of

    for name, x in {"output": got.output, "final_state": got.final_state, **got.gradients}.items():
        assert library.is_array(x), f"{name} is {type(x)}"
        assert library.on_device(x), f"{name} is on {x.device}"
    for name, gradient in got.gradients.items():
        assert library.dtype(gradient) == expected(inputs[name]), f"gradient of {name}: {gradient.dtype}"
        assert tuple(gradient.shape) == inputs[name].shape, f"gradient of {name}: {gradient.shape}"
    any_complex = any(np.asarray(x).dtype.kind == "c" for x in inputs.values())
    if op == "linear_scan" and any_complex:
        assert library.dtype(got.output) == complex_of(dtype)
    else:
        assert library.dtype(got.output) == expected(inputs[main_of(op)])
    carry = carry_dtype(dtype)
    assert library.dtype(got.final_state) == (complex_of(carry) if any_complex else carry)


def check_truth(
    library: Library, got: Got, example: Example, dtype: str, tolerance: float | None = None
) -> None:
    """Values against the float64 truth of the rounded inputs."""
    limit = TOLERANCE[dtype] if tolerance is None else tolerance
    truth, gradients = example.truth(dtype), example.gradients(dtype)
    assert deviation(library.numpy(got.output), truth.output) <= limit
    assert deviation(library.numpy(got.final_state), truth.final_state) <= limit
    assert set(got.gradients) == set(gradients)
    # A gradient that cancels to little is held to the size of the largest one of the call.
    size = max((float(np.max(np.abs(g))) for g in gradients.values() if g.size), default=0.0)
    for name, want in gradients.items():
        worst = deviation(library.numpy(got.gradients[name]), want, floor=size * 1e-2)
        assert worst <= limit, f"gradient of {name} deviates by {worst:.2e}"


def followed(message: str, scope: dict[str, Any]) -> None:
    """Run the line with which a message ends on the arguments of a call, by name, and put the new ones in their places."""
    line = re.search(r"(?:; |: )(\w+ = .*)$", message)
    assert line, f"no line that mends it: {message}"
    inside = dict(scope)
    for name in ("numpy", "torch", "jax", "jax.numpy", "dask.array", "array_api_strict", "cupy"):
        root = name.split(".")[0]
        if f"{root}." in line.group(1) and importlib.util.find_spec(root) is not None:
            importlib.import_module(name)
            inside[root] = importlib.import_module(root)
    exec(line.group(1), inside)  # noqa: S102  (the line of our own message)
    scope.update({name: inside[name] for name in scope})
