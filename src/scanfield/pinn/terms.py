"""The terms of a loss: every one is linear in the jet of the field.

| symbol | name | shape | meaning |
|---|---|---|---|
| u | field | (n,) | the network's output: real for one output, out0 + i out1 for two |
| x | `Piece.points` | (n, d) | where the field is evaluated |
| c0 | `Piece.value` | (n,) | coefficient of u, real or complex |
| b | `Piece.first` | (n, d) | coefficients of the first derivatives u_i |
| a | `Piece.second` | (n, d) or (n, 1) | coefficients of the second derivatives u_ii; (n, 1): of the Laplacian |
| t | `Term.target` | (n,) | what the sum should be |
| q, k | `Dependence` | (n,), a number | a coefficient of u that follows an unknown: q(x) k^power |

    r_j = sum over pieces [ (c0 + q k^power) u + sum_i b_i u_i + sum_i a_i u_ii ](x_pj) - t_j
    loss = sum over terms weight * mean_j |r_j|^2

Two pieces couple two sets of points: the ends of a period, the sides of an interface.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple

from scanfield.arrays import COMPLEX_OF, Array, Namespace, check_same_library, dtype_name, is_complex
from scanfield.errors import ArgumentError, DtypeError, ShapeError

WAVENUMBER = "wavenumber"


class Piece(NamedTuple):
    """Points, and the coefficients of the field's jet there; None is a coefficient that is zero."""

    points: Array
    value: Array | None = None
    first: Array | None = None
    second: Array | None = None


class Dependence(NamedTuple):
    """A coefficient of u that follows an unknown number: factor * unknown**power is added to ``value``."""

    factors: tuple[Array | None, ...]
    """One (n,) array for each piece of the term, or None."""
    power: int = 2
    name: str = WAVENUMBER


class Term(NamedTuple):
    """One residual and its weight in the loss."""

    name: str
    pieces: tuple[Piece, ...]
    target: Array | None = None
    weight: float = 1.0
    wavenumber: Dependence | tuple[Dependence, ...] | None = None


Pair = tuple[Array | None, Array | None]
"""Real and imaginary part of a coefficient, each (n,); None where it is zero."""


class Operator(NamedTuple):
    """A piece as the sweeps take it."""

    points: Array
    coefficients: tuple[Pair | None, ...]
    """One for each block of the jet: value, d first derivatives, channels."""
    channels: tuple[Array | None, ...]
    """Weights a of each sum_i a_i u_ii, (n, d); None: all 1."""
    factors: tuple[Pair | None, ...]
    """The piece's factor in each of the term's dependences."""


class Residual(NamedTuple):
    """A term as the sweeps take it: arrays only, so that compilers can trace it."""

    operators: tuple[Operator, ...]
    target: Pair


class Shape(NamedTuple):
    """What of a term is no array: hashable."""

    name: str
    points: int
    parts: int
    """Real rows for a point: 2 where the residual is complex."""
    unknowns: tuple[tuple[str, int], ...]
    """Name and power of each dependence."""


class PreparedTerms(NamedTuple):
    """Checked terms, to be used for as many steps as they stay the same."""

    shapes: tuple[Shape, ...]
    residuals: tuple[Residual, ...]
    weights: tuple[float, ...]
    outputs: int
    dtype: str


def prepare_terms(terms: Sequence[Term] | PreparedTerms, network: Any) -> PreparedTerms:
    """Check terms against a network and bring them into the form that the sweeps take.

    A loop that evaluates the same terms again may do this once and pass the result in their place.

    Parameters
    ----------
    terms : sequence of Term
        At least one; arrays of the network's library, device and precision (complex64 beside float32).
    network : Network
        Its dimensions, outputs and dtype decide what fits.

    Returns
    -------
    PreparedTerms
        Has ``weights``; ``prepared._replace(weights=...)`` reweights without preparing anew.

    Raises
    ------
    ArgumentError
        No term, a term without a piece or a coefficient, two terms of one name.
    ShapeError, DtypeError, BackendError, DeviceError
        An array that does not fit the network, by its name.
    """
    if isinstance(terms, PreparedTerms):
        if (terms.outputs, terms.dtype) != (network.outputs, network.dtype):
            raise ArgumentError(
                f"terms: prepared for {terms.outputs} outputs in {terms.dtype}, the network has "
                f"{network.outputs} in {network.dtype}; prepare them again"
            )
        return terms
    if isinstance(terms, Term):
        raise ArgumentError("terms: expected a sequence of terms, came one Term; pass [term]")
    terms = list(terms)
    if not terms:
        raise ArgumentError("terms: expected at least one")
    names = [term.name for term in terms]
    for name in names:
        if names.count(name) > 1:
            raise ArgumentError(
                f"terms: {names.count(name)} are called {name!r}; each needs a name of its own"
            )
    prepared = [_prepare(term, network) for term in terms]
    shapes, residuals = zip(*prepared, strict=True)
    weights = tuple(_weight(term) for term in terms)
    return PreparedTerms(shapes, residuals, weights, network.outputs, network.dtype)


def _weight(term: Term) -> float:
    weight = float(term.weight)
    if not weight >= 0.0:
        raise ArgumentError(f"{term.name}: weight {weight}; allowed is a number of at least 0")
    return weight


def _prepare(term: Term, network: Any) -> tuple[Shape, Residual]:
    if not term.pieces or isinstance(term.pieces, Piece):
        raise ArgumentError(
            f"{term.name}: pieces is {type(term.pieces).__name__} without a piece; pass (piece,)"
        )
    count = _count(term)
    check = _Check(term.name, count, network)
    followed = _checked_dependences(term)
    operators = tuple(
        _operator(piece, f"piece {p}", [(d.factors[p], d.power) for d in followed], check)
        for p, piece in enumerate(term.pieces)
    )
    for where, operator in enumerate(operators):
        if all(entry is None for entry in (*operator.coefficients, *operator.factors)):
            raise ArgumentError(f"{term.name}: piece {where} has no coefficient; give value, first or second")
    target = check.pair("target", term.target, (count,)) or (None, None)
    # Two outputs make every residual complex, one output those with a complex number in them.
    entries = [*(c for o in operators for c in (*o.coefficients, *o.factors)), target]
    parts = 2 if network.outputs == 2 or any(e is not None and e[1] is not None for e in entries) else 1
    unknowns = tuple((d.name, d.power) for d in followed)
    return Shape(term.name, count, parts, unknowns), Residual(operators, target)


def _count(term: Term) -> int:
    counts = {int(piece.points.shape[0]) for piece in term.pieces if len(piece.points.shape)}
    if len(counts) != 1:
        raise ShapeError(f"{term.name}: pieces with {sorted(counts)} points; all need the same number")
    if counts == {0}:
        raise ShapeError(f"{term.name}: no points; the mean over none is undefined")
    return counts.pop()


def dependences(term: Term) -> tuple[Dependence, ...]:
    """What a term follows unknowns by: none, one or several."""
    given = term.wavenumber
    return () if given is None else (given,) if isinstance(given, Dependence) else tuple(given)


def _checked_dependences(term: Term) -> tuple[Dependence, ...]:
    found = dependences(term)
    for dependence in found:
        if len(dependence.factors) != len(term.pieces):
            raise ArgumentError(
                f"{term.name}: wavenumber has {len(dependence.factors)} factors for {len(term.pieces)} pieces; "
                "give one for each, None where the piece has none"
            )
        power: object = dependence.power
        if isinstance(power, bool) or not isinstance(power, Integral) or int(power) < 1:
            raise ArgumentError(
                f"{term.name}: wavenumber has power {power!r}; allowed is an integer of at least 1"
            )
    return found


class _Check(NamedTuple):
    """Shapes, library and precision of a term's arrays."""

    term: str
    number: int
    network: Any

    def array(self, name: str, array: Array, shapes: Sequence[tuple[int, ...]], real: bool = False) -> Array:
        named = f"{self.term}: {name}"
        network = self.network
        check_same_library([("network", network.parameters["W0"]), (named, array)])
        if tuple(array.shape) not in shapes:
            allowed = " or ".join(str(shape) for shape in shapes)
            raise ShapeError(f"{named} has shape {tuple(array.shape)}; expected {allowed}")
        allowed_dtypes = (network.dtype,) if real else (network.dtype, COMPLEX_OF[network.dtype])
        if dtype_name(array.dtype) not in allowed_dtypes:
            raise DtypeError(
                f"{named} is {dtype_name(array.dtype)}; beside a network in {network.dtype} allowed is "
                f"{' or '.join(allowed_dtypes)}: cast it, for example xp.astype(array, xp.{network.dtype})"
            )
        return array

    def pair(self, name: str, array: Array | None, shape: tuple[int, ...]) -> Pair | None:
        if array is None:
            return None
        return _parts(self.network.xp, self.array(name, array, [shape]))


def _parts(xp: Namespace, array: Array) -> Pair:
    return (xp.real(array), xp.imag(array)) if is_complex(array) else (array, None)


def _operator(piece: Piece, where: str, factors: Any, check: _Check) -> Operator:
    xp, d, n = check.network.xp, check.network.dimensions, check.number
    points = check.array(f"{where}, points", piece.points, [(n, d)], real=True)
    blocks: list[Pair | None] = [check.pair(f"{where}, value", piece.value, (n,))]
    channels: tuple[Array | None, ...] = ()
    ends: list[Pair | None] = []
    if piece.second is not None:
        second = check.array(f"{where}, second", piece.second, list(dict.fromkeys([(n, d), (n, 1)])))
        if second.shape[1] == 1:
            channels = (None,)
            ends.append(_parts(xp, second[:, 0]))
        else:
            # A channel is sum_i a_i u_ii for real a: it enters the residual as it is, the imaginary one times i.
            one = xp.ones_like(points[:, 0])
            real, imaginary = _parts(xp, second)
            channels = (real,) if imaginary is None else (real, imaginary)
            ends += [(one, None), (None, one)][: len(channels)]
    if piece.first is not None:
        first = check.array(f"{where}, first", piece.first, [(n, d)])
        blocks += [_parts(xp, first[:, i]) for i in range(d)]
    elif channels:
        blocks += [None] * d
    pairs = tuple([check.pair(f"{where}, factor of {power}", factor, (n,)) for factor, power in factors])
    return Operator(points, (*blocks, *ends), channels, pairs)


def unknowns_of(prepared: PreparedTerms, given: Any) -> dict[str, Any]:
    """The unknowns by name, from a number (the wavenumber) or a mapping; ArgumentError for a missing or unused one."""
    named = {} if given is None else dict(given) if isinstance(given, Mapping) else {WAVENUMBER: given}
    needed = list(dict.fromkeys(name for shape in prepared.shapes for name, _ in shape.unknowns))
    for name in needed:
        if name not in named:
            raise ArgumentError(f"wavenumber: the terms depend on {name!r}, and it is not given")
    for name in named:
        if name not in needed:
            raise ArgumentError(f"wavenumber: no term depends on {name!r}; they depend on {needed or 'none'}")
    return {name: named[name] for name in needed}
