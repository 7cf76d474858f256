"""The PINN's embedding on CuPy arrays: a kernel forward, one back to the phases, one for the gradient of the frequencies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from scanfield.arrays import dtype_name
from scanfield.pinn.inplace import InPlace
from scanfield.pinn.kernels import Channels
from scanfield.pinn.memory import Buffers
from scanfield_cupy.modules import STORED, THREADS, blocks_for, launch
from scanfield_cupy.pinn_steps import COLUMNS, cut_rows, plane, sum_segments, weights_of

Array = Any


@dataclass(frozen=True)
class _Rows:
    """What the gradient of omega is the sum of; a call makes the rows themselves, for Jacobians."""

    kernels: Embedding
    given: tuple[Any, ...]
    """The arguments of ``features_back``."""
    pbar: Array

    def __call__(self) -> Array:
        hbar, x, omega, raw, kept, channels, memory = self.given
        again = InPlace.features_back(self.kernels, hbar, x, omega, raw, kept, channels, False, memory)
        return again[2]()


class Embedding(InPlace):
    """The steps of the embedding, each a kernel."""

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
        (n, d), m, r = x.shape, omega.shape[1], raw.shape[1]
        firsts = d if first else 0
        out = memory.take(("h", -1), (1 + firsts + len(channels), n, 2 * m + r))
        p, s, c = (memory.take(name, (n, m)) for name in ("p", "sin", "cos"))
        if n * (m + r):
            _run(
                "embed", out, blocks_for(n * (m + r)), 1,
                (*plane(x), *plane(omega), *plane(raw), mean, p, s, c, out, n, m, r, d, firsts, len(channels),
                 *weights_of(channels)),
            )  # fmt: skip
        return out, (s, c)

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
    ) -> tuple[Array, Array | None, Any]:
        """As ``Kernels.features_back``; the rows are not made, but what their sum needs is kept."""
        given = (hbar, x, omega, raw, kept, channels)
        if not hbar.flags.c_contiguous:
            return super().features_back(*given, want_points, memory)
        (n, d), m, r = x.shape, omega.shape[1], raw.shape[1]
        pbar = memory.take("pbar", (n, m))
        if n * m:
            _run(
                "embed_back", hbar, blocks_for(n * m), 1,
                (hbar, *plane(omega), *kept, pbar, n, m, r, d, _firsts(hbar, d), len(channels), *weights_of(channels)),
            )  # fmt: skip
        points = None
        if want_points:  # a result of its own, as long as the points: not kept
            points = pbar @ omega.T + hbar[0, :, 2 * m :] @ raw.T
        return pbar, points, _Rows(self, (*given, memory), pbar)

    def add_frequencies(self, total: Array, rows: Any, memory: Buffers) -> Array:
        """As ``Kernels.add_frequencies``, without making the rows."""
        if not isinstance(rows, _Rows):
            return super().add_frequencies(total, rows, memory)
        hbar, x, omega, raw, kept, channels, _ = rows.given
        (n, d), m, r = x.shape, omega.shape[1], raw.shape[1]
        if n * m == 0:
            return total
        segments, each = cut_rows(n)
        to = total if segments == 1 else memory.take("parts", (segments * d, m))
        _run(
            "omega_gradient", total, -(-m // COLUMNS), segments,
            (*plane(x), *plane(omega), hbar, *kept, rows.pbar, *plane(to), n, m, r, d, _firsts(hbar, d), len(channels),
             *weights_of(channels), segments, each, int(segments == 1)),
            THREADS * total.dtype.itemsize,
        )  # fmt: skip
        if segments > 1:
            sum_segments(to, total, segments, True)
        return total


def _firsts(stack: Array, d: int) -> int:
    """First derivatives that a stack has."""
    return d if stack.shape[0] > 1 else 0


def _run(
    kernel: str, like: Array, blocks: int, rows: int, arguments: tuple[Any, ...], shared: int = 0
) -> None:
    real = STORED[dtype_name(like.dtype)]
    launch("pinn_embedding.cu", {"REAL": real}, kernel, (blocks, rows, 1), arguments, shared, THREADS)
