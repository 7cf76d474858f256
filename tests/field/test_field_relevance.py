"""Field reports F058 to F060: relevance."""

from __future__ import annotations

import numpy as np
import pytest
from draws import G, M, bitwise, printed, within

import scanfield
from scanfield.lrp import relevance

ROWS = (7.00665267, -1.4506026, 9.49030545, 6.84984763)  # sums of R, by row
LEAK = (-0.00617396, -0.00043804, -0.00017874, -0.00177836)  # what the stabiliser takes at 1e-6


def leave_out(backend: str, test: str, given: dict) -> bool:
    """Each is a forward and a backward that the scans' own tests run on Dask; JAX would compile them once more."""
    return backend in ("jax", "dask")


def test_f058_a_recurrent_layer_has_a_rule_every_time(library):
    drawn = M(46, 2, 7, 3, 4)
    given = library.arrays(drawn.inputs("D", "delta_bias")) | {"initial_state": library.array(drawn.state)}
    R = library.array(np.random.default_rng(460).standard_normal((2, 7, 3)))
    first, second = (
        relevance(scanfield.selective_scan, R, **given, delta_softplus=True, epsilon=0.0) for _ in range(2)
    )
    for one, two in zip(first[:2], second[:2], strict=True):
        bitwise(library.raw(one), library.raw(two))
    printed(library.numpy(first.value).sum(), "4.577671509101")
    printed(library.numpy(first.initial_state).sum(), "-1.938060955394")
    printed(library.numpy(first.value)[0, 0, 0], "0.255631253494")

    def my_scan(u):
        return u

    with pytest.raises(scanfield.ScanfieldError, match="my_scan"):
        relevance(my_scan, R, given["u"])


@pytest.mark.parametrize("epsilon", [0.0, 1e-6])
def test_f059_the_sum_is_conserved_whatever_the_batch(library, epsilon):
    drawn = G(45, 4, 12, 2, 5, 4)
    R = np.random.default_rng(450).standard_normal((4, 12, 2, 4))
    inputs = drawn.inputs() | {"initial_state": drawn.state}
    found = relevance(scanfield.gdn2, library.array(R), **library.arrays(inputs), epsilon=epsilon)
    value, state = library.numpy(found.value), library.numpy(found.initial_state)
    got = value.sum(axis=(1, 2, 3)) + state.sum(axis=(1, 2, 3))
    leak = library.numpy(found.report.leak_readout) + library.numpy(found.report.leak_state)
    assert np.max(np.abs(got + leak - ROWS)) <= 1e-8
    if epsilon:
        assert np.max(np.abs(leak - LEAK)) <= 1e-8
    assert np.max(np.abs(library.numpy(found.report.gap))) <= 1e-10
    for row in range(4):
        one = {name: x[row : row + 1] for name, x in inputs.items()}
        alone = relevance(
            scanfield.gdn2, library.array(R[row : row + 1]), **library.arrays(one), epsilon=epsilon
        )
        within(library.numpy(alone.value), value[row : row + 1], 1e-10)
        within(library.numpy(alone.initial_state), state[row : row + 1], 1e-10)


@pytest.mark.parametrize("epsilon", [0.0, 1e-6])
def test_f060_half_precision_neither_overflows_nor_loses(library, epsilon):
    if "float16" not in library.dtypes:
        pytest.skip(f"{library.name} has no float16")
    drawn = G(45, 4, 12, 2, 5, 4)
    R = 1e5 * np.random.default_rng(450).standard_normal((4, 12, 2, 4))
    given = library.arrays(drawn.inputs() | {"initial_state": drawn.state}, "float16")
    found = relevance(scanfield.gdn2, library.array(R, "float32"), **given, epsilon=epsilon)
    assert library.dtype(found.value) == library.dtype(found.initial_state) == "float32"
    value, state = library.numpy(found.value), library.numpy(found.initial_state)
    assert np.isfinite(value).all() and np.isfinite(state).all()
    total_in = value.sum(axis=(1, 2, 3)) + state.sum(axis=(1, 2, 3))
    lost = np.abs(total_in - R.sum(axis=(1, 2, 3))) / np.abs(R).sum(axis=(1, 2, 3))
    assert np.max(lost) < (1e-3 if epsilon else 1e-4)
    within(library.numpy(found.report.sum_out), R.sum(axis=(1, 2, 3)), 1e-5)
    within(library.numpy(found.report.sum_in), total_in, 1e-4)
