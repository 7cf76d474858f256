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
from pathlib import Path
from typing import Any

import numpy as np

from scanfield.cli import agree, info, jobs
from scanfield.cli.console import check_plot, progress, table
from scanfield.cli.places import absent, places
from scanfield.errors import ArgumentError
from scanfield.plots import figure_of

_EXAMPLES = """\
examples:
  scanfield check                              plain calls, with and without optional inputs
  scanfield check --full                       also strong decay, resets, packs, reverse, layouts
  scanfield check --library numpy --library torch
  scanfield check --operation gdn2 --operation kda --full
  scanfield check --full --jobs 4
  scanfield check --plot agreement.png         each pair as a cell, its worst array in units of what is allowed
  scanfield check --json > check.json          with versions and threads: all that a report of a fault needs

exit status: 0 all agree, 1 some do not, raised, or there was nothing to compare, 2 a name that is not known
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
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the pairs; needs matplotlib")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Compare, print, and say by the exit status whether all agree."""
    if arguments.jobs < 1:
        raise ArgumentError(f"--jobs: expected at least 1, came {arguments.jobs}")
    records = agree.operations(arguments.operation)
    everywhere = places(arguments.library)
    check_plot("the agreement", arguments.plot)
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
    report.absent = {} if arguments.library else absent()
    if arguments.json:
        print(json.dumps(info.machine() | as_json(report), indent=2))
    else:
        print(as_text(report, by_operation=arguments.by_operation))
    if arguments.plot is not None:
        draw(report, arguments.plot)
        if not arguments.json:
            print(f"plot written to {arguments.plot}")
    return 0 if report.agree and _compared(report) else 1


def _compared(report: agree.Report) -> int:
    return sum(pair.compared for pair in report.pairs.values())


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
    parts += [f"not here: {name}, {reason}" for name, reason in report.absent.items()]
    if report.alone:
        names = ", ".join(sorted(report.alone))
        parts.append(f"only one implementation here, so nothing to compare: {names}")
    if report.selected:
        names = ", ".join(sorted(report.selected))
        parts.append(
            f"{names}: a selection of the cases, as each takes seconds there (--library NAME runs all)"
        )
    compared = _compared(report)
    verdict = "NOT all agree" if not report.agree else "all agree" if compared else "NOTHING was compared"
    pairs = f"{len(report.pairs)} pair{'' if len(report.pairs) == 1 else 's'} of implementations"
    parts.append(f"{pairs}, {compared} comparisons of arrays: {verdict}")
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


def draw(report: agree.Report, path: Path) -> None:
    """Each pair a cell: its worst array in units of what is allowed there, so that above 1 is apart."""
    runs = list(dict.fromkeys(run for pair in report.pairs for run in pair))
    size = range(len(runs))
    excess = np.full((len(runs), len(runs)), np.nan)
    for (left, right), pair in report.pairs.items():
        worst = max((worst.excess for worst in pair.worst.values()), default=np.nan)
        for i, j in ((runs.index(left), runs.index(right)), (runs.index(right), runs.index(left))):
            excess[i, j] = worst
    figure = figure_of("the agreement")(
        figsize=(3.5 + 0.6 * len(runs), 2.5 + 0.5 * len(runs)), layout="constrained"
    )
    axes = figure.subplots()
    # From a thousandth of what is allowed (and less) to ten times as much (and more, infinities too).
    shown = np.clip(np.log10(np.maximum(excess, 1e-9)), -3, 1)
    image = axes.imshow(shown, cmap="RdYlGn_r", vmin=-3, vmax=1)
    for i in size:
        for j in size:
            if not np.isnan(excess[i, j]):
                axes.text(j, i, f"{excess[i, j]:.2g}", ha="center", va="center", fontsize="x-small")
    names = [str(run) for run in runs]
    axes.set_xticks(size, names, rotation=90)
    axes.set_yticks(size, names)
    axes.set_title("worst deviation of each pair, in units of what is allowed")
    figure.colorbar(image, label="log10; above 0 is apart")
    figure.savefig(path, dpi=120)


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
        "not_here": report.absent,
    }


def _worst_json(worst: agree.Worst) -> dict[str, Any]:
    # JSON has neither complex numbers nor infinities: those go as text.
    texts = {name: _number(getattr(worst, name)) for name in ("left", "right")}
    sizes = {
        name: size if math.isfinite(size := getattr(worst, name)) else "inf"
        for name in ("excess", "deviation")
    }
    return dataclasses.asdict(worst) | texts | sizes | {"index": list(worst.index)}
