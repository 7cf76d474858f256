"""Softplus is log(1 + e^x) exactly: no threshold, no overflow, no early zero; and its derivative is the
sigmoid.
"""

from __future__ import annotations

import numpy as np
import reference
from arrays import Library
from checks import call_on, vjp_on

# Around 20, where others switch to x (off by 2e-9 there), around the overflows of exp (88.7 and 709), and far
# below.
X = np.array(
    [
        -1000,
        -700,
        -100,
        -87,
        -40,
        -20,
        -17,
        -1,
        -1e-3,
        0,
        1e-8,
        1,
        17,
        19.999,
        20,
        20.001,
        40,
        88.5,
        89,
        500,
        710,
        1e4,
    ]
)


def probe(library: Library, dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x as rounded, softplus(x) and its derivative, read off one token: the state from zero is s u B, with u
    = B = 1.
    """
    n = X.size
    ones = np.ones((1, 1, n))
    arrays = library.arrays(
        {
            "u": ones,
            "delta": X.reshape(1, 1, n),
            "A": -np.ones((n, 1)),
            "B": np.ones((1, 1, 1)),
            "C": np.ones((1, 1, 1)),
        },
        dtype,
    )
    ones_of_state = library.array(np.ones((1, n, 1)), dtype)
    got = vjp_on(library, "selective_scan", arrays, (None, ones_of_state), delta_softplus=True)
    rounded, slope = arrays["delta"], got.gradients["delta"]
    return tuple(library.numpy(x).ravel() for x in (rounded, got.final_state, slope))


def test_softplus_is_exact(library: Library, dtype: str):
    x, s, slope = probe(library, dtype)
    eps = {"float32": 2.0**-23, "float64": 2.0**-52}[dtype]
    tiny = {"float32": 1.2e-38, "float64": 2.3e-308}[dtype]  # below this a library may flush to zero
    want, want_slope = reference.softplus(x), reference.sigmoid(x)
    assert np.all(np.isfinite(s)) and np.all(np.isfinite(slope))
    assert np.all(np.abs(s - want) <= 4 * eps * want + tiny), np.max(np.abs(s - want) / want)
    assert np.all(np.abs(slope - want_slope) <= 4 * eps * want_slope + tiny)


def test_zero_is_an_ordinary_value(library: Library):
    """softplus(0) = log 2: a delta of 0 does not switch a token off."""
    x, s, _ = probe(library, "float64")
    assert abs(s[list(x).index(0.0)] - np.log(2)) < 1e-15


def test_ssd_has_the_same_softplus(library: Library):
    n = X.size
    arrays = library.arrays({
        "x": np.ones((1, 1, n, 1)), "dt": X.reshape(1, 1, n), "A": -np.ones(n), "B": np.ones((1, 1, 1, 2)),
        "C": np.ones((1, 1, 1, 2)),
    })  # fmt: skip
    got = call_on(library, "ssd", arrays, dt_softplus=True)
    want = np.broadcast_to(reference.softplus(X)[None, :, None, None], (1, n, 1, 2))
    assert np.all(np.abs(library.numpy(got.final_state) - want) <= 1e-15 * want + 1e-307)
