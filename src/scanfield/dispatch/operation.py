"""The records that the dispatcher works with: what an operation is, and what an implementation of it sees.

An ``Operation`` says enough about its inputs (axes, optional or not, which axes may be tied) and its options that
everything a library needs can be derived from it. A ``Call`` is one use of it in canonical form; implementations see
nothing else. A ``Candidate`` is an implementation that a backend offers, described in strings so that reading it
imports nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol

from scanfield.arrays import Array

Role = Literal["sequence", "shared", "state", "index"]
Verb = Literal["forward", "save", "backward", "step", "summarise"]
VERBS: tuple[Verb, ...] = ("forward", "save", "backward", "step", "summarise")


@dataclass(frozen=True)
class Input:
    """One array argument.

    ``layouts`` are strings of axis names, told apart by their rank alone; the first is the canonical one. An axis that
    a layout lacks stands as ``1`` in it: ``("batch time vheads key", "batch time vheads 1")``. ``tied`` names the
    canonical axes that may have size 1 in place of their own. An ``index`` has no gradient.
    """

    name: str
    layouts: tuple[str, ...]
    role: Role = "sequence"
    optional: bool = False
    tied: frozenset[str] = frozenset()
    complex_allowed: bool = False

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The canonical axes."""
        return tuple(self.layouts[0].split())


@dataclass(frozen=True)
class Option:
    """One keyword that is no array: static and hashable."""

    name: str
    type: type
    default: bool | int | float | None


@dataclass(frozen=True, eq=False)
class Operation:
    """A recurrence with an implementation of its own. The registry knows it by ``name``."""

    name: str
    inputs: tuple[Input, ...]
    options: tuple[Option, ...]
    main: str
    """The input that sets the dtype of the output."""
    relevant: str
    """The input that receives relevance."""
    prepare: Callable[..., Prepared]
    generic: Mapping[str, Implementation]
    choose: Callable[[Call], str]
    """The generic form that the size of a call asks for."""
    diagonal: Callable[[Call], bool] = lambda call: True
    """Whether the map of the state over this call's tokens is elementwise."""
    notes: tuple[str, ...] = ()
    """Limits of the generic forms that ``explain`` tells, each behind the form's name."""
    function: str = ""
    output: str = ""
    """The canonical axes of the output. Along one that the state has too nothing meets: it may be cut anywhere."""
    groups: Mapping[str, str] = field(default_factory=dict)
    """Axis -> the larger axis whose elements share it in equal groups, in order: ``{"heads": "vheads"}``."""

    main_index: int = field(init=False)
    """Where the main input stands in ``Call.arrays``."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "main_index", [entry.name for entry in self.inputs].index(self.main))


@dataclass(frozen=True, eq=False)
class Derived:
    """A recurrence that is another one under its paper's own arguments; it has no implementation of its own."""

    name: str
    base: Operation
    inputs: tuple[Input, ...]
    options: tuple[Option, ...]
    main: str
    relevant: str
    prepare: Callable[..., Prepared]
    function: str = ""


Record = Operation | Derived


class Call(NamedTuple):
    """All that an implementation sees: picklable and traceable.

    Arrays stand in the order of the operation's inputs, in canonical layout; an absent one is None, an index is a tuple
    of ints (or an array whose values live on an accelerator). Each ``sequence`` array is in ``compute`` (or its complex
    partner) or in half precision; ``shared`` and ``state`` arrays are in ``compute``.
    """

    operation: str
    arrays: tuple[Any, ...]
    options: tuple[Any, ...]
    compute: str


Grads = Sequence[Array | None]
"""One gradient per input of the call, in canonical shape; None where it was not wanted."""


class Prepared(NamedTuple):
    """A call in canonical form, and the way back to the user's names, shapes and dtypes."""

    call: Call
    output: Callable[[Array], Array]
    state: Callable[[Array], Array]
    cotangents: Callable[[Array | None, Array | None], tuple[Array | None, Array | None]]
    pull: Callable[[Grads, Array | None], dict[str, Array]]
    """From canonical gradients, and the canonical cotangent of the output, to the user's gradients."""
    wanted: Callable[[frozenset[str]], tuple[bool, ...]]
    """Which canonical gradients are needed for these of the user's."""
    stretch: int = 1
    """Canonical tokens to one of the user's."""


class Implementation(Protocol):
    """What runs a call. ``declines`` looks at shapes, dtypes, strides and flags, never at values.

    Verbs are ``forward``, ``save`` with ``backward``, ``step`` and ``summarise``; one that is absent is left to the
    generic code (``save`` and ``backward`` only together, as residuals belong to who made them). Outputs come in the
    dtype of the main array, states in ``call.compute``; all are fresh arrays. One with a method ``notes`` (from a call to
    sentences) tells ``explain`` how it would run that call; one that runs the generic form of the call's size says so
    by ``generic_form = True``, as that form's limits are its own. One with a method ``launcher(call, verb, values, places,
    shaped)`` is asked for a function of a tuple like ``values``, the arguments as the user gives them, that returns what
    the verb does in the user's shapes, or None where a tuple is of another kind: where any type, option, dtype, shape or
    stride differs. ``values[places[i]]`` is ``call.arrays[i]``, perhaps in another shape; ``shaped`` brings output and
    state into the user's shapes. It may return None.
    """

    def declines(self, call: Call, verb: Verb) -> str | None:
        """Why this implementation does not take the call, or None."""

    def forward(self, call: Call) -> tuple[Array, Array]:
        """Output and final state."""


@dataclass(frozen=True)
class Candidate:
    """One implementation that a backend offers, in strings: nothing is imported before its first use."""

    name: str
    operations: tuple[str, ...]
    device: str
    target: str
    """``"module:attribute"``; the attribute is called with the operation's name and returns an Implementation."""
    requires: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ("float32", "float64")
    transforms: frozenset[str] = frozenset()
    tolerance: Mapping[str, float] = field(default_factory=lambda: {"float32": 4e-6, "float64": 1e-12})
    note: str = ""
    default: bool = True


@dataclass(frozen=True)
class Manifest:
    """What a backend package offers for one library. Found by entry points in the group ``scanfield.backends``."""

    library: str
    requires: str
    install: str
    candidates: tuple[Candidate, ...] = ()
    loop: str | None = None
    """``"module:attribute"`` of a function that takes the place of the Python loop over time (see ``loops``)."""
    classes: str | None = None
    """``"module:attribute"`` of a function that is told of each class whose instances hold arrays of this library."""
