"""``lrp.explain`` for ``layers.LanguageModel``: one walk back from the logits of one position.

What the question does not need is not computed: tokens behind the position, the last norm and the logits of other
positions, and, where a token is asked for, other tokens' logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

import numpy

from scanfield.advice import shown
from scanfield.arrays import (
    REAL,
    Array,
    Namespace,
    cast,
    check_same_library,
    device_of,
    dtype_name,
    library_of,
)
from scanfield.errors import ArgumentError, DtypeError, ShapeError
from scanfield.layers.checkpoint import host
from scanfield.layers.explain import BlockReport, Composite, walk
from scanfield.layers.language_model import LanguageModel
from scanfield.layers.layer import Layer
from scanfield.layers.linear import Matrix
from scanfield.layers.tape import Function, Run, Saved, Value
from scanfield.lrp.rules import Epsilon, Passed, Rule
from scanfield.lrp.tokens import TokenRelevance
from scanfield.scans.canonical import quiet


def explain(
    model: Any,
    input_ids: Array,
    target: Any,
    *,
    position: Any,
    attention_mask: Array | None,
    rules: Composite | Rule | None,
    epsilon: Any,
) -> TokenRelevance:
    """As ``scanfield.lrp.explain``."""
    if not isinstance(model, LanguageModel):
        raise ArgumentError(
            f"model: {type(model).__name__}; of scanfield's own layers LanguageModel is explained, others have relevance()"
        )
    if isinstance(epsilon, bool) or not isinstance(epsilon, int | float) or not 0 <= epsilon < inf:
        raise ArgumentError(f"epsilon: {shown(epsilon)}; allowed is a finite number of at least 0")
    composite = rules if isinstance(rules, Composite) else Composite(default=rules)
    resolved = composite.resolve(model)  # an error of the rules comes before anything runs
    parameters = model.named_parameters()
    vocabulary = parameters["embedding.weight"].shape[0]
    library = check_same_library(
        [("input_ids", input_ids), *parameters.items()], peers=True, held=("model", parameters), tokens=True
    )
    if input_ids.ndim != 2 or 0 in input_ids.shape:
        raise ShapeError(
            f"input_ids: shape {tuple(input_ids.shape)}; (batch, time) with at least one token is expected"
        )
    batch = input_ids.shape[0]
    asked = _Target(library.namespace, target, batch, vocabulary, parameters["embedding.weight"])
    # A stabiliser relative to all logits has to see them all.
    rule = resolved.get("lm_head", composite.default)
    asked.all_logits = isinstance(rule, Epsilon) and rule.relative
    spans = _spans(attention_mask, *input_ids.shape)
    places = _integers("position", position, batch)
    ask = _Asking(model, composite, float(epsilon), input_ids, asked)
    with quiet(library.name):
        if len(set(spans)) == 1:
            return ask(range(batch), spans[0], places)
        rows = [ask(range(b, b + 1), spans[b], places[b : b + 1]) for b in range(batch)]
        return _joined(library.namespace, rows)


@dataclass(frozen=True)
class _Asking:
    model: LanguageModel
    composite: Composite
    epsilon: float
    ids: Array
    target: _Target

    def __call__(self, rows: range, span: tuple[int, int], places: tuple[int, ...]) -> TokenRelevance:
        """Some rows of the batch, whose tokens stand in one span."""
        start, stop = span
        ends = []
        for place in places:
            end = stop + place if place < 0 else start + place
            if not start <= end < stop:
                raise ArgumentError(
                    f"position: {place}; a row has {stop - start} tokens, allowed are {start - stop} to {stop - start - 1}"
                )
            ends.append(end)
        last = max(ends)
        ids = self.ids[rows.start : rows.stop, start : last + 1]
        head = _Head(self.model, tuple(end - start for end in ends), self.target, rows)
        run, x = head.start(ids, None, None, keep=True, save=True)
        value = head.through(run, x)
        # R / value is 1: what is asked is divided by nothing.
        walked = walk(
            run, [(value, value.array, 0.0)], self.composite.resolve(head), self.composite, self.epsilon
        )
        found, xp = head.relevances(run, x, walked), run.xp
        parts = [xp.zeros((len(rows), n), dtype=run.dtype, device=device_of(ids)) if n else None
                 for n in (start, self.ids.shape[1] - last - 1)]  # fmt: skip
        tokens = [part for part in (parts[0], found.x, parts[1]) if part is not None]
        whole = tokens[0] if len(tokens) == 1 else xp.concat(tokens, axis=1)
        return TokenRelevance(whole, xp.squeeze(value.array, axis=1), head.chosen, found.report)


class _Head(Layer):
    """A language model up to one number a row."""

    tokens = True

    def __init__(
        self, model: LanguageModel, positions: tuple[int, ...], target: _Target, rows: range
    ) -> None:
        super().__init__(children={"": model})  # an empty name: all names in the model stay
        self.positions, self.target, self.rows = positions, target, rows

    def define(self, run: Run, x: Value) -> Value:
        """The weighted sum of the logits, (batch, 1)."""
        model = self.children[""]
        for name in ("embedding", "layers"):
            x = run.layer(name, model.children[name], x)
        x = run.one(At(self.positions), x)
        x = run.layer("norm_f", model.children["norm_f"], x)
        place = "embedding" if model.tied else "lm_head"
        weight = run.parameter(f"{place}.weight")
        picked = self.target.picked(self.rows)
        if picked is not None:
            weight = run.enter(run.xp.take(weight.array, picked, axis=0), False)
        run.path = "" if model.tied else "lm_head"
        logits = run.one(Matrix(), x, weight, None)
        run.path = ""
        weights, self.chosen = self.target.weights(logits.array, self.rows, picked)
        return run.one(Weighted(), logits, run.enter(weights, False))


@dataclass(frozen=True)
class At(Function):
    """(batch, time, width) -> (batch, width): one position of each row."""

    positions: tuple[int, ...]

    kind = "shape"

    def forward(self, xp: Namespace, *inputs: Any) -> tuple[Array, ...]:
        """The rows of those positions."""
        (x,) = inputs
        if len(set(self.positions)) == 1:
            return (x[:, self.positions[0], :],)
        return (xp.stack([x[row, place, :] for row, place in enumerate(self.positions)], axis=0),)

    def backward(
        self, xp: Namespace, saved: Saved, d_outputs: tuple[Any, ...], wanted: tuple[bool, ...]
    ) -> tuple[Array | None, ...]:
        """In its place, zeros elsewhere."""
        (x,), (d,) = saved.inputs, d_outputs
        time = xp.arange(x.shape[1], device=device_of(x))
        places = xp.asarray(self.positions, dtype=time.dtype, device=device_of(x))
        here = xp.expand_dims(xp.expand_dims(time, axis=0) == xp.expand_dims(places, axis=1), axis=2)
        return (xp.where(here, xp.expand_dims(d, axis=1), xp.zeros_like(x)),)


@dataclass(frozen=True)
class Weighted(Function):
    """Logits (batch, n) and constant weights of the same shape -> their sum of products (batch, 1)."""

    kind = "linear"

    def forward(self, xp: Namespace, *inputs: Any) -> tuple[Array, ...]:
        """The sum."""
        logits, weights = inputs
        return (xp.sum(logits * weights, axis=1, keepdims=True),)

    def backward(
        self, xp: Namespace, saved: Saved, d_outputs: tuple[Any, ...], wanted: tuple[bool, ...]
    ) -> tuple[Array | None, ...]:
        """The weights."""
        return d_outputs[0] * saved.inputs[1], None

    def relevance(self, xp: Namespace, saved: Saved, rho: tuple[Any, ...], rule: Rule | None) -> Passed:
        """Linear, without a bias: the gradient."""
        return Passed(self.backward(xp, saved, rho, (True, False)))


class _Target:
    """What was asked, by row: nothing, a token, or weights of all tokens."""

    def __init__(self, xp: Namespace, target: Any, batch: int, vocabulary: int, like: Array) -> None:
        self.xp, self.vocabulary, self.given, self.like = xp, vocabulary, None, like
        self.ids: tuple[int, ...] | None = None
        self.all_logits = False
        if target is None:
            return
        if not hasattr(target, "dtype") or dtype_name(target.dtype).startswith(("int", "uint")):
            self.ids = _integers("target", target, batch)
            for token in self.ids:
                if not 0 <= token < vocabulary:
                    raise ArgumentError(f"target: token {token}; allowed are 0 to {vocabulary - 1}")
            return
        check_same_library([("the parameters", like), ("target", target)])
        if dtype_name(target.dtype) not in REAL:
            raise DtypeError(
                f"target: dtype {dtype_name(target.dtype)}; allowed are integers (tokens), or real floats (weights)"
            )
        if tuple(target.shape) not in ((vocabulary,), (batch, vocabulary)):
            raise ShapeError(
                f"target: shape {tuple(target.shape)}; weights are ({vocabulary},) or {(batch, vocabulary)}"
            )
        self.given = xp.broadcast_to(target, (batch, vocabulary))

    def picked(self, rows: range) -> Array | None:
        """The tokens whose logits are needed, as indices; None for all."""
        if self.ids is None or self.all_logits:
            return None
        own = sorted({self.ids[row] for row in rows})
        return self.xp.asarray(own, dtype=self.xp.int64, device=device_of(self.like))

    def weights(self, logits: Array, rows: range, picked: Array | None) -> tuple[Array, Array]:
        """Weights of the logits there are, and what was chosen, by row."""
        xp = self.xp
        if self.given is not None:
            given = cast(xp, self.given[rows.start : rows.stop, :], logits.dtype)
            return given, given
        if self.ids is None:
            chosen = xp.argmax(logits, axis=1)
        else:
            chosen = xp.asarray([self.ids[row] for row in rows], dtype=xp.int64, device=device_of(self.like))
        names = (
            xp.arange(self.vocabulary, dtype=chosen.dtype, device=device_of(logits))
            if picked is None
            else xp.astype(picked, chosen.dtype)
        )
        hot = xp.expand_dims(names, axis=0) == xp.expand_dims(chosen, axis=1)
        return xp.astype(hot, logits.dtype), chosen


def _integers(name: str, given: Any, batch: int) -> tuple[int, ...]:
    """One integer for each row, from one for all or one each."""
    if hasattr(given, "dtype"):
        if not dtype_name(given.dtype).startswith(("int", "uint")):
            raise DtypeError(f"{name}: dtype {dtype_name(given.dtype)}; integers are expected")
        given = (given if isinstance(given, numpy.generic) else host(given)).tolist()
    numbers = [given] * batch if not isinstance(given, list | tuple | range) else list(given)
    if len(numbers) != batch or any(isinstance(n, bool) or not isinstance(n, int) for n in numbers):
        raise ArgumentError(
            f"{name}: {shown(given)}; allowed is an integer, or one for each of the {batch} rows"
        )
    return tuple(numbers)


def _spans(mask: Any, batch: int, time: int) -> list[tuple[int, int]]:
    """Where the tokens of each row begin and end."""
    if mask is None:
        return [(0, time)] * batch
    library_of(mask, "attention_mask")
    if tuple(mask.shape) != (batch, time):
        raise ShapeError(f"attention_mask: shape {tuple(mask.shape)}, must be {(batch, time)}, as input_ids")
    spans = []
    for number, row in enumerate(host(mask).tolist()):
        there = [i for i, word in enumerate(row) if word]
        if not there or there[-1] - there[0] + 1 != len(there):
            raise ArgumentError(
                f"attention_mask: row {number} has {'no token' if not there else 'padding between its tokens'}; allowed is "
                "padding before the tokens or behind them"
            )
        spans.append((there[0], there[-1] + 1))
    return spans


def _joined(xp: Namespace, rows: list[TokenRelevance]) -> TokenRelevance:
    """Rows of a batch that were explained one by one."""

    def column(parts: list[Array]) -> Array:
        return xp.concat(parts, axis=0)

    report = BlockReport(*(column(list(parts)) for parts in zip(*(row.report for row in rows), strict=True)))
    return TokenRelevance(
        column([row.tokens for row in rows]),
        column([row.value for row in rows]),
        column([row.target for row in rows]),
        report,
    )
