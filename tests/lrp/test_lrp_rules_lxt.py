"""A small gated net against LXT (2.1, BSD), whose stabiliser has no sign, in float64.

Two differences remain. LXT divides by stab(sum) at a residual sum too, where ours passes rho on (here its epsilon is 0
there); and its RMS norm computes in float32, which is within the tolerance.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import numpy as np
import pytest
from arrays import Library

from scanfield.layers import Activated, Layer, Linear, RMSNorm
from scanfield.layers.functions import Gate, Sum
from scanfield.layers.tape import Run, Value
from scanfield.lrp.rules import Epsilon

pytestmark = pytest.mark.backend("torch")


@pytest.fixture(scope="module")
def lxt() -> Any:
    if importlib.util.find_spec("lxt") is None:
        pytest.skip("the peer lxt is not installed")
    return importlib.import_module("lxt.explicit.functional")


class Net(Layer):
    """norm(x + out(silu(left x) silu(right x))), then a last linear layer."""

    def __init__(self) -> None:
        super().__init__(
            children={
                "left": Linear(4, 6),
                "right": Linear(4, 6),
                "silu": Activated("silu"),
                "out": Linear(6, 4),
                "norm": RMSNorm(4),
                "last": Linear(4, 3),
            }
        )

    def define(self, run: Run, x: Value) -> Value:
        """As in the class."""
        inside = self.children
        sides = [run.layer("silu", inside["silu"], run.layer(n, inside[n], x)) for n in ("left", "right")]
        y = run.one(Sum(), x, run.layer("out", inside["out"], run.one(Gate(), *sides)))
        return run.layer("last", inside["last"], run.layer("norm", inside["norm"], y))


def by_lxt(
    torch: Any, lxt: Any, rules: Any, given: dict[str, np.ndarray], x: Any, R: Any, epsilon: float
) -> np.ndarray:
    p = {name: torch.as_tensor(array) for name, array in given.items()}

    def linear(name: str, y: Any) -> Any:
        return lxt.linear_epsilon(y, p[f"{name}.weight"], p[f"{name}.bias"], epsilon)

    x = torch.as_tensor(x).requires_grad_()
    left, right = (rules.identity(torch.nn.functional.silu, linear(name, x)) for name in ("left", "right"))
    y = lxt.add2(x, linear("out", lxt.mul2(left, right)), False, 0.0)
    y = linear("last", lxt.rms_norm_identity(y, p["norm.weight"], 1e-5))
    (found,) = torch.autograd.grad(y, x, torch.as_tensor(R))
    return found.numpy()


@pytest.mark.parametrize("epsilon", [1e-6, 0.05])
def test_signless_stabiliser(library: Library, lxt: Any, epsilon: float):
    rules = importlib.import_module("lxt.explicit.rules")
    rng = np.random.default_rng(13)
    net = Net().init(0, dtype="float64")
    net.set_parameters({n: rng.standard_normal(a.shape) for n, a in net.named_parameters().items()})
    x, R = rng.standard_normal((2, 5, 4)), rng.standard_normal((2, 5, 3))
    want = by_lxt(library.torch, lxt, rules, net.named_parameters(), x, R, epsilon)
    found = net.relevance(R, x, rules=Epsilon(epsilon, signed=False), epsilon=0.0).x
    assert np.max(np.abs(found - want)) <= 1e-6 * np.max(np.abs(want))
    if epsilon > 1e-3:  # the sign matters, or the test would prove nothing
        signed = net.relevance(R, x, rules=Epsilon(epsilon), epsilon=0.0).x
        assert np.max(np.abs(signed - want)) > 1e-3 * np.max(np.abs(want))
