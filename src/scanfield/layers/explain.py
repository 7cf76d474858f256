"""Relevance of a whole layer: which rule each part has, and the walk back over what ran.

Between operations travels rho = R / value, so that most of them divide by nothing (MambaLRP, arXiv 2406.07592). What comes
out of an operation other than into its inputs is accounted for: relevance that biases took, and that stabilisers took.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from scanfield.advice import shown
from scanfield.arrays import Array, Namespace, library_of
from scanfield.errors import ArgumentError
from scanfield.keywords import advised_class
from scanfield.layers.tape import Entry, Run, Value, joined
from scanfield.lrp.rules import Epsilon, Passed, Rule, stabilised


class BlockReport(NamedTuple):
    """Where the relevance went, by row of the batch (rows,); one number for a pack.

    ``sum_out`` = ``sum_in`` + ``to_bias`` + ``absorbed`` up to rounding.
    """

    sum_out: Array
    """Relevance that was put in, at the output and at the final state."""
    sum_in: Array
    """Relevance that arrived at x and at the initial state."""
    to_bias: Array
    """What biases took."""
    absorbed: Array
    """What stabilisers took."""

    @property
    def gap(self) -> Array:
        """What none of these explains."""
        return self.sum_out - self.sum_in - self.to_bias - self.absorbed

    def __str__(self) -> str:
        rows = [*zip(self._fields, self, strict=True), ("gap", self.gap)]
        return "\n".join(f"{name:<10}{total(array):>14.6g}" for name, array in rows)


class LayerRelevance(NamedTuple):
    """What ``layer.relevance`` returns."""

    x: Array
    """In the shape of x; of tokens (batch, time) one number each."""
    state: dict[str, Array]
    """Of the state that came in, by name; empty if none did."""
    report: BlockReport


@advised_class
class Composite:
    """Which rule each layer has.

    Parameters
    ----------
    rules : mapping of str or type to Rule, optional
        By dotted name of a layer, or by its class; a rule holds for all in that layer that has a choice. The innermost key
        wins, and a name wins over a class.
    default : Rule
        For every other linear layer, convolution, embedding and scan that has this rule; those that do not have it pass
        relevance on unchanged (``Epsilon(0)``).

    >>> from scanfield.layers import Linear
    >>> from scanfield.lrp.rules import Gamma
    >>> Composite({"in_proj": Gamma(0.5), Linear: Epsilon(1e-3)}).default
    Epsilon(epsilon=0.0, relative=False, bias=True, signed=True)
    """

    def __init__(self, rules: Mapping[str | type, Rule] | None = None, default: Rule | None = None) -> None:
        self.rules = dict(rules or {})
        self.default = Epsilon() if default is None else default
        for key, rule in [*self.rules.items(), ("default", self.default)]:
            if not isinstance(rule, Rule):
                raise ArgumentError(
                    f"rules: {key!r} has {shown(rule)}; allowed are rules, as scanfield.lrp.rules.Epsilon()"
                )

    def resolve(self, layer: Any) -> dict[str, Rule]:
        """The rule of each part that has a choice, by dotted name.

        ArgumentError, before anything runs, for a key that fits no layer and a layer that does not have its rule.
        """
        used: set[str | type] = set()
        found: dict[str, Rule] = {}

        def visit(path: str, part: Any, inherited: Rule | None) -> None:
            key = self._key(path, part)
            rule = inherited
            if key is not None:
                used.add(key)
                rule = self.rules[key]
                if not part.supports(rule):
                    raise ArgumentError(
                        f"rules: {key!r} is a {type(part).__name__}, not all of which has the rule {rule.name!r}; it has "
                        f"{', '.join(_common(part)) or 'none to choose'}"
                    )
            if part.rules:
                found[path] = rule if rule is not None else self.default_of(part.rules)
            for name, child in part.children.items():
                visit(joined(path, name), child, rule)

        visit("", layer, None)
        for key in self.rules:
            if key not in used:
                names = ", ".join(name for name, _ in layer.named_layers() if name)
                raise ArgumentError(f"rules: {key!r} fits no layer; there are {names or 'none'}")
        return found

    def _key(self, path: str, layer: Any) -> str | type | None:
        if path in self.rules:
            return path
        return next((key for key in self.rules if isinstance(key, type) and isinstance(layer, key)), None)

    def default_of(self, names: Sequence[str]) -> Rule:
        """The default for what has rules of these names."""
        return self.default if self.default.name in names else Epsilon()


def _common(layer: Any) -> list[str]:
    lists = [part.rules for _, part in layer.named_layers() if part.rules]
    return [name for name in lists[0] if all(name in other for other in lists)] if lists else []


class Balance(NamedTuple):
    """One operation's balance; sums as in ``BlockReport``."""

    entry: Entry
    sum_out: Array
    sum_in: Array
    to_bias: Array
    absorbed: Array


class Walked(NamedTuple):
    """Relevance of every value by index, and the balance of each operation."""

    values: dict[int, Array]
    balances: list[Balance]
    put: Array
    seeds_absorbed: Array


def walk(
    run: Run,
    seeds: Sequence[tuple[Value, Array | None, float]],
    rules: Mapping[str, Rule],
    composite: Composite,
    epsilon: float,
) -> Walked:
    """Propagate relevance from the seeds (value, R, its stabiliser) to everything that they depend on."""
    xp, apart = run.xp, run.bounds is None
    rho: dict[int, Array] = {}
    extra: dict[int, Array] = {}
    whole: dict[int, Array] = {}
    put = absorbed = None
    for value, R, stabiliser in seeds:
        if R is None:
            continue
        first = stabilised(xp, R, value.array, stabiliser)
        put = plus(put, rows(xp, R, apart))
        absorbed = plus(absorbed, rows(xp, R - value.array * first, apart))
        rho[value.index] = plus(rho.get(value.index), first)
    balances = []
    for entry in reversed(run.entries):
        lost = None
        for value in entry.outputs:
            if value.index in extra:
                into = stabilised(xp, extra[value.index], value.array, epsilon)
                lost = plus(lost, rows(xp, extra[value.index] - value.array * into, apart))
                whole[value.index] = extra.pop(value.index) + value.array * rho.get(value.index, 0)
                rho[value.index] = plus(rho.get(value.index), into)
            elif value.index in rho:
                whole[value.index] = value.array * rho[value.index]
        given = tuple([rho.pop(value.index, None) for value in entry.outputs])
        if all(r is None for r in given):
            continue
        rule = (
            rules.get(entry.path, composite.default_of(entry.function.rules))
            if entry.function.rules
            else None
        )
        passed = entry.function.relevance(xp, entry.saved(xp), given, rule)
        arrived = _spread(entry, passed, rho, extra, xp, apart)
        out: Array = None
        for value in entry.outputs:
            out = plus(out, rows(xp, whole[value.index], apart) if value.index in whole else None)
        nothing = out * 0
        taken = nothing if passed.absorbed is None else rows(xp, passed.absorbed, apart)
        balances.append(
            Balance(
                entry,
                out,
                nothing if arrived is None else arrived,
                nothing if passed.to_bias is None else rows(xp, passed.to_bias, apart),
                taken if lost is None else taken + lost,
            )
        )
    for index, value in ((value.index, value) for value in _leaves(run)):
        if index in rho or index in extra:
            whole[index] = plus(extra.get(index), value.array * rho[index] if index in rho else None)
    return Walked(whole, balances, put, absorbed)


def _spread(
    entry: Entry, passed: Passed, rho: dict[int, Array], extra: dict[int, Array], xp: Namespace, apart: bool
) -> Array | None:
    """Hand on to the inputs; the sum that they receive."""
    arrived = None
    extras = passed.extra or (None,) * len(passed.rho)
    for value, r, e in zip(entry.inputs, passed.rho, extras, strict=False):
        if value is None:
            continue
        if r is not None:
            rho[value.index] = plus(rho.get(value.index), r)
            arrived = plus(arrived, rows(xp, value.array * r, apart))
        if e is not None:
            extra[value.index] = plus(extra.get(value.index), e)
            arrived = plus(arrived, rows(xp, e, apart))
    return arrived


def _leaves(run: Run) -> list[Value]:
    """What came in: x, which was entered first, and the state."""
    inputs = [
        value for entry in run.entries for value in entry.inputs if value is not None and value.index == 0
    ]
    return [*inputs[:1], *run.before.values()]


def report_of(xp: Namespace, walked: Walked, run: Run) -> BlockReport:
    """The balance of a whole walk."""
    arrived, bias, absorbed = None, None, walked.seeds_absorbed
    for value in _leaves(run):
        if value.index in walked.values:
            arrived = plus(arrived, rows(xp, walked.values[value.index], run.bounds is None))
    for balance in walked.balances:
        bias, absorbed = plus(bias, balance.to_bias), absorbed + balance.absorbed
    nothing = walked.put * 0
    return BlockReport(
        walked.put, nothing if arrived is None else arrived, nothing if bias is None else bias, absorbed
    )


def rows(xp: Namespace, array: Array, apart: bool) -> Array:
    """The sum of each row of the batch, or of all."""
    found = xp.sum(array, axis=tuple(range(1, array.ndim))) if array.ndim > 1 else array
    return found if apart else xp.sum(found, keepdims=True)


def plus(left: Array | None, right: Array | None) -> Array:
    """The sum of what is there."""
    if left is None or right is None:
        return right if left is None else left
    return left + right


def total(array: Array) -> float:
    """The sum as a Python number."""
    xp = library_of(array, "report").namespace
    return float(xp.sum(array))
