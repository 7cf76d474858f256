"""Mamba-2's block (Dao and Gu, arXiv 2405.21060): the state-space dual, heads, a gated norm over groups."""

from __future__ import annotations

import math

from scanfield.advice import shown
from scanfield.errors import ArgumentError
from scanfield.layers import parameters as drawing
from scanfield.layers.basic import CausalConv1d, Linear, OutProjection, RMSNorm
from scanfield.layers.functions import Activation, Gate, Heads, Split
from scanfield.layers.layer import Layer
from scanfield.layers.mamba import multiple
from scanfield.layers.parameters import Parameter
from scanfield.layers.parametrised import sizes
from scanfield.layers.scan import Rates, Scan
from scanfield.layers.tape import Run, Value

SSD = ("x", "dt", "A", "B", "C", "D", "dt_bias", "initial_state")


class Mamba2Block(Layer):
    """In-projection to z, x, B, C, dt; convolution and SiLU of x, B, C; ``ssd``; gate and norm; out-projection.

    Parameters
    ----------
    d_model : int
    state_size : int
    head_dim : int
        Channels of a head; expand * d_model must be a multiple of it.
    groups : int
        Heads share B and C by group, and the norm works on each group of channels; heads must be a multiple of it.
    conv_width, expand : int
    dt_limit : (float, float)
        Steps are clamped to it after softplus.
    norm_before_gate : bool
        norm(y) silu(z) instead of norm(y silu(z)).
    norm_epsilon : float
    conv_bias, bias : bool
        Of the convolution; of the in- and out-projection.
    chunk_size : int, optional
    method : str, optional
        As in ``ssd``.

    Parameters bear the names of mamba_ssm and transformers: ``in_proj``, ``conv1d``, ``dt_bias``, ``A_log``, ``D``,
    ``norm``, ``out_proj``. Carries ``"conv1d.conv"`` and ``"ssm"`` (batch, heads, head_dim, state_size).
    ArgumentError for sizes below 1 or that do not divide.

    >>> import numpy
    >>> block = Mamba2Block(4, state_size=3, head_dim=2).init(0, numpy)
    >>> block(numpy.ones((1, 5, 4), dtype=numpy.float32)).state["ssm"].shape
    (1, 4, 2, 3)
    """

    rules = ("epsilon",)

    def __init__(
        self,
        d_model: int,
        state_size: int = 128,
        *,
        head_dim: int = 64,
        groups: int = 1,
        conv_width: int = 4,
        expand: int = 2,
        dt_limit: tuple[float, float] = (0.0, math.inf),
        norm_before_gate: bool = False,
        norm_epsilon: float = 1e-5,
        conv_bias: bool = True,
        bias: bool = False,
        chunk_size: int | None = None,
        method: str | None = None,
    ) -> None:
        sizes(d_model=d_model, state_size=state_size, head_dim=head_dim, groups=groups)
        sizes(conv_width=conv_width, expand=expand, chunk_size=1 if chunk_size is None else chunk_size)
        inner = expand * d_model
        multiple(width=inner, head_dim=head_dim)
        heads = inner // head_dim
        multiple(heads=heads, groups=groups)
        low, high = dt_limit
        if not 0 <= low <= high:
            raise ArgumentError(f"dt_limit: {shown(dt_limit)}; allowed are 0 <= low <= high")
        limit = None if (low, high) == (0.0, math.inf) else (float(low), float(high))
        self.options = (
            ("dt_softplus", True),
            ("dt_limit", limit),
            ("chunk_size", chunk_size),
            ("method", method),
        )
        shared = groups * state_size
        self.norm_before_gate = norm_before_gate
        self.heads, self.groups = heads, groups
        self.parts = Split((inner, inner + 2 * shared, heads))
        self.inside = Split((inner, shared, shared))
        super().__init__(
            {
                "dt_bias": Parameter((heads,), drawing.steps),
                "A_log": Parameter((heads,), drawing.head_rates),
                "D": Parameter((heads,), drawing.ones),
            },
            {
                "in_proj": Linear(d_model, 2 * inner + 2 * shared + heads, bias=bias),
                "conv1d": CausalConv1d(inner + 2 * shared, conv_width, bias=conv_bias),
                "norm": RMSNorm(inner, epsilon=norm_epsilon, groups=groups),
                "out_proj": OutProjection(inner, d_model, bias=bias),
            },
            ("ssm",),
        )

    def define(self, run: Run, x: Value) -> Value:
        """As in the class."""
        inside = self.children
        z, mixed, dt = run.many(self.parts, run.layer("in_proj", inside["in_proj"], x))
        mixed = run.one(Activation("silu"), run.layer("conv1d", inside["conv1d"], mixed))
        u, b, c = run.many(self.inside, mixed)
        u = run.one(Heads(self.heads), u)
        b, c = run.one(Heads(self.groups), b), run.one(Heads(self.groups), c)
        scan = Scan("ssd", SSD, (*self.options, ("cu_seqlens", run.bounds)), run.single)
        rates, skip, bias = (
            run.one(Rates(), run.parameter("A_log")),
            run.parameter("D"),
            run.parameter("dt_bias"),
        )
        y, state = run.many(scan, u, dt, rates, b, c, skip, bias, run.arriving("ssm"))
        run.leaving("ssm", state)
        y = run.one(Heads(self.heads, merge=True), y)
        z = run.one(Activation("silu"), z)
        if self.norm_before_gate:
            y = run.one(Gate(), run.layer("norm", inside["norm"], y), z)
        else:
            y = run.layer("norm", inside["norm"], run.one(Gate(), y, z))
        return run.layer("out_proj", inside["out_proj"], y)
