"""The compiled linear scan of a long series of few lanes: several tokens side by side in a register."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from arrays import deviation

import scanfield

pytest.importorskip("numba")

pytestmark = pytest.mark.backend("numpy")

METHOD = "numpy.numba"
LENGTHS = (32, 65, 257, 700)


def token_by_token(a: np.ndarray, b: np.ndarray, state: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        rows = []
        for a_t, b_t in zip(np.moveaxis(a, 1, 0), np.moveaxis(b, 1, 0), strict=True):
            state = a_t * state + b_t
            rows.append(state)
    return np.stack(rows, axis=1)


def draw(batch: int, time: int, lanes: int, dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(time + lanes)
    a = rng.uniform(-1.1, 1.1, (batch, time, lanes)).astype(dtype)
    b, state = (rng.standard_normal(shape).astype(dtype) for shape in ((batch, time, lanes), (batch, lanes)))
    return a, b, state


def scan(
    a: np.ndarray, b: np.ndarray, state: np.ndarray | None = None, **options: Any
) -> scanfield.ScanResult:
    return scanfield.linear_scan(a, b, state, method=METHOD, **options)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("lanes", range(1, 9))
def test_the_recurrence(dtype: str, lanes: int):
    tolerance = {"float32": 4e-6, "float64": 1e-12}[dtype]
    for time in LENGTHS:
        a, b, state = draw(3, time, lanes, dtype)
        want = token_by_token(*(x.astype("float64") for x in (a, b, state)))
        found = scan(a, b, state)
        assert deviation(found.output, want) <= tolerance
        assert np.array_equal(found.final_state, found.output[:, -1])
        back = scan(a, b, state, reverse=True).output
        want = token_by_token(*(x.astype("float64") for x in (a[:, ::-1], b[:, ::-1], state)))
        assert deviation(back[:, ::-1], want) <= tolerance
        states = scan(a, b, state, states_at="chunks", chunk_size=21)
        assert deviation(states.states[:, 1], want_at(a, b, state, 20)) <= tolerance


def want_at(a: np.ndarray, b: np.ndarray, state: np.ndarray, token: int) -> np.ndarray:
    return token_by_token(*(x.astype("float64") for x in (a, b, state)))[:, token]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("name", ["a", "b"])
def test_what_is_not_finite_waits_for_its_token(name: str, value: float):
    """Tokens before it are the same bits as without it, those after it what the recurrence has; a zero resets nothing."""
    for lanes, spot in ((1, 77), (1, 64), (2, 90), (3, 64), (5, 100), (8, 79)):
        a, b, state = draw(2, 200, lanes, "float32")
        a[:, spot + 9] = 0
        clean = scan(a, b, state).output
        {"a": a, "b": b}[name][1, spot, -1] = value
        found = scan(a, b, state).output
        want = token_by_token(a, b, state)
        assert np.array_equal(np.isnan(found), np.isnan(want)), (lanes, spot)
        assert np.array_equal(np.isinf(found), np.isinf(want)), (lanes, spot)
        finite = np.isfinite(want)
        assert np.allclose(found[finite], want[finite], rtol=1e-4, atol=1e-5)
        assert found[:, :spot].tobytes() == clean[:, :spot].tobytes()
        assert found[0].tobytes() == clean[0].tobytes()
        assert found[..., :-1].tobytes() == clean[..., :-1].tobytes()


def test_products_that_overflow_where_states_do_not():
    """Ten coefficients of 1e6 on a state of 1e-30, and then their inverses."""
    a = np.ones((1, 128, 1), np.float32)
    a[0, 20:30], a[0, 36:46] = 1e6, 1e-6
    state = np.full((1, 1), 1e-30, np.float32)
    found = scan(a, np.zeros_like(a), state).output
    want = token_by_token(a.astype("float64"), np.zeros(a.shape), state.astype("float64"))
    assert np.isfinite(found).all()
    assert np.allclose(found, want, rtol=1e-5)


def test_long_memory_is_as_exact_as_short():
    """A running sum of a million tokens, and a decay just below 1."""
    rng = np.random.default_rng(0)
    b = rng.standard_normal((1, 10**6, 1)).astype(np.float32)
    for decay in (1.0, 0.999):
        a = np.full((1, 1, 1), decay, np.float32)
        wide = a.astype("float64"), b.astype("float64")
        want = scanfield.linear_scan(*wide, method=METHOD).output
        assert deviation(scan(a, b).output, want) <= 4e-6


def test_tied_strided_and_packed():
    for lanes in (1, 3, 8):
        a, b, state = draw(1, 300, lanes, "float32")
        want = scan(a, b, state)
        for change in (
            lambda x: np.repeat(x, 2, axis=1)[:, ::2],
            np.asfortranarray,
            lambda x: np.ascontiguousarray(x[:, ::-1])[:, ::-1],
        ):
            assert np.array_equal(scan(change(a), change(b), state).output, want.output)
        bounds = [0, 0, 70, 71, 160, 300]
        states = np.tile(state, (5, 1))
        packed = scan(a, b, states, cu_seqlens=bounds)
        for i, (start, stop) in enumerate(pairwise(bounds)):
            if stop - start > 64:
                alone = scan(a[:, start:stop], b[:, start:stop], states[i : i + 1])
                assert np.array_equal(packed.output[:, start:stop], alone.output)
                assert np.array_equal(packed.final_state[i : i + 1], alone.final_state)
        assert np.array_equal(packed.final_state[0], state[0])
        scalar = scan(a[:, :, :1], b, state).output
        assert np.array_equal(scan(np.repeat(a[:, :, :1], lanes, axis=2), b, state).output, scalar)
        constant = scan(a[:, :1], b, state).output
        assert np.array_equal(scan(np.repeat(a[:, :1], 300, axis=1), b, state).output, constant)


@pytest.mark.parametrize("lanes", [1, 3, 4])
def test_cotangents_that_are_not_finite(lanes: int):
    """They reach the tokens before them that the recurrence lets them reach, and no other."""
    a, b, state = draw(2, 170, lanes, "float32")
    a[:, 100] = 0
    for value in (np.nan, np.inf):
        grads = []
        for method in (METHOD, "generic.recurrent"):
            result, pull = scanfield.vjp(scanfield.linear_scan, a, b, state, method=method)
            d_output = np.ones_like(result.output)
            d_output[1, 131, 0] = value
            with np.errstate(all="ignore"):
                grads.append(pull(d_output))
        for name, want in grads[1].items():
            found = grads[0][name]
            assert np.array_equal(np.isnan(found), np.isnan(want)), name
            assert np.array_equal(np.isinf(found), np.isinf(want)), name
            finite = np.isfinite(want)
            assert not finite.all() or name == "initial_state"
            assert deviation(found[finite], want[finite]) <= 4e-6
        d_output[1, 131, 0] = 1
        clean = scanfield.vjp(scanfield.linear_scan, a, b, state, method=METHOD)[1](d_output)
        for name, found in grads[0].items():
            assert found[..., 1:].tobytes() == clean[name][..., 1:].tobytes(), name


def test_gradients_whose_products_overflow():
    a = np.ones((1, 128, 1), np.float32)
    a[0, 30:40], a[0, 20:30] = 1e6, 1e-6
    d_output = np.zeros_like(a)
    d_output[0, 50] = 1e-30
    grads = []
    for dtype in ("float32", "float64"):
        _, pull = scanfield.vjp(
            scanfield.linear_scan, a.astype(dtype), np.zeros(a.shape, dtype), method=METHOD
        )
        grads.append(pull(d_output.astype(dtype))["b"])
    assert np.isfinite(grads[0]).all()
    assert np.allclose(*grads, rtol=1e-5)


def test_a_broadcast_cotangent():
    for lanes in (2, 40):
        a, b, _ = draw(2, 80, lanes, "float32")
        result, pull = scanfield.vjp(scanfield.linear_scan, a, b, method=METHOD)
        ones = np.broadcast_to(np.float32(1), result.output.shape)
        for found, want in zip(pull(ones).values(), pull(ones.copy()).values(), strict=True):
            assert np.array_equal(found, want)
