"""Relevance of the tokens of a language model, one's own or another project's: which of them made this logit."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from scanfield.advice import class_of
from scanfield.arrays import Array
from scanfield.errors import ArgumentError

if TYPE_CHECKING:
    from scanfield.layers.explain import BlockReport

# Whose models are explained, by the package of their class, and what does it: imported when the first one is met.
_EXPLAINERS = {
    "scanfield": "scanfield.compat._explain:explain",
    "transformers": "scanfield.compat._explain_models:explain",
}


class TokenRelevance(NamedTuple):
    """What ``explain`` returns; rows are those of the batch."""

    tokens: Array
    """Relevance of each token, (batch, time), in the dtype of the parameters, float32 at least."""
    value: Array
    """The number that was explained, (batch,): the logit of the target, or the weighted sum of logits."""
    target: Array
    """The token asked for, (batch,); the weights, if weights were given."""
    report: BlockReport
    """Where ``value`` went, each (batch,): ``sum_in`` to the tokens, ``to_bias``, ``absorbed``; ``gap`` is what is left."""

    def __str__(self) -> str:
        """The table of conservation."""
        return str(self.report)


def explain(
    model: Any,
    input_ids: Array,
    target: Any = None,
    *,
    position: Any = -1,
    attention_mask: Array | None = None,
    rules: Any = None,
    epsilon: float = 1e-6,
) -> TokenRelevance:
    """Relevance of each token for a logit of a language model (MambaLRP).

    Parameters
    ----------
    model : a causal language model of transformers, or ``scanfield.layers.LanguageModel``
        Of transformers those whose layers are all recurrent: ``mamba``, ``falcon_mamba``, ``mamba2``. Its parameters are
        read where they lie; nothing of the model is run, copied or changed.
    input_ids : integers (batch, time)
        In the library and on the device of the parameters.
    target : optional
        None: the token with the largest logit. An integer, or integers (batch,): a token. Numbers (vocabulary,) or (batch,
        vocabulary): weights, and what is explained is the weighted sum of the logits; +1 for one token and -1 for another
        ask why the one and not the other.
    position : int or integers (batch,)
        Whose logits, counted from the end if negative: by default those after the last token. Later tokens are not read.
    attention_mask : integers or booleans (batch, time), optional
        0 where there is padding, which may stand before the tokens of a row or behind them. Positions do not count it, and
        its relevance is 0.
    rules : scanfield.layers.Composite or rule, optional
        As in ``Layer.relevance``, by the names of ``scanfield.layers.LanguageModel``.
    epsilon : float
        Stabiliser of the few divisions that some rules need. The logit itself is divided by nothing.

    Returns
    -------
    TokenRelevance
        ``tokens``, ``value``, ``target``, ``report``.

    Raises
    ------
    BackendError
        For a model whose layers have no rules here, with the reason; for arrays of several libraries.
    ArgumentError
        For a target or position that is none, a mask with holes, and rules that the model does not have.
    ShapeError, DtypeError, DeviceError
        For tokens and weights that do not fit.

    Notes
    -----
    Jafari et al., "MambaLRP" (arXiv 2406.07592): SiLU by the identity rule, half to each side of a gate, norms, steps, B and
    C held constant; the skip of D and the scan are linear then. In float64 everything is computed in float64, also what
    transformers computes in float32.

    Examples
    --------
    >>> import numpy
    >>> from scanfield.layers import LanguageModel, MambaBlock
    >>> from scanfield.lrp import explain
    >>> model = LanguageModel(11, 4, [MambaBlock(4, 2)]).init(0, numpy, dtype="float64")
    >>> found = explain(model, numpy.array([[1, 5, 3]]), target=7)
    >>> found.tokens.shape
    (1, 3)
    >>> told = found.tokens.sum() + found.report.to_bias[0]
    >>> bool(abs(told - found.value[0]) < 1e-5 * abs(found.value[0]))
    True
    """
    for package in _packages(model):
        if package in _EXPLAINERS:
            module, _, name = _EXPLAINERS[package].partition(":")
            explainer = getattr(importlib.import_module(module), name)
            found: TokenRelevance = explainer(
                model,
                input_ids,
                target,
                position=position,
                attention_mask=attention_mask,
                rules=rules,
                epsilon=epsilon,
            )
            return found
    raise ArgumentError(
        f"model: {class_of(model)}; allowed are language models of {', '.join(sorted(_EXPLAINERS))}"
    )


def _packages(model: Any) -> Iterator[str]:
    """The packages of the classes that a model inherits from, its own class first."""
    for cls in type(model).__mro__:
        yield cls.__module__.partition(".")[0]
