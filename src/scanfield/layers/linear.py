"""The operations with a weight matrix and the norm.

| function | forward | gradient |
|---|---|---|
| ``Matrix`` | y = x W^T + b | dx = dy W, dW = sum dy^T x, db = sum dy |
| ``Lookup`` | y = W[token] | dW = one-hot^T dy |
| ``Norm`` | y = w x r, r = 1 / sqrt(mean x^2 + epsilon) | dx = r (n - x r mean(n x r)), n = w dy; dw = sum dy x r |
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from scanfield.arrays import Array, Namespace, device_of, dtype_name
from scanfield.errors import ArgumentError, DtypeError, ShapeError
from scanfield.layers.tape import Function, Saved
from scanfield.lrp.rules import LINEAR_RULES, Epsilon, Passed, Rule


@dataclass(frozen=True)
class Matrix(Function):
    """y = x W^T + b: x (..., in), W (out, in), or (in, out) if ``transposed``, b (out,) or None."""

    transposed: bool = False

    kind = "linear"
    rules = LINEAR_RULES

    def forward(self, xp: Namespace, *inputs: Any) -> tuple[Array, ...]:
        """y"""
        x, weight, bias = inputs
        width = weight.shape[0 if self.transposed else 1]
        if x.shape[-1] != width:
            raise ShapeError(f"x: shape {tuple(x.shape)}, but the last axis must have size {width}")
        y = _Product(xp, self.transposed).apply(x, weight)
        return (y if bias is None else y + bias,)

    def backward(
        self, xp: Namespace, saved: Saved, d_outputs: tuple[Any, ...], wanted: tuple[bool, ...]
    ) -> tuple[Array | None, ...]:
        """dx, dW, db"""
        (x, weight, _), (d,) = saved.inputs, d_outputs
        d_x = _Product(xp, self.transposed).transpose(d, weight) if wanted[0] else None
        d_weight = None
        if wanted[1]:
            left, right = (x, d) if self.transposed else (d, x)
            d_weight = xp.matmul(xp.matrix_transpose(_rows(xp, left)), _rows(xp, right))
        d_bias = xp.sum(_rows(xp, d), axis=0) if wanted[2] else None
        return d_x, d_weight, d_bias

    def relevance(self, xp: Namespace, saved: Saved, rho: tuple[Any, ...], rule: Rule | None) -> Passed:
        """By the rule that was chosen; LRP-0 without one."""
        (x, weight, bias), (y,), (r,) = saved.inputs, saved.outputs, rho
        f = _Product(xp, self.transposed)
        return (rule or Epsilon()).propagate(xp, f, x, weight, bias, y, r)


@dataclass(frozen=True)
class _Product:
    """x W^T as a linear map."""

    xp: Namespace
    transposed: bool

    def apply(self, x: Array, weight: Array) -> Array:
        """(..., in) -> (..., out)"""
        return self._times(x, weight if self.transposed else self.xp.matrix_transpose(weight))

    def transpose(self, rho: Array, weight: Array) -> Array:
        """(..., out) -> (..., in)"""
        return self._times(rho, self.xp.matrix_transpose(weight) if self.transposed else weight)

    def ones(self, x: Array) -> Array:
        """1 everywhere"""
        return self.xp.ones_like(x)

    def _times(self, x: Array, matrix: Array) -> Array:
        # Two axes: one product of matrices, where three would be one for each row of the batch.
        y = self.xp.matmul(_rows(self.xp, x), matrix)
        return self.xp.reshape(y, (*x.shape[:-1], matrix.shape[-1]))


def _rows(xp: Namespace, x: Any) -> Array:
    return x if x.ndim == 2 else xp.reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))


@dataclass(frozen=True)
class Lookup(Function):
    """y = W[token]: tokens (batch, time), W (tokens, width)."""

    kind = "embedding"
    rules = LINEAR_RULES

    def forward(self, xp: Namespace, *inputs: Any) -> tuple[Array, ...]:
        """y"""
        tokens, weight = inputs
        if not dtype_name(tokens.dtype).startswith(("int", "uint")):
            raise DtypeError(f"x: dtype {dtype_name(tokens.dtype)}; tokens are integers")
        flat = _flat(xp, tokens)
        # Libraries count a negative one from the end, where the gradient would not follow: past the end it is as
        # wrong as it is.
        flat = xp.where(flat < 0, xp.full_like(flat, weight.shape[0]), flat)
        try:
            rows = xp.take(weight, flat, axis=0)
        except IndexError:
            raise ArgumentError(f"x: a token that is none; allowed are 0 to {weight.shape[0] - 1}") from None
        return (xp.reshape(rows, (*tokens.shape, weight.shape[1])),)

    def backward(
        self, xp: Namespace, saved: Saved, d_outputs: tuple[Any, ...], wanted: tuple[bool, ...]
    ) -> tuple[Array | None, ...]:
        """Nothing for the tokens; the rows of dy added up by token, in a fixed order on every library."""
        (tokens, weight), (d,) = saved.inputs, d_outputs
        if not wanted[1]:
            return None, None
        flat = _flat(xp, tokens)
        every = xp.arange(weight.shape[0], dtype=flat.dtype, device=device_of(tokens))
        hot = xp.astype(xp.expand_dims(every, axis=1) == xp.expand_dims(flat, axis=0), weight.dtype)
        return None, xp.matmul(hot, _rows(xp, d))

    def relevance(self, xp: Namespace, saved: Saved, rho: tuple[Any, ...], rule: Rule | None) -> Passed:
        """One token makes its whole row, so every rule gives it the row's relevance."""
        (y,), (r,) = saved.outputs, rho
        return Passed((None, None), (xp.sum(y * r, axis=-1), None))


def _flat(xp: Namespace, tokens: Array) -> Array:
    """Tokens along one axis, in integers that can count any vocabulary."""
    flat = xp.reshape(tokens, (math.prod(tokens.shape),))
    return xp.astype(flat, xp.int32) if dtype_name(flat.dtype).endswith(("int8", "int16")) else flat


@dataclass(frozen=True)
class Norm(Function):
    """RMS norm over each of ``groups`` equal parts of the last axis, with a weight for each feature.

    The weight may be shorter than the features, (features / heads,), if heads stand on an axis of their own.
    """

    epsilon: float
    groups: int = 1

    kind = "norm"

    def forward(self, xp: Namespace, *inputs: Any) -> tuple[Array, ...]:
        """w x r"""
        x, weight = inputs
        if x.shape[-1] != weight.shape[0]:
            raise ShapeError(f"x: shape {tuple(x.shape)}, but the last axis must have size {weight.shape[0]}")
        return (self._scaled(xp, x, self._root(xp, x)) * weight,)

    def _root(self, xp: Namespace, x: Any) -> Array:
        """r, with an axis of groups and one of 1."""
        parts = self._parted(xp, x)
        return 1 / xp.sqrt(xp.mean(parts * parts, axis=-1, keepdims=True) + self.epsilon)

    def _parted(self, xp: Namespace, x: Any) -> Array:
        return xp.reshape(x, (*x.shape[:-1], self.groups, x.shape[-1] // self.groups))

    def _scaled(self, xp: Namespace, x: Any, r: Array) -> Array:
        return xp.reshape(self._parted(xp, x) * r, x.shape)

    def backward(
        self, xp: Namespace, saved: Saved, d_outputs: tuple[Any, ...], wanted: tuple[bool, ...]
    ) -> tuple[Array | None, ...]:
        """dx, dw"""
        (x, weight), (d,) = saved.inputs, d_outputs
        r = self._root(xp, x)
        unit = self._parted(xp, x) * r
        d_x = None
        if wanted[0]:
            n = self._parted(xp, d * weight)
            d_x = xp.reshape(r * (n - unit * xp.mean(n * unit, axis=-1, keepdims=True)), x.shape)
        d_weight = xp.sum(_rows(xp, d * xp.reshape(unit, d.shape)), axis=0) if wanted[1] else None
        return d_x, d_weight

    def relevance(self, xp: Namespace, saved: Saved, rho: tuple[Any, ...], rule: Rule | None) -> Passed:
        """r held constant: rho_x = w r rho (the LN rule, Ali et al., arXiv 2202.07304)."""
        (x, weight), (r,) = saved.inputs, rho
        return Passed((self._scaled(xp, r * weight, self._root(xp, x)), None))
