"""Adam for a mapping of names to arrays of any library.

The optimiser is functional: it holds its settings, and the state travels beside the parameters.

    adam = Adam(learning_rate=Cosine(peak=1e-2, steps=500, warmup=20))
    state = adam.init(params)
    for _ in range(500):
        gradients = ...                                  # name -> array, for instance from scanfield.vjp
        params, state = adam.update(params, gradients, state)

Nothing is written in place: read-only arrays, JAX arrays and aliased parameters are all safe.

| symbol | name | shape | in Kingma & Ba, arXiv 1412.6980, Algorithm 1 |
|---|---|---|---|
| theta | `params[name]` | any | theta |
| g | `gradients[name]` | as theta | g_t |
| m, v | `state.first[name]`, `state.second[name]` | as theta | m_t, v_t |
| t | `state.step` | an integer | t, counted from 1 at the first update |
| lambda | `weight_decay` | a number | decoupled: Loshchilov & Hutter, arXiv 1711.05101, Algorithm 2 |

    m <- beta1 m + (1 - beta1) g              v <- beta2 v + (1 - beta2) |g|^2
    theta <- theta - rate * ( (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + epsilon) + lambda theta )
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

import numpy

from scanfield.arrays import (
    COMPLEX,
    REAL_OF,
    Array,
    Namespace,
    cast,
    check_floating,
    check_same_library,
    dtype_name,
    dtype_of,
    library_of,
)
from scanfield.errors import ArgumentError, DtypeError, ShapeError, StateError
from scanfield.keywords import advised_class
from scanfield.optimize.given import detached, in_python, like_leaf
from scanfield.optimize.schedules import Schedule, positive

__all__ = ["Adam", "AdamState"]


class AdamState(NamedTuple):
    """What Adam carries from one update to the next (a pytree for JAX as it stands)."""

    step: int
    first: dict[str, Array]
    second: dict[str, Array]


@advised_class
@dataclass(frozen=True)
class Adam:
    """Adam with bias correction and, where `weight_decay` is not 0, decoupled weight decay (AdamW).

    Parameters
    ----------
    learning_rate
        A number, or a schedule: any callable from the number of updates made to the next rate.
    beta1, beta2
        Memory of the two moments, in [0, 1).
    epsilon
        Added to the root of the second moment, after its bias correction.
    weight_decay
        Each update also takes `rate * weight_decay * parameter` away.

    float16 and bfloat16 parameters keep float32 moments, and an update is computed in float32 and rounded
    once. (An update smaller than the spacing of the parameter's dtype is lost in that rounding: keep a
    float32 copy of the parameters where that matters.) Complex parameters expect d/dRe + i d/dIm, as
    `scanfield.vjp` and torch give it; their second moment is |g|^2, so that a rotation of the plane changes
    nothing.

    Raises `ArgumentError` for settings out of range and names that do not match, `ShapeError` and
    `DtypeError` for a gradient that does not fit its parameter, `StateError` for a state that was made for
    other parameters.

    Examples
    --------
    >>> import numpy as np
    >>> adam = Adam(learning_rate=0.1)
    >>> params = {"x": np.asarray([3.0, -2.0])}
    >>> state = adam.init(params)
    >>> for _ in range(200):
    ...     params, state = adam.update(params, {"x": 2 * params["x"]}, state)     # minimise x^2
    >>> bool(np.max(np.abs(params["x"])) < 1e-2)
    True
    """

    learning_rate: float | Schedule
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        in_python(self)
        if not callable(self.learning_rate):
            positive("learning_rate", self.learning_rate)
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ArgumentError(f"{name} = {getattr(self, name)}: it lies in [0, 1)")
        positive("epsilon", self.epsilon)
        if not self.weight_decay >= 0:
            raise ArgumentError(f"weight_decay = {self.weight_decay}: it is not negative")

    def init(self, params: Mapping[str, Array]) -> AdamState:
        """Zero moments for these parameters."""
        if not isinstance(params, Mapping):
            raise ArgumentError(
                f"params is a {type(params).__name__}: "
                "Adam takes a mapping of names to arrays, {'weight': weight}"
            )
        return AdamState(
            0,
            {name: _zeros(name, value, real=False) for name, value in params.items()},
            {name: _zeros(name, value, real=True) for name, value in params.items()},
        )

    def update(
        self, params: Mapping[str, Array], gradients: Mapping[str, Array], state: AdamState
    ) -> tuple[dict[str, Array], AdamState]:
        """One step: the new parameters, in their dtypes, and the new state.

        torch's autograd does not follow it: where a parameter requires a gradient, the new one is a leaf that does. (Under
        `torch.func` and `torch.compile` an update is a function like any other.)
        """
        _same_names(params, gradients, state)
        step = state.step + 1
        rate: Any = self.learning_rate(state.step) if callable(self.learning_rate) else self.learning_rate
        if isinstance(rate, Real):  # of NumPy perhaps, whose numbers are arrays to other libraries
            rate = float(rate)
        bias1, bias2 = 1 - self.beta1**step, 1 - self.beta2**step

        moved, first, second = {}, {}, {}
        for name, value in params.items():
            xp = library_of(value, f"params[{name!r}]").namespace
            gradient = _fitting(name, gradients[name], value, state.first[name])
            first[name] = _array(xp, self.beta1 * state.first[name] + (1 - self.beta1) * gradient)
            second[name] = _array(
                xp, self.beta2 * state.second[name] + (1 - self.beta2) * _square(gradient, xp)
            )

            wide = cast(xp, detached(value), first[name].dtype)
            change = (first[name] / bias1) / (xp.sqrt(second[name] / bias2) + self.epsilon)
            if self.weight_decay:
                change = change + self.weight_decay * wide
            moved[name] = like_leaf(cast(xp, _array(xp, wide - rate * change), value.dtype), value)
        return moved, AdamState(step, first, second)


def _zeros(name: str, value: Array, *, real: bool) -> Array:
    argument = f"params[{name!r}]"
    xp = library_of(value, argument).namespace
    dtype = check_floating(value, argument, complex_allowed=True)
    # REAL_OF widens the half precisions to float32 and leaves the rest as wide as it is.
    moment = dtype if dtype in COMPLEX and not real else REAL_OF[dtype]
    return xp.zeros_like(value, dtype=dtype_of(xp, moment))


def _array(xp: Namespace, found: Array) -> Array:
    """NumPy's arithmetic turns an array without axes into a scalar, which is no array any more."""
    return xp.asarray(found) if isinstance(found, numpy.generic) else found


def _square(gradient: Array, xp: Namespace) -> Array:
    if dtype_name(gradient.dtype) in COMPLEX:
        return xp.real(gradient) ** 2 + xp.imag(gradient) ** 2
    return gradient * gradient


def _fitting(name: str, gradient: Array, value: Array, moment: Array) -> Array:
    """The gradient in the moment's dtype, once it is known to belong to this parameter."""
    argument = f"gradients[{name!r}]"
    xp = check_same_library([(f"params[{name!r}]", value), (argument, gradient)]).namespace
    if tuple(moment.shape) != tuple(value.shape):
        raise StateError(
            f"the state of {name!r} has shape {tuple(moment.shape)}, the parameter {tuple(value.shape)}: "
            "the state was made for other parameters; start again with adam.init(params)"
        )
    if tuple(gradient.shape) != tuple(value.shape):
        raise ShapeError(
            f"{argument} has shape {tuple(gradient.shape)}, params[{name!r}] {tuple(value.shape)}: "
            "they must be equal (sum the gradient over the axes that were broadcast)"
        )
    dtype = check_floating(gradient, argument, complex_allowed=True)
    if dtype in COMPLEX and dtype_name(value.dtype) not in COMPLEX:
        raise DtypeError(
            f"{argument} is {dtype} and params[{name!r}] {dtype_name(value.dtype)}: "
            "pass the real part of the gradient of a real parameter"
        )
    return cast(xp, detached(gradient), moment.dtype)


def _same_names(params: Mapping[str, Array], gradients: Mapping[str, Array], state: AdamState) -> None:
    missing, unknown = sorted(params.keys() - gradients.keys()), sorted(gradients.keys() - params.keys())
    if missing or unknown:
        raise ArgumentError(
            f"gradients and params have different names: no gradient for {missing}, "
            f"no parameter for {unknown}; give Adam only the parameters that it trains"
        )
    if params.keys() != state.first.keys():
        raise StateError(
            f"the state holds {sorted(state.first)}, the parameters are {sorted(params)}: "
            "the state was made for other parameters; start again with adam.init(params)"
        )
