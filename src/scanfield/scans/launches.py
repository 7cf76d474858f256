"""Calls of a kind that came before, straight from their arguments to what runs them.

``plans`` spares a call what ``prepare`` would find out once more. A *launcher*, which an implementation may offer (see
``dispatch.Implementation``), spares it the rest: given the arguments it tells by itself whether they are of its kind,
and then runs them. It is asked before anything else. What chose the implementation is either part of the kind (types,
dtypes, shapes, strides, options, ``method``) or looked at here: the method that ``use`` forces, and the dispatcher's
row. Only calls whose first argument is an array of NumPy's own have one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from numpy import ndarray

from scanfield.arrays import Array
from scanfield.dispatch import Verb, registry
from scanfield.scans.plans import Plan

Launcher = Callable[[tuple[Any, ...]], tuple[Array, Array] | None]


class Described(NamedTuple):
    """A call whose plan is known, by the names of its arguments."""

    plan: Plan
    names: Sequence[str]
    """In the order of the plan's sources."""
    values: Sequence[Any]
    method: str | None


class _Entry:
    """What is known of calls with these keywords, and a first array of this shape."""

    __slots__ = ("launchers", "missed", "row")

    def __init__(self, row: Any) -> None:
        self.row = row
        self.launchers: tuple[Launcher, ...] = ()
        self.missed = 1


class Launches:
    """The launchers of one scan's steps, or of its whole calls."""

    most = 256
    # Of arguments that differ in no more than other shapes, dtypes or strides; each that is asked in vain takes 0.5 us.
    each = 4

    def __init__(
        self,
        operation: str,
        verb: Verb,
        positional: Sequence[str],
        describe: Callable[[Sequence[Any], Mapping[str, Any]], Described | None],
    ) -> None:
        self._key = (operation, "numpy", "cpu")
        self._verb, self._positional, self._describe = verb, positional, describe
        self._found: dict[Any, _Entry] = {}

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Array, Array] | None:
        """Output and state, if these arguments are of a known kind."""
        values = (*args, *kwargs.values())
        if not values or type(values[0]) is not ndarray:
            return None
        entry = self._found.get((registry.forced_method(), values[0].shape, len(args), *kwargs))
        if entry is None or entry.row is not registry.row_of(self._key):
            return None
        for launcher in entry.launchers:
            found = launcher(values)
            if found is not None:
                return found
        return None

    def note(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A call that no launcher took has been run: the second of its kind, fourth, eighth, ... asks for a launcher."""
        values = (*args, *kwargs.values())
        if not values or type(values[0]) is not ndarray:
            return
        row = registry.row_of(self._key)
        kind = (registry.forced_method(), values[0].shape, len(args), *kwargs)
        entry = self._found.get(kind)
        if entry is None or entry.row is not row:
            if len(self._found) >= self.most:
                self._found.clear()
            self._found[kind] = _Entry(row)
            return
        entry.missed += 1
        if entry.missed & (entry.missed - 1):
            return
        made = self._make(args, kwargs, values)
        if made is not None:
            entry.launchers = (made, *entry.launchers[: self.each - 1])
            if len(entry.launchers) < self.each:
                entry.missed = 1  # the next kind is one of few

    def _make(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], values: tuple[Any, ...]
    ) -> Launcher | None:
        described = self._describe(args, kwargs)
        if described is None:
            return None
        plan = described.plan
        call = plan.ready(described.values)
        implementation = registry.select(call, self._verb, described.method).implementation
        offer = getattr(implementation, "launcher", None)
        if offer is None:
            return None
        given = {name: i for i, name in enumerate((*self._positional[: len(args)], *kwargs))}
        sources = plan.sources or [(i, None) for i in range(len(call.arrays))]
        places = [None if source is None else given.get(described.names[source[0]]) for source in sources]
        step = self._verb == "step"

        def shaped(output: Array, state: Array) -> tuple[Array, Array]:
            made = plan.output(output)
            return made.squeeze(1) if step else made, plan.state(state)

        found: Launcher | None = offer(call, self._verb, values, places, shaped)
        return found
