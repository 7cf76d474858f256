"""Progress of a training: a bar on a terminal, where rich is installed; nothing elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

__all__ = ["Tick", "shown"]

Tick = Callable[[int, str], None]
"""Iterations made so far, and a few words."""


@contextmanager
def shown(total: int, wanted: bool | None) -> Iterator[Tick]:
    """Yields a function to be called as a training goes on. `wanted` None: only on a terminal."""
    terminal = sys.stderr is not None and sys.stderr.isatty()
    if not (terminal if wanted is None else wanted) or find_spec("rich") is None:
        yield lambda done, words: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[words]}", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("training", total=total, words="")
        yield lambda done, words: bar.update(task, completed=done, words=words)
