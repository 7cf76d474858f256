"""The operations that work number by number or rename axes: activations, gates, sums, splits, heads.

| function | forward | gradient | relevance (MambaLRP, arXiv 2406.07592) |
|---|---|---|---|
| ``Activation`` | y = f(x) | dx = f'(x) dy | identity: R_x = R_y, so rho_x = rho_y f(x) / x |
| ``Gate`` | y = a g | da = g dy, dg = a dy | half each; or all to a, with g held constant |
| ``Sum`` | y = a + b | da = db = dy | rho to both |
| ``Split``, ``Heads``, ``Mean``, ``Scale`` | linear, no parameters | transpose | as the gradient |
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from scanfield.advice import shown
from scanfield.arrays import Array, Namespace, zeros
from scanfield.errors import ArgumentError
from scanfield.layers.elementary import normal_cdf, sigmoid, softplus
from scanfield.layers.tape import Function, Saved
from scanfield.lrp.rules import Passed, Rule, stabilised

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "sigmoid", "softplus")
_ROOT = math.sqrt(2.0 / math.pi)
_CUBIC = 0.044715  # of the tanh form of GELU, arXiv 1606.08415


@dataclass(frozen=True)
class Activation(Function):
    """silu x sigmoid(x); gelu x Phi(x), or its tanh form; sigmoid; softplus."""

    name: str

    kind = "activation"

    def __post_init__(self) -> None:
        if self.name not in ACTIVATIONS:
            raise ArgumentError(
                f"activation: {shown(self.name)}; allowed are {', '.join(map(repr, ACTIVATIONS))}"
            )

    def forward(self, xp: Namespace, *inputs: Any) -> tuple[Array, ...]:
        """y"""
        (x,) = inputs
        if self.name == "sigmoid":
            return (sigmoid(xp, x),)
        if self.name == "softplus":
            return (softplus(xp, x),)
        return (x * self.slope(xp, x),)

    def slope(self, xp: Namespace, x: Array) -> Array:
        """y / x of those that are 0 at 0."""
        if self.name == "silu":
            return sigmoid(xp, x)
        if self.name == "gelu":
            return normal_cdf(xp, x)
        return 0.5 * (1 + xp.tanh(_ROOT * (x + _CUBIC * (x * x * x))))

    def backward(
        self, xp: Namespace, saved: Saved, d_outputs: tuple[Any, ...], wanted: tuple[bool, ...]
    ) -> tuple[Array | None, ...]:
        """dx"""
        (x,), (y,), (d,) = saved.inputs, saved.outputs, d_outputs
        if self.name == "sigmoid":
            return (d * y * (1 - y),)
        s = sigmoid(xp, x) if self.name in ("silu", "softplus") else self.slope(xp, x)
        if self.name == "softplus":
            return (d * s,)
        if self.name == "silu":
            return (d * (s * (1 + x * (1 - s))),)
        if self.name == "gelu":
            return (d * (s + x * xp.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))),)
        inner = _ROOT * (1 + 3 * _CUBIC * (x * x))
        return (d * (s + 2 * x * s * (1 - s) * inner),)

    def relevance(self, xp: Namespace, saved: Saved, rho: tuple[Any, ...], rule: Rule | None) -> Passed:
        """Identity: R_x = R_y. What is not 0 at 0 needs a stabiliser for it."""
        (x,), (y,), (r,) = saved.inputs, saved.outputs, rho
        if self.name in ("silu", "gelu", "gelu_tanh"):
            return Passed((r * self.slope(xp, x),))
        R = r * y
        into = stabilised(xp, R, x, 1e-6)
        return Passed((into,), (), None, R - x * into)


@dataclass(frozen=True)
class Gate(Function):
    """y = a g, with g of a's shape or 1 on some axes.

    ``constant``: the gate is held constant for relevance, as a coefficient; otherwise each factor gets half.
    """

    constant: bool = False

    kind = "gate"

    def forward(self, xp: Namespace, *inputs: Any) -> tuple[Array, ...]:
        """a g"""
        a, g = inputs
        return (a * g,)

    def backward(
        self, xp: Namespace, saved: Saved, d_outputs: tuple[Any, ...], wanted: tuple[bool, ...]
    ) -> tuple[Array | None, ...]:
        """g dy, a dy"""
        (a, g), (d,) = saved.inputs, d_outputs
        return d * g if wanted[0] else None, d * a if wanted[1] else None

    def relevance(self, xp: Namespace, saved: Saved, rho: tuple[Any, ...], rule: Rule | None) -> Passed:
        """Half to each, or all to a."""
        (a, g), (r,) = saved.inputs, rho
        if self.constant:
            return Passed((r * g, None))
        half = 0.5 * r
        return Passed((half * g, half * a))


@dataclass(frozen=True)
class Sum(Function):
    """y = a + b"""

    kind = "sum"

    def forward(self, xp: Namespace, *inputs: Any) -> tuple[Array, ...]:
        """a + b"""
        a, b = inputs
        return (a + b,)

    def backward(
        self, xp: Namespace, saved: Saved, d_outputs: tuple[Any, ...], wanted: tuple[bool, ...]
    ) -> tuple[Array | None, ...]:
        """dy to both"""
        return tuple([d_outputs[0] if want else None for want in wanted])


@dataclass(frozen=True)
class Scale(Function):
    """y = c x"""

    factor: float

    kind = "scale"

    def forward(self, xp: Namespace, *inputs: Any) -> tuple[Array, ...]:
        """c x"""
        return (inputs[0] * self.factor,)

    def backward(
        self, xp: Namespace, saved: Saved, d_outputs: tuple[Any, ...], wanted: tuple[bool, ...]
    ) -> tuple[Array | None, ...]:
        """c dy"""
        return (d_outputs[0] * self.factor,)


@dataclass(frozen=True)
class Split(Function):
    """The last axis in pieces of these sizes."""

    sizes: tuple[int, ...]

    kind = "split"

    def forward(self, xp: Namespace, *inputs: Any) -> tuple[Array, ...]:
        """The pieces."""
        bounds = pairwise(accumulate(self.sizes, initial=0))
        return tuple([inputs[0][..., start:stop] for start, stop in bounds])

    def backward(
        self, xp: Namespace, saved: Saved, d_outputs: tuple[Any, ...], wanted: tuple[bool, ...]
    ) -> tuple[Array | None, ...]:
        """Side by side again."""
        pieces = [
            zeros(xp, y.shape, y.dtype, y) if d is None else d
            for y, d in zip(saved.outputs, d_outputs, strict=True)
        ]
        return (xp.concat(pieces, axis=-1),)


@dataclass(frozen=True)
class Heads(Function):
    """(..., heads * size) <-> (..., heads, size)"""

    heads: int
    merge: bool = False

    kind = "shape"

    def forward(self, xp: Namespace, *inputs: Any) -> tuple[Array, ...]:
        """Split the last axis, or merge the last two."""
        return (self._merged(xp, inputs[0]) if self.merge else self._parted(xp, inputs[0]),)

    def backward(
        self, xp: Namespace, saved: Saved, d_outputs: tuple[Any, ...], wanted: tuple[bool, ...]
    ) -> tuple[Array | None, ...]:
        """The other way."""
        return (self._parted(xp, d_outputs[0]) if self.merge else self._merged(xp, d_outputs[0]),)

    def _parted(self, xp: Namespace, x: Any) -> Array:
        return xp.reshape(x, (*x.shape[:-1], self.heads, x.shape[-1] // self.heads))

    def _merged(self, xp: Namespace, x: Any) -> Array:
        return xp.reshape(x, (*x.shape[:-2], x.shape[-2] * x.shape[-1]))


@dataclass(frozen=True)
class DropAxis(Function):
    """(channels, 1, width) -> (channels, width): torch keeps an axis of input channels in its weights."""

    kind = "shape"

    def forward(self, xp: Namespace, *inputs: Any) -> tuple[Array, ...]:
        """Without the axis."""
        return (xp.squeeze(inputs[0], axis=1),)

    def backward(
        self, xp: Namespace, saved: Saved, d_outputs: tuple[Any, ...], wanted: tuple[bool, ...]
    ) -> tuple[Array | None, ...]:
        """With it."""
        return (xp.expand_dims(d_outputs[0], axis=1),)


@dataclass(frozen=True)
class Repeat(Function):
    """(batch, time, heads, ...) -> (batch, time, heads * count, ...): each head count times in a row."""

    count: int

    kind = "shape"

    def forward(self, xp: Namespace, *inputs: Any) -> tuple[Array, ...]:
        """Blocks of equal heads."""
        x = inputs[0]
        head, tail = x.shape[:3], x.shape[3:]
        wide = xp.broadcast_to(xp.expand_dims(x, axis=3), (*head, self.count, *tail))
        return (xp.reshape(wide, (*head[:2], head[2] * self.count, *tail)),)

    def backward(
        self, xp: Namespace, saved: Saved, d_outputs: tuple[Any, ...], wanted: tuple[bool, ...]
    ) -> tuple[Array | None, ...]:
        """The sum over each block."""
        shape = saved.inputs[0].shape
        parted = xp.reshape(d_outputs[0], (*shape[:3], self.count, *shape[3:]))
        return (xp.sum(parted, axis=3),)


@dataclass(frozen=True)
class Mean(Function):
    """The mean of the last axis."""

    kind = "shape"

    def forward(self, xp: Namespace, *inputs: Any) -> tuple[Array, ...]:
        """The mean."""
        return (xp.mean(inputs[0], axis=-1),)

    def backward(
        self, xp: Namespace, saved: Saved, d_outputs: tuple[Any, ...], wanted: tuple[bool, ...]
    ) -> tuple[Array | None, ...]:
        """Spread evenly."""
        x, d = saved.inputs[0], d_outputs[0]
        return (xp.ones_like(x) * xp.expand_dims(d / x.shape[-1], axis=-1),)
