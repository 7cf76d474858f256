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

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy

from scanfield.arrays import (
    Array,
    Namespace,
    device_of,
    host_integers,
    zeros,
)
from scanfield.errors import ArgumentError, ShapeError
from scanfield.layers.tape import Function, Saved
from scanfield.lrp.rules import LINEAR_RULES, Epsilon, Passed, Rule
from scanfield.tracing import constant_for_compilers

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
        key = self.bounds or (0,), self.width - 1
        _remember(*key)
        return _PLACES.get(key) or _places(*key)  # other threads may have put theirs in its place

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
        if length < 0:  # a pack of no sequences
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
        if not d.shape[1] and self.bounds is not None:  # a pack of no sequences has no padding either
            return d
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
        if not length:  # the series may be shorter than the window
            return zeros(self.xp, (d.shape[-1], self.width), d.dtype, d)
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

    def _take(self, x: Array, places: Any) -> Array:
        # A copy: some libraries would share memory with what is kept, or warn of what they may not write.
        index = self.xp.asarray(places.copy(), device=device_of(x))
        return self.xp.take(x, index, axis=1)


class _Places(NamedTuple):
    """Host integers: where things stand in the series of a pack."""

    order: Any
    """Series <- states of all sequences, then all tokens."""
    back: Any
    tokens: Any
    """Which sums over ``width`` entries of the series are outputs."""
    spread: Any
    """Those sums <- 0, then the outputs."""
    last: Any
    last_spread: Any
    """Series <- 0, then the final states."""


_PLACES: dict[tuple[tuple[int, ...], int], _Places] = {}
_MOST_PLACES = 64  # packs remembered


@constant_for_compilers
def _remember(bounds: tuple[int, ...], history: int) -> bool:
    """Work the places of a pack out, unless it was met of late. A compiler that traces does so once, and reads them."""
    key = bounds, history
    if key not in _PLACES:
        while len(_PLACES) >= _MOST_PLACES:
            _PLACES.pop(next(iter(_PLACES)), None)
        _PLACES[key] = _places(bounds, history)
    return True


def _places(bounds: tuple[int, ...], history: int) -> _Places:
    # int32 serves where a library has no 64-bit integers; no series is longer.
    starts, ends = (numpy.asarray(ends, dtype=numpy.int32) for ends in (bounds[:-1], bounds[1:]))
    count, time = len(starts), bounds[-1]
    sequence = numpy.arange(count, dtype=numpy.int32)
    owner = numpy.repeat(sequence, ends - starts)
    before = numpy.arange(history, dtype=numpy.int32)
    tokens = numpy.arange(time, dtype=numpy.int32) + owner * history
    states = (starts + sequence * history)[:, None] + before
    last = ((ends + sequence * history)[:, None] + before).reshape(-1)
    back = numpy.concatenate([states.reshape(-1), tokens + history])
    order = numpy.empty_like(back)
    order[back] = numpy.arange(len(back), dtype=numpy.int32)
    spread = numpy.zeros(max(len(back) - history, 0), dtype=numpy.int32)
    spread[tokens] = numpy.arange(1, time + 1, dtype=numpy.int32)
    last_spread = numpy.zeros_like(back)
    last_spread[last] = numpy.arange(1, len(last) + 1, dtype=numpy.int32)
    found = _Places(order, back, tokens, spread, last, last_spread)
    for array in found:
        array.flags.writeable = False  # it is kept for the next call
    return found


def read_bounds(cu_seqlens: Any) -> Bounds:
    """``cu_seqlens`` as host integers; ArgumentError where they live on an accelerator."""
    if cu_seqlens is None:
        return None
    bounds = host_integers(cu_seqlens, "cu_seqlens")
    if not isinstance(bounds, tuple):
        raise ArgumentError("cu_seqlens: its values are on an accelerator; cu_seqlens = cu_seqlens.tolist()")
    return bounds
