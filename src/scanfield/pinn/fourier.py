"""Embeddings of the points: Fourier features (trainable or frozen), raw coordinates, periodic features.

| symbol | name | shape | unit |
|---|---|---|---|
| x | points | (n, d) | length |
| B | `frequencies` | (d, m) | cycles per length |
| omega | 2 pi B | (d, m) | radians per length |

    phi(x) = [ sin(2 pi x B) | cos(2 pi x B) | (x - mean) / scale of the raw axes ]        2 m + raw columns

The sines come first, and the factor 2 pi is part of the definition (Tancik et al., arXiv 2006.10739, section 2): a
feature of frequency 1 runs through one whole wave on [0, 1].
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy

from scanfield.advice import shown
from scanfield.errors import ArgumentError, ShapeError
from scanfield.keywords import advised

Host = numpy.ndarray[Any, Any]


class Embedding:
    """What the first layer of a network sees of the points: host numbers, from which a network makes its arrays."""

    def __init__(
        self,
        frequencies: Any,
        *,
        trainable: bool,
        axes: Sequence[int] = (),
        mean: Any = None,
        scale: Any = None,
    ) -> None:
        self.frequencies: Host = numpy.array(frequencies, dtype=numpy.float64)
        if (
            self.frequencies.ndim != 2
            or not self.frequencies.shape[0]
            or not numpy.all(numpy.isfinite(self.frequencies))
        ):
            raise ShapeError(
                f"frequencies: expected finite numbers (d, features), came shape {self.frequencies.shape}"
            )
        self.trainable = bool(trainable) and self.features > 0
        self.axes = tuple(check_count("axes", axis, 0) for axis in axes)
        if any(axis >= self.dimensions for axis in self.axes) or len(set(self.axes)) < len(self.axes):
            raise ArgumentError(f"axes: {self.axes}; allowed are different axes below {self.dimensions}")
        self.mean = _each_axis("mean", mean, 0.0, self.dimensions)
        self.scale = _each_axis("scale", scale, 1.0, self.dimensions)
        if not all(0.0 < value < math.inf for value in self.scale):
            raise ArgumentError(f"scale: {self.scale}; allowed are positive numbers")
        if not all(map(math.isfinite, self.mean)):
            raise ArgumentError(f"mean: {self.mean}; allowed are finite numbers")

    @property
    def dimensions(self) -> int:
        """d"""
        return int(self.frequencies.shape[0])

    @property
    def features(self) -> int:
        """m, the columns of B: half the sines and cosines."""
        return int(self.frequencies.shape[1])

    @property
    def width(self) -> int:
        """Columns of phi."""
        return 2 * self.features + len(self.axes)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(dimensions={self.dimensions}, features={self.features}, "
            f"trainable={self.trainable}, raw axes={self.axes})"
        )


def _each_axis(name: str, given: Any, default: float, d: int) -> tuple[float, ...]:
    if given is None:
        return (default,) * d
    values = tuple(float(value) for value in numpy.asarray(given, dtype=numpy.float64).reshape(-1))
    if len(values) == 1:
        values *= d
    if len(values) != d:
        raise ShapeError(f"{name}: {len(values)} numbers for {d} dimensions; give one, or one for each axis")
    return values


def check_count(name: str, value: Any, least: int = 1) -> int:
    """An int of at least ``least``; ArgumentError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | numpy.integer) or value < least:
        raise ArgumentError(f"{name}: {shown(value)}; allowed is an integer of at least {least}")
    return int(value)


class FourierFeatures(Embedding):
    """Sines and cosines of random frequencies, trainable unless told otherwise.

    Parameters
    ----------
    dimensions : int
        d, the number of coordinates.
    features : int
        m: there are m sines and m cosines.
    wavenumber : float, optional
        In radians per length. The frequencies lie on the circle of waves of this number: random directions with
        ``|2 pi B|`` = wavenumber (in one dimension the direction is a sign).
    scale : float, optional
        In cycles per length: B is normal with this standard deviation. Give this, ``wavenumber`` or ``frequencies``.
    frequencies : (d, m) numbers, optional
        B itself, in cycles per length.
    trainable : bool
        Whether B is one of the network's parameters.
    seed : int
        Of NumPy's generator, on the host: every library gets the same numbers.

    Raises
    ------
    ArgumentError
        Not exactly one of ``wavenumber``, ``scale`` and ``frequencies``, or one that is not positive.

    Examples
    --------
    >>> import numpy
    >>> from scanfield.pinn import FourierFeatures
    >>> B = FourierFeatures(2, 32, wavenumber=20.0).frequencies
    >>> bool(numpy.allclose(numpy.linalg.norm(2 * numpy.pi * B, axis=0), 20.0))
    True
    """

    @advised
    def __init__(
        self,
        dimensions: int | None = None,
        features: int | None = None,
        *,
        wavenumber: float | None = None,
        scale: float | None = None,
        frequencies: Any = None,
        trainable: bool = True,
        seed: int = 0,
    ) -> None:
        given = {"wavenumber": wavenumber, "scale": scale, "frequencies": frequencies}
        chosen = [name for name, value in given.items() if value is not None]
        if len(chosen) != 1:
            raise ArgumentError(
                f"give exactly one of wavenumber, scale and frequencies; came {', '.join(chosen) or 'none'}"
            )
        if frequencies is None:
            d, m = check_count("dimensions", dimensions), check_count("features", features)
            size = float(wavenumber if wavenumber is not None else scale or 0.0)
            if not (size > 0.0 and math.isfinite(size)):
                raise ArgumentError(f"{chosen[0]}: {shown(given[chosen[0]])}; allowed is a positive number")
            drawn = numpy.random.default_rng(seed).normal(size=(d, m))
            if wavenumber is not None:
                drawn /= numpy.linalg.norm(drawn, axis=0)
                size /= 2.0 * math.pi
            frequencies = drawn * size
        super().__init__(frequencies, trainable=trainable)


class RawCoordinates(Embedding):
    """The coordinates themselves, normalised: (x - mean) / scale.

    Parameters
    ----------
    dimensions : int
        d, the number of coordinates.
    mean, scale : float or d floats
        In units of length; by default 0 and 1.

    Examples
    --------
    >>> from scanfield.pinn import RawCoordinates
    >>> RawCoordinates(2, scale=(1.0, 3.0)).width
    2
    """

    def __init__(self, dimensions: int, *, mean: Any = None, scale: Any = None) -> None:
        d = check_count("dimensions", dimensions)
        super().__init__(numpy.zeros((d, 0)), trainable=False, axes=range(d), mean=mean, scale=scale)


class PeriodicFeatures(Embedding):
    """Sines and cosines of whole waves in each period, frozen: the field is periodic whatever the weights are.

    Parameters
    ----------
    periods : sequence of float or None
        One for each axis, in units of length; None is an axis without a period, whose coordinate is passed on raw.
    harmonics : int
        Whole waves in a period go up to this number, in each periodic axis and mixed between them.
    mean, scale : float or d floats
        Of the raw coordinates.

    Examples
    --------
    >>> from scanfield.pinn import PeriodicFeatures
    >>> PeriodicFeatures([1.0, None], harmonics=4).width  # 4 sines, 4 cosines, one raw coordinate
    9
    """

    def __init__(
        self, periods: Sequence[float | None], harmonics: int, *, mean: Any = None, scale: Any = None
    ) -> None:
        harmonics = check_count("harmonics", harmonics)
        if not any(period is not None for period in periods):
            raise ArgumentError("periods: none is given; RawCoordinates is the embedding without periods")
        if any(period is not None and not period > 0.0 for period in periods):
            raise ArgumentError(f"periods: {tuple(periods)}; allowed are positive numbers or None")
        ranges = [(0,) if period is None else range(-harmonics, harmonics + 1) for period in periods]
        # One of each pair j and -j, which have the same sine and cosine.
        waves = [j for j in itertools.product(*ranges) if next((n for n in j if n), 0) > 0]
        columns = [
            [0.0 if p is None else n / p for n, p in zip(wave, periods, strict=True)] for wave in waves
        ]
        raw = [axis for axis, period in enumerate(periods) if period is None]
        super().__init__(numpy.array(columns).T, trainable=False, axes=raw, mean=mean, scale=scale)
