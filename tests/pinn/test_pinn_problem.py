"""Problems as loss terms: exact fields make every term vanish, on every condition and domain, and wrong signs do not."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from scanfield import pinn
from scanfield.errors import ArgumentError, DtypeError, ShapeError
from scanfield.pinn.ansatz import hard_ansatz
from scanfield.pinn.formula import Formula
from scanfield.pinn.objective import Objective
from scanfield.pinn.placing import place_terms, to_host

K = 3.0


def wave_network(*, k=(K,), weights=((0.0, 1.0), (1.0, 0.0)), dtype="float64", **where):
    """A linear network of one wave: by default exp(i k . x), sines first."""
    features = pinn.FourierFeatures(frequencies=np.asarray(k)[:, None] / (2 * np.pi), trainable=False)
    network = pinn.Network.create(features, hidden=[], outputs=len(weights), dtype=dtype, **where)
    from scanfield.pinn.placing import place

    return network.replace({"W0": place(np.asarray(weights), network)})


def raw(problem, network, points=9):
    return Objective(problem, network, problem.draw(points)).raw(network.flatten())


@pytest.mark.parametrize("precision", ["float64", "float32"])
def test_a_wave_satisfies_neumann_and_impedance(precision):
    """exp(3ix) with its slope on the left and impedance on the right; a flipped sign leaves 36 (field report F087)."""
    network = wave_network(dtype=precision)
    bound = 1e-24 if precision == "float64" else 1e-10

    def losses(left=-3j, sign=1):
        right = pinn.Robin(-1j * K * sign, where="right", name="right")
        return raw(
            pinn.Helmholtz(
                pinn.Interval(0, 1), K, 0.0, [pinn.Neumann(left, where="left", name="left"), right]
            ),
            network,
        )

    assert max(losses().values()) < bound
    assert losses(left=3j)["left"] == pytest.approx(36.0)
    assert losses(sign=-1)["right"] == pytest.approx(36.0)
    # A Sommerfeld condition is the same as impedance without data.
    end = pinn.Helmholtz(
        pinn.Interval(0, 1), K, 0.0, [pinn.Sommerfeld(where="right"), pinn.Dirichlet(1.0, where="left")]
    )
    assert max(raw(end, network).values()) < bound


def test_a_complex_coefficient_may_be_written_down():
    """d_n u + (2+3j) u with its value; the conjugate leaves 36 (field report F089)."""
    network, end = wave_network(), np.exp(3j)
    value = (3j + 2 + 3j) * end
    for coefficient, left in ((2 + 3j, 0.0), (2 - 3j, 36.0)):
        robin = pinn.Robin(coefficient, value, where="right", name="end")
        problem = pinn.Helmholtz(pinn.Interval(0, 1), K, 0.0, robin, field_scale=1.0)
        assert raw(problem, network)["end"] == pytest.approx(left, abs=1e-24, rel=1e-9)


def test_terms_are_reported_apart_and_unweighted():
    """Contradicting values in a corner (field report F088): each counts, the loss adds them with their weights."""
    network = wave_network(k=(1.0, 1.0), weights=((0.0, 0.0),))
    sides = [
        pinn.Dirichlet(0.0, where="left", weight=3.0, name="left"),
        pinn.Dirichlet(1.0, where="bottom", weight=10.0, name="bottom"),
    ]
    problem = pinn.Helmholtz(pinn.Box((0, 0), (1, 1)), 1.0, 0.0, sides)
    objective = Objective(problem, network, problem.draw(16, 20, sampling="grid"))
    found = objective.raw(network.flatten())
    assert found["left"] == 0.0 and found["bottom"] == 1.0 and found["equation"] == 0.0
    assert objective.weighted(found) == pytest.approx(10.0)
    assert float(objective.loss_and_gradient(network.flatten())[0]) == pytest.approx(10.0)


def test_a_piecewise_wavenumber_is_a_function_or_an_array():
    """k = 10, 20, 20 at three points (field report F084): the same residual, bit for bit, and no derivative of k."""
    x = np.asarray([[0.1], [0.5], [0.7]])
    domain = pinn.PointSet(x)
    network = wave_network(weights=((0.0, 1.0),))
    terms = [
        pinn.Helmholtz(domain, k).terms(pinn.Helmholtz(domain, k).draw())[0]
        for k in (lambda x: np.where(x[:, 0] < 0.5, 10.0, 20.0), np.asarray([10.0, 20.0, 20.0]))
    ]
    found = [to_host(pinn.residuals(network, place_terms([term], network))["equation"]) for term in terms]
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(terms[0].pieces[0].value, [100.0, 400.0, 400.0])
    u = np.cos(3 * x)
    np.testing.assert_allclose(found[0], -9 * u + np.asarray([[100.0], [400.0], [400.0]]) * u, rtol=1e-12)


def test_terms_are_the_same_on_every_library(library, xp, device, dtype):
    """A lossy piecewise medium, an absorbing layer, an interface, a period with a phase, open and held sides."""
    inside = pinn.Disk((0.4, 0.5), 0.2)
    problem = pinn.Helmholtz(
        pinn.Box((0, 0), (1.2, 1)),
        lambda x: np.where(inside.contains(x), 6.0 + 0.3j, 4.0),
        lambda x: 1j * x[:, 0],
        [
            pinn.Impedance(0.5, where="left"),
            pinn.PML(0.2, where="right"),
            pinn.Periodic(1, phase=0.4),
            pinn.Interface(inside, ratio=0.7),
        ],
    )
    network = wave_network(k=(2.0, 1.0), dtype=dtype, xp=xp, device=device)
    here = pinn.Network.create(network.embedding, hidden=[], dtype=dtype).replace(
        {name: to_host(value) for name, value in network.parameters.items()}
    )
    sample = problem.draw(12, 16, seed=3)
    want = Objective(problem, here, sample).raw(here.flatten())
    got = Objective(problem, network, sample).raw(network.flatten())
    assert len(want) == 7 and all(value > 0 for value in want.values())
    assert got == pytest.approx(want, rel=1e-12 if dtype == "float64" else 2e-5)
    x = np.random.default_rng(0).random((5, 2))
    np.testing.assert_allclose(problem.field(network, x), problem.field(here, x), atol=1e-6)


def test_periodic_conditions_couple_both_sides():
    """exp(i k x) over 1.5 waves is Bloch periodic with phase 3 pi and no other."""
    k = 3 * np.pi
    network = wave_network(k=(k, 0.0))
    for phase, right in ((3 * np.pi, True), (0.0, False)):
        problem = pinn.Helmholtz(
            pinn.Box((0, 0), (1, 1)), k, 0.0,
            [pinn.Periodic(axis=0, phase=phase), pinn.Neumann(0.0, where=("bottom", "top"))], complex_field=True,
        )  # fmt: skip
        found = raw(problem, network)
        assert found["neumann bottom, top"] < 1e-24
        values = [found["periodic axis 0, value"], found["periodic axis 0, slope"] / k**2]
        assert all(v < 1e-24 for v in values) if right else all(v == pytest.approx(4.0) for v in values)


def test_an_interface_lets_second_derivatives_jump():
    """The exact field of two media, one network piece a side: the chart keeps them apart, the jump terms see the rim."""
    exact = pinn.solutions.two_media(10.0, 20.0, 0.5)
    region = pinn.Interval(0.5, 1.0)
    problem = pinn.Helmholtz(
        pinn.Interval(0, 1), exact.wavenumber, 0.0, [pinn.Interface(region), pinn.Sommerfeld(where="right")]
    )
    x = np.asarray([[0.2], [0.5], [0.7], [1.0]])
    moved = problem.chart(x)[:, 0]
    np.testing.assert_allclose(moved[[0, 2, 3]], [0.2, 3.2, 3.5], atol=1e-6)
    other = pinn.Helmholtz(pinn.Interval(0, 1), 1.0, 0.0, pinn.Interface(pinn.Interval(0.0, 0.5)))
    np.testing.assert_allclose(other.chart(np.asarray([[0.0], [0.4], [1.0]])), [[2.5], [2.9], [1.0]])
    terms = {term.name: term for term in problem.terms(problem.draw(8))}
    inside, outside = terms["interface, slope"].pieces
    np.testing.assert_allclose([inside.points[0, 0], outside.points[0, 0]], [3.0, 0.5], atol=1e-9)
    # d_n out of the region is -d/dx: the difference of slopes, inside less outside.
    np.testing.assert_allclose([inside.first[0, 0], outside.first[0, 0]], [-1.0, 1.0])
    np.testing.assert_allclose(terms["sommerfeld right"].pieces[0].points, [[3.5]], atol=1e-6)


def layers(*regions, ends=(0.0, 1.0)):
    conditions = [pinn.Interface(pinn.Interval(*ends), ratio) for ends, ratio in regions]
    return pinn.Helmholtz(pinn.Interval(*ends), 1.0, 0.0, conditions)


@pytest.mark.parametrize(
    ("regions", "sheets"),
    [
        ([(0.2, 0.6), (0.4, 0.6), (0.6, 1.0)], [0, 1, 3, 2]),  # the second in the first
        ([(0.0, 0.4), (0.2, 0.6), (0.3, 0.9)], [1, 3, 5, 4, 2, 0]),  # the second never alone
        ([(0.1 * i, 1.0) for i in range(1, 10)], list(range(10))),  # nested: as many sheets as layers
    ],
)
def test_each_combination_of_regions_has_a_sheet(regions, sheets):
    """The sum of the numbers put two on one sheet, where the field had to be smooth across a jump."""
    problem = layers(*((ends, 1.0) for ends in regions))
    cuts = sorted({0.0, 1.0, *(end for ends in regions for end in ends)})
    middles = np.asarray([[0.5 * (a + b)] for a, b in itertools.pairwise(cuts)])
    found = (problem.chart(middles) - middles)[:, 0] / 2.5
    np.testing.assert_allclose(found, sheets, atol=1e-9)
    thin = layers(((0.2, 0.6), 1.0), ((0.5999, 1.0), 1.0)).chart(np.asarray([[0.3], [0.59995], [0.7]]))[:, 0]
    np.testing.assert_allclose(thin, [2.8, 0.59995 + 7.5, 5.7], atol=1e-9)


def test_a_rim_of_two_regions_has_one_slope_condition():
    """Touching regions said two that contradict each other; each rim says (ratio within) slope = (ratio without) slope."""

    def slopes(problem):
        terms = [term for term in problem.terms(problem.draw(8)) if "slope" in term.name]
        pairs = {}
        for term in terms:
            for row in range(term.pieces[0].points.shape[0]):
                within, without = (float(piece.first[row, 0]) for piece in term.pieces)
                at = round(float(np.min([piece.points[row, 0] % 2.5 for piece in term.pieces])), 3)
                pairs.setdefault(at, []).append(abs(within / without))
        return pairs

    # At 0.6 the slope of the left side times 0.5 is that of the right times 4.
    touching = slopes(layers(((0.3, 0.6), 0.5), ((0.6, 1.0), 4.0)))
    assert touching == {0.3: [0.5], 0.6: [0.125, 8.0]}
    nested = slopes(layers(((0.2, 0.8), 0.5), ((0.4, 0.6), 4.0)))
    assert nested == {0.2: [0.5], 0.8: [0.5], 0.4: [4.0], 0.6: [4.0]}
    shared = slopes(layers(((0.2, 0.6), 0.5), ((0.4, 0.6), 4.0)))
    assert shared == {0.2: [0.5], 0.6: [2.0, 2.0], 0.4: [4.0]}


def test_a_region_on_the_low_side_is_solved_as_one_on_the_high_side():
    """A quarter of a width between them left 6e-4."""
    exact = pinn.solutions.two_media(10.0, 20.0, 0.5)
    ends = [pinn.Impedance(exact.impedance, where="left"), pinn.Sommerfeld(where="right")]
    waves = pinn.FourierFeatures(1, 64, scale=20 / (2 * np.pi), trainable=False)
    for region in (pinn.Interval(0, 0.5), pinn.Interval(0.5, 1)):
        problem = pinn.Helmholtz(pinn.Interval(0, 1), exact.wavenumber, 0.0, [*ends, pinn.Interface(region)])
        fit = pinn.train(problem, pinn.Network.create(waves, hidden=[]), points=200, iterations=30, record=30)
        assert fit.error(exact) < 1e-7


def test_the_layer_absorbs_what_stretched_coordinates_do():
    """exp(i k integral s) solves the stretched equation (MATH): its residual by differences is zero."""
    k, layer = 10.0, pinn.PML(0.5, where=("left", "right"), reflection=1e-4)
    problem = pinn.Helmholtz(pinn.Interval(-1.0, 1.0), k, 0.0, [layer, pinn.Dirichlet(0.0)])
    strength = 1.5 * np.log(1e4) / 0.5

    def wave(x):  # to the right in the right half
        depth = np.maximum(0.0, x - 0.5)
        return np.exp(1j * k * (x + 1j * strength / k * depth**3 / (3 * 0.25)))

    x, h = np.linspace(0.05, 0.98, 40), 1e-3
    first = (wave(x + h) - wave(x - h)) / (2 * h)
    second = (wave(x + h) - 2 * wave(x) + wave(x - h)) / h**2
    a, b = layer.coefficients(problem.domain, x[:, None], k)
    residual = a[:, 0] * second + b[:, 0] * first + k**2 * wave(x)
    assert np.max(np.abs(residual)) < 2e-3 * k**2  # second-order differences
    assert abs(wave(1.0)) == pytest.approx(1e-2, rel=1e-6)  # one way: the root of what is left of both
    # The other side mirrors it.
    left_a, left_b = layer.coefficients(problem.domain, -x[:, None], k)
    np.testing.assert_allclose(left_a, a)
    np.testing.assert_allclose(left_b, -b)
    assert problem.physical(np.asarray([[0.4], [0.6]])).tolist() == [True, False]


DOMAINS = {
    "interval": (pinn.Interval(0, 2), lambda x: 1.0 + 2j * x[:, 0]),
    "square": (pinn.Box((0, -1), (2, 1)), lambda x: np.exp(0.7 * x[:, 0]) * np.cos(x[:, 1]) + 1j * x[:, 0]),
    "disk": (pinn.Disk((0.5, 0.0), 1.5), 0.7),
}


@pytest.mark.parametrize("name", DOMAINS)
def test_hard_values_hold_whatever_the_network_is(name):
    domain, value = DOMAINS[name]
    problem = pinn.Helmholtz(domain, 2.0, 0.0, pinn.Dirichlet(value, hard=True), complex_field=True)
    network = pinn.Network.create(
        pinn.FourierFeatures(domain.dimensions, 4, wavenumber=2.0), hidden=[5], seed=1
    )
    for part in domain.parts:
        x = domain.surface(part, np.linspace(0.1, 0.9, 7)[:, None][:, : domain.dimensions - 1]).points
        want = value(x) if callable(value) else value
        np.testing.assert_allclose(problem.field(network, x), np.broadcast_to(want, x.shape[:1]), atol=1e-10)


@pytest.mark.parametrize("name", DOMAINS)
def test_folded_terms_are_the_operator_on_the_whole_ansatz(name):
    """The residual of u = G + D N against second differences of the field itself; variable complex k and a source."""
    domain, value = DOMAINS[name]
    problem = pinn.Helmholtz(
        domain,
        lambda x: 2.0 + 0.3 * x[:, 0] + 0.1j,
        lambda x: np.sin(x[:, 0]) * (1 + 1j),
        pinn.Dirichlet(value, hard=True),
    )
    network = pinn.Network.create(
        pinn.FourierFeatures(domain.dimensions, 4, wavenumber=2.0), hidden=[5], seed=1
    )
    x, h = domain.interior(20, seed=5), 1e-3
    found = to_host(pinn.residuals(network, place_terms([problem.equation(x)], network))["equation"])
    total = problem.wavenumber_at(x) ** 2 * problem.field(network, x) - np.sin(x[:, 0]) * (1 + 1j)
    for axis in range(domain.dimensions):
        e = h * np.eye(domain.dimensions)[axis]
        total += (
            problem.field(network, x + e) - 2 * problem.field(network, x) + problem.field(network, x - e)
        ) / h**2
    np.testing.assert_allclose(found[:, 0] + 1j * found[:, 1], total, atol=2e-4 * np.max(np.abs(total)))


def test_hard_values_may_ask_for_the_normals():
    """On a line they were asked without: a TypeError."""
    problem = pinn.Helmholtz(
        pinn.Interval(0, 1), 2.0, 0.0, pinn.Dirichlet(lambda x, n: 3.0 + n[:, 0], hard=True)
    )
    ends = problem.ansatz.extension(np.asarray([[0.0], [0.5], [1.0]])).value
    np.testing.assert_allclose(ends, [2.0, 3.0, 4.0])
    pinn.Helmholtz(pinn.Interval(0, 1), 2.0, 0.0, pinn.Dirichlet(Formula("nx"), hard=True))


def test_the_extension_knows_the_boundary_alone():
    """Two functions that agree on the boundary have one extension: nothing of the solution leaks inside."""
    square = pinn.Box((-1, -1), (1, 1))
    x = square.interior(30, seed=0)
    fields = [
        hard_ansatz(
            square,
            [
                pinn.Dirichlet(
                    lambda x, s=s: np.cos(x[:, 0]) + s * (1 - x[:, 0] ** 2) * (1 - x[:, 1] ** 2), hard=True
                )
            ],
        )
        for s in (0.0, 5.0)
    ]
    np.testing.assert_allclose(fields[0].extension(x).value, fields[1].extension(x).value, atol=1e-12)


def test_scales_follow_k_and_the_data():
    """Units of the field and of length change the weights, and with them nothing of the loss."""

    def loss(length, size):
        k = 6.0 / length
        problem = pinn.Helmholtz(
            pinn.Interval(0, length), k, 0.0,
            [pinn.Dirichlet(size, where="left"), pinn.Impedance(0.3j * size * k, where="right")],
        )  # fmt: skip
        network = wave_network(k=(2.0 / length,), weights=((0.3, 1.0), (1.0, 0.2)))
        objective = Objective(problem, network, problem.draw(32))
        return float(objective.loss_and_gradient(network.flatten())[0])

    assert loss(1.0, 1.0) == pytest.approx(loss(1e-3, 1e6), rel=1e-9)


def test_a_source_of_any_size_sets_the_scale_where_no_value_does():
    """u'' + 25 u = s (25 - pi^2) sin(pi x), zero at the ends: at s = 1e-9 the field was wrong by 450 %, at 1e9 by 29 %."""
    x = np.linspace(0.01, 0.99, 50)[:, None]
    for s in (1e-9, 0.02, 1e9):
        source = Formula(f"{s} * (25 - pi**2) * sin(pi*x)")
        problem = pinn.Helmholtz(pinn.Interval(0, 1), 5.0, source, pinn.Dirichlet(0.0))
        assert 0.2 < problem.field_scale / s < 5.0
        features = pinn.FourierFeatures(1, 20, scale=1.0, trainable=False)
        fit = pinn.train(
            problem, pinn.Network.create(features, hidden=[], outputs=1), points=60, iterations=20
        )
        np.testing.assert_allclose(fit.field(x), s * np.sin(np.pi * x[:, 0]), rtol=0, atol=1e-6 * s)


@pytest.mark.parametrize(
    ("source", "more", "scale"),
    [
        (1e6, {"boundary": pinn.Dirichlet(3.0)}, 1e5),  # beside what the source drives the value is nothing
        (1e6, {"data": pinn.Data([[0.5]], [3.0])}, 3.0),  # what was measured is the field
        (1e6, {"data": pinn.Data([[0.5]], [1e-16])}, 1e5),  # unless it is rounding
        (1.0, {"boundary": pinn.Dirichlet(3.0)}, 3.0),
        (lambda x: 1e6 * np.sin(100 * np.pi * x[:, 0]), {}, 10.0),  # 1e6 / (100 pi)^2
        (lambda x: 1e6 * (x[:, 0] < 0.5), {}, 1e5),  # an edge is no wave
        (lambda x: np.float32(1e6) * np.sin(np.float32(np.pi) * np.float32(x[:, 0])), {}, 1e5),
        (0.0, {}, 1.0),
        (1e-70, {}, 1.0),
        (1e6, {"field_scale": 7.0}, 7.0),
    ],
)  # fmt: skip
def test_what_sets_the_scale(source, more, scale):
    assert pinn.Helmholtz(pinn.Interval(0, 1), 1.0, source, **more).field_scale == pytest.approx(scale)
    points = pinn.PointSet(np.linspace(0.01, 0.99, 64)[:, None], {"ends": ([[0.0], [1.0]], [[-1.0], [1.0]])})
    if callable(source):  # defined between the given points and nowhere else
        held = lambda x: np.where((x[:, 0] >= 0.01) & (x[:, 0] <= 0.99), source(x), np.nan)  # noqa: E731
        known = {x: float(source(np.asarray([[x]]))[0]) for x in points.interior(1)[:, 0].tolist()}
        assert pinn.Helmholtz(points, 1.0, held, **more).field_scale == pytest.approx(scale)
        table = pinn.Helmholtz(
            points, 1.0, lambda x: np.asarray([known[p] for p in x[:, 0].tolist()]), **more
        )
        assert table.field_scale == 1e5


def test_seeds_and_cycles_give_the_points():
    problem = pinn.Helmholtz(
        pinn.Box((0, 0), (1, 1)),
        4.0,
        1.0,
        [pinn.Dirichlet(0.0, where="left"), pinn.Neumann(0.0, where="top")],
    )
    first, again = problem.draw(50, seed=3), problem.draw(50, seed=3)
    assert first.checksum == again.checksum
    others = [
        problem.draw(50, seed=4),
        problem.draw(50, seed=3, cycle=1),
        problem.draw(50, seed=3, sampling="latin"),
    ]
    assert len({first.checksum, *(sample.checksum for sample in others)}) == 4
    for sample in others:
        assert not np.array_equal(sample.surfaces[0].points, first.surfaces[0].points)
    held = problem.held_out(50, seed=3)
    assert not np.array_equal(held, first.interior)


def test_numpy_scalars_are_numbers():
    """A wavenumber of another precision leaves float32 as it is (field report F036)."""
    network = wave_network(dtype="float32", weights=((0.0, 1.0),))
    losses = []
    for k in (3.0, np.float64(3.0), np.float32(3.0), np.asarray(3.0)):
        problem = pinn.Helmholtz(pinn.Interval(0, 1), k)
        r = pinn.residuals(network, place_terms(problem.terms(problem.draw(5)), network))["equation"]
        assert r.dtype == np.float32
        losses.append(r.tobytes())
    assert len(set(losses)) == 1


def test_bad_input_is_named():
    line, square = pinn.Interval(0, 1), pinn.Box((0, 0), (1, 1))
    cases = [
        (lambda: pinn.Helmholtz("square", 1.0), ArgumentError, "domain is a str"),
        (lambda: pinn.Helmholtz(line, np.ones(5)), ArgumentError, "wavenumber is an array"),
        (lambda: pinn.Helmholtz(line, lambda x: np.ones((3, 2))), ShapeError, r"wavenumber\(x\)"),
        (lambda: pinn.Helmholtz(line, lambda x: ["a"] * len(x)), DtypeError, "wavenumber"),
        (lambda: pinn.Helmholtz(line, float("nan")), ArgumentError, "NaN"),
        (lambda: pinn.Helmholtz(line, 1.0, 0.0, [3.0]), ArgumentError, "boundary holds a float"),
        (
            lambda: pinn.Helmholtz(line, 1.0, 0.0, pinn.Dirichlet(0.0, where="top")),
            ArgumentError,
            "'left', 'right'",
        ),
        (lambda: pinn.Helmholtz(line, 1.0, 1j, complex_field=False), ArgumentError, "complex_field"),
        (lambda: pinn.Helmholtz(line, 1.0, 0.0, pinn.Periodic(axis=1)), ArgumentError, "axis = 1"),
        (
            lambda: pinn.Helmholtz(pinn.Disk((0, 0), 1), 1.0, 0.0, pinn.PML(0.1)),
            ArgumentError,
            "sides of a box",
        ),
        (lambda: pinn.Helmholtz(line, 1.0, 0.0, pinn.PML(0.6)), ArgumentError, "fill the whole"),
        (lambda: pinn.Helmholtz(line, 1.0, 0.0, [pinn.PML(0.1), pinn.PML(0.2)]), ArgumentError, "two PML"),
        (lambda: pinn.Helmholtz(square, 1.0, 0.0, pinn.Interface(line)), ShapeError, "region"),
        (
            lambda: pinn.Helmholtz(square, 1.0, 0.0, pinn.Interface(pinn.Disk((5, 5), 1))),
            ArgumentError,
            "rim",
        ),
        (
            lambda: pinn.Helmholtz(square, 1.0, 0.0, [pinn.Dirichlet(0.0, hard=True)] * 2),
            ArgumentError,
            "two hard",
        ),
        (
            lambda: pinn.Helmholtz(
                square, 1.0, 0.0, pinn.Dirichlet(lambda x: x[:, 0], where="left", hard=True)
            ),
            ArgumentError,
            "needs all sides",
        ),
        (
            lambda: pinn.Helmholtz(
                square, 1.0, 0.0, pinn.Dirichlet(lambda x: np.abs(x[:, 0] - 0.3), hard=True)
            ),
            ArgumentError,
            "polynomial",
        ),
        (
            lambda: pinn.Helmholtz(line, pinn.Unknown(1.0), 0.0, pinn.PML(0.1)),
            ArgumentError,
            "Unknown beside a PML",
        ),
        (lambda: pinn.Helmholtz(line, 1.0, data=pinn.Data([1.0], [1.0])), ShapeError, "points of 'data'"),
        (lambda: pinn.Dirichlet(0.0, weight=0.0), ArgumentError, "weight = 0.0"),
        (lambda: pinn.Periodic(where="left"), ArgumentError, "where"),
    ]
    for call, error, words in cases:
        with pytest.raises(error, match=words):
            call()


@pytest.mark.parametrize(
    "end", [pinn.Sommerfeld(where="right"), pinn.PML(0.3, where="right")], ids=["rim", "layer"]
)
@pytest.mark.parametrize("k", [K, lambda x: K + x[:, 0]], ids=["number", "function"])
def test_a_negative_wavenumber_is_the_other_time_convention(end, k):
    """Of the conjugate field every residual is the conjugate one; a layer took the size of k and let waves in."""
    turned = (lambda x: -k(x)) if callable(k) else -k
    ahead, back = (wave_network(weights=((1.0, 0.2), (0.3 * s, s))) for s in (1.0, -1.0))
    given = [
        raw(
            pinn.Helmholtz(pinn.Interval(0, 1), way, boundary=[pinn.Dirichlet(1.0, where="left"), end]),
            network,
        )
        for way, network in ((k, ahead), (turned, back), (k, back))
    ]
    assert given[0] == pytest.approx(given[1], rel=1e-12)
    assert given[0] != pytest.approx(given[2], rel=1e-3)
