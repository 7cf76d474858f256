"""The Jacobian of the residuals, row by row: the same sweep back with unit seeds and no sum over the points.

    J_W[n] = sum over blocks zbar_b[n] (outer) h_b[n];   J_b[n] = zbar[n];   J_B[n, i] = 2 pi omegabar_i[n]

The seeds of the row Re r are (conj(c0), conj(b_i), conj(a)), those of Im r i times that. Rows carry sqrt(weight / n), so that
the sum of squares of the residual vector is the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from scanfield.arrays import Array, zeros
from scanfield.errors import ArgumentError
from scanfield.pinn.fourier import check_count
from scanfield.pinn.jets import TWO_PI, forward, model_of, reverse
from scanfield.pinn.kernels import Kernels
from scanfield.pinn.loss import Evaluation, Unknowns, residual_of, slope_of, unknown_pairs, with_unknowns
from scanfield.pinn.network import Network
from scanfield.pinn.selection import kernels_for
from scanfield.pinn.terms import PreparedTerms, Residual, Shape, Term, prepare_terms, unknowns_of


class Jacobian(NamedTuple):
    """Residuals and their derivatives."""

    residual: Array
    """(rows,)"""
    matrix: Array
    """(rows, parameters), in the order of ``Network.flatten``, then a column for each unknown."""


def jacobian(
    network: Network, terms: Sequence[Term] | PreparedTerms, *, wavenumber: Any = None, chunk: int = 256
) -> Jacobian:
    """The residual vector of all terms and its Jacobian, exact, without automatic differentiation.

    Parameters
    ----------
    network, terms, wavenumber, chunk
        As in ``loss_and_grad``; an unknown must be real here.

    Returns
    -------
    Jacobian
        ``residual`` (rows,) and ``matrix`` (rows, parameters + unknowns). The terms follow each other; a complex residual
        is two rows, real and imaginary part, point by point. Rows are scaled by sqrt(weight / n): the loss is the sum of
        squares, its gradient 2 matrix^T residual.

    Raises
    ------
    ArgumentError
        A complex unknown; otherwise as ``loss_and_grad``.

    Examples
    --------
    >>> import numpy
    >>> from scanfield import pinn
    >>> network = pinn.Network.create(pinn.RawCoordinates(1), hidden=4, outputs=1)
    >>> x = numpy.linspace(0.0, 1.0, 3)[:, None]
    >>> r, J = pinn.jacobian(network, [pinn.Term("data", (pinn.Piece(x, value=numpy.ones(3)),))])
    >>> r.shape, J.shape
    ((3,), (3, 13))
    """
    kernels = kernels_for(network)
    with kernels.context():
        prepared = prepare_terms(terms, network)
        unknowns = unknown_pairs(network, unknowns_of(prepared, wavenumber))
        for name, pair in unknowns.items():
            if pair[1] is not None:
                raise ArgumentError(f"wavenumber: {name} is complex; the Jacobian takes real unknowns")
        static = Evaluation(
            network.layers,
            network.activation,
            network.embedding.trainable,
            tuple(network.parameters),
            prepared.shapes,
            check_count("chunk", chunk),
            False,
        )
        pairs = zip(prepared.weights, prepared.shapes, strict=True)
        scales = tuple((weight / shape.points) ** 0.5 for weight, shape in pairs)
        return Jacobian(
            *kernels.run(
                _jacobian,
                static,
                network.parameters,
                network.constants(),
                prepared.residuals,
                scales,
                unknowns,
            )
        )


class _Rows:
    """What each row adds to the columns of each parameter."""

    def __init__(self, trainable: bool) -> None:
        self.columns: dict[str, Array] = {}
        self.wants_frequencies = trainable

    def layer(self, kernels: Kernels, i: int, zbar: Array, h: Array, memory: Any) -> None:
        """The columns of a layer's weight and bias."""
        self._add(f"W{i}", kernels.outer_rows(zbar, h))
        self._add(f"b{i}", zbar[0, ...] * 1.0)

    def frequencies(self, kernels: Kernels, rows: Any, memory: Any) -> None:
        """The columns of B."""
        self._add("B", TWO_PI * rows())

    def _add(self, name: str, rows: Array) -> None:
        self.columns[name] = self.columns[name] + rows if name in self.columns else rows


def _jacobian(
    kernels: Kernels,
    static: Evaluation,
    store: Any,
    parameters: Any,
    constants: Any,
    residuals: Sequence[Residual],
    scales: Sequence[Any],
    unknowns: Unknowns,
) -> tuple[Array, Array]:
    xp = kernels.xp
    model = model_of(parameters, constants, (static.layers, static.activation))
    memory = kernels.buffers(parameters["W0"])
    order = tuple(dict.fromkeys(name for shape in static.shapes for name, _ in shape.unknowns))
    found = []
    for shape, residual, scale in zip(static.shapes, residuals, scales, strict=True):

        def body(carry: None, rows: Residual, shape: Shape = shape, scale: Any = scale) -> Any:
            operators = [with_unknowns(kernels, op, shape, unknowns) for op in rows.operators]
            runs = [
                forward(kernels, model, op.points, op.channels, len(op.coefficients) > 1, memory.part(i))
                for i, op in enumerate(operators)
            ]
            r = residual_of(kernels, operators, [run[0] for run in runs], rows.target, shape.parts, memory)
            parts = []
            for part in range(shape.parts):
                seed = [zeros(xp, r.shape[:1], r.dtype, r) for _ in range(shape.parts)]
                seed[part] = seed[part] + scale
                sink = _Rows(static.trainable)
                for i, op in enumerate(operators):
                    stack, tape = runs[i]
                    own = memory.part(i)
                    bar = kernels.seed(xp.stack(seed, axis=1), op.coefficients, stack.shape[2], own)
                    reverse(kernels, model, tape, bar, sink, own)
                columns = [xp.reshape(sink.columns[name], (r.shape[0], -1)) for name in static.names]
                columns += [
                    _unknown_column(kernels, name, unknowns, operators, runs, shape, part) * scale
                    for name in order
                ]
                parts.append(xp.concat(columns, axis=1))
            return None, (r * scale, parts[0][:, None, :] if shape.parts == 1 else xp.stack(parts, axis=1))

        _, (r, J) = kernels.fold(body, None, residual, shape.points, static.chunk)
        rows = r.shape[0] * shape.parts
        found.append((xp.reshape(r, (rows,)), xp.reshape(J, (rows, J.shape[2]))))
    if len(found) == 1:
        return found[0]
    return xp.concat([r for r, _ in found]), xp.concat([J for _, J in found], axis=0)


def _unknown_column(
    kernels: Kernels, name: str, unknowns: Unknowns, operators: Any, runs: Any, shape: Shape, part: int
) -> Array:
    """d r / d k of one real part, (n, 1)."""
    stack = runs[0][0]
    column = zeros(kernels.xp, (stack.shape[1], 1), stack.dtype, stack)
    for op, (stack, _) in zip(operators, runs, strict=True):
        for (own, power), factor in zip(shape.unknowns, op.factors, strict=True):
            if own == name and factor is not None:
                slope = slope_of(factor, power, unknowns[name])
                column = column + kernels.times(stack[0, ...], slope, shape.parts)[:, part : part + 1]
    return column
