"""Domains: volumes, boundaries, normals, and distance functions with their derivatives."""

from __future__ import annotations

import numpy as np
import pytest

from scanfield.errors import ArgumentError, DtypeError, ShapeError
from scanfield.pinn.compound import Difference, PointSet
from scanfield.pinn.domains import Ball, Box, Disk, Interval
from scanfield.pinn.sampling import unit_points

DOMAINS = {
    "interval": Interval(-1.0, 2.0),
    "box": Box((0.0, -1.0), (2.0, 0.5)),
    "cube": Box((0, 0, 0), (1, 2, 3)),
    "disk": Disk((1.0, -1.0), 0.7),
    "ball": Ball((0.0, 1.0, 0.0), 2.0),
    "plate": Difference(Box((-1, -1), (1, 1)), Disk((0.2, 0.0), 0.5)),
    "frame": Difference(Box((-1, -1), (1, 1)), Box((-0.5, -0.25), (0.5, 0.25))),
}


@pytest.mark.parametrize("name", DOMAINS)
def test_volume_and_boundary_fit_together(name):
    """div x = d: the flux of x through the boundary is d times the volume (Gauss)."""
    domain = DOMAINS[name]
    flux = 0.0
    for part in domain.parts:
        unit = unit_points(4096, domain.dimensions - 1, "sobol", seed=0)
        x, n = domain.surface(part, unit)
        np.testing.assert_allclose(np.linalg.norm(n, axis=1), 1.0, atol=1e-12)
        flux += domain.measure(part) * float(np.mean(np.sum(x * n, axis=1)))
        inward, outward = domain.contains(x - 1e-6 * n), domain.contains(x + 1e-6 * n)
        assert np.mean(inward) > 0.99 and np.mean(outward) < 0.01  # corners and rounding aside
    assert flux == pytest.approx(domain.dimensions * domain.volume, rel=2e-3)


@pytest.mark.parametrize("rule", ["sobol", "latin", "uniform", "grid"])
@pytest.mark.parametrize("name", DOMAINS)
def test_interior_points_lie_inside(name, rule):
    domain = DOMAINS[name]
    x = domain.interior(300, rule, seed=3)
    assert np.all(domain.contains(x)) and x.shape[1] == domain.dimensions
    if rule == "grid":
        assert 200 <= x.shape[0] <= 520
    else:
        assert x.shape[0] == 300
        np.testing.assert_array_equal(x, domain.interior(300, rule, seed=3))
        np.testing.assert_array_equal(domain.interior(9, rule), domain.interior(9, rule, seed=0))


@pytest.mark.parametrize("name", [name for name in DOMAINS if name != "frame"])
def test_the_distance_vanishes_on_the_boundary_alone(name):
    domain = DOMAINS[name]
    x = domain.interior(200, "sobol", seed=0)
    assert np.min(np.abs(domain.distance(x).value)) > 0
    assert len(set(np.sign(domain.distance(x).value))) == 1
    for part in domain.parts:
        on = domain.surface(part, unit_points(32, domain.dimensions - 1, "sobol", seed=1)).points
        np.testing.assert_allclose(domain.distance(on).value, 0.0, atol=1e-12)
        np.testing.assert_allclose(domain.distance(on, [part]).value, 0.0, atol=1e-12)
        others = [p for p in domain.parts if p != part and not part.startswith("hole")]
        assert not others or np.max(np.abs(domain.distance(on, others).value)) > 1e-3


@pytest.mark.parametrize("name", [name for name in DOMAINS if name != "frame"])
def test_the_distances_derivatives_are_those_of_its_values(name):
    domain, step = DOMAINS[name], 1e-4
    x = domain.interior(50, "sobol", seed=0)
    there = domain.distance(x)
    for axis in range(domain.dimensions):
        e = step * np.eye(domain.dimensions)[axis]
        up, down = domain.distance(x + e), domain.distance(x - e)
        np.testing.assert_allclose((up.value - down.value) / (2 * step), there.first[:, axis], atol=1e-5)
        np.testing.assert_allclose(
            (up.first - down.first)[:, axis] / (2 * step), there.second[:, axis], atol=1e-5
        )


def test_given_points_are_taken_as_they_are():
    points = PointSet(
        [[0.1, 0.2], [0.5, 0.5], [0.7, 0.1]], {"rim": ([[0.0, 0.0], [1.0, 0.0]], [[0.0, -2.0], [3.0, 0.0]])}
    )
    assert points.given and points.parts == ("rim",) and points.volume == 0.5
    np.testing.assert_array_equal(points.interior(99), [[0.1, 0.2], [0.5, 0.5], [0.7, 0.1]])
    np.testing.assert_array_equal(points.surface("rim", np.zeros((5, 1))).normals, [[0.0, -1.0], [1.0, 0.0]])
    with pytest.raises(ArgumentError, match="hard"):
        points.distance(points.interior(1))


def test_bad_input_is_named():
    for call, error, words in (
        (lambda: Box((0, 0), (1,)), ShapeError, "lower has 2"),
        (lambda: Box((0,) * 4, (1,) * 4), ShapeError, "lower has 4"),
        (lambda: Interval(1.0, 1.0), ArgumentError, "lower lies below"),
        (lambda: Interval(0.0, float("inf")), ArgumentError, "upper = "),
        (lambda: Disk(0, 1.0), ShapeError, "center = 0: a number for each axis"),
        (lambda: Box(0, (1, 1)), ShapeError, "lower = 0: a number for each axis"),
        (lambda: Box((0, 0), ("a", 1)), DtypeError, "upper: came .*'a', 1.*real numbers are expected"),
        (lambda: Disk((0, 0), -1.0), ArgumentError, "radius = -1.0"),
        (lambda: Disk((0,), 1.0), ShapeError, "center has 1 numbers: a disk has two"),
        (lambda: Disk((0, 0, 0), 1.0), ShapeError, "center has 3"),
        (lambda: Difference(Box((0, 0), (1, 1)), Disk((0.9, 0.5), 0.3)), ArgumentError, "wholly inside"),
        (lambda: Difference(Box((0, 0), (1, 1)), Interval(0.2, 0.3)), ShapeError, "2 dimensions"),
        (lambda: DOMAINS["box"].surface("rim", np.zeros((1, 1))), ArgumentError, "'left', 'right'"),
        (lambda: DOMAINS["frame"].distance(np.zeros((1, 2))), ArgumentError, "hard"),
        (lambda: PointSet([0.1, 0.2]), ShapeError, "interior"),
        (lambda: PointSet([[0.1]], {"a": ([[0.0]], [[0.0]])}), ArgumentError, "length 0"),
        (lambda: PointSet([[float("nan")]]), ArgumentError, "interior"),
    ):
        with pytest.raises(error, match=words):
            call()
