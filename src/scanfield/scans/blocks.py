"""Products and inverses of a chunk by bisection: what the chunk form of the gated delta rule needs.

A chunk of C rows (a power of two) is halved again and again. At level m = 1, 2, 4, ..., C/2 it falls into blocks of 2m
rows; with c the boundary inside a block, r in its second half and s in its first,

    exp(sum_(s<i<=r) g_i) = exp(sum_(c<i<=r) g_i) * exp(sum_(s<i<=c) g_i) = pre_r * suf_s

Both exponents are sums of log decays, never differences of sums. For g <= 0 each factor is at most 1, so nothing
overflows and g = -inf is exact; and row r depends on no gate after r.

A lower triangular matrix in *levels* is its list of blocks, level m as (..., C/(2m), m, m), and its diagonal
(..., C, 1, 1).
"""

from __future__ import annotations

from scanfield.arrays import Array, Namespace


def power_of_two(count: int) -> int:
    """The smallest power of two that is at least ``count``."""
    return 1 << max(count - 1, 0).bit_length()


def inclusive(xp: Namespace, x: Array) -> Array:
    """Row r: the sum of rows 0..r (rows are axis -2)."""
    # The library's own name where it has one: array_api_compat's wrapper looks its namespace up by a cached function,
    # which torch.compile warns of.
    own = getattr(xp, "cumsum", None)
    return xp.cumulative_sum(x, axis=-2) if own is None else own(x, len(x.shape) - 2)


def reverse_inclusive(xp: Namespace, x: Array) -> Array:
    """Row r: the sum of rows r, r+1, ..."""
    return xp.flip(inclusive(xp, xp.flip(x, axis=-2)), axis=-2)


def exclusive(xp: Namespace, x: Array) -> Array:
    """Row r: the sum of rows 0..r-1."""
    nothing = xp.zeros_like(x[..., :1, :])
    return xp.concat([nothing, inclusive(xp, x[..., :-1, :])], axis=-2)


def reverse_exclusive(xp: Namespace, x: Array) -> Array:
    """Row r: the sum of rows r+1, r+2, ..."""
    nothing = xp.zeros_like(x[..., :1, :])
    return xp.concat([reverse_inclusive(xp, x[..., 1:, :]), nothing], axis=-2)


def halves(xp: Namespace, x: Array, m: int) -> tuple[Array, Array]:
    """First and second halves of all blocks of 2m rows, (..., C/(2m), m, columns) each."""
    cut = xp.reshape(x, (*x.shape[:-2], x.shape[-2] // (2 * m), 2, m, x.shape[-1]))
    return cut[..., 0, :, :], cut[..., 1, :, :]


def join_halves(xp: Namespace, first: Array, second: Array) -> Array:
    """The inverse of ``halves``."""
    pair = xp.stack([first, second], axis=-3)
    return xp.reshape(pair, (*pair.shape[:-4], pair.shape[-4] * 2 * pair.shape[-2], pair.shape[-1]))


def anchored(xp: Namespace, g: Array | None, rows: int) -> list[tuple[int, Array | None, Array | None]]:
    """(m, pre, suf) of every level for log decays ``g`` (..., C, K or 1); the factors are None without decay."""
    levels: list[tuple[int, Array | None, Array | None]] = []
    m = 1
    while m < rows:
        if g is None:
            levels.append((m, None, None))
        else:
            first, second = halves(xp, g, m)
            levels.append((m, xp.exp(inclusive(xp, second)), xp.exp(reverse_exclusive(xp, first))))
        m *= 2
    return levels


def scaled(x: Array, factor: Array | None) -> Array:
    """``x * factor``, or ``x`` where there is none."""
    return x if factor is None else x * factor


def lower_blocks(
    xp: Namespace, x: Array, k: Array, levels: list[tuple[int, Array | None, Array | None]]
) -> list[Array]:
    """The strictly lower part of M_rs = sum_d x_rd k_sd exp(sum_(s<i<=r) g_id), in levels."""
    blocks = []
    for m, pre, suf in levels:
        second = scaled(halves(xp, x, m)[1], pre)
        first = scaled(halves(xp, k, m)[0], suf)
        blocks.append(xp.matmul(second, xp.matrix_transpose(first)))
    return blocks


def assemble_lower(xp: Namespace, diagonal: Array, blocks: list[Array]) -> Array:
    """The matrix (..., C, C) of a diagonal (..., C, 1, 1) and its levels."""
    matrix = diagonal
    for block in blocks:
        above, below = matrix[..., 0::2, :, :], matrix[..., 1::2, :, :]
        top = xp.concat([above, xp.zeros_like(block)], axis=-1)
        bottom = xp.concat([block, below], axis=-1)
        matrix = xp.concat([top, bottom], axis=-2)
    return xp.squeeze(matrix, axis=-3)


def take_apart(xp: Namespace, matrix: Array) -> tuple[Array, list[Array]]:
    """Diagonal (..., C, 1, 1) and levels of the lower part of (..., C, C); what lies above is not looked at."""
    rest = xp.expand_dims(matrix, axis=-3)
    blocks = []
    while rest.shape[-1] > 1:
        m = rest.shape[-1] // 2
        blocks.append(rest[..., m:, :m])
        pair = xp.stack([rest[..., :m, :m], rest[..., m:, m:]], axis=-3)
        rest = xp.reshape(pair, (*pair.shape[:-4], pair.shape[-4] * 2, m, m))
    blocks.reverse()
    return rest, blocks


# Rows whose inverse is formed; above them substitution goes on. Inverses of more rows cost digits when keys are alike.
_LEAF = 16


class UnitLower:
    """I + L for a strictly lower L given in levels, ready to solve with.

    The inverse of each diagonal block of up to 16 rows is made by recursion on its halves,
    [[A, 0], [B, D]]^(-1) = [[A', 0], [-D' B A', D']]; above them blocks are substituted. As accurate as LAPACK's
    triangular solve. A Neumann series is not: strongly correlated keys cost it every digit.
    """

    def __init__(self, xp: Namespace, blocks: list[Array]) -> None:
        self._xp = xp
        small = [block for block in blocks if block.shape[-1] < _LEAF]
        self._large = [block for block in blocks if block.shape[-1] >= _LEAF]
        whole = blocks[0]
        inverse = xp.ones_like(xp.concat([whole, whole], axis=-3))  # (..., C, 1, 1)
        for block in small:
            above, below = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
            corner = -xp.matmul(below, xp.matmul(block, above))
            top = xp.concat([above, xp.zeros_like(block)], axis=-1)
            inverse = xp.concat([top, xp.concat([corner, below], axis=-1)], axis=-2)
        self._inverse = inverse  # (..., leaves, rows of a leaf, rows of a leaf)

    def solve(self, x: Array) -> Array:
        """(I + L)^(-1) x for (..., C, columns)."""
        return self._solve(x, len(self._large), 0, turned=False)

    def solve_transposed(self, x: Array) -> Array:
        """(I + L)^(-T) x for (..., C, columns)."""
        return self._solve(x, len(self._large), 0, turned=True)

    def _solve(self, x: Array, level: int, place: int, *, turned: bool) -> Array:
        """The rows of block ``place`` of a level; a leaf is level 0."""
        xp = self._xp
        if level == 0:
            inverse = self._inverse[..., place, :, :]
            return xp.matmul(xp.matrix_transpose(inverse) if turned else inverse, x)
        half = x.shape[-2] // 2
        corner = self._large[level - 1][..., place, :, :]
        first, second = x[..., :half, :], x[..., half:, :]
        if turned:
            second = self._solve(second, level - 1, 2 * place + 1, turned=True)
            first = self._solve(
                first - xp.matmul(xp.matrix_transpose(corner), second), level - 1, 2 * place, turned=True
            )
        else:
            first = self._solve(first, level - 1, 2 * place, turned=False)
            second = self._solve(second - xp.matmul(corner, first), level - 1, 2 * place + 1, turned=False)
        return xp.concat([first, second], axis=-2)


def lower_blocks_back(
    xp: Namespace,
    d_blocks: list[Array],
    x: Array,
    k: Array,
    levels: list[tuple[int, Array | None, Array | None]],
) -> tuple[Array, Array, list[tuple[Array, Array]]]:
    """The adjoint of ``lower_blocks``: gradients of x and k, and at each level what the decays' gradient is made of.

    The last are pairs (first half: k * its gradient, second half: x * its gradient); the gradient of g is their
    exclusive running sum over the first half and their reverse inclusive one over the second.
    """
    d_x = d_k = None
    parts = []
    for d_block, (m, pre, suf) in zip(d_blocks, levels, strict=True):
        k_first, x_second = halves(xp, k, m)[0], halves(xp, x, m)[1]
        a_x = scaled(xp.matmul(d_block, scaled(k_first, suf)), pre)
        a_k = scaled(xp.matmul(xp.matrix_transpose(d_block), scaled(x_second, pre)), suf)
        parts.append((k_first * a_k, x_second * a_x))
        from_x = join_halves(xp, xp.zeros_like(a_x), a_x)
        from_k = join_halves(xp, a_k, xp.zeros_like(a_k))
        d_x = from_x if d_x is None else d_x + from_x
        d_k = from_k if d_k is None else d_k + from_k
    if d_x is None:
        raise ValueError("no levels: a single row has no part below the diagonal")
    return d_x, d_k, parts
