"""What every public scan shares: its results, unknown keywords, forward, step and the states between."""

from __future__ import annotations

import bisect
import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, Protocol, cast

import numpy

from scanfield.arrays import Array, current_device_of, library_of
from scanfield.dispatch import Call, Operation, Prepared, Record, operation_of, registry
from scanfield.errors import ArgumentError, DtypeError, ShapeError
from scanfield.keywords import unknown_keyword
from scanfield.scans import packing
from scanfield.scans.canonical import layout_text, step_layouts
from scanfield.scans.launches import Described, Launches
from scanfield.scans.plans import Plans, key_of

P = ParamSpec("P")


class ScanResult(NamedTuple):
    """What a scan returns.

    ``output`` has the main input's dtype; ``final_state`` is carried and returned in float32 at least.
    """

    output: Array
    final_state: Array


class ScanStates(NamedTuple):
    """What a scan with ``states_at`` returns: ``states[:, i]`` is the state at the boundary before token ``t_i``.

    That is the state which comes into the token or, with ``reverse``, which has come out of it, in the token's own
    sequence if several are packed.
    """

    output: Array
    final_state: Array
    states: Array


class Scan(Protocol[P]):
    """A public scan: a function whose verbs are its attributes."""

    record: Record
    step: Callable[..., tuple[Array, Array]]
    signature: inspect.Signature
    __name__: str
    __qualname__: str

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> ScanResult:
        """The whole sequence."""


class Bound(NamedTuple):
    """A user's call, sorted by kind."""

    record: Record
    arrays: dict[str, Any]
    options: dict[str, Any]
    states_at: Sequence[int] | str | None
    method: str | None


# What other projects call these arguments: an unknown keyword is answered with our name.
_ELSEWHERE = {
    "g": "log_decay",
    "gk": "log_decay",
    "alpha": "log_decay",
    "gate": "log_decay",
    "decay": "log_decay",
    "log_alpha": "log_decay",
    "q": "query",
    "k": "key",
    "v": "value",
    "w": "write",
    "p": "erase_key",
    "x": "u",
    "dt": "delta",
    "dt_bias": "delta_bias",
    "dt_softplus": "delta_softplus",
    "h0": "initial_state",
    "initial_states": "initial_state",
    "attention_mask": "cu_seqlens",
    "use_qk_l2norm_in_kernel": "qk_l2norm",
}


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
                    raise unknown_keyword(record.name, keyword, known, _ELSEWHERE)
                if keyword in by_position:
                    _check_binding(record.name, signature, args, kwargs)
            for name in needed:
                if name not in by_position and name not in kwargs:
                    _check_binding(record.name, signature, args, kwargs)
            if len(args) > len(positional):
                _check_binding(record.name, signature, args, kwargs)
            result = function(*args, **kwargs)
            if launches is not None:
                launches.note(args, kwargs)
            return result

        made = cast(Scan[P], scan)
        made.record = record
        made.signature = signature  # kept: to make one takes as long as a short scan
        made.step = _stepper(record, signature)
        registry.register(record)
        return made

    return decorate


_named: Callable[[type[ScanResult], tuple[Array, Array]], ScanResult] = tuple.__new__
"""A result without what a class of Python's own checks first."""


def _check_binding(name: str, signature: inspect.Signature, args: Any, kwargs: Any) -> inspect.BoundArguments:
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ArgumentError(f"{name}: {error}; it takes {', '.join(signature.parameters)}") from None


def bind(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Bound:
    """The arguments of a public scan, sorted: arrays by name, options, and what concerns the call alone."""
    record = record_of(op)
    signature = op.signature
    for keyword in kwargs:
        if keyword not in signature.parameters:
            raise unknown_keyword(record.name, keyword, tuple(signature.parameters), _ELSEWHERE)
    bound = _check_binding(record.name, signature, args, kwargs)
    bound.apply_defaults()
    arguments = dict(bound.arguments)
    names = [entry.name for entry in record.inputs]
    arrays = {name: arguments.pop(name) for name in names}
    states_at, method = arguments.pop("states_at"), arguments.pop("method")
    return Bound(record, arrays, arguments, states_at, method)


def record_of(op: Any) -> Record:
    """The record behind a public scan; ArgumentError for anything else."""
    record = getattr(op, "record", None)
    if record is None and getattr(op, "__name__", "") == "associative_scan":
        raise ArgumentError(
            "op: associative_scan takes any rule, so that it has no hand-written gradient and no candidates; use your "
            "library's own differentiation (torch.autograd, jax.grad)"
        )
    if record is None:
        raise ArgumentError(
            f"op: {getattr(op, '__name__', op)!r} is no scan of scanfield; known are "
            f"{', '.join(record.name for record in registry.operations())}"
        )
    return cast(Record, record)


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
            return cast(ScanResult, _with_states(record, prepared, options, states_at, method))
        _PLANS.keep(key, record, arrays, prepared)
        y, last = registry.call(prepared.call, "forward", method)
        return ScanResult(prepared.output(y), prepared.state(last))


# ---------------------------------------------------------------------------------------------------------------------
# one token


_NOT_IN_STEP = ("cu_seqlens", "reverse", "states_at", "chunk_size", "initial_state")


def _stepper(record: Record, signature: inspect.Signature) -> Callable[..., tuple[Array, Array]]:
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
                raise unknown_keyword(f"{record.name}.step", keyword, known, _ELSEWHERE)
        # A token is little work, as much as inspect's own binding: that one is asked only for what to complain about.
        given = {**dict(zip(positional, args, strict=False)), **kwargs}
        arguments = {**defaults, **given}
        # Too many, one twice, or one that is needed and not there.
        if len(given) < len(args) + len(kwargs) or len(arguments) < len(known):
            _check_binding(f"{record.name}.step", own, args, kwargs)
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
    step.__module__ = record.prepare.__module__
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


# ---------------------------------------------------------------------------------------------------------------------
# states between


def _with_states(
    record: Record,
    prepared: Prepared,
    options: Mapping[str, Any],
    states_at: Sequence[int] | str,
    method: str | None,
) -> ScanStates:
    call, stretch = prepared.call, prepared.stretch
    operation = operation_of(call)
    reverse = options.get("reverse")
    roles = [entry.role for entry in operation.inputs]
    bounds = call.arrays[roles.index("index")]
    time, starts, cuts = check_boundaries(prepared, options, states_at)
    # In canonical time, where reversed sequences run forward too.
    walked = [time - cut for cut in cuts] if reverse else cuts
    place = roles.index("state")
    if bounds is None:
        y, last, found = _in_parts(operation, call, walked, stretch, place, method)
    else:
        y, last = registry.call(call, "forward", method)
        # A boundary belongs to the sequence of the token on its right; a chunk's start to the chunk.
        arrived = bool(reverse) and states_at != "chunks"
        found = _in_pack(operation, call, walked, stretch, place, starts, arrived, method)
    xp = library_of(last, "state").namespace
    output, final_state = prepared.output(y), prepared.state(last)
    if not cuts:
        empty = xp.expand_dims(final_state[:1, ...] if bounds is not None else final_state, axis=1)
        return ScanStates(output, final_state, empty[:, :0, ...])
    return ScanStates(output, final_state, xp.stack([prepared.state(found[cut]) for cut in walked], axis=1))


def check_boundaries(
    prepared: Prepared, options: Mapping[str, Any], states_at: Sequence[int] | str
) -> tuple[int, tuple[int, ...], list[int]]:
    """The number of tokens, where sequences start and end, and the boundaries that ``states_at`` asks for."""
    call, stretch = prepared.call, prepared.stretch
    operation = operation_of(call)
    time = _time(operation, call) // stretch
    bounds = next(x for entry, x in zip(operation.inputs, call.arrays, strict=True) if entry.role == "index")
    starts = (0, time) if bounds is None else tuple(bound // stretch for bound in packing.host_bounds(bounds))
    reverse = bool(options.get("reverse"))
    return time, starts, boundaries(states_at, time, options.get("chunk_size"), starts, reverse=reverse)


def _in_parts(
    operation: Operation, call: Call, cuts: Sequence[int], stretch: int, place: int, method: str | None
) -> tuple[Array, Array, dict[int, Array]]:
    """One sequence from boundary to boundary: output, final state, and the state at each."""
    time = _time(operation, call) // stretch
    found: dict[int, Array] = {}
    pieces, state, start = [], call.arrays[place], 0
    for stop in sorted({*cuts, time}):
        part = _cut(operation, call, start * stretch, stop * stretch, state)
        output, state = registry.call(part, "forward", method)
        found[stop] = state
        pieces.append(output)
        start = stop
    xp = library_of(state, "state").namespace
    return xp.concat(pieces, axis=1), state, found


def _in_pack(
    operation: Operation,
    call: Call,
    cuts: Sequence[int],
    stretch: int,
    place: int,
    starts: Sequence[int],
    arrived: bool,
    method: str | None,
) -> dict[int, Array]:
    """The state before token t in that token's sequence; each sequence is run once more, up to its last boundary.

    With ``arrived`` it is the state after token t - 1, in that one's sequence.
    """
    states = call.arrays[place]
    found: dict[int, Array] = {}
    index = next(i for i, entry in enumerate(operation.inputs) if entry.role == "index")
    dense = call._replace(arrays=(*call.arrays[:index], None, *call.arrays[index + 1 :]))
    before: tuple[int, int, Array | None] = (-1, 0, None)
    for cut in sorted(set(cuts)):
        sequence = max(_sequence_of(starts, cut - 1 if arrived and cut else cut), 0)
        if before[0] != sequence:
            row = None if states is None else states[sequence : sequence + 1, ...]
            before = (sequence, starts[sequence], row)
        part = _cut(operation, dense, before[1] * stretch, cut * stretch, before[2])
        found[cut] = registry.call(part, "forward", method)[1]
        before = (sequence, cut, found[cut])
    return found


def _sequence_of(starts: Sequence[int], token: int) -> int:
    """The sequence of a token; that of the last token for the boundary behind it."""
    return bisect.bisect_right(starts, min(token, starts[-1] - 1)) - 1


def _time(operation: Operation, call: Call) -> int:
    return int(
        max(
            (
                array.shape[1]
                for entry, array in zip(operation.inputs, call.arrays, strict=True)
                if entry.role == "sequence" and array is not None and array.shape[1] != 1
            ),
            default=call.arrays[operation.main_index].shape[1],
        )
    )


def _cut(operation: Operation, call: Call, start: int, stop: int, state: Array | None) -> Call:
    arrays = []
    length = _time(operation, call)
    for entry, array in zip(operation.inputs, call.arrays, strict=True):
        if entry.role == "state":
            arrays.append(state)
        elif entry.role == "sequence" and array is not None and (array.shape[1] == length):
            arrays.append(array[:, start:stop, ...])
        else:
            arrays.append(array)
    return call._replace(arrays=tuple(arrays))


def boundaries(
    states_at: Any, time: int, chunk_size: int | None, starts: Sequence[int], *, reverse: bool
) -> list[int]:
    """The boundaries that ``states_at`` asks for: ``"chunks"`` is where each chunk of each sequence starts."""
    if isinstance(states_at, str):
        if states_at != "chunks":
            raise ArgumentError(
                f"states_at: {states_at!r}; allowed are 'chunks' and a sequence of boundaries"
            )
        size = chunk_size or DEFAULT_CHUNK
        walked = [cut for first, last in itertools.pairwise(starts) for cut in range(first, last, size)]
        return [time - cut for cut in walked] if reverse else walked
    if isinstance(states_at, numpy.ndarray) and states_at.ndim == 1:
        states_at = list(states_at)
    if not isinstance(states_at, Sequence):
        raise ArgumentError(
            f"states_at: came {type(states_at).__name__}; allowed are 'chunks' and a sequence of boundaries"
        )
    cuts = []
    for value in states_at:
        if isinstance(value, bool) or not isinstance(value, int | numpy.integer):
            raise DtypeError(f"states_at: expected integers, came {type(value).__name__} ({value!r})")
        if not 0 <= value <= time:
            raise ShapeError(f"states_at: boundary {value} lies outside 0..{time}")
        cuts.append(int(value))
    return cuts


DEFAULT_CHUNK = 64


# ---------------------------------------------------------------------------------------------------------------------
# options


def check_chunk_size(value: Any) -> int | None:
    """A chunk size: None (let the implementation choose) or an integer of at least 1."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | numpy.integer) or value < 1:
        raise ArgumentError(f"chunk_size: {value!r}; allowed is an integer of at least 1, or None")
    return int(value)


def check_flag(value: Any, name: str) -> bool:
    """A Python or NumPy boolean."""
    if not isinstance(value, bool | numpy.bool_):
        raise ArgumentError(f"{name}: {value!r}; allowed are True and False")
    return bool(value)


def check_number(value: Any, name: str) -> float:
    """A Python or NumPy real number as a Python float, which promotes alike in every library; no arrays."""
    if isinstance(value, bool | numpy.bool_) or not isinstance(
        value, int | float | numpy.integer | numpy.floating
    ):
        raise DtypeError(
            f"{name}: expected a Python number, came {type(value).__module__}.{type(value).__qualname__}; "
            f"{name} = float({name})"
        )
    try:
        return float(value)
    except OverflowError:
        raise ArgumentError(f"{name}: too large for a float") from None
