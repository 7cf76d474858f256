"""Parameters: their shapes and the field's draws, made on the host so that one seed is one set of numbers everywhere."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy

from scanfield.arrays import (
    REAL,
    Array,
    Namespace,
    asked_dtype,
    dtype_of,
    floating_names,
    library_of_namespace,
)
from scanfield.errors import DeviceError, DtypeError

SCHEMES = ("uniform", "normal", "mamba_ssm", "zeros")

Draw = Callable[[numpy.random.Generator, tuple[int, ...], str], Any]
"""``draw(generator, shape, scheme)``: float64 numbers."""


@dataclass(frozen=True)
class Parameter:
    """What a layer declares of each parameter: its shape, and how it starts."""

    shape: tuple[int, ...]
    draw: Draw
    last: bool = False
    """Whether it makes the output of a block: what a residual stream is a sum of, as many terms as there are blocks."""


def numbers(parameter: Parameter, seed: int, name: str, scheme: str, depth: int = 1) -> Any:
    """The first values of a parameter, float64. Each name has a stream of its own, so that no parameter moves another.

    ``depth`` is the number of blocks around it, by which the scheme "mamba_ssm" divides the variance of their outputs.
    """
    if scheme == "zeros":
        return numpy.zeros(parameter.shape)
    generator = numpy.random.default_rng([seed, zlib.crc32(name.encode())])
    drawn = numpy.asarray(parameter.draw(generator, parameter.shape, scheme))
    return drawn / math.sqrt(depth) if scheme == "mamba_ssm" and parameter.last else drawn


def maker(xp: Namespace, device: Any, dtype: Any) -> Callable[[Any], Array]:
    """From host numbers to arrays of a library: ``xp`` its namespace, ``dtype`` a name or a dtype of it."""
    library = library_of_namespace(xp)
    space = library.namespace
    name = asked_dtype(dtype)
    allowed = floating_names(library.name)
    if name == "longdouble" and name in allowed:
        name = numpy.dtype(name).name
    if name not in REAL or (name == "float128" and "longdouble" not in allowed):
        raise DtypeError(f"dtype: {name}; allowed are {', '.join(allowed)}")
    try:
        target = dtype_of(space, name) if isinstance(dtype, str) else dtype
    except TypeError:
        raise DtypeError(
            f"dtype: {name} is no dtype of {library.name}; pass the dtype itself, as ml_dtypes.{name}"
        ) from None
    place = {} if device is None else {"device": device}
    try:
        space.asarray(0.0, **place)
    except Exception as problem:  # each library has its own: ValueError, RuntimeError, AssertionError
        raise DeviceError(f"device: {device!r} is no device of {library.name} here: {problem}") from problem

    def make(values: Any) -> Array:
        # Half precision by way of float32: not every library makes it of float64.
        host = values.astype(numpy.float64 if name in ("float64", "float128") else numpy.float32)
        array = space.asarray(host, **place)
        return array if array.dtype == target else space.astype(array, target)

    return make


# ------------------------------------------------------------------------------------------------------------
# Draws


@dataclass(frozen=True)
class Weight:
    """Uniform in +-gain / sqrt(fan_in) (torch's linear and convolution layers); scheme "normal": N(0, 0.02^2)."""

    fan_in: int
    gain: float = 1.0

    def __call__(self, generator: numpy.random.Generator, shape: tuple[int, ...], scheme: str) -> Any:
        """The numbers."""
        if scheme == "normal":
            return 0.02 * generator.standard_normal(shape)
        bound = self.gain / math.sqrt(self.fan_in)
        return generator.uniform(-bound, bound, shape)


@dataclass(frozen=True)
class Bias:
    """Uniform in +-1 / sqrt(fan_in); 0 in the scheme "normal", and of a linear layer in "mamba_ssm"."""

    fan_in: int
    linear: bool = False

    def __call__(self, generator: numpy.random.Generator, shape: tuple[int, ...], scheme: str) -> Any:
        """The numbers."""
        if scheme == "normal" or (self.linear and scheme == "mamba_ssm"):
            return numpy.zeros(shape)
        return Weight(self.fan_in)(generator, shape, scheme)


def embedding(generator: numpy.random.Generator, shape: tuple[int, ...], scheme: str) -> Any:
    """N(0, 0.02^2), as in mamba_ssm and transformers."""
    return 0.02 * generator.standard_normal(shape)


def ones(generator: numpy.random.Generator, shape: tuple[int, ...], scheme: str) -> Any:
    """1: norms and skips."""
    return numpy.ones(shape)


def state_rates(generator: numpy.random.Generator, shape: tuple[int, ...], scheme: str) -> Any:
    """log(1..N) for each channel: A_log of Mamba (S4D-real)."""
    return numpy.broadcast_to(numpy.log(numpy.arange(1, shape[-1] + 1, dtype=numpy.float64)), shape).copy()


def head_rates(generator: numpy.random.Generator, shape: tuple[int, ...], scheme: str) -> Any:
    """log U(1, 16): A_log by head of Mamba-2 and the gated delta rules."""
    return numpy.log(generator.uniform(1, 16, shape))


def steps(generator: numpy.random.Generator, shape: tuple[int, ...], scheme: str) -> Any:
    """Inverse softplus of steps that are log-uniform in (1e-3, 1e-1), at least 1e-4."""
    step = numpy.exp(generator.uniform(math.log(1e-3), math.log(1e-1), shape))
    step = numpy.maximum(step, 1e-4)
    return step + numpy.log(-numpy.expm1(-step))


def negative_rates(generator: numpy.random.Generator, shape: tuple[int, ...], scheme: str) -> Any:
    """-(1..N) for each channel: A of Mamba itself."""
    return -numpy.exp(state_rates(generator, shape, scheme))
