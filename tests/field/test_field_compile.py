"""Field reports F070 and F071: a compiled function is right, and each new length does not compile again."""

from __future__ import annotations

import numpy as np
import pytest
from draws import G, L, M

import scanfield

pytestmark = pytest.mark.backend("torch")


@pytest.fixture
def torch():
    """Without what other tests have compiled."""
    torch = pytest.importorskip("torch")
    torch._dynamo.reset()
    return torch


def _gdn2(query, key, value, log_decay, erase, write):
    return tuple(scanfield.gdn2(query, key, value, log_decay, erase, write))


def _selective(u, delta, A, B, C):
    return tuple(scanfield.selective_scan(u, delta, A, B, C))


@pytest.mark.parametrize("operation", ["gdn2", "selective_scan"])
def test_f070_what_is_compiled_is_right(torch, operation):
    gated, selective = G(35, 1, 65, 2, 16, 8), M(35, 1, 65, 4, 3)
    function, drawn, wide = {
        "gdn2": (_gdn2, list(gated.inputs().values()), gated),
        "selective_scan": (
            _selective,
            [selective.u, selective.delta, selective.A, selective.B, selective.C],
            selective,
        ),
    }[operation]
    cotangents = [torch.tensor(x, dtype=torch.float32) for x in (wide.d_output, wide.d_state)]

    def results(f):
        given = [torch.tensor(x, dtype=torch.float32, requires_grad=True) for x in drawn]
        found = f(*given)
        return [*(x.detach() for x in found), *torch.autograd.grad(found, given, cotangents)]

    # One graph: fullgraph refuses a break. The loop over time is no part of it, whatever compiles it.
    compiled = results(torch.compile(function, fullgraph=True))
    for x, y in zip(compiled, results(function), strict=True):
        assert torch.isfinite(x).all()
        assert (x - y).abs().max() <= 1e-6 * max(1.0, float(y.abs().max()))
    explained = torch._dynamo.explain(function)(*[torch.tensor(x, dtype=torch.float32) for x in drawn])
    assert explained.graph_count == 1 and explained.op_count < 65


@pytest.mark.parametrize("operation", ["linear_scan", "gdn2"])
def test_f071_twelve_lengths_compile_at_most_twice(torch, operation):
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    function = _gdn2 if operation == "gdn2" else lambda a, b: tuple(scanfield.linear_scan(a, b))
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for length in range(20, 32):
        if operation == "gdn2":
            drawn = list(G(64, 1, length, 2, 4, 3).inputs().values())
        else:
            drawn = [L(64, 1, length, 3).a, L(64, 1, length, 3).b]
        given = [torch.tensor(x) for x in drawn]
        for x, y in zip(compiled(*given), function(*given), strict=True):
            assert np.array_equal(x.numpy(), y.numpy()), length
    assert counter.frame_count <= 2
