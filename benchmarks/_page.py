"""docs/performance.md from the figures of `scans_numpy.py`, and of each script that left its own beside them.

python benchmarks/_page.py docs/performance.json docs/performance.md      # and docs/performance-*.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

HEAD = """\
# Performance

<!-- Made from performance*.json by benchmarks/_page.py; `nox -s bench` makes them all. Do not edit. -->

How fast the compiled scans for NumPy arrays (`method="numpy.numba"`, the default where numba is installed) are beside
what else runs on the same CPU, measured in one run. float32; the median of several rounds, in which all take turns; CPU
time of one thread on one CPU unless a table says otherwise. What each peer computes was compared with what scanfield
computes before it was timed. The floors were set before the code was written.
"""

HOW = """\
## How to measure it where you are

```sh
python -m nox -s bench    # everything, some ten minutes; writes this page and performance*.json
{command}
python benchmarks/scans_numpy.py --only gdn2 memory
```

The peers are in `benchmarks/_peers.py`, the C loops in `benchmarks/c/scans.c`. They are written anew from the papers
and from what each project documents, and are not the projects' own code.
"""


def page(report: dict[str, Any], others: Sequence[dict[str, Any]] = ()) -> str:
    """The page of a report, and of others, each with an `about`, whose tables follow."""
    reports = [report, *others]
    rows = [line for each in reports for line in each["rows"]]
    parts = [HEAD, "\n".join(_machine(report["machine"])), _summary(rows)]
    for each in reports:
        tables: dict[str, list[Row]] = {}
        for line in each["rows"]:
            tables.setdefault(line["table"], []).append(line)
        for number, (table, listed) in enumerate(tables.items()):
            about = [] if number or each is report else [_about(each), ""]
            parts.append("\n".join([f"## {table}", "", *about, *_table(listed)]))
    parts.append(HOW.format(command="\n".join(each["command"] for each in reports)))
    return "\n".join(f"{part.rstrip()}\n" for part in parts)


def _about(report: dict[str, Any]) -> str:
    """What another script measured, and with what."""
    machine = ", ".join(f"{name} {value}" for name, value in report["machine"].items() if value is not None)
    return f"{report['about']} (`{report['command']}`: {machine})"


def _machine(machine: dict[str, Any]) -> Iterator[str]:
    yield "| measured with | |"
    yield "|---|---|"
    for name, value in machine.items():
        yield f"| {name} | {'not installed' if value is None else value} |"


def _summary(rows: list[Row]) -> str:
    judged = [line for line in rows if line["met"] is not None]
    missed = [line for line in judged if not line["met"]]
    if not judged:
        return "No row was held to a floor in this run."
    told = f"Of {len(judged)} rows with a floor or a limit, {len(judged) - len(missed)} meet it."
    if not missed:
        return told
    lines = [
        f"- **{line['work']}**, beside {line['beside']}: {_measured(line)}, {_goal(line)}. {_bound(line, rows)}"
        for line in missed
    ]
    return "\n".join([told, "", "## Not met", "", *lines])


def _bound(missed: Row, rows: list[Row]) -> str:
    """What the row says itself, or what C of the same loop reaches on the same machine, where it was measured."""
    if "bound" in missed:
        return str(missed["bound"])
    for line in rows:
        same = line.get("case") and line.get("case") == missed.get("case")
        if same and line is not missed and " C " in line["table"] and "peer ms" in line and line["at least"]:
            if line["table"] == missed["table"]:
                continue
            scale = 100 if missed["unit"].startswith("%") else 1
            reach = _number(scale * missed["peer ms"] / line["peer ms"])
            return f"Compiled C of the same loop ({line['beside']}) reaches {reach} {missed['unit']} in this run."
    return "What bounds it was not measured in this run."


def _table(rows: list[Row]) -> Iterator[str]:
    """Columns that no row of the table fills are left out."""
    columns = {
        "work": lambda line: line["work"],
        "beside": lambda line: line["beside"],
        "scanfield ms": lambda line: _number(line.get("ms")),
        "its ms": lambda line: _number(line.get("peer ms")),
        "measured": _measured,
        "asked": _goal,
        "met": lambda line: {True: "yes", False: "**no**", None: ""}[line["met"]],
        "note": lambda line: line["note"],
    }
    cells = {name: [cell(line) for line in rows] for name, cell in columns.items()}
    cells = {name: column for name, column in cells.items() if any(column)}
    yield f"| {' | '.join(cells)} |"
    yield f"|{'---|' * len(cells)}"
    for texts in zip(*cells.values(), strict=True):
        yield f"| {' | '.join(text.replace('|', '/') for text in texts)} |"


def _measured(line: Row) -> str:
    return "" if line["measured"] is None else f"{_number(line['measured'])} {line['unit']}".strip()


def _goal(line: Row) -> str:
    if line["at least"] is not None:
        return f"at least {line['at least']:g}"
    return "" if line["at most"] is None else f"at most {line['at most']:g}"


def _number(value: float | None) -> str:
    """Three digits, or all that stand before the point."""
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    found = [source, *sorted(source.parent.glob(f"{source.stem}-*.json"))]
    first, *rest = [json.loads(path.read_text(encoding="utf-8")) for path in found]
    made = page(first, rest)
    target.write_text(made, encoding="utf-8")
