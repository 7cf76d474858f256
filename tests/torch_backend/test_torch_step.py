"""A step of tensors is traced whole, arguments by position and by keyword alike."""

from __future__ import annotations

import numpy as np
import pytest

import scanfield

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.backend("torch")


@pytest.mark.parametrize("with_state", [True, False])
def test_a_step_compiles_without_a_break(with_state: bool):
    rng = np.random.default_rng(0)
    token = [torch.tensor(rng.random((2, 2, 5))) for _ in range(2)]
    value, state = torch.tensor(rng.random((2, 2, 3))), torch.tensor(rng.random((2, 2, 5, 3)))

    def step(state, query, key, value):
        return scanfield.gdn2.step(state, query, key, value=value, scale=0.5)

    given = (state if with_state else None, *token, value)
    wanted = step(*given)
    torch._dynamo.reset()
    for found, known in zip(torch.compile(step, fullgraph=True)(*given), wanted, strict=True):
        torch.testing.assert_close(found, known)
