"""Gated DeltaNet-2 (arXiv 2605.22791) as a layer, and Kimi Delta Attention and Gated DeltaNet as configurations of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

import numpy

from scanfield.advice import shown
from scanfield.arrays import ones
from scanfield.errors import ArgumentError
from scanfield.keywords import advised_class
from scanfield.layers import parameters as drawing
from scanfield.layers.basic import CausalConv1d, Linear, OutProjection, RMSNorm, Sequential, positive
from scanfield.layers.functions import Activation, Gate, Heads, Mean, Repeat, Scale
from scanfield.layers.layer import Layer
from scanfield.layers.mamba import multiple
from scanfield.layers.parameters import Parameter
from scanfield.layers.parametrised import sizes
from scanfield.layers.scan import BoundedDecay, LogDecay, Scan
from scanfield.layers.tape import Run, Value

GDN2 = ("query", "key", "value", "log_decay", "erase", "write", "initial_state")

GateMode = Literal["channel", "scalar", "head", "disabled"]
_MODES = ("channel", "scalar", "head", "disabled")


@advised_class
@dataclass(frozen=True)
class GatedDeltaNet2Config:
    """Sizes and options of a ``GatedDeltaNet2``; a bad one is an ArgumentError.

    Parameters
    ----------
    heads : int
        Query and key heads.
    latent_per_head : int
        K, the width of a query or key head.
    value_heads : int, optional
        A multiple of ``heads``, which it is if absent; value head j uses key head j // (value_heads / heads).
    value_width : int, optional
        V, the width of a value head; K if absent.
    erase, write, decay : {"channel", "scalar", "head", "disabled"}
        A gate for each channel; the mean of the channels' logits for each head; one logit for each value head; no gate
        (everything of the key is erased, the value is written whole, nothing decays). ``write="erase"`` uses the erase gate
        for both, as the delta rules with one beta do.
    decay_lower_bound : float, optional
        The most negative log decay of a token: the gate is then lower sigmoid(exp(A_log) (x W_f + dt_bias)), which
        flash-linear-attention's kernels allow in [-5, 0) (Kimi Linear's ``safe_gate``).
    qk_l2_norm : bool
    allow_neg_eigval : bool
        Twice the erase gate, in (0, 2).
    output_scale : float
        Factor of the layer's output.
    conv_width : int or None
        Short convolutions of queries, keys and values; None for none.
    conv_bias : bool
    output_gate : {"sigmoid", "silu", None}
        On the normalised heads: flash-linear-attention's layers have the sigmoid, the paper SiLU.
    gate_rank : int, optional
        Rank of the projections of decay and output gate; V if absent, 0 for a full matrix.
    norm_epsilon : float
    chunk_size : int, optional
    method : str, optional
        As in ``gdn2``.
    """

    heads: int
    latent_per_head: int
    value_heads: int | None = None
    value_width: int | None = None
    erase: GateMode = "channel"
    write: GateMode | Literal["erase"] = "channel"
    decay: GateMode = "channel"
    decay_lower_bound: float | None = None
    qk_l2_norm: bool = True
    allow_neg_eigval: bool = False
    output_scale: float = 1.0
    conv_width: int | None = 4
    conv_bias: bool = False
    output_gate: Literal["sigmoid", "silu"] | None = "sigmoid"
    gate_rank: int | None = None
    norm_epsilon: float = 1e-5
    chunk_size: int | None = None
    method: str | None = None

    def __post_init__(self) -> None:
        sizes(
            heads=self.heads, latent_per_head=self.latent_per_head, value_heads=self.wide, value_width=self.V
        )
        multiple(value_heads=self.wide, heads=self.heads)
        sizes(
            conv_width=1 if self.conv_width is None else self.conv_width,
            chunk_size=1 if self.chunk_size is None else self.chunk_size,
        )
        positive("norm_epsilon", self.norm_epsilon)
        for name, allowed in (("erase", _MODES), ("write", (*_MODES, "erase")), ("decay", _MODES)):
            if getattr(self, name) not in allowed:
                raise ArgumentError(
                    f"{name}: {shown(getattr(self, name))}; allowed are {', '.join(map(repr, allowed))}"
                )
        if self.output_gate not in ("sigmoid", "silu", None):
            raise ArgumentError(
                f"output_gate: {shown(self.output_gate)}; allowed are 'sigmoid', 'silu' and None"
            )
        rank: object = self.gate_rank
        if rank is not None and (
            isinstance(rank, bool) or not isinstance(rank, int | numpy.integer) or rank < 0
        ):
            raise ArgumentError(f"gate_rank: {shown(rank)}; allowed is an integer of at least 0, or None")
        lower: object = self.decay_lower_bound
        if lower is not None and not (_is_number(lower) and -math.inf < lower < 0):
            raise ArgumentError(
                f"decay_lower_bound: {shown(lower)}; it is the most negative log decay, allowed is a number below 0, or None"
            )
        if lower is not None and self.decay == "disabled":
            raise ArgumentError(f"decay_lower_bound: {shown(lower)}, but decay is 'disabled'")
        scale: object = self.output_scale
        if not (_is_number(scale) and math.isfinite(scale)):
            raise ArgumentError(f"output_scale: {shown(self.output_scale)}; allowed is a finite number")

    @property
    def wide(self) -> int:
        """Value heads."""
        return self.heads if self.value_heads is None else self.value_heads

    @property
    def V(self) -> int:
        """The width of a value head."""
        return self.latent_per_head if self.value_width is None else self.value_width

    @property
    def rank(self) -> int:
        """Of decay and output gate; 0 for full matrices."""
        return self.V if self.gate_rank is None else self.gate_rank

    @staticmethod
    def kda(heads: int, latent_per_head: int, **options: object) -> GatedDeltaNet2Config:
        """Kimi Delta Attention (arXiv 2510.26692): one beta a head erases and writes, decay by channel.

        >>> GatedDeltaNet2Config.kda(2, 8).write
        'erase'
        """
        own: dict[str, Any] = {"erase": "head", "write": "erase"}
        return GatedDeltaNet2Config(heads, latent_per_head, **(own | options))

    @staticmethod
    def gated_delta_net(heads: int, latent_per_head: int, **options: object) -> GatedDeltaNet2Config:
        """Gated DeltaNet (arXiv 2412.06464): one beta and one decay a value head, a full output gate with SiLU."""
        own: dict[str, Any] = {"erase": "head", "write": "erase", "decay": "head"}
        own |= {"output_gate": "silu", "gate_rank": 0}
        return GatedDeltaNet2Config(heads, latent_per_head, **(own | options))


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


class GatedDeltaNet2(Layer):
    """Projections, short convolutions and SiLU; gates; ``gdn2``; norm and output gate by head; out-projection.

    With b, w, g the erase, write and decay gates of the config:

        b = sigmoid(x W_b),  w = sigmoid(x W_w),  g = -exp(A_log) softplus(x W_f + dt_bias)
        or, with a lower bound, g = lower sigmoid(exp(A_log) (x W_f + dt_bias))

    Parameters bear the names of flash-linear-attention's layers: ``q_proj``, ``k_proj``, ``v_proj``, ``q_conv1d``, ...,
    ``f_proj.0``, ``f_proj.1`` (``a_proj`` for one decay a head), ``b_proj``, ``w_proj``, ``A_log``, ``dt_bias``,
    ``g_proj``, ``o_norm``, ``o_proj``. Carries ``"q_conv1d.conv"``, ``"k_conv1d.conv"``, ``"v_conv1d.conv"`` and
    ``"memory"`` (batch, value heads, K, V).

    >>> import numpy
    >>> layer = GatedDeltaNet2(6, GatedDeltaNet2Config(heads=2, latent_per_head=4)).init(0, numpy)
    >>> layer(numpy.ones((1, 5, 6), dtype=numpy.float32)).state["memory"].shape
    (1, 2, 4, 4)
    """

    rules = ("epsilon",)

    def __init__(self, hidden_dim: int, config: GatedDeltaNet2Config) -> None:
        sizes(hidden_dim=hidden_dim)
        if not isinstance(config, GatedDeltaNet2Config):
            raise ArgumentError(f"config: {type(config).__name__}; allowed is a GatedDeltaNet2Config")
        self.config = c = config
        keys, values = c.heads * c.latent_per_head, c.wide * c.V
        children: dict[str, Layer] = {
            "q_proj": Linear(hidden_dim, keys, bias=False),
            "k_proj": Linear(hidden_dim, keys, bias=False),
            "v_proj": Linear(hidden_dim, values, bias=False),
        }
        if c.conv_width is not None:
            for name, width in (("q_conv1d", keys), ("k_conv1d", keys), ("v_conv1d", values)):
                children[name] = CausalConv1d(width, c.conv_width, bias=c.conv_bias)
        own: dict[str, Parameter] = {}
        if c.decay != "disabled":
            by_head = c.decay == "head"
            width = c.wide if by_head else keys
            children["a_proj" if by_head else "f_proj"] = (
                Linear(hidden_dim, width, bias=False)
                if by_head or not c.rank
                else Sequential(Linear(hidden_dim, c.rank, bias=False), Linear(c.rank, width, bias=False))
            )
            own["A_log"] = Parameter((c.wide if by_head else c.heads,), drawing.head_rates)
            own["dt_bias"] = Parameter((width,), drawing.steps)
        for name, mode, width in (("b_proj", c.erase, keys), ("w_proj", c.write, values)):
            if mode in ("channel", "scalar", "head"):
                children[name] = Linear(hidden_dim, c.wide if mode == "head" else width, bias=False)
        if c.output_gate is not None:
            children["g_proj"] = (
                Sequential(Linear(hidden_dim, c.rank, bias=False), Linear(c.rank, values))
                if c.rank
                else Linear(hidden_dim, values, bias=False)
            )
        children["o_norm"] = RMSNorm(c.V, epsilon=c.norm_epsilon)
        children["o_proj"] = OutProjection(values, hidden_dim, bias=False)
        super().__init__(own, children, ("memory",))

    def define(self, run: Run, x: Value) -> Value:
        """As in the class."""
        c = self.config
        query, key = (self._projected(run, name, x, c.heads) for name in ("q", "k"))
        value = self._projected(run, "v", x, c.wide)
        erase = self._gate(run, "b_proj", c.erase, x, c.heads)
        if erase is None:
            like = x.array
            erase = run.enter(ones(run.xp, (*like.shape[:2], c.wide), like.dtype, like), False)
        elif c.allow_neg_eigval:
            erase = run.one(Scale(2.0), erase)
        write = erase if c.write == "erase" else self._gate(run, "w_proj", c.write, x, c.wide)
        options = (
            ("qk_l2norm", c.qk_l2_norm),
            ("chunk_size", c.chunk_size),
            ("method", c.method),
            ("cu_seqlens", run.bounds),
        )
        scan = Scan("gdn2", GDN2, options, run.single)
        y, state = run.many(
            scan, query, key, value, self._decay(run, x), erase, write, run.arriving("memory")
        )
        run.leaving("memory", state)
        y = run.layer("o_norm", self.children["o_norm"], y)
        if c.output_gate is not None:
            logits = run.one(Heads(c.wide), run.layer("g_proj", self.children["g_proj"], x))
            gate = run.one(Activation(c.output_gate), logits)
            # A sigmoid is 1/2 at 0: no part of it is its input's, so it counts as a coefficient.
            y = run.one(Gate(constant=c.output_gate == "sigmoid"), y, gate)
        y = run.layer("o_proj", self.children["o_proj"], run.one(Heads(c.wide, merge=True), y))
        return y if c.output_scale == 1 else run.one(Scale(float(c.output_scale)), y)

    def _projected(self, run: Run, name: str, x: Value, heads: int) -> Value:
        """Queries, keys or values by head."""
        y = run.layer(f"{name}_proj", self.children[f"{name}_proj"], x)
        if self.config.conv_width is not None:
            y = run.layer(f"{name}_conv1d", self.children[f"{name}_conv1d"], y)
        return run.one(Heads(heads), run.one(Activation("silu"), y))

    def _gate(self, run: Run, name: str, mode: str, x: Value, heads: int) -> Value | None:
        """A sigmoid gate, by channel or by head, for every value head; None if disabled."""
        if mode == "disabled":
            return None
        logits = run.layer(name, self.children[name], x)
        if mode == "head":
            return run.one(Activation("sigmoid"), logits)
        logits = run.one(Heads(heads), logits)
        if mode == "scalar":
            logits = run.one(Mean(), logits)
        return self._for_values(run, run.one(Activation("sigmoid"), logits), heads)

    def _decay(self, run: Run, x: Value) -> Value | None:
        c = self.config
        if c.decay == "disabled":
            return None
        rate, bias = run.parameter("A_log"), run.parameter("dt_bias")
        gate = LogDecay() if c.decay_lower_bound is None else BoundedDecay(float(c.decay_lower_bound))
        if c.decay == "head":
            return run.one(gate, run.layer("a_proj", self.children["a_proj"], x), rate, bias)
        logits = run.one(Heads(c.heads), run.layer("f_proj", self.children["f_proj"], x))
        bias = run.one(Heads(c.heads), bias)
        if c.decay == "scalar":
            logits, bias = run.one(Mean(), logits), run.one(Mean(), bias)
        return self._for_values(run, run.one(gate, logits, rate, bias), c.heads)

    def _for_values(self, run: Run, gate: Value, heads: int) -> Value:
        """Gates of key heads for each value head of their group."""
        count = self.config.wide // heads
        return gate if count == 1 else run.one(Repeat(count), gate)
