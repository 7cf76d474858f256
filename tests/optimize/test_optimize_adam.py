"""Adam against its paper written out, and the schedules at the places where they turn."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest

from scanfield.errors import ArgumentError, BackendError, DtypeError, ShapeError, StateError
from scanfield.optimize import Adam, Constant, Cosine, Exponential


def _adam_written_out(values, gradients, *, rate, beta1=0.9, beta2=0.999, epsilon=1e-8, decay=0.0):
    """Algorithm 1 of arXiv 1412.6980 in Python floats, one parameter."""
    m = v = 0.0
    theta = values
    for t, g in enumerate(gradients, start=1):
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        theta = theta - rate * (
            (m / (1 - beta1**t)) / (math.sqrt(v / (1 - beta2**t)) + epsilon) + decay * theta
        )
    return theta


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adam_follows_the_paper(decay):
    gradients = [0.3, -2.0, 0.0, 1e-3]
    adam = Adam(learning_rate=0.01, weight_decay=decay)
    params = {"x": np.asarray([1.5])}
    state = adam.init(params)
    for gradient in gradients:
        params, state = adam.update(params, {"x": np.asarray([gradient])}, state)
    assert state.step == 4
    assert params["x"][0] == pytest.approx(
        _adam_written_out(1.5, gradients, rate=0.01, decay=decay), rel=1e-14
    )


def test_adam_runs_on_every_library(library, dtype):
    start, slope = np.asarray([[1.0, -2.0, 0.5]]), np.asarray([[0.25, -4.0, 1e-3]])
    params = library.arrays({"w": start, "s": 2.0}, dtype)
    gradients = library.arrays({"w": slope, "s": 1.0}, dtype)
    adam = Adam(learning_rate=0.1)
    state = adam.init(params)
    for _ in range(3):
        params, state = adam.update(params, gradients, state)
    for name, shape in (("w", (1, 3)), ("s", ())):
        assert library.is_array(params[name])
        assert library.on_device(params[name])
        assert params[name].shape == shape
        assert library.dtype(params[name]) == dtype
    for j in range(3):
        expected = _adam_written_out(start[0, j], [slope[0, j]] * 3, rate=0.1)
        assert library.numpy(params["w"])[0, j] == pytest.approx(expected, rel=1e-5)
    assert float(library.numpy(params["s"])) == pytest.approx(1.7, rel=1e-5)


def test_nothing_is_written_in_place():
    params, gradients = {"w": np.ones((2, 3))}, {"w": np.full((2, 3), 0.5)}
    for array in (*params.values(), *gradients.values()):
        array.flags.writeable = False
    adam = Adam(learning_rate=0.1)
    state = adam.init(params)
    before = pickle.dumps((params, gradients, state))
    moved, _ = adam.update(params, gradients, state)
    assert pickle.dumps((params, gradients, state)) == before
    assert not np.shares_memory(moved["w"], params["w"])


def test_half_precision_keeps_float32_moments():
    """A second moment of 1e-10 is zero in float16, and the step would be divided by epsilon alone."""
    adam = Adam(learning_rate=0.01)
    params = {"w": np.zeros(3, dtype=np.float16)}
    state = adam.init(params)
    params, state = adam.update(params, {"w": np.full(3, 1e-5, dtype=np.float16)}, state)
    assert state.first["w"].dtype == np.float32
    assert state.second["w"].dtype == np.float32
    assert params["w"].dtype == np.float16
    np.testing.assert_allclose(params["w"], -0.01, rtol=2e-3)


def test_complex_parameters_turn_with_the_plane():
    turn = np.exp(0.7j)
    ends = []
    for factor in (1.0, turn):
        adam = Adam(learning_rate=0.1)
        params = {"a": np.asarray([1.0 + 2.0j]) * factor}
        state = adam.init(params)
        for _ in range(5):
            params, state = adam.update(params, {"a": 2 * params["a"]}, state)
        assert state.second["a"].dtype == np.float64
        ends.append(params["a"])
    np.testing.assert_allclose(ends[1], ends[0] * turn, rtol=1e-12)


def test_a_schedule_sees_the_updates_made():
    seen = []

    def schedule(step):
        seen.append(step)
        return 0.1

    adam = Adam(learning_rate=schedule)
    params = {"w": np.zeros(1)}
    state = adam.init(params)
    for _ in range(3):
        params, state = adam.update(params, {"w": np.ones(1)}, state)
    assert seen == [0, 1, 2]


def test_cosine_warms_up_turns_and_stays():
    rate = Cosine(peak=2.0, steps=100, warmup=10, final=0.5)
    assert rate(0) == pytest.approx(0.2)
    assert rate(9) == rate(10) == 2.0
    assert rate(55) == pytest.approx(1.25)
    assert rate(100) == rate(10_000) == 0.5
    assert all(rate(step) >= rate(step + 1) for step in range(10, 120))
    assert Cosine(peak=1.0, steps=5, warmup=5)(5) == 0.0


def test_a_constant_is_itself_at_every_step():
    assert [Constant(0.25)(step) for step in (0, 1, 10_000)] == [0.25] * 3


def test_schedules_are_values():
    for schedule in (Constant(0.1), Cosine(0.1, 10, 2), Exponential(0.1, 0.5, 10)):
        assert pickle.loads(pickle.dumps(schedule)) == schedule
    assert Exponential(1.0, 0.25, every=2)(1) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Adam(learning_rate=0.0), "learning_rate"),
        (lambda: Adam(learning_rate=0.1, beta1=1.0), "beta1"),
        (lambda: Adam(learning_rate=0.1, epsilon=0.0), "epsilon"),
        (lambda: Adam(learning_rate=0.1, weight_decay=-1.0), "weight_decay = -1"),
        (lambda: Adam(learning_rate=0.1, weight_decay=math.nan), "weight_decay = nan"),
        (lambda: Cosine(peak=1.0, steps=0), "steps"),
        (lambda: Cosine(peak=1.0, steps=3, warmup=4), "warmup"),
        (lambda: Cosine(peak=1.0, steps=3, final=-1.0), "final = -1"),
        (lambda: Cosine(peak=1.0, steps=3, final=math.nan), "final = nan"),
        (lambda: Exponential(initial=1.0, factor=0.0), "factor"),
        (lambda: Exponential(initial=1.0, factor=0.5, every=0), "every"),
        (lambda: Constant(math.nan), "value"),
        (lambda: Adam(learning_rate=0.1).init([np.zeros(3)]), "params"),
    ],
)
def test_settings_out_of_range_are_named(make, named):
    with pytest.raises(ArgumentError, match=named):
        make()


def test_gradients_that_do_not_fit_are_named():
    adam = Adam(learning_rate=0.1)
    params = {"w": np.zeros((2, 3))}
    state = adam.init(params)
    with pytest.raises(ArgumentError, match=r"no gradient for \['w'\], no parameter for \['v'\]"):
        adam.update(params, {"v": np.zeros((2, 3))}, state)
    with pytest.raises(ShapeError, match=r"gradients\['w'\] has shape \(3,\)"):
        adam.update(params, {"w": np.zeros(3)}, state)
    with pytest.raises(DtypeError, match="real part"):
        adam.update(params, {"w": np.zeros((2, 3), dtype=complex)}, state)
    with pytest.raises(BackendError, match=r"gradients\['w'\]"):
        adam.update(params, {"w": 0.0}, state)
    with pytest.raises(DtypeError, match=r"params\['w'\]"):
        adam.init({"w": np.zeros(3, dtype=np.int64)})


def test_a_foreign_state_is_refused():
    adam = Adam(learning_rate=0.1)
    other = adam.init({"w": np.zeros(4)})
    gradients = {"w": np.zeros(3)}
    with pytest.raises(StateError, match="shape"):
        adam.update({"w": np.zeros(3)}, gradients, other)
    with pytest.raises(StateError, match=r"\['v'\]"):
        adam.update({"v": np.zeros(3)}, {"v": np.zeros(3)}, other)
