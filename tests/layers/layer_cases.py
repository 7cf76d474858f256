"""One small layer of each kind, with its input: time other than channels, widths that differ, every option somewhere."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from scanfield.layers import (
    Activated,
    CausalConv1d,
    Embedding,
    GatedDeltaNet2,
    GatedDeltaNet2Config,
    GatedMLP,
    LanguageModel,
    Layer,
    Linear,
    Mamba2Block,
    MambaBlock,
    Residual,
    RMSNorm,
    SelectiveSSM,
    Sequential,
)

WIDTH, TIME, VOCABULARY = 4, 6, 7
PACKED = [0, 2, 2, 6]  # an empty sequence in the middle, one shorter than the convolution


def rng_of(name: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(name.encode()))


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[], Layer]

    @functools.cached_property
    def layer(self) -> Layer:
        """On NumPy, float64, moved away from the special points at which parameters start (ones, zeros)."""
        layer = self.make().init(1, np, dtype="float64")
        rng = rng_of(self.name)
        moved = {n: a + 0.3 * rng.standard_normal(a.shape) for n, a in layer.named_parameters().items()}
        layer.set_parameters(moved)
        return layer

    def input(self, batch: int = 2) -> np.ndarray:
        rng = rng_of(self.name + " input")
        if self.layer.tokens:
            return rng.integers(0, VOCABULARY, (batch, TIME)).astype(np.int32)
        return rng.standard_normal((batch, TIME, WIDTH))

    def state(self, rows: int) -> dict[str, np.ndarray]:
        """A state that no sequence of this layer ends in."""
        _, state = self.layer(self.input(1))
        rng = rng_of(self.name + " state")
        return {n: rng.standard_normal((rows, *a.shape[1:])) for n, a in state.items()}

    def cotangents(self, result: Any) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        rng = rng_of(self.name + " cotangents")
        output, state = result
        return rng.standard_normal(output.shape), {n: rng.standard_normal(a.shape) for n, a in state.items()}


def _gdn2(**options: Any) -> Callable[[], Layer]:
    return lambda: GatedDeltaNet2(WIDTH, GatedDeltaNet2Config(2, 3, **options))


CASES = [
    Case("linear", lambda: Linear(WIDTH, 3)),
    Case("embedding", lambda: Embedding(VOCABULARY, 3)),
    Case("norm in groups", lambda: RMSNorm(WIDTH, groups=2)),
    Case("convolution", lambda: CausalConv1d(WIDTH, 3)),
    Case(
        "activations",
        lambda: Sequential(*map(Activated, ("silu", "gelu", "gelu_tanh", "softplus", "sigmoid"))),
    ),
    Case("residual", lambda: Residual(Sequential(norm=RMSNorm(WIDTH), out=Linear(WIDTH, WIDTH, bias=False)))),
    Case("mlp", lambda: GatedMLP(WIDTH, 5, fused=False, bias=True)),
    Case("selective ssm", lambda: SelectiveSSM(WIDTH, 3)),
    Case("selective ssm: log rates", lambda: SelectiveSSM(WIDTH, 3, log_rates=True)),
    Case("mamba", lambda: MambaBlock(WIDTH, 3, dt_rank=2, bias=True)),
    Case("mamba: norms inside", lambda: MambaBlock(WIDTH, 3, dt_rank=2, dt_bc_norm="weighted")),
    Case("mamba2", lambda: Mamba2Block(WIDTH, 3, head_dim=2, groups=2, dt_limit=(0.05, 1.5))),
    Case(
        "mamba2: norm first",
        lambda: Mamba2Block(WIDTH, 3, head_dim=4, norm_before_gate=True, conv_bias=False),
    ),
    Case("gdn2", _gdn2(value_heads=4, value_width=5, allow_neg_eigval=True, output_scale=0.5)),
    Case(
        "gdn2: scalar gates",
        _gdn2(value_heads=4, erase="scalar", write="scalar", decay="scalar", output_gate="silu"),
    ),
    Case(
        "gdn2: no gates",
        _gdn2(
            erase="disabled",
            write="disabled",
            decay="disabled",
            conv_width=None,
            output_gate=None,
            qk_l2_norm=False,
        ),
    ),
    Case("kda", lambda: GatedDeltaNet2(WIDTH, GatedDeltaNet2Config.kda(2, 3, decay_lower_bound=-4.0))),
    Case(
        "gated delta net",
        lambda: GatedDeltaNet2(WIDTH, GatedDeltaNet2Config.gated_delta_net(2, 3, value_heads=4)),
    ),
    Case(
        "language model",
        lambda: LanguageModel(VOCABULARY, WIDTH, [MambaBlock(WIDTH, 2, dt_rank=3, dt_bc_norm="plain")]),
    ),
    Case(
        "language model: untied",
        lambda: LanguageModel(
            VOCABULARY, WIDTH, [Mamba2Block(WIDTH, 2, head_dim=4)], mlps=[GatedMLP(WIDTH, 3)], tied=False
        ),
    ),
]
