"""What is no number, domain or condition is refused by the argument's name, and nothing is cast to what it is not."""

from __future__ import annotations

import numpy as np
import pytest

from scanfield import optimize, pinn
from scanfield.errors import ArgumentError, DtypeError, ScanfieldError, ShapeError
from scanfield.pinn import files, solutions
from scanfield.pinn.fit import relative_error
from scanfield.pinn.formula import number
from scanfield.pinn.solutions import manufactured

LINE = pinn.Interval(0, 1)
WAVE = pinn.solutions.plane_wave(10.0)
GIVEN = pinn.PointSet([[0.3], [0.7]], {"ends": ([[0.0], [1.0]], [[-1.0], [1.0]])})
HALF = pinn.Interface(pinn.Interval(0, 0.5), 2.0)
TWICE = ("left", "left")
HARD = (pinn.Dirichlet(1.0, hard=True), pinn.Robin(pinn.Unknown(1.0, "c")))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: pinn.Interval("a", 1), DtypeError, "lower"),
        (lambda: pinn.Interval(0, 1j), DtypeError, "upper: came complex"),
        (lambda: pinn.Box(0, 1), ShapeError, "lower = 0: a number for each axis"),
        (lambda: pinn.Disk(0, 1), ShapeError, "center = 0"),
        (lambda: pinn.Disk((0, 0), "a"), ArgumentError, "radius = 'a'"),
        (lambda: pinn.Difference(LINE, 2), ArgumentError, "hole is a int"),
        (lambda: pinn.PointSet([["a"]]), DtypeError, "interior"),
        (lambda: pinn.PointSet([[1.0], [2.0, 3.0]]), ShapeError, "interior"),
        (lambda: pinn.Dirichlet(1.0, weight="a"), ArgumentError, "weight = 'a'"),
        (lambda: pinn.Impedance(WAVE), ArgumentError, r"the field of the solution 'plane wave', and .*\(wave.impedance\)"),
        (lambda: pinn.Neumann(WAVE), ArgumentError, r"Neumann takes its slope: give Neumann\(wave.normal\)"),
        (lambda: pinn.Neumann(WAVE.impedance), ArgumentError, "the impedance data of .* give Neu"),
        (lambda: pinn.Dirichlet(WAVE.normal), ArgumentError, r"the slope of .* give Dirichlet\(wave\)"),
        (lambda: pinn.Robin(1.0, WAVE), ArgumentError, r"give lambda x, n: wave.normal\(x, n\) \+ c \* wave\(x\)"),
        (lambda: pinn.Robin(WAVE, 1.0), ArgumentError, "coefficient is a known field"),
        (lambda: pinn.Helmholtz(LINE, WAVE), ArgumentError, "give wave.wavenumber"),
        (lambda: pinn.Helmholtz(LINE, 1.0, WAVE), ArgumentError, "give wave.source"),
        (lambda: pinn.Unknown("a"), ArgumentError, "start = 'a': a finite real number"),
        (lambda: pinn.Unknown(1j), ArgumentError, "start = 1j"),
        (lambda: pinn.Unknown(1.0, 3), ArgumentError, "name = 3"),
        (lambda: pinn.Helmholtz(LINE, pinn.Unknown(1.0, "s", "a")), DtypeError, "times of 's'"),
        (lambda: pinn.Helmholtz(LINE, pinn.Unknown(1.0, plus=[1.0, 2.0])), ArgumentError, "plus of 'wavenumber' is an array"),
        (lambda: pinn.Network.create(pinn.RawCoordinates(1), xp="torch"), ArgumentError, "import torch, then xp=torch"),
        (lambda: pinn.Dirichlet(1.0, where=()), ArgumentError, r"where = \(\): the name of a part, a list"),
        (lambda: pinn.Dirichlet(1.0, where=abs), ArgumentError, "where = <built-in function abs>: the name"),
        (lambda: pinn.PML("a"), ArgumentError, "width = 'a'"),
        (lambda: pinn.FourierFeatures(frequencies=[1.0, 2.0]), ShapeError, r"came shape \(2,\)"),
        (lambda: pinn.FourierFeatures(frequencies=[[1.0, np.nan]]), ShapeError, "expected finite numbers"),
        (lambda: pinn.Helmholtz(LINE, 0.0, boundary=pinn.PML(0.2)), ArgumentError, "its real part is zero; a PML"),
        (lambda: pinn.Helmholtz(LINE, 2j, boundary=pinn.PML(0.2)), ArgumentError, "wavenumber: its real part"),
        (lambda: pinn.PML(0.1, reflection=1.0), ArgumentError, "reflection = 1.0"),
        (lambda: pinn.Interface(LINE, where="left"), ArgumentError, "where = 'left'"),
        (lambda: pinn.Interface(LINE, ratio=0.0), ArgumentError, "ratio = 0.0: a finite number other than 0"),
        (lambda: pinn.Interface(LINE, ratio=np.nan), ArgumentError, "ratio = nan"),
        (lambda: pinn.Interface(LINE, ratio="2"), ArgumentError, "ratio = '2'"),
        (lambda: pinn.Interface(pinn.PointSet([[0.5]])), ArgumentError, "region: a PointSet has no rim"),
        (lambda: pinn.Difference(LINE, pinn.PointSet([[0.5]])), ArgumentError, "a PointSet has no shape"),
        (lambda: pinn.PointSet([[0.5]], {"end": ([[0.0]], [[1.0], [1.0]])}), ShapeError, "has 1 points and 2 normals"),
        (lambda: pinn.Helmholtz(
            LINE, pinn.Unknown(1.0, "s"), boundary=pinn.Robin(pinn.Unknown(1.0, "s"), 0.0)
        ), ArgumentError, "name = 's': two unknowns"),
        (lambda: manufactured(1.0, [1, 1, 1, 1]), ArgumentError, "one to three numbers"),
        (lambda: relative_error(np.ones(3), np.zeros(3)), ArgumentError, "exact: it is zero"),
        (lambda: pinn.Helmholtz(LINE, 1.0, boundary=3), ArgumentError, "boundary is 3"),
        (lambda: pinn.Helmholtz(LINE, 1.0, data=3), ArgumentError, "data is 3"),
        (lambda: pinn.Helmholtz(LINE, 1.0, data=[3]), ArgumentError, "data holds a int"),
        (lambda: pinn.Helmholtz(LINE, 1.0, data=pinn.Data([["a"]], [1])), DtypeError, "points of 'data'"),
        (lambda: pinn.Helmholtz(LINE, 1.0, data=pinn.Data([[0.5]], [1], None)), ArgumentError, "weight of 'data'"),
        (lambda: pinn.Helmholtz(LINE, 1.0, field_scale="a"), ArgumentError, "field_scale = 'a'"),
        (lambda: pinn.Helmholtz(LINE, 1.0, complex_field="no"), ArgumentError, "complex_field = 'no'"),
        (lambda: pinn.Helmholtz(LINE, 1.0, boundary=HARD), ArgumentError, "c is Unknown beside a hard"),
        (lambda: pinn.Helmholtz(LINE, 1.0, 1e200), ArgumentError, "the equation has the size 1e.200"),
        (lambda: pinn.Helmholtz(LINE, 1.0, field_scale=1e-200), ArgumentError, "the field has the size 1e-200"),
        (lambda: pinn.Helmholtz(LINE, 1e200), ArgumentError, "wavenumber = 1e"),
        (lambda: pinn.Disk(1.0), ArgumentError, "^Disk: missing a required argument: 'radius'; it takes center, radius"),
        (lambda: pinn.Ball((0, 0), r=1.0), ArgumentError, "^Ball: unknown keyword 'r'; it takes center, radius"),
        (lambda: pinn.Box(0, 0, 1, 1), ArgumentError, "^Box: too many positional arguments; it takes lower, upper"),
        (lambda: pinn.Interval(1), ArgumentError, "^Interval: missing a required argument: 'upper'"),
        (lambda: pinn.Difference(LINE), ArgumentError, "^Difference: missing a required argument: 'hole'"),
        (pinn.PML, ArgumentError, "^PML: missing a required argument: 'width'"),
        (pinn.PointSet, ArgumentError, "^PointSet: missing a required argument: 'interior'"),
        (lambda: pinn.Sommerfeld(1.0), ArgumentError, "^Sommerfeld: too many positional arguments; it takes where"),
        (lambda: pinn.Dirichlet(1.0, on="left"), ArgumentError, "^Dirichlet: unknown keyword 'on'; .*it takes value, hard"),
        (lambda: pinn.Helmholtz(LINE, k=1.0), ArgumentError, "Helmholtz: unknown keyword 'k'; it takes domain, wave"),
        (lambda: pinn.Helmholtz(LINE), ArgumentError, "Helmholtz: missing a required argument: 'wavenumber'; it takes"),
        (lambda: pinn.train(1, 2, n_points=3), ArgumentError, "train: unknown keyword 'n_points'; did you mean 'points'"),
        (lambda: pinn.Network.create(pinn.RawCoordinates(1), widths=3), ArgumentError, "Network.create: unknown keyword"),
        (lambda: pinn.FourierFeatures(1, 2, scales=1.0), ArgumentError, "FourierFeatures: .* did you mean 'scale'"),
        (lambda: pinn.Helmholtz(pinn.Interval(0, 1e200), 1.0), ArgumentError, "its size is 1e"),
        (lambda: pinn.Helmholtz(GIVEN, [1.0, 2.0], boundary=pinn.Sommerfeld()), ArgumentError, "is an array.*'somm"),
        (lambda: pinn.Helmholtz(
            GIVEN, pinn.Unknown(1.0, times=[1.0, 2.0]), boundary=pinn.Impedance(1.0)
        ), ArgumentError, "wavenumber is an array, at the points inside: 'impedance'"),
        (lambda: pinn.Helmholtz(LINE, 1.0, boundary=pinn.PML(0.2, where=TWICE)), ArgumentError, "'left' stands twice"),
        (lambda: pinn.Helmholtz(LINE, 1.0, boundary=pinn.Neumann(1.0, where=TWICE)), ArgumentError, "where = .* twice"),
        (lambda: pinn.Helmholtz(LINE, 1.0, boundary=[HALF, HALF]), ArgumentError, "two interfaces have the region"),
        (lambda: pinn.Helmholtz(LINE, 1.0, boundary=[pinn.Periodic()] * 2), ArgumentError, r"Periodic on the axes \[0, 0\]"),
        (lambda: pinn.Dirichlet(1.0, where=[]), ArgumentError, r"where = \[\]: the name of a part, a list"),
        (lambda: pinn.Dirichlet(1.0, where=3), ArgumentError, "where = 3: the name of a part, a list"),
        (lambda: pinn.PML(0.2, where=()), ArgumentError, r"where = \(\): the name"),
        (lambda: pinn.Helmholtz(pinn.PointSet([[0.5]]), 1.0, boundary=pinn.Neumann(1.0)), ArgumentError, "the domain has no"),
        (lambda: pinn.Helmholtz(LINE, 1.0, boundary=pinn.Dirichlet([1.0], hard=True)), ArgumentError, "value is an array"),
        (lambda: pinn.Helmholtz(LINE, 1.0, data=pinn.Data([[np.nan]], [1.0])), ArgumentError, "points of 'data': NaN or inf"),
        (lambda: pinn.Helmholtz(LINE, pinn.Unknown(0.0), 1.0), ArgumentError, "start = 0.0 of 'wavenumber'.* square"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)  # fmt: skip
def test_named(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_data_of_a_known_field_of_the_right_kind():
    """An `Impedance(wave)` took the field's values for its data: an error of 1.0, and no word."""
    for condition in (
        pinn.Dirichlet(WAVE),
        pinn.Neumann(WAVE.normal),
        pinn.Impedance(WAVE.impedance),
        pinn.Robin(0.0, WAVE.normal),
        pinn.Robin(-10j, WAVE.impedance),
    ):
        problem = pinn.Helmholtz(LINE, 10.0, boundary=condition, field_scale=1.0)
        _, term = problem.terms(problem.draw(4))
        (piece,) = term.pieces
        u = WAVE(piece.points)
        value = 0.0 if piece.value is None else piece.value * u
        slope = 0.0 if piece.first is None else piece.first[:, 0] * 10j * u
        wanted = 0.0 if term.target is None else term.target
        np.testing.assert_allclose(value + slope, wanted, atol=1e-12)


@pytest.mark.parametrize("callbacks", [print, [3], "ab", None], ids=repr)
def test_callbacks_that_are_no_functions_are_refused_before_training(callbacks):
    problem = pinn.Helmholtz(LINE, 2.0, boundary=pinn.Dirichlet(1.0))
    network = pinn.Network.create(pinn.FourierFeatures(1, 4, scale=1.0), hidden=[], outputs=1)
    with pytest.raises(ArgumentError, match=r"^callbacks = .*: a sequence of functions"):
        pinn.train(problem, network, points=5, iterations=1, progress=False, callbacks=callbacks)


def test_a_network_shows_the_activation_that_it_has():
    features = pinn.FourierFeatures(1, 4, scale=1.0)
    assert "activation='sin'" in repr(pinn.Network.create(features, hidden=[3], activation="sin"))
    assert "activation" not in repr(pinn.Network.create(features, hidden=[]))


def test_a_function_that_writes_to_its_argument_moves_no_point():
    def spoils(x, normals=None):
        found = x[:, 0] + 1.0
        x[...] = 7.0
        return found

    def spoils_both(x, normals):
        normals[...] = 0.0
        return spoils(x)

    made = [
        pinn.Helmholtz(LINE, k, source, pinn.Neumann(value))
        for k, source, value in ((spoils, spoils, spoils_both), *[(lambda x: x[:, 0] + 1.0,) * 3])
    ]
    drawn = [problem.terms(problem.draw(9)) for problem in made]
    for spoilt, term in zip(*drawn, strict=True):
        assert np.array_equal(spoilt.target, term.target)
        for got, want in zip(spoilt.pieces, term.pieces, strict=True):
            for x, y in zip(got, want, strict=True):
                assert x is y is None or np.array_equal(x, y)


@pytest.mark.parametrize("dtype", ["float32", np.float32, np.dtype("float32")], ids=repr)
def test_a_dtype_by_name_or_as_the_library_has_it(dtype):
    """A dtype that equals its own name was taken for one, and failed as an attribute of NumPy."""
    assert pinn.Network.create(pinn.RawCoordinates(1), dtype=dtype).dtype == "float32"
    assert pinn.Workspace(4, 2, [3], dtype=dtype).dtype == "float32"


def test_unknowns_that_begin_at_zero_and_move():
    """Where a boundary has k itself, or k^2 a part that follows it by the first power, zero is a good beginning."""
    pinn.Helmholtz(LINE, pinn.Unknown(0.0), 1.0, pinn.Sommerfeld(where="right"))
    pinn.Helmholtz(LINE, pinn.Unknown(0.0, plus=2.0), 1.0)
    pinn.Helmholtz(LINE, 1.0, 1.0, pinn.Robin(pinn.Unknown(0.0, "c")))


def test_numbers_of_numpy_are_numbers(tmp_path):
    """Counts reached a checkpoint's text, which dies of them; others were said to be none."""
    problem = pinn.Helmholtz(LINE, 2.0, boundary=pinn.Dirichlet(1.0), complex_field=np.bool_(False))
    network = pinn.Network.create(pinn.FourierFeatures(1, 4, scale=1.0), hidden=[], outputs=1)
    counts = {"points": 5, "boundary": 2, "seed": 0, "chunk": 4, "held_out": 5, "resample": 2, "record": 1}
    counts |= {"patience": 9, "checkpoint_every": 1, "iterations": 3}
    settings = {name: np.int64(count) for name, count in counts.items()} | {"adaptive": np.bool_(False)}
    optimizer = optimize.LevenbergMarquardt(damping=np.float32(0.5), tries=np.int64(5))
    fit = pinn.train(problem, network, checkpoint=tmp_path / "run", optimizer=optimizer, **settings)
    settings = counts | {"optimizer": optimize.LevenbergMarquardt(damping=0.5, tries=5)}
    again = pinn.train(problem, network, resume=tmp_path / "run", **settings)
    assert fit.history == again.history
    assert solutions.green(np.int64(5), (0.0,))([[1.0]]) == solutions.green(5.0, (0.0,))([[1.0]])
    k, x = np.float32(5.1), [[0.3], [0.8]]  # a number of its own, but no arithmetic in its precision
    np.testing.assert_array_equal(solutions.green(k, (0.0,))(x), solutions.green(float(k), (0.0,))(x))
    sines = [solutions.manufactured(one, (1.0,)).source(np.asarray(x)) for one in (k, float(k))]
    np.testing.assert_array_equal(*sines)
    media = [solutions.two_media(kind(5), kind(9), 0.5)(x) for kind in (np.uint8, float)]
    np.testing.assert_array_equal(*media)
    assert solutions.hard_disk(np.float32(2.0), np.int64(1), total=np.bool_(True)).dimensions == 2
    assert number(np.float32(2.0), "k", {}) == 2.0 and isinstance(number(np.int64(2), "k", {}), float)
    out = np.zeros(2)
    pinn.mul_scalar_out(np.ones(2), np.int64(3), out)
    assert out.tolist() == [3.0, 3.0]
    for true in (True, np.bool_(True)):
        with pytest.raises(ArgumentError, match=r"k = .*True"):
            number(true, "k", {})


def test_a_reducer_that_is_none(tmp_path):
    problem = pinn.Helmholtz(LINE, 2.0, boundary=pinn.Dirichlet(1.0))
    network = pinn.Network.create(pinn.FourierFeatures(1, 4, scale=1.0), hidden=[], outputs=1)
    with pytest.raises(ArgumentError, match="reducer is a int: None or a reducer"):
        pinn.train(problem, network, points=5, reducer=3)
    (tmp_path / "mine.toml").write_text(files.source("square-4pi") + "reducer = 3\n")
    with pytest.raises(ArgumentError, match=r"\[training\] reducer: allowed are"):
        files.load_problem(tmp_path / "mine.toml")


def test_points_that_are_no_real_numbers_are_refused(tmp_path):
    problem = pinn.Helmholtz(LINE, 2.0, boundary=pinn.Dirichlet(1.0))
    network = pinn.Network.create(pinn.FourierFeatures(1, 4, scale=1.0), hidden=[], outputs=1)
    for wide in (np.zeros((3, 2)), np.zeros(3)):
        with pytest.raises(ShapeError, match=r"^x has shape .*: \(n, 1\) is expected"):
            problem.field(network, wide)
    for bad in (np.asarray([[1j]]), [["a"]], None):
        with pytest.raises(DtypeError, match=r"^x: came"):
            problem.field(network, bad)
    with pytest.raises(ArgumentError, match="it is a folder"):
        pinn.train(problem, network, points=5, iterations=1, checkpoint=tmp_path, progress=False)


ROWS = np.zeros((300, 2))


@pytest.mark.parametrize(
    ("name", "call"),
    [
        *(
            (name, lambda problem, network, name=name: pinn.train(problem, network, **{"progress": False, name: ROWS}))
            for name in ("points", "boundary", "iterations", "sampling", "seed", "weights", "adaptive", "tolerance", "record")
        ),
        ("complex_field", lambda *_: pinn.Helmholtz(LINE, 1.0, complex_field=ROWS)),
        ("radius", lambda *_: pinn.Disk((0, 0), ROWS)),
        ("start", lambda *_: pinn.Unknown(ROWS)),
        ("lower", lambda *_: pinn.Box(ROWS, (1, 1))),
        ("activation", lambda *_: pinn.Network.create(pinn.RawCoordinates(1), activation=ROWS)),
        ("features", lambda *_: pinn.FourierFeatures(1, ROWS, scale=1.0)),
        ("direction", lambda *_: pinn.solutions.plane_wave(1.0, ROWS)),
    ],
)  # fmt: skip
def test_an_array_where_none_belongs_is_told_by_its_shape(name, call):
    """All its rows were printed."""
    problem = pinn.Helmholtz(LINE, 2.0, boundary=pinn.Dirichlet(1.0))
    network = pinn.Network.create(pinn.FourierFeatures(1, 4, scale=1.0), hidden=[], outputs=1)
    with pytest.raises(ScanfieldError, match=f"^{name}") as refused:
        call(problem, network)
    words = str(refused.value)
    assert "(300, 2)" in words and "\n" not in words and len(words) < 200


@pytest.mark.parametrize("value", ["a", 1.5, True, 0])
@pytest.mark.parametrize("name", ["iterations", "boundary", "held_out", "resample", "patience", "record"])
def test_counts(name, value):
    problem = pinn.Helmholtz(LINE, 2.0, boundary=pinn.Dirichlet(1.0))
    network = pinn.Network.create(pinn.FourierFeatures(1, 4, scale=1.0), hidden=[], outputs=1)
    with pytest.raises(ScanfieldError, match=f"^{name}: {value!r}; allowed is an integer"):
        pinn.train(problem, network, points=5, progress=False, **{name: value})


def test_the_diagnosis_does_not_count_modes_without_end():
    """A long box has k L / pi modes along each axis; one with more than can be looked at has no diagnosis of them."""
    problem = pinn.Helmholtz(pinn.Interval(0, 1e12), 2.0, boundary=pinn.Dirichlet(1.0))
    network = pinn.Network.create(pinn.FourierFeatures(1, 2, scale=1.0), hidden=[], outputs=1)
    with pytest.warns(pinn.DiagnosisWarning):
        fit = pinn.train(problem, network, points=5, iterations=1, progress=False)
    assert not any("eigenvalue" in words for words in fit.warnings)


@pytest.mark.parametrize("wavenumber", [0.0, 1e-100, 1e-200])
@pytest.mark.parametrize("value", [0.0, 1e-170, 1e-320])
def test_scales_of_what_is_next_to_nothing(wavenumber, value):
    """Squared they were zero, and what was divided by them raised a ZeroDivisionError."""
    problem = pinn.Helmholtz(LINE, wavenumber, value, pinn.Dirichlet(value))
    assert problem.field_scale == 1.0 and problem.equation_scale == 1.0
    assert all(term.weight == 1.0 for term in problem.terms(problem.draw(4)))


@pytest.mark.parametrize(
    ("points", "more", "error", "words"),
    [
        ((3, 2), {}, ShapeError, r"one: pieces with \[2, 3\] points"),
        ((0, 0), {}, ShapeError, "one: no points"),
        ((3, 3), {"wavenumber": pinn.Dependence((None,))}, ArgumentError, "wavenumber has 1 factors for 2 pieces"),
        ((3, 3), {"wavenumber": pinn.Dependence((None, None), 0)}, ArgumentError, "wavenumber has power 0"),
        ((3, 3), {"wavenumber": pinn.Dependence((None, None), True)}, ArgumentError, "wavenumber has power True"),
    ],
)  # fmt: skip
def test_terms(points, more, error, words):
    network = pinn.Network.create(pinn.FourierFeatures(1, 4, scale=1.0), hidden=[], outputs=1)
    pieces = tuple(pinn.Piece(np.ones((n, 1)), value=np.ones(n)) for n in points)
    with pytest.raises(error, match=words):
        pinn.prepare_terms([pinn.Term("one", pieces, **more)], network)


def test_terms_prepared_for_another_network():
    features = pinn.FourierFeatures(1, 4, scale=1.0)
    one, two = (pinn.Network.create(features, hidden=[], outputs=outputs) for outputs in (1, 2))
    prepared = pinn.prepare_terms([pinn.Term("one", (pinn.Piece(np.ones((3, 1)), value=np.ones(3)),))], one)
    with pytest.raises(
        ArgumentError, match="prepared for 1 outputs in float64, the network has 2 in float64"
    ):
        pinn.prepare_terms(prepared, two)


def test_hard_values_that_vary_on_a_round_boundary_have_no_extension():
    with pytest.raises(ArgumentError, match=r"hard = True with values that vary .*; use hard=False"):
        pinn.Helmholtz(pinn.Disk((0.0, 0.0), 1.0), 2.0, boundary=pinn.Dirichlet(lambda x: x[:, 0], hard=True))
    both = [pinn.Dirichlet(value, where="left", hard=True) for value in (0.0, 1.0)]
    with pytest.raises(ArgumentError, match="two hard Dirichlet conditions on 'left'; one can hold"):
        pinn.Helmholtz(pinn.Interval(0, 1), 2.0, boundary=both)
