"""The rules of relevance, each against its formula written out number by number; convolutions as matrices; conservation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from arrays import Library, deviation

import scanfield
from scanfield.layers import CausalConv1d, Embedding, Linear
from scanfield.lrp.rules import AlphaBeta, Epsilon, Flat, Gamma, Rule, WSquare, ZBox, ZPlus

EPSILON = 1e-6


def leave_out(backend: str, test: str, given: dict[str, Any]) -> bool:
    """A rule is a dozen elementary steps: Dask runs one; JAX the matrices only."""
    if backend == "dask":
        return test != "test_formula" or not isinstance(given["rule"], AlphaBeta) or given["bias"]
    return backend == "jax" and (test != "test_formula" or not given["bias"])


# -- the formulas ----------------------------------------------------------------------------------------------


def stab(z: float, epsilon: float = EPSILON, signed: bool = True) -> float:
    return z + epsilon * (1.0 if z >= 0 or not signed else -1.0)


def shares(rule: Rule, x: np.ndarray, w: np.ndarray, b: float | None, row: float) -> tuple[np.ndarray, float]:
    """What part of the relevance of y = w x + b each input gets, and the bias."""
    z = x * w
    y = float(z.sum() + (b or 0.0))
    beta = b if b is not None and getattr(rule, "bias", True) else 0.0
    if isinstance(rule, Epsilon):
        whole = stab(float(z.sum()) + beta, rule.epsilon * (row if rule.relative else 1.0), rule.signed)
        return z / whole, beta / whole
    if isinstance(rule, Gamma):
        # The products that push y to its own sign count more; so does the bias.
        favoured = z + rule.gamma * np.where(np.sign(z) == np.sign(y), z, 0.0)
        bias = beta + rule.gamma * (beta if np.sign(beta) == np.sign(y) else 0.0)
        whole = stab(float(favoured.sum() + bias))
        return favoured / whole, bias / whole
    if isinstance(rule, AlphaBeta | ZPlus):
        alpha, minus = (rule.alpha, rule.beta) if isinstance(rule, AlphaBeta) else (1.0, 0.0)
        up, down = stab(np.maximum(z, 0).sum() + max(beta, 0)), stab(np.minimum(z, 0).sum() + min(beta, 0))
        found = alpha * np.maximum(z, 0) / up - minus * np.minimum(z, 0) / down
        return found, alpha * max(beta, 0) / up - minus * min(beta, 0) / down
    if isinstance(rule, ZBox):
        found = z - rule.low * np.maximum(w, 0) - rule.high * np.minimum(w, 0)
        return found / stab(float(found.sum())), 0.0
    weights = w**2 if isinstance(rule, WSquare) else np.ones_like(w)
    bias = 0.0 if not beta else (beta**2 if isinstance(rule, WSquare) else 1.0)
    return weights / stab(weights.sum() + bias), bias / stab(weights.sum() + bias)


def formula(rule: Rule, x: np.ndarray, w: np.ndarray, b: np.ndarray | None, R: np.ndarray) -> tuple[Any, Any]:
    """x (rows, time, in), w (out, in), R (rows, time, out): relevance of x, and by row that of the bias."""
    into, bias = np.zeros_like(x), np.zeros(x.shape[0])
    plain = x @ w.T + (b if b is not None and getattr(rule, "bias", True) else 0.0)
    means = np.mean(np.abs(plain), axis=(1, 2))
    for r, t, j in np.ndindex(R.shape):
        part, to_bias = shares(rule, x[r, t], w[j], None if b is None else float(b[j]), means[r])
        into[r, t] += part * R[r, t, j]
        bias[r] += to_bias * R[r, t, j]
    return into, bias


RULES: list[Rule] = [
    Epsilon(),
    Epsilon(0.1),
    Epsilon(0.1, relative=True),
    Epsilon(0.1, bias=False),
    Epsilon(1e-3, signed=False),
    Gamma(0.5),
    Gamma(0.5, bias=False),
    AlphaBeta(),
    AlphaBeta(1.5, 0.5, bias=False),
    ZPlus(),
    ZBox(-1.5, 2.0),
    WSquare(),
    WSquare(bias=False),
    Flat(),
    Flat(bias=True),
]


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_formula(library: Library, rule: Rule, bias: bool):
    rng = np.random.default_rng(5)
    x, R = rng.standard_normal((2, 3, 4)), rng.standard_normal((2, 3, 5))
    w, b = rng.standard_normal((5, 4)), rng.standard_normal(5) if bias else None
    layer = Linear(4, 5, bias=bias).init(0, library.xp, device=library.device, dtype="float64")
    layer = layer.replaced({"weight": library.array(w), **({"bias": library.array(b)} if bias else {})})
    found = library.run(
        lambda R, x: layer.relevance(R, x, rules=rule, epsilon=0.0), library.array(R), library.array(x)
    )
    want, to_bias = formula(rule, x, w, b, R)
    assert deviation(library.numpy(found.x), want) <= 1e-12
    report = {n: library.numpy(a) for n, a in found.report._asdict().items()}
    assert deviation(report["to_bias"], to_bias, floor=1) <= 1e-12
    assert deviation(report["sum_out"], R.sum(axis=(1, 2))) <= 1e-12
    assert np.max(np.abs(library.numpy(found.report.gap))) <= 1e-12 * np.max(np.abs(want)) * want.size


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_convolution_is_a_matrix(library: Library, rule: Rule):
    """The relevance of a convolution, its state included, is that of the linear layer with the same matrix."""
    rng = np.random.default_rng(6)
    channels, width, time = 2, 3, 4
    weight, b = rng.standard_normal((channels, width)), rng.standard_normal(channels)
    x, state = rng.standard_normal((1, time, channels)), rng.standard_normal((1, width - 1, channels))
    R = rng.standard_normal((1, time, channels))
    layer = CausalConv1d(channels, width).init(0, library.xp, device=library.device, dtype="float64")
    layer = layer.replaced(library.arrays({"weight": weight[:, None, :], "bias": b}))
    found = layer.relevance(
        library.array(R), library.array(x), {"conv": library.array(state)}, rules=rule, epsilon=0.0
    )
    got = np.concatenate([library.numpy(found.state["conv"]), library.numpy(found.x)], axis=1)
    # A row of the matrix holds the weights of one output alone, so flat relevance must not see its zeros.
    series = np.concatenate([state, x], axis=1)
    want, to_bias = np.zeros_like(series), 0.0
    mean = np.mean(np.abs(layer_output(series, weight, b if getattr(rule, "bias", True) else 0 * b)))
    for t in range(time):
        for c in range(channels):
            part, share = shares(rule, series[0, t : t + width, c], weight[c], float(b[c]), mean)
            want[0, t : t + width, c] += part * R[0, t, c]
            to_bias += share * R[0, t, c]
    assert deviation(got, want) <= 1e-12
    assert abs(float(library.numpy(found.report.to_bias)[0]) - to_bias) <= 1e-12 * max(abs(to_bias), 1)


def layer_output(series: np.ndarray, weight: np.ndarray, b: np.ndarray) -> np.ndarray:
    width = weight.shape[1]
    time = series.shape[1] - width + 1
    return sum(series[:, j : j + time] * weight[:, j] for j in range(width)) + b


@pytest.mark.parametrize("rule", [WSquare(bias=False), Flat(), ZBox(-2.0, 3.0)], ids=repr)
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_padding_gets_nothing(rule: Rule, packed: bool):
    """Rules that give to an input of 0 too give all to the tokens there are, none to the zeros before the first."""
    layer = CausalConv1d(2, 3).init(0, dtype="float64")
    x, R = np.random.default_rng(7).standard_normal((2, 1, 5, 2))
    found = layer.relevance(R, x, rules=rule, epsilon=0.0, cu_seqlens=[0, 2, 5] if packed else None)
    assert abs(found.x.sum() - R.sum()) <= 1e-5  # what the stabiliser takes
    assert not found.state


def test_every_rule_gives_a_token_its_row():
    layer = Embedding(5, 3).init(0, dtype="float64")
    tokens, R = np.asarray([[1, 4, 1]]), np.random.default_rng(8).standard_normal((1, 3, 3))
    for rule in (None, Epsilon(1e-3), Flat(), ZBox()):
        found = layer.relevance(R, tokens, rules=rule, epsilon=0.0)
        assert found.x.shape == (1, 3)
        assert deviation(found.x, R.sum(axis=-1)) <= 1e-14


def test_settings_that_are_not_given():
    """y = 1 + 1 - 4 = -2: the stabiliser has its sign, and the bias takes its share (but of the flat rule)."""
    layer = Linear(2, 1).init(0, dtype="float64")
    layer = layer.replaced({"weight": np.asarray([[1.0, 1.0]]), "bias": np.asarray([-4.0])})
    want = {
        Epsilon(0.5): (-2.0, 8.0),  # of 5 by 5 / -2.5
        Gamma(1.0, 0.0): (-5 / 6, 20 / 3),  # of 1 + 1 - 8
        AlphaBeta(2.0, 1.0, 0.0): (5.0, -5.0),  # 2 (1 + 1) / 2 and -(-4 / -4)
        ZPlus(0.0): (2.5, 0.0),
        WSquare(0.0): (5 / 18, 80 / 18),
        Flat(0.0): (2.5, 0.0),
    }
    for rule, (each, to_bias) in want.items():
        found = layer.relevance(np.asarray([[[5.0]]]), np.ones((1, 1, 2)), rules=rule, epsilon=0.0)
        assert deviation(found.x, np.full((1, 1, 2), each)) <= 1e-14, rule
        assert abs(found.report.to_bias[0] - to_bias) <= 1e-14, rule


def test_rules_are_values():
    """Equal settings are equal rules, one key of a dictionary, and stay what they are."""
    assert len(set(RULES)) == len(RULES)
    for rule in RULES:
        assert rule == dataclasses.replace(rule) and len({rule, dataclasses.replace(rule)}) == 1
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(rule, dataclasses.fields(rule)[0].name, 0.25)


# -- what is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Epsilon(-1.0), "epsilon: -1.0"),
        (lambda: Epsilon(math.nan), "epsilon: nan"),
        (lambda: Gamma(math.inf), "gamma: inf"),
        (lambda: Gamma(True), "gamma: True"),
        (lambda: AlphaBeta(2.0, 2.0), "alpha - beta = 1"),
        (lambda: ZBox(1.0, 0.0), "low, high: 1.0, 0.0"),
        (lambda: ZPlus("small"), "epsilon: 'small'"),  # type: ignore[arg-type]
    ],
)
def test_bad_settings(make: Callable[[], Rule], message: str):
    with pytest.raises(scanfield.ArgumentError, match=message):
        make()


def test_zero_output_passes_nothing_and_is_told():
    layer = Linear(2, 1, bias=False).init(0, dtype="float64")
    layer.set_parameter("weight", np.asarray([[1.0, -1.0]]))
    found = layer.relevance(np.asarray([[[3.0]]]), np.asarray([[[2.0, 2.0]]]), epsilon=0.0)
    assert np.all(found.x == 0) and found.report.absorbed[0] == 3.0 and found.report.gap[0] == 0


def test_a_sum_of_zero_counts_as_positive():
    """Without the bias the sum is 0 while the output is 1: the stabiliser alone is divided by, with a plus."""
    layer = Linear(2, 1).init(0, dtype="float64")
    layer = layer.replaced({"weight": np.asarray([[1.0, -1.0]]), "bias": np.asarray([1.0])})
    rule = Epsilon(0.5, bias=False)
    found = layer.relevance(np.asarray([[[3.0]]]), np.asarray([[[2.0, 2.0]]]), rules=rule, epsilon=0.0)
    assert found.x.tolist() == [[[12.0, -12.0]]] and found.report.absorbed[0] == 3.0


class Matrix:
    """x W^T as a rule sees it."""

    def apply(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x @ weight.T

    def transpose(self, rho: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return rho @ weight

    def ones(self, x: np.ndarray) -> np.ndarray:
        return np.ones_like(x)


@pytest.mark.parametrize("bias", [None, np.asarray([4.0])], ids=["no bias", "bias"])
def test_without_a_stabiliser_the_modified_gradient_passes_as_it_is(bias: np.ndarray | None):
    """Also through an output of 0, by which nothing is divided, and to the last bit."""
    x, w = np.asarray([[2.0, 1.0]]), np.asarray([[0.1, -0.3]])
    found = Epsilon().propagate(np, Matrix(), x, w, bias, np.asarray([[0.0]]), np.asarray([[3.0]]))
    assert np.array_equal(found.rho[0], 3.0 * w) and found.absorbed is None
    assert found.to_bias is None if bias is None else found.to_bias == 12.0
