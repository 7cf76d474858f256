"""The causal depthwise convolution of Mamba and the delta rules: forward, one token, packs, and its exact gradient.

Glossary (causal_conv1d, Dao; Gu and Dao, arXiv 2312.00752, section 3.4)
--------
x_t     ``x``        (batch, time, channels)
w_j     ``weight``   (channels, width)             w_(width-1) meets the newest token
b       ``bias``     (channels,)
state   ``initial_state``, ``final_state``   (sequences, width - 1, channels): the tokens before the first, the oldest first

    y_t = b + sum_j w_j x_(t-width+1+j)          dx_s = sum_j w_j dy_(s+width-1-j)
    dw_j = sum_t dy_t x_(t-width+1+j)            db = sum_t dy_t

The state in front of x makes one long series, over which y is a sum of ``width`` shifted products. Packed sequences become
one series too: each sequence behind its own state, and the outputs at the states' places left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy

from scanfield.arrays import (
    Array,
    Namespace,
    cast,
    check_floating,
    check_same_library,
    device_of,
    dtype_of,
    host_integers,
    widest,
    zeros,
)
from scanfield.errors import ArgumentError, ShapeError
from scanfield.layers.elementary import sigmoid
from scanfield.layers.tape import Function, Saved
from scanfield.lrp.rules import LINEAR_RULES, Epsilon, Passed, Rule
from scanfield.scans.canonical import quiet
from scanfield.scans.packing import check_bounds
from scanfield.scans.surface import ScanResult

Bounds = tuple[int, ...] | None


@dataclass(frozen=True)
class Convolution(Function):
    """Inputs x, weight, bias or None, state or None; outputs y and the final state."""

    bounds: Bounds = None

    kind = "convolution"
    rules = LINEAR_RULES

    def forward(self, xp: Namespace, *inputs: Any) -> tuple[Array, ...]:
        """y and the last width - 1 tokens of each sequence."""
        x, weight, bias, state = inputs
        f = _Shifts.of(xp, x, weight, state, self.bounds)
        series = f.series(x, state)
        y = f.apply(series, weight)
        return y if bias is None else y + bias, f.last(series)

    def backward(
        self, xp: Namespace, saved: Saved, d_outputs: tuple[Any, ...], wanted: tuple[bool, ...]
    ) -> tuple[Array | None, ...]:
        """dx, dw, db and the gradient of the state."""
        x, weight, _, state = saved.inputs
        f = _Shifts.of(xp, x, weight, state, self.bounds)
        d, d_last = d_outputs
        d = zeros(xp, saved.outputs[0].shape, saved.outputs[0].dtype, x) if d is None else d
        d_series = f.transpose(d, weight)
        if d_last is not None:
            d_series = d_series + f.last_back(d_last)
        d_x, d_state = f.parts(d_series)
        d_weight = f.weight_back(f.series(x, state), d) if wanted[1] else None
        d_bias = xp.sum(d, axis=(0, 1)) if wanted[2] else None
        return d_x, d_weight, d_bias, d_state if state is not None else None

    def relevance(self, xp: Namespace, saved: Saved, rho: tuple[Any, ...], rule: Rule | None) -> Passed:
        """By the rule that was chosen, for x and the state alike; relevance of the final state goes to where it came from."""
        (x, weight, bias, state), y, (r, r_last) = saved.inputs, saved.outputs[0], rho
        f = _Shifts.of(xp, x, weight, state, self.bounds)
        r = xp.zeros_like(y) if r is None else r
        found = (rule or Epsilon()).propagate(xp, f, f.series(x, state), weight, bias, y, r)
        (into,), (extra,) = found.rho, found.extra or (None,)
        if r_last is not None:
            into = f.last_back(r_last) + (0 if into is None else into)
        rho_x, rho_state = (None, None) if into is None else f.parts(into)
        extra_x, extra_state = (None, None) if extra is None else f.parts(extra)
        if state is None:
            rho_state = extra_state = None
        return found._replace(rho=(rho_x, None, None, rho_state), extra=(extra_x, None, None, extra_state))


@dataclass(frozen=True)
class _Shifts:
    """The convolution as a linear map of the series in which every sequence stands behind its state."""

    xp: Namespace
    width: int
    time: int
    sequences: int
    bounds: Bounds
    stated: bool

    @staticmethod
    def of(xp: Namespace, x: Any, weight: Any, state: Any, bounds: Bounds) -> _Shifts:
        """For these arrays; ShapeError where they do not fit."""
        channels, width = weight.shape
        if x.shape[-1] != channels:
            raise ShapeError(f"x: shape {tuple(x.shape)}, but weight has {channels} channels")
        sequences = x.shape[0] if bounds is None else len(bounds) - 1
        wanted = (sequences, width - 1, channels)
        if state is not None and tuple(state.shape) != wanted:
            raise ShapeError(
                f"initial_state: shape {tuple(state.shape)}, must be {wanted} (sequences, width - 1, channels)"
            )
        return _Shifts(xp, width, x.shape[1], sequences, bounds, state is not None)

    @property
    def places(self) -> _Places:
        """Where things stand in the series of a pack."""
        return _places(self.bounds or (0,), self.width - 1)

    def series(self, x: Array, state: Array | None) -> Array:
        """The state and x as one series."""
        xp, history = self.xp, self.width - 1
        if state is None:
            state = zeros(xp, (self.sequences, history, x.shape[-1]), x.dtype, x)
        if self.bounds is None:
            return xp.concat([state, x], axis=1)
        row = xp.reshape(state, (1, self.sequences * history, x.shape[-1]))
        return self._take(xp.concat([row, x], axis=1), self.places.order)

    def parts(self, series: Array) -> tuple[Array, Array]:
        """The series taken apart: x and the state."""
        xp, history = self.xp, self.width - 1
        if self.bounds is None:
            return series[:, history:, ...], series[:, :history, ...]
        whole = self._take(series, self.places.back)
        count = self.sequences * history
        state = xp.reshape(whole[:, :count, ...], (self.sequences, history, series.shape[-1]))
        return whole[:, count:, ...], state

    def apply(self, x: Array, weight: Array) -> Array:
        """y without bias, from the series."""
        length = x.shape[1] - self.width + 1
        if length < 0:
            return x[:, :0, ...]
        y = None
        for j in range(self.width):
            part = x[:, j : j + length, ...] * weight[:, j]
            y = part if y is None else y + part
        return y if self.bounds is None else self._take(y, self.places.tokens)

    def transpose(self, rho: Array, weight: Array) -> Array:
        """The gradient of the series."""
        return self._shifted(rho, [weight[:, j] for j in range(self.width)])

    def _shifted(self, d: Array, weights: list[Array]) -> Array:
        xp, history = self.xp, self.width - 1
        d = self._spread(d)
        pad = zeros(xp, (d.shape[0], history, d.shape[-1]), d.dtype, d)
        wide, length = xp.concat([pad, d, pad], axis=1), d.shape[1] + history
        total = None
        for j, weight in enumerate(weights):
            part = wide[:, history - j : history - j + length, ...] * weight
            total = part if total is None else total + part
        return total

    def weight_back(self, series: Array, d: Array) -> Array:
        """dw"""
        d = self._spread(d)
        length = d.shape[1]
        columns = [self.xp.sum(d * series[:, j : j + length, ...], axis=(0, 1)) for j in range(self.width)]
        return self.xp.stack(columns, axis=-1)

    def _spread(self, d: Array) -> Array:
        """Cotangents of a pack at their places in the series, 0 between them."""
        if self.bounds is None:
            return d
        nothing = zeros(self.xp, (1, 1, d.shape[-1]), d.dtype, d)
        return self._take(self.xp.concat([nothing, d], axis=1), self.places.spread)

    def last(self, series: Array) -> Array:
        """The last width - 1 tokens of each sequence."""
        history = self.width - 1
        if self.bounds is None:
            return series[:, series.shape[1] - history :, ...]
        rows = self._take(series, self.places.last)
        return self.xp.reshape(rows, (self.sequences, history, series.shape[-1]))

    def last_back(self, d: Array) -> Array:
        """The gradient of the series for that of the final state."""
        xp, history = self.xp, self.width - 1
        if self.bounds is None:
            return xp.concat([zeros(xp, (d.shape[0], self.time, d.shape[-1]), d.dtype, d), d], axis=1)
        rows = xp.reshape(d, (1, self.sequences * history, d.shape[-1]))
        nothing = zeros(xp, (1, 1, d.shape[-1]), d.dtype, d)
        return self._take(xp.concat([nothing, rows], axis=1), self.places.last_spread)

    def ones(self, x: Array) -> Array:
        """1 for tokens and a state that was given, 0 for the padding in front of a sequence without one."""
        ones = self.xp.ones_like(x)
        if self.stated:
            return ones
        tokens, state = self.parts(ones)
        return self.series(tokens, state * 0)

    def _take(self, x: Array, places: tuple[int, ...]) -> Array:
        # int32 serves where a library has no 64-bit integers; no series is longer.
        index = self.xp.asarray(numpy.asarray(places, dtype=numpy.int32), device=device_of(x))
        return self.xp.take(x, index, axis=1)


@dataclass(frozen=True)
class _Places:
    order: tuple[int, ...]
    """Series <- states of all sequences, then all tokens."""
    back: tuple[int, ...]
    tokens: tuple[int, ...]
    """Which sums over ``width`` entries of the series are outputs."""
    spread: tuple[int, ...]
    """Those sums <- 0, then the outputs."""
    last: tuple[int, ...]
    last_spread: tuple[int, ...]
    """Series <- 0, then the final states."""


@lru_cache(maxsize=64)
def _places(bounds: tuple[int, ...], history: int) -> _Places:
    count = (len(bounds) - 1) * history
    order: list[int] = []
    tokens: list[int] = []
    last: list[int] = []
    for i, (start, stop) in enumerate(pairwise(bounds)):
        tokens += [len(order) + t for t in range(stop - start)]
        order += range(i * history, (i + 1) * history)
        order += range(count + start, count + stop)
        last += range(len(order) - history, len(order))
    back = sorted(range(len(order)), key=order.__getitem__)
    spread = [0] * max(len(order) - history, 0)
    for i, place in enumerate(tokens):
        spread[place] = i + 1
    last_spread = [0] * len(order)
    for i, place in enumerate(last):
        last_spread[place] = i + 1
    return _Places(*(tuple(x) for x in (order, back, tokens, spread, last, last_spread)))


def read_bounds(cu_seqlens: Any) -> Bounds:
    """``cu_seqlens`` as host integers; ArgumentError where they live on an accelerator."""
    if cu_seqlens is None:
        return None
    bounds = host_integers(cu_seqlens, "cu_seqlens")
    if not isinstance(bounds, tuple):
        raise ArgumentError("cu_seqlens: its values are on an accelerator; cu_seqlens = cu_seqlens.tolist()")
    return bounds


# ------------------------------------------------------------------------------------------------------------
# The function


def causal_conv1d(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    initial_state: Array | None = None,
    activation: str | None = None,
    cu_seqlens: Any = None,
) -> ScanResult:
    """Convolve every channel with its own weights, looking back only.

    Parameters
    ----------
    x : array (batch, time, channels)
    weight : array (channels, width)
        ``weight[:, -1]`` meets the newest token.
    bias : array (channels,), optional
    initial_state : array (batch, width - 1, channels), optional
        The tokens before the first, the oldest first; zeros if absent. (sequences, ...) with ``cu_seqlens``.
    activation : {None, "silu"}
    cu_seqlens : integers (sequences + 1,), optional
        Bounds of sequences that are packed into one row; none sees another.

    Returns
    -------
    ScanResult
        ``output`` (batch, time, channels) in the dtype of x, and ``final_state`` in float32 at least.

    Raises
    ------
    ShapeError, DtypeError, BackendError, DeviceError
        For arrays that do not fit each other.
    ArgumentError
        For an unknown activation, or bounds on an accelerator.

    Notes
    -----
    Cross-correlation with zero padding in front, as ``torch.nn.Conv1d(groups=channels, padding=width - 1)`` cut to time.

    Examples
    --------
    >>> import numpy
    >>> from scanfield.layers import causal_conv1d
    >>> x, weight = numpy.array([[[1.0], [2.0], [3.0]]]), numpy.array([[0.5, 1.0]])
    >>> causal_conv1d(x, weight).output[0, :, 0]
    array([1. , 2.5, 4. ])
    """
    return causal_conv1d_vjp(
        x, weight, bias, initial_state=initial_state, activation=activation, cu_seqlens=cu_seqlens
    )[0]


def causal_conv1d_step(
    state: Array | None,
    x: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    activation: str | None = None,
) -> tuple[Array, Array]:
    """One token of ``causal_conv1d``: ``(output, state)``; the given state is not changed.

    Parameters
    ----------
    state : array (batch, width - 1, channels) or None
    x : array (batch, channels)
    weight, bias, activation
        As in ``causal_conv1d``, and so are the errors.

    Examples
    --------
    >>> import numpy
    >>> from scanfield.layers import causal_conv1d_step
    >>> weight, state = numpy.array([[0.5, 1.0]]), None
    >>> y, state = causal_conv1d_step(state, numpy.array([[1.0]]), weight)
    >>> causal_conv1d_step(state, numpy.array([[2.0]]), weight)[0]
    array([[2.5]])
    """
    xp = check_same_library([("x", x), ("weight", weight)]).namespace
    if x.ndim != 2:
        raise ShapeError(f"x: shape {tuple(x.shape)}, one token is (batch, channels)")
    result = causal_conv1d(
        xp.expand_dims(x, axis=1), weight, bias, initial_state=state, activation=activation
    )
    return xp.squeeze(result.output, axis=1), result.final_state


def causal_conv1d_vjp(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    initial_state: Array | None = None,
    activation: str | None = None,
    cu_seqlens: Any = None,
) -> tuple[ScanResult, Callable[..., dict[str, Array]]]:
    """``causal_conv1d`` and its pullback: ``pullback(d_output=None, d_final_state=None)`` gives gradients by name.

    Parameters, errors
        As in ``causal_conv1d``; the pullback raises ArgumentError without cotangents, ShapeError for one that does not fit.

    Examples
    --------
    >>> import numpy
    >>> from scanfield.layers import causal_conv1d_vjp
    >>> x, weight = numpy.array([[[1.0], [2.0], [3.0]]]), numpy.array([[0.5, 1.0]])
    >>> _, pullback = causal_conv1d_vjp(x, weight)
    >>> pullback(numpy.ones((1, 3, 1)))["weight"]
    array([[3., 6.]])
    """
    given = {"x": x, "weight": weight, "bias": bias, "initial_state": initial_state}
    library = check_same_library([(name, array) for name, array in given.items() if array is not None])
    xp = library.namespace
    if activation not in (None, "silu"):
        raise ArgumentError(f"activation: {activation!r}; allowed are None and 'silu'")
    names = [check_floating(a, name, complex_allowed=False) for name, a in given.items() if a is not None]
    for name, rank, axes in (("x", 3, "(batch, time, channels)"), ("weight", 2, "(channels, width)")):
        if given[name].ndim != rank:
            raise ShapeError(f"{name}: shape {tuple(given[name].shape)}, must be {axes}")
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ShapeError(f"bias: shape {tuple(bias.shape)}, must be ({weight.shape[0]},) (channels,)")
    bounds = read_bounds(cu_seqlens)
    check_bounds(bounds, x.shape[0], x.shape[1])
    dtype = dtype_of(xp, widest(names))
    arrays = tuple([None if a is None else cast(xp, a, dtype) for a in given.values()])
    function = Convolution(bounds)
    with quiet(library.name):
        outputs = function.forward(xp, *arrays)
        sigma = sigmoid(xp, outputs[0]) if activation == "silu" else None
        y = outputs[0] if sigma is None else outputs[0] * sigma
    result = ScanResult(cast(xp, y, x.dtype), outputs[1])

    def pullback(d_output: Array | None = None, d_final_state: Array | None = None) -> dict[str, Array]:
        if d_output is None and d_final_state is None:
            raise ArgumentError("pullback: d_output or d_final_state is needed, both are None")
        for name, d, like in (("d_output", d_output, y), ("d_final_state", d_final_state, outputs[1])):
            if d is not None:
                check_same_library([("x", x), (name, d)])
                if tuple(d.shape) != tuple(like.shape):
                    raise ShapeError(
                        f"{name}: shape {tuple(d.shape)}, but the result has {tuple(like.shape)}"
                    )
        with quiet(library.name):
            d_y, d_last = (None if d is None else cast(xp, d, dtype) for d in (d_output, d_final_state))
            if sigma is not None and d_y is not None:
                d_y = d_y * (sigma * (1 + outputs[0] * (1 - sigma)))
            wanted = tuple(array is not None for array in arrays)
            grads = function.backward(xp, Saved(arrays, outputs, None), (d_y, d_last), wanted)
        return {
            name: cast(xp, grad, array.dtype)
            for (name, array), grad in zip(given.items(), grads, strict=True)
            if array is not None and grad is not None
        }

    return result, pullback
