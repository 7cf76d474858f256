"""Training: it solves, it repeats itself, it stops for a reason that it states, and nothing is lost on the way."""

from __future__ import annotations

import copy
import itertools
import pickle
import warnings

import numpy as np
import pytest

from scanfield import optimize, pinn
from scanfield.errors import ArgumentError, ShapeError, StateError
from scanfield.pinn import checkpoint
from scanfield.pinn.objective import Objective
from scanfield.pinn.placing import to_host
from scanfield.pinn.sampling import RULES
from scanfield.pinn.stages import resolve
from scanfield.pinn.weights import annealed, ntk


def line(k=5.0, **settings):
    """exp(ikx) on the unit interval: a value on the left, an open end on the right."""
    return pinn.Helmholtz(
        pinn.Interval(0, 1),
        k,
        0.0,
        [pinn.Dirichlet(1.0, where="left"), pinn.Sommerfeld(where="right")],
        **settings,
    )


def net(seed=0, hidden=(8,), k=5.0, **where):
    features = pinn.FourierFeatures(1, 6, wavenumber=k, seed=seed)
    return pinn.Network.create(features, hidden=list(hidden), seed=seed, activation="sin", **where)


def test_every_optimiser_solves_on_every_library(library, xp, device):
    if library.name == "strict":
        runs = [([(optimize.Adam(3e-3), 20), ("lbfgs", 60)], 3e-2)]  # strict runs without linear algebra
    else:
        runs = [([("adam", 20), ("lbfgs", 60)], 3e-2), ([("lm", 30)], 1e-5)]
    exact = pinn.solutions.plane_wave(5.0)
    for optimizer, bound in runs:
        fit = pinn.train(line(), net(xp=xp, device=device), points=40, optimizer=optimizer, held_out=40)
        assert fit.error(exact) < bound
        assert all(library.is_array(value) for value in fit.network.parameters.values())
        assert fit.iterations == sum(count for _, count in optimizer) or fit.reason != "iteration limit"


def test_a_seed_repeats_a_run(library, xp, device):
    """Bit for bit, and another seed is another run; no global generator moves (field report F076)."""
    state = np.random.get_state()[1].copy()  # noqa: NPY002 (the global generator must not move)
    fits = [
        pinn.train(
            line(),
            net(seed, xp=xp, device=device),
            points=32,
            seed=seed,
            optimizer="adam",
            iterations=50,
            record=25,
        )
        for seed in (7, 7, 8)
    ]
    np.testing.assert_array_equal(state, np.random.get_state()[1])  # noqa: NPY002
    vectors = [to_host(fit.network.flatten()) for fit in fits]
    np.testing.assert_array_equal(vectors[0], vectors[1])
    assert fits[0].history == fits[1].history
    assert not np.array_equal(vectors[0], vectors[2]) and fits[0].history[0] != fits[2].history[0]
    # The points are the same on every library: this is their checksum on all of them.
    assert fits[0].history[0].points == line().draw(32, seed=7).checksum
    for rule in RULES:
        sample = line().draw(8, sampling=rule, seed=3)
        placed = Objective(line(), net(xp=xp, device=device), sample).terms.residuals[0].operators[0].points
        np.testing.assert_array_equal(to_host(placed), sample.interior)


def test_every_optimiser_keeps_the_dtype(library, xp, device, dtype):
    """Parameters, states and losses stay in the network's precision (field report F035)."""
    problem, network = line(), net(xp=xp, device=device, dtype=dtype)
    objective = Objective(problem, network, problem.draw(16))
    names = ["adam", "lbfgs"] if library.name == "strict" else ["adam", "lbfgs", "lm"]
    for stage in resolve(names, None, network):
        x = objective.start()
        moved, state = stage.step(objective, x, stage.init(objective, x))
        loss, gradient = objective.loss_and_gradient(moved)
        for array in (moved, loss, gradient, objective.residuals(moved)):
            assert library.dtype(array) == dtype and library.on_device(array)
        held, _ = stage.pack(state)
        assert all(value.dtype == dtype for value in held.values())


def test_points_are_drawn_anew_when_asked():
    """Each set differs from the others, and given points cannot be drawn anew (field report F092)."""
    fit = pinn.train(line(), net(), points=32, seed=3, optimizer="adam", iterations=50, resample=10)
    assert len({record.points for record in fit.history}) == 5
    fit = pinn.train(
        line(), net(), points=32, optimizer="lm", iterations=6, resample=2, record=1, adaptive=True
    )
    assert len({record.points for record in fit.history}) == 4
    given = pinn.Helmholtz(pinn.PointSet([[0.2], [0.6]]), 1.0, 1j)
    with pytest.raises(ArgumentError, match="resample = 10"):
        pinn.train(given, net(), resample=10)


@pytest.mark.backend("numpy", "torch")
@pytest.mark.parametrize("optimizer", ["adam", "lbfgs", "lm"])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, library, xp, device, optimizer):
    """Bit for bit, with new points and with multipliers that follow the training."""
    path = tmp_path / "run.safetensors"
    settings = {"points": 32, "seed": 2, "record": 5, "resample": 9, "optimizer": optimizer}
    if optimizer == "adam":
        settings |= {"weights": "annealing", "optimizer": optimize.Adam(1e-2), "resample": 15}
    if optimizer == "lbfgs":
        settings |= {"weights": "ntk", "resample": 15}
    where = {"xp": xp, "device": device}
    whole = pinn.train(line(), net(**where), iterations=30, **settings)
    pinn.train(line(), net(**where), iterations=20, checkpoint=path, checkpoint_every=20, **settings)
    resumed = pinn.train(line(), net(seed=5, **where), iterations=30, resume=path, **settings)
    np.testing.assert_array_equal(to_host(whole.network.flatten()), to_host(resumed.network.flatten()))
    assert whole.history == resumed.history and whole.iterations == resumed.iterations == 30
    moved = whole.history[-1].weights
    assert (set(moved.values()) == {1.0}) == (optimizer == "lm")


def test_a_network_can_be_pickled_and_copied(xp, device):
    """It held its namespace, a module."""
    network = net(xp=xp, device=device)
    for again in (pickle.loads(pickle.dumps(network)), copy.deepcopy(network)):
        assert again.xp is network.xp and again.library == network.library
        np.testing.assert_array_equal(to_host(again.flatten()), to_host(network.flatten()))


def test_a_fit_can_be_pickled_and_copied():
    """A problem held functions that were made on the way."""
    exact = pinn.solutions.plane_wave(5.0)
    problem = pinn.Helmholtz(
        pinn.Interval(0, 1), 5.0, 0.0,
        [pinn.Dirichlet(1.0, where="left", hard=True), pinn.Impedance(exact.impedance, where="right")],
    )  # fmt: skip
    fit = pinn.train(problem, net(), points=16, optimizer="adam", iterations=2, held_out=16)
    x = np.asarray([[0.0], [0.3], [1.0]])
    for again in (pickle.loads(pickle.dumps(fit)), copy.deepcopy(fit)):
        np.testing.assert_array_equal(again.field(x), fit.field(x))
        assert again.history == fit.history
        assert len(again.problem.terms(again.problem.draw(4))) == 2


def test_a_checkpoint_that_cannot_be_written_costs_no_fit(tmp_path, monkeypatch):
    """Said once, by the file's name; what was written before stays."""
    settings = {"points": 16, "optimizer": "lm", "checkpoint": tmp_path / "run", "checkpoint_every": 1}
    pinn.train(line(), net(), iterations=1, **settings)
    before = (tmp_path / "run").read_bytes()

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write", full)
    with pytest.warns(RuntimeWarning, match=r"checkpoint = .*run'.*No space left on device") as caught:
        fit = pinn.train(line(), net(), iterations=4, **settings)
    assert len(caught) == 1 and fit.iterations == 4 and "run" in fit.warnings[-1]
    assert (tmp_path / "run").read_bytes() == before


def test_interrupting_keeps_the_best(tmp_path):
    def stop(record, network):
        if record.iteration == 30:
            raise KeyboardInterrupt

    fit = pinn.train(line(), net(), points=32, optimizer="lm", record=10, callbacks=[stop], tolerance=0.0)
    assert fit.reason == "interrupted" and fit.iterations == 30
    assert fit.error(pinn.solutions.plane_wave(5.0)) < 1e-2
    # The best is not the last where the last is worse.
    spoiled = pinn.train(
        line(), fit.network, points=32, optimizer=optimize.Adam(0.3), iterations=10, record=5
    )
    assert spoiled.loss > 100 * fit.loss
    assert spoiled.error(pinn.solutions.plane_wave(5.0)) > fit.error(pinn.solutions.plane_wave(5.0))


def test_interrupting_within_a_step_keeps_the_best(monkeypatch):
    """Ctrl-C comes when it comes: here in the middle of a gradient."""
    gradient, calls = Objective.loss_and_gradient, []

    def interrupted(self, x, terms=None):
        calls.append(x)
        if len(calls) == 25:
            raise KeyboardInterrupt
        return gradient(self, x, terms)

    monkeypatch.setattr(Objective, "loss_and_gradient", interrupted)
    fit = pinn.train(line(), net(), points=32, optimizer=optimize.Adam(1e-2), record=5, iterations=100)
    assert (fit.reason, fit.iterations, len(calls)) == ("interrupted", 24, 25)
    assert [record.iteration for record in fit.history] == [5, 10, 15, 20, 24]
    recorded = [calls[record.iteration] for record in fit.history]
    assert any(np.array_equal(fit.network.flatten(), x) for x in recorded)


def test_reasons_are_stated():
    def ends(**settings):
        return pinn.train(line(), net(), points=32, record=1, **settings).reason

    assert ends(optimizer="lm", iterations=3) == "iteration limit"
    assert ends(optimizer="lm", tolerance=1e-2) == "tolerance"
    assert ends(optimizer="lm", callbacks=[lambda record, network: record.iteration == 2]) == "callback"
    assert ends(optimizer=optimize.Adam(1e-12), iterations=50, patience=5) in ("held-out", "iteration limit")
    assert ends(optimizer=optimize.Adam(1.0), iterations=200, patience=5) == "held-out"
    linear = net(hidden=())
    assert pinn.train(line(), linear, points=32, optimizer="lm").reason in ("gradient", "no descent")
    broken = linear.replace({"W0": linear.parameters["W0"] * np.inf})
    with np.errstate(invalid="ignore"):
        assert pinn.train(line(), broken, points=32, optimizer="lm").reason == "not finite"


def test_lbfgs_in_float32_gets_no_worse():
    """Adam, then L-BFGS, in float32 (field report F095): no NaN, no loss above the one before."""
    network = net(k=10.0, hidden=(16, 16), dtype="float32")
    with pytest.warns(pinn.DiagnosisWarning, match="LBFGS in float32"):
        fit = pinn.train(line(10.0), network, points=128, optimizer=[("adam", 100), ("lbfgs", 100)], record=1)
    second = [record.loss for record in fit.history if record.stage == "L-BFGS"]
    assert all(np.isfinite(second)) and second[-1] <= fit.history[99].loss
    assert all(later <= earlier * (1 + 1e-4) for earlier, later in itertools.pairwise(second))
    assert all(value.dtype == np.float32 for value in fit.network.parameters.values())


def test_the_wavenumber_is_found_from_data():
    """Measured values of exp(i 6.3 x) at 20 points; k starts at 6, 1e-4 is asked."""
    exact = pinn.solutions.plane_wave(6.3)
    x = np.linspace(0.0, 1.0, 20)[:, None]
    problem = pinn.Helmholtz(pinn.Interval(0, 1), pinn.Unknown(6.0), data=pinn.Data(x, exact(x)))
    fit = pinn.train(problem, net(k=6.0), points=60, optimizer="lm", iterations=150)
    assert fit.unknowns["wavenumber"] == pytest.approx(6.3, abs=1e-4)
    assert fit.error(exact) < 1e-3


def test_an_unknown_converges_on_a_linear_model():
    """Sines and cosines of n x, k^2 from 2.5^2, data sin 3x (field report F085)."""
    features = pinn.FourierFeatures(frequencies=np.arange(1, 7)[None] / (2 * np.pi), trainable=False)
    network = pinn.Network.create(features, hidden=[], outputs=1)
    zero = network.replace({"W0": 0 * network.parameters["W0"]})
    x = np.linspace(0.0, 2.0, 50)[:, None]
    problem = pinn.Helmholtz(pinn.Interval(0, 2), pinn.Unknown(2.5), data=pinn.Data(x, np.sin(3 * x[:, 0])))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pinn.DiagnosisWarning)
        fit = pinn.train(
            problem, zero, points=50, optimizer=optimize.LevenbergMarquardt(damping=1e-6), iterations=50
        )
    assert fit.unknowns["wavenumber"] == pytest.approx(3.0, abs=1e-8)


def test_a_robin_coefficient_is_found_from_data():
    """u' + c u = 0 at the right end of a standing wave sin(2x + 1): c = -2 cot 3."""
    x = np.linspace(0.0, 1.0, 15)[:, None]
    robin = pinn.Robin(pinn.Unknown(1.0, "coefficient"), 0.0, where="right")
    problem = pinn.Helmholtz(pinn.Interval(0, 1), 2.0, 0.0, robin, data=pinn.Data(x, np.sin(2 * x[:, 0] + 1)))
    network = pinn.Network.create(pinn.FourierFeatures(1, 6, wavenumber=2.0), hidden=[6], outputs=1)
    fit = pinn.train(problem, network, points=30, optimizer="lm", iterations=150)
    assert fit.unknowns["coefficient"] == pytest.approx(-2 / np.tan(3.0), rel=1e-3)


def test_a_given_medium_has_an_unknown_strength():
    """k^2 = s^2 (100 + 150 x), Airy functions, s found from 0.97; the impedance at both ends follows it."""
    exact = pinn.solutions.airy(100.0, 150.0)
    x = np.linspace(0.0, 1.0, 30)[:, None]
    medium = pinn.Unknown(0.97, "strength", times=exact.wavenumber)
    problem = pinn.Helmholtz(pinn.Interval(0, 1), medium, data=pinn.Data(x, exact(x)))
    assert problem.wavenumber_at(x) == pytest.approx(0.97 * exact.wavenumber(x))
    waves = pinn.FourierFeatures(1, 40, scale=2.5, trainable=False)
    fit = pinn.train(
        problem, pinn.Network.create(waves, hidden=[]), points=150, optimizer="lm", iterations=60
    )
    assert fit.unknowns["strength"] == pytest.approx(1.0, abs=1e-6)


def test_one_of_two_media_is_unknown():
    """k = 10 on the left and s on the right of an interface, s found from 18.5."""
    exact = pinn.solutions.two_media(10.0, 20.0, interface=0.5)
    right = pinn.Interval(0.5, 1.0)
    k = pinn.Unknown(18.5, times=lambda x: x[:, 0] >= 0.5, plus=lambda x: 10.0 * (x[:, 0] < 0.5))
    x = np.linspace(0.0, 1.0, 25)[:, None]
    conditions = [pinn.Sommerfeld(where="right"), pinn.Interface(right)]
    problem = pinn.Helmholtz(pinn.Interval(0, 1), k, 0.0, conditions, pinn.Data(x, exact(x)))
    waves = pinn.FourierFeatures(1, 48, scale=20 / (2 * np.pi), trainable=False)
    fit = pinn.train(
        problem, pinn.Network.create(waves, hidden=[]), points=200, optimizer="lm", iterations=60
    )
    assert fit.unknowns["wavenumber"] == pytest.approx(20.0, abs=1e-4)
    assert fit.error(exact) < 1e-5


def test_annealing_balances_and_its_literal_form_runs_away():
    """arXiv 2001.04536: with the multiplier inside the mean the weights settle, without it they grow on."""
    problem = pinn.Helmholtz(pinn.Interval(0, 1), 5.0, 1.0, pinn.Dirichlet(1.0), complex_field=False)
    network = pinn.Network.create(pinn.FourierFeatures(1, 6, wavenumber=5.0), hidden=[8], outputs=1)
    grown = {}
    for weighted in (True, False):
        x = Objective(problem, network, problem.draw(40)).start()
        objective = Objective(problem, network, problem.draw(40))
        adam = optimize.Adam(3e-3)
        state = adam.init({"x": x})
        for step in range(400):
            if step % 10 == 0:
                objective.reweight(annealed(objective, x, weighted=weighted))
            moved, state = adam.update({"x": x}, {"x": objective.loss_and_gradient(x)[1]}, state)
            x = moved["x"]
        grown[weighted] = objective.multipliers["dirichlet"]
        assert objective.multipliers["equation"] == 1.0
    assert grown[False] > 10 * grown[True]


def test_one_step_of_annealing_is_its_formula():
    objective = Objective(line(), net(), line().draw(20))
    x = objective.start()

    def gradient(**multipliers: float) -> dict[str, np.ndarray]:
        objective.reweight(dict.fromkeys(objective.names, 1.0) | multipliers)
        moved, _ = objective.split(objective.loss_and_gradient(x)[1])
        return {name: part for name, part in moved.parameters.items() if name.startswith("W")}

    plain = gradient()
    own = {  # the loss is linear in a multiplier
        name: {w: part - plain[w] for w, part in gradient(**{name: 2.0}).items()} for name in objective.names
    }
    largest = max(np.max(np.abs(part)) for part in own["equation"].values())
    gradient(**{"dirichlet left": 7.0})
    for weighted in (True, False):
        found = annealed(objective, x, weighted=weighted)
        assert found.pop("equation") == 1.0
        for name, multiplier in found.items():
            before = 7.0 if name == "dirichlet left" else 1.0
            mean = np.mean([np.mean(np.abs(part)) for part in own[name].values()])
            want = 0.9 * before + 0.1 * largest / (mean * (before if weighted else 1.0))
            assert multiplier == pytest.approx(want, rel=1e-9)


def test_ntk_multipliers_are_ratios_of_traces():
    objective = Objective(line(), net(), line().draw(20))
    x = objective.start()
    objective.reweight({"dirichlet left": 7.0})  # what is set already does not enter
    _, jacobian = objective.jacobian(x)
    scales = np.concatenate([[1 / 20] * 40, [7.0] * 2, [1.0] * 2])
    squares = np.sum(jacobian**2, axis=1) / scales
    parts = np.asarray([squares[:40].sum(), squares[40:42].sum(), squares[42:].sum()])
    found = ntk(objective, x)
    np.testing.assert_allclose(list(found.values()), parts.sum() / parts, rtol=1e-10)


MEDIA = {
    "number": pinn.Unknown(3.0),
    "shape": pinn.Unknown(3.0, times=lambda x: 1.0 + x[:, 0] + 0.2j),
    "shape and rest": pinn.Unknown(3.0, times=lambda x: x[:, 0], plus=lambda x: 2.0 - 1j * x[:, 0]),
}


@pytest.mark.parametrize(
    ("medium", "end"),
    [
        *((medium, pinn.Sommerfeld(where="right")) for medium in MEDIA.values()),
        (
            4.0,
            pinn.Robin(pinn.Unknown(0.5, "c", times=lambda x, n: 2j * n[:, 0], plus=0.3), 0.0, where="right"),
        ),
    ],
    ids=[*MEDIA, "robin"],
)
def test_the_objectives_gradient_is_that_of_its_loss(medium, end):
    """Unknown media, data, hard and open ends: all entries against central differences; |r|^2 is the loss."""
    x = np.linspace(0.1, 0.9, 5)[:, None]
    hard = pinn.Dirichlet(0.0, where="left", hard=True)
    problem = pinn.Helmholtz(
        pinn.Interval(0, 1), medium, 0.4j,
        [hard, end], pinn.Data(x, np.exp(2j * x[:, 0])),
    )  # fmt: skip
    objective = Objective(problem, net(), problem.draw(12))
    vector = objective.start()
    loss, gradient = objective.loss_and_gradient(vector)
    r, jacobian = objective.jacobian(vector)
    np.testing.assert_allclose(r @ r, loss, rtol=1e-12)
    np.testing.assert_allclose(objective.residuals(vector), r, atol=1e-13)
    np.testing.assert_allclose(2 * jacobian.T @ r, gradient, atol=1e-10)
    assert objective.weighted(objective.raw(vector)) == pytest.approx(float(loss))
    step = 1e-5
    for direction in (np.eye(vector.size)[-1], np.random.default_rng(0).normal(size=vector.size)):
        ends = [float(objective.loss_and_gradient(vector + s * step * direction)[0]) for s in (1, -1)]
        assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(float(gradient @ direction), rel=1e-6)


def test_bad_input_is_named():
    for settings, error, words in (
        ({"optimizer": "sgd"}, ArgumentError, "optimizer = 'sgd'"),
        ({"optimizer": []}, ArgumentError, "empty list"),
        ({"optimizer": [("lm", 3)], "iterations": 4}, ArgumentError, "iterations = 4"),
        ({"iterations": 0}, ArgumentError, r"^iterations: 0; allowed is"),
        ({"weights": "magic"}, ArgumentError, "weights = 'magic'"),
        ({"weights": "ntk", "optimizer": "lm"}, ArgumentError, "fixed weights"),
        ({"adaptive": True}, ArgumentError, "adaptive"),
        ({"record": 0}, ArgumentError, r"^record: 0; allowed is"),
        ({"tolerance": -1.0}, ArgumentError, "tolerance"),
        ({"points": 0}, ArgumentError, r"^points: 0; allowed is"),
        ({"points": 9.5}, ArgumentError, r"^points: 9.5; allowed is an integer"),
        ({"iterations": "9"}, ArgumentError, r"^iterations: '9'; allowed is an integer"),
        ({"tolerance": "1"}, ArgumentError, r"^tolerance = '1'"),
        ({"sampling": "halton"}, ArgumentError, "sampling"),
        ({"checkpoint": "/nowhere/at/all/run"}, ArgumentError, "folder"),
    ):
        with pytest.raises(error, match=words):
            pinn.train(line(), net(), **settings)
    with pytest.raises(ArgumentError, match="network is a RawCoordinates"):
        pinn.train(line(), pinn.RawCoordinates(1))
    with pytest.raises(ShapeError, match="outputs=2"):
        pinn.train(line(), pinn.Network.create(pinn.RawCoordinates(1), outputs=1))
    with pytest.raises(ShapeError, match="2 coordinates"):
        pinn.train(line(), pinn.Network.create(pinn.RawCoordinates(2)))
    with pytest.raises(ArgumentError, match="problem is a float"):
        pinn.train(3.0, net())


def test_a_checkpoint_of_another_training_is_refused(tmp_path):
    path = tmp_path / "run.safetensors"
    pinn.train(line(), net(), points=32, optimizer="lm", iterations=4, checkpoint=path, checkpoint_every=2)
    for network, settings, words in (
        (net(), {"points": 33}, "points was 32"),
        (net(), {"points": 32, "seed": 1}, "seed was 0"),
        (net(hidden=(9,)), {"points": 32}, "architecture"),
        (net(), {"points": 32, "optimizer": "lbfgs"}, "stages was"),
    ):
        with pytest.raises(StateError, match=words):
            pinn.train(line(), network, resume=path, **({"optimizer": "lm"} | settings))
    with pytest.raises(StateError, match="sample was"):
        pinn.train(
            pinn.Helmholtz(pinn.Interval(0, 2), 5.0, 0.0, line().conditions),
            net(),
            points=32,
            optimizer="lm",
            resume=path,
        )
    assert to_host(net().flatten()).shape == (net().size,)


def test_a_checkpoint_of_another_problem_is_refused(tmp_path):
    """Functions included: what they give at the points is compared, to nine digits; more iterations are the same run."""
    path, where = tmp_path / "run", {"points": 20, "boundary": 2}

    def problem(k=5.0, f=2.0, g=1.0, values=(1.0,), ratio=0.5, cut=0.5, **settings):
        return pinn.Helmholtz(
            pinn.Interval(0, 1), lambda x: k + 0 * x[:, 0], lambda x: f * x[:, 0],
            [pinn.Dirichlet(lambda x: g + 0 * x[:, 0], where="left"), pinn.Sommerfeld(where="right"),
             pinn.Interface(pinn.Interval(0, cut), ratio)],
            pinn.Data([[0.3]], values), **settings,
        )  # fmt: skip

    def fixed(seed=0):
        return pinn.Network.create(
            pinn.FourierFeatures(1, 6, scale=2.0, seed=seed, trainable=False), hidden=[]
        )

    adam = optimize.Adam(optimize.Cosine(1e-3, 4))
    pinn.train(problem(), fixed(), optimizer=adam, iterations=4, checkpoint=path, checkpoint_every=2, **where)
    for other, network, optimizer, words in (
        (problem(k=6.0), fixed(), adam, "coefficient of u of 'equation'"),
        (problem(k=5.0 + 1e-7), fixed(), adam, "coefficient of u of 'equation'"),
        (problem(f=2.1), fixed(), adam, "target of 'equation'"),
        (problem(g=0.9), fixed(), adam, "target of 'dirichlet left'"),
        (problem(values=(0.9,)), fixed(), adam, "target of 'data'"),
        (problem(ratio=0.6), fixed(), adam, "of 'interface, slope'"),
        (problem(cut=0.6), fixed(), adam, "sample was"),
        (problem(field_scale=2.0), fixed(), adam, "of 'equation'"),
        (problem(), fixed(seed=1), adam, "frequencies of 'features'"),
        (problem(), fixed(), optimize.Adam(optimize.Cosine(2e-3, 4)), "optimizers was"),
        (problem(), fixed(), optimize.Adam(1e-3), "optimizers was"),
    ):
        with pytest.raises(StateError, match=words):
            pinn.train(other, network, optimizer=optimizer, iterations=6, resume=path, **where)
    longer = optimize.Adam(optimize.Cosine(1e-3, 6))
    for same in (problem(), problem(k=5.0 * (1 + 1e-15))):
        assert pinn.train(same, fixed(), optimizer=longer, iterations=6, resume=path, **where).iterations == 6
    tensors, facts = checkpoint.read(path, "training")
    for name in ("problem", "embedding", "optimizers"):
        settings = {key: value for key, value in facts["settings"].items() if key != name}
        checkpoint.write(tmp_path / "old", "training", tensors, facts | {"settings": settings})
        with pytest.raises(StateError, match=f"no record of its {name}"):
            pinn.train(problem(), fixed(), optimizer=adam, iterations=6, resume=tmp_path / "old", **where)
    for odd in (3, {"equation": 3}, {"equation": {"target": "a"}}, {"equation": {"points": [10**400, 0, 0]}}):
        settings = facts["settings"] | {"problem": odd}
        checkpoint.write(tmp_path / "odd", "training", tensors, facts | {"settings": settings})
        with pytest.raises(StateError, match="the problem differs in"):
            pinn.train(problem(), fixed(), optimizer=adam, iterations=6, resume=tmp_path / "odd", **where)


def test_an_exact_field_in_a_column_is_refused():
    """(n, 1) beside (n,) would broadcast to all with all."""
    fit = pinn.train(line(), net(), points=20, iterations=1, optimizer="lm")
    x = np.linspace(0.1, 0.9, 7)[:, None]
    field = fit.field(x)
    assert fit.error(fit.field, x) == 0.0
    assert fit.error(lambda x: 2.0, x) == pytest.approx(
        np.linalg.norm(field - 2.0) / np.linalg.norm(np.full(7, 2.0))
    )
    with pytest.raises(ShapeError, match=r"exact has shape \(7, 1\): \(7,\)"):
        fit.error(lambda x: fit.field(x)[:, None], x)


def test_places_that_cannot_be_written_are_named_before_anything_is_drawn(tmp_path):
    fit = pinn.train(line(), net(), points=20, iterations=1, optimizer="lm")
    nowhere = tmp_path / "none" / "fit.png"
    with pytest.raises(
        ArgumentError, match=r"path = .*fit.png': its folder does not exist; make '.*none' first"
    ):
        fit.save(nowhere)
    with pytest.raises(ArgumentError, match="it is a folder, the name of a file is expected"):
        fit.save(tmp_path)
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    with pytest.raises(ArgumentError, match="its folder does not exist"):
        fit.plot(nowhere)
    for name in ("fit.foo", "fit.tar.gz", ""):
        with pytest.raises(ArgumentError, match=r"allowed endings are|it is a folder"):
            fit.plot(tmp_path / name)
    assert list(tmp_path.iterdir()) == []
    fit.plot(tmp_path / "bare")
    assert [path.name for path in tmp_path.iterdir()] == ["bare.png"]
