"""The per-sample Jacobian: consistent with the loss, with differences, and with nested automatic differentiation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pinn_draws as draws
import pytest
from arrays import deviation

import scanfield
from scanfield import pinn

GIVEN = {"wavenumber": 2.5, "admittance": 1.5}


def leave_out(backend: str, test: str, parameters: dict[str, Any]) -> bool:
    # A training loop computes at every step: Dask's arrays are not for it. JAX compiles for seconds for each case.
    dear = backend == "jax" and parameters.get("case", {}).get("d", 2) != 2
    return backend == "dask" or dear


CASES = [
    {"d": 1, "activation": "sin"},
    {"d": 2},
    {"d": 3, "activation": "swish", "kind": "frozen"},
    {"d": 2, "kind": "raw", "outputs": 1},
    {"d": 2, "kind": "periodic", "hidden": (), "activation": "gelu"},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_squares_and_products_are_the_loss_and_its_gradient(library: Any, case: dict[str, Any]) -> None:
    network = draws.network(library, **case)
    terms = draws.terms(library, case["d"], kinds=draws.kinds_for(library))
    r, J = (library.numpy(part) for part in pinn.jacobian(network, terms, wavenumber=GIVEN, chunk=256))
    found = pinn.loss_and_grad(network, terms, wavenumber=GIVEN)
    rows = 2 * 9 * len(terms)
    if network.outputs == 1 and len(terms) > 2:
        rows -= 9  # of a real field one term has no imaginary part
    assert J.shape == (rows, network.size + 2) and r.shape == (rows,)
    assert np.sum(r * r) == pytest.approx(float(library.numpy(found.loss)), rel=1e-13)
    gradient = 2.0 * J.T @ r
    assert deviation(gradient[: network.size], library.numpy(network.flatten(found.gradients))) < 1e-12
    for i, name in enumerate(GIVEN):
        assert gradient[network.size + i] == pytest.approx(
            float(library.numpy(found.gradients[name])), rel=1e-11
        )


@pytest.mark.backend("numpy")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_column_is_that_of_differences(case: dict[str, Any]) -> None:
    library = draws.plain()
    network = draws.network(library, **case)
    terms = pinn.prepare_terms(draws.terms(library, case["d"], n=3), network)
    _, J = pinn.jacobian(network, terms, wavenumber=GIVEN)
    theta, h = network.flatten(), 1e-5

    def residual(vector: np.ndarray, given: dict[str, float]) -> np.ndarray:
        return pinn.jacobian(network.replace(network.unflatten(vector)), terms, wavenumber=given).residual

    for j in np.random.default_rng(0).choice(network.size, 40):
        e = np.zeros_like(theta)
        e[j] = h
        want = (residual(theta + e, GIVEN) - residual(theta - e, GIVEN)) / (2 * h)
        assert deviation(J[:, j], want, floor=1e-2) < 1e-8
    for j, name in enumerate(GIVEN):
        left, right = (residual(theta, {**GIVEN, name: GIVEN[name] + s * h}) for s in (-1, 1))
        assert deviation(J[:, network.size + j], (right - left) / (2 * h)) < 1e-8


def test_rows_of_a_real_problem_are_one_for_each_point(library: Any) -> None:
    network = draws.network(library, 2, outputs=1)
    terms = draws.terms(library, 2, kinds=("data", "pde"), real=True)
    r, J = pinn.jacobian(network, terms)
    assert tuple(r.shape) == (18,) and tuple(J.shape) == (18, network.size)


def test_rows_follow_the_points(library: Any) -> None:
    """Real and imaginary row of a point lie side by side, points in their order, whatever the chunk is."""
    network = draws.network(library, 2)
    (term,) = draws.terms(library, 2, n=20, kinds=("robin",))
    r, J = pinn.jacobian(network, [term], chunk=256)
    want = library.numpy(pinn.residuals(network, [term])["robin"]) * np.sqrt(0.7 / 20)
    assert deviation(library.numpy(r), want.reshape(-1)) < 1e-14
    cut = pinn.jacobian(network, [term], chunk=7)
    assert deviation(library.numpy(cut.matrix), library.numpy(J)) < 1e-13
    assert deviation(library.numpy(cut.residual), library.numpy(r)) < 1e-13


def test_an_unknown_that_is_complex_is_refused(library: Any) -> None:
    network = draws.network(library, 2)
    with pytest.raises(scanfield.ArgumentError, match="admittance is complex"):
        pinn.jacobian(network, draws.terms(library, 2, kinds=("free",)), wavenumber=draws.UNKNOWNS)
