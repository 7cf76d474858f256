"""The bounds of docs/numerical-bounds.md hold: on the batches that were worst, and (slow) on all ten thousand draws."""

from __future__ import annotations

import contract
import pytest

pytestmark = pytest.mark.backend("numpy")

CASES = [(op, regime) for op in contract.OPERATIONS for regime in contract.regimes(op)]


def held(op: str, regime: str, seed: int, dtype: str) -> None:
    forward, gradients = contract.bounds()[op, regime, dtype]
    for method, found in contract.errors(
        op, regime, seed, dtype, contract.METHODS.get(op, contract.FORMS)
    ).items():
        assert found.forward <= forward, (method, found)
        assert found.gradients <= gradients, (method, found)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(("op", "regime"), CASES)
def test_the_worst_draws(op, regime, dtype):
    """Of all that were drawn, the rows that were worst in float32 and their neighbours."""
    held(op, regime, contract.WORST[op, regime], dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", contract.DTYPES)
@pytest.mark.parametrize(("op", "regime"), CASES)
def test_ten_thousand_draws(op, regime, dtype):
    for seed in range(contract.SEEDS):
        held(op, regime, seed, dtype)


def test_every_operation_regime_and_dtype_has_its_bound():
    assert set(contract.bounds()) == {(*case, dtype) for case in CASES for dtype in contract.DTYPES}
