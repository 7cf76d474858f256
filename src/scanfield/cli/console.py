"""What the commands print: headings, tables, and progress for who sits at a terminal."""

from __future__ import annotations

import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path

from scanfield.errors import ArgumentError
from scanfield.plots import figure_of

Tick = Callable[[str], None]

# A terminal without rich gets one line of progress in so many seconds.
_LINE_INTERVAL = 5.0


def heading(text: str) -> None:
    """A title with an empty line before it."""
    print(f"\n{text}\n{'=' * len(text)}", flush=True)


def table(rows: Iterable[Sequence[str]]) -> str:
    """Rows of text, the first one the head, with aligned columns; on a narrower terminal long cells take several lines."""
    listed = [[str(cell) for cell in row] for row in rows]
    columns = list(zip(*listed, strict=True))
    widths = [max(map(len, column)) for column in columns]
    if sys.stdout.isatty():
        _narrow(widths, columns, shutil.get_terminal_size().columns)
    lines = []
    for row in listed:
        cells = [_broken(cell, width) for cell, width in zip(row, widths, strict=True)]
        lines += [_line(parts, widths) for parts in zip_longest(*cells, fillvalue="")]
        if row is listed[0]:
            lines.append(_line(["-" * width for width in widths], widths))
    return "\n".join(lines)


def _line(parts: Iterable[str], widths: Sequence[int]) -> str:
    return "  ".join(part.ljust(width) for part, width in zip(parts, widths, strict=True)).rstrip()


def _broken(cell: str, width: int) -> list[str]:
    whole = len(cell) <= width
    return [cell] if whole else textwrap.wrap(cell, width, break_on_hyphens=False, break_long_words=False)


def _narrow(widths: list[int], columns: Sequence[Sequence[str]], wanted: int) -> None:
    """Take what does not fit from the widest columns, in place; no word is broken."""
    least = [max((len(word) for cell in column for word in cell.split()), default=0) for column in columns]
    spare = {i for i, width in enumerate(widths) if width > least[i]}
    while spare and sum(widths) + 2 * (len(widths) - 1) > wanted:
        widest = max(spare, key=lambda i: widths[i])
        widths[widest] -= 1
        if widths[widest] == least[widest]:
            spare.remove(widest)


def check_plot(what: str, path: Path | None) -> None:
    """Raise what a plot would fail with at the end, before the minutes are spent.

    BackendError without matplotlib, ArgumentError for a folder that is not there and an ending that is no picture's.
    """
    if path is None:
        return
    kinds = figure_of(what)().canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in kinds:
        raise ArgumentError(f"--plot {path}: the name has to end in one of {', '.join(sorted(kinds))}")
    if not path.parent.is_dir():
        raise ArgumentError(f"--plot {path}: there is no folder {path.parent}")


@contextmanager
def progress(label: str, total: int, *, quiet: bool = False) -> Iterator[Tick]:
    """Yields a function to be called with a few words after each of `total` steps.

    A terminal with rich installed gets a bar, one without a line on stderr every few seconds and at the end; a log file
    or a pipe gets nothing.
    """
    if quiet or sys.stderr is None or not sys.stderr.isatty():
        yield lambda words: None
    elif find_spec("rich") is not None:
        with _bar(label, total) as tick:
            yield tick
    else:
        with _lines(label, total) as tick:
            yield tick


@contextmanager
def _bar(label: str, total: int) -> Iterator[Tick]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[words]}", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total, words="")
        yield lambda words: bar.update(task, advance=1, words=words)


@contextmanager
def _lines(label: str, total: int) -> Iterator[Tick]:
    start = shown = time.monotonic()
    done = 0

    def tick(words: str) -> None:
        nonlocal shown, done
        done += 1
        now = time.monotonic()
        if done == total or now - shown > _LINE_INTERVAL:
            shown = now
            print(
                f"{label}: {done} of {total} after {now - start:.0f} s  {words}".rstrip(),
                file=sys.stderr,
                flush=True,
            )

    yield tick
