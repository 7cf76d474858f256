"""Kernels stay within the memory that a range of tasks is given: bytes behind it keep what was written there."""

from __future__ import annotations

import numpy as np
import pytest
from examples import BASE, op_inputs

import scanfield

pytest.importorskip("numba")

pytestmark = pytest.mark.backend("numpy")

GUARD, MARK = 4096, 0xA5


@pytest.fixture
def guarded(monkeypatch):
    """The places that kernels are given, each with a guard behind it."""
    from scanfield_numpy import threads

    given: list[np.ndarray] = []

    def fresh(size: int, dtype: type) -> np.ndarray:
        whole = np.full(size + GUARD, MARK, np.uint8)
        given.append(whole)
        return whole[:size]

    monkeypatch.setattr(threads, "fresh", fresh)
    return given


def run(op: str, inputs: dict[str, np.ndarray], **options) -> None:
    result, pull = scanfield.vjp(getattr(scanfield, op), **inputs, **options, method="numpy.numba")
    pull(np.ones_like(result.output), np.ones_like(result.final_state))


def delta(K: int, V: int, time: int, dtype: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(K * 1000 + V)
    inputs = {
        "query": (1, time, 1, K),
        "key": (1, time, 1, K),
        "value": (1, time, 2, V),
        "erase": (1, time, 2, K),
    }
    return {name: (rng.random(shape) / K).astype(dtype) for name, shape in inputs.items()}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("K", "V"), [(1, 1), (15, 17), (16, 16), (33, 200), (130, 5)])
def test_gdn2_of_any_size(K: int, V: int, dtype: str, guarded):
    for time in (1, 3, 4, 35):
        run("gdn2", delta(K, V, time, dtype))
    run("gdn2", delta(K, V, 70, dtype), chunk_size=64)
    assert guarded
    assert all((whole[-GUARD:] == MARK).all() for whole in guarded)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("op", BASE)
def test_every_operation(op: str, dtype: str, guarded):
    for time in (1, 7, 40):
        inputs = {
            name: x.astype(dtype) for name, x in op_inputs(op, f"{op} bounds {time}", time=time).items()
        }
        run(op, inputs)
        run(op, inputs, reverse=True)
    assert guarded
    assert all((whole[-GUARD:] == MARK).all() for whole in guarded)
