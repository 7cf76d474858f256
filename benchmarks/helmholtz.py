"""Accuracy and processor time of the Helmholtz networks, one core: `python benchmarks/helmholtz.py [--quick]`.

Each line is a problem, its relative L2 error on a grid, the processor seconds of the training, and what is asked of both.
Set OPENBLAS_NUM_THREADS=1 for one core.
"""

from __future__ import annotations

import argparse
import sys
from typing import NamedTuple

from scanfield.pinn.reproduce import ENTRIES, reproduce


class Asked(NamedTuple):
    """The error that is asked for, and within how many processor seconds (None: no limit)."""

    error: float
    seconds: float | None


ASKED = {
    "square (1,4)": Asked(1e-6, 5.0),
    "square (1,4), one hidden layer": Asked(1e-5, 5.0),
    "square (2.5,3.3)": Asked(1e-5, 5.0),
    "square k = 4 pi": Asked(2e-5, 3.0),
    "plane wave k = 20": Asked(1e-5, 6.0),
    "plane wave k = 20, one hidden layer": Asked(1e-5, None),
    "plane wave k = 40": Asked(5e-5, 40.0),
    "line k = 100": Asked(5e-4, None),
    "point source k = 20": Asked(4e-3, None),
    "point source k = 40": Asked(9e-2, None),
}
QUICK = ("square k = 4 pi", "plane wave k = 20", "line k = 100")


def main() -> int:
    """Solve, print, and tell by the exit status whether all that is asked was reached."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="three problems of a second")
    quick = parser.parse_args().quick
    print(f"{'problem':37}{'error':>9}{'asked':>9}{'CPU s':>8}{'asked':>8}")
    missed = 0
    for entry in ENTRIES:
        if quick and entry.title not in QUICK:
            continue
        (row,) = reproduce([entry])
        asked = ASKED[entry.title]
        within = "-" if asked.seconds is None else f"{asked.seconds:.0f}"
        reached = row.error <= asked.error and (asked.seconds is None or row.seconds <= asked.seconds)
        missed += not reached
        print(
            f"{entry.title:37}{row.error:9.1e}{asked.error:9.0e}{row.seconds:8.1f}{within:>8}"
            f"{'' if reached else '   MISSED'}",
            flush=True,
        )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
