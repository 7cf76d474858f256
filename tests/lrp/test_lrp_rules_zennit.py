"""The rules against zennit (0.5.1, LGPL), on a linear layer and a depthwise convolution, in float64."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from typing import Any

import numpy as np
import pytest
from arrays import Library

from scanfield.layers import CausalConv1d, Embedding, Linear, RMSNorm, Sequential
from scanfield.lrp.rules import AlphaBeta, Epsilon, Flat, Gamma, Rule, WSquare, ZBox, ZPlus

pytestmark = pytest.mark.backend("torch")

# zennit's name and settings, and ours. Its flat rule knows no bias; ours has one on request.
PAIRS: list[tuple[str, dict[str, Any], Rule]] = [
    ("Epsilon", {"epsilon": 1e-6}, Epsilon(1e-6)),
    ("Epsilon", {"epsilon": 0.1}, Epsilon(0.1)),
    ("Epsilon", {"epsilon": 0.1, "zero_params": "bias"}, Epsilon(0.1, bias=False)),
    ("Gamma", {"gamma": 0.5}, Gamma(0.5)),
    ("Gamma", {"gamma": 0.5, "zero_params": "bias"}, Gamma(0.5, bias=False)),
    ("AlphaBeta", {"alpha": 2, "beta": 1}, AlphaBeta()),
    ("AlphaBeta", {"alpha": 1.5, "beta": 0.5, "zero_params": "bias"}, AlphaBeta(1.5, 0.5, bias=False)),
    ("ZPlus", {}, ZPlus()),
    ("ZBox", {"low": -1.5, "high": 2.0}, ZBox(-1.5, 2.0)),
    ("WSquare", {}, WSquare()),
    ("WSquare", {"zero_params": "bias"}, WSquare(bias=False)),
    ("Flat", {}, Flat()),
]


@pytest.fixture(scope="module")
def rules() -> Any:
    """zennit.rules, without zennit's own package, which needs torchvision for models that are not met here."""
    spec = importlib.util.find_spec("zennit")
    if spec is None:
        pytest.skip("the peer zennit is not installed")
    package = types.ModuleType("zennit")
    package.__path__ = list(spec.submodule_search_locations or [])
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "zennit"}
    sys.modules["zennit"] = package
    try:
        yield importlib.import_module("zennit.rules")
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "zennit"]:
            del sys.modules[name]
        sys.modules.update(before)


def explained(
    torch: Any, rules: Any, name: str, settings: dict[str, Any], module: Any, x: Any, R: Any
) -> np.ndarray:
    handle = getattr(rules, name)(**settings).register(module)
    try:
        x = torch.as_tensor(x).requires_grad_()
        (found,) = torch.autograd.grad(module(x), x, torch.as_tensor(R))
    finally:
        handle.remove()
    return found.numpy()


def close(got: np.ndarray, want: np.ndarray) -> bool:
    return bool(np.max(np.abs(got - want)) <= 1e-6 * np.max(np.abs(want)))


@pytest.mark.parametrize(
    ("name", "settings", "rule"), PAIRS, ids=lambda x: repr(x) if isinstance(x, Rule) else ""
)
def test_linear_and_convolution(
    library: Library, rules: Any, name: str, settings: dict[str, Any], rule: Rule
):
    torch, rng = library.torch, np.random.default_rng(11)
    x, R = rng.standard_normal((2, 5, 4)), rng.standard_normal((2, 5, 3))
    linear = torch.nn.Linear(4, 3, dtype=torch.float64)
    ours = Linear(4, 3).init(dtype="float64")
    ours.set_parameters({n: p.detach().numpy() for n, p in linear.named_parameters()})
    want = explained(torch, rules, name, settings, linear, x, R)
    assert close(ours.relevance(R, x, rules=rule, epsilon=0.0).x, want)

    conv = torch.nn.Conv1d(4, 4, 3, groups=4, dtype=torch.float64)
    ours = CausalConv1d(4, 3).init(dtype="float64")
    ours.set_parameters({n: p.detach().numpy() for n, p in conv.named_parameters()})
    state, R = rng.standard_normal((2, 2, 4)), rng.standard_normal((2, 5, 4))
    series = np.concatenate([state, x], axis=1)
    want = explained(torch, rules, name, settings, conv, series.transpose(0, 2, 1), R.transpose(0, 2, 1))
    found = ours.relevance(R, x, {"conv": state}, rules=rule, epsilon=0.0)
    assert close(np.concatenate([found.state["conv"], found.x], axis=1), want.transpose(0, 2, 1))


@pytest.mark.parametrize(
    ("name", "settings", "rule"), PAIRS, ids=lambda x: repr(x) if isinstance(x, Rule) else ""
)
def test_embedding_and_norm(library: Library, rules: Any, name: str, settings: dict[str, Any], rule: Rule):
    """A token gets what its row gets; a norm with its divisor held constant passes each number its own.

    zennit has no rule of an embedding, and calls that of the norm Pass.
    """
    torch, rng = library.torch, np.random.default_rng(12)
    linear = torch.nn.Linear(4, 3, dtype=torch.float64)
    net = Sequential(embedding=Embedding(6, 4), norm=RMSNorm(4), out=Linear(4, 3)).init(dtype="float64")
    net.set_parameters({f"out.{n}": p.detach().numpy() for n, p in linear.named_parameters()})
    net.set_parameter("norm.weight", rng.standard_normal(4))
    tokens, R = np.asarray([[1, 5, 1]]), rng.standard_normal((1, 3, 3))
    normed = net.children["norm"](net.named_parameters()["embedding.weight"][tokens]).output
    into = explained(torch, rules, name, settings, linear, normed, R)
    want = explained(torch, rules, "Pass", {}, torch.nn.Identity(), normed, into)
    assert close(net.relevance(R, tokens, rules=rule, epsilon=0.0).x, want.sum(axis=-1))
    norm = RMSNorm(4).init(dtype="float64").replaced({"weight": net.named_parameters()["norm.weight"]})
    assert close(norm.relevance(into, normed, epsilon=0.0).x, want)
