"""The comparison of all implementations on this machine with each other.

For each operation of the registry the same seeded inputs go to every place (a library on a device) and,
there, to every candidate that `scanfield.explain` names. Forward, step, all gradients, relevance and the
summary are taken, and every pair of runs is compared. There is no list of candidates here: a plugin's candidate is
compared by being installed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy
import numpy.typing

import scanfield
from scanfield import dispatch
from scanfield.cli import agree_layers, agree_pinn, draws
from scanfield.cli.places import Place
from scanfield.dispatch import Derived
from scanfield.dispatch import Record as Operation
from scanfield.errors import BackendError

Record = Operation | agree_pinn.Subject
_PARTS: dict[str, Any] = {part.SUBJECT.name: part for part in (agree_pinn, agree_layers)}
"""What is compared beside the operations."""

Array = numpy.typing.NDArray[Any]
Arrays = dict[str, Array]
TOLERANCE = {"float32": 4e-6, "float64": 1e-12}
"""The largest difference allowed, over the largest value of the array; a candidate may state more."""

OWN_FACTOR, OWN_LIMIT = 4.0, 1e-4
"""Sums that cancel lose digits in any float32 code. A float32 case may be apart by so many times what the
generic forms lose there against their own float64, and by no more than the limit."""


class Run(NamedTuple):
    """One candidate at one place."""

    place: str
    candidate: str

    def __str__(self) -> str:
        return f"{self.place} {self.candidate}"


@dataclass(frozen=True)
class Worst:
    """The element at which two runs differ most, in units of the tolerance."""

    excess: float
    """Deviation over tolerance: above 1 they disagree; infinite where only one is finite."""
    deviation: float
    tolerance: float
    operation: str
    regime: str
    dtype: str
    array: str
    index: tuple[int, ...]
    left: Any
    right: Any

    def where(self) -> str:
        """The element in words: `float32, strong decay: d_key[0, 3, 1, 2]`."""
        place = f"[{', '.join(map(str, self.index))}]" if self.index else ""
        return f"{self.dtype}, {self.regime}: {self.array}{place}"


@dataclass
class Pair:
    """What the comparison of two runs has shown so far."""

    compared: int = 0
    """Arrays compared."""
    failed: list[Worst] = field(default_factory=list)
    """The worst element of every array that is beyond its tolerance."""
    worst: dict[str, Worst] = field(default_factory=dict)
    """Operation -> the worst element of all its arrays."""

    def add(self, found: Worst) -> None:
        """Count one array."""
        self.compared += 1
        known = self.worst.get(found.operation)
        if known is None or found.excess > known.excess:
            self.worst[found.operation] = found
        if found.excess > 1:
            self.failed.append(found)

    def merge(self, other: Pair) -> None:
        """Add what another comparison of the same two runs has shown."""
        self.compared += other.compared
        self.failed += other.failed
        for name, worst in other.worst.items():
            known = self.worst.get(name)
            if known is None or worst.excess > known.excess:
                self.worst[name] = worst


class Crash(NamedTuple):
    """A run that raised."""

    run: Run
    operation: str
    verb: str
    message: str


@dataclass
class Report:
    """All pairs, and what could not be compared."""

    pairs: dict[tuple[Run, Run], Pair] = field(default_factory=dict)
    crashes: dict[Crash, list[str]] = field(default_factory=dict)
    """What was raised, and in which cases."""
    declined: dict[tuple[Run, str], set[str]] = field(default_factory=dict)
    """(run, reason) -> the operations that it was given for."""
    selected: set[str] = field(default_factory=set)
    """Places that ran a selection of the cases."""
    absent: dict[str, str] = field(default_factory=dict)
    """Libraries that have no place on this machine, and why."""
    runs: dict[str, set[Run]] = field(default_factory=dict)
    """Operation -> the runs that gave results."""

    def add(self, other: Report) -> None:
        """Add the report of further cases."""
        for runs, pair in other.pairs.items():
            self.pairs.setdefault(runs, Pair()).merge(pair)
        for crash, where in other.crashes.items():
            self.crashes.setdefault(crash, []).extend(where)
        for reason, names in other.declined.items():
            self.declined.setdefault(reason, set()).update(names)
        self.selected |= other.selected
        for name, runs_of in other.runs.items():
            self.runs.setdefault(name, set()).update(runs_of)

    @property
    def alone(self) -> set[str]:
        """Operations with a single run: there is nothing to compare them with."""
        return {name for name, runs in self.runs.items() if len(runs) == 1}

    @property
    def agree(self) -> bool:
        """Nothing raised and no pair is apart."""
        return not self.crashes and not any(pair.failed for pair in self.pairs.values())


def operations(wanted: Iterable[str] | None = None) -> list[Record]:
    """The records of the named operations, or of all; the PINN and the layers are among them."""
    records: dict[str, Record] = {record.name: record for record in scanfield.operations()}
    records |= {name: part.SUBJECT for name, part in _PARTS.items()}
    if wanted is None:
        return list(records.values())
    unknown = [name for name in wanted if name not in records]
    if unknown:
        raise scanfield.ArgumentError(f"unknown operation {unknown[0]!r}; known are {', '.join(records)}")
    return [records[name] for name in dict.fromkeys(wanted)]


def cases(records: Iterable[Record], *, full: bool = False) -> list[tuple[Record, draws.Case]]:
    """Every case of these operations; `full` adds the adversarial ones."""
    regimes = draws.FULL if full else draws.QUICK
    found: list[tuple[Record, draws.Case]] = []
    for record in records:
        if isinstance(record, agree_pinn.Subject):
            found += [(record, case) for case in _PARTS[record.name].cases(full=full)]
        else:
            found += [(record, case) for case in draws.cases(record, _function(record), regimes)]
    return found


def compare(
    records: Iterable[Record],
    places: list[Place],
    *,
    full: bool = False,
    everything: bool = True,
    done: Callable[[str], None] = lambda words: None,
) -> Report:
    """Run the operations in float64 and float32 and compare every pair of runs; `done` hears of each case.

    Without `everything`, a place that compiles for each new shape or builds a graph with a node for each
    token gets a selection of the cases, which the report tells.
    """
    return compare_cases(cases(records, full=full), places, everything=everything, done=done)


def compare_cases(
    chosen: Iterable[tuple[Record, draws.Case]],
    places: list[Place],
    *,
    everything: bool = True,
    done: Callable[[str], None] = lambda words: None,
) -> Report:
    """`compare` on some of the cases."""
    report = Report()
    for record, case in chosen:
        exact: dict[Run, Arrays] = {}
        for dtype in ("float64", "float32"):
            here = [place for place in places if dtype in place.dtypes]
            if not everything:
                taken = [place for place in here if _is_selected(place, record, case, dtype)]
                report.selected |= {str(place) for place in here if place not in taken}
                here = taken
            results = _results(record, case, dtype, here, report)
            report.runs.setdefault(record.name, set()).update(results)
            own = _own_errors(exact, results) if dtype == "float32" else {}
            _compare_case(record, case, dtype, results, own, report)
            exact = results
        done(f"{record.name}, {case.regime.name}")
    return report


def _is_selected(place: Place, record: Record, case: draws.Case, dtype: str) -> bool:
    """Whether a slow place gets this case: implementations are of base operations, so these get more."""
    if place.pace == "ready":
        return True
    if isinstance(record, agree_pinn.Subject):
        first = case.regime.name == _PARTS[record.name].cases(full=False)[0].regime.name
        return place.pace == "compiles" and first and dtype == "float32"
    first = case.regime is draws.QUICK[0]
    if isinstance(record, Derived):
        return place.pace == "compiles" and first and dtype == "float32"
    return (place.pace == "compiles" and first) or (dtype == "float32" and (first or case.regime.packed))


# ------------------------------------------------------------------------------------------------------------
# running


def _results(
    record: Record, case: draws.Case, dtype: str, places: list[Place], report: Report
) -> dict[Run, Arrays]:
    results: dict[Run, Arrays] = {}
    for place in places:
        with place.scope():
            arrays = {name: place.array(_narrow(values, dtype)) for name, values in case.arrays.items()}
            token = {name: place.array(_narrow(values, dtype)) for name, values in (case.token or {}).items()}
            for candidate in _candidates(record, arrays, case.options, place):
                # What compiles for seconds at each new kind of call does so once: float64 in its first regime only.
                if dtype == "float64" and case.regime is not draws.QUICK[0] and candidate in _by_name():
                    continue
                run = Run(str(place), candidate)
                found: Arrays = {}
                with scanfield.use(method=candidate):
                    verbs = _PARTS[record.name].VERBS if isinstance(record, agree_pinn.Subject) else _VERBS
                    for verb, take in verbs.items():
                        if verb == "step" and not token:
                            continue
                        # The backward again, with some of its gradients unwanted: one regime of each operation.
                        if verb == "relevance" and case.regime is not draws.QUICK[0]:
                            continue
                        try:
                            taken = take(record, arrays, token, case.options, place)
                            # Here too it may raise: some libraries compute when they are asked for numbers.
                            found |= {name: place.numpy(array) for name, array in taken.items()}
                        except BackendError as error:  # it declines, or has no such verb: it says so in words
                            report.declined.setdefault((run, str(error)), set()).add(record.name)
                        # Whatever else a candidate raises is a finding about that candidate, not the end of
                        # the check.
                        except Exception as error:
                            words = f"{type(error).__name__}: {error}"
                            crash = Crash(run, record.name, verb, words)
                            report.crashes.setdefault(crash, []).append(f"{dtype} {case.regime.name}")
                if found:
                    results[run] = found
    return results


def _candidates(
    record: Record, arrays: Mapping[str, Any], options: Mapping[str, Any], place: Place
) -> list[str]:
    if isinstance(record, agree_pinn.Subject):
        here: list[str] = _PARTS[record.name].candidates(place, arrays, options)
        return here
    told = scanfield.explain(_function(record), **arrays, **options)
    names = list(dict.fromkeys(verdict.candidate for verdict in told.verdicts))
    # What runs only when it is asked for may compile for seconds at every new shape: the operation that this one is
    # derived from stands for it.
    return [name for name in names if name not in _by_name()] if isinstance(record, Derived) else names


def _by_name() -> set[str]:
    """The candidates that run only when they are asked for."""
    return {
        candidate.name
        for manifest in dispatch.manifests()
        for candidate in manifest.candidates
        if not candidate.default
    }


def _function(record: Operation) -> Any:
    return getattr(scanfield, record.name)


def _narrow(values: Array, dtype: str) -> Array:
    if values.dtype.kind == "c":
        dtype = {"float32": "complex64", "float64": "complex128"}[dtype]
    # Through float32 in any case, so that both dtypes have the same inputs.
    narrow = values.astype("complex64" if values.dtype.kind == "c" else "float32")
    return narrow.astype(dtype)


def _whole(record: Operation, arrays: Any, token: Any, options: Any, place: Place) -> dict[str, Any]:
    result = _function(record)(**arrays, **options)
    return {"output": result.output, "final_state": result.final_state}


def _gradients(record: Operation, arrays: Any, token: Any, options: Any, place: Place) -> dict[str, Any]:
    result, pullback = scanfield.vjp(_function(record), **arrays, **options)
    cotangents = [_cotangent(place.numpy(array), i) for i, array in enumerate(result)]
    gradients = pullback(*(place.array(cotangent) for cotangent in cotangents))
    return {f"d_{name}": gradient for name, gradient in gradients.items()}


def _cotangent(like: Array, seed: int) -> Array:
    rng = numpy.random.default_rng(seed)
    values = rng.standard_normal(like.shape)
    if like.dtype.kind == "c":
        values = values + 1j * rng.standard_normal(like.shape)
    # Rounded to float32 for the same reason as the inputs.
    return values.astype("complex64" if like.dtype.kind == "c" else "float32").astype(like.dtype)


def _step(record: Operation, arrays: Any, token: Any, options: Any, place: Place) -> dict[str, Any]:
    function = _function(record)
    state = next(
        (arrays[entry.name] for entry in record.inputs if entry.role == "state" and entry.name in arrays),
        None,
    )
    options = {name: value for name, value in options.items() if name != "chunk_size"}
    output, state = function.step(state, **token, **options)
    return {"step's output": output, "step's state": state}


def _summary(record: Operation, arrays: Any, token: Any, options: Any, place: Place) -> dict[str, Any]:
    states = {entry.name for entry in record.inputs if entry.role == "state"}
    stateless = {name: array for name, array in arrays.items() if name not in states}
    made = scanfield.summarise(_function(record), **stateless, **options)
    return {"summary's transition": made.transition, "summary's state": made.state}


def _relevance(record: Operation, arrays: Any, token: Any, options: Any, place: Place) -> dict[str, Any]:
    function = _function(record)
    linear = {name: array for name, array in arrays.items() if name != "z"}  # the gate is its block's
    shape = function(**linear, **options).output.shape
    R = place.array(_narrow(numpy.random.default_rng(2).standard_normal(shape), "float32"))
    # At 1 no small output, which every implementation rounds its own way, is divided by.
    found = scanfield.relevance(function, R, **linear, epsilon=1.0, **options)
    taken = {"relevance": found.value, "relevance of the state": found.initial_state}
    return {name: array for name, array in taken.items() if array is not None}


_VERBS: dict[str, Callable[..., dict[str, Any]]] = {
    "forward": _whole,
    "gradients": _gradients,
    "step": _step,
    "summary": _summary,
    "relevance": _relevance,
}


# ------------------------------------------------------------------------------------------------------------
# comparing


def _own_errors(exact: Mapping[Run, Arrays], single: Mapping[Run, Arrays]) -> dict[str, float]:
    """What float32 costs in this case: array name -> the most that a generic form is off its own float64."""
    errors: dict[str, float] = {}
    for run in single:
        if run in exact and run.candidate.startswith("generic"):
            size = {kind: _largest(exact[run], kind) for kind in (True, False)}
            for name in exact[run].keys() & single[run].keys():
                found = apart(exact[run][name], single[run][name], size[_is_gradient(name)], "float32")[0]
                errors[name] = max(found, errors.get(name, 0.0))
    return errors


def _compare_case(
    record: Record,
    case: draws.Case,
    dtype: str,
    results: Mapping[Run, Arrays],
    own: Mapping[str, float],
    report: Report,
) -> None:
    for left, right in itertools.combinations(results, 2):
        names = sorted(results[left].keys() & results[right].keys())
        if not names:  # one lacks, or raised in, every verb that the other has
            continue
        pair = report.pairs.setdefault((left, right), Pair())
        stated = max(TOLERANCE[dtype], _stated(left.candidate, dtype), _stated(right.candidate, dtype))
        size = {
            kind: max(_largest(results[left], kind), _largest(results[right], kind)) for kind in (True, False)
        }
        for name in names:
            deviation, index, values = apart(
                results[left][name], results[right][name], size[_is_gradient(name)], dtype
            )
            tolerance = max(stated, min(OWN_FACTOR * own.get(name, 0.0), OWN_LIMIT))
            pair.add(
                Worst(
                    deviation / tolerance,
                    deviation,
                    tolerance,
                    record.name,
                    case.regime.name,
                    dtype,
                    name,
                    index,
                    *values,
                )
            )


def _is_gradient(name: str) -> bool:
    return name.startswith("d_")


def _stated(name: str, dtype: str) -> float:
    """The tolerance that a candidate's manifest states."""
    stated = (
        candidate.tolerance.get(dtype, 0.0)
        for manifest in dispatch.manifests()
        for candidate in manifest.candidates
        if candidate.name == name
    )
    return max(stated, default=0.0)


def _largest(arrays: Arrays, gradients: bool) -> float:
    """The largest finite value of all gradients, or of all other arrays."""
    return max(
        (_size(array) for name, array in arrays.items() if _is_gradient(name) == gradients), default=0.0
    )


def _size(array: Array) -> float:
    return float(numpy.max(numpy.abs(array), initial=0.0, where=numpy.isfinite(array)))


def apart(
    left: Array, right: Array, size_of_all: float, dtype: str
) -> tuple[float, tuple[int, ...], tuple[Any, Any]]:
    """The largest difference in units of the largest value, where it is, and both values there.

    An array that is nothing but zeros for one of the two is measured by the largest value of all arrays of
    its kind: there, the other's rounding noise is no disagreement.
    """
    if left.shape != right.shape:
        return numpy.inf, (), (complex(left.size), complex(right.size))
    if left.size == 0:
        return 0.0, (), (0.0, 0.0)
    size = min(_size(left), _size(right)) or size_of_all or 1.0
    # What is smaller than this may have been flushed to zero by hardware that has no subnormal numbers.
    size = max(size, float(numpy.finfo(dtype).tiny) / TOLERANCE[dtype])
    with numpy.errstate(invalid="ignore"):
        apart = numpy.abs(left - right) / size
    same = (left == right) | (numpy.isnan(left) & numpy.isnan(right))
    apart = numpy.where(
        same, 0.0, numpy.where(numpy.isfinite(left) & numpy.isfinite(right), apart, numpy.inf)
    )
    index = tuple(int(i) for i in numpy.unravel_index(int(numpy.argmax(apart)), apart.shape))
    return float(apart[index]), index, (left[index].item(), right[index].item())
