"""Strong and weak scaling of a sequence over processes, bytes exchanged against the formula, and a simulation for more.

    python benchmarks/scaling.py                          1, 2 and 4 processes; the tables on the screen
    python benchmarks/scaling.py --output docs/scaling.json     the same, and those of docs/scaling.md made anew
    python benchmarks/scaling.py --quick                  a fraction of the tokens

Times are seconds of processor time (all threads of a process) of the busiest rank: on a machine with fewer cores than
processes wall time says nothing. The simulation takes the kernel's time for a token from the run with one process.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import _timing
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

    kind: str
    exchange: str
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
    rank: int, ranks: int, folder: str, runs: list[tuple[str, int, str]], repeats: int, answers: Any
) -> None:
    """One process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    found = []
    for _, tokens, exchange in runs:
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


def measure(ranks: int, runs: list[tuple[str, int, str]], repeats: int) -> list[Measured]:
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
    for i, (kind, tokens, exchange) in enumerate(runs):
        formula = 2 * sum(received(rank, ranks, state, block, exchange) for rank in range(ranks))
        rows = [row[i] for row in every]
        seconds, received_ = max(row[0] for row in rows), sum(row[1] for row in rows)
        run = Measured(kind, exchange, ranks, tokens, seconds, received_, formula)
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
            found.append(
                (f"linear_scan, {tokens:,} tokens of 64 lanes", min(times["grouped"]) / min(times["plain"]))
            )
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


# -- tables, made from the report alone --------------------------------------------------------------------------------


def tables(report: dict[str, Any]) -> dict[str, str]:
    """The parts of docs/scaling.md that a report makes, by name."""
    runs = [Measured(**row) for row in report["runs"]]
    machine = ", ".join(f"{name} {value}" for name, value in report["machine"].items() if value is not None)
    found = {"machine": f"Measured by `{report['command']}` ({machine})."}
    found |= {kind: _scaling([run for run in runs if run.kind == kind]) for kind in ("strong", "weak")}
    rows = [[name, f"{ratio:.3f}"] for name, ratio in report["alone"].items()]
    return found | {
        "alone": table(["call, forward and backward", "ratio to the plain call"], rows),
        "simulation": _simulation(runs),
    }


def _scaling(runs: Sequence[Measured]) -> str:
    head = ["ranks", "exchange", "tokens a rank", "processor ms of the busiest rank", "work, one rank = 1"]
    rows = []
    for run in runs:
        work = run.seconds * (run.ranks if run.kind == "strong" else 1) / runs[0].seconds
        row = [str(run.ranks), run.exchange if run.ranks > 1 else "-", f"{run.tokens:,}"]
        row += [f"{run.seconds * 1e3:.1f}", f"{work:.2f}", f"{run.bytes:,}", f"{run.formula:,}"]
        rows.append(row)
    return table([*head, "bytes received by all", "formula"], rows)


def _simulation(runs: Sequence[Measured]) -> str:
    one = next(run for run in runs if run.kind == "strong" and run.ranks == 1)
    four = next(run for run in runs if run.kind == "weak" and run.ranks == 4)
    token = one.seconds / one.tokens
    extra = max(four.seconds / four.tokens - token, 0.0)
    rows, speed = [], {}
    for ranks in (8, 16, 32, 64, 128, 256, 512, 1024):
        strong = simulated(token, extra, 2**20 // ranks, ranks)
        weak = simulated(token, extra, 10**9 // 1024, ranks)
        speed[ranks] = [token * 2**20 / seconds for seconds in strong]
        row = [str(ranks), *[f"{x * 1e3:.2f}" for x in strong], *[f"{x:.0f}" for x in speed[ranks]]]
        rows.append(row + [f"{x:.3f}" for x in weak])
    head = ["ranks", "2^20 tokens, scan, ms", "gather, ms", "speed-up, scan", "gather"]
    told = f"A token takes {token * 1e9:.0f} ns, on an inner rank {extra * 1e9:.0f} ns more."
    by = [speed[8][0] / 8, speed[1024][0] / 1024, speed[1024][1] / 1024]
    last = (
        "The speed-up is against one rank without any exchange. An inner rank does its work more than once, so that it is\n"
        f'{by[0]:.2f} R on 8 ranks; on 1,024 it is {by[1]:.2f} R by "scan" and {by[2]:.2f} R by "gather", '
        "whose messages grow with the ranks."
    )
    return "\n\n".join([told, table([*head, "976,562 tokens a rank, scan, s", "gather, s"], rows), last])


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *["| " + " | ".join(row) + " |" for row in rows]])


def rewritten(page: str, parts: dict[str, str]) -> str:
    """A page with its parts, each between a comment with its name and one that ends it, made anew."""
    for name, text in parts.items():
        begin, end = f"<!-- {name}: made from scaling.json -->\n", "\n<!-- end -->"
        before, _, rest = page.partition(begin)
        _, ended, after = rest.partition(end)
        if not ended:
            raise SystemExit(f"the page has no part {begin.strip()} ... {end.strip()}")
        page = f"{before}{begin}\n{text}\n{end}{after}"
    return page


def main() -> None:
    """Measure, compare, simulate."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run?")
    parser.add_argument("--output", help="JSON of the run; the page of the same name beside it is made anew")
    asked = parser.parse_args()
    page = Path(asked.output).with_suffix(".md") if asked.output else None
    if page is not None and not page.exists():
        parser.error(f"--output: there is no {page} beside it")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    whole, repeats = (512, 1) if asked.quick else (8192, 5)
    sizes = {"strong": lambda ranks: whole // ranks, "weak": lambda ranks: whole // 4}
    runs: list[Measured] = []
    for ranks, exchanges in {1: ("scan",), 2: ("scan", "gather"), 4: ("scan", "gather")}.items():
        each = [(kind, sizes[kind](ranks), exchange) for kind in sizes for exchange in exchanges]
        runs += measure(ranks, each, repeats)
    machine = {"processor": _timing.processor(), "cores": os.cpu_count(), "torch": torch.__version__}
    report = {
        "command": "python benchmarks/scaling.py --output docs/scaling.json",
        "machine": machine | {"date": time.strftime("%Y-%m-%d")},
        "runs": [run._asdict() for run in runs],
        "alone": dict(overhead(2 if asked.quick else 15)),
    }
    parts = tables(report)
    for name, text in parts.items():
        print(f"\n{name}\n\n{text}")
    if page is not None:
        made = rewritten(page.read_text(encoding="utf-8"), parts)
        Path(asked.output).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        page.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
