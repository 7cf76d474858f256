"""Rules of relevance for linear operations (linear layers, convolutions), and the parts that blocks need beside them.

Glossary (Bach et al., doi 10.1371/journal.pone.0130140; Montavon et al., "Layer-Wise Relevance Propagation: An Overview")
--------
x, y = f(x, W) + b   input and output of an operation that is linear in x, weight W and bias b
R                    relevance
rho = R / y          the modified gradient, which passes from operation to operation without a division
stab(z)              z + epsilon sign(z) with sign(0) = +1, or z + epsilon

Relevance of an input is R = x rho + extra. Only the rules that do not see the input itself (flat, w_square, z_box) use
``extra``; the next operation would turn it into rho by a division.

| rule | share of input i in the relevance of y | |
|---|---|---|
| ``Epsilon`` | x_i w_i / stab(y) | epsilon 0: gradient times input |
| ``Gamma`` | x_i w_i + gamma times its part of the sign of y, normalised | |
| ``AlphaBeta`` | alpha (x_i w_i)+ / z+ - beta (x_i w_i)- / z- | alpha - beta = 1 |
| ``ZPlus`` | (x_i w_i)+ / z+ | alpha 1, beta 0 |
| ``ZBox`` | x_i w_i - low w_i+ - high w_i-, normalised | for inputs in a known range |
| ``WSquare`` | w_i^2, normalised | |
| ``Flat`` | alike for all | |
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from scanfield.advice import shown
from scanfield.arrays import Array, Namespace
from scanfield.errors import ArgumentError
from scanfield.keywords import advised_class


class Passed(NamedTuple):
    """What an operation passes on: per input, the modified gradient and the relevance that has no such form."""

    rho: tuple[Array | None, ...]
    extra: tuple[Array | None, ...] = ()
    """Empty where no input has any."""
    to_bias: Array | None = None
    """Relevance that the bias took, in the shape of the output."""
    absorbed: Array | None = None
    """Relevance that the stabiliser took, in the shape of the output."""


class LinearMap(Protocol):
    """An operation that is linear in its input, for any weight of one shape."""

    def apply(self, x: Array, weight: Array) -> Array:
        """f(x, W)"""

    def transpose(self, rho: Array, weight: Array) -> Array:
        """The gradient of x for the cotangent rho."""

    def ones(self, x: Array) -> Array:
        """1 in the place of every input; 0 where there is but padding."""


class Rule(ABC):
    """How relevance passes through a linear operation. Rules are values: equal settings are equal rules."""

    name: str = ""

    @abstractmethod
    def propagate(
        self, xp: Namespace, f: LinearMap, x: Array, weight: Array, bias: Array | None, y: Array, rho: Array
    ) -> Passed:
        """rho and extra of x, from rho of y."""


@advised_class
@dataclass(frozen=True)
class Epsilon(Rule):
    """R_i = x_i w_i R / stab(y); with ``epsilon=0`` the modified gradient passes unchanged (LRP-0).

    Parameters
    ----------
    epsilon : float
        The stabiliser.
    relative : bool
        Multiply it by the mean of ``|y|`` over the row of the batch, so that no unit of y matters.
    bias : bool
        Whether the bias takes its share. If not, y is taken without it, and all relevance goes to the inputs.
    signed : bool
        y + epsilon sign(y), or y + epsilon, which may pass through 0.

    >>> Epsilon(1e-3, relative=True)
    Epsilon(epsilon=0.001, relative=True, bias=True, signed=True)
    """

    epsilon: float = 0.0
    relative: bool = False
    bias: bool = True
    signed: bool = True

    name = "epsilon"

    def __post_init__(self) -> None:
        _at_least("epsilon", self.epsilon, 0.0)

    def propagate(
        self, xp: Namespace, f: LinearMap, x: Array, weight: Array, bias: Array | None, y: Array, rho: Array
    ) -> Passed:
        """As in the class."""
        with_bias = bias is not None and self.bias
        if self.epsilon == 0 and (with_bias or bias is None):
            return Passed((f.transpose(rho, weight),), (), bias * rho if bias is not None else None)
        z = y if with_bias or bias is None else y - bias
        R = y * rho
        s = self.divided(xp, R, z)
        to_bias = bias * s if with_bias and bias is not None else None
        return Passed((f.transpose(s, weight),), (), to_bias, R - z * s)

    def divided(self, xp: Namespace, R: Array, z: Array) -> Array:
        """R / stab(z); 0 where that is a division by 0."""
        epsilon: Any = self.epsilon
        if self.relative:
            axes = tuple(range(1, z.ndim))
            epsilon = epsilon * xp.mean(xp.abs(z), axis=axes, keepdims=True)
        return stabilised(xp, R, z, epsilon, signed=self.signed)


@advised_class
@dataclass(frozen=True)
class Gamma(Rule):
    """What has the sign of the output counts 1 + gamma times: y > 0 is shared by x w + gamma (x w)+, y < 0 by the negatives.

    (Montavon et al. 2019; generalised to inputs and outputs of both signs as in Andéol et al., arXiv 2112.06849.)
    """

    gamma: float = 0.25
    epsilon: float = 1e-6
    bias: bool = True

    name = "gamma"

    def __post_init__(self) -> None:
        _at_least("gamma", self.gamma, 0.0)
        _at_least("epsilon", self.epsilon, 0.0)

    def propagate(
        self, xp: Namespace, f: LinearMap, x: Array, weight: Array, bias: Array | None, y: Array, rho: Array
    ) -> Passed:
        """As in the class."""
        (up, down), R = signed_parts(xp, weight), y * rho
        up, down = weight + self.gamma * up, weight + self.gamma * down
        none = xp.zeros_like(R)
        given = bias is not None and self.bias
        biases = [bias + self.gamma * part for part in signed_parts(xp, bias)] if given else [None, None]
        return _two_sided(
            xp,
            f,
            x,
            (up, down),
            biases,
            (xp.where(y > 0, R, none), xp.where(y < 0, R, none)),
            R,
            self.epsilon,
        )


@advised_class
@dataclass(frozen=True)
class AlphaBeta(Rule):
    """alpha times by the positive products x w, minus beta times by the negative ones; alpha - beta = 1."""

    alpha: float = 2.0
    beta: float = 1.0
    epsilon: float = 1e-6
    bias: bool = True

    name = "alpha_beta"

    def __post_init__(self) -> None:
        _at_least("alpha", self.alpha, 0.0)
        _at_least("beta", self.beta, 0.0)
        _at_least("epsilon", self.epsilon, 0.0)
        if abs(self.alpha - self.beta - 1.0) > 1e-12:
            raise ArgumentError(
                f"alpha, beta: {shown(self.alpha)}, {shown(self.beta)}; relevance is conserved for alpha - beta = 1"
            )

    def propagate(
        self, xp: Namespace, f: LinearMap, x: Array, weight: Array, bias: Array | None, y: Array, rho: Array
    ) -> Passed:
        """As in the class."""
        R = y * rho
        given = bias is not None and self.bias
        biases = list(signed_parts(xp, bias)) if given else [None, None]
        return _two_sided(
            xp, f, x, signed_parts(xp, weight), biases, (self.alpha * R, -self.beta * R), R, self.epsilon
        )


@advised_class
@dataclass(frozen=True)
class ZPlus(Rule):
    """By the positive products x w alone."""

    epsilon: float = 1e-6
    bias: bool = True

    name = "z_plus"

    def __post_init__(self) -> None:
        _at_least("epsilon", self.epsilon, 0.0)

    def propagate(
        self, xp: Namespace, f: LinearMap, x: Array, weight: Array, bias: Array | None, y: Array, rho: Array
    ) -> Passed:
        """As in the class."""
        return AlphaBeta(1.0, 0.0, self.epsilon, self.bias).propagate(xp, f, x, weight, bias, y, rho)


@advised_class
@dataclass(frozen=True)
class ZBox(Rule):
    """For inputs between ``low`` and ``high``: by x w - low w+ - high w-, which is not negative. The bias takes nothing."""

    low: float = 0.0
    high: float = 1.0
    epsilon: float = 1e-6

    name = "z_box"

    def __post_init__(self) -> None:
        _at_least("epsilon", self.epsilon, 0.0)
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low <= self.high):
            raise ArgumentError(
                f"low, high: {shown(self.low)}, {shown(self.high)}; allowed are finite low <= high"
            )

    def propagate(
        self, xp: Namespace, f: LinearMap, x: Array, weight: Array, bias: Array | None, y: Array, rho: Array
    ) -> Passed:
        """As in the class."""
        (up, down), ones, R = signed_parts(xp, weight), f.ones(x), y * rho
        low, high = self.low * ones, self.high * ones
        z = f.apply(x, weight) - f.apply(low, up) - f.apply(high, down)
        s = stabilised(xp, R, z, self.epsilon)
        extra = -low * f.transpose(s, up) - high * f.transpose(s, down)
        return Passed((f.transpose(s, weight),), (extra,), None, R - z * s)


@advised_class
@dataclass(frozen=True)
class WSquare(Rule):
    """By the squares of the weights, whatever the input is."""

    epsilon: float = 1e-6
    bias: bool = True

    name = "w_square"

    def __post_init__(self) -> None:
        _at_least("epsilon", self.epsilon, 0.0)

    def propagate(
        self, xp: Namespace, f: LinearMap, x: Array, weight: Array, bias: Array | None, y: Array, rho: Array
    ) -> Passed:
        """As in the class."""
        share = bias * bias if bias is not None and self.bias else None
        return _blind(xp, f, x, weight * weight, share, y * rho, self.epsilon)


@advised_class
@dataclass(frozen=True)
class Flat(Rule):
    """Alike to all inputs of an output."""

    epsilon: float = 1e-6
    bias: bool = False
    """Whether a bias counts as one more input."""

    name = "flat"

    def __post_init__(self) -> None:
        _at_least("epsilon", self.epsilon, 0.0)

    def propagate(
        self, xp: Namespace, f: LinearMap, x: Array, weight: Array, bias: Array | None, y: Array, rho: Array
    ) -> Passed:
        """As in the class."""
        share = xp.ones_like(bias) if bias is not None and self.bias else None
        return _blind(xp, f, x, xp.ones_like(weight), share, y * rho, self.epsilon)


LINEAR_RULES = ("epsilon", "gamma", "alpha_beta", "z_plus", "z_box", "w_square", "flat")


# ------------------------------------------------------------------------------------------------------------
# What they share


def stabilised(xp: Namespace, R: Array, z: Array, epsilon: Any, *, signed: bool = True) -> Array:
    """R / stab(z); 0 where stab(z) is 0."""
    sign = xp.where(z < 0, -xp.ones_like(z), xp.ones_like(z)) if signed else 1.0
    stable = z + epsilon * sign
    empty = stable == 0
    return xp.where(empty, xp.zeros_like(z), R / xp.where(empty, xp.ones_like(z), stable))


def signed_parts(xp: Namespace, x: Array) -> tuple[Array, Array]:
    """max(x, 0) and min(x, 0)"""
    nothing = xp.zeros_like(x)
    return xp.maximum(x, nothing), xp.minimum(x, nothing)


def _two_sided(
    xp: Namespace,
    f: LinearMap,
    x: Array,
    weights: tuple[Array, Array],
    biases: list[Any],
    relevance: tuple[Array, Array],
    whole: Array,
    epsilon: float,
) -> Passed:
    """Positive relevance by products that push up (x+ up, x- down), the other by those that push down."""
    (up, down), (plus, minus) = weights, signed_parts(xp, x)
    z_up, z_down = f.apply(plus, up) + f.apply(minus, down), f.apply(plus, down) + f.apply(minus, up)
    if biases[0] is not None:
        z_up, z_down = z_up + biases[0], z_down + biases[1]
    s_up, s_down = (stabilised(xp, R, z, epsilon) for R, z in zip(relevance, (z_up, z_down), strict=True))
    rho = xp.where(
        x > 0,
        f.transpose(s_up, up) + f.transpose(s_down, down),
        f.transpose(s_up, down) + f.transpose(s_down, up),
    )
    to_bias = None if biases[0] is None else biases[0] * s_up + biases[1] * s_down
    return Passed((rho,), (), to_bias, whole - z_up * s_up - z_down * s_down)


def _blind(
    xp: Namespace, f: LinearMap, x: Array, weight: Array, share: Array | None, R: Array, epsilon: float
) -> Passed:
    """Shared out by a weight that is not negative, with every input at 1."""
    ones = f.ones(x)
    z = f.apply(ones, weight)
    z = z if share is None else z + share
    s = stabilised(xp, R, z, epsilon)
    extra = ones * f.transpose(s, weight)
    return Passed((None,), (extra,), None if share is None else share * s, R - z * s)


def _at_least(name: str, value: Any, least: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
        raise ArgumentError(f"{name}: {shown(value)}; allowed is a finite number of at least {least:g}")
