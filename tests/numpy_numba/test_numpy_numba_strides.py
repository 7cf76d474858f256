"""gdn2 reads its inputs as they lie: turned, cut and flipped arrays give the same bits as contiguous ones, uncopied."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

import scanfield

pytest.importorskip("numba")

pytestmark = pytest.mark.backend("numpy")

B, T, H, J, K, V = 2, 37, 2, 4, 18, 21
SHAPES = {
    "query": (B, T, H, K), "key": (B, T, H, K), "value": (B, T, J, V), "log_decay": (B, T, J, K),
    "erase": (B, T, J), "write": (B, T, J, V), "initial_state": (B, J, K, V),
}  # fmt: skip


def drawn() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    inputs = {name: rng.random(shape, dtype=np.float32) - 0.5 for name, shape in SHAPES.items()}
    return inputs | {"log_decay": -np.abs(inputs["log_decay"])}


def turned(x: np.ndarray) -> np.ndarray:
    """Heads before time in memory, as models lay them."""
    return np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)


def cut(x: np.ndarray) -> np.ndarray:
    """Every second token, and the last axis from the middle of a longer one."""
    wide = np.zeros((x.shape[0], 2 * x.shape[1], *x.shape[2:-1], x.shape[-1] + 9), x.dtype)
    view = wide[:, ::2, ..., 5:-4]
    view[...] = x
    return view


def flipped(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x[:, ::-1])[:, ::-1]


def spread(x: np.ndarray) -> np.ndarray:
    """One number over and over along the last axis: values change, so the reference is the same array copied."""
    return np.broadcast_to(x[..., :1], x.shape)


@pytest.mark.parametrize("laid", [turned, cut, flipped, spread])
def test_any_strides(laid):
    inputs = {name: laid(x) for name, x in drawn().items()}
    plain = {name: np.array(x, order="C") for name, x in inputs.items()}
    found, pull = scanfield.vjp(scanfield.gdn2, **inputs, method="numpy.numba")
    want, pull_plain = scanfield.vjp(scanfield.gdn2, **plain, method="numpy.numba")
    assert np.array_equal(found.output, want.output)
    assert np.array_equal(found.final_state, want.final_state)
    cotangents = np.ones_like(want.output), np.ones_like(want.final_state)
    grads = pull_plain(*cotangents)
    for name, grad in pull(*map(laid, cotangents)).items():
        assert np.array_equal(grad, grads[name]), name


def test_inputs_are_not_copied():
    shape = (1, 2048, 8, 64)
    rng = np.random.default_rng(1)
    inputs = {name: turned(rng.random(shape, dtype=np.float32) / 64) for name in ("query", "key", "value")}
    inputs["erase"] = np.swapaxes(rng.random((1, 8, 2048), dtype=np.float32), 1, 2)
    result = scanfield.gdn2(**inputs, method="numpy.numba")
    tracemalloc.start()
    try:
        scanfield.gdn2(**inputs, method="numpy.numba")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < result.output.nbytes + result.final_state.nbytes + 2**20
