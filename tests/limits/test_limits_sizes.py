"""Sizes past what a 16-bit or 32-bit index holds, and the extremes of every axis.

Truths are closed forms of whole numbers, which float64 adds without rounding, or the reference.
"""

from __future__ import annotations

import numpy as np
import pytest
import reference
from checks import vjp

pytestmark = pytest.mark.backend("numpy", "torch")

LONG = 65_537  # one more than 16 bits count
WIDE = 70_000


def leave_out(backend: str, test: str, given: dict) -> bool:
    """Read-only arrays are like others at any size, and the generic forms alike on every library."""
    return given.get("library") == "readonly" or (
        backend == "torch" and given.get("method") == "generic.chunk"
    )


def whole(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-9, 10, shape).astype(np.float64)


def after(x: np.ndarray) -> np.ndarray:
    """Sums of each token and all later ones."""
    return x[:, ::-1].cumsum(axis=1)[:, ::-1]


def sums(op: str, x: np.ndarray) -> tuple[dict[str, np.ndarray], str]:
    """Inputs with which an operation adds up its value input x (1, time, channels), and that one's name."""
    ones = np.ones((1, x.shape[1], 1))
    if op == "linear_scan":
        return {"a": np.ones_like(x), "b": x}, "b"
    if op == "selective_scan":
        given = {"u": x, "delta": np.ones_like(x), "A": np.zeros((x.shape[2], 1)), "B": ones, "C": ones}
        return given, "u"
    one = ones[..., None]
    return {"query": one, "key": one, "value": x[:, :, None]}, "value"


CASES = [("linear_scan", None), ("linear_scan", "generic.blocked"), ("selective_scan", None), ("gdn2", None)]


@pytest.mark.parametrize(("op", "method"), [*CASES, ("gdn2", "generic.chunk")])
def test_a_sequence_of_65537_tokens(library, op: str, method: str | None):
    x, d_y = whole(1, 1, LONG, 2), whole(2, 1, LONG, 2)
    inputs, value = sums(op, x)
    options = {} if op != "gdn2" else {"scale": 1.0}
    d_output = d_y[:, :, None] if op == "gdn2" else d_y
    got = vjp(library, op, inputs, (d_output, None), **options, method=method)
    assert np.array_equal(library.numpy(got.output).reshape(x.shape), x.cumsum(axis=1))
    assert np.array_equal(library.numpy(got.final_state).reshape(2), x.sum(axis=(0, 1)))
    assert np.array_equal(library.numpy(got.gradients[value]).reshape(x.shape), after(d_y))
    if op == "linear_scan":
        before = np.concatenate([np.zeros((1, 1, 2)), x.cumsum(axis=1)[:, :-1]], axis=1)
        assert np.array_equal(library.numpy(got.gradients["a"]), before * after(d_y))


def draws(op: str, batch: int, time: int, wide: str) -> dict[str, np.ndarray]:
    """Inputs with one axis of WIDE: lanes, channels, value heads or values; or of `batch` alone."""
    rng = np.random.default_rng(3)

    def draw(*shape: int) -> np.ndarray:
        return rng.uniform(0.1, 1, shape)

    size = WIDE if wide else 3
    if op == "linear_scan":
        return {
            "a": draw(batch, time, size),
            "b": draw(batch, time, size),
            "initial_state": draw(batch, size),
        }
    if op == "selective_scan":
        x, B = (batch, time, size), (batch, time, 2)
        given = {"u": draw(*x), "delta": draw(*x), "A": -draw(size, 2), "B": draw(*B), "C": draw(*B)}
        return given | {"initial_state": draw(batch, size, 2)}
    heads, V = (WIDE, 2) if wide == "heads" else (1, WIDE) if wide else (2, 3)
    key = (batch, time, heads, 2)
    given = {name: draw(*key) / 2 for name in ("query", "key", "erase")} | {"log_decay": -draw(*key)}
    return given | {"value": draw(batch, time, heads, V), "initial_state": draw(batch, heads, 2, V)}


def check(library, op: str, inputs: dict[str, np.ndarray], method: str | None = None) -> None:
    truth = reference.forward(op, inputs)
    d_output, d_state = np.cos(truth.output), np.sin(truth.final_state)
    grads = reference.vjp(op, inputs, d_output, d_state)
    got = vjp(library, op, inputs, (d_output, d_state), method=method)
    pairs = {"output": (got.output, truth.output), "final_state": (got.final_state, truth.final_state)}
    pairs |= {name: (got.gradients[name], want) for name, want in grads.items()}
    for name, (found, want) in pairs.items():
        error = np.abs(library.numpy(found) - want).max() / np.abs(want).max()
        assert error <= 1e-12, (name, error)


@pytest.mark.parametrize(
    ("op", "wide"),
    [("linear_scan", "lanes"), ("selective_scan", "channels"), ("gdn2", "heads"), ("gdn2", "values")],
)
def test_70000_channels(library, op: str, wide: str):
    check(library, op, draws(op, 1, 3, wide))


@pytest.mark.parametrize("op", ["linear_scan", "selective_scan", "gdn2"])
def test_2048_packed_sequences_of_one_token(library, op: str):
    """They are 2,048 rows of a batch."""
    rows = draws(op, 2048, 1, "")
    packed = {name: x if name in ("A", "initial_state") else np.swapaxes(x, 0, 1) for name, x in rows.items()}
    truth = reference.forward(op, rows)
    d_output, d_state = np.cos(truth.output), np.sin(truth.final_state)
    want = reference.vjp(op, rows, d_output, d_state)
    bounds = list(range(2049))
    got = vjp(library, op, packed, (np.swapaxes(d_output, 0, 1), d_state), cu_seqlens=bounds)
    np.testing.assert_allclose(library.numpy(got.output)[0], truth.output[:, 0], rtol=1e-12)
    np.testing.assert_allclose(library.numpy(got.final_state), truth.final_state, rtol=1e-12)
    for name, x in want.items():
        found = library.numpy(got.gradients[name])
        found = found if name in ("A", "initial_state") else np.swapaxes(found, 0, 1)
        np.testing.assert_allclose(found, x, rtol=1e-11, atol=1e-13, err_msg=name)


@pytest.mark.parametrize("method", [None, "generic.chunk"])
def test_the_extremes_of_a_head(library, method: str | None):
    """K and V of 1, of 512 and of one more."""
    rng = np.random.default_rng(4)
    for K, V in ((1, 1), (1, 512), (512, 1), (513, 3), (2, 513)):
        key = (1, 5, 2, K)
        inputs = {name: rng.uniform(0, 1, key) / K**0.5 for name in ("query", "key", "erase")}
        inputs |= {"log_decay": -rng.uniform(0, 1, key), "value": rng.standard_normal((1, 5, 2, V))}
        check(library, "gdn2", inputs | {"initial_state": rng.standard_normal((1, 2, K, V))}, method=method)


def test_states_of_1_and_of_512(library):
    rng = np.random.default_rng(5)
    for N in (1, 512):
        x, B = rng.uniform(0, 1, (1, 5, 3)), rng.standard_normal((2, 1, 5, N))
        check(
            library,
            "selective_scan",
            {"u": x, "delta": x, "A": -rng.uniform(0, 1, (3, N)), "B": B[0], "C": B[1]},
        )
