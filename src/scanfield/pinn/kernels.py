"""The small steps of a sweep, on arrays of any library: the code that defines what each does.

A jet is one stack of blocks (blocks, n, width): the value, and then, where they are wanted, d first derivatives and
one block for each *channel*, an operator sum_i a_i(x) u_ii with real weights a. A channel is None where all weights are 1
(the Laplacian), else an array (n, d).

These functions make new arrays and change none, so they serve libraries without writing (JAX) and compilers. Libraries
with ``out=`` have their own (``inplace``), which a test holds equal to these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from scanfield.arrays import Array, Namespace, current_device_of, zeros
from scanfield.pinn.activations import Erf, derivatives
from scanfield.pinn.memory import NOTHING
from scanfield.pinn.terms import Pair

Channels = tuple[Array | None, ...]


class Kernels:
    """The steps of a sweep in the array API; ``buffers`` name where a result may be kept, and are not used here."""

    name = "generic"
    in_place = False

    def __init__(self, xp: Namespace, erf: Erf | None = None) -> None:
        self.xp = xp
        self.erf = erf

    # -- how a sweep runs ------------------------------------------------------------------------------------------

    def context(self, like: Array) -> AbstractContextManager[Any]:
        """What a whole evaluation runs in, for arrays beside ``like``."""
        return current_device_of(like)

    def run(self, function: Callable[..., Any], static: Any, *arrays: Any, store: Any = None) -> Any:
        """``function(self, static, store, *arrays)``, compiled where the library compiles.

        ``static`` is hashable; ``store`` holds buffers to write into, for kernels that write.
        """
        return function(self, static, store, *arrays)

    def fold(
        self, body: Callable[..., Any], carry: Any, rows: Any, count: int, chunk: int
    ) -> tuple[Any, Any]:
        """``carry, out = body(carry, rows of a chunk)`` from the first chunk to the last; the outs joined along axis 0.

        ``rows`` is a tree of tuples and arrays, with ``count`` entries on axis 0 of each.
        """
        outs = []
        for start in range(0, max(1, count), chunk):
            carry, out = body(carry, rows if count <= chunk else cut(rows, start, min(start + chunk, count)))
            outs.append(out)
        return carry, outs[0] if len(outs) == 1 else join(self.xp, outs)

    def buffers(self, like: Array) -> Any:
        """Memory for one evaluation."""
        return NOTHING

    # -- embedding -------------------------------------------------------------------------------------------------

    def features(
        self, x: Array, omega: Array, raw: Array, mean: Array, channels: Channels, first: bool, memory: Any
    ) -> tuple[Array, tuple[Array, Array]]:
        """The embedding's stack (blocks, n, 2 m + r), and sine and cosine for the way back."""
        xp = self.xp
        p = x @ omega
        s, c = xp.sin(p), xp.cos(p)
        n, d = x.shape
        blocks = [[s, c, (x - mean) @ raw]]
        if first:
            for i in range(d):
                row = omega[i, :]
                blocks.append([row * c, -(row * s), xp.broadcast_to(raw[i, :], (n, raw.shape[1]))])
        for weights in channels:
            q = _squares(xp, omega, weights)
            blocks.append([-(q * s), -(q * c), zeros(xp, (n, raw.shape[1]), x.dtype, x)])
        return xp.stack([xp.concat(block, axis=1) for block in blocks]), (s, c)

    def features_back(
        self,
        hbar: Array,
        x: Array,
        omega: Array,
        raw: Array,
        kept: tuple[Array, Array],
        channels: Channels,
        want_points: bool,
        memory: Any,
    ) -> tuple[Array, Array | None, Callable[[], Array]]:
        """pbar (n, m), the gradient of the points, and a way to the rows of omegabar (n, d, m)."""
        s, c = kept
        m = omega.shape[1]
        d = x.shape[1]
        a, b = hbar[:, :, :m], hbar[:, :, m : 2 * m]
        pbar = c * a[0, ...] - s * b[0, ...]
        first = hbar.shape[0] > 1
        if first:
            for i in range(d):
                pbar = pbar - omega[i, :] * (s * a[1 + i, ...] + c * b[1 + i, ...])
        for j, weights in enumerate(channels):
            q = _squares(self.xp, omega, weights)
            pbar = pbar - q * (c * a[1 + d + j, ...] - s * b[1 + d + j, ...])
        points = pbar @ omega.T + hbar[0, :, 2 * m :] @ raw.T if want_points else None

        def rows() -> Array:
            found = []
            for i in range(d):
                row = x[:, i : i + 1] * pbar
                if first:
                    row = row + c * a[1 + i, ...] - s * b[1 + i, ...]
                for j, weights in enumerate(channels):
                    end = s * a[1 + d + j, ...] + c * b[1 + d + j, ...]
                    end = end if weights is None else weights[:, i : i + 1] * end
                    row = row - 2.0 * omega[i, :] * end
                found.append(row)
            return self.xp.stack(found, axis=1)

        return pbar, points, rows

    def add_frequencies(self, total: Array, rows: Callable[[], Array], memory: Any) -> Array:
        """The gradient of omega (d, m) plus that of these rows."""
        return total + self.xp.sum(rows(), axis=0)

    # -- layers ----------------------------------------------------------------------------------------------------

    def linear(self, h: Array, weight: Array, bias: Array, memory: Any, key: Any) -> Array:
        """h W^T for every block in one product, and the bias in the value."""
        blocks, n, width = h.shape
        z = self.xp.reshape(self.xp.reshape(h, (blocks * n, width)) @ weight.T, (blocks, n, weight.shape[0]))
        value = z[:1, ...] + bias
        return value if blocks == 1 else self.xp.concat([value, z[1:, ...]])

    def linear_back(self, zbar: Array, weight: Array, memory: Any, key: Any) -> Array:
        """zbar W for every block."""
        blocks, n, width = zbar.shape
        flat = self.xp.reshape(zbar, (blocks * n, width)) @ weight
        return self.xp.reshape(flat, (blocks, n, weight.shape[1]))

    def add_weight(self, total: Array, zbar: Array, h: Array, memory: Any) -> Array:
        """The gradient of a weight plus zbar^T h over all blocks."""
        blocks, n, width = zbar.shape
        left = self.xp.reshape(zbar, (blocks * n, width))
        return total + left.T @ self.xp.reshape(h, (blocks * n, h.shape[2]))

    def add_bias(self, total: Array, zbar: Array, memory: Any) -> Array:
        """The gradient of a bias plus the column sums of the value's block."""
        return total + self.xp.sum(zbar[0, ...], axis=0)

    def outer_rows(self, zbar: Array, h: Array) -> Array:
        """For each point the sum over the blocks of zbar (outer) h, (n, out, in)."""
        return self.xp.permute_dims(zbar, (1, 2, 0)) @ self.xp.permute_dims(h, (1, 0, 2))

    def activate(self, name: str, z: Array, d: int, channels: Channels, memory: Any, key: Any) -> Array:
        """h = sigma(z), h_i = s1 z_i, h_c = s2 sum_i a_i z_i^2 + s1 z_c"""
        blocks = z.shape[0]
        order = 0 if blocks == 1 else 2 if channels else 1
        s, *more = derivatives(self.xp, name, z[0, ...], order, self.erf)
        if order == 0:
            return s[None, ...]
        out = [s[None, ...], more[0] * z[1:, ...]]
        if channels:
            first = z[1 : 1 + d, ...]
            curved = self.xp.stack([more[1] * _weighted(self.xp, first, weights) for weights in channels])
            out = [out[0], out[1][:d, ...], out[1][d:, ...] + curved]
        return self.xp.concat(out)

    def activate_back(
        self, name: str, z: Array, h: Array, hbar: Array, d: int, channels: Channels, memory: Any, key: Any
    ) -> Array:
        """The bars before an activation from those after it.

        zbar = s1 hbar + s2 sum_i z_i hbar_i + sum_c (s3 sum_i a_i z_i^2 + s2 z_c) hbar_c
        zbar_i = s1 hbar_i + 2 s2 z_i sum_c a_i hbar_c;   zbar_c = s1 hbar_c
        """
        xp = self.xp
        blocks = z.shape[0]
        order = 1 if blocks == 1 else 3 if channels else 2
        _, *s = derivatives(xp, name, z[0, ...], order, self.erf)
        scaled = s[0] * hbar
        if order == 1:
            return scaled
        first = z[1 : 1 + d, ...]
        value = scaled[0, ...] + s[1] * xp.sum(first * hbar[1 : 1 + d, ...], axis=0)
        slopes = scaled[1 : 1 + d, ...]
        for j, weights in enumerate(channels):
            bar = hbar[1 + d + j, ...]
            value = value + (s[2] * _weighted(xp, first, weights) + s[1] * z[1 + d + j, ...]) * bar
            bent = first if weights is None else xp.permute_dims(weights, (1, 0))[:, :, None] * first
            slopes = slopes + 2.0 * (s[1] * bar) * bent
        return xp.concat([value[None, ...], slopes, scaled[1 + d :, ...]])

    # -- output ----------------------------------------------------------------------------------------------------

    def start_residual(self, target: Pair, n: int, parts: int, like: Array, memory: Any) -> Array:
        """-t in real parts, (n, parts)."""
        nothing = zeros(self.xp, (n,), like.dtype, like)
        return self.xp.stack([nothing if t is None else -t for t in target[:parts]], axis=1)

    def scaled(self, array: Array, factor: Any, memory: Any) -> Array:
        """array * factor"""
        return array * factor

    def square_sum(self, array: Array, memory: Any) -> Array:
        """The sum of squares of all entries."""
        return self.xp.sum(array * array)

    def add_residual(self, total: Array, block: Array, pair: Pair, memory: Any) -> Array:
        """total (n, parts) + c u for a block u (n, outputs) of the jet and a coefficient c."""
        return total + self.times(block, pair, total.shape[1])

    def times(self, block: Array, pair: Pair, parts: int) -> Array:
        """c u in real parts: (cr u0 - ci u1, cr u1 + ci u0), for a real field (cr u, ci u)."""
        real, imaginary = pair
        columns = [zeros(self.xp, block.shape[:1], block.dtype, block) for _ in range(parts)]
        outputs = block.shape[1]
        if real is not None:
            for i in range(outputs):
                columns[i] = columns[i] + real * block[:, i]
        if imaginary is not None:
            columns[1] = columns[1] + imaginary * block[:, 0]
            if outputs == 2:
                columns[0] = columns[0] - imaginary * block[:, 1]
        return self.xp.stack(columns, axis=1)

    def seed(self, rbar: Array, pairs: Sequence[Pair | None], outputs: int, memory: Any) -> Array:
        """The bars of all blocks of the output, (blocks, n, outputs): conj(c) rbar."""
        return self.xp.stack([self.conjugate_times(rbar, pair, outputs) for pair in pairs])

    def conjugate_times(self, rbar: Array, pair: Pair | None, outputs: int) -> Array:
        """conj(c) rbar in real parts: (cr r0 + ci r1, cr r1 - ci r0); of a real field its first column."""
        columns = [zeros(self.xp, rbar.shape[:1], rbar.dtype, rbar) for _ in range(outputs)]
        real, imaginary = (None, None) if pair is None else pair
        if real is not None:
            for i in range(outputs):
                columns[i] = columns[i] + real * rbar[:, i]
        if imaginary is not None:
            columns[0] = columns[0] + imaginary * rbar[:, 1]
            if outputs == 2:
                columns[1] = columns[1] - imaginary * rbar[:, 0]
        return self.xp.stack(columns, axis=1)


def _squares(xp: Namespace, omega: Array, weights: Array | None) -> Array:
    """sum_i a_i omega_i^2: (m,) for the Laplacian, else (n, m)."""
    square = omega * omega
    return xp.sum(square, axis=0) if weights is None else weights @ square


def _weighted(xp: Namespace, first: Array, weights: Array | None) -> Array:
    """sum_i a_i z_i^2, (n, width)"""
    square = first * first
    if weights is not None:
        square = xp.permute_dims(weights, (1, 0))[:, :, None] * square
    return xp.sum(square, axis=0)


def cut(tree: Any, start: int, end: int) -> Any:
    """Rows of every array in a tree of tuples."""
    if tree is None:
        return None
    if isinstance(tree, tuple):
        parts = [cut(part, start, end) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    return tree[start:end, ...]


def join(xp: Namespace, trees: Sequence[Any]) -> Any:
    """Trees of one structure, each array joined along axis 0."""
    if trees[0] is None:
        return None
    if isinstance(trees[0], tuple):
        return tuple([join(xp, parts) for parts in zip(*trees, strict=True)])
    return xp.concat(list(trees), axis=0)
