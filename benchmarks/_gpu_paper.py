"""What the chunk kernels of the gated delta rule move and multiply, counted on paper; `gpu.py` sets it beside times."""

from __future__ import annotations


def chunk_kernels(
    s: dict[str, int], *, kept: int, stored: int = 2, keys: int = 2
) -> dict[str, tuple[int, int]]:
    """Of each forward kernel of the gated delta rule in chunks: bytes, each array once; multiplications of its products.

    ``kept``, ``stored`` and ``keys`` are the bytes of a number that kernels leave to each other, of a value, of a key. For
    K = V = D, a multiple of 64, and T of 64. A product of a warp counts whole, also where half of it is thrown away.
    """
    D, chunks = s["D"], s["B"] * s["T"] // 64 * s["VH"]
    gate = D if s["wide"] else 1
    rows, triangle, state = 64 * D, 64 * 64, D * D
    shared = 2 * keys * rows * s["H"] // s["VH"]  # query and key, once for the value heads that share them
    columns = kept * rows  # J y, then the updates
    inside = (
        shared + stored * rows + stored * 64 * 3 * gate  # query, key; value; gates
        + kept * (3 * rows + triangle) + 4 * D + columns  # W, Kb, Qb, P; what a chunk decays; J y
    )  # fmt: skip
    states = kept * 2 * rows + 4 * D + 2 * columns + kept * state
    output = kept * (rows + triangle + state) + columns + keys * rows
    # In blocks of 16 x 16 x depth 16: six levels of L and P (4 + 2 + 4 blocks of 4 levels) and the diagonal, D / 16 deep;
    # W and J y by the lower 10 of J's 16 blocks.
    block = 16**3
    return {
        "delta_inside": (chunks * inside, chunks * block * (D // 16 * (2 * 22 + 4) + 2 * 10 * D // 16)),
        "delta_states": (chunks * states + 8 * s["B"] * s["VH"] * state, chunks * 2 * 64 * D * D),
        "delta_output": (chunks * output, chunks * (64 * D * D + block * 10 * D // 16)),
    }


def chunk_kernels_back(
    s: dict[str, int], *, kept: int, stored: int = 2, keys: int = 2
) -> dict[str, tuple[int, int]]:
    """As ``chunk_kernels``, of the gradient; float32 are the cotangents that come and the gradients that go.

    Last the sums over heads that share a key, which CuPy's own kernels make. Casts to the arrays' dtypes come after.
    """
    D, chunks = s["D"], s["B"] * s["T"] // 64 * s["VH"]
    gate = D if s["wide"] else 1
    rows, triangle, state = 64 * D, 64 * 64, D * D
    shared = 2 * keys * rows * s["H"] // s["VH"]
    gates, d_gates = stored * 64 * gate, 4 * 64 * gate  # of one kind, and its gradient
    d_output, heads = 4 * rows, s["B"] * s["VH"]
    inside = shared + 2 * gates + d_output + kept * (3 * rows + triangle) + 4 * D + kept * rows
    states = d_output + kept * 3 * rows + 4 * D + 2 * kept * rows + kept * state
    triangles = (
        d_output + kept * (triangle + rows + 2 * rows) + stored * rows + gates  # J, U, dU then dX; value, write
        + kept * 2 * triangle + 4 * rows + d_gates  # dP, dL; those of value and write
    )  # fmt: skip
    outer = (
        d_output + kept * (2 * rows + 2 * state) + kept * 3 * rows + 2 * 4 * D
    )  # U, dX, S, dS; dQb, dEb, dKb; decays
    gradients = shared + 2 * gates + kept * (3 * rows + 2 * triangle) + 4 * D + 4 * 2 * rows + 2 * d_gates
    sums = 0 if s["H"] == s["VH"] else 2 * 4 * (rows + rows * s["H"] // s["VH"])
    # In blocks of 16 x 16 x depth 16, by 16 channels: the levels of L and P as forward; back through them, halves of 32
    # (4 warps, 2 products of depth 32), of 16, and four products for each of the lower levels.
    block = 16**3
    back = 4 * (2 * 2 + 2 + 4 * 4)
    return {
        "delta_inside": (chunks * inside, chunks * block * (D // 16 * (2 * 22 + 4) + 2 * 10 * D // 16)),
        "delta_states_back": (chunks * states + 8 * heads * state, chunks * 3 * 64 * D * D),
        "delta_triangles": (chunks * triangles, chunks * block * (10 + 2 * 16) * D // 16),
        "delta_outer": (chunks * outer, chunks * 3 * 64 * D * D),
        "delta_gradients": (chunks * gradients, chunks * block * back * D // 16),
        "sums": (chunks * sums, 0),
    }
