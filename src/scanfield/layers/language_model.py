"""A language model of any mixers: embedding, pre-norm residual layers, a last norm, logits."""

from __future__ import annotations

from collections.abc import Sequence

from scanfield.advice import shown
from scanfield.errors import ArgumentError
from scanfield.layers.basic import Embedding, Linear, Residual, RMSNorm, Sequential
from scanfield.layers.layer import Layer
from scanfield.layers.linear import Matrix
from scanfield.layers.mlp import MixerAndMLP
from scanfield.layers.parametrised import sizes
from scanfield.layers.tape import Run, Value
from scanfield.scans.options import check_flag


class LanguageModel(Layer):
    """tokens -> embedding -> x + mixer(norm(x)) for each mixer, and x + mlp(norm2(x)) behind it -> norm -> logits.

    Parameters
    ----------
    vocabulary, width : int
    mixers : sequence of layers
        Each maps width to width: ``MambaBlock``, ``Mamba2Block``, ``GatedDeltaNet2``, or your own.
    mlps : sequence of layers, optional
        One for each mixer, mostly ``GatedMLP``; without them there are no such branches.
    tied : bool
        Logits use the embedding's weight; else ``lm_head.weight``.
    epsilon : float
        Of the norms.

    Names: ``embedding``, ``layers.0.norm``, ``layers.0.mixer``, ``layers.0.norm2``, ``layers.0.mlp``, ..., ``norm_f``,
    ``lm_head``; ``state_dict`` translates them to those of mamba_ssm, transformers and flash-linear-attention. ArgumentError
    for no mixer, for MLPs that are not as many, and for sizes below 1.

    >>> import numpy
    >>> from scanfield.layers import MambaBlock
    >>> model = LanguageModel(11, 4, [MambaBlock(4, 2), MambaBlock(4, 2)]).init(0, numpy)
    >>> model(numpy.array([[1, 5, 3]])).output.shape
    (1, 3, 11)
    """

    tokens = True

    def __init__(
        self,
        vocabulary: int,
        width: int,
        mixers: Sequence[Layer],
        *,
        mlps: Sequence[Layer] | None = None,
        tied: bool = True,
        epsilon: float = 1e-5,
    ) -> None:
        sizes(vocabulary=vocabulary, width=width)
        _check_mixers(mixers)
        _check_mlps(mlps, len(mixers))
        self.tied = check_flag(tied, "tied")
        blocks: list[Layer]
        if mlps is None:
            blocks = [
                Residual(Sequential(norm=RMSNorm(width, epsilon=epsilon), mixer=mixer)) for mixer in mixers
            ]
        else:
            pairs = zip(mixers, mlps, strict=True)
            blocks = [MixerAndMLP(width, mixer, mlp, epsilon=epsilon) for mixer, mlp in pairs]
        children: dict[str, Layer] = {
            "embedding": Embedding(vocabulary, width),
            "layers": Sequential(*blocks),
            "norm_f": RMSNorm(width, epsilon=epsilon),
        }
        if not tied:
            children["lm_head"] = Linear(width, vocabulary, bias=False)
        super().__init__(children=children)
        self.depth = len(blocks) * (1 if mlps is None else 2)  # terms of the residual stream

    def define(self, run: Run, x: Value) -> Value:
        """Logits."""
        for name in ("embedding", "layers", "norm_f"):
            x = run.layer(name, self.children[name], x)
        if self.tied:
            return run.one(Matrix(), x, run.parameter("embedding.weight"), None)
        return run.layer("lm_head", self.children["lm_head"], x)


def _check_mixers(mixers: object) -> None:
    if not (isinstance(mixers, Sequence) and mixers and all(isinstance(mixer, Layer) for mixer in mixers)):
        raise ArgumentError(f"mixers: {shown(mixers)}; allowed is a sequence of at least one layer")


def _check_mlps(mlps: object, count: int) -> None:
    alike = isinstance(mlps, Sequence) and len(mlps) == count and all(isinstance(mlp, Layer) for mlp in mlps)
    if mlps is not None and not alike:
        raise ArgumentError(f"mlps: {shown(mlps)}; allowed is a layer for each of {count} mixers, or None")
