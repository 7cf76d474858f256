"""Seeded inputs for every operation, made from its record.

An operation that a plugin brings needs no entry here.

Sizes come from the names of axes, values from the names of inputs. A *regime* is one way in which real calls
differ from a plain one, such as strong decay, packed sequences or gates a head.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy

from scanfield.dispatch import Input, Record

# Sizes that meet in one array differ (only householders equals batch), so that a swapped axis cannot hide; vheads
# is a multiple of heads and channels one of groups. Time is short, as each token costs in some libraries, and prime.
SIZES = {
    "batch": 2,
    "time": 11,
    "heads": 3,
    "vheads": 6,
    "key": 5,
    "value": 4,
    "channels": 6,
    "groups": 3,
    "state": 7,
    "householders": 2,
}
_OTHER_SIZE = 3

# An empty sequence, one of a single token, and one that ends with the pack.
_PACKS = (0, 0, 4, 5, 11)


@dataclass(frozen=True)
class Regime:
    """How inputs are drawn, and the options of the call."""

    name: str
    layout: int = 0
    """Which of an input's layouts to use; the last one where it has fewer."""
    optional: bool = True
    """Whether inputs that may be absent are given."""
    packed: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    change: Callable[[str, numpy.ndarray, numpy.random.Generator], numpy.ndarray] | None = None
    """The name of an input and its plain values -> the values of this regime."""
    needs: frozenset[str] = frozenset()
    """The regime is for operations that have one of these inputs; for all where it is empty."""
    complex: bool = False


@dataclass(frozen=True)
class Case:
    """One call to compare: arrays by name in NumPy, options, and the time axis of each array."""

    regime: Regime
    arrays: dict[str, numpy.ndarray]
    options: dict[str, Any]
    token: dict[str, numpy.ndarray] | None
    """The arrays of the first token, for `step`; None where the regime has no single token."""


# ------------------------------------------------------------------------------------------------------------
# regimes


def _strong(name: str, values: numpy.ndarray, rng: numpy.random.Generator) -> numpy.ndarray:
    if name == "log_decay":
        return rng.uniform(-200.0, 0.0, values.shape)
    if name in ("A", "a"):
        return values * rng.choice([1e-3, 1.0, 100.0], values.shape) if name == "A" else values * 1e-6
    return values


def _resets(name: str, values: numpy.ndarray, rng: numpy.random.Generator) -> numpy.ndarray:
    if name == "log_decay":
        return numpy.where(rng.random(values.shape) < 0.2, -numpy.inf, values)
    return numpy.where(rng.random(values.shape) < 0.2, 0.0, values) if name == "a" else values


def _zeros(name: str, values: numpy.ndarray, rng: numpy.random.Generator) -> numpy.ndarray:
    """Exact zeros in a third of everything: no decay, no step, keys and values that are not there."""
    return numpy.where(rng.random(values.shape) < 1 / 3, 0.0, values)


QUICK = (
    Regime("all inputs"),
    Regime("required inputs only", optional=False),
)
FULL = (
    *QUICK,
    Regime("strong decay", change=_strong, needs=frozenset({"log_decay", "A", "a"})),
    Regime("resets", change=_resets, needs=frozenset({"log_decay", "a"})),
    Regime("exact zeros", change=_zeros),
    Regime("reverse", options={"reverse": True}),
    Regime("packed", packed=True),
    Regime("packed, reverse", packed=True, options={"reverse": True}),
    Regime("other layouts", layout=1),
    Regime("last layouts", layout=9),
    Regime("chunks of 4", options={"chunk_size": 4}),
    Regime("normalised query and key", options={"qk_l2norm": True, "scale": 0.5}),
    Regime("softplus", options={"delta_softplus": True, "dt_softplus": True, "dt_limit": (0.1, 0.8)}),
    Regime("complex", complex=True),
)


# ------------------------------------------------------------------------------------------------------------
# cases


def cases(
    record: Record,
    function: Any,
    regimes: tuple[Regime, ...],
    time: int = SIZES["time"],
    sizes: Mapping[str, int] | None = None,
) -> Iterator[Case]:
    """The cases of one operation, leaving out regimes that would repeat a plain case; `sizes` by names of axes."""
    names, keywords = {entry.name for entry in record.inputs}, inspect.signature(function).parameters
    for regime in regimes:
        options = {name: value for name, value in regime.options.items() if name in keywords}
        if regime.options and not options:
            continue
        if regime.needs and not regime.needs & names:
            continue
        if regime.complex and not any(entry.complex_allowed for entry in record.inputs):
            continue
        if regime.layout and not any(len(entry.layouts) > 1 for entry in record.inputs):
            continue
        if not regime.optional:
            # An array that may be absent and has no default is told to be absent.
            absent = (entry.name for entry in record.inputs if entry.optional)
            options |= {name: None for name in absent if keywords[name].default is inspect.Parameter.empty}
        yield _case(record, regime, options, SIZES | {"time": time} | dict(sizes or {}))


def _case(record: Record, regime: Regime, options: dict[str, Any], sizes: dict[str, int]) -> Case:
    if regime.packed:
        sizes = sizes | {"batch": 1, "sequence": len(_PACKS) - 1}
    arrays: dict[str, numpy.ndarray] = {}
    token: dict[str, numpy.ndarray] | None = {}
    for entry in record.inputs:
        if entry.role == "index" or (entry.optional and not regime.optional):
            continue
        # One stream per input: an input more or less changes no other's values.
        rng = numpy.random.default_rng([len(regime.name), *entry.name.encode(), *record.name.encode()])
        axes = _axes(entry, regime)
        values = _values(entry.name, [sizes.get(axis, _size(axis, sizes)) for axis in axes], rng)
        if regime.complex and entry.complex_allowed:
            values = values + 1j * rng.standard_normal(values.shape) * (0.3 if entry.name == "a" else 1.0)
        if regime.change is not None:
            values = regime.change(entry.name, values, rng)
        arrays[entry.name] = values
        if token is None or entry.role == "state":
            continue
        if entry.role == "sequence":
            # A layout without time is constant over it, and a token's arrays always have their batch axis.
            token = token | {entry.name: values[:, 0]} if "time" in axes else None
        else:
            token[entry.name] = values
    if regime.packed:
        options = options | {"cu_seqlens": _PACKS}
        token = None
    return Case(regime, arrays, options, None if options.get("reverse") else token)


def _axes(entry: Input, regime: Regime) -> list[str]:
    layout = entry.layouts[min(regime.layout, len(entry.layouts) - 1)]
    axes = [axis for axis in layout.split() if axis != "1"]
    if entry.role == "state" and regime.packed:
        axes[0] = "sequence"
    return axes


def _size(axis: str, sizes: Mapping[str, int]) -> int:
    return sizes["batch"] if axis == "sequence" else _OTHER_SIZE


def _values(name: str, shape: list[int], rng: numpy.random.Generator) -> numpy.ndarray:
    if name == "log_decay":
        return rng.uniform(-1.0, -0.01, shape)
    if name in ("delta", "dt"):
        return rng.uniform(0.05, 0.5, shape)
    if name == "A":
        return -rng.uniform(0.3, 2.0, shape)
    if name == "a":
        return rng.uniform(0.5, 1.0, shape)
    if name in ("erase", "write", "beta"):
        return rng.uniform(0.0, 1.0, shape)
    if name in ("delta_bias", "dt_bias"):
        return rng.uniform(-0.03, 0.03, shape)
    values = rng.standard_normal(shape)
    if name in ("key", "erase_key"):  # of length one, as the models have them: longer keys grow without bound
        values = values / numpy.sqrt(numpy.sum(values**2, axis=-1, keepdims=True))
    return values
