"""The gated MLP that language models of mamba_ssm and flash-linear-attention have behind a mixer, and the block of both."""

from __future__ import annotations

from typing import Any

from scanfield.layers.basic import Linear, OutProjection, RMSNorm
from scanfield.layers.functions import Activation, Gate, Split, Sum
from scanfield.layers.layer import Layer
from scanfield.layers.parametrised import sizes
from scanfield.layers.tape import Run, Value
from scanfield.scans.options import check_flag


class GatedMLP(Layer):
    """y = (up(x) silu(gate(x))) down: Shazeer, arXiv 2002.05202, equation 6 (SwiGLU).

    Parameters
    ----------
    width, hidden : int
        mamba_ssm rounds its ``d_intermediate`` up to a multiple of 128 for ``hidden``; fla has ``intermediate_size``.
    fused : bool
        One projection for both, as mamba_ssm has it: ``fc1`` (2 hidden, width), up first, and ``fc2``. Otherwise
        ``up_proj``, ``gate_proj`` and ``down_proj``, as in fla.
    bias : bool
        Of all projections.

    For relevance each factor of the gate gets half. ArgumentError for sizes below 1.

    >>> import numpy
    >>> layer = GatedMLP(4, 8).init(0, numpy)
    >>> layer(numpy.ones((1, 5, 4), dtype=numpy.float32)).output.shape, list(layer.named_parameters())
    ((1, 5, 4), ['fc1.weight', 'fc2.weight'])
    """

    rules = ("epsilon",)

    def __init__(self, width: int, hidden: int, *, fused: bool = True, bias: bool = False) -> None:
        sizes(width=width, hidden=hidden)
        self.fused = check_flag(fused, "fused")
        self.halves = Split((hidden, hidden))
        first = {"fc1": 2 * hidden} if self.fused else {"gate_proj": hidden, "up_proj": hidden}
        last = "fc2" if self.fused else "down_proj"
        inside: dict[str, Layer] = {name: Linear(width, size, bias=bias) for name, size in first.items()}
        super().__init__(children={**inside, last: OutProjection(hidden, width, bias=bias)})

    def define(self, run: Run, x: Value) -> Value:
        """As in the class."""
        inside = self.children
        if self.fused:
            up, gate = run.many(self.halves, run.layer("fc1", inside["fc1"], x))
        else:
            up, gate = (run.layer(name, inside[name], x) for name in ("up_proj", "gate_proj"))
        last = "fc2" if self.fused else "down_proj"
        return run.layer(last, inside[last], run.one(Gate(), up, run.one(Activation("silu"), gate)))


class MixerAndMLP(Layer):
    """x + mixer(norm(x)), and to that its own mlp(norm2(...)): the block of a language model with MLPs."""

    def __init__(self, width: int, mixer: Layer, mlp: Layer, *, epsilon: float = 1e-5) -> None:
        norm, norm2 = RMSNorm(width, epsilon=epsilon), RMSNorm(width, epsilon=epsilon)
        super().__init__(children={"norm": norm, "mixer": mixer, "norm2": norm2, "mlp": mlp})

    def define(self, run: Run, x: Value) -> Value:
        """Two residual branches."""
        inside: Any = self.children
        for norm, branch in (("norm", "mixer"), ("norm2", "mlp")):
            y = run.layer(branch, inside[branch], run.layer(norm, inside[norm], x))
            x = run.one(Sum(), x, y)
        return x
