"""Activations and their derivatives: against differences, at the edges, and erf against the C library's."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from arrays import deviation

import scanfield
from scanfield import pinn
from scanfield.pinn.activations import ACTIVATIONS, derivatives, erf_series


def leave_out(backend: str, test: str, parameters: dict[str, Any]) -> bool:
    return backend == "dask"  # a training loop computes at every step: Dask's arrays are not for it


Z = np.concatenate([np.linspace(-6.0, 6.0, 49), [-0.6249, 0.6251, 1e-3, -1e-5]])


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_each_derivative_is_that_of_the_one_before(library: Any, name: str) -> None:
    steps = [(-2.0, 1.0 / 12), (-1.0, -2.0 / 3), (1.0, 2.0 / 3), (2.0, -1.0 / 12)]
    h = 1e-3
    found = [library.numpy(s) for s in derivatives(library.xp, name, library.array(Z), 3)]
    moved = [
        [weight * library.numpy(s) for s in derivatives(library.xp, name, library.array(Z + place * h), 3)]
        for place, weight in steps
    ]
    for order in range(3):
        difference = sum(one[order] for one in moved) / h
        assert deviation(found[order + 1], difference) < 3e-11, order + 1


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("order", [0, 1, 2])
def test_fewer_derivatives_are_the_same(library: Any, name: str, order: int) -> None:
    z = library.array(Z)
    more, fewer = derivatives(library.xp, name, z, 3), derivatives(library.xp, name, z, order)
    assert len(fewer) == order + 1
    for a, b in zip(fewer, more, strict=False):
        assert np.array_equal(library.numpy(a), library.numpy(b))


@pytest.mark.parametrize("name", [name for name in ACTIVATIONS if name != "sin"])
def test_nothing_overflows_far_out(library: Any, name: str, dtype: str) -> None:
    z = library.array(np.array([-1e4, -200.0, 200.0, 1e4], dtype))
    limits = {"tanh": [-1, -1, 1, 1], "gelu": [0, 0, 200, 1e4]}.get(name, [0, 0, 200, 1e4])
    value, *rest = derivatives(library.xp, name, z, 3)
    assert np.allclose(library.numpy(value), limits, rtol=1e-6, atol=1e-30)
    assert all(np.all(np.isfinite(library.numpy(s))) for s in rest)


def test_erf_of_the_standard_alone(library: Any) -> None:
    x = np.concatenate([np.linspace(-7.0, 7.0, 141), [2.999999, 3.0, 3.000001, 0.0, 50.0, -1e30]])
    want = np.array([math.erf(value) for value in x])
    assert np.max(np.abs(library.numpy(erf_series(library.xp, library.array(x))) - want)) < 5e-16
    assert np.isnan(library.numpy(erf_series(library.xp, library.array(np.array([np.nan]))))[0])


@pytest.mark.backend("numpy", "torch", "jax")
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_networks_use_them(library: Any, name: str, dtype: str) -> None:
    """Through one unit that passes z on: value and derivatives of the library's fastest kernels."""
    weights = {"W0": [[1.0]], "b0": [0.0], "W1": [[1.0]], "b1": [0.0]}
    network = pinn.Network(
        {key: library.array(np.array(value, dtype)) for key, value in weights.items()},
        embedding=pinn.RawCoordinates(1),
        activation=name,
    )
    points = library.array(Z.astype(dtype)[:, None])
    jet = pinn.jet(network, points)
    s = derivatives(np, name, Z.astype(dtype).astype(np.float64), 2)
    tolerance = {"float64": 1e-14, "float32": 1e-6}[dtype]
    for have, want in zip((jet.value, jet.first[0, ...], jet.second), s, strict=True):
        assert deviation(library.numpy(have)[:, 0], want) < tolerance
    for j, z in enumerate(Z):  # small values keep their digits: nothing cancels in tanh or softplus
        if name == "tanh" and 0 < abs(z) < 0.7:
            assert library.numpy(jet.value)[j, 0] == pytest.approx(s[0][j], rel=20 * tolerance)


def test_an_unknown_one_is_named(library: Any) -> None:
    with pytest.raises(scanfield.ArgumentError, match=r"activation: 'relu'; allowed are tanh, sin"):
        pinn.Network.create(pinn.RawCoordinates(1), activation="relu")
