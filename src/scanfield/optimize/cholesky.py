"""Solving A x = b for a symmetric positive A in the array API, which has a Cholesky factor but no triangular solve."""

from __future__ import annotations

from scanfield.arrays import Array, Namespace, device_of
from scanfield.errors import BackendError

__all__ = ["identity", "solve_positive"]

_BLOCK = 64


def solve_positive(xp: Namespace, a: Array, b: Array) -> Array | None:
    """x of A x = b, A (n, n) symmetric positive and b (n,); None where A is not positive in this precision.

    A = L L^T; the blocks on the diagonal of L are inverted, and two sweeps of products do the rest.
    """
    try:
        cholesky = xp.linalg.cholesky
    except AttributeError:
        raise BackendError(
            f"{xp.__name__} has no linear algebra (xp.linalg), which Levenberg-Marquardt needs; L-BFGS does without"
        ) from None
    # NumPy's error for this is a ValueError, torch's a RuntimeError; JAX and CuPy answer with NaN.
    try:
        factor = cholesky(a)
    except (ValueError, RuntimeError, ArithmeticError):
        return None
    if not bool(xp.all(xp.isfinite(factor[-1, :]))):
        return None
    n = a.shape[0]
    bounds = [(first, min(first + _BLOCK, n)) for first in range(0, n, _BLOCK)]
    inverses = [xp.linalg.inv(factor[first:last, first:last]) for first, last in bounds]

    column = b[:, None]
    forward: list[Array] = []
    for (first, last), inverse in zip(bounds, inverses, strict=True):
        right = column[first:last, :]
        if forward:
            right = right - factor[first:last, :first] @ xp.concat(forward)
        forward.append(inverse @ right)
    back: list[Array] = []
    for (first, last), inverse, right in reversed(list(zip(bounds, inverses, forward, strict=True))):
        if back:
            right = right - xp.matrix_transpose(factor[last:, first:last]) @ xp.concat(back)
        back.insert(0, xp.matrix_transpose(inverse) @ right)
    return xp.concat(back)[:, 0]


def identity(xp: Namespace, n: int, like: Array) -> Array:
    """The n x n identity in the dtype and on the device of `like`."""
    return xp.eye(n, dtype=like.dtype, device=device_of(like))
