"""Exact solutions of Helmholtz problems: a user's first oracle, and the tests'.

Time convention exp(-i omega t), so that outgoing waves are exp(+ikr). Each solves Lap u + k(x)^2 u = f.

| function | field | equation |
|---|---|---|
| `plane_wave` | exp(i k dir . x), d = 1, 2, 3 | f = 0 |
| `green` | d = 1: (i/2k) exp(ik|x-s|); 2: (i/4) H0(k r); 3: exp(ikr)/(4 pi r) | f = -delta at the source, 0 elsewhere |
| `cylindrical_mode` | J_m(k r) exp(i m theta) | f = 0 |
| `manufactured` | prod sin(a_i pi x_i), or cosines | f = (k^2 - pi^2 sum a_i^2) u |
| `airy` | Ai(t) - i Bi(t), t = -g^(-2/3) (c + g x) | k^2 = c + g x, f = 0 |
| `two_media` | exp(i k1 x) + R exp(-i k1 x), T exp(i k2 x) around the interface | f = 0, u and u' continuous |
| `hard_disk` | wave scattered by a sound-hard disk of radius a, incident exp(i k x) | f = 0, total normal derivative 0 |

(H: Hankel functions of the first kind. Morse & Ingard, Theoretical Acoustics; Bowman, Senior & Uslenghi, section 2.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from scanfield.advice import shown
from scanfield.errors import ArgumentError
from scanfield.pinn.extras import need
from scanfield.pinn.solution import Solution, remembered
from scanfield.pinn.values import check_positive

_LARGEST = 1e250  # leaves room for the factor of an order and for points a rounding inside
_MOST_ORDERS = 2000  # of a series: far above what a network follows

__all__ = [
    "Solution",
    "airy",
    "cylindrical_mode",
    "green",
    "hard_disk",
    "manufactured",
    "plane_wave",
    "two_media",
]


@remembered
def plane_wave(wavenumber: float | complex, direction: Sequence[float] = (1.0,)) -> Solution:
    """exp(i k direction . x) in as many dimensions as `direction` has numbers; it is scaled to length 1."""
    vector = np.asarray(direction, dtype=np.float64)
    length = float(np.linalg.norm(vector))
    if vector.ndim != 1 or not 1 <= vector.shape[0] <= 3 or not 0 < length < math.inf:
        raise ArgumentError(f"direction = {shown(direction)}: one to three numbers, not all 0")
    k = 1j * wavenumber * vector / length

    def value(x: np.ndarray) -> np.ndarray:
        return np.asarray(np.exp(x @ k))

    return Solution(
        "plane wave", vector.shape[0], wavenumber, value, lambda x: value(x)[:, None] * k, _no_source
    )


@remembered
def green(wavenumber: float, source: Sequence[float]) -> Solution:
    """The field of a point source in free space, in as many dimensions as `source` has numbers; infinite at the source.

    In one dimension the field is finite and its slope jumps by -1 there.
    """
    check_positive("wavenumber", wavenumber)
    k, place = float(wavenumber), np.asarray(source, dtype=np.float64)
    if place.ndim != 1 or place.shape[0] not in (1, 2, 3):
        raise ArgumentError(f"source = {shown(source)}: one to three numbers")
    d = place.shape[0]

    def apart(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        away = x - place
        return away, np.linalg.norm(away, axis=1)

    def value(x: np.ndarray) -> np.ndarray:
        _, r = apart(x)
        if d == 1:
            return np.asarray(0.5j / k * np.exp(1j * k * r))
        if d == 3:
            return np.asarray(np.exp(1j * k * r) / (4.0 * np.pi * r))
        hankel1 = need("scipy.special").hankel1

        return np.asarray(0.25j * hankel1(0, k * r))

    def gradient(x: np.ndarray) -> np.ndarray:
        away, r = apart(x)
        if d == 1:
            slope: np.ndarray = -0.5 * np.exp(1j * k * r)
        elif d == 3:
            slope = (1j * k - 1.0 / r) * np.exp(1j * k * r) / (4.0 * np.pi * r)
        else:
            hankel1 = need("scipy.special").hankel1

            slope = -0.25j * k * hankel1(1, k * r)
        return np.asarray((slope / r)[:, None] * away)

    return Solution("point source", d, k, value, gradient, _no_source)


@remembered
def cylindrical_mode(wavenumber: float, order: int = 0) -> Solution:
    """J_m(k r) exp(i m theta) in two dimensions, m = `order`."""
    check_positive("wavenumber", wavenumber)
    k, m = float(wavenumber), _order("order", order, -_MOST_ORDERS)

    def polar(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.linalg.norm(x, axis=1), np.arctan2(x[:, 1], x[:, 0])

    def value(x: np.ndarray) -> np.ndarray:
        jv = need("scipy.special").jv

        r, theta = polar(x)
        return np.asarray(jv(m, k * r) * np.exp(1j * m * theta))

    def gradient(x: np.ndarray) -> np.ndarray:
        jv = need("scipy.special").jv

        # (d_x + i d_y) and (d_x - i d_y) shift the order by one, up and down.
        r, theta = polar(x)
        up = -k * jv(m + 1, k * r) * np.exp(1j * (m + 1) * theta)
        down = k * jv(m - 1, k * r) * np.exp(1j * (m - 1) * theta)
        return np.stack([(up + down) / 2.0, (up - down) / 2.0j], axis=1)

    return Solution("cylindrical mode", 2, k, value, gradient, _no_source)


@remembered
def manufactured(wavenumber: float | complex, a: Sequence[float], kind: str = "sin") -> Solution:
    """prod_i sin(a_i pi x_i) (zero at x_i = 0, 1 for whole a_i), or cosines (zero slope there). A real field."""
    frequencies = np.pi * np.asarray(a, dtype=np.float64)
    if kind not in ("sin", "cos"):
        raise ArgumentError(f"kind = {shown(kind)}: allowed are 'sin', 'cos'")
    if frequencies.ndim != 1 or not 1 <= frequencies.shape[0] <= 3:
        raise ArgumentError(f"a = {shown(a)}: one to three numbers")
    inside, outside = (np.sin, np.cos) if kind == "sin" else (np.cos, lambda x: -np.sin(x))
    wavenumber = (
        wavenumber.item() if isinstance(wavenumber, np.generic) else wavenumber
    )  # not in its own precision
    factor = wavenumber * wavenumber - float(
        np.sum(frequencies * frequencies)
    )  # a power would raise where it overflows

    def value(x: np.ndarray) -> np.ndarray:
        return np.asarray(np.prod(inside(x * frequencies), axis=1))

    def gradient(x: np.ndarray) -> np.ndarray:
        factors = inside(x * frequencies)
        columns = []
        for i, frequency in enumerate(frequencies):
            others = np.prod(np.delete(factors, i, axis=1), axis=1)
            columns.append(frequency * outside(x[:, i] * frequency) * others)
        return np.stack(columns, axis=1)

    return Solution(
        f"manufactured {kind}", frequencies.shape[0], wavenumber, value, gradient, lambda x: factor * value(x)
    )


@remembered
def airy(offset: float, slope: float) -> Solution:
    """Ai(t) - i Bi(t), t = -slope^(-2/3) (offset + slope x): one dimension, k^2 = offset + slope x, slope > 0."""
    check_positive("slope", slope)
    offset, slope = float(offset), float(slope)
    scale = slope ** (-2.0 / 3.0)

    def evaluated(x: np.ndarray, derivative: int) -> np.ndarray:
        functions = need("scipy.special").airy

        a = functions(-scale * (offset + slope * x[:, 0]))
        return np.asarray(a[derivative] - 1j * a[2 + derivative])

    def wavenumber(x: np.ndarray) -> np.ndarray:
        squared = offset + slope * x[:, 0]
        return np.asarray(np.sqrt(squared if np.all(squared >= 0) else squared.astype(np.complex128)))

    return Solution(
        "Airy",
        1,
        wavenumber,
        lambda x: evaluated(x, 0),
        lambda x: (-scale * slope * evaluated(x, 1))[:, None],
        _no_source,
    )


@remembered
def two_media(left: float, right: float, interface: float = 0.0) -> Solution:
    """A wave exp(i k1 (x - s)) from the left meets wavenumber k2 at x = s, in one dimension.

    Reflected: (k1 - k2)/(k1 + k2); transmitted: 2 k1/(k1 + k2). The field and its slope are continuous.
    """
    for name, k in (("left", left), ("right", right)):
        check_positive(name, k)
    left, right = float(left), float(right)  # unsigned integers of NumPy have no negative differences
    reflected, transmitted = (left - right) / (left + right), 2.0 * left / (left + right)

    def parts(x: np.ndarray, order: int) -> np.ndarray:
        s = x[:, 0] - interface
        before = (1j * left) ** order * np.exp(1j * left * s)
        back = (-1j * left) ** order * reflected * np.exp(-1j * left * s)
        after = (1j * right) ** order * transmitted * np.exp(1j * right * s)
        return np.asarray(np.where(s < 0, before + back, after))

    return Solution(
        "two media",
        1,
        lambda x: np.where(x[:, 0] < interface, left, right),
        lambda x: parts(x, 0),
        lambda x: parts(x, 1)[:, None],
        _no_source,
    )


@remembered
def hard_disk(
    wavenumber: float,
    radius: float,
    center: Sequence[float] = (0.0, 0.0),
    *,
    total: bool = False,
    orders: int | None = None,
) -> Solution:
    """The wave that a sound-hard disk scatters from exp(i k (x - center)), outside the disk.

    u = -sum_n i^n J_n'(ka)/H_n'(ka) H_n(kr) exp(i n theta), n = -orders .. orders (None: enough for double precision).
    With `total` the incident wave is in the field, and its normal derivative on the disk is zero.
    """
    check_positive("wavenumber", wavenumber)
    check_positive("radius", radius)
    k, radius, middle = float(wavenumber), float(radius), np.asarray(center, dtype=np.float64)
    if middle.shape != (2,):
        raise ArgumentError(f"center = {center!r:.40}: two numbers")
    if not isinstance(total, bool | np.bool_):
        raise ArgumentError(f"total = {total!r:.40}: True or False is expected")
    # The terms fall faster than exponentially once n is above ka.
    enough = k * radius + 12.0 * (k * radius) ** (1 / 3) + 12
    if orders is None and enough > _MOST_ORDERS:
        raise ArgumentError(
            f"wavenumber * radius = {k * radius:.3g}: the series needs more than {_MOST_ORDERS} orders"
        )
    last = math.ceil(enough) if orders is None else _order("orders", orders, 0)

    def series() -> tuple[np.ndarray, np.ndarray]:
        """Orders and their coefficients."""
        special = need("scipy.special")
        n = np.arange(-last, last + 1)
        below = special.h1vp(n, k * radius)
        # Far above ka the Hankel functions leave the floats, and their terms are nothing long before.
        n, below = (values[np.isfinite(below) & (np.abs(below) < _LARGEST)] for values in (n, below))
        return n, np.asarray(-((1j) ** n) * special.jvp(n, k * radius) / below)

    def place(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        away = x - middle
        return away, np.linalg.norm(away, axis=1)[:, None], np.arctan2(away[:, 1], away[:, 0])[:, None]

    def value(x: np.ndarray) -> np.ndarray:
        hankel1 = need("scipy.special").hankel1

        away, r, theta = place(x)
        n, coefficients = series()
        field = np.sum(coefficients * hankel1(n, k * r) * np.exp(1j * n * theta), axis=1)
        return np.asarray(field + np.exp(1j * k * away[:, 0]) if total else field)

    def gradient(x: np.ndarray) -> np.ndarray:
        special = need("scipy.special")
        h1vp, hankel1 = special.h1vp, special.hankel1

        away, r, theta = place(x)
        n, coefficients = series()
        terms = coefficients * np.exp(1j * n * theta)
        radial = np.sum(terms * k * h1vp(n, k * r), axis=1)
        turning = np.sum(terms * 1j * n * hankel1(n, k * r), axis=1) / r[:, 0]
        c, s = away[:, 0] / r[:, 0], away[:, 1] / r[:, 0]
        slope = np.stack([radial * c - turning * s, radial * s + turning * c], axis=1)
        if total:
            slope[:, 0] += 1j * k * np.exp(1j * k * away[:, 0])
        return np.asarray(slope)

    return Solution("sound-hard disk", 2, k, value, gradient, _no_source)


def _no_source(x: np.ndarray) -> np.ndarray:
    return np.zeros(x.shape[0])


def _order(name: str, value: Any, least: int) -> int:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | np.integer)
        or not least <= value <= _MOST_ORDERS
    ):
        raise ArgumentError(f"{name} = {shown(value)}: an integer from {least} to {_MOST_ORDERS} is expected")
    return int(value)
