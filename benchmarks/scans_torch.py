"""The scans on PyTorch tensors beside what PyTorch's users write today, in one run.

float32, median CPU time of one thread; the peers take turns with scanfield. What a peer computes is compared with what
scanfield does first. A row says what was measured, the floor or limit that was set before, and whether it is met.

    python benchmarks/scans_torch.py
    python benchmarks/scans_torch.py --only gdn2 overhead
    python benchmarks/scans_torch.py --json
    python benchmarks/scans_torch.py --quick      # small sizes: does it run?
"""

from __future__ import annotations

import _timing  # before NumPy: it sets the number of BLAS threads

# isort: split
import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import _peers
import numpy as np
import torch
from scans_numpy import Row, alike, gdn2_inputs, row, selective_inputs

import scanfield

SPEED = "Forward and backward through autograd"
Call = Callable[[], Any]


def tensors(arrays: dict[str, np.ndarray], *, grad: bool = False) -> dict[str, torch.Tensor]:
    """Arrays as tensors of their own."""
    return {name: torch.tensor(x, requires_grad=grad) for name, x in arrays.items()}


def forward(op: Any, arrays: dict[str, np.ndarray], method: str | None = None) -> Call:
    """The call itself."""
    given = tensors(arrays)
    return lambda: [x.numpy() for x in op(**given, method=method)]


def training(op: Any, arrays: dict[str, np.ndarray], d_output: np.ndarray, method: str | None = None) -> Call:
    """Forward and backward."""
    given, cotangent = tensors(arrays, grad=True), torch.tensor(d_output)

    def run() -> dict[str, np.ndarray]:
        output = op(**given, method=method).output
        found = torch.autograd.grad(output, list(given.values()), cotangent)
        return {name: x.numpy() for name, x in zip(given, found, strict=True)}

    return run


def beside(
    table: str, work: str, ours: Call, peers: dict[str, tuple[Call, float | None]], quick: bool
) -> Iterator[Row]:
    """Rows of one work, each with its floor."""
    for name, (peer, _) in peers.items():
        alike(peer(), ours(), f"{work} beside {name}")
    calls = {"ours": ours} | {name: peer for name, (peer, _) in peers.items()}
    taken = _timing.rivals(calls, least=0.02 if quick else 1.0, rounds=3 if quick else 7)
    for name, (_, least) in peers.items():
        times = {"ms": 1e3 * taken["ours"], "peer ms": 1e3 * taken[name]}
        yield row(table, work, name, taken[name] / taken["ours"], least=None if quick else least, **times)


def draw(shape: tuple[int, ...]) -> np.ndarray:
    """A cotangent."""
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


# -- the compiled scans ------------------------------------------------------------------------------------------------
def selective(quick: bool) -> Iterator[Row]:
    """selective_scan with gradients."""
    sizes = (1, 64, 48, 16) if quick else (1, 1024, 1536, 16)
    arrays = selective_inputs(*sizes)
    d_output = draw(sizes[:3])
    yield from beside(
        SPEED,
        f"selective_scan, B, T, D, N = {sizes}",
        training(scanfield.selective_scan, arrays, d_output),
        {
            "eager loop over unbind": (_peers.eager_selective_training(arrays, d_output), 20.0),
            "parallel scan, the way of mambapy": (_peers.parallel_selective_training(arrays, d_output), 80.0),
        },
        quick,
    )


def gdn2(quick: bool) -> Iterator[Row]:
    """gdn2, and its rule with one gate a head."""
    sizes = (1, 64, 2, 16) if quick else (1, 1024, 4, 64)
    arrays = gdn2_inputs(*sizes)
    d_output = draw(sizes)
    loop = next(iter(_peers.GDN2_LOOPS))
    yield from beside(
        SPEED,
        f"gdn2, B, T, H, K = V = {sizes}",
        training(scanfield.gdn2, arrays, d_output),
        {
            f"{loop}, the way of fla's naive recurrence": (
                _peers.eager_gdn2_training(arrays, d_output, loop),
                20.0,
            )
        },
        quick,
    )
    heads = {name: arrays[name] for name in ("query", "key", "value")} | {
        "log_decay": arrays["log_decay"][..., 0].copy(),
        "beta": arrays["erase"][..., 0].copy(),
    }
    peer = "chunks of 64, the way of transformers' fallback"
    given = tensors(heads, grad=True)

    def trained() -> dict[str, np.ndarray]:
        found = torch.autograd.grad(chunked_rule(**given)[0], list(given.values()), torch.tensor(d_output))
        return {name: x.numpy() for name, x in zip(given, found, strict=True)}

    @torch.no_grad()
    def run() -> list[np.ndarray]:
        return [x.numpy() for x in chunked_rule(**given)]

    work = f"gated_delta_rule, B, T, H, K = V = {sizes}"
    op = scanfield.gated_delta_rule
    yield from beside(SPEED, work, training(op, heads, d_output), {peer: (trained, 4.0)}, quick)
    yield from beside("Forward", work, forward(op, heads), {peer: (run, 12.0)}, quick)


def chunked_rule(query, key, value, log_decay, beta, size=64):
    """The gated delta rule by chunks, as transformers' PyTorch fallback goes about it; time is whole chunks."""
    batch, length, heads, width = query.shape
    q, k, v = (x.transpose(1, 2).reshape(batch, heads, -1, size, x.shape[-1]) for x in (query, key, value))
    g, b = (x.transpose(1, 2).reshape(batch, heads, -1, size) for x in (log_decay, beta))
    q, g = q * width**-0.5, g.cumsum(-1)
    decay = (g[..., :, None] - g[..., None, :]).tril().exp().tril()
    upper = torch.triu(torch.ones(size, size, dtype=torch.bool))
    k_beta = k * b[..., None]
    solved = -(k_beta @ k.transpose(-1, -2) * decay).masked_fill(upper, 0)
    for i in range(1, size):
        line, above = solved[..., i, :i].clone(), solved[..., :i, :i].clone()
        solved[..., i, :i] = line + (line[..., None] * above).sum(-2)
    solved = solved + torch.eye(size)
    v, k_decayed = solved @ (v * b[..., None]), solved @ (k_beta * g.exp()[..., None])
    state = torch.zeros(batch, heads, width, v.shape[-1])
    outputs = []
    for i in range(length // size):
        q_i, k_i, g_i = q[:, :, i], k[:, :, i], g[:, :, i]
        new = v[:, :, i] - k_decayed[:, :, i] @ state
        within = (q_i @ k_i.transpose(-1, -2) * decay[:, :, i]).masked_fill(torch.triu(upper, 1), 0)
        outputs.append(q_i * g_i.exp()[..., None] @ state + within @ new)
        last = g_i[..., -1:]
        state = state * last[..., None].exp() + (k_i * (last - g_i).exp()[..., None]).transpose(-1, -2) @ new
    return torch.stack(outputs, dim=2).reshape(batch, heads, length, -1).transpose(1, 2), state


# -- torch.compile -----------------------------------------------------------------------------------------------------
def compiled(quick: bool) -> Iterator[Row]:
    """The candidate of that name."""
    sizes = (1, 64, 32, 16) if quick else (1, 2048, 1024, 16)
    arrays = selective_inputs(*sizes)
    ours = forward(scanfield.selective_scan, arrays, "torch.compile")
    work = f"selective_scan forward, B, T, D, N = {sizes}"
    # What an earlier run compiled would be found on disk.
    with tempfile.TemporaryDirectory(prefix="scanfield-bench-") as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        start = time.perf_counter()
        ours()
        first = time.perf_counter() - start
    yield row(
        'method="torch.compile"',
        work,
        "first call",
        first,
        most=None if quick else 20.0,
        unit="s",
    )
    peers = {"the way of mamba's PyTorch reference": (_peers.mamba_reference(arrays), 8.0)}
    yield from beside('method="torch.compile"', work, ours, peers, quick)


# -- small calls -------------------------------------------------------------------------------------------------------
def overhead(quick: bool) -> Iterator[Row]:
    """32 numbers, forward, with gradients to come: beside an operator of the same schema that does nothing."""
    library = torch.library.Library("scanfield_bench", "DEF")
    a, b = (torch.rand(1, 4, 8, requires_grad=True) for _ in range(2))
    heads = [torch.rand(1, 4, 2, 4, requires_grad=True) for _ in range(3)]
    scanfield.linear_scan(a, b)
    scanfield.gdn2(*heads)
    cases = {
        "linear_scan": (lambda: scanfield.linear_scan(a, b), (a, b, None, None, None, "float32"), 2),
        "gdn2": (
            lambda: scanfield.gdn2(*heads),
            (*heads, None, None, None, None, None, 0.5, False, None, "float32"),
            3,
        ),
    }
    for name, (ours, given, arrays) in cases.items():
        schema = str(getattr(torch.ops.scanfield, f"{name}_save").default._schema).partition("(")[2]
        nothing = _no_op(library, name, schema, arrays)
        calls = {"ours": ours, "nothing": lambda nothing=nothing, given=given: nothing(*given)}
        taken = _timing.rivals(calls, least=0.02 if quick else 1.0, rounds=3 if quick else 7)
        yield row(
            "Call of 32 numbers, forward with gradients, eager", name, "a custom op of its schema that does nothing",
            taken["nothing"] / taken["ours"], least=None if quick else 1.0,
            **{"us": 1e6 * taken["ours"], "peer us": 1e6 * taken["nothing"]},
        )  # fmt: skip


def _no_op(library: Any, name: str, schema: str, arrays: int) -> Any:
    """Defined as users do, with a backward that is never called."""

    def run(*given: Any) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        return torch.empty_like(given[0]), torch.empty(1, 8), [torch.empty(1, 8)]

    def keep(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:arrays], *output[2])

    made = torch.library.custom_op(f"scanfield_bench::{name}", run, mutates_args=(), schema=f"({schema}")
    made.register_autograd(lambda ctx, *grads: None, setup_context=keep)
    return made


# -- memory ------------------------------------------------------------------------------------------------------------
TRAINED = """
import pathlib, sys, torch, scanfield
time, heads, size = map(int, sys.argv[1:])
def peak():
    # Linux. What getrusage tells of a new program counts the memory of the one that started it.
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024
small = [torch.rand(1, 8, 1, 8).requires_grad_() for _ in range(6)]
scanfield.gdn2(*small).output.sum().backward()
before = peak()
q, k, v, g, e, w = (torch.rand(1, time, heads, size) for _ in range(6))
given = [x.requires_grad_() for x in (q, torch.nn.functional.normalize(k, dim=-1), v, g.neg_(), e, w)]
del q, k, v, g, e, w
scanfield.gdn2(*given).output.sum().backward()
print(peak() - before)
"""


def memory(quick: bool) -> Iterator[Row]:
    """What training takes in all: inputs, results and gradients too."""
    sizes = (256, 2, 32) if quick else (4096, 32, 128)
    done = subprocess.run(
        [sys.executable, "-c", TRAINED, *map(str, sizes)], capture_output=True, text=True, check=True
    )
    yield row(
        "Memory", f"gdn2 forward + backward, T, H, K = V = {sizes}", "everything counted", int(done.stdout) / 2**30,
        most=None if quick else 2.0, unit="GiB",
    )  # fmt: skip


ROWS = {make.__name__: make for make in (selective, gdn2, compiled, overhead, memory)}


def main() -> None:
    """All rows, or some."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run?")
    parser.add_argument("--only", nargs="+", choices=ROWS, metavar="ROWS", help=f"some of {', '.join(ROWS)}")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    scanfield.set_num_threads(1)
    rows = [found for name in asked.only or ROWS for found in ROWS[name](asked.quick)]
    _timing.show([{"ms": "", "peer ms": "", **found} for found in rows], as_json=asked.json)


if __name__ == "__main__":
    main()
