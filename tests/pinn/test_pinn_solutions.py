"""Every exact solution solves its equation, and its gradient is its own."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle

import numpy as np
import pytest

from scanfield.errors import ArgumentError, ShapeError
from scanfield.pinn import solutions

K = 12.0
CASES = {
    "wave 1": (solutions.plane_wave(K), 1e-9),
    "wave 2": (solutions.plane_wave(K, (np.cos(0.7), np.sin(0.7))), 1e-9),
    "wave 3": (solutions.plane_wave(K, (1.0, 2.0, 2.0)), 1e-9),
    "wave with loss": (solutions.plane_wave(K + 0.5j, (3.0, 4.0)), 1e-9),
    "source 1": (solutions.green(K, (-0.3,)), 1e-9),
    "source 2": (solutions.green(K, (0.0, 0.0)), 1e-8),
    "source 3": (solutions.green(K, (0.0, 0.0, 0.0)), 1e-8),
    "mode 0": (solutions.cylindrical_mode(K), 1e-9),
    "mode 3": (solutions.cylindrical_mode(K, 3), 1e-9),
    "sines": (solutions.manufactured(3.0, (1.0, 4.0)), 1e-9),
    "sines, odd": (solutions.manufactured(3.0, (2.5, 3.3)), 1e-9),
    "cosines": (solutions.manufactured(3.0, (1.0, 2.0, 0.0), "cos"), 1e-9),
    "Airy": (solutions.airy(100.0, 150.0), 1e-9),
    "two media": (solutions.two_media(10.0, 20.0, 0.05), 1e-9),
    "hard disk": (solutions.hard_disk(K, 0.2), 1e-8),
    "hard disk, total": (solutions.hard_disk(K, 0.2, total=True), 1e-8),
}
# Eighth-order central differences.
_SECOND = np.asarray([-1 / 560, 8 / 315, -1 / 5, 8 / 5, -205 / 72, 8 / 5, -1 / 5, 8 / 315, -1 / 560])
_FIRST = np.asarray([1 / 280, -4 / 105, 1 / 5, -4 / 5, 0, 4 / 5, -1 / 5, 4 / 105, -1 / 280])
H = 0.004


def _along(field, x, axis, weights):
    steps = H * np.arange(-4, 5)[:, None, None] * np.eye(x.shape[1])[axis]
    values = field((x + steps).reshape(-1, x.shape[1])).reshape(9, -1)
    return np.tensordot(weights, values, axes=1)


@pytest.mark.parametrize("name", CASES)
def test_solves_its_equation(name):
    solution, bound = CASES[name]
    x = 0.3 + 0.6 * np.random.default_rng(0).random((60, solution.dimensions))
    k = solution.wavenumber(x) if callable(solution.wavenumber) else solution.wavenumber
    u = solution(x)
    laplacian = sum(_along(solution, x, axis, _SECOND) for axis in range(solution.dimensions)) / H**2
    residual = laplacian + k**2 * u - solution.source(x)
    assert np.max(np.abs(residual)) < bound * 30 * np.max(np.abs(k**2 * u) + np.abs(laplacian))
    gradient = solution.gradient(x)
    for axis in range(solution.dimensions):
        slope = _along(solution, x, axis, _FIRST) / H
        assert np.max(np.abs(slope - gradient[:, axis])) < bound * np.max(
            np.abs(gradient) + np.abs(k * u)[:, None]
        )
    np.testing.assert_allclose(
        solution.impedance(x, np.tile(np.eye(solution.dimensions)[0], (60, 1))), gradient[:, 0] - 1j * k * u
    )


def test_a_point_source_is_a_delta():
    """The jump of the slope in one dimension; the flux through a small circle or sphere around the source."""
    line = solutions.green(K, (0.5,))
    slopes = line.gradient(np.asarray([[0.5 + 1e-9], [0.5 - 1e-9]]))[:, 0]
    assert slopes[0] - slopes[1] == pytest.approx(-1.0, abs=1e-7)
    for d, size in ((2, 2 * np.pi), (3, 4 * np.pi)):
        r = 1e-5
        near = solutions.green(K, (0.0,) * d).gradient(r * np.eye(d)[:1])[0, 0]
        assert near * size * r ** (d - 1) == pytest.approx(-1.0, abs=1e-4)


def test_two_media_are_continuous_with_the_known_amplitudes():
    solution = solutions.two_media(10.0, 20.0, 0.5)
    x = np.asarray([[0.5 - 1e-12], [0.5]])
    assert abs(np.diff(solution(x))[0]) < 1e-10 and abs(np.diff(solution.gradient(x)[:, 0])[0]) < 1e-8
    assert solution(x)[1] == pytest.approx(2 / 3)
    assert solution.wavenumber(x).tolist() == [10.0, 20.0]  # the interface belongs to the right
    left = np.asarray([[0.1]])
    assert solution(left)[0] == pytest.approx(np.exp(-4j) - np.exp(4j) / 3)


@pytest.mark.parametrize("k", [2.0, 40.0])
def test_the_hard_disk_is_hard(k):
    angle = np.linspace(0, 2 * np.pi, 50)
    normal = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    solution = solutions.hard_disk(k, 0.7, (0.1, -0.2), total=True)
    assert np.max(np.abs(solution.normal(np.asarray([0.1, -0.2]) + 0.7 * normal, normal))) < 1e-9 * k


def test_more_orders_than_floats_hold_change_nothing():
    """Hankel functions of high order are infinite, their terms were NaN."""
    x = np.asarray([[0.5, 0.0], [0.0, -0.9], [2.0, 2.0]])
    few, many = solutions.hard_disk(6.0, 0.5), solutions.hard_disk(6.0, 0.5, orders=2000)
    np.testing.assert_allclose(many(x), few(x), rtol=1e-12)
    np.testing.assert_allclose(many.gradient(x), few.gradient(x), rtol=1e-11)


def test_they_come_back_from_another_process():
    """Their functions too, which were made in a function; so does a fit with them, below."""
    x = np.asarray([[0.1], [0.7]])
    exact = pickle.loads(pickle.dumps(solutions.two_media(10.0, right=20.0, interface=0.5)))
    own = solutions.two_media(10.0, 20.0, 0.5)
    for name in ("value", "wavenumber", "source", "gradient"):
        copied = pickle.loads(pickle.dumps(getattr(own, name)))
        np.testing.assert_array_equal(copied(x), getattr(own, name)(x))
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(own.impedance))(x, x), own.impedance(x, x))
    np.testing.assert_array_equal(copy.deepcopy(exact)(x), own(x))
    assert str(inspect.signature(solutions.green)).startswith("(wavenumber: ")


def test_bad_input_is_named():
    for call, words in (
        (lambda: solutions.plane_wave(1.0, (0.0, 0.0)), "direction"),
        (lambda: solutions.plane_wave(1.0, (1.0,) * 4), "direction"),
        (lambda: solutions.plane_wave(1.0, ((1.0, 0.0),)), "direction"),
        (lambda: solutions.green(1.0, ()), "source"),
        (lambda: solutions.green(-1.0, (0.0,)), "wavenumber = -1.0"),
        (lambda: solutions.manufactured(1.0, (1.0,), "tan"), "kind = 'tan'"),
        (lambda: solutions.airy(1.0, 0.0), "slope"),
        (lambda: solutions.two_media(1.0, -1.0), "right"),
        (lambda: solutions.hard_disk(1.0, 0.0), "radius"),
    ):
        with pytest.raises(ArgumentError, match=words):
            call()
    with pytest.raises(ShapeError, match=r"\(n, 1\)"):
        solutions.plane_wave(1.0)(np.zeros((3, 2)))


def test_a_solution_that_was_changed_is_pickled_as_it_is():
    wave = solutions.plane_wave(2.0)
    own = dataclasses.replace(wave, name="mine", value=np.cos)
    again = pickle.loads(pickle.dumps(own))
    assert (again.name, again.value) == ("mine", np.cos)
    x = np.array([[0.25]])
    np.testing.assert_array_equal(again.gradient(x), wave.gradient(x))
    assert copy.copy(wave) == copy.deepcopy(wave) == wave and len({wave, copy.copy(wave), own}) == 2
    assert dataclasses.asdict(wave)["value"](x) == wave(x)
