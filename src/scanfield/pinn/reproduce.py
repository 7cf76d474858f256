"""Problems with known errors, solved again: ours beside the value of a paper, a demonstration or another method."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from scanfield.pinn.files import load_problem
from scanfield.pinn.run import INTERRUPTED

__all__ = ["ENTRIES", "Entry", "Row", "reproduce"]


@dataclass(frozen=True)
class Entry:
    """A shipped problem, what is changed of it, and the error to stand beside."""

    title: str
    problem: str
    reference: str
    source: str
    parameters: Mapping[str, float] = field(default_factory=dict)
    features: Mapping[str, Any] = field(default_factory=dict)
    network: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)


class Row(NamedTuple):
    """What came of an entry: the relative L2 error, processor seconds, parameters."""

    entry: Entry
    error: float
    seconds: float
    parameters: int


_PLAIN = "plain network, Wang, Teng & Perdikaris, arXiv 2001.04536; 3.5e-3 the best that we found published"
_DEMO = "DeepXDE's demonstration helmholtz.2d.dirichlet (hard constraint, 5,000 steps of Adam)"
_P2 = "finite elements of second order (scikit-fem, {} intervals a side)"

ENTRIES: tuple[Entry, ...] = (
    Entry("square (1,4)", "square-1-4", "1.6e-1 .. 3.5e-3", _PLAIN),
    Entry(
        "square (1,4), one hidden layer",
        "square-1-4",
        "1.6e-1 .. 3.5e-3",
        _PLAIN,
        features={"features": 20, "scale": 0.7, "trainable": True},
        network={"hidden": [20], "activation": "sin"},
        training={"points": 1000, "iterations": 50},
    ),
    Entry("square (2.5,3.3)", "square-1-4", "-", "", parameters={"a1": 2.5, "a2": 3.3}),
    Entry("square k = 4 pi", "square-4pi", "4e-3 .. 5e-3", _DEMO),
    Entry("plane wave k = 20", "plane-wave-k20", "1e-4", _P2.format(80)),
    Entry(
        "plane wave k = 20, one hidden layer",
        "plane-wave-k20",
        "1e-4",
        _P2.format(80),
        features={"features": 24, "trainable": True},
        network={"hidden": [16]},
        training={"points": 800, "boundary": 200, "iterations": 80},
    ),
    Entry(
        "plane wave k = 40",
        "plane-wave-k20",
        "6e-4",
        _P2.format(120),
        parameters={"k": 40.0},
        features={"features": 120},
        training={"points": 2000},
    ),
    Entry("line k = 100", "line-impedance", "3.7e-4", "second-order differences, 8,000 intervals"),
    Entry("point source k = 20", "point-source", "-", ""),
    Entry("point source k = 40", "point-source", "-", "", parameters={"k": 40.0}),
)


def reproduce(
    entries: Sequence[Entry] = ENTRIES, *, done: Callable[[Row], Any] = lambda row: None
) -> list[Row]:
    """Solve each entry; `done` is called with each row. KeyboardInterrupt where a training was interrupted: it is no row.

    Examples
    --------
    >>> line = [entry for entry in ENTRIES if entry.title == "line k = 100"]
    >>> reproduce(line)[0].error < 5e-4
    True
    """
    rows = []
    for entry in entries:
        problem = load_problem(entry.problem, **entry.parameters)
        problem = replace(
            problem,
            features=dict(problem.features) | dict(entry.features),
            network=dict(problem.network) | dict(entry.network),
            training=dict(problem.training) | dict(entry.training),
        )
        assert problem.exact is not None
        started = time.process_time()
        fit = problem.solve(progress=False)
        seconds = time.process_time() - started
        if fit.reason == INTERRUPTED:
            raise KeyboardInterrupt
        row = Row(entry, fit.error(problem.exact), seconds, fit.network.size)
        rows.append(row)
        done(row)
    return rows
