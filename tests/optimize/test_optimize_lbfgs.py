"""L-BFGS: its end and why it came, SciPy's on the same functions, and losses that misbehave."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from scanfield.errors import ArgumentError, ShapeError, StateError
from scanfield.optimize import LBFGS, minimise
from scanfield.optimize.line_search import Trial, strong_wolfe


def _quadratic(size=12, seed=0, condition=1e3):
    """A (size, size) positive matrix of this condition, and a right-hand side."""
    rng = np.random.default_rng(seed)
    basis, _ = np.linalg.qr(rng.normal(size=(size, size)))
    return (basis * np.geomspace(1.0, condition, size)) @ basis.T, rng.normal(size=size)


def _valley(xp):
    """Rosenbrock's valley in ten dimensions."""

    def function(x):
        a, b = x[1:] - x[:-1] ** 2, 1 - x[:-1]
        zero = 0 * x[:1]
        left = xp.concat([-400 * a * x[:-1] - 2 * b, zero])
        return xp.sum(100 * a**2 + b**2), left + xp.concat([zero, 200 * a])

    return function


def leave_out(backend, test, parameters):
    """On Dask each iteration makes the graph of all before it longer: two minutes, and nobody's use of it."""
    return "every_library" in test and backend == "dask"


def test_reaches_the_minimum_on_every_library(library, dtype):
    matrix, right = _quadratic(condition=50.0)
    a, b = library.array(matrix, dtype), library.array(right, dtype)

    def function(x):
        ax = library.xp.sum(a * x, axis=1)
        return library.xp.sum(x * (ax / 2 - b)), ax - b

    tolerance = 1e-9 if dtype == "float64" else 2e-5
    found = minimise(
        function, library.array(np.zeros(12), dtype), optimizer=LBFGS(tolerance=tolerance), iterations=200
    )
    assert found.reason in ("gradient", "line search")  # float32 may run out of digits first
    assert library.dtype(found.x) == dtype and library.on_device(found.x)
    exact = np.linalg.solve(matrix, right)
    assert np.max(np.abs(library.numpy(found.x) - exact)) < (1e-8 if dtype == "float64" else 2e-4)


def test_is_no_worse_than_scipys():
    from scipy.optimize import minimize

    function = _valley(np)
    start = np.full(10, -0.7)
    ours = minimise(function, start, optimizer=LBFGS(history=10, tolerance=1e-8), iterations=500)
    theirs = minimize(
        function, start, jac=True, method="L-BFGS-B", options={"maxcor": 10, "gtol": 1e-8, "ftol": 0}
    )
    assert ours.reason == "gradient"
    assert np.max(np.abs(ours.x - theirs.x)) < 1e-6 or ours.value <= theirs.fun
    assert ours.evaluations < 2 * theirs.nfev


def test_says_why_it_stopped():
    """Field report F096."""
    matrix, right = _quadratic()

    def function(x):
        return x @ (matrix @ x / 2 - right), matrix @ x - right

    zero = np.zeros(12)
    assert minimise(function, zero, iterations=3)[2:5:2] == (3, "iteration limit")
    end = minimise(function, zero, iterations=1000, optimizer=LBFGS(tolerance=1e-6))
    assert end.reason == "gradient" and 3 < end.iterations < 1000
    again = minimise(function, end.x, optimizer=LBFGS(tolerance=1e-6))
    assert again.reason == "gradient" and again.iterations == 0


def test_stops_at_what_is_not_finite_with_the_last_finite_vector():
    matrix, right = _quadratic()
    calls = 0

    def function(x):
        nonlocal calls
        calls += 1
        value = x @ (matrix @ x / 2 - right) if calls <= 5 else math.nan
        return value, matrix @ x - right

    found = minimise(function, np.zeros(12))
    assert found.reason == "not finite"
    assert np.all(np.isfinite(found.x)) and math.isfinite(found.value) and found.value <= 0
    assert minimise(lambda x: (math.inf, x), np.ones(2)).reason == "not finite"


def test_turns_back_from_an_overflow():
    """-log x + x: the first step along the gradient may leave x > 0, where the loss is not a number."""
    found = minimise(
        lambda x: (float(np.sum(x - np.log(x))) if np.all(x > 0) else math.nan, 1 - 1 / x),
        np.asarray([40.0, 1e-3]),
    )
    assert found.reason == "gradient"
    np.testing.assert_allclose(found.x, 1.0, atol=1e-7)


def test_accepted_losses_never_rise_in_float32():
    """A flat valley in float32: it ends by its gradient or by the search, and never above where it was."""
    optimizer = LBFGS(tolerance=0.0)
    function = _valley(np)
    x = np.full(10, -0.7, dtype=np.float32)
    state = optimizer.init(function, x)
    values = [state.value]
    for _ in range(400):
        x, state = optimizer.step(function, x, state)
        values.append(state.value)
        if state.stopped:
            break
    assert x.dtype == np.float32 and np.all(np.isfinite(x))
    assert all(later <= earlier for earlier, later in itertools.pairwise(values))
    assert state.stopped in ("line search", "gradient") and values[-1] < 1e-3 * values[0]


def test_a_run_in_two_parts_is_the_run_in_one():
    optimizer, function, x = LBFGS(), _valley(np), np.full(10, -0.7)
    state = optimizer.init(function, x)
    for _ in range(10):
        x, state = optimizer.step(function, x, state)
    half, kept = x.copy(), state._replace(steps=tuple(s.copy() for s in state.steps))
    for _ in range(10):
        x, state = optimizer.step(function, x, state)
        half, kept = optimizer.step(function, half, kept)
    np.testing.assert_array_equal(x, half)


def test_the_search_satisfies_both_conditions():
    """The function of More and Thuente with a long flat part, from steps too short and too long."""
    c1, c2 = 1e-3, 0.1

    def phi(t):
        return Trial(t, -t / (t**2 + 2), (t**2 - 2) / (t**2 + 2) ** 2, None)

    for first in (1e-3, 0.1, 10.0, 1e3):
        found, used, _ = strong_wolfe(phi, phi(0.0), first, c1=c1, c2=c2)
        assert found is not None and used < 25
        assert found.value <= c1 * found.step * -0.5 and abs(found.slope) <= c2 * 0.5


@pytest.mark.parametrize("value", [-3.0, -2.5], ids=["a line", "no minimum between"])
def test_a_cubic_without_a_minimum_gives_way_to_the_middle(value):
    """The search stands between 1 and 2, slopes falling at both: the cubic through them only falls."""
    trials = {0.0: (0.0, -4.0), 1.0: (-2.0, -1.0), 2.0: (value, -1.0), 1.5: (-2.75, 0.0)}
    found, used, _ = strong_wolfe(
        lambda t: Trial(t, *trials[t], None), Trial(0.0, 0.0, -4.0, None), 1.0, c1=0.4, c2=0.2
    )
    assert found is not None and found.step == 1.5 and used == 3


def test_an_interval_without_width_ends_the_search_at_its_lowest():
    """The loss falls evenly up to a cliff, so no trial is flat; halving goes on until the numbers meet."""
    start = Trial(0.0, 0.0, -1.0, None)
    found, used, finite = strong_wolfe(
        lambda t: Trial(t, -t if t < 0.3 else 10.0, -1.0, None), start, 0.2, evaluations=1000
    )
    assert found is not None and finite and used < 100
    assert found.step < 0.3 and found.step == pytest.approx(0.3, rel=1e-11)


def test_a_memory_that_leads_uphill_is_forgotten():
    def function(x):
        return float(x @ x), 2 * x

    optimizer, x = LBFGS(), np.asarray([1.0, -2.0])
    fresh = optimizer.init(function, x)
    misled = fresh._replace(steps=(np.asarray([1.0, 0.0]),), changes=(np.asarray([-1.0, 0.0]),))
    want, _ = optimizer.step(function, x, fresh)
    found, state = optimizer.step(function, x, misled)
    np.testing.assert_array_equal(found, want)
    assert len(state.steps) == 1 and not np.array_equal(state.steps[0], misled.steps[0])


def test_bad_input_is_named():
    with pytest.raises(ShapeError, match="x has shape"):
        minimise(lambda x: (0.0, x), np.ones((2, 2)))
    with pytest.raises(ShapeError, match="gradient has shape"):
        minimise(lambda x: (0.0, x[:1]), np.ones(2))
    for settings in ({"history": 0}, {"c1": 0.95}, {"tolerance": -1.0}, {"tolerance": math.nan}):
        with pytest.raises(ArgumentError, match=next(iter(settings))):
            LBFGS(**settings)
    optimizer = LBFGS()
    state = optimizer.init(lambda x: (x @ x, 2 * x), np.ones(2))
    with pytest.raises(StateError, match="other parameters"):
        optimizer.step(lambda x: (x @ x, 2 * x), np.ones(3), state)
