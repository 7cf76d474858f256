"""One token of gdn2: whole wide columns, edges, gates of every kind, within the cache and past it."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.backend("numpy")
pytest.importorskip("numba")

import scanfield  # noqa: E402
from scanfield_numpy import gated_delta, memory  # noqa: E402


@pytest.fixture(params=[False, True], ids=["kept", "past cache"])
def past(request, monkeypatch):
    """Whether large states are written past the cache; here all are large, or none."""
    for module in (gated_delta, memory):
        monkeypatch.setattr(module, "LAST_CACHE", 0 if request.param else 1 << 40)
    gated_delta._step_plan.cache_clear()
    yield request.param
    gated_delta._step_plan.cache_clear()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_step_is_the_generic_one(dtype: str, past: bool, monkeypatch):
    rng = np.random.default_rng(0)
    ran: list[bool] = []
    run = gated_delta.run

    def seen(kernel, dtype, tasks, work, memory, block, arrays):
        ran.append(bool(block[15]))
        run(kernel, dtype, tasks, work, memory, block, arrays)

    monkeypatch.setattr(gated_delta, "run", seen)
    # batch, heads, value heads, K, V: wide vectors, one or several a head, narrow ones and edges. The last is large enough
    # to lie where registers begin, which what is written past the cache has to.
    for batch, heads, vheads, K, V in (
        (1, 1, 1, 5, 128), (3, 2, 4, 33, 256), (2, 1, 2, 300, 256), (2, 3, 3, 16, 64), (1, 2, 2, 7, 200), (2, 1, 1, 4, 3),
        (2, 2, 4, 128, 256),
    ):  # fmt: skip
        state = rng.standard_normal((batch, vheads, K, V)).astype(dtype)
        before = state.copy()
        query, key = (rng.standard_normal((batch, heads, K)).astype(dtype) for _ in range(2))
        value = rng.standard_normal((batch, vheads, V)).astype(dtype)
        whole, one = rng.random((batch, vheads, K)).astype(dtype), rng.random((batch, vheads)).astype(dtype)
        for decay, erase, write in (
            (-whole, whole / K, rng.random((batch, vheads, V)).astype(dtype)),
            (-one, one / K, one),
            (None, None, None),
            (-whole, None, one),
        ):
            arrays = (query, key, value, decay, erase, write)
            found = scanfield.gdn2.step(state, *arrays, method="numpy.numba")
            wanted = scanfield.gdn2.step(state, *arrays, method="generic.recurrent")
            for x, y in zip(found, wanted, strict=True):
                assert x.dtype == y.dtype == np.dtype(dtype)
                tolerance = 4e-6 if dtype == "float32" else 1e-12
                assert np.abs(x - y).max() <= tolerance * np.abs(y).max()
            assert np.array_equal(state, before)
    assert ran[-1] == past


def test_what_is_not_finite_stays_where_it_is(past: bool):
    """One head's infinity, and a decay of minus infinity, are of no other head."""
    rng = np.random.default_rng(1)
    state = rng.standard_normal((1, 3, 8, 256)).astype("float32")
    query, key, decay = (-rng.random((1, 3, 8)).astype("float32") for _ in range(3))
    value = rng.standard_normal((1, 3, 256)).astype("float32")
    clean = scanfield.gdn2.step(state, query, key, value, decay, -key, method="numpy.numba")
    state[0, 1, 2, 200], decay[0, 1, 3] = np.inf, -np.inf
    found = scanfield.gdn2.step(state, query, key, value, decay, -key, method="numpy.numba")
    wanted = scanfield.gdn2.step(state, query, key, value, decay, -key, method="generic.recurrent")
    for x, y, z in zip(found, wanted, clean, strict=True):
        assert np.array_equal(np.isfinite(x), np.isfinite(y))
        assert np.array_equal(x[:, ::2], z[:, ::2])
        assert not np.isfinite(x).all()


def test_threads_change_no_bit(past: bool):
    rng = np.random.default_rng(2)
    state = rng.standard_normal((4, 8, 128, 128)).astype("float32")
    query, key, value = (rng.standard_normal((4, 8, 128)).astype("float32") for _ in range(3))
    found = []
    before = scanfield.get_num_threads()
    try:
        for threads in (1, 2, 3):
            scanfield.set_num_threads(threads)
            found.append(scanfield.gdn2.step(state, query, key, value, -abs(key), abs(key) / 128))
    finally:
        scanfield.set_num_threads(before)
    for output, last in found[1:]:
        assert np.array_equal(output, found[0][0])
        assert np.array_equal(last, found[0][1])
