"""lrp.explain of a language model: the relevance of its layers, for the question that was asked and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from arrays import Library, deviation

import scanfield
from scanfield.layers import (
    Composite,
    GatedDeltaNet2,
    GatedDeltaNet2Config,
    LanguageModel,
    Linear,
    Mamba2Block,
    MambaBlock,
)
from scanfield.lrp import explain
from scanfield.lrp.rules import Epsilon, Gamma, ZPlus

VOCABULARY, WIDTH, TIME = 9, 4, 5


def leave_out(backend: str, test: str, given: dict[str, Any]) -> bool:
    """Plain operations of the standard, which the relevance of layers meets on JAX and Dask; here they would take 10 s."""
    return backend in ("jax", "dask")


def model_of(library: Library, *, tied: bool = False, dtype: str = "float64") -> LanguageModel:
    """One layer of each kind, with biases that take relevance."""
    mixers = [
        MambaBlock(WIDTH, 3, bias=True),
        Mamba2Block(WIDTH, 3, head_dim=4, groups=2),
        GatedDeltaNet2(WIDTH, GatedDeltaNet2Config(heads=2, latent_per_head=2)),
    ]
    model = LanguageModel(VOCABULARY, WIDTH, mixers, tied=tied).init(
        3, library.xp, device=library.device, dtype=dtype
    )
    rng = np.random.default_rng(1)
    model.set_parameters(
        {
            name: library.array(library.numpy(x) + 0.2 * rng.standard_normal(x.shape), dtype)
            for name, x in model.named_parameters().items()
        }
    )
    return model


def tokens(batch: int = 2, time: int = TIME) -> np.ndarray:
    return np.random.default_rng(2).integers(0, VOCABULARY, (batch, time))


def by_layers(
    library: Library, model: LanguageModel, ids: np.ndarray, weights: np.ndarray, **more: Any
) -> Any:
    """``Layer.relevance`` with the weighted logits in their places; weights (batch, time, vocabulary)."""
    logits = library.numpy(model(library.array(ids)).output)
    return library.numpy(
        model.relevance(library.array(weights * logits), library.array(ids), epsilon=0.0, **more).x
    )


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied"])
def test_it_is_the_relevance_of_the_layers(library: Library, tied: bool):
    model, ids = model_of(library, tied=tied), tokens()
    logits = library.numpy(model(library.array(ids)).output)
    best = logits[:, -1].argmax(axis=-1)
    cases: list[tuple[Any, Any, list[dict[int, float]]]] = [
        (None, -1, [{int(best[0]): 1.0}, {int(best[1]): 1.0}]),
        (4, -1, [{4: 1.0}, {4: 1.0}]),
        (library.array(np.asarray([4, 1])), [2, -2], [{4: 1.0}, {1: 1.0}]),
        (library.array(np.eye(VOCABULARY)[4] - np.eye(VOCABULARY)[1]), 3, [{4: 1.0, 1: -1.0}] * 2),
    ]
    for target, position, asked in cases:
        weights = np.zeros((2, TIME, VOCABULARY))
        for row, named in enumerate(asked):
            place = position if isinstance(position, int) else position[row]
            for token, weight in named.items():
                weights[row, place, token] = weight
        found = explain(model, library.array(ids), target, position=position)
        got = library.numpy(found.tokens)
        assert deviation(got, by_layers(library, model, ids, weights)) <= 1e-12
        assert deviation(library.numpy(found.value), np.sum(weights * logits, axis=(1, 2))) <= 1e-12
        report = {name: library.numpy(x) for name, x in found.report._asdict().items()}
        assert report["sum_out"].shape == (2,) and np.all(report["to_bias"] != 0)
        left = report["sum_out"] - report["sum_in"] - report["to_bias"]
        assert np.all(np.abs(left) <= 1e-5 * np.abs(report["sum_out"]))
        assert np.all(np.abs(library.numpy(found.report.gap)) <= 1e-12 * np.abs(got).sum())
        assert deviation(got.sum(axis=1), report["sum_in"]) <= 1e-12
        if not hasattr(target, "ndim") or target.shape[0] == 2:
            assert library.numpy(found.target).tolist() == [next(iter(named)) for named in asked]


def test_rules_of_layers_and_of_the_head():
    library = _numpy()
    model, ids = model_of(library), tokens()
    weights = np.zeros((2, TIME, VOCABULARY))
    weights[:, -1, 5] = 1.0
    for rules in (
        Composite({"layers.0.mixer.in_proj": Gamma(0.5), "lm_head": Epsilon(0.1), "embedding": ZPlus()}),
        Composite({Linear: Epsilon(1e-2, bias=False)}),
    ):
        found = explain(model, ids, 5, rules=rules)
        assert deviation(found.tokens, by_layers(library, model, ids, weights, rules=rules)) <= 1e-12
        assert deviation(found.tokens, explain(model, ids, 5).tokens) > 1e-3
    # A stabiliser that is relative to the logits of the position, whichever are asked for.
    relative = Composite({"lm_head": Epsilon(0.1, relative=True)})
    hot = np.eye(VOCABULARY)[5]
    assert (
        deviation(
            explain(model, ids, 5, rules=relative).tokens, explain(model, ids, hot, rules=relative).tokens
        )
        <= 1e-12
    )
    with pytest.raises(scanfield.ArgumentError, match="'nothing' fits no layer"):
        explain(model, ids, 5, rules=Composite({"nothing": Gamma()}))


def test_later_tokens_are_not_read_and_rows_do_not_meet():
    library = _numpy()
    model, ids = model_of(library), tokens()
    found = explain(model, ids, 3, position=2)
    changed = np.concatenate([ids[:, :3], (ids[:, 3:] + 1) % VOCABULARY], axis=1)
    assert np.array_equal(found.tokens, explain(model, changed, 3, position=2).tokens)
    assert not found.tokens[:, 3:].any() and found.tokens[:, :3].all()
    alone = [explain(model, ids[row : row + 1], 3, position=2) for row in range(2)]
    assert deviation(np.concatenate([x.tokens for x in alone]), found.tokens) <= 1e-12
    assert "gap" in str(found)


@pytest.mark.parametrize("position", [-1, 1])
def test_padding_changes_nothing(position: int):
    """Before the tokens or behind them, whatever stands there; positions count tokens."""
    library = _numpy()
    model, ids = model_of(library), tokens(3)
    mask = np.asarray([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [1, 1, 1, 0, 0]])
    found = explain(model, ids, [1, 2, 3], position=position, attention_mask=mask)
    for row in range(3):
        there = mask[row] == 1
        want = explain(model, ids[row : row + 1, there], row + 1, position=position)
        assert (
            np.array_equal(found.tokens[row, there], want.tokens[0]) and not found.tokens[row, ~there].any()
        )
        assert found.value[row] == want.value[0] and found.target[row] == row + 1
        assert all(
            np.array_equal(x[row : row + 1], y) for x, y in zip(found.report, want.report, strict=True)
        )


def test_half_precision_is_explained_in_float32():
    library = _numpy()
    half = model_of(library, dtype="float16")
    found = explain(half, tokens(), 4)
    assert found.tokens.dtype == np.float32 == found.value.dtype
    left = found.report.sum_out - found.report.sum_in - found.report.to_bias
    assert np.all(np.abs(left) <= 1e-5 * np.abs(found.report.sum_out))


@pytest.mark.parametrize(
    ("error", "change", "message"),
    [
        ("ArgumentError", {"model": 3}, r"model: builtins\.int; allowed are language models of scanfield, transf"),
        ("ArgumentError", {"model": Linear(2, 2)}, "model: Linear; .* LanguageModel is explained"),
        ("ShapeError", {"input_ids": np.asarray([1, 2])}, r"input_ids: shape \(2,\)"),
        ("ShapeError", {"input_ids": np.zeros((1, 0), dtype=int)}, "at least one token"),
        ("DtypeError", {"input_ids": np.zeros((1, 2))}, "tokens are integers"),
        ("ArgumentError", {"input_ids": np.asarray([[1, 9]])}, "tokens from 1 to 9; allowed are 0 to 8"),
        ("ArgumentError", {"target": 9}, "target: token 9; allowed are 0 to 8"),
        ("ArgumentError", {"target": -1}, "target: token -1"),
        ("ArgumentError", {"target": True}, "target: True"),
        ("ArgumentError", {"target": [1, 2, 3]}, "one for each of the 2 rows"),
        ("ShapeError", {"target": np.zeros(4)}, r"weights are \(9,\) or \(2, 9\)"),
        ("DtypeError", {"target": np.zeros(9, dtype=complex)}, "target: dtype complex128"),
        ("ArgumentError", {"position": 5}, "position: 5; a row has 5 tokens, allowed are -5 to 4"),
        ("ArgumentError", {"position": 1.0}, "position: 1.0"),
        ("ShapeError", {"attention_mask": np.ones((2, 4))}, "attention_mask: shape"),
        ("ArgumentError", {"attention_mask": np.asarray([[1, 0, 1, 1, 1]] * 2)}, "row 0 has padding between"),
        ("ArgumentError", {"attention_mask": np.zeros((2, 5))}, "row 0 has no token"),
        ("ArgumentError", {"epsilon": -1.0}, "epsilon: -1.0"),
    ],
)  # fmt: skip
def test_what_is_refused(error: str, change: dict[str, Any], message: str):
    given = {"model": model_of(_numpy()), "input_ids": tokens(), "target": 1, **change}
    with pytest.raises(getattr(scanfield, error), match=message):
        explain(**given)


def _numpy() -> Library:
    from arrays import library

    return library("numpy")
