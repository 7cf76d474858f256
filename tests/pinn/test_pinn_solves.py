"""Small solves of every kind: three dimensions, media, layers, periods, disks, given points; each against its exact field."""

from __future__ import annotations

import json

import numpy as np
import pytest
from processes import python

from scanfield import pinn

TURN = 2 * np.pi


def waves(dimensions, count, **where):
    """A network without hidden layers: a sum of waves."""
    return pinn.Network.create(pinn.FourierFeatures(dimensions, count, trainable=False, **where), hidden=[])


def _case(name):
    """A problem, its exact field, a network and the settings."""
    if name == "three dimensions":
        exact = pinn.solutions.plane_wave(5.0, (1.0, 2.0, 2.0))
        problem = pinn.Helmholtz(pinn.Box((0, 0, 0), (1, 1, 1)), 5.0, 0.0, pinn.Impedance(exact.impedance))
        return problem, exact, waves(3, 150, wavenumber=5.0), {"points": 350, "boundary": 240}, 1e-4
    if name == "Airy":
        exact = pinn.solutions.airy(100.0, 150.0)
        problem = pinn.Helmholtz(pinn.Interval(0, 1), exact.wavenumber, 0.0, pinn.Impedance(exact.impedance))
        return problem, exact, waves(1, 40, scale=16 / TURN), {"points": 150}, 1e-5
    if name == "loss":
        exact = pinn.solutions.plane_wave(8.0 + 0.5j, (3.0, 4.0))
        problem = pinn.Helmholtz(pinn.Box((0, 0), (1, 1)), 8.0 + 0.5j, 0.0, pinn.Dirichlet(exact, hard=True))
        return problem, exact, waves(2, 120, scale=10 / TURN), {"points": 500}, 1e-4
    if name == "disk":
        exact = pinn.solutions.cylindrical_mode(7.0, 2)
        problem = pinn.Helmholtz(pinn.Disk((0, 0), 1.0), 7.0, 0.0, pinn.Dirichlet(exact))
        return problem, exact, waves(2, 60, wavenumber=7.0), {"points": 400, "boundary": 80}, 1e-5
    if name == "period":
        # exp(i (2 pi x + q y)) repeats along x, is open at the top and given at the bottom.
        q = np.sqrt(9.0**2 - TURN**2)
        direction = (TURN / 9.0, q / 9.0)
        exact = pinn.solutions.plane_wave(9.0, direction)
        conditions = [
            pinn.Periodic(axis=0),
            pinn.Dirichlet(exact, where="bottom"),
            pinn.Robin(-1j * q, 0.0, where="top"),
        ]
        problem = pinn.Helmholtz(pinn.Box((0, 0), (1, 1)), 9.0, 0.0, conditions)
        return problem, exact, waves(2, 60, wavenumber=9.0), {"points": 400}, 1e-5
    if name == "layer":
        exact = pinn.solutions.plane_wave(10.0)
        conditions = [pinn.Dirichlet(1.0, where="left"), pinn.PML(0.6, where="right", reflection=1e-5)]
        problem = pinn.Helmholtz(pinn.Interval(0, 1.6), 10.0, 0.0, conditions)
        return problem, exact, waves(1, 60, scale=20 / TURN), {"points": 400}, 2e-3
    if name == "given points":
        exact = pinn.solutions.green(6.0, (-0.5, 0.3))
        box = pinn.Box((0, 0), (1, 1))
        sides = {part: box.surface(part, np.linspace(0.02, 0.98, 15)[:, None]) for part in box.parts}
        domain = pinn.PointSet(box.interior(300, seed=1), sides, volume=1.0)
        problem = pinn.Helmholtz(domain, 6.0, 0.0, pinn.Impedance(exact.impedance))
        return problem, exact, waves(2, 60, wavenumber=6.0), {}, 1e-3
    # A round inclusion: a cylindrical wave outside and inside, matched on the rim.
    from scipy.special import jv, jvp, yv, yvp

    k1, k2, a = 4.0, 7.0, 0.6
    # u = A J0(k1 r) + B Y0(k1 r) outside, J0(k2 r) inside.
    matrix = [[jv(0, k1 * a), yv(0, k1 * a)], [k1 * jvp(0, k1 * a), k1 * yvp(0, k1 * a)]]
    outer = np.linalg.solve(matrix, [jv(0, k2 * a), k2 * jvp(0, k2 * a)])

    def field(x):
        r = np.maximum(np.linalg.norm(x, axis=1), 1e-9)
        return np.where(r < a, jv(0, k2 * r), outer[0] * jv(0, k1 * r) + outer[1] * yv(0, k1 * r))

    region = pinn.Disk((0, 0), a)
    problem = pinn.Helmholtz(
        pinn.Box((-1, -1), (1, 1)),
        lambda x: np.where(np.linalg.norm(x, axis=1) < a, k2, k1),
        0.0,
        [pinn.Dirichlet(field), pinn.Interface(region)],
        complex_field=True,
    )
    return problem, field, waves(2, 180, scale=7 / TURN), {"points": 700, "boundary": 200}, 2e-3


@pytest.mark.parametrize(
    "name",
    ["three dimensions", "Airy", "loss", "disk", "period", "layer", "given points", "inclusion"],
)
def test_solves(name):
    problem, exact, network, settings, bound = _case(name)
    fit = pinn.train(problem, network, optimizer="lm", iterations=25, progress=False, **settings)
    assert fit.error(exact) < bound


def test_the_package_is_light():
    """Importing it brings in no framework, no SciPy, no file format."""
    heavy = ["torch", "jax", "cupy", "dask", "numba", "scipy", "safetensors", "rich", "matplotlib"]
    found = python(
        f"import sys, json, scanfield.pinn; print(json.dumps([m for m in {heavy!r} if m in sys.modules]))"
    )
    assert json.loads(found.splitlines()[-1]) == []
