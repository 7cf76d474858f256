"""Memory of a loss with its gradients does not grow with the points (field report F081)."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from scanfield import pinn

pytestmark = pytest.mark.backend("numpy")

ALLOWED = 40e6  # bytes; a layer of all derivatives of all points would be 160 MB


def _problem(n: int) -> tuple[pinn.Network, list[pinn.Term]]:
    rng = np.random.default_rng(81)
    network = pinn.Network.create(pinn.RawCoordinates(2), hidden=(50, 50, 50), outputs=1, seed=81)
    points = rng.uniform(-1.0, 1.0, (n, 2))
    return network, [pinn.Term("PDE", (pinn.Piece(points, value=np.full(n, 9.0), second=np.ones((n, 2))),))]


def _peak(run) -> tuple[int, object]:
    run()  # what is compiled at the first call stays
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        found = run()
        return tracemalloc.get_traced_memory()[1] - before, found
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("n", [10_000, 100_000])
def test_f081_many_points_fit(n):
    network, terms = _problem(n)
    peak, _ = _peak(lambda: pinn.loss_and_grad(network, terms))
    assert peak < ALLOWED, peak


def test_f081_a_jacobian_needs_little_beyond_itself():
    network, terms = _problem(2000)
    peak, found = _peak(lambda: pinn.jacobian(network, terms))
    assert peak - found.matrix.nbytes < ALLOWED, peak


def test_f081_chunks_change_rounding_only():
    network, terms = _problem(1000)
    known = pinn.loss_and_grad(network, terms)
    rows = pinn.jacobian(network, terms)
    for chunk in (1000, 130):
        found = pinn.loss_and_grad(network, terms, chunk=chunk)
        assert float(found.loss) == pytest.approx(float(known.loss), rel=1e-12)
        for name, gradient in found.gradients.items():
            wanted = known.gradients[name]
            assert np.abs(gradient - wanted).max() <= 1e-12 * max(np.abs(wanted).max(), 1e-300), name
        matrix = pinn.jacobian(network, terms, chunk=chunk).matrix
        assert np.abs(matrix - rows.matrix).max() <= 1e-12 * np.abs(rows.matrix).max()
