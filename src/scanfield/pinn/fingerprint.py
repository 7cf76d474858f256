"""What a training is of, in a few numbers for each array: a checkpoint holds them, so that no other problem goes on from it.

Functions cannot be compared from one process to the next, what they give at the drawn points can. An array a of n numbers
leaves its largest size m = max |a| and sum_j w_j a_j / (m sqrt(n)) for seeded normal w, real and imaginary part. Two that
agree to `_CLOSE` count as one: another machine may round the last digits of a user's function in another way.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from scanfield.pinn.fourier import Embedding
from scanfield.pinn.terms import Term, dependences

__all__ = ["difference", "of_embedding", "of_optimizer", "of_terms"]

_CLOSE = 1e-9
_LENGTHS = ("steps", "warmup")
"""What of a schedule follows from the number of iterations, and may change: a training may go on for longer."""


def of_terms(terms: Sequence[Term]) -> dict[str, dict[str, list[float]]]:
    """Name of each term -> name of each part of it -> its numbers.

    >>> from scanfield import pinn
    >>> problem = pinn.Helmholtz(pinn.Interval(0, 1), 3.0, 1.0)
    >>> list(of_terms(problem.terms(problem.draw(8)))["equation"])
    ['points', 'coefficient of u', 'second derivatives', 'target', 'weight']
    """
    found = {}
    for term in terms:
        parts: dict[str, list[float]] = {}
        for number, piece in enumerate(term.pieces):
            side = f", side {number + 1}" if len(term.pieces) > 1 else ""
            parts |= _numbers(f"points{side}", piece.points)
            parts |= _numbers(f"coefficient of u{side}", piece.value)
            parts |= _numbers(f"first derivatives{side}", piece.first)
            parts |= _numbers(f"second derivatives{side}", piece.second)
        parts |= _numbers("target", term.target) | _numbers("weight", term.weight)
        for dependence in dependences(term):
            for factor in dependence.factors:
                parts |= _numbers(f"factor of {dependence.name}**{dependence.power}", factor)
        found[term.name] = parts
    return found


def of_embedding(embedding: Embedding) -> dict[str, list[float]]:
    """The frequencies that are not trained; those that are belong to the parameters."""
    return {} if embedding.trainable else _numbers("frequencies", embedding.frequencies)


def of_optimizer(optimizer: Any) -> dict[str, Any]:
    """Settings by name; of a schedule those that do not follow from the number of iterations, of another function none."""
    found: dict[str, Any] = {"kind": type(optimizer).__name__}
    for field in dataclasses.fields(optimizer):
        value = getattr(optimizer, field.name)
        if dataclasses.is_dataclass(value):
            inner = of_optimizer(value)
            found[field.name] = {name: inner[name] for name in inner if name not in _LENGTHS}
        elif not callable(value):
            found[field.name] = np.asarray(value).tolist()
    return found


def difference(found: Any, own: Mapping[str, Mapping[str, list[float]]]) -> str:
    """What of `own` is not the same in `found`, which may come from anywhere, in words; "" where all is."""
    if not isinstance(found, dict):
        return "no record of it"
    for name in dict.fromkeys([*own, *found]):
        parts, theirs = own.get(name), found.get(name)
        if parts is None or not isinstance(theirs, dict):
            return f"{name!r:.80}, which is {'there' if parts is None else 'here'} alone"
        for part in dict.fromkeys([*parts, *theirs]):
            if not _agree(theirs.get(part), parts.get(part)):
                return f"{part:.80} of {name!r:.80}"
    return ""


def _agree(theirs: Any, own: list[float] | None) -> bool:
    if own is None or not isinstance(theirs, list) or len(theirs) != len(own):
        return False
    if not all(type(value) is float for value in theirs):
        return False
    size, *sums = own
    return math.isclose(theirs[0], size, rel_tol=_CLOSE) and all(
        math.isclose(a, b, rel_tol=0.0, abs_tol=_CLOSE) for a, b in zip(theirs[1:], sums, strict=True)
    )


def _numbers(name: str, array: Any) -> dict[str, list[float]]:
    """Largest size, real and imaginary sum; nothing where there is no array."""
    if array is None:
        return {}
    flat = np.asarray(array).reshape(-1)
    size = float(np.max(np.abs(flat), initial=0.0))
    if size == 0.0:
        return {name: [0.0, 0.0, 0.0]}
    signs = np.random.default_rng(flat.size).normal(size=flat.size)
    total = complex(np.sum(signs * (flat / size))) / math.sqrt(flat.size)
    return {name: [size, total.real, total.imag]}
