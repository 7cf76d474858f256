"""One sequence over MPI ranks: NumPy arrays, `exscan` of affine maps, forward and backward.

    mpiexec -n 4 python examples/mpi_scan.py          (needs mpi4py and an MPI: pip install mpi4py mpich)

Each rank holds a slice of time, and in the end the output and the gradients of its slice, as one call on the whole
sequence would give them.
"""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

import scanfield
from scanfield.shards import adjoint

world = MPI.COMM_WORLD
backwards = world.Split(0, -world.rank)  # the same ranks, the last one first


def entering(comm: MPI.Comm, block: scanfield.Affine, first: np.ndarray) -> np.ndarray:
    """The state that comes into this rank's block: `first`, moved through the blocks of all ranks before."""
    before = comm.exscan(block, op=scanfield.compose)
    if before is None:  # nothing stands before the first rank
        return first
    moved = before.transition * first if before.diagonal else before.transition @ first
    return moved + before.state


def forward_and_backward(op, arrays, state, d_output, d_state):
    """Output and final state; and the gradients, from cotangents of this rank's output and of the whole's final state."""
    block = scanfield.summarise(op, **arrays)
    incoming = entering(world, block, state)
    result, pullback = scanfield.vjp(op, **arrays, initial_state=incoming)
    gamma = pullback(d_output, np.zeros_like(d_state))["initial_state"]
    outgoing = entering(backwards, adjoint(block, gamma), d_state)
    return result, pullback(d_output, outgoing)


def main(tokens: int = 130, op=scanfield.gdn2) -> float:
    """Compare with one call on the whole sequence; the largest deviation."""
    draw = np.random.default_rng(0)
    batch, heads, K, V = 2, 3, 4, 5
    key = draw.standard_normal((batch, tokens, heads, K))
    whole = {
        "query": draw.standard_normal((batch, tokens, heads, K)),
        "key": key / np.linalg.norm(key, axis=-1, keepdims=True),
        "value": draw.standard_normal((batch, tokens, heads, V)),
        "log_decay": -draw.uniform(0, 1, (batch, tokens, heads, K)),
        "erase": draw.uniform(0, 1, (batch, tokens, heads, K)),
    }
    state, d_state = (draw.standard_normal((batch, heads, K, V)) for _ in range(2))
    d_output = draw.standard_normal((batch, tokens, heads, V))

    cuts = np.linspace(0, tokens, world.size + 1).astype(int) + np.minimum(np.arange(world.size + 1), 3) % 3
    cuts[-1] = tokens  # slices of different lengths
    here = slice(cuts[world.rank], cuts[world.rank + 1])
    result, gradients = forward_and_backward(
        op, {name: x[:, here] for name, x in whole.items()}, state, d_output[:, here], d_state
    )

    wanted, pullback = scanfield.vjp(op, **whole, initial_state=state)
    right = pullback(d_output, d_state)
    errors = [np.max(np.abs(result.output - wanted.output[:, here]))]
    errors += [np.max(np.abs(gradients[name] - right[name][:, here])) for name in whole]
    if world.rank == 0:
        errors.append(np.max(np.abs(gradients["initial_state"] - right["initial_state"])))
    if world.rank == world.size - 1:
        errors.append(np.max(np.abs(result.final_state - wanted.final_state)))
    return max(world.allgather(float(max(errors))))


if __name__ == "__main__":
    worst = main()
    if world.rank == 0:
        print(f"{world.size} ranks, 130 tokens: within {worst:.1e} of one call")  # noqa: T201
    if not worst <= 1e-12:
        raise SystemExit(1)
