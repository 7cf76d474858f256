"""Field reports F058 to F060: relevance of a recurrence, its conservation in a batch and in half precision."""

from __future__ import annotations

import numpy as np
import pytest
from calls import GENERIC
from draws import G, M, printed

import scanfield
from scanfield.lrp import relevance

pytestmark = GENERIC


def test_f058_a_recurrence_has_a_rule_and_keeps_it(library):
    drawn = M(46, 2, 7, 3, 4)
    given = library.arrays(drawn.inputs("D", "delta_bias") | {"initial_state": drawn.state})
    R = library.array(np.random.default_rng(460).standard_normal((2, 7, 3)))
    first, second = (
        relevance(scanfield.selective_scan, R, **given, delta_softplus=True, epsilon=0.0) for _ in range(2)
    )
    u, state = library.numpy(first.u), library.numpy(first.initial_state)
    assert u.sum() == pytest.approx(4.577671509101, abs=1e-9)
    assert state.sum() == pytest.approx(-1.938060955394, abs=1e-9)
    printed(u[0, 0, 0], "0.255631253494")
    assert library.numpy(second.u).tobytes() == u.tobytes()
    assert library.numpy(second.initial_state).tobytes() == state.tobytes()


def test_f058_what_has_no_rule_is_named(library):
    def recurrence_of_mine(x):
        return x

    with pytest.raises(scanfield.ScanfieldError, match="recurrence_of_mine"):
        relevance(recurrence_of_mine, library.array(np.ones((1, 2, 3))), library.array(np.ones((1, 2, 3))))


# Relevance of each row of the batch: what was put in, and what a stabiliser of 1e-6 takes of it.
SUMS = [7.00665267, -1.4506026, 9.49030545, 6.84984763]
LEAKS = [-0.00617396, -0.00043804, -0.00017874, -0.00177836]


def _rows(library, found) -> np.ndarray:
    """Relevance of the value and the state, row by row."""
    parts = (library.numpy(found.value), library.numpy(found.initial_state))
    return sum(x.astype(np.float64).reshape(x.shape[0], -1).sum(axis=1) for x in parts)


def test_f059_every_row_conserves_on_its_own(library):
    drawn = G(45, 4, 12, 2, 5, 4)
    inputs = drawn.inputs() | {"initial_state": drawn.state}
    R = np.random.default_rng(450).standard_normal((4, 12, 2, 4))
    exact = relevance(scanfield.gdn2, library.array(R), **library.arrays(inputs), epsilon=0.0)
    np.testing.assert_allclose(_rows(library, exact), SUMS, atol=1e-8)
    np.testing.assert_allclose(R.sum(axis=(1, 2, 3)), SUMS, atol=1e-8)

    whole = relevance(scanfield.gdn2, library.array(R), **library.arrays(inputs), epsilon=1e-6)
    leaks = library.numpy(whole.report.leak_readout)
    np.testing.assert_allclose(leaks, LEAKS, atol=1e-8)
    np.testing.assert_allclose(_rows(library, whole) + leaks, R.sum(axis=(1, 2, 3)), atol=1e-10)
    for row in range(4):
        one = {name: x[row : row + 1] for name, x in inputs.items()}
        alone = relevance(
            scanfield.gdn2, library.array(R[row : row + 1]), **library.arrays(one), epsilon=1e-6
        )
        for found, known in ((alone.value, whole.value), (alone.initial_state, whole.initial_state)):
            np.testing.assert_allclose(library.numpy(found)[0], library.numpy(known)[row], atol=1e-10)


@pytest.mark.backend("numpy", "torch")
def test_f060_half_precision_neither_overflows_nor_loses_the_balance(library):
    drawn = G(45, 4, 12, 2, 5, 4)
    inputs = library.arrays(drawn.inputs() | {"initial_state": drawn.state}, "float16")
    R = 1e5 * np.random.default_rng(450).standard_normal((4, 12, 2, 4))
    size = np.abs(R).sum(axis=(1, 2, 3))
    for epsilon, allowed in ((0.0, 1e-4), (1e-6, 1e-3)):
        found = relevance(scanfield.gdn2, library.array(R, "float32"), **inputs, epsilon=epsilon)
        for part in (found.value, found.initial_state):
            assert str(part.dtype).endswith(("float32", "float64"))
            assert np.isfinite(library.numpy(part)).all()
        off = np.abs(_rows(library, found) - R.sum(axis=(1, 2, 3)))
        assert (off < allowed * size).all(), off / size
        np.testing.assert_allclose(library.numpy(found.report.sum_out), R.sum(axis=(1, 2, 3)), rtol=1e-5)
        np.testing.assert_allclose(
            library.numpy(found.report.sum_in), _rows(library, found), atol=1e-5 * size.max()
        )
