"""Exact gradients of the scans, for every library: ``vjp``; and how exact they are: ``check_gradients``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy

from scanfield.advice import shown
from scanfield.arrays import Array, current_device_of, device_of, dtype_name, dtype_of, is_complex, library_of
from scanfield.dispatch import registry
from scanfield.dispatch.report import format_table
from scanfield.errors import ArgumentError
from scanfield.keywords import check_no_more
from scanfield.scans.binding import Bound, bind
from scanfield.scans.canonical import quiet
from scanfield.scans.surface import ScanResult


class Pullback(Protocol):
    """From cotangents of output and final state, either of which may be None, to the gradient of each array by name."""

    def __call__(self, d_output: Array | None = None, d_final_state: Array | None = None) -> dict[str, Array]:
        """One of the two is needed: ArgumentError without, ShapeError where one does not fit its result."""
        ...


def vjp(
    op: Any, *arrays: Array, wrt: str | Sequence[str] | None = None, **options: Any
) -> tuple[ScanResult, Pullback]:
    """A scan's result, and the function that pulls cotangents back to the gradient of each array.

    Parameters
    ----------
    op : a scan of scanfield
        ``linear_scan``, ``selective_scan``, ``gdn2`` or one derived from them.
    *arrays, **options
        As in the call of ``op``: arrays by position or by name, options by name. ``states_at`` is refused.
    wrt : str or sequence of str, optional
        The arrays whose gradient is wanted; all that were given, if absent. Others are not computed.

    Returns
    -------
    result : ScanResult
    pullback : callable
        ``pullback(d_output=None, d_final_state=None)`` returns a dictionary: the name of each array to its gradient,
        in that array's shape and dtype. It may be called more than once.

    Raises
    ------
    ArgumentError
        For a name in ``wrt`` that is no array of this call, for ``states_at``, and by the pullback without cotangents.
    ShapeError, DtypeError, BackendError, DeviceError
        As the scan itself; by the pullback for a cotangent that does not fit its result.

    Notes
    -----
    Complex arrays follow torch's rule: the gradient is dL/dRe + i dL/dIm, and dL = Re sum(conj(gradient) dx). States at
    the start of every chunk are kept, the others recomputed: memory grows as time / chunk_size. The pullback reads the
    arrays of the call as they are then: change none of them in between.

    Examples
    --------
    >>> import numpy, scanfield
    >>> a, b = numpy.full((1, 3, 1), 0.5), numpy.ones((1, 3, 1))
    >>> result, pullback = scanfield.vjp(scanfield.linear_scan, a, b)
    >>> gradients = pullback(d_final_state=numpy.ones((1, 1)))
    >>> gradients["b"][0, :, 0]
    array([0.25, 0.5 , 1.  ])
    >>> gradients["a"][0, :, 0]
    array([0. , 0.5, 1.5])
    """
    bound = bind(op, arrays, options)
    if bound.states_at is not None:
        raise ArgumentError("states_at: not in vjp; cut the sequence at the boundaries and chain the states")
    names = _wanted(bound, wrt)
    main = bound.arrays[bound.record.main]
    with current_device_of(main):
        prepared = bound.record.prepare(bound.arrays, bound.options)
        output, state, residuals, chosen = registry.save(prepared.call, bound.method)
        result = ScanResult(prepared.output(output), prepared.state(state))

    def pullback(
        d_output: Array | None = None, d_final_state: Array | None = None, *more: Any, **others: Any
    ) -> dict[str, Array]:
        if more or others:
            check_no_more("pullback", ("d_output", "d_final_state"), more, others)
        if d_output is None and d_final_state is None:
            raise ArgumentError("pullback: d_output or d_final_state is needed, both are None")
        with current_device_of(main):
            d_y, d_last = prepared.cotangents(d_output, d_final_state)
            grads = registry.backward(chosen, prepared.call, residuals, d_y, d_last, prepared.wanted(names))
            found = prepared.pull(grads, d_y)
        return {entry.name: found[entry.name] for entry in bound.record.inputs if entry.name in names}

    return result, pullback


def _wanted(bound: Bound, wrt: str | Sequence[str] | None) -> frozenset[str]:
    given = [
        entry.name
        for entry in bound.record.inputs
        if entry.role != "index" and bound.arrays[entry.name] is not None
    ]
    if wrt is None:
        return frozenset(given)
    if not isinstance(wrt, str | tuple | list | set | frozenset):
        raise ArgumentError(f"wrt: came {type(wrt).__name__}; allowed are a name and a sequence of names")
    names = (wrt,) if isinstance(wrt, str) else tuple(wrt)
    for name in names:
        if name not in given:
            raise ArgumentError(f"wrt: {shown(name)} is no array of this call; given are {', '.join(given)}")
    return frozenset(names)


class GradientRow(NamedTuple):
    """One array's gradient against central differences along random directions."""

    name: str
    error: float
    """Largest deviation of a directional derivative, relative to the largest derivative of the array."""
    largest: float
    """The largest directional derivative."""


@dataclass(frozen=True)
class GradientReport:
    """How exact the gradients are on the user's own input; ``str()`` is a table."""

    operation: str
    dtype: str
    step: float
    rows: tuple[GradientRow, ...]

    @property
    def worst(self) -> float:
        """The largest error of all arrays."""
        return max((row.error for row in self.rows), default=0.0)

    def __str__(self) -> str:
        head = (
            f"gradients of {self.operation} in {self.dtype} against central differences (step {self.step:g})"
        )
        rows = [
            ("array", "error", "largest"),
            *((r.name, f"{r.error:.1e}", f"{r.largest:.3g}") for r in self.rows),
        ]
        return "\n".join([head, *format_table(rows)])


def check_gradients(
    op: Any,
    *arrays: Array,
    wrt: str | Sequence[str] | None = None,
    directions: int = 4,
    seed: int = 0,
    **options: Any,
) -> GradientReport:
    """Compare the gradients of a scan with central differences, on the user's own arrays.

    Parameters
    ----------
    op, *arrays, wrt, **options
        As in ``vjp``.
    directions : int
        Random directions of +-1 for each array.
    seed : int
        Seed of the directions and of the cotangents.

    Returns
    -------
    GradientReport
        Per array the largest relative error. In float64 about 1e-9 is what central differences can show; float32
        arrays are checked in float32, where about 1e-2 is all they can show: pass float64 arrays for a sharp check.

    Raises
    ------
    As ``vjp``.

    Examples
    --------
    >>> import numpy, scanfield
    >>> draw = numpy.random.default_rng(0)
    >>> a, b = draw.uniform(0.5, 1, (2, 7, 3)), draw.standard_normal((2, 7, 3))
    >>> scanfield.check_gradients(scanfield.linear_scan, a, b).worst < 1e-7
    True
    """
    if type(directions) is not int or directions < 1:
        raise ArgumentError(f"directions: {shown(directions)}; allowed is an integer of at least 1")
    bound = bind(op, arrays, options)
    names = _wanted(bound, wrt)
    result, pullback = vjp(op, *arrays, wrt=wrt, **options)
    draw = numpy.random.default_rng(seed)
    weights = [_signs(draw, like) for like in result]
    gradients = pullback(*weights)
    given = {name: array for name, array in bound.arrays.items() if array is not None}
    call_options = {**bound.options, **({} if bound.method is None else {"method": bound.method})}
    single = any(
        dtype_name(given[name].dtype) in ("float16", "bfloat16", "float32", "complex64") for name in names
    )
    step = 2.0**-6 if single else 2.0**-17
    library = library_of(result.output, "output").name
    rows = []
    for entry in bound.record.inputs:
        if entry.name not in names:
            continue
        array = given[entry.name]
        errors, sizes = [0.0], [0.0]
        for _ in range(directions):
            direction = _signs(draw, array)
            ends = []
            for sign in (1.0, -1.0):
                with quiet(library):
                    moved = {**given, entry.name: array + (sign * step) * direction}
                ends.append(_inner(weights, op(**moved, **call_options)))
            numeric = (ends[0] - ends[1]) / (2 * step)
            exact = _inner([direction], [gradients[entry.name]])
            errors.append(abs(numeric - exact))
            sizes.append(abs(numeric))
        rows.append(GradientRow(entry.name, max(errors) / max(*sizes, 1e-300), max(sizes)))
    main = next(entry for entry in bound.record.inputs if entry.name == bound.record.main)
    return GradientReport(bound.record.name, dtype_name(given[main.name].dtype), step, tuple(rows))


def _signs(draw: numpy.random.Generator, like: Array) -> Array:
    """An array of +-1 (complex: +-1 +-1j) of the shape, dtype and device of ``like``."""
    xp = library_of(like, "array").namespace
    signs = draw.integers(0, 2, tuple(like.shape)) * 2.0 - 1.0
    if is_complex(like):
        signs = signs + 1j * (draw.integers(0, 2, tuple(like.shape)) * 2.0 - 1.0)
    wide = xp.asarray(
        signs,
        dtype=dtype_of(xp, "complex128" if signs.dtype.kind == "c" else "float64"),
        device=device_of(like),
    )
    return xp.astype(wide, like.dtype)


def _inner(left: Sequence[Array], right: Sequence[Array]) -> float:
    """Re sum(conj(left) right), summed in the arrays' own precision and returned as a Python float."""
    total = 0.0
    for x, y in zip(left, right, strict=True):
        library = library_of(x, "array")
        xp = library.namespace
        with quiet(library.name):
            product = xp.conj(x) * y if is_complex(x) else x * y
            found = xp.sum(xp.real(product) if is_complex(product) else product)
        # A tensor that autograd follows warns when it becomes a number.
        total += float(found.detach() if library.name == "torch" else found)
    return total
