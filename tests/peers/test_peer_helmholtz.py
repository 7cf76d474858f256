"""Helmholtz networks against two other methods, on problems without a closed solution: differences and finite elements."""

from __future__ import annotations

import numpy as np
import pytest

from scanfield import pinn

scipy_sparse = pytest.importorskip("scipy.sparse", reason="the peers need SciPy")


def _relative(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def test_finite_differences_on_a_lossy_line():
    """k varies and has loss, a source drives, the left end is held, the right end open; 8,000 intervals of second order."""
    from scipy.sparse.linalg import spsolve

    def k(x):
        return 12.0 + 6.0 * np.sin(2 * x[:, 0]) + 0.4j

    def f(x):
        return 50.0 * np.exp(-30 * (x[:, 0] - 0.4) ** 2)

    n = 8000
    h, x = 1.0 / n, np.linspace(0.0, 1.0, n + 1)[:, None]
    below, above = np.full(n, 1 / h**2, complex), np.full(n, 1 / h**2, complex)
    middle, right = -2 / h**2 + k(x) ** 2, f(x).astype(complex)
    middle[0], above[0], right[0] = 1.0, 0.0, 0.5
    # A point beyond the end, taken away by u' = i k u.
    below[-1], middle[-1] = 2 / h**2, middle[-1] + 2j * k(x[-1:])[0] / h
    matrix = scipy_sparse.diags_array([below, middle, above], offsets=[-1, 0, 1], format="csc")
    theirs = spsolve(matrix, right)

    problem = pinn.Helmholtz(
        pinn.Interval(0, 1), k, f, [pinn.Dirichlet(0.5, where="left"), pinn.Sommerfeld(where="right")]
    )
    network = pinn.Network.create(pinn.FourierFeatures(1, 48, scale=4.0, trainable=False), hidden=[])
    fit = pinn.train(problem, network, points=300, optimizer="lm", iterations=40)
    assert _relative(fit.field(x), theirs) < 1e-5


def test_finite_elements_on_a_square_of_two_media():
    """A source, k falling smoothly from 9 to 5, fixed on three sides and impedance on the fourth; P2 elements."""
    fem = pytest.importorskip("skfem", reason="this peer needs scikit-fem")
    from skfem.helpers import dot, grad

    def k(x, y):
        return 7.0 - 2.0 * np.tanh(4 * (x - 0.5)) + 0 * y

    def f(x, y):
        return 40.0 * np.exp(-20 * ((x - 0.3) ** 2 + (y - 0.6) ** 2))

    mesh = fem.MeshTri.init_tensor(np.linspace(0, 1, 33), np.linspace(0, 1, 33))
    basis = fem.Basis(mesh, fem.ElementTriP2())
    side = fem.FacetBasis(
        mesh, fem.ElementTriP2(), facets=mesh.facets_satisfying(lambda x: np.isclose(x[0], 1.0))
    )
    stiffness = fem.BilinearForm(lambda u, v, w: dot(grad(u), grad(v)) - k(*w.x) ** 2 * u * v).assemble(basis)
    edge = fem.BilinearForm(lambda u, v, w: k(*w.x) * u * v).assemble(side)
    load = fem.LinearForm(lambda v, w: -f(*w.x) * v).assemble(basis).astype(complex)
    held = basis.get_dofs(lambda x: np.isclose(x[0], 0.0) | np.isclose(x[1], 0.0) | np.isclose(x[1], 1.0))
    theirs = fem.solve(*fem.condense(stiffness.astype(complex) - 1j * edge, load, D=held))

    problem = pinn.Helmholtz(
        pinn.Box((0, 0), (1, 1)),
        lambda x: k(x[:, 0], x[:, 1]),
        lambda x: f(x[:, 0], x[:, 1]),
        [pinn.Dirichlet(0.0, where=("left", "bottom", "top"), hard=True), pinn.Sommerfeld(where="right")],
    )
    network = pinn.Network.create(pinn.FourierFeatures(2, 250, scale=2.5, trainable=False), hidden=[])
    fit = pinn.train(problem, network, points=1200, optimizer="lm", iterations=20)
    assert _relative(fit.field(basis.doflocs.T), theirs) < 1e-3
