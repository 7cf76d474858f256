"""Layers of one operation, and the two ways to put layers together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy

from scanfield.advice import shown
from scanfield.errors import ArgumentError
from scanfield.layers import parameters as drawing
from scanfield.layers.convolution import Convolution
from scanfield.layers.functions import Activation, DropAxis, Sum
from scanfield.layers.layer import Layer
from scanfield.layers.linear import Lookup, Matrix, Norm
from scanfield.layers.parameters import Parameter
from scanfield.layers.parametrised import sizes
from scanfield.layers.tape import Run, Value
from scanfield.lrp.rules import LINEAR_RULES
from scanfield.scans.options import check_flag


class Linear(Layer):
    """y = x W^T + b.

    Parameters: ``weight`` (out, in), and ``bias`` (out,) unless ``bias=False``. ArgumentError for sizes below 1.

    >>> import numpy
    >>> layer = Linear(3, 2).init(0, numpy)
    >>> layer(numpy.ones((1, 4, 3), dtype=numpy.float32)).output.shape
    (1, 4, 2)
    """

    rules = LINEAR_RULES

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True) -> None:
        sizes(inputs=inputs, outputs=outputs)
        own = {"weight": Parameter((outputs, inputs), drawing.Weight(inputs))}
        if check_flag(bias, "bias"):
            own["bias"] = Parameter((outputs,), drawing.Bias(inputs, linear=True))
        super().__init__(own)

    def define(self, run: Run, x: Value) -> Value:
        """x W^T + b"""
        bias = run.parameter("bias") if "bias" in self.parameters else None
        return run.one(Matrix(), x, run.parameter("weight"), bias)


class OutProjection(Linear):
    """The linear layer whose output is that of a block, and so a term of the residual stream."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.parameters["weight"] = replace(self.parameters["weight"], last=True)


class Embedding(Layer):
    """y = weight[token]: integers (batch, time) in, (batch, time, width) out; ``weight`` (vocabulary, width).

    A token outside 0..vocabulary - 1 is an ArgumentError on NumPy, an error of the library's elsewhere, and NaN on JAX:
    nothing waits for a device.
    """

    tokens = True
    rules = LINEAR_RULES

    def __init__(self, vocabulary: int, width: int) -> None:
        sizes(vocabulary=vocabulary, width=width)
        super().__init__({"weight": Parameter((vocabulary, width), drawing.embedding)})

    def define(self, run: Run, x: Value) -> Value:
        """weight[x]"""
        weight = run.parameter("weight")
        tokens, most = x.array, weight.array.shape[0] - 1
        # NumPy would count a negative one, which means padding elsewhere, from the end.
        if (
            isinstance(tokens, numpy.ndarray)
            and tokens.size
            and not 0 <= tokens.min() <= tokens.max() <= most
        ):
            raise ArgumentError(f"x: tokens from {tokens.min()} to {tokens.max()}; allowed are 0 to {most}")
        return run.one(Lookup(), x, weight)


class RMSNorm(Layer):
    """y = weight x / sqrt(mean x^2 + epsilon), over all features or over each of ``groups`` equal parts of them."""

    def __init__(self, width: int, *, epsilon: float = 1e-5, groups: int = 1) -> None:
        sizes(width=width, groups=groups)
        if width % groups:
            raise ArgumentError(f"width: {width}, no multiple of groups, {groups}")
        positive("epsilon", epsilon)
        self.function = Norm(float(epsilon), groups)
        super().__init__({"weight": Parameter((width,), drawing.ones)})

    def define(self, run: Run, x: Value) -> Value:
        """The norm."""
        return run.one(self.function, x, run.parameter("weight"))


class CausalConv1d(Layer):
    """Each channel convolved with its own ``weight`` (channels, 1, width), looking back only; ``bias`` (channels,).

    It carries its last width - 1 inputs as the state ``"conv"`` (batch, width - 1, channels). See ``causal_conv1d``.
    """

    rules = LINEAR_RULES

    def __init__(self, channels: int, width: int = 4, *, bias: bool = True) -> None:
        sizes(channels=channels, width=width)
        own = {"weight": Parameter((channels, 1, width), drawing.Weight(width))}
        if check_flag(bias, "bias"):
            own["bias"] = Parameter((channels,), drawing.Bias(width))
        super().__init__(own, carries=("conv",))

    def define(self, run: Run, x: Value) -> Value:
        """The convolution."""
        weight = run.one(DropAxis(), run.parameter("weight"))
        bias = run.parameter("bias") if "bias" in self.parameters else None
        y, state = run.many(Convolution(run.bounds), x, weight, bias, run.arriving("conv"))
        run.leaving("conv", state)
        return y


class Activated(Layer):
    """An activation as a layer: "silu", "gelu", "gelu_tanh", "sigmoid" or "softplus"."""

    def __init__(self, name: str) -> None:
        self.function = Activation(name)
        super().__init__()

    def define(self, run: Run, x: Value) -> Value:
        """f(x)"""
        return run.one(self.function, x)


class Sequential(Layer):
    """Layers one after the other, named by position or by keyword.

    >>> layer = Sequential(norm=RMSNorm(3), out=Linear(3, 2)).init()
    >>> list(layer.named_parameters())
    ['norm.weight', 'out.weight', 'out.bias']
    """

    def __init__(self, *layers: Layer, **named: Layer) -> None:
        children = {str(i): layer for i, layer in enumerate(layers)} | named
        if not children:
            raise ArgumentError("layers: none; Sequential takes at least one")
        for name, layer in children.items():
            if not isinstance(layer, Layer):
                raise ArgumentError(f"layers: {name} is {type(layer).__name__}; allowed are layers")
        super().__init__(children=children)
        self.tokens = next(iter(children.values())).tokens

    def define(self, run: Run, x: Value) -> Value:
        """One after the other."""
        for name, layer in self.children.items():
            x = run.layer(name, layer, x)
        return x


class Residual(Layer):
    """y = x + inner(x). The names of its parameters are those of the inner layer."""

    def __init__(self, inner: Any) -> None:
        if not isinstance(inner, Layer) or inner.tokens:
            raise ArgumentError(f"inner: {shown(inner)}; allowed is a layer of features")
        super().__init__(children={"": inner})

    def define(self, run: Run, x: Value) -> Value:
        """x + inner(x)"""
        return run.one(Sum(), x, run.layer("", self.children[""], x))


def positive(name: str, value: object) -> None:
    """ArgumentError unless a number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ArgumentError(f"{name}: {shown(value)}; allowed is a number above 0")
