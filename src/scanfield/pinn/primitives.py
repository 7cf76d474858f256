"""What the sweep back of single layers is made of, for libraries whose functions take ``out=``: each step writes one array.

With ``accumulate`` a step adds to what stands there. Backends put kernels in the place of these.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from scanfield.arrays import Array

Take = Callable[[str, tuple[int, ...]], Array]
"""Memory by name and shape, for what is thrown away."""


class Primitives:
    """The steps by a library's own functions; arguments were checked, and share no memory with ``out``."""

    def __init__(self, module: Any) -> None:
        self.module = module
        """The library itself: its functions take ``out=``."""

    def subtract(self, a: Array, b: Array, out: Array, accumulate: bool) -> None:
        """out = a - b"""
        if accumulate:
            self.module.add(out, a, out=out)
            self.module.subtract(out, b, out=out)
        else:
            self.module.subtract(a, b, out=out)

    def scale(self, a: Array, s: float, out: Array, accumulate: bool) -> None:
        """out = a s"""
        xp = self.module
        write_or_add(xp, lambda rows, into: xp.multiply(rows, s, out=into), (a,), out, accumulate)

    def tanh_slope_times(self, h: Array, g: Array, out: Array, accumulate: bool) -> None:
        """out = (1 - h^2) g"""
        xp = self.module

        def write(h: Array, g: Array, out: Array) -> None:
            xp.multiply(h, h, out=out)
            xp.negative(out, out=out)
            xp.add(out, 1.0, out=out)
            xp.multiply(out, g, out=out)

        write_or_add(xp, write, (h, g), out, accumulate)

    def sum_rows(self, a: Array, out: Array, accumulate: bool, take: Take | None = None) -> None:
        """out (width,) = the sum of the rows of a (n, width)"""
        xp = self.module
        if not accumulate:
            xp.sum(a, axis=0, out=out)
        elif take is None:
            out += xp.sum(a, axis=0)
        else:
            xp.add(out, xp.sum(a, axis=0, out=take("line", tuple(out.shape))), out=out)

    def zero(self, out: Array) -> None:
        """out = 0"""
        out[...] = 0.0

    def frequency_gradient(
        self,
        x: Array,
        dL_dphi: Array,
        B: Array,
        out: Array,
        two_pi: float,
        accumulate: bool,
        take: Take | None = None,
    ) -> None:
        """out (d, features) = two_pi x^T (cos p dL_dphi_sin - sin p dL_dphi_cos) with p = two_pi x B"""
        xp, n, m = self.module, x.shape[0], B.shape[1]
        sines, cosines = dL_dphi[:, :m], dL_dphi[:, m:]
        if take is None:
            p = (x * two_pi) @ B
            found = x.T @ ((xp.cos(p) * sines - xp.sin(p) * cosines) * two_pi)
        else:
            p, c, s = (take(name, (n, m)) for name in ("p", "cos", "sin"))
            xp.matmul(x, B, out=p)
            xp.multiply(p, two_pi, out=p)
            xp.cos(p, out=c)
            xp.sin(p, out=s)
            one, two = take("one", (n, m)), take("two", (n, m))
            xp.multiply(c, sines, out=one)
            xp.multiply(s, cosines, out=two)
            xp.subtract(one, two, out=one)
            xp.multiply(one, two_pi, out=one)
            found = xp.matmul(x.T, one, out=take("product", tuple(B.shape)))
        if accumulate:
            xp.add(out, found, out=out)
        else:
            out[...] = found


# Numbers that are made at a time where something is added: as many as NumPy's own iterators buffer.
_FEW = 8192


def write_or_add(
    module: Any, write: Callable[..., Any], given: tuple[Array, ...], out: Array, accumulate: bool
) -> None:
    """``write(*given, out)``; or out += what it writes, some rows at a time, so that no array of its size is made."""
    if not accumulate:
        write(*given, out)
        return
    if not out.shape:
        out, given = out[None], tuple(array[None] for array in given)
    rows = max(1, _FEW // max(1, math.prod(out.shape[1:])))
    scratch = module.empty_like(out[:rows, ...])
    for start in range(0, out.shape[0], rows):
        part = out[start : start + rows, ...]
        made = scratch[: part.shape[0], ...]
        write(*(array[start : start + rows, ...] for array in given), made)
        module.add(part, made, out=part)
