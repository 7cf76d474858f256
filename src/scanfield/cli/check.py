"""`scanfield check`: every implementation of every operation on this machine, compared with every other.

Forward, step, all gradients and the summary of each operation run on the same inputs, in float64 and float32,
for every library and device found and every candidate there, and every pair of results is compared: at most
4e-6 of an array's largest value may lie between them in float32 and 1e-12 in float64, unless a candidate
states more or float32 itself loses more in a case (the generic code is compared with its own float64).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Iterable
from typing import Any

from scanfield.cli import agree, jobs
from scanfield.cli.console import progress, table
from scanfield.cli.places import places
from scanfield.errors import ArgumentError

_EXAMPLES = """\
examples:
  scanfield check                              plain calls, with and without optional inputs
  scanfield check --full                       also strong decay, resets, packs, reverse, layouts
  scanfield check --library numpy --library torch
  scanfield check --operation gdn2 --operation kda --full
  scanfield check --full --jobs 4
  scanfield check --json > check.json

exit status: 0 all agree, 1 some do not or raised, 2 a name that is not known
"""


def add_parser(commands: Any) -> None:
    """Describe the command to argparse."""
    parser = commands.add_parser(
        "check",
        help="compare all implementations on this machine with each other",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--full", action="store_true", help="adversarial inputs too")
    parser.add_argument(
        "--library",
        action="append",
        metavar="NAME",
        help="only this library, with all cases on it (may be repeated)",
    )
    parser.add_argument(
        "--operation", action="append", metavar="NAME", help="only this operation (may be repeated)"
    )
    parser.add_argument(
        "--by-operation", action="store_true", help="a line for each operation instead of each pair"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="so many processes share the cases (default: 1)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Compare, print, and say by the exit status whether all agree."""
    if arguments.jobs < 1:
        raise ArgumentError(f"--jobs: expected at least 1, came {arguments.jobs}")
    records = agree.operations(arguments.operation)
    everywhere = places(arguments.library)
    count = len(agree.cases(records, full=arguments.full))
    everything = arguments.library is not None
    with progress("checking", count, quiet=arguments.json) as tick:
        if arguments.jobs > 1:
            names = [record.name for record in records]
            report = jobs.compare(
                names,
                arguments.library,
                full=arguments.full,
                everything=everything,
                jobs=arguments.jobs,
                done=tick,
            )
        else:
            report = agree.compare(records, everywhere, full=arguments.full, everything=everything, done=tick)
    if arguments.json:
        print(json.dumps(as_json(report), indent=2))
    else:
        print(as_text(report, by_operation=arguments.by_operation))
    return 0 if report.agree else 1


def as_text(report: agree.Report, *, by_operation: bool = False) -> str:
    """The worst element of each pair (or of each operation), then all that went wrong or was not compared."""
    parts = [table(_operation_rows(report) if by_operation else _pair_rows(report))]
    for (left, right), pair in report.pairs.items():
        parts += [
            f"APART  {left} and {right}\n"
            f"       {worst.operation} {worst.where()}: {_number(worst.left)} and {_number(worst.right)}, "
            f"{worst.deviation:.1e} of the largest value, where {worst.tolerance:.0e} is allowed"
            for worst in sorted(pair.failed, key=lambda worst: -worst.excess)[:_SHOWN]
        ]
        if len(pair.failed) > _SHOWN:
            parts.append(f"       and {len(pair.failed) - _SHOWN} more arrays of {left} and {right}")
    parts += [
        f"RAISED {crash.run}: {crash.operation}, {crash.verb} ({'; '.join(where)})\n       {crash.message}"
        for crash, where in report.crashes.items()
    ]
    parts += [
        f"not compared: {run}, {', '.join(sorted(names))}: {reason}"
        for (run, reason), names in report.declined.items()
    ]
    if report.alone:
        names = ", ".join(sorted(report.alone))
        parts.append(f"only one implementation here, so nothing to compare: {names}")
    if report.selected:
        names = ", ".join(sorted(report.selected))
        parts.append(
            f"{names}: a selection of the cases, as each takes seconds there (--library NAME runs all)"
        )
    compared = sum(pair.compared for pair in report.pairs.values())
    verdict = "all agree" if report.agree else "NOT all agree"
    parts.append(f"{len(report.pairs)} pairs of implementations, {compared} comparisons of arrays: {verdict}")
    return "\n".join(parts)


# Arrays beyond their tolerance shown for each pair: the first few tell what is wrong.
_SHOWN = 5


def _pair_rows(report: agree.Report) -> Iterable[tuple[str, ...]]:
    yield ("pair", "", "arrays", "worst / allowed", "worst element", "left", "right")
    for (left, right), pair in report.pairs.items():
        worst = max(pair.worst.values(), key=lambda worst: worst.excess)
        values = (_number(worst.left), _number(worst.right))
        yield (
            str(left),
            str(right),
            str(pair.compared),
            _against(worst),
            f"{worst.operation} {worst.where()}",
            *values,
        )


def _operation_rows(report: agree.Report) -> Iterable[tuple[str, ...]]:
    yield ("operation", "implementations", "worst / allowed", "worst element", "of")
    for name, runs in report.runs.items():
        met = [(pair.worst[name], pair_of) for pair_of, pair in report.pairs.items() if name in pair.worst]
        if met:
            worst, (left, right) = max(met, key=lambda found: found[0].excess)
            yield (name, str(len(runs)), _against(worst), worst.where(), f"{left}, {right}")


def _against(worst: agree.Worst) -> str:
    return f"{worst.deviation:.1e} / {worst.tolerance:.0e}" + ("  APART" if worst.excess > 1 else "")


def _number(value: float | complex) -> str:
    return f"{value:.9g}"


def as_json(report: agree.Report) -> dict[str, Any]:
    """The report as plain data."""
    return {
        "agree": report.agree,
        "pairs": [
            {
                "left": str(left),
                "right": str(right),
                "compared": pair.compared,
                "apart": [_worst_json(worst) for worst in pair.failed],
                "worst": {name: _worst_json(worst) for name, worst in pair.worst.items()},
            }
            for (left, right), pair in report.pairs.items()
        ],
        "raised": [
            crash._asdict() | {"run": str(crash.run), "cases": where}
            for crash, where in report.crashes.items()
        ],
        "not_compared": [
            {"run": str(run), "reason": reason, "operations": sorted(names)}
            for (run, reason), names in report.declined.items()
        ],
        "alone": sorted(report.alone),
        "selected": sorted(report.selected),
    }


def _worst_json(worst: agree.Worst) -> dict[str, Any]:
    # JSON has neither complex numbers nor infinities: those go as text.
    texts = {name: _number(getattr(worst, name)) for name in ("left", "right")}
    sizes = {
        name: size if math.isfinite(size := getattr(worst, name)) else "inf"
        for name in ("excess", "deviation")
    }
    return dataclasses.asdict(worst) | texts | sizes | {"index": list(worst.index)}
