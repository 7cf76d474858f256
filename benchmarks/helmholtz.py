"""Accuracy and processor time of the Helmholtz networks, one core.

Each line is a problem, its relative L2 error on a grid, the processor seconds of the training, and what is asked of both.

    python benchmarks/helmholtz.py
    python benchmarks/helmholtz.py --quick     # three problems of a second
    python benchmarks/helmholtz.py --output docs/performance-helmholtz.json    # for docs/performance.md
"""

from __future__ import annotations

if __name__ == "__main__":
    import _timing  # before NumPy: it sets the number of BLAS threads

# isort: split
import argparse
import sys
from typing import Any, NamedTuple

from scanfield.pinn.reproduce import ENTRIES, Row, reproduce


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
TABLE = "Helmholtz problems solved"
ABOUT = (
    "The relative L2 error on a grid of 100 x 100 points, and the processor seconds of the whole training, NumPy arrays, one "
    "core. Frequencies, weights and points come from a seed, k and a feature scale, never from the solution."
)
QUICK = ("square k = 4 pi", "plane wave k = 20", "line k = 100")


def main() -> int:
    """Solve, print, and tell by the exit status whether all that is asked was reached."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="three problems of a second")
    parser.add_argument("--output", metavar="FILE", help="write JSON")
    given = parser.parse_args()
    quick, lines = given.quick, []
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
        lines.append(line_of(row, asked, reached))
        print(
            f"{entry.title:37}{row.error:9.1e}{asked.error:9.0e}{row.seconds:8.1f}{within:>8}"
            f"{'' if reached else '   MISSED'}",
            flush=True,
        )
    if given.output:
        packages = ("scanfield", "numpy", "scipy", "numba")
        _timing.write(given.output, "python benchmarks/helmholtz.py", ABOUT, lines, packages)
    return 1 if missed else 0


def line_of(row: Row, asked: Asked, reached: bool) -> dict[str, Any]:
    """A problem as a line of docs/performance.md."""
    within = "" if asked.seconds is None else f", at most {asked.seconds:g} asked"
    stands = f"{row.entry.reference} ({row.entry.source})" if row.entry.source else "-"
    return {
        "table": TABLE,
        "work": row.entry.title,
        "beside": stands,
        "measured": row.error,
        "unit": "",
        "at least": None,
        "at most": asked.error,
        "met": reached,
        "note": f"{row.seconds:.1f} CPU s{within}; {row.parameters} parameters",
    }


if __name__ == "__main__":
    sys.exit(main())
