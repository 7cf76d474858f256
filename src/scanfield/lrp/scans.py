"""Relevance of a scan's value input and initial state: its reverse scan with the stabilised relevance as cotangent.

Glossary (MambaLRP, arXiv 2406.07592): *R* relevance, *rho* = R / stab(out), stab(z) = z + epsilon sign(z) with
sign(0) = +1. The gates (steps, decays, keys, queries, read-outs) are held constant, so a scan is
linear in its value input and its state: R(value) = value * d_value for the cotangent rho, with no rule of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

from scanfield.advice import shown
from scanfield.arrays import (
    COMPLEX,
    HALF,
    Array,
    Namespace,
    check_floating,
    check_same_library,
    current_device_of,
    dtype_name,
    dtype_of,
    library_of,
    zeros,
)
from scanfield.dispatch import Derived, Prepared, Record
from scanfield.errors import ArgumentError, DtypeError, ShapeError
from scanfield.lrp import states
from scanfield.scans.binding import Bound, bind, record_of
from scanfield.scans.canonical import quiet
from scanfield.scans.options import check_number

RULES = ("epsilon", "state_epsilon")


class Report(NamedTuple):
    """Where the relevance went: sums over each row of the batch, (batch,), or one for all where rows share an array.

    ``sum_out`` = ``sum_in`` + ``leak_readout`` + ``leak_state`` up to rounding.
    """

    sum_out: Array
    """Relevance that was put in: at the output, and at the final state."""
    sum_in: Array
    """Relevance that arrived: at the value input, and at the initial state."""
    leak_readout: Array
    """What the stabiliser of the output took, and relevance of outputs and final states that are exactly 0."""
    leak_state: Array
    """What the stabiliser of the states took; 0 for ``state_epsilon=0``."""
    largest_rho: Array
    """The largest ``|rho|`` of all rows, (1,): how far the smallest outputs were blown up."""

    @property
    def gap(self) -> Array:
        """What neither sum nor leak explains: rounding."""
        return self.sum_out - self.sum_in - self.leak_readout - self.leak_state

    def __str__(self) -> str:
        rows = zip(self._fields, self, strict=True)
        return "\n".join(f"{name:<14}{_total(x):>14.6g}" for name, x in (*rows, ("gap", self.gap)))


class Relevance(NamedTuple):
    """What ``relevance`` returns: real arrays in the shapes of the inputs they belong to."""

    value: Array
    """Of the value input: ``b`` of linear_scan, ``u`` of selective_scan, ``x`` of ssd, ``value`` of the others."""
    initial_state: Array | None
    """Of the initial state; None if none was given."""
    report: Report

    @property
    def b(self) -> Array:
        """``value`` by its name in ``linear_scan``."""
        return self.value

    @property
    def u(self) -> Array:
        """``value`` by its name in ``selective_scan``."""
        return self.value

    @property
    def x(self) -> Array:
        """``value`` by its name in ``ssd``."""
        return self.value


def supports(op: Any, rule: str) -> bool:
    """Whether a scan has a rule of relevance: ``"epsilon"`` (every scan) or ``"state_epsilon"`` (diagonal ones).

    Raises
    ------
    ArgumentError
        For what is no scan, and a rule that no scan has.

    Examples
    --------
    >>> import scanfield
    >>> scanfield.lrp.supports(scanfield.selective_scan, "state_epsilon")
    True
    >>> scanfield.lrp.supports(scanfield.gdn2, "state_epsilon")
    False
    """
    record = record_of(op)
    if rule not in RULES:
        raise ArgumentError(f"rule: {shown(rule)}; the rules of scans are {', '.join(map(repr, RULES))}")
    return rule == "epsilon" or _base(record) in states.OPERATIONS


def relevance(
    op: Any,
    R_output: Array | None,
    *arrays: Array,
    R_final_state: Array | None = None,
    epsilon: float = 1e-6,
    state_epsilon: float = 0.0,
    **options: Any,
) -> Relevance:
    """Relevance of a scan's value input and initial state, from that of its output.

    Parameters
    ----------
    op : a scan of scanfield
        ``linear_scan``, ``selective_scan``, ``gdn2`` or one derived from them.
    R_output : real array in the shape of the output, or None
        Relevance of every output number. None for zeros, if ``R_final_state`` is given.
    *arrays, **options
        As in the call of ``op``. ``states_at`` is refused, and so is the gate ``z`` of ``selective_scan``: the half rule for
        it belongs to the block around the scan.
    R_final_state : real array in the shape of the final state, optional
        Relevance of the final state, for a sequence that goes on elsewhere.
    epsilon : float
        Stabiliser of the output: relevance is divided by out + epsilon sign(out). At 0 an output of exactly 0 passes
        nothing on.
    state_epsilon : float
        Stabiliser of every state, h + state_epsilon sign(h); for diagonal scans (``linear_scan``, ``selective_scan``).

    Returns
    -------
    Relevance
        ``value`` and ``initial_state`` (None if none was given), real, in float32 at least, and the ``report`` of what was
        conserved.

    Raises
    ------
    ArgumentError
        For an epsilon below 0, a rule that ``op`` does not have (see ``supports``), ``states_at``, ``z``, and if no
        relevance is given.
    ShapeError, DtypeError, BackendError, DeviceError
        As the scan itself, and for relevance that does not fit its result.

    Notes
    -----
    Jafari et al., "MambaLRP" (arXiv 2406.07592); Achtibat et al., "AttnLRP" (arXiv 2402.05602), for the detached gates.
    Equals gradient times input with all gates detached. Memory and time are those of one backward of the scan; with
    ``state_epsilon`` the token-by-token code of any library runs.

    Examples
    --------
    >>> import numpy, scanfield
    >>> a, b = numpy.full((1, 2, 1), 0.5), numpy.array([[[2.0], [3.0]]])
    >>> R = numpy.array([[[0.0], [4.0]]])  # all of it at the last output, 0.5 * 2 + 3
    >>> scanfield.relevance(scanfield.linear_scan, R, a, b, epsilon=0.0).value[0, :, 0]
    array([1., 3.])
    """
    record = record_of(op)
    epsilon, state_epsilon = _epsilon(epsilon, "epsilon"), _epsilon(state_epsilon, "state_epsilon")
    if state_epsilon and not supports(op, "state_epsilon"):
        raise ArgumentError(
            f"state_epsilon: {record.name} mixes its states, so that a stabiliser of each number has no closed form; "
            f"pass state_epsilon=0, or use a diagonal scan ({', '.join(states.OPERATIONS)})"
        )
    _check_relevance_given(op, arrays, options)
    bound = bind(op, arrays, options)
    if bound.states_at is not None:
        raise ArgumentError(
            "states_at: not in relevance; cut the sequence at the boundaries and chain the states"
        )
    if bound.arrays.get("z") is not None:
        raise ArgumentError(
            "z: relevance of a gated output is the half rule's, which belongs to the block around the scan: give half of "
            "it to each factor, pass R_output of the scan without z"
        )
    if R_output is None and R_final_state is None:
        raise ArgumentError(
            "R_output: relevance of the output or of the final state is needed, both are None"
        )
    with current_device_of(bound.arrays[record.main]):
        given = _wide(bound)
        prepared = record.prepare(given, bound.options)
        return _Pass(record, bound, given, prepared, epsilon, state_epsilon).run(R_output, R_final_state)


def _check_relevance_given(op: Any, arrays: tuple[Array, ...], options: Mapping[str, Any]) -> None:
    """ArgumentError where the last array is missing because the first stands in the place of the relevance."""
    record = record_of(op)
    parameters = op.signature.parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty]
    if len(arrays) == len(needed) - 1 and needed[-1] not in options:
        raise ArgumentError(
            f"R_output: comes before the arrays, relevance({record.name}, R_output, {', '.join(needed)}); came "
            f"{len(arrays) + 1} arrays, so that either R_output or {needed[-1]} is missing"
        )


class _Pass:
    """One propagation: the forward, rho, the reverse scan, and the balance."""

    def __init__(
        self,
        record: Record,
        bound: Bound,
        given: dict[str, Any],
        prepared: Prepared,
        epsilon: float,
        state_epsilon: float,
    ) -> None:
        self.given, self.prepared, self.method = given, prepared, bound.method
        self.epsilon, self.state_epsilon = epsilon, state_epsilon
        self.value = record.relevant
        self.state = next(entry.name for entry in record.inputs if entry.role == "state")
        library = library_of(given[record.main], record.main)
        self.xp, self.library = library.namespace, library.name
        self.main = (record.main, given[record.main])

    def run(self, R_output: Array | None, R_final_state: Array | None) -> Relevance:
        xp, prepared, given = self.xp, self.prepared, self.given
        names = frozenset(name for name in (self.value, self.state) if given.get(name) is not None)
        walk = states.walk(prepared, self.method, self.state_epsilon)
        output, last = prepared.output(walk.output), prepared.state(walk.final_state)
        with quiet(self.library):
            R_output = self._checked("R_output", R_output, output)
            R_final_state = self._checked("R_final_state", R_final_state, last)
            rho, kept = _divided(xp, R_output, output, self.epsilon)
            # A final state is no read-out: R / h, so that the sequence that goes on sees no second stabiliser.
            rho_last, kept_last = _divided(xp, R_final_state, last, 0.0)
            d_y, d_last = prepared.cotangents(rho, rho_last)
            grads, leaks = walk.back(d_y, d_last, prepared.wanted(names))
            found = prepared.pull(grads, d_y)
            into = {name: states.inner(xp, found[name], given[name]) for name in names}
            report = self._report(
                (R_output, R_final_state), (kept, kept_last), (rho, rho_last), tuple(into.values()), leaks
            )
        return Relevance(into[self.value], into.get(self.state), report)

    def _checked(self, name: str, R: Array | None, like: Array) -> Array | None:
        """Relevance in the real dtype that fits the result; None stays None."""
        if R is None:
            return None
        check_same_library([self.main, (name, R)])
        if dtype_name(R.dtype) in COMPLEX:
            raise DtypeError(f"{name}: dtype {dtype_name(R.dtype)}; relevance is real: pass its real part")
        check_floating(R, name, complex_allowed=False)
        if tuple(R.shape) != tuple(like.shape):
            raise ShapeError(f"{name}: shape {tuple(R.shape)}, but the result has shape {tuple(like.shape)}")
        return self.xp.astype(R, dtype_of(self.xp, self.prepared.call.compute))

    def _report(
        self,
        R: tuple[Array | None, ...],
        kept: tuple[Array | None, ...],
        rho: tuple[Array | None, ...],
        into: tuple[Array, ...],
        leak_state: Array | None,
    ) -> Report:
        xp = self.xp
        put = [x for x in R if x is not None]
        lost = [x - y for x, y in zip(R, kept, strict=True) if x is not None and y is not None]
        leaks = [] if leak_state is None else [leak_state]
        apart = len({x.shape[0] for x in (*put, *into, *leaks)}) == 1
        total, arrived, readout, inside = (_rows(xp, parts, apart) for parts in (put, into, lost, leaks))
        largest = zeros(xp, (1,), put[0].dtype, put[0])
        for size in (
            xp.max(xp.abs(xp.reshape(x, (-1,))), keepdims=True)
            for x in rho
            if x is not None and 0 not in x.shape
        ):
            largest = xp.maximum(largest, size)
        return Report(total, arrived, readout, total * 0 if inside is None else inside, largest)


def _rows(xp: Namespace, parts: Sequence[Array], apart: bool) -> Array:
    """The sum of some arrays over all axes but the first, or over all; None of no arrays."""
    found = None
    for part in parts:
        rows = xp.sum(part, axis=tuple(range(1, part.ndim))) if part.ndim > 1 else part
        rows = rows if apart else xp.sum(rows, keepdims=True)
        found = rows if found is None else found + rows
    return found


def _divided(xp: Namespace, R: Array | None, out: Array, epsilon: float) -> tuple[Array | None, Array | None]:
    """rho = R / stab(out), the conjugate's for complex ones, and what of R goes through it."""
    if R is None:
        return None, None
    size = xp.abs(out)
    nothing = xp.zeros_like(size)
    zero = size == 0
    whole = xp.where(zero, xp.ones_like(size), size)
    # A complex quotient goes by 1 / size, which a subnormal size has none of: there both are taken 2^64 times.
    lift = xp.where(
        size < xp.finfo(size.dtype).smallest_normal, xp.full_like(size, 2.0**64), xp.ones_like(size)
    )
    unit = xp.where(zero, xp.ones_like(out), (out * lift) / (whole * lift))
    stable = size + epsilon
    empty = stable == 0
    rho = xp.where(empty, nothing, R / xp.where(empty, xp.ones_like(size), stable))
    return unit * rho, size * rho


def _wide(bound: Bound) -> dict[str, Any]:
    """The arrays of a call, in float32 at least those that set the precision of its result and of relevance."""
    given = dict(bound.arrays)
    state = next(entry.name for entry in bound.record.inputs if entry.role == "state")
    for name in {bound.record.relevant, bound.record.main, state}:
        array = given[name]
        if array is not None and dtype_name(array.dtype) in HALF:
            xp = library_of(array, name).namespace
            with quiet(library_of(array, name).name):
                given[name] = xp.astype(array, dtype_of(xp, "float32"))
    return given


def _epsilon(value: Any, name: str) -> float:
    number = check_number(value, name)
    if not 0 <= number < inf:
        raise ArgumentError(f"{name}: {shown(value)}; allowed is a finite number of at least 0")
    return number


def _base(record: Record) -> str:
    return record.base.name if isinstance(record, Derived) else record.name


def _total(x: Array) -> float:
    xp = library_of(x, "report").namespace
    return float(xp.sum(x))
