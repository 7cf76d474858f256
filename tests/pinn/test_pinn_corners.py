"""Corners that no training comes by: Laplace's equation, points for a domain, the optimisers' choice, a slim drawing."""

from __future__ import annotations

import dataclasses
import sys

import numpy as np
import pytest

from scanfield import pinn
from scanfield.errors import ArgumentError, ShapeError
from scanfield.pinn import stages
from scanfield.pinn.diagnose import LM_LIMIT
from scanfield.pinn.fit import evaluation_grid
from scanfield.pinn.loss import unknown_pairs

LINE = pinn.Interval(0, 2)


def network(features: int = 4, dtype: str = "float64", **more) -> pinn.Network:
    return pinn.Network.create(
        pinn.FourierFeatures(1, features, scale=1.0), hidden=[], outputs=1, dtype=dtype, **more
    )


def test_laplace_has_a_scale_of_its_own():
    """Without a wavenumber and a source the equation is weighed by the size of the field over the length squared."""
    problem = pinn.Helmholtz(LINE, 0.0, boundary=pinn.Dirichlet(3.0))
    assert problem.field_scale == 3.0 and problem.equation_scale == 3.0 / 4.0


def test_points_for_a_domain():
    points = pinn.PointSet([[0.0], [0.5], [2.0]], {"end": ([[2.0], [0.0]], [[1.0], [-1.0]])})
    inside = points.contains(np.asarray([[-0.1], [0.0], [1.0], [2.0], [2.1]]))
    assert inside.tolist() == [False, True, True, True, False]
    assert points.measure("end") == 2.0
    assert evaluation_grid(pinn.Helmholtz(points, 1.0)).tolist() == [[0.0], [0.5], [2.0]]


def test_a_thin_ring_is_drawn_until_there_are_enough():
    """Of the first draw too few points lie between two circles that nearly meet."""
    ring = pinn.Difference(pinn.Disk((0, 0), 1.0), pinn.Disk((0, 0), 0.99))
    for count in (1, 7, 50):
        x = ring.interior(count, "uniform", seed=1)
        assert x.shape == (count, 2) and np.all(np.hypot(*x.T) >= 0.99)


def test_auto_chooses_by_digits_and_size():
    def kinds(net: pinn.Network) -> list[str]:
        return [type(stage.optimizer).__name__ for stage in stages.resolve("auto", 5, net)]

    assert kinds(network()) == ["LevenbergMarquardt"]
    assert kinds(network(dtype="float32")) == ["Adam"]
    large = network(features=LM_LIMIT)
    assert large.size > LM_LIMIT and kinds(large) == ["Adam", "LBFGS"]
    with pytest.raises(ArgumentError, match="optimizer is a int"):
        stages.resolve(3, 5, network())


def test_an_unknown_may_be_an_array():
    (real, imaginary), (plain, nothing) = unknown_pairs(
        network(dtype="float32"), {"a": np.asarray(1.5 + 2j), "b": np.asarray(3.0)}
    ).values()
    assert (real, imaginary, plain, nothing) == (1.5, 2.0, 3.0, None)
    assert real.dtype == imaginary.dtype == plain.dtype == np.float32
    with pytest.raises(ShapeError, match=r"a: shape \(1,\) of numpy; expected a number or a 0-d array"):
        unknown_pairs(network(), {"a": np.ones(1)})


def test_gradients_are_checked_in_float64_and_told():
    low = network(dtype="float32")
    with pytest.raises(ArgumentError, match="network: in float32"):
        pinn.check_gradients(low, [pinn.Term("one", [pinn.Piece(np.ones((3, 1), "float32"), value=1.0)])])
    found = pinn.GradientCheck({"W0": 1e-9, "frequencies": 2e-8}, 1e-5)
    assert str(found).splitlines()[1:] == ["W0           1.0e-09", "frequencies  2.0e-08"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.step = 1e-3


def test_a_process_without_stderr_trains(monkeypatch):
    """As pythonw on Windows: there is no terminal to draw on."""
    monkeypatch.setattr(sys, "stderr", None)
    problem = pinn.Helmholtz(LINE, 1.0, boundary=pinn.Dirichlet(1.0))
    assert pinn.train(problem, network(), points=8, iterations=1, held_out=4).iterations == 1


def test_a_column_of_values_is_a_row_of_numbers():
    problem = pinn.Helmholtz(LINE, 1.0, data=pinn.Data([[0.5], [1.0]], [[1.0], [2.0]]))
    assert problem.data[0].values.tolist() == [1.0, 2.0]
    with pytest.raises(ShapeError, match=r"has shape \(2, 2\): \(\) or \(2,\), one number a point"):
        pinn.Helmholtz(LINE, 1.0, data=pinn.Data([[0.5], [1.0]], [[1.0, 3.0], [2.0, 4.0]]))


def test_unknown_parameters_are_named():
    with pytest.raises(ArgumentError, match="parameters: no 'W9'; there are"):
        network().replace({"W9": np.ones(1)})
