"""The steps of a sweep for libraries whose functions take ``out=``: nothing is allocated once the buffers stand.

What each step computes is written in ``kernels``. A name of a buffer that stands for scratch is used by one step only, which
has done with it when it returns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from scanfield.arrays import Array, Namespace, device_of
from scanfield.pinn.activations import Erf
from scanfield.pinn.kernels import Channels, Kernels, cut
from scanfield.pinn.memory import Buffers
from scanfield.pinn.terms import Pair


@dataclass(frozen=True)
class _FrequencyRows:
    """The rows of omegabar (n, d, m): made by a call, or summed from their parts without being made."""

    xp: Namespace
    x: Array
    pbar: Array
    parts: Callable[[int], Iterator[Array]]
    """What else than x_i pbar adds to omegabar_i, one after the other in the same buffer."""
    device: Any

    def __call__(self) -> Array:
        (n, d), m = self.x.shape, self.pbar.shape[1]
        found = self.xp.empty((n, d, m), dtype=self.pbar.dtype, device=self.device)
        for i in range(d):
            found[:, i, :] = self.x[:, i : i + 1] * self.pbar
            for part in self.parts(i):
                found[:, i, :] += part
        return found


def _put(whole: Any, tree: Any, start: int, stop: int) -> None:
    """Copy each array of a tree into its rows."""
    if isinstance(tree, tuple):
        for place, part in zip(whole, tree, strict=True):
            _put(place, part, start, stop)
    elif tree is not None:
        whole[start:stop, ...] = tree


class InPlace(Kernels):
    """Kernels that write: NumPy, CuPy and, with its own way into matrices, PyTorch."""

    name = "generic.out"
    in_place = True

    def __init__(self, xp: Namespace, erf: Erf | None = None, module: Any = None) -> None:
        super().__init__(xp, erf)
        self.module = xp if module is None else module
        """The library itself: its functions take ``out=``."""

    def buffers(self, like: Array) -> Buffers:
        """Memory for one evaluation."""
        return Buffers(self.xp, like.dtype, device_of(like))

    def fold(
        self, body: Callable[..., Any], carry: Any, rows: Any, count: int, chunk: int
    ) -> tuple[Any, Any]:
        """As ``Kernels.fold``; each chunk is copied to its place, so that a Jacobian is never there twice."""
        if count <= chunk:
            return super().fold(body, carry, rows, count, chunk)
        whole: Any = None
        for start in range(0, count, chunk):
            stop = min(start + chunk, count)
            carry, out = body(carry, cut(rows, start, stop))
            if start == 0:
                whole = self._places(out, count)
            _put(whole, out, start, stop)
            del out  # before the next one is made
        return carry, whole

    def _places(self, tree: Any, count: int) -> Any:
        """Arrays of so many rows for a tree of arrays of fewer."""
        if tree is None:
            return None
        if isinstance(tree, tuple):
            return tuple([self._places(part, count) for part in tree])
        return self.xp.empty((count, *tree.shape[1:]), dtype=tree.dtype, device=device_of(tree))

    # -- embedding -------------------------------------------------------------------------------------------------

    def features(
        self,
        x: Array,
        omega: Array,
        raw: Array,
        mean: Array,
        channels: Channels,
        first: bool,
        memory: Buffers,
    ) -> tuple[Array, tuple[Array, Array]]:
        """As ``Kernels.features``."""
        xp, (n, d), m, r = self.module, x.shape, omega.shape[1], raw.shape[1]
        blocks = 1 + (d if first else 0) + len(channels)
        out = memory.take(("h", -1), (blocks, n, 2 * m + r))
        p, s, c = (memory.take(name, (n, m)) for name in ("p", "sin", "cos"))
        xp.matmul(x, omega, out=p)
        xp.sin(p, out=s)
        xp.cos(p, out=c)
        out[0, :, :m] = s
        out[0, :, m : 2 * m] = c
        if r:
            centred = memory.take("centred", (n, d))
            xp.subtract(x, mean, out=centred)
            out[:, :, 2 * m :] = 0.0
            out[0, :, 2 * m :] = xp.matmul(centred, raw, out=memory.take("raw", (n, r)))
        if first:
            for i in range(d):
                xp.multiply(c, omega[i, :], out=out[1 + i, :, :m])
                xp.multiply(s, omega[i, :], out=out[1 + i, :, m : 2 * m])
                xp.negative(out[1 + i, :, m : 2 * m], out=out[1 + i, :, m : 2 * m])
                if r:
                    out[1 + i, :, 2 * m :] = raw[i, :]
        for j, weights in enumerate(channels):
            q = self._squares(omega, weights, n, memory)
            xp.negative(q, out=q)
            block = out[1 + d + j, ...]
            xp.multiply(s, q, out=block[:, :m])
            xp.multiply(c, q, out=block[:, m : 2 * m])
        return out, (s, c)

    def _squares(self, omega: Array, weights: Array | None, n: int, memory: Buffers) -> Array:
        d, m = omega.shape
        square = self.module.multiply(omega, omega, out=memory.take("omega^2", (d, m)))
        if weights is None:
            return self.module.sum(square, axis=0, out=memory.take("q", (m,)))
        return self.module.matmul(weights, square, out=memory.take("q", (n, m)))

    def features_back(
        self,
        hbar: Array,
        x: Array,
        omega: Array,
        raw: Array,
        kept: tuple[Array, Array],
        channels: Channels,
        want_points: bool,
        memory: Buffers,
    ) -> tuple[Array, Array | None, _FrequencyRows]:
        """As ``Kernels.features_back``; the rows are not made, but what their sum needs is kept."""
        xp, (n, d), m = self.module, x.shape, omega.shape[1]
        s, c = kept
        a, b = hbar[:, :, :m], hbar[:, :, m : 2 * m]
        pbar, one, two = (memory.take(name, (n, m)) for name in ("pbar", "one", "two"))

        def turned(j: int, left: Array, right: Array) -> Array:
            """left a_j +- right b_j, in ``one``; the sign is that of the block's derivative."""
            xp.multiply(left, a[j, ...], out=one)
            xp.multiply(right, b[j, ...], out=two)
            return one

        turned(0, c, s)
        xp.subtract(one, two, out=pbar)
        first = hbar.shape[0] > 1
        for i in range(d if first else 0):
            turned(1 + i, s, c)
            xp.add(one, two, out=one)
            xp.multiply(one, omega[i, :], out=one)
            xp.subtract(pbar, one, out=pbar)
        for j, weights in enumerate(channels):
            q = self._squares(omega, weights, n, memory)
            turned(1 + d + j, c, s)
            xp.subtract(one, two, out=one)
            xp.multiply(one, q, out=one)
            xp.subtract(pbar, one, out=pbar)
        points = None
        if want_points:  # a result of its own, as long as the points: not kept
            points = pbar @ omega.T + hbar[0, :, 2 * m :] @ raw.T

        def parts(i: int) -> Iterator[Array]:
            """What else than x_i pbar adds to omegabar_i, one at a time in ``one``."""
            if first:
                turned(1 + i, c, s)
                yield xp.subtract(one, two, out=one)
            for j, weights in enumerate(channels):
                turned(1 + d + j, s, c)
                xp.add(one, two, out=one)
                xp.multiply(one, omega[i, :], out=one)
                xp.multiply(one, -2.0, out=one)
                if weights is not None:
                    xp.multiply(one, weights[:, i : i + 1], out=one)
                yield one

        return pbar, points, _FrequencyRows(self.xp, x, pbar, parts, memory.device)

    def add_frequencies(self, total: Array, rows: Any, memory: Buffers) -> Array:
        """As ``Kernels.add_frequencies``, without making the rows."""
        xp = self.module
        self.add_product(total, rows.x, rows.pbar, memory)
        for i in range(total.shape[0]):
            for part in rows.parts(i):
                line = xp.sum(part, axis=0, out=memory.take("line", (total.shape[1],)))
                xp.add(total[i, :], line, out=total[i, :])
        return total

    # -- layers ----------------------------------------------------------------------------------------------------

    def linear(self, h: Array, weight: Array, bias: Array, memory: Buffers, key: Any) -> Array:
        """As ``Kernels.linear``."""
        blocks, n, width = h.shape
        out = memory.take(key, (blocks, n, weight.shape[0]))
        self.module.matmul(
            h.reshape(blocks * n, width), weight.T, out=out.reshape(blocks * n, weight.shape[0])
        )
        self.module.add(out[0, ...], bias, out=out[0, ...])
        return out

    def linear_back(self, zbar: Array, weight: Array, memory: Buffers, key: Any) -> Array:
        """As ``Kernels.linear_back``."""
        blocks, n, width = zbar.shape
        out = memory.take((key[0], key[1] % 2), (blocks, n, weight.shape[1]))
        self.module.matmul(
            zbar.reshape(blocks * n, width), weight, out=out.reshape(blocks * n, weight.shape[1])
        )
        return out

    def add_weight(self, total: Array, zbar: Array, h: Array, memory: Buffers) -> Array:
        """As ``Kernels.add_weight``."""
        blocks, n, width = zbar.shape
        return self.add_product(
            total, zbar.reshape(blocks * n, width), h.reshape(blocks * n, h.shape[2]), memory
        )

    def add_product(self, total: Array, left: Array, right: Array, memory: Buffers) -> Array:
        """total + left^T right, in total."""
        scratch = self.module.matmul(left.T, right, out=memory.take("product", tuple(total.shape)))
        return self.module.add(total, scratch, out=total)

    def add_bias(self, total: Array, zbar: Array, memory: Buffers) -> Array:
        """As ``Kernels.add_bias``."""
        line = self.module.sum(zbar[0, ...], axis=0, out=memory.take("line", tuple(total.shape)))
        return self.module.add(total, line, out=total)

    def activate(self, name: str, z: Array, d: int, channels: Channels, memory: Buffers, key: Any) -> Array:
        """As ``Kernels.activate``."""
        xp, (blocks, n, width) = self.module, z.shape
        out = memory.take(key, (blocks, n, width))
        order = 0 if blocks == 1 else 2 if channels else 1
        s = self._derivatives(name, z[0, ...], None, order, out[0, ...], memory)
        if order:
            xp.multiply(z[1:, ...], s[0], out=out[1:, ...])
        for j, weights in enumerate(channels):
            curved = self._weighted(z[1 : 1 + d, ...], weights, memory)
            xp.multiply(curved, s[1], out=curved)
            xp.add(out[1 + d + j, ...], curved, out=out[1 + d + j, ...])
        return out

    def activate_back(
        self,
        name: str,
        z: Array,
        h: Array,
        hbar: Array,
        d: int,
        channels: Channels,
        memory: Buffers,
        key: Any,
    ) -> Array:
        """As ``Kernels.activate_back``, in the place of hbar."""
        xp, (blocks, n, width) = self.module, z.shape
        order = 1 if blocks == 1 else 3 if channels else 2
        s = self._derivatives(name, z[0, ...], h[0, ...], order, None, memory)
        xp.multiply(hbar[0, ...], s[0], out=hbar[0, ...])
        if order == 1:
            return hbar
        first = z[1 : 1 + d, ...]
        one, two = (memory.take(name, (n, width)) for name in ("one", "two"))
        many = xp.multiply(first, hbar[1 : 1 + d, ...], out=memory.take("many", (d, n, width)))
        xp.sum(many, axis=0, out=one)
        xp.multiply(one, s[1], out=one)
        xp.add(hbar[0, ...], one, out=hbar[0, ...])
        xp.multiply(hbar[1 : 1 + d, ...], s[0], out=hbar[1 : 1 + d, ...])
        for j, weights in enumerate(channels):
            bar = hbar[1 + d + j, ...]
            curved = self._weighted(first, weights, memory)
            xp.multiply(curved, s[2], out=curved)
            xp.multiply(z[1 + d + j, ...], s[1], out=two)
            xp.add(curved, two, out=curved)
            xp.multiply(curved, bar, out=curved)
            xp.add(hbar[0, ...], curved, out=hbar[0, ...])
            xp.multiply(bar, s[1], out=one)
            xp.multiply(one, 2.0, out=one)
            for i in range(d):
                xp.multiply(one, first[i, ...], out=two)
                if weights is not None:
                    xp.multiply(two, weights[:, i : i + 1], out=two)
                xp.add(hbar[1 + i, ...], two, out=hbar[1 + i, ...])
            xp.multiply(bar, s[0], out=bar)
        return hbar

    def _weighted(self, first: Array, weights: Array | None, memory: Buffers) -> Array:
        many = memory.take("many", tuple(first.shape))
        self.module.multiply(first, first, out=many)
        if weights is not None:
            for i in range(first.shape[0]):
                self.module.multiply(many[i, ...], weights[:, i : i + 1], out=many[i, ...])
        return self.module.sum(many, axis=0, out=memory.take("curved", tuple(first.shape[1:])))

    def _derivatives(
        self, name: str, z: Array, known: Array | None, order: int, value: Array | None, memory: Buffers
    ) -> list[Array]:
        """sigma(z) into ``value`` (forward), and the first ``order`` derivatives; ``known`` is sigma(z) (backward)."""
        s = [memory.take(f"s{i}", tuple(z.shape)) for i in range(1, order + 1)]
        if value is None:
            value = memory.take("s0", tuple(z.shape))
        getattr(self, f"_{name}")(z, known, value, s, memory)
        return s

    def _tanh(self, z: Array, t: Array | None, value: Array, s: list[Array], memory: Buffers) -> None:
        xp = self.module
        t = xp.tanh(z, out=value) if t is None else t
        if s:
            xp.multiply(t, t, out=s[0])
            if len(s) > 2:  # 6 t^2 - 2
                xp.multiply(s[0], 6.0, out=s[2])
                xp.subtract(s[2], 2.0, out=s[2])
            xp.negative(s[0], out=s[0])
            xp.add(s[0], 1.0, out=s[0])
        if len(s) > 1:
            xp.multiply(t, s[0], out=s[1])
            xp.multiply(s[1], -2.0, out=s[1])
        if len(s) > 2:
            xp.multiply(s[2], s[0], out=s[2])

    def _sin(self, z: Array, known: Array | None, value: Array, s: list[Array], memory: Buffers) -> None:
        xp = self.module
        known = xp.sin(z, out=value) if known is None else known
        if s:
            xp.cos(z, out=s[0])
        if len(s) > 1:
            xp.negative(known, out=s[1])
        if len(s) > 2:
            xp.negative(s[0], out=s[2])

    def sigmoid(self, z: Array, out: Array, memory: Buffers) -> Array:
        """1 / (1 + e^-z), as (1 + tanh(z / 2)) / 2: no overflow, and NumPy's tanh is a vector function."""
        xp = self.module
        xp.multiply(z, 0.5, out=out)
        xp.tanh(out, out=out)
        xp.multiply(out, 0.5, out=out)
        return xp.add(out, 0.5, out=out)

    def _logistic(self, z: Array, memory: Buffers) -> list[Array]:
        """g, g1, g2, g3"""
        xp = self.module
        g, g1, g2, g3 = (memory.take(f"g{i}", tuple(z.shape)) for i in range(4))
        self.sigmoid(z, g, memory)
        xp.multiply(g, g, out=g1)
        xp.subtract(g, g1, out=g1)
        xp.multiply(g, -2.0, out=g2)
        xp.add(g2, 1.0, out=g2)
        xp.multiply(g2, g1, out=g2)
        xp.multiply(g1, -6.0, out=g3)
        xp.add(g3, 1.0, out=g3)
        xp.multiply(g3, g1, out=g3)
        return [g, g1, g2, g3]

    def _swish(self, z: Array, known: Array | None, value: Array, s: list[Array], memory: Buffers) -> None:
        xp = self.module
        g = self._logistic(z, memory)
        if known is None:
            xp.multiply(z, g[0], out=value)
        for i, out in enumerate(s):  # (i + 1) g_i + z g_(i+1)
            xp.multiply(z, g[i + 1], out=out)
            for _ in range(i + 1):
                xp.add(out, g[i], out=out)

    def _softplus(self, z: Array, known: Array | None, value: Array, s: list[Array], memory: Buffers) -> None:
        xp = self.module
        if known is None:
            xp.abs(z, out=value)
            xp.negative(value, out=value)
            xp.exp(value, out=value)
            xp.log1p(value, out=value)
            xp.add(value, self.positive(z, memory.take("g0", tuple(z.shape))), out=value)
        for out, g in zip(s, self._logistic(z, memory) if s else [], strict=False):
            out[...] = g

    def positive(self, z: Array, out: Array) -> Array:
        """max(z, 0)"""
        return self.module.maximum(z, 0.0, out=out)

    def _gelu(self, z: Array, known: Array | None, value: Array, s: list[Array], memory: Buffers) -> None:
        xp = self.module
        big, density, square, one = (memory.take(f"g{i}", tuple(z.shape)) for i in range(4))
        xp.multiply(z, math.sqrt(0.5), out=one)
        self.write_erf(one, big)
        xp.add(big, 1.0, out=big)
        xp.multiply(big, 0.5, out=big)
        if known is None:
            xp.multiply(z, big, out=value)
        if not s:
            return
        xp.multiply(z, z, out=square)
        xp.multiply(square, -0.5, out=density)
        xp.exp(density, out=density)
        xp.multiply(density, 1.0 / math.sqrt(2.0 * math.pi), out=density)
        xp.multiply(z, density, out=s[0])
        if len(s) > 2:
            xp.subtract(square, 4.0, out=one)
            xp.multiply(s[0], one, out=s[2])
        xp.add(s[0], big, out=s[0])
        if len(s) > 1:
            xp.negative(square, out=square)
            xp.add(square, 2.0, out=square)
            xp.multiply(square, density, out=s[1])

    def write_erf(self, x: Array, out: Array) -> None:
        """erf(x) into out."""
        if self.erf is None:
            from scanfield.pinn.activations import erf_series

            out[...] = erf_series(self.xp, x)
        else:
            self.erf(x, out=out)  # type: ignore[call-arg]  # SciPy's and CuPy's are ufuncs

    # -- output ----------------------------------------------------------------------------------------------------

    def start_residual(self, target: Pair, n: int, parts: int, like: Array, memory: Buffers) -> Array:
        """As ``Kernels.start_residual``."""
        total = memory.take("residual", (n, parts))
        for i in range(parts):
            if target[i] is None:
                total[:, i] = 0.0
            else:
                self.module.negative(target[i], out=total[:, i])
        return total

    def add_residual(self, total: Array, block: Array, pair: Pair, memory: Buffers) -> Array:
        """As ``Kernels.add_residual``."""
        xp, (n, outputs) = self.module, block.shape
        line = memory.take("thin", (n,))
        real, imaginary = pair
        if real is not None:
            for i in range(outputs):
                xp.add(total[:, i], xp.multiply(real, block[:, i], out=line), out=total[:, i])
        if imaginary is not None:
            xp.add(total[:, 1], xp.multiply(imaginary, block[:, 0], out=line), out=total[:, 1])
            if outputs == 2:
                xp.subtract(total[:, 0], xp.multiply(imaginary, block[:, 1], out=line), out=total[:, 0])
        return total

    def scaled(self, array: Array, factor: Any, memory: Buffers) -> Array:
        """As ``Kernels.scaled``."""
        return self.module.multiply(array, factor, out=memory.take("scaled", tuple(array.shape)))

    def square_sum(self, array: Array, memory: Buffers) -> Array:
        """As ``Kernels.square_sum``."""
        square = self.module.multiply(array, array, out=memory.take("square", tuple(array.shape)))
        return self.module.sum(square)

    def seed(self, rbar: Array, pairs: Sequence[Pair | None], outputs: int, memory: Buffers) -> Array:
        """As ``Kernels.seed``."""
        xp, n = self.module, rbar.shape[0]
        out = memory.take("seed", (len(pairs), n, outputs))
        line = memory.take("thin", (n,))
        for block, pair in zip(out, pairs, strict=True):
            real, imaginary = (None, None) if pair is None else pair
            for i in range(outputs):
                if real is None:
                    block[:, i] = 0.0
                else:
                    xp.multiply(real, rbar[:, i], out=block[:, i])
            if imaginary is not None:
                xp.add(block[:, 0], xp.multiply(imaginary, rbar[:, 1], out=line), out=block[:, 0])
                if outputs == 2:
                    xp.subtract(block[:, 1], xp.multiply(imaginary, rbar[:, 0], out=line), out=block[:, 1])
        return out
