"""Mamba (Gu and Dao, arXiv 2312.00752): the bare selective state-space layer, and the block around it."""

from __future__ import annotations

import math
from typing import Literal

from scanfield.advice import shown
from scanfield.arrays import ones
from scanfield.errors import ArgumentError
from scanfield.layers import parameters as drawing
from scanfield.layers.basic import CausalConv1d, Linear, OutProjection, RMSNorm, positive
from scanfield.layers.functions import Activation, Gate, Split
from scanfield.layers.layer import Layer
from scanfield.layers.linear import Matrix, Norm
from scanfield.layers.parameters import Parameter
from scanfield.layers.parametrised import sizes
from scanfield.layers.scan import Rates, Scan
from scanfield.layers.tape import Run, Value

SELECTIVE = ("u", "delta", "A", "B", "C", "D", "delta_bias", "initial_state")


class SelectiveSSM(Layer):
    """The selective state space alone: no convolution, gate or output projection.

        delta = softplus(x w_delta + bias_delta),  B = x w_b,  C = x w_c
        h_t = exp(delta_t a) h_(t-1) + delta_t x_t B_t,   y_t = h_t C_t + d x_t

    Parameters
    ----------
    d_model, state_size : int
    log_rates : bool
        Keep the decay rates as ``a_log`` with a = -exp(a_log), so that training cannot make them grow. The default keeps
        ``a`` itself, which may be set to anything.
    method : str, optional
        The implementation of the scan, as in ``selective_scan``.

    Parameters by name: ``w_delta`` (d_model, d_model), ``bias_delta`` (d_model,), ``w_b``, ``w_c``, ``a`` (d_model,
    state_size), ``d`` (d_model,); weights are (in, out). Carries the state ``"ssm"`` (batch, d_model, state_size).
    ArgumentError for sizes below 1.

    >>> import numpy
    >>> layer = SelectiveSSM(2, 3).init(0, numpy)
    >>> layer(numpy.ones((1, 5, 2), dtype=numpy.float32)).state["ssm"].shape
    (1, 2, 3)
    """

    rules = ("epsilon",)

    def __init__(
        self, d_model: int, state_size: int, *, log_rates: bool = False, method: str | None = None
    ) -> None:
        sizes(d_model=d_model, state_size=state_size)
        self.method = method
        self.log_rates = log_rates
        drawn, square = drawing.Weight(d_model), (d_model, state_size)
        super().__init__(
            {
                "w_delta": Parameter((d_model, d_model), drawn),
                "bias_delta": Parameter((d_model,), drawing.steps),
                "w_b": Parameter(square, drawn),
                "w_c": Parameter(square, drawn),
                **(
                    {"a_log": Parameter(square, drawing.state_rates)}
                    if log_rates
                    else {"a": Parameter(square, drawing.negative_rates)}
                ),
                "d": Parameter((d_model,), drawing.ones),
            },
            carries=("ssm",),
        )

    def define(self, run: Run, x: Value) -> Value:
        """As in the class."""
        delta, b, c = (
            run.one(Matrix(transposed=True), x, run.parameter(name), None)
            for name in ("w_delta", "w_b", "w_c")
        )
        a = run.one(Rates(), run.parameter("a_log")) if self.log_rates else run.parameter("a")
        y, state = run.many(
            selective(run, self.method),
            *(x, delta, a, b, c, run.parameter("d"), run.parameter("bias_delta"), run.arriving("ssm")),
        )
        run.leaving("ssm", state)
        return y


def selective(run: Run, method: str | None) -> Scan:
    """The scan of a run, steps by softplus."""
    options = (("cu_seqlens", run.bounds), ("delta_softplus", True), ("method", method))
    return Scan("selective_scan", SELECTIVE, options, run.single)


class MambaBlock(Layer):
    """Mamba's block: in-projection, causal convolution, SiLU, low-rank steps, selective scan, SiLU gate, out-projection.

    Parameters
    ----------
    d_model : int
    state_size : int
    conv_width : int
    expand : int
        Channels inside are expand * d_model.
    dt_rank : int, optional
        Rank of the steps; ceil(d_model / 16) if absent.
    conv_bias, bias : bool
        Of the convolution; of the in- and out-projection.
    dt_bc_norm : {None, "plain", "weighted"}
        RMS norms of the low-rank steps, of B and of C before the scan: without weights as in FalconMamba (arXiv
        2410.05355), or with, as in Jamba (arXiv 2403.19887).
    norm_epsilon : float
        Of these norms.
    method : str, optional
        The implementation of the scan, as in ``selective_scan``.

    Parameters bear the names of mamba_ssm and transformers: ``in_proj``, ``conv1d``, ``x_proj``, ``dt_proj``, ``A_log``,
    ``D``, ``out_proj``, and Jamba's ``dt_layernorm``, ``b_layernorm``, ``c_layernorm``. Carries ``"conv1d.conv"`` and
    ``"ssm"``. ArgumentError for sizes below 1 and options that are none.

    >>> import numpy
    >>> block = MambaBlock(4, 3).init(0, numpy)
    >>> y, state = block(numpy.ones((2, 5, 4), dtype=numpy.float32))
    >>> y_next, state = block.step(y[:, -1, :], state)
    >>> y_next.shape, sorted(state)
    ((2, 4), ['conv1d.conv', 'ssm'])
    """

    rules = ("epsilon",)

    def __init__(
        self,
        d_model: int,
        state_size: int = 16,
        *,
        conv_width: int = 4,
        expand: int = 2,
        dt_rank: int | None = None,
        conv_bias: bool = True,
        bias: bool = False,
        dt_bc_norm: Literal["plain", "weighted"] | None = None,
        norm_epsilon: float = 1e-6,
        method: str | None = None,
    ) -> None:
        rank = math.ceil(d_model / 16) if dt_rank is None else dt_rank
        sizes(d_model=d_model, state_size=state_size, conv_width=conv_width, expand=expand, dt_rank=rank)
        if dt_bc_norm not in (None, "plain", "weighted"):
            raise ArgumentError(f"dt_bc_norm: {shown(dt_bc_norm)}; allowed are None, 'plain' and 'weighted'")
        positive("norm_epsilon", norm_epsilon)
        self.method = method
        self.plain_norm = Norm(float(norm_epsilon)) if dt_bc_norm == "plain" else None
        normed = {"dt": rank, "b": state_size, "c": state_size} if dt_bc_norm == "weighted" else {}
        inner = expand * d_model
        self.halves, self.parts = Split((inner, inner)), Split((rank, state_size, state_size))
        super().__init__(
            {
                "A_log": Parameter((inner, state_size), drawing.state_rates),
                "D": Parameter((inner,), drawing.ones),
            },
            {
                "in_proj": Linear(d_model, 2 * inner, bias=bias),
                "conv1d": CausalConv1d(inner, conv_width, bias=conv_bias),
                "x_proj": Linear(inner, rank + 2 * state_size, bias=False),
                "dt_proj": Steps(rank, inner),
                "out_proj": OutProjection(inner, d_model, bias=bias),
                **{f"{name}_layernorm": RMSNorm(size, epsilon=norm_epsilon) for name, size in normed.items()},
            },
            ("ssm",),
        )

    def define(self, run: Run, x: Value) -> Value:
        """As in the class."""
        inside = self.children
        u, z = run.many(self.halves, run.layer("in_proj", inside["in_proj"], x))
        u = run.one(Activation("silu"), run.layer("conv1d", inside["conv1d"], u))
        low, b, c = run.many(self.parts, run.layer("x_proj", inside["x_proj"], u))
        low, b, c = (self._normed(run, name, value) for name, value in (("dt", low), ("b", b), ("c", c)))
        delta = run.layer("dt_proj", inside["dt_proj"], low)
        a = run.one(Rates(), run.parameter("A_log"))
        y, state = run.many(
            selective(run, self.method), u, delta, a, b, c, run.parameter("D"), None, run.arriving("ssm")
        )
        run.leaving("ssm", state)
        y = run.one(Gate(), y, run.one(Activation("silu"), z))
        return run.layer("out_proj", inside["out_proj"], y)

    def _normed(self, run: Run, name: str, value: Value) -> Value:
        """The steps, B or C, as the option has it."""
        layer = self.children.get(f"{name}_layernorm")
        if layer is not None:
            return run.layer(f"{name}_layernorm", layer, value)
        if self.plain_norm is None:
            return value
        x = value.array
        weight = run.enter(ones(run.xp, (x.shape[-1],), x.dtype, x), False)
        return run.one(self.plain_norm, value, weight)


class Steps(Linear):
    """The linear layer of the steps: weights uniform in +-rank^-1/2, the bias such that softplus of it is a step."""

    def __init__(self, rank: int, channels: int) -> None:
        super().__init__(rank, channels)
        self.parameters["bias"] = Parameter((channels,), drawing.steps)


def multiple(**given: int) -> None:
    """ArgumentError unless the first is a multiple of the second."""
    (name, value), (of, part) = given.items()
    if value % part:
        raise ArgumentError(f"{name}: {value}, no multiple of {of}, {part}")
