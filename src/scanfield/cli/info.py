"""`scanfield info`: what is installed, what is missing, and which implementation runs what here."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import scanfield
from scanfield import dispatch
from scanfield.cli import draws
from scanfield.cli.console import Tick, heading, progress, table
from scanfield.cli.places import Place, places
from scanfield.dispatch import Derived, Explanation, Operation, Record

_EXAMPLES = """\
examples:
  scanfield info                    versions, libraries, devices, and what runs where
  scanfield info --why gdn2         every candidate of one operation, taken or declined, and why
  scanfield info --json | jq .runs  the same for programs, and for a report of a fault
  scanfield info --why gdn2 --json  the reasons for programs
  scanfield info --support-table    the table of the README, as markdown
"""

# Selection looks at sizes. Long enough that what is made for long sequences shows.
_TOKENS = 256
RUNS = f"Which implementation runs which operation ({_TOKENS} tokens, few channels, float32)"

_ALWAYS = ("numpy", "array-api-compat", "array-api-extra")


def add_parser(commands: Any) -> None:
    """Describe the command to argparse."""
    parser = commands.add_parser(
        "info",
        help="versions, libraries, devices, and which implementation runs which operation",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--why", metavar="OPERATION", help="every candidate of one operation, and the reasons"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--support-table", action="store_true", help="print what runs where, as markdown")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print what was asked for."""
    if arguments.support_table:
        print(support_table())
    elif arguments.why:
        told = _why(arguments.why)
        print(
            json.dumps([_plain(each) for each in told], indent=2)
            if arguments.json
            else "\n\n".join(map(str, told))
        )
    elif arguments.json:
        print(json.dumps(facts(), indent=2))
    else:
        _print_facts()
    return 0


def _print_facts() -> None:
    known = facts(quiet=False)
    versions = known["versions"]
    print(f"scanfield {versions['scanfield']} on Python {versions['python']}, {known['platform']}")
    print(f"threads: {known['threads']['cpus']} CPUs for this process", end="")
    print(f", {known['threads']['scanfield']} for scanfield", end="")
    print("".join(f", {name}={value}" for name, value in known["threads"]["environment"].items()))
    if known["settings"]:
        print("settings: " + ", ".join(f"{name}={value}" for name, value in known["settings"].items()))
    print("devices: " + ", ".join(f"{x['library']} on {x['device']}" for x in known["devices"]))
    heading("Libraries")
    print(libraries_table())
    heading(RUNS)
    print(runs_table(known["runs"]))


# ------------------------------------------------------------------------------------------------------------
# facts


def facts(*, quiet: bool = True) -> dict[str, Any]:
    """Everything that the command prints, as plain data; unless `quiet` a terminal sees how far it is."""
    everywhere = places()
    with progress("asking", len(everywhere) * len(scanfield.operations()), quiet=quiet) as tick:
        taken = runs(everywhere, tick)
    return machine() | {
        "devices": [{"library": x.library, "device": x.device, "dtypes": list(x.dtypes)} for x in everywhere],
        "libraries": [
            {
                "name": backend.name,
                "status": backend.status,
                "version": backend.version,
                "detail": backend.detail,
                "install": backend.install,
                "candidates": list(backend.candidates),
            }
            for backend in scanfield.backends()
        ],
        "runs": taken,
    }


def machine() -> dict[str, Any]:
    """Versions, platform and threads: what every report of a fault or a time begins with."""
    return {
        "versions": {"scanfield": scanfield.__version__, "python": platform.python_version()}
        | {name: _version(name) for name in _ALWAYS},
        "platform": platform.platform(),
        "threads": {
            "cpus": _cpus(),
            "scanfield": scanfield.get_num_threads(),
            "environment": {name: os.environ[name] for name in _THREADS if name in os.environ},
        },
        "settings": {name: os.environ[name] for name in sorted(os.environ) if name.startswith("SCANFIELD_")},
    }


_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS", "XLA_FLAGS")


def _cpus() -> int:
    """CPUs that this process may use, which a container or taskset limits, where the system tells."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not a distribution here"


def runs(everywhere: Iterable[Place], done: Tick = lambda words: None) -> list[dict[str, Any]]:
    """For each place and operation the candidate that runs each verb of a call in float32; `done` hears of each."""
    found = []
    for place in everywhere:
        for record in scanfield.operations():
            told = _explain(record, place)
            declined = {f"{v.candidate} {v.verb}": v.reason for v in told.verdicts if not v.taken}
            found.append(
                {
                    "place": str(place),
                    "operation": told.operation,
                    "function": record.name,
                    "taken": told.taken,
                    "declined": declined,
                }
            )
            done(f"{record.name} on {place}")
    return found


def operation(name: str) -> Record:
    """The record of an operation by its name; ArgumentError with the known ones for another."""
    records = {record.name: record for record in scanfield.operations()}
    if name not in records:
        raise scanfield.ArgumentError(f"unknown operation {name!r}; known are {', '.join(records)}")
    return records[name]


def _plain(told: Explanation) -> dict[str, Any]:
    verdicts = [verdict._asdict() for verdict in told.verdicts]
    return {
        "operation": told.operation,
        "function": told.function,
        "library": told.library,
        "device": told.device,
        "verdicts": verdicts,
        "notes": list(told.notes),
    }


def _why(name: str) -> list[Explanation]:
    record = operation(name)
    return [_explain(record, place) for place in places()]


def _explain(record: Record, place: Place) -> Explanation:
    function = getattr(scanfield, record.name)
    (case,) = draws.cases(record, function, draws.QUICK[:1], time=_TOKENS)
    with place.scope():
        arrays = {name: place.array(values.astype("float32")) for name, values in case.arrays.items()}
        return scanfield.explain(function, **arrays, **case.options)


# ------------------------------------------------------------------------------------------------------------
# tables


def libraries_table() -> str:
    """The libraries and plugins that scanfield knows of, and how to get a missing one."""
    rows = [("library", "status", "version", "own candidates", "note")]
    rows += [(b.name, b.status, b.version, ", ".join(b.candidates), b.detail) for b in scanfield.backends()]
    return table(rows)


def runs_table(listed: Iterable[dict[str, Any]]) -> str:
    """One row an operation, one column a place; verbs are named where one candidate does not run all."""
    cells: dict[str, dict[str, str]] = {}
    columns: list[str] = []
    for entry in listed:
        if entry["place"] not in columns:
            columns.append(entry["place"])
        cells.setdefault(entry["function"], {})[entry["place"]] = _taken(entry["taken"])
    return table(
        [("operation", *columns), *((name, *(row[c] for c in columns)) for name, row in cells.items())]
    )


def _taken(by_verb: dict[str, str]) -> str:
    verbs: dict[str, list[str]] = {}
    for verb, candidate in by_verb.items():
        verbs.setdefault(candidate, []).append(verb)
    if len(verbs) == 1:
        return next(iter(verbs))
    return "; ".join(f"{candidate}: {', '.join(names)}" for candidate, names in verbs.items())


def support_table() -> str:
    """What runs which operation on which library, from the registry alone: the same on every machine."""
    records = scanfield.operations()
    lines = ["| library | device | implementation | operations | dtypes |", "|---|---|---|---|---|"]
    forms = dict.fromkeys(form for record in records for form in _base(record).generic)
    for form in forms:
        served = [record.name for record in records if form in _base(record).generic]
        library, dtypes = ("as above", "as above") if len(lines) > 2 else (_EVERY_LIBRARY, _EVERY_DTYPE)
        lines.append(f"| {library} | any | `generic.{form}` | {_listed(served, records)} | {dtypes} |")
    every = {
        _base(record).name for record in records
    }  # a family of another protocol, the PINN, is named as it is
    for manifest in sorted(dispatch.manifests(), key=lambda manifest: manifest.library):
        if manifest.loop:
            lines.append(
                f"| {manifest.library} | any | the generic forms over the library's own loop "
                f"| {_listed([record.name for record in records], records)} | as above |"
            )
        for candidate in manifest.candidates:
            served = [record.name for record in records if _base(record).name in candidate.operations]
            served += [name for name in candidate.operations if name not in every]
            name = f"`{candidate.name}`" + ("" if candidate.default else ", by `method=` only")
            lines.append(
                f"| {manifest.library} | {candidate.device} | {name} | {_listed(served, records)} "
                f"| {', '.join(candidate.dtypes)} |"
            )
    return "\n".join(lines)


_EVERY_LIBRARY = "any that follows the array API standard"
_EVERY_DTYPE = "float16, bfloat16, float32, float64; complex64, complex128 where the operation takes them"


def _base(record: Record) -> Operation:
    return record.base if isinstance(record, Derived) else record


def _listed(names: list[str], records: Sequence[Record]) -> str:
    return "all" if len(names) == len(records) else ", ".join(f"`{name}`" for name in names)
