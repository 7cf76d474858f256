"""Strong and weak scaling of a sequence over processes, bytes exchanged against the formula, and a simulation for more.

    python benchmarks/scaling.py              1, 2 and 4 processes, tables in Markdown (docs/scaling.md)
    python benchmarks/scaling.py --quick      a fraction of the tokens

Times are seconds of processor time (all threads of a process) of the busiest rank: on a machine with fewer cores than
processes wall time says nothing. The simulation takes the kernel's time for a token from the run with one process.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

import scanfield
from scanfield_torch.parallel import sequence_parallel, traffic

HEADS, K, V = 4, 64, 64

# Stated, not measured: one message within a rack, and the rate of a 200 Gbit/s network card.
LATENCY, RATE = 10e-6, 25e9


class Measured(NamedTuple):
    """One run: tokens of a rank, processor seconds of the busiest, bytes received by all, and by the formula."""

    ranks: int
    tokens: int
    seconds: float
    bytes: int
    formula: int


def received(rank: int, ranks: int, state: int, block: int, exchange: str) -> int:
    """Bytes that a rank receives forward: ``state`` of a state, ``block`` of a map; the backward mirrors the ranks."""
    if exchange == "gather":
        return (ranks - 1) * (block if ranks > 2 else state)
    total, reach = 0, 0
    while rank > reach:
        distance = max(reach, 1)
        whole = rank == 1 if reach == 0 else rank - distance <= reach
        total += state if whole else block
        reach = 1 if reach == 0 else 2 * reach
    return total


def rank_main(
    rank: int, ranks: int, folder: str, runs: list[tuple[int, str]], repeats: int, answers: Any
) -> None:
    """One process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    found = []
    for tokens, exchange in runs:
        draw = torch.Generator().manual_seed(rank)
        x = [torch.rand(1, tokens, HEADS, size, generator=draw) for size in (K, K, V, K, K)]
        arrays = [
            x[0] - 0.5,
            torch.nn.functional.normalize(x[1] - 0.5, dim=-1),
            x[2] - 0.5,
            -x[3],
            x[4],
        ]
        arrays = [x.requires_grad_() for x in arrays]

        def once(arrays: list[torch.Tensor] = arrays, exchange: str = exchange) -> None:
            result = sequence_parallel(scanfield.gdn2, *arrays, states="own", exchange=exchange)
            result.output.sum().backward()

        once()  # compiles
        best = math.inf
        for _ in range(repeats):
            dist.barrier()
            before = time.process_time()
            once()
            best = min(best, time.process_time() - before)
        with traffic() as counted:
            once()
        found.append((best, counted.received))
    answers.put(found)
    dist.barrier()
    dist.destroy_process_group()


def measure(ranks: int, runs: list[tuple[int, str]], repeats: int) -> list[Measured]:
    """Processes that each hold so many tokens, one after the other by each exchange."""
    context = processes.get_context("spawn")
    answers = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        started = [
            context.Process(target=rank_main, args=(rank, ranks, folder, runs, repeats, answers))
            for rank in range(ranks)
        ]
        for process in started:
            process.start()
        every = [answers.get() for _ in started]
        for process in started:
            process.join()
    state = HEADS * K * V * 4
    block = state + HEADS * K * K * 4
    found = []
    for i, (tokens, exchange) in enumerate(runs):
        formula = 2 * sum(received(rank, ranks, state, block, exchange) for rank in range(ranks))
        rows = [row[i] for row in every]
        run = Measured(ranks, tokens, max(row[0] for row in rows), sum(row[1] for row in rows), formula)
        if run.bytes != run.formula:
            raise SystemExit(f"{run}: the bytes are not those of the formula")
        found.append(run)
    return found


def overhead(repeats: int) -> list[tuple[str, float]]:
    """A group of one against the plain call, forward and backward: ratios of processor time."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        found = []
        for tokens in (16, 256, 2048):
            a = torch.rand(1, tokens, 64).requires_grad_()
            b = torch.rand(1, tokens, 64).requires_grad_()

            def plain(a: torch.Tensor = a, b: torch.Tensor = b) -> None:
                scanfield.linear_scan(a, b).output.sum().backward()

            def grouped(a: torch.Tensor = a, b: torch.Tensor = b) -> None:
                sequence_parallel(scanfield.linear_scan, a, b).output.sum().backward()

            times: dict[str, list[float]] = {"plain": [], "grouped": []}
            for _ in range(repeats):  # by turns, so that a busy machine slows both
                for name, run in (("plain", plain), ("grouped", grouped)):
                    before = time.process_time()
                    for _ in range(50):
                        run()
                    times[name].append(time.process_time() - before)
            found.append((f"linear_scan, {tokens} tokens", min(times["grouped"]) / min(times["plain"])))
        dist.destroy_process_group()
    return found


def simulated(token: float, extra: float, tokens: int, ranks: int) -> tuple[float, float]:
    """Seconds of a step by "scan" and by "gather": kernels, then messages one after the other."""
    block = HEADS * K * (K + V) * 4
    kernels = tokens * (token + (extra if ranks > 2 else 0.0))
    rounds = 1 + max(math.ceil(math.log2(ranks - 1)), 0) if ranks > 1 else 0
    scan = rounds * (LATENCY + block / RATE)
    gather = math.ceil(math.log2(ranks)) * LATENCY + (ranks - 1) * block / RATE
    return kernels + 2 * scan, kernels + 2 * gather


def table(head: list[str], rows: list[list[str]]) -> None:
    """Print a table in Markdown."""
    print("\n| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(row) + " |")


def main() -> None:
    """Measure, compare, simulate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    whole, repeats = (512, 1) if arguments.quick else (8192, 5)

    print(f"gdn2 float32, {HEADS} heads, K = V = {K}; {os.cpu_count()} cores")
    sizes = {"strong": lambda ranks: whole // ranks, "weak": lambda ranks: whole // 4}
    ways = {1: ("scan",), 2: ("scan", "gather"), 4: ("scan", "gather")}
    runs: dict[tuple[str, int, str], Measured] = {}
    for ranks, exchanges in ways.items():
        keys = [(kind, ranks, exchange) for kind in sizes for exchange in exchanges]
        runs |= zip(keys, measure(ranks, [(sizes[k[0]](ranks), k[2]) for k in keys], repeats), strict=True)
    for kind in sizes:
        rows = []
        for (of, ranks, exchange), run in runs.items():
            if of != kind:
                continue
            work = run.seconds * (ranks if kind == "strong" else 1) / runs[kind, 1, "scan"].seconds
            rows.append(
                [str(ranks), exchange if ranks > 1 else "-", f"{run.tokens:,}", f"{run.seconds * 1e3:.1f}"]
                + [f"{work:.2f}", f"{run.bytes:,}", f"{run.formula:,}"]
            )
        print(f"\n{kind} scaling")
        head = [
            "ranks",
            "exchange",
            "tokens a rank",
            "processor ms of the busiest rank",
            "work, one rank = 1",
        ]
        table([*head, "bytes received by all", "formula"], rows)

    print("\na group of one against the plain call")
    table(
        ["call", "ratio"], [[name, f"{ratio:.3f}"] for name, ratio in overhead(2 if arguments.quick else 15)]
    )

    token = runs["strong", 1, "scan"].seconds / whole
    inner = runs["weak", 4, "scan"].seconds / (whole // 4)
    extra = max(inner - token, 0.0)
    print(
        f"\nsimulated from {token * 1e9:.0f} ns a token, {extra * 1e9:.0f} ns more on an inner rank, "
        f"{LATENCY * 1e6:.0f} us a message and {RATE / 1e9:.0f} GB/s"
    )
    rows = []
    for ranks in (8, 16, 32, 64, 128, 256, 512, 1024):
        strong = simulated(token, extra, 2**20 // ranks, ranks)
        weak = simulated(token, extra, 10**9 // 1024, ranks)
        alone = token * 2**20
        rows.append(
            [str(ranks), *[f"{x * 1e3:.2f}" for x in strong], *[f"{alone / x:.0f}" for x in strong]]
            + [f"{x:.3f}" for x in weak]
        )
    head = ["ranks", "2^20 tokens, scan, ms", "gather, ms", "speed-up, scan", "gather"]
    table([*head, "976,562 tokens a rank, scan, s", "gather, s"], rows)


if __name__ == "__main__":
    main()
