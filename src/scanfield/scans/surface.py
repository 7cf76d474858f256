"""How a function becomes a public scan, and what a whole call runs through."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, Protocol, cast

from scanfield.arrays import Array, current_device_of
from scanfield.dispatch import Operation, Record, registry
from scanfield.keywords import unknown_keyword
from scanfield.scans.binding import ELSEWHERE, bind, check_binding
from scanfield.scans.launches import Described, Launches
from scanfield.scans.plans import Plans, key_of
from scanfield.scans.states import with_states
from scanfield.scans.steps import stepper

P = ParamSpec("P")


class ScanResult(NamedTuple):
    """What a scan returns.

    ``output`` has the main input's dtype; ``final_state`` is carried and returned in float32 at least.
    """

    output: Array
    final_state: Array


class Scan(Protocol[P]):
    """A public scan: a function whose verbs are its attributes."""

    record: Record
    step: Callable[..., tuple[Array, Array]]
    signature: inspect.Signature
    __name__: str
    __qualname__: str

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> ScanResult:
        """The whole sequence."""


def public(record: Record) -> Callable[[Callable[P, ScanResult]], Scan[P]]:
    """Turn a function into a public scan: unknown keywords get advice, and the verbs become its attributes."""

    def decorate(function: Callable[P, ScanResult]) -> Scan[P]:
        signature = inspect.signature(function)
        known = tuple(signature.parameters)
        positional = tuple(
            name for name, p in signature.parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD
        )
        needed = tuple(name for name, p in signature.parameters.items() if p.default is p.empty)

        def describe(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Described | None:
            bound = bind(scan, args, kwargs)
            values = (*bound.arrays.values(), *bound.options.values())
            plan = _PLANS.get(key_of(values, record.name)) if bound.states_at is None else None
            return (
                None
                if plan is None
                else Described(plan, (*bound.arrays, *bound.options), values, bound.method)
            )

        launches = (
            Launches(record.name, "forward", positional, describe) if type(record) is Operation else None
        )

        # No try around the call: torch.compile traces through here.
        @functools.wraps(function)
        def scan(*args: P.args, **kwargs: P.kwargs) -> ScanResult:
            if launches is not None:
                found = launches.run(args, kwargs)
                if found is not None:
                    return _named(ScanResult, found)
            by_position = positional[: len(args)]
            for keyword in kwargs:
                if keyword not in known:
                    raise unknown_keyword(record.name, keyword, known, ELSEWHERE)
                if keyword in by_position:
                    check_binding(record.name, signature, args, kwargs)
            for name in needed:
                if name not in by_position and name not in kwargs:
                    check_binding(record.name, signature, args, kwargs)
            if len(args) > len(positional):
                check_binding(record.name, signature, args, kwargs)
            result = function(*args, **kwargs)
            if launches is not None:
                launches.note(args, kwargs)
            return result

        made = cast(Scan[P], scan)
        made.record = record
        made.signature = signature  # kept: to make one takes as long as a short scan
        made.step = stepper(record, signature, function.__module__)
        registry.register(record)
        return made

    return decorate


_named: Callable[[type[ScanResult], tuple[Array, Array]], ScanResult] = tuple.__new__
"""A result without what a class of Python's own checks first."""


_PLANS = Plans()
"""Of whole calls."""


def run(
    record: Record,
    arrays: Mapping[str, Any],
    options: Mapping[str, Any],
    states_at: Sequence[int] | str | None,
    method: str | None,
) -> ScanResult:
    """Prepare, dispatch, name the results."""
    values = (*arrays.values(), *options.values())
    key = key_of(values, record.name) if states_at is None and type(record) is Operation else None
    plan = _PLANS.get(key)
    if plan is not None:  # of arrays of libraries without a current device
        y, last = registry.call(plan.ready(values), "forward", method)
        return ScanResult(plan.output(y), plan.state(last))
    with current_device_of(arrays[record.main]):
        prepared = record.prepare(arrays, options)
        if states_at is not None:
            return cast(ScanResult, with_states(prepared, options, states_at, method))
        _PLANS.keep(key, record, arrays, prepared)
        y, last = registry.call(prepared.call, "forward", method)
        return ScanResult(prepared.output(y), prepared.state(last))
