"""One token: the ``step`` of every public scan."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from scanfield.arrays import Array, current_device_of, library_of
from scanfield.dispatch import Operation, Record, registry
from scanfield.keywords import unknown_keyword
from scanfield.scans.binding import ELSEWHERE, check_binding
from scanfield.scans.canonical import layout_text, step_layouts
from scanfield.scans.launches import Described, Launches
from scanfield.scans.plans import Plans, key_of

_NOT_IN_STEP = ("cu_seqlens", "reverse", "states_at", "chunk_size", "initial_state")


def stepper(record: Record, signature: inspect.Signature, module: str) -> Callable[..., tuple[Array, Array]]:
    """The ``step`` of a public scan of a module, from its record and its signature."""
    parameters = [
        inspect.Parameter("state", inspect.Parameter.POSITIONAL_OR_KEYWORD),
        *(parameter for name, parameter in signature.parameters.items() if name not in _NOT_IN_STEP),
    ]
    own = inspect.Signature(parameters)
    state_name = next(entry.name for entry in record.inputs if entry.role == "state")
    names = [entry.name for entry in record.inputs if entry.role in ("sequence", "shared")]
    known = tuple(own.parameters)
    positional = tuple(name for name, p in own.parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD)
    defaults = {name: p.default for name, p in own.parameters.items() if p.default is not p.empty}
    kinds = tuple(name for name in known if name != "method")
    plans = Plans()

    def describe(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Described | None:
        arguments = {**defaults, **dict(zip(positional, args, strict=False)), **kwargs}
        values = [arguments[name] for name in kinds]
        plan = plans.get(key_of(values))
        return None if plan is None else Described(plan, kinds, values, arguments["method"])

    launches = Launches(record.name, "step", positional, describe) if type(record) is Operation else None

    def step(*args: Any, **kwargs: Any) -> tuple[Array, Array]:
        if launches is not None:
            found = launches.run(args, kwargs)
            if found is not None:
                return found
        for keyword in kwargs:
            if keyword not in known:
                raise unknown_keyword(f"{record.name}.step", keyword, known, ELSEWHERE)
        # A token is little work, as much as inspect's own binding: that one is asked only for what to complain about.
        given = {**dict(zip(positional, args, strict=False)), **kwargs}
        arguments = {**defaults, **given}
        # Too many, one twice, or one that is needed and not there.
        if len(given) < len(args) + len(kwargs) or len(arguments) < len(known):
            check_binding(f"{record.name}.step", own, args, kwargs)
        method = arguments.pop("method")
        values = [arguments[name] for name in kinds]
        key = key_of(values)
        plan = plans.get(key)
        if plan is not None:
            y, last = registry.call(plan.ready(values), "step", method)
            if launches is not None:
                launches.note(args, kwargs)
            return plan.output(y).squeeze(1), plan.state(last)
        arrays = {name: arguments.pop(name) for name in names}
        arrays[state_name] = arguments.pop("state")
        arrays |= dict.fromkeys(entry.name for entry in record.inputs if entry.role == "index")
        with current_device_of(arrays[record.main]):
            prepared = record.prepare(arrays, {**arguments, "reverse": False, "chunk_size": None}, step=True)
            plans.keep(key, record, dict(zip(kinds, values, strict=True)), prepared)
            y, last = registry.call(prepared.call, "step", method)
            if launches is not None:
                launches.note(args, kwargs)
            return library_of(y, "output").namespace.squeeze(prepared.output(y), axis=1), prepared.state(last)

    step.__name__, step.__qualname__ = "step", f"{record.name}.step"
    step.__module__ = module  # by which it is found, when it is pickled
    step.__signature__ = own  # type: ignore[attr-defined]  # how inspect.signature reads a made function
    shapes = "\n".join(
        f"    {entry.name} : array {' or '.join(layout_text(axes) for axes in step_layouts(entry).values())}"
        for entry in record.inputs
        if entry.role == "sequence"
    )
    step.__doc__ = f"""One token of ``{record.name}``: ``step(state, ...) -> (output, state)``.

    Parameters
    ----------
    state : array or None
        The state before the token; None is zeros. It is never changed.
{shapes}
        Arrays of one token, told apart by rank alone.

    The other arguments are those of ``{record.name}``.

    Returns
    -------
    (output, state)
        The token's output, without time axis, and the new state.
    """
    return step
