"""What the benchmarks share: CPU time of a call, memory of a call, and how results are printed.

Import this before NumPy: it keeps BLAS to one thread, so that figures of two runs can be compared.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

if "numpy" in sys.modules:
    raise ImportError("NumPy was imported before _timing, and has read these variables")
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
# Kernels of NumPy's BLAS for another machine than this one would slow the peers down.
for _name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
    os.environ.pop(_name, None)


def seconds(call: Callable[[], Any], *, least: float = 0.2, rounds: int = 7) -> float:
    """Median CPU seconds of one call over `rounds` rounds, which last `least` seconds in all."""
    call()  # first-use costs are not what is asked for
    start = time.process_time()
    call()
    once = max(time.process_time() - start, 1e-7)
    repeats = max(1, round(least / rounds / once))
    samples = []
    for _ in range(rounds):
        start = time.process_time()
        for _ in range(repeats):
            call()
        samples.append((time.process_time() - start) / repeats)
    return statistics.median(samples)


def rivals(
    calls: Mapping[str, Callable[[], Any]], *, least: float = 1.0, rounds: int = 7
) -> dict[str, float]:
    """Median CPU seconds of each call. They take turns, so that whatever else the machine does meets all of them.

    Each gets some `least` seconds in all; one that takes longer than that is run three times.
    """
    repeats, turns = {}, {}
    for name, call in calls.items():
        call()
        start = time.process_time()
        call()
        once = max(time.process_time() - start, 1e-7)
        turns[name] = rounds if once * rounds < 3 * least else 3
        repeats[name] = max(1, round(least / rounds / once))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds):
        for name, call in calls.items():
            if turn < turns[name]:
                start = time.process_time()
                for _ in range(repeats[name]):
                    call()
                samples[name].append((time.process_time() - start) / repeats[name])
    return {name: statistics.median(taken) for name, taken in samples.items()}


def peak_bytes(call: Callable[[], Any]) -> int:
    """The most memory that Python and NumPy held at once during a call, beyond what was held before it."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def arguments(description: str | None) -> argparse.Namespace:
    """The command line of a benchmark."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run?")
    return parser.parse_args()


def show(rows: Sequence[dict[str, Any]], *, as_json: bool) -> None:
    """Print the rows, with the machine they were measured on."""
    import numpy

    machine = {"python": platform.python_version(), "numpy": numpy.__version__, "machine": processor()}
    if as_json:
        print(json.dumps({"machine": machine, "rows": list(rows)}, indent=2))
        return
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    for table in dict.fromkeys(row["table"] for row in rows):
        listed = [row for row in rows if row["table"] == table]
        columns = [name for name in listed[0] if name != "table"]
        cells = [columns, *([_cell(row[name]) for name in columns] for row in listed)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        print(f"\n{table}")
        for row in cells:
            print("  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def _cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def write(
    path: str, command: str, about: str, rows: Sequence[dict[str, Any]], packages: Sequence[str]
) -> None:
    """Rows as `_page.py` reads them, with the command, what it measures, and what it was measured with."""

    def found(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    machine = {"processor": processor(), "python": platform.python_version()}
    machine |= {name: found(name) for name in packages} | {"date": time.strftime("%Y-%m-%d")}
    report = {"command": command, "about": about, "machine": machine, "rows": list(rows)}
    Path(path).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def processor() -> str:
    """What the machine calls its processor."""
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
