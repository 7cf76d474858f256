"""The loss of a list of terms and its exact gradient, in one sweep forward and one back for each chunk of rows.

    r = sum over pieces of c u + sum_i b_i u_i + sum_c (channels) - t        loss = sum over terms w / n sum_j |r_j|^2
    rbar = 2 w / n r;  the bar of each block of the output = conj(its coefficient) rbar, summed back by ``jets.reverse``
    an unknown k in the coefficient q k^p of u:  kbar = sum_j conj(q p k^(p-1) u) rbar      (its real part for a real k)

A complex number is a pair of real columns throughout, and its bar is d loss / d real + i d loss / d imaginary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy

from scanfield.arrays import COMPLEX_OF, Array, cast, dtype_of, is_complex, library_of, zeros
from scanfield.errors import ShapeError
from scanfield.pinn.fourier import check_count
from scanfield.pinn.jets import TWO_PI, Model, forward, model_of, reverse
from scanfield.pinn.kernels import Kernels
from scanfield.pinn.network import Network, from_host, place_beside
from scanfield.pinn.selection import kernels_for
from scanfield.pinn.terms import (
    Operator,
    Pair,
    PreparedTerms,
    Residual,
    Shape,
    Term,
    prepare_terms,
    unknowns_of,
)


class LossAndGrad(NamedTuple):
    """A loss, what it is made of, and its gradient."""

    loss: Array
    """() sum of weight * raw mean over the terms."""
    terms: dict[str, Array]
    """Name of each term -> () raw mean of |residual|^2, without the weight."""
    gradients: dict[str, Any]
    """As the network's parameters, then the unknowns by name, then ``points`` where they were asked for."""


class Evaluation(NamedTuple):
    """What of an evaluation is no array: hashable."""

    layers: int
    activation: str
    trainable: bool
    names: tuple[str, ...]
    """Of the parameters, in order: a compiler may hand mappings over sorted."""
    shapes: tuple[Shape, ...]
    chunk: int
    points: bool


Unknowns = Mapping[str, tuple[Array, Array | None]]
"""Name -> real and imaginary part, 0-d."""


def loss_and_grad(
    network: Network,
    terms: Sequence[Term] | PreparedTerms,
    *,
    wavenumber: Any = None,
    chunk: int | None = None,
    points: bool = False,
    workspace: Any = None,
) -> LossAndGrad:
    """The loss of these terms and its exact gradient for every parameter, without automatic differentiation.

    Parameters
    ----------
    network : Network
        The field.
    terms : sequence of Term, or PreparedTerms
        ``prepare_terms`` checks them once for many steps.
    wavenumber : number, 0-d array or mapping, optional
        The unknown that terms depend on (``Term.wavenumber``), real or complex; a mapping of names to several.
    chunk : int, optional
        Rows that go through the network together, 256 by default. Memory grows with it and not with the points; the
        result changes by rounding only.
    points : bool
        Also the gradient of the points, for fixed coefficients and targets.
    workspace : Workspace, optional
        Every buffer of a step, made once. The gradients are then the workspace's own arrays, which the next call writes
        again; ``chunk`` is its batch.

    Returns
    -------
    LossAndGrad
        ``loss``, the raw mean of each term, and ``gradients`` by name: those of the parameters with their shapes and dtype,
        of the unknowns (), and ``points``, for each term a tuple with an array (n, d) for each piece.

    Raises
    ------
    ArgumentError
        An unknown that is missing or not used; ``prepare_terms`` names what is wrong with a term.
    ShapeError, DtypeError, BackendError, DeviceError
        Arrays that do not fit the network.

    Notes
    -----
    A term with second derivatives is d + 2 stacked blocks (d + 3 for complex coefficients of its own on each axis), one
    matrix product a layer and two back; the formulas stand in ``docs/mathematics.md``. On JAX the whole evaluation is one
    function, compiled for its shapes; new parameters, weights, points or coefficients compile nothing anew.

    Examples
    --------
    >>> import numpy
    >>> from scanfield import pinn
    >>> network = pinn.Network.create(pinn.FourierFeatures(1, 8, wavenumber=3.0), hidden=16, seed=0)
    >>> x = numpy.linspace(0.0, 1.0, 50)[:, None]
    >>> inside = pinn.Term("PDE", (pinn.Piece(x, value=numpy.full(50, 9.0), second=numpy.ones((50, 1))),))
    >>> found = pinn.loss_and_grad(network, [inside])
    >>> sorted(found.gradients)
    ['B', 'W0', 'W1', 'b0', 'b1']
    """
    kernels = kernels_for(network)
    with kernels.context(network.parameters["W0"]):
        prepared = prepare_terms(terms, network)
        unknowns = unknown_pairs(network, unknowns_of(prepared, wavenumber))
        if workspace is not None:
            chunk = workspace.serves(network, kernels, prepared, chunk)
        static = Evaluation(
            network.layers,
            network.activation,
            network.embedding.trainable,
            tuple(network.parameters),
            prepared.shapes,
            check_count("chunk", 256 if chunk is None else chunk),
            bool(points),
        )
        raws, loss, gradients, kbars, xbars = kernels.run(
            evaluate,
            static,
            network.parameters,
            network.constants(),
            prepared.residuals,
            prepared.weights,
            unknowns,
            store=workspace,
        )
        found = {name: gradients[name] for name in network.parameters}
        found |= {name: _joined(network, kbars[name]) for name in unknowns}
        if points:
            found["points"] = xbars
        return LossAndGrad(
            loss, {shape.name: raw for shape, raw in zip(prepared.shapes, raws, strict=True)}, found
        )


def unknown_pairs(network: Network, given: Mapping[str, Any]) -> Unknowns:
    """Numbers or 0-d arrays as pairs of 0-d arrays in the network's dtype."""
    xp, found = network.xp, {}
    place = place_beside(network.parameters["W0"])
    for name, value in given.items():
        if isinstance(value, numpy.generic):  # what arithmetic with NumPy's gradient makes of a number
            value = value.item()
        if isinstance(value, int | float | complex):
            parts = [value.real, value.imag] if isinstance(value, complex) else [value]
            pair = [from_host(xp, part, network.dtype, place) for part in parts]
        else:
            if library_of(value, name).name != network.library or tuple(value.shape) != ():
                raise ShapeError(
                    f"{name}: shape {tuple(value.shape)} of {library_of(value, name).name}; expected a number or a 0-d "
                    f"array of {network.library}"
                )
            parts = [xp.real(value), xp.imag(value)] if is_complex(value) else [value]
            pair = [cast(xp, part, dtype_of(xp, network.dtype)) for part in parts]
        found[name] = (pair[0], pair[1] if len(pair) > 1 else None)
    return found


def _joined(network: Network, pair: tuple[Array, Array | None]) -> Array:
    """A pair as one number, complex if it has an imaginary part."""
    real, imaginary = pair
    if imaginary is None:
        return real
    xp = network.xp
    kind = dtype_of(xp, COMPLEX_OF[network.dtype])
    return xp.astype(real, kind) + xp.astype(imaginary, kind) * 1j


class Sums:
    """Where the sweep back adds each chunk's part of each gradient."""

    def __init__(self, totals: Mapping[str, Array], trainable: bool) -> None:
        self.totals = dict(totals)
        self.wants_frequencies = trainable

    def layer(self, kernels: Kernels, i: int, zbar: Array, h: Array, memory: Any) -> None:
        """Add to the gradients of a layer's weight and bias."""
        self.totals[f"W{i}"] = kernels.add_weight(self.totals[f"W{i}"], zbar, h, memory)
        self.totals[f"b{i}"] = kernels.add_bias(self.totals[f"b{i}"], zbar, memory)

    def frequencies(self, kernels: Kernels, rows: Any, memory: Any) -> None:
        """Add to the gradient of omega."""
        self.totals["B"] = kernels.add_frequencies(self.totals["B"], rows, memory)


def evaluate(
    kernels: Kernels,
    static: Evaluation,
    store: Any,
    parameters: Mapping[str, Array],
    constants: Mapping[str, Array],
    residuals: Sequence[Residual],
    weights: Sequence[Any],
    unknowns: Unknowns,
) -> tuple[Any, ...]:
    """Raw mean of each term, loss, gradients, those of the unknowns, those of the points."""
    xp = kernels.xp
    model = model_of(parameters, constants, (static.layers, static.activation))
    like = parameters["W0"]
    if store is None:
        memory = kernels.buffers(like)
        totals = {name: zeros(xp, array.shape, array.dtype, array) for name, array in parameters.items()}
    else:
        memory, totals = store.begin()
    nothing = zeros(xp, (), like.dtype, like)
    kbars: dict[str, tuple[Array, Array | None]] = {
        name: (nothing, None if pair[1] is None else nothing) for name, pair in unknowns.items()
    }
    raws, xbars, loss = [], [], nothing
    for shape, residual, weight in zip(static.shapes, residuals, weights, strict=True):
        body = Body(kernels, model, static, shape, weight * (2.0 / shape.points), unknowns, memory)
        (totals, kbars, square), found = kernels.fold(
            body, (totals, kbars, nothing), residual, shape.points, static.chunk
        )
        raw = square / shape.points
        raws.append(raw)
        loss = loss + weight * raw
        xbars.append(found)
    if static.trainable:
        if store is None:
            totals = {**totals, "B": TWO_PI * totals["B"]}
        else:
            totals["B"] *= TWO_PI
    return tuple(raws), loss, totals, kbars, tuple(xbars)


class Body:
    """One chunk of a term: forward, residual, back."""

    def __init__(
        self,
        kernels: Kernels,
        model: Model,
        static: Evaluation,
        shape: Shape,
        scale: Any,
        unknowns: Unknowns,
        memory: Any,
    ) -> None:
        self.kernels, self.model, self.static, self.shape = kernels, model, static, shape
        self.scale, self.unknowns, self.memory = scale, unknowns, memory

    def __call__(self, carry: Any, rows: Residual) -> tuple[Any, Any]:
        """Add a chunk's part to the gradients of parameters and unknowns and to the sum of squares."""
        kernels, memory, parts = self.kernels, self.memory, self.shape.parts
        totals, kbars, square = carry
        operators = [with_unknowns(kernels, op, self.shape, self.unknowns) for op in rows.operators]
        stacks, tapes = [], []
        for i, op in enumerate(operators):
            stack, tape = forward(
                kernels, self.model, op.points, op.channels, len(op.coefficients) > 1, memory.part(i)
            )
            stacks.append(stack)
            tapes.append(tape)
        r = residual_of(kernels, operators, stacks, rows.target, parts, memory)
        square = square + kernels.square_sum(r, memory)
        rbar = kernels.scaled(r, self.scale, memory)
        for i, op in enumerate(operators):
            for (name, power), factor in zip(self.shape.unknowns, op.factors, strict=True):
                if factor is not None:
                    slope = slope_of(factor, power, self.unknowns[name])
                    kbars = {**kbars, name: self._add(kbars[name], slope, stacks[i][0, ...], rbar)}
        sink, xbars = Sums(totals, self.static.trainable), []
        for i, op in enumerate(operators):
            bar = kernels.seed(rbar, op.coefficients, stacks[i].shape[2], memory.part(i))
            xbars.append(
                reverse(kernels, self.model, tapes[i], bar, sink, memory.part(i), points=self.static.points)
            )
        return (sink.totals, kbars, square), tuple(xbars) if self.static.points else None

    def _add(self, kbar: tuple[Array, Array | None], slope: Pair, u: Array, rbar: Array) -> Any:
        """kbar + sum conj(slope u) rbar"""
        xp = self.kernels.xp
        v = self.kernels.times(u, slope, rbar.shape[1])
        real = kbar[0] + xp.sum(v * rbar)
        if kbar[1] is None:
            return real, None
        return real, kbar[1] + xp.sum(v[:, 0] * rbar[:, 1] - v[:, 1] * rbar[:, 0])


def residual_of(
    kernels: Kernels,
    operators: Sequence[Operator],
    stacks: Sequence[Array],
    target: Pair,
    parts: int,
    memory: Any,
) -> Array:
    """The residual in real parts, (n, parts)."""
    like = stacks[0]
    r = kernels.start_residual(target, like.shape[1], parts, like, memory)
    for op, stack in zip(operators, stacks, strict=True):
        for b, pair in enumerate(op.coefficients):
            if pair is not None:
                r = kernels.add_residual(r, stack[b, ...], pair, memory)
    return r


def with_unknowns(kernels: Kernels, op: Operator, shape: Shape, unknowns: Unknowns) -> Operator:
    """The operator with the coefficient of u at the unknowns' present values."""
    value = op.coefficients[0]
    for (name, power), factor in zip(shape.unknowns, op.factors, strict=True):
        if factor is not None:
            added = _times(factor, _power(unknowns[name], power))
            value = added if value is None else (_plus(value[0], added[0]), _plus(value[1], added[1]))
    return op._replace(coefficients=(value, *op.coefficients[1:]))


def slope_of(factor: Pair, power: int, unknown: Pair) -> Pair:
    """q p k^(p-1)"""
    if power == 1:
        return factor
    real, imaginary = _times(factor, _power(unknown, power - 1))
    return tuple([None if part is None else power * part for part in (real, imaginary)])  # type: ignore[return-value]


def _power(unknown: Pair, power: int) -> Pair:
    result = unknown
    for _ in range(power - 1):
        result = _times(result, unknown)
    return result


def _times(left: Pair, right: Pair) -> Pair:
    """The product of two pairs, None for a part that is zero."""
    (a, b), (c, d) = left, right
    minus = None if b is None or d is None else -(b * d)
    real = minus if a is None or c is None else _plus(a * c, minus)
    return real, _plus(None if a is None or d is None else a * d, None if b is None or c is None else b * c)


def _plus(left: Array | None, right: Array | None) -> Array | None:
    return right if left is None else left if right is None else left + right


def residuals(
    network: Network, terms: Sequence[Term] | PreparedTerms, *, wavenumber: Any = None, chunk: int = 256
) -> dict[str, Array]:
    """The residual of each term at its points, without weights.

    Returns
    -------
    dict
        Name of each term -> (n, parts): one column for a real residual, real and imaginary part for a complex one.

    Raises
    ------
    ScanfieldError
        As ``loss_and_grad``.

    Examples
    --------
    >>> import numpy
    >>> from scanfield import pinn
    >>> network = pinn.Network.create(pinn.RawCoordinates(1), hidden=4, outputs=1)
    >>> x = numpy.zeros((3, 1))
    >>> pinn.residuals(network, [pinn.Term("data", (pinn.Piece(x, value=numpy.ones(3)),))])["data"].shape
    (3, 1)
    """
    kernels = kernels_for(network)
    with kernels.context(network.parameters["W0"]):
        prepared = prepare_terms(terms, network)
        unknowns = unknown_pairs(network, unknowns_of(prepared, wavenumber))
        static = Evaluation(
            network.layers, network.activation, False, (), prepared.shapes, check_count("chunk", chunk), False
        )
        found = kernels.run(
            _residuals, static, network.parameters, network.constants(), prepared.residuals, unknowns
        )
    return {shape.name: r for shape, r in zip(prepared.shapes, found, strict=True)}


def _residuals(
    kernels: Kernels,
    static: Evaluation,
    store: Any,
    parameters: Any,
    constants: Any,
    residuals: Any,
    unknowns: Unknowns,
) -> tuple[Array, ...]:
    model = model_of(parameters, constants, (static.layers, static.activation))
    memory = kernels.buffers(parameters["W0"])
    found = []
    for shape, residual in zip(static.shapes, residuals, strict=True):

        def body(carry: None, rows: Residual, shape: Shape = shape) -> tuple[None, Array]:
            operators = [with_unknowns(kernels, op, shape, unknowns) for op in rows.operators]
            stacks = [
                forward(kernels, model, op.points, op.channels, len(op.coefficients) > 1, memory.part(i))[0]
                for i, op in enumerate(operators)
            ]
            return None, residual_of(kernels, operators, stacks, rows.target, shape.parts, memory) * 1.0

        found.append(kernels.fold(body, None, residual, shape.points, static.chunk)[1])
    return tuple(found)
