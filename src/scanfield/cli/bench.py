"""`scanfield bench OPERATION`: times your own shapes on every library here, each call as its users write it.

Wall time of a call, results waited for: the median of several rounds, in which all rivals take turns, after a first call
that compiles. On JAX the call is under `jax.jit`; on Dask building the graph counts. Sizes go by the names of the operation's
axes; one axis may have several sizes, which --plot draws as curves. All inputs that may be absent are given but the initial
state, unless --without names them. Inputs are drawn from a seed: no value changes what is done.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy

import scanfield
from scanfield.cli import draws, info
from scanfield.cli.console import check_plot, progress, table
from scanfield.cli.places import Place, places
from scanfield.dispatch import Record
from scanfield.errors import ArgumentError, ScanfieldError
from scanfield.plots import figure_of

_EXAMPLES = """\
examples:
  scanfield bench gdn2                                            the default sizes, on everything found
  scanfield bench gdn2 --size heads=8 --size key=128 --size value=128 --dtype float32
  scanfield bench selective_scan --size channels=1536 --size time=512,1024,2048 --plot bench.png
  scanfield bench linear_scan --verb step --library numpy --library jax
  scanfield bench kda --method generic --method numpy.numba --library numpy
  scanfield bench gdn2 --without erase --without write --json > bench.json

exit status: 0 all were timed, 1 some raised, 2 a wrong call
"""

SIZES = {
    "batch": 1,
    "time": 1024,
    "heads": 4,
    "vheads": 4,
    "key": 64,
    "value": 64,
    "channels": 256,
    "groups": 1,
    "state": 16,
    "feature": 64,
    "householders": 2,
}
_ROUNDS = 5


class Row(NamedTuple):
    """One measurement."""

    library: str
    candidate: str
    verb: str
    sizes: dict[str, int]
    seconds: float | None
    """Median wall time of one call; None where it raised."""
    first: float | None
    """The first call, compilation included."""
    note: str
    """Why there is no time."""


def add_parser(commands: Any) -> None:
    """Describe the command to argparse."""
    parser = commands.add_parser(
        "bench",
        help="time your own shapes on every library here",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("operation", metavar="OPERATION", help="for example gdn2 (scanfield info lists them)")
    parser.add_argument(
        "--size",
        action="append",
        default=[],
        metavar="AXIS=N[,N...]",
        help="size of an axis, as batch, time, heads, key, channels; several make a curve (may be repeated)",
    )
    parser.add_argument("--dtype", default="float32", metavar="DTYPE", help="float32 (default) or float64")
    parser.add_argument(
        "--verb",
        action="append",
        choices=tuple(_VERBS),
        help="what to time (may be repeated; default: forward and gradients)",
    )
    parser.add_argument("--library", action="append", metavar="NAME", help="only this one (may be repeated)")
    parser.add_argument(
        "--method",
        action="append",
        metavar="NAME",
        help="this implementation instead of the one that runs by itself (may be repeated)",
    )
    parser.add_argument(
        "--without", action="append", default=[], metavar="INPUT", help="leave an optional input out"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=0.5,
        metavar="S",
        help="how long to time each, at least (default: 0.5)",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the times; needs matplotlib")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Time, print, draw."""
    record = info.operation(arguments.operation)
    if arguments.dtype not in ("float32", "float64"):
        raise ArgumentError(f"--dtype {arguments.dtype}: allowed are float32, float64")
    if not 0 < arguments.seconds < 3600:
        raise ArgumentError(f"--seconds {arguments.seconds}: a number of seconds above 0 is expected")
    check_plot("a benchmark", arguments.plot)
    every = list(_sizes(record, arguments.size))
    cases = [_case(record, sizes, arguments.without) for sizes in every]
    verbs = list(dict.fromkeys(arguments.verb or ("forward", "gradients")))
    everywhere = [place for place in places(arguments.library) if arguments.dtype in place.dtypes]
    rows: list[Row] = []
    methods = arguments.method or [None]
    total = len(every) * len(verbs) * len(everywhere) * len(methods)
    with progress("timing", total, quiet=arguments.json) as tick:
        for sizes, case in zip(every, cases, strict=True):
            for verb in verbs:
                rivals = [
                    _Rival(record, case, place, verb, method, arguments.dtype)
                    for place in everywhere
                    for method in methods
                ]
                rows += _timed(rivals, sizes, arguments.seconds, tick)
    if arguments.json:
        print(json.dumps(as_json(record, arguments.dtype, rows), indent=2))
    else:
        print(as_text(record, arguments.dtype, rows))
    if arguments.plot is not None:
        draw(record, rows, arguments.plot)
        if not arguments.json:
            print(f"plot written to {arguments.plot}")
    return 1 if any(row.seconds is None for row in rows) else 0


# ------------------------------------------------------------------------------------------------------------
# what is timed


def _axes(record: Record) -> list[str]:
    """The axes that have a size to choose; the groups of B and of C are one."""
    names = [
        "groups" if axis.startswith("groups") else axis
        for entry in record.inputs
        if entry.role != "index"
        for axis in entry.layouts[0].split()
    ]
    return [name for name in dict.fromkeys(names) if name not in ("1", "sequence")]


def _sizes(record: Record, asked: Sequence[str]) -> Iterator[dict[str, int]]:
    """The sizes of each case: the defaults, those asked for, and one axis along its list."""
    axes = _axes(record)
    given: dict[str, list[int]] = {}
    for words in asked:
        name, _, numbers = words.partition("=")
        if name not in axes:
            raise ArgumentError(f"--size {words}: {record.name} has the axes {', '.join(axes)}")
        try:
            given[name] = [int(number) for number in numbers.split(",")]
        except ValueError:
            raise ArgumentError(
                f"--size {words}: whole numbers are expected, as {name}=64 or {name}=64,128"
            ) from None
        if min(given[name]) < 1:
            raise ArgumentError(f"--size {words}: at least 1 is expected")
    several = [name for name, numbers in given.items() if len(numbers) > 1]
    if len(several) > 1:
        raise ArgumentError(f"--size: one axis may have several sizes, not {' and '.join(several)}")
    along = several[0] if several else next(iter(given), axes[0])
    for number in given.get(along, [SIZES.get(along, 4)]):
        chosen = {name: numbers[0] for name, numbers in given.items()} | {along: number}
        sizes = {name: SIZES.get(name, 4) for name in axes} | chosen
        # What shares goes with what it is shared by, unless told otherwise.
        if "heads" in chosen and "vheads" in axes and "vheads" not in chosen:
            sizes["vheads"] = chosen["heads"]
        for few, many in (("heads", "vheads"), ("groups", "channels")):
            if {few, many} <= sizes.keys() and sizes[many] % sizes[few]:
                raise ArgumentError(
                    f"--size: {many} must be a multiple of {few}, not {sizes[many]} and {sizes[few]}"
                )
        yield sizes


def _case(record: Record, sizes: Mapping[str, int], without: Iterable[str]) -> draws.Case:
    optional = {
        entry.name for entry in record.inputs if entry.optional and entry.role not in ("index", "state")
    }
    absent = set(without)
    if unknown := absent - optional:
        raise ArgumentError(
            f"--without {min(unknown)}: what {record.name} can do without is {', '.join(sorted(optional)) or 'nothing'}"
        )
    absent |= {entry.name for entry in record.inputs if entry.role == "state"}
    known = {**sizes, **{f"groups_{name}": sizes["groups"] for name in "BC" if "groups" in sizes}}
    (case,) = draws.cases(
        record, getattr(scanfield, record.name), draws.QUICK[:1], time=sizes["time"], sizes=known
    )
    token = {name: values for name, values in (case.token or {}).items() if name not in absent}
    arrays = {name: values for name, values in case.arrays.items() if name not in absent}
    # An input that has no default is told to be absent.
    parameters = inspect.signature(getattr(scanfield, record.name)).parameters
    options = {name: None for name in without if parameters[name].default is inspect.Parameter.empty}
    return draws.Case(case.regime, arrays, case.options | options, token)


class _Rival:
    """One implementation on one library, as a call that can be repeated."""

    def __init__(
        self, record: Record, case: draws.Case, place: Place, verb: str, method: str | None, dtype: str
    ) -> None:
        self.record, self.case, self.place, self.verb, self.dtype = record, case, place, verb, dtype
        self.options = dict(case.options) | ({} if method is None else {"method": method})
        self.candidate = method or ""
        self.call: Callable[[], list[Any]] = list

    def prepare(self) -> None:
        """Move the arrays and make the call."""
        with self.place.scope():
            arrays = self._moved(self.case.arrays)
            told = scanfield.explain(getattr(scanfield, self.record.name), **arrays, **self.options)
            self.candidate = told.taken[_VERBS[self.verb]]
            self.call = getattr(self, f"_{self.verb}")(getattr(scanfield, self.record.name), arrays)

    def seconds(self, repeats: int) -> float:
        """Mean wall time of so many calls, each waited for."""
        with self.place.scope():
            start = time.perf_counter()
            for _ in range(repeats):
                self.place.wait(self.call())
            return (time.perf_counter() - start) / repeats

    def _moved(self, arrays: Mapping[str, numpy.ndarray]) -> dict[str, Any]:
        return {name: self.place.array(values.astype(self.dtype)) for name, values in arrays.items()}

    def _forward(self, function: Any, arrays: dict[str, Any]) -> Callable[[], list[Any]]:
        compiled = self.place.compiled(lambda given: list(function(**given, **self.options)))
        return lambda: list(compiled(arrays))

    def _gradients(self, function: Any, arrays: dict[str, Any]) -> Callable[[], list[Any]]:
        shape = function(**arrays, **self.options).output.shape
        cotangent = self._moved({"": numpy.random.default_rng(0).standard_normal(shape)})[""]

        def both(given: dict[str, Any], d_output: Any) -> list[Any]:
            result, pullback = scanfield.vjp(function, **given, **self.options)
            return [result.output, *pullback(d_output=d_output).values()]

        compiled = self.place.compiled(both)
        return lambda: list(compiled(arrays, cotangent))

    def _step(self, function: Any, arrays: dict[str, Any]) -> Callable[[], list[Any]]:
        if not self.case.token:
            raise ArgumentError(f"{self.record.name} has no step with these inputs")
        token = self._moved(self.case.token)
        state = function(**arrays, **self.options).final_state
        compiled = self.place.compiled(
            lambda state, given: list(function.step(state, **given, **self.options))
        )
        return lambda: list(compiled(state, token))


# What --verb may say, and the verb of the implementation that decides who runs it.
_VERBS = {"forward": "forward", "gradients": "save", "step": "step"}


def _timed(
    rivals: Sequence[_Rival], sizes: dict[str, int], least: float, tick: Callable[[str], None]
) -> Iterator[Row]:
    """Rows of these rivals, who take turns, so that whatever else the machine does meets all of them."""
    first: dict[int, float] = {}
    notes: dict[int, str] = {}
    plan: dict[int, tuple[int, int]] = {}
    for i, rival in enumerate(rivals):
        try:
            rival.prepare()
            first[i] = rival.seconds(1)
            once = max(rival.seconds(1), 1e-7)
            rounds = min(_ROUNDS, max(1, round(3 * least / once)))
            plan[i] = (rounds, max(1, round(least / _ROUNDS / once)))
        # What one library cannot do is a line of the table, not the end of it.
        except ScanfieldError as error:
            notes[i] = str(error)
        except Exception as error:
            notes[i] = f"{type(error).__name__}: {error}"
        tick(f"{rival.record.name} {rival.verb} on {rival.place}")
    samples: dict[int, list[float]] = {i: [] for i in plan}
    for turn in range(_ROUNDS):
        for i, (rounds, repeats) in plan.items():
            if turn < rounds:
                samples[i].append(rivals[i].seconds(repeats))
    for i, rival in enumerate(rivals):
        middle = statistics.median(samples[i]) if i in plan else None
        yield Row(
            str(rival.place), rival.candidate, rival.verb, sizes, middle, first.get(i), notes.get(i, "")
        )


# ------------------------------------------------------------------------------------------------------------
# how it is told


def as_text(record: Record, dtype: str, rows: Sequence[Row]) -> str:
    """A table for each set of sizes, the fastest of each verb as the measure of the others."""
    parts = [
        f"{record.name}, {dtype}; wall time of a call, median of {_ROUNDS} rounds\n"
        "A first call compiles, but not what an earlier line has compiled: NumPy and PyTorch share kernels."
    ]
    for sizes in _each(rows):
        here = [row for row in rows if row.sizes == sizes]
        best = {
            verb: min((row.seconds for row in here if row.verb == verb and row.seconds), default=1.0)
            for verb in _VERBS
        }
        lines: list[tuple[str, ...]] = [
            ("library", "implementation", "verb", "ms", "x the fastest", "first call, s", "note")
        ]
        lines += [
            (
                row.library,
                row.candidate,
                row.verb,
                "-" if row.seconds is None else f"{1e3 * row.seconds:.4g}",
                "-" if row.seconds is None else f"{row.seconds / best[row.verb]:.1f}",
                "-" if row.first is None else f"{row.first:.2f}",
                row.note[:120],
            )
            for row in here
        ]
        if not any(row.note for row in here):
            lines = [line[:-1] for line in lines]
        parts += ["\n" + ", ".join(f"{name} {number}" for name, number in sizes.items()), table(lines)]
    return "\n".join(parts)


def as_json(record: Record, dtype: str, rows: Sequence[Row]) -> dict[str, Any]:
    """The rows as plain data, with what they were measured on."""
    known = info.machine()
    return known | {"operation": record.name, "dtype": dtype, "rows": [row._asdict() for row in rows]}


def draw(record: Record, rows: Sequence[Row], path: Path) -> None:
    """Times over the axis that has several sizes, or bars where none has."""
    timed = [row for row in rows if row.seconds is not None]
    verbs = list(dict.fromkeys(row.verb for row in rows))
    along = next((name for name in rows[0].sizes if len({row.sizes[name] for row in rows}) > 1), None)
    figure = figure_of("a benchmark")(figsize=(1 + 4.5 * len(verbs), 4), layout="constrained")
    for axes, verb in zip(figure.subplots(1, len(verbs), squeeze=False)[0], verbs, strict=True):
        here = [row for row in timed if row.verb == verb]
        names = list(dict.fromkeys(f"{row.library}: {row.candidate}" for row in here))
        for i, name in enumerate(names):
            mine = [row for row in here if f"{row.library}: {row.candidate}" == name]
            ms = [1e3 * row.seconds for row in mine if row.seconds is not None]
            if along is None:
                axes.barh(i, ms[0])
            else:
                axes.plot([row.sizes[along] for row in mine], ms, marker="o", label=name)
        if along is None:
            axes.set_yticks(range(len(names)), names)
            axes.set_xlabel("ms")
        else:
            axes.set(xscale="log", yscale="log", xlabel=along, ylabel="ms")
            sizes = sorted({row.sizes[along] for row in rows})
            axes.set_xticks(sizes, [str(size) for size in sizes])
            axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
            axes.legend(fontsize="small")
        axes.set_title(f"{record.name}, {verb}")
    figure.savefig(path, dpi=120)


def _each(rows: Iterable[Row]) -> list[dict[str, int]]:
    found: list[dict[str, int]] = []
    for row in rows:
        if row.sizes not in found:
            found.append(row.sizes)
    return found
