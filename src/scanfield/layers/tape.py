"""What a layer computes through: one list of the operations that ran, for gradients, relevance and inspection alike.

A layer says once what it does, in calls of ``Run``. A plain run keeps nothing. A recording run keeps an ``Entry`` for each
operation, and everything else is a walk over that list: gradients backwards, relevance backwards by other rules, a rerun
with one value replaced forwards. Each operation (``Function``) brings its own hand-derived gradient; there is no autograd.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

from scanfield.arrays import Array, Namespace, cast
from scanfield.errors import ScanfieldError, StateError
from scanfield.lrp.rules import Passed, Rule

Kind = Literal[
    "linear",
    "embedding",
    "convolution",
    "norm",
    "activation",
    "gate",
    "scan",
    "sum",
    "split",
    "shape",
    "scale",
]
"""The closed list of operations. ``gate`` multiplies two values, ``shape`` renames axes, ``scale`` takes a constant."""


class Saved(NamedTuple):
    """An operation as it ran: what its gradient may use."""

    inputs: tuple[Any, ...]
    outputs: tuple[Array, ...]
    residuals: Any


class Function(ABC):
    """One operation: its forward, its gradient and its rule of relevance. Instances hold options, never arrays of a run."""

    kind: ClassVar[Kind]
    rules: ClassVar[tuple[str, ...]] = ()
    """Names of the rules that can be chosen for it; empty for an operation with one rule of its own."""

    @abstractmethod
    def forward(self, xp: Namespace, *inputs: Any) -> tuple[Array, ...]:
        """The outputs."""

    def save(self, xp: Namespace, *inputs: Any) -> tuple[tuple[Array, ...], Any]:
        """The outputs, and what the gradient needs beside inputs and outputs."""
        return self.forward(xp, *inputs), None

    @abstractmethod
    def backward(
        self, xp: Namespace, saved: Saved, d_outputs: tuple[Any, ...], wanted: tuple[bool, ...]
    ) -> tuple[Array | None, ...]:
        """The gradient of each wanted input; a cotangent that is None is zero, at least one is not."""

    def relevance(self, xp: Namespace, saved: Saved, rho: tuple[Any, ...], rule: Rule | None) -> Passed:
        """The modified gradient of each input; for a linear operation without parameters the gradient itself."""
        inputs = saved.inputs
        return Passed(self.backward(xp, saved, rho, tuple(x is not None for x in inputs)))


class Value:
    """An array on its way through a layer, and its place in the record."""

    __slots__ = ("array", "index", "needs")

    def __init__(self, array: Array, index: int, needs: bool) -> None:
        self.array, self.index, self.needs = array, index, needs


@dataclass
class Entry:
    """One operation that ran: in which layer, on what, with which result."""

    function: Function
    path: str
    layer: Any
    inputs: tuple[Value | None, ...]
    outputs: tuple[Value, ...]
    residuals: Any
    complete: bool
    """Whether ``residuals`` were saved in the forward; if not, the backward makes them."""

    def saved(self, xp: Namespace) -> Saved:
        """The operation as it ran."""
        inputs = tuple([None if value is None else value.array for value in self.inputs])
        if not self.complete:
            _, self.residuals = self.function.save(xp, *inputs)
            self.complete = True
        return Saved(inputs, tuple([value.array for value in self.outputs]), self.residuals)


@dataclass
class Run:
    """One pass through a layer.

    ``keep`` records; ``save`` also keeps residuals at once, which costs memory and spares the backward a forward.
    """

    xp: Namespace
    dtype: Any
    """The dtype in which everything is computed: float32 at least."""
    parameters: Mapping[str, Array]
    state: Mapping[str, Array] | None
    bounds: tuple[int, ...] | None
    trainable: frozenset[str] = frozenset()
    keep: bool = False
    save: bool = False
    single: bool = False
    """A run of one token, with a time axis of 1."""
    path: str = ""
    layers: list[Any] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    carried: dict[str, Value] = field(default_factory=dict)
    """The new state by name."""
    leaves: dict[str, Value] = field(default_factory=dict)
    """Parameters that were used, by name."""
    before: dict[str, Value] = field(default_factory=dict)
    """The state that came in, by name."""
    count: int = 0

    def enter(self, array: Array, needs: bool) -> Value:
        """An array that no operation of this run made."""
        self.count += 1
        return Value(array, self.count - 1, needs)

    def many(self, function: Function, *inputs: Value | None) -> tuple[Value, ...]:
        """Run an operation."""
        arrays = [None if value is None else value.array for value in inputs]
        residuals = None
        if self.save:
            outputs, residuals = function.save(self.xp, *arrays)
        else:
            outputs = function.forward(self.xp, *arrays)
        needs = self.keep and any(value is not None and value.needs for value in inputs)
        made = tuple([self.enter(array, needs) for array in outputs])
        if self.keep:
            layer = self.layers[-1] if self.layers else None
            self.entries.append(Entry(function, self.path, layer, inputs, made, residuals, self.save))
        return made

    def one(self, function: Function, *inputs: Value | None) -> Value:
        """Run an operation that has one output."""
        return self.many(function, *inputs)[0]

    def layer(self, name: str, layer: Any, x: Value) -> Value:
        """Run a layer inside this one, under its name."""
        before = self.path
        self.path = joined(before, name)
        self.layers.append(layer)
        try:
            made: Value = layer.define(self, x)
            return made
        except ScanfieldError as error:
            if not hasattr(error, "__notes__"):  # the innermost layer's is the one that tells
                error.add_note(f"in layer {self.path!r}, a {type(layer).__name__}")
            raise
        finally:
            self.layers.pop()
            self.path = before

    def parameter(self, name: str) -> Value:
        """A parameter of the layer that runs, in the dtype of the computation; the same value at each use."""
        full = joined(self.path, name)
        if full not in self.leaves:
            array = cast(self.xp, self.parameters[full], self.dtype)
            self.leaves[full] = self.enter(array, full in self.trainable)
        return self.leaves[full]

    def arriving(self, name: str) -> Value | None:
        """The state that came in for the layer that runs; None for a start from nothing."""
        full = joined(self.path, name)
        if self.state is None:
            return None
        if full not in self.before:
            self.before[full] = self.enter(self.state[full], True)
        return self.before[full]

    def leaving(self, name: str, value: Value) -> None:
        """Hand the state of the layer that runs to whoever goes on."""
        self.carried[joined(self.path, name)] = value


def joined(path: str, name: str) -> str:
    """A dotted name; a layer with an empty name is transparent."""
    return f"{path}.{name}" if path and name else path or name


def walk_back(
    xp: Namespace,
    entries: Sequence[Entry],
    seeds: Sequence[tuple[Value, Array | None]],
    *,
    keep: bool = False,
) -> dict[int, Array]:
    """The gradient of every value that the seeds depend on, by index; of the leaves alone unless ``keep``."""
    found: dict[int, Array] = {}
    for value, array in seeds:
        if array is not None:
            found[value.index] = found[value.index] + array if value.index in found else array
    for entry in reversed(entries):
        take = found.get if keep else found.pop
        d_outputs = tuple([take(value.index, None) for value in entry.outputs])
        wanted = tuple([value is not None and value.needs for value in entry.inputs])
        if not any(wanted) or all(d is None for d in d_outputs):
            continue
        grads = entry.function.backward(xp, entry.saved(xp), d_outputs, wanted)
        for into, grad in zip(entry.inputs, grads, strict=True):
            if into is not None and into.needs and grad is not None:
                before = found.get(into.index)
                found[into.index] = grad if before is None else before + grad
    return found


def rerun(xp: Namespace, entries: Sequence[Entry], patched: Mapping[int, Array]) -> dict[int, Array]:
    """All values that change when some are replaced, by index; what does not depend on those is not run."""
    changed = dict(patched)
    for entry in entries:
        if not any(value is not None and value.index in changed for value in entry.inputs):
            continue
        arrays = [None if value is None else changed.get(value.index, value.array) for value in entry.inputs]
        for value, array in zip(entry.outputs, entry.function.forward(xp, *arrays), strict=True):
            changed[value.index] = patched.get(value.index, array)
    return changed


def check_unchanged(before: Mapping[str, Array], now: Mapping[str, Array], what: str) -> None:
    """StateError if a parameter is another array than it was in the forward."""
    for name, array in before.items():
        if now[name] is not array:
            raise StateError(f"{what}: parameter {name!r} changed after the forward; run the forward again")
