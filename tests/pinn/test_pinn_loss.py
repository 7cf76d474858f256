"""Losses and gradients: against nested automatic differentiation, against differences, and what must not change them."""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import numpy as np
import pinn_draws as draws
import pytest
from arrays import deviation

import scanfield
from scanfield import pinn
from scanfield.pinn.activations import ACTIVATIONS
from scanfield.pinn.placing import place_terms


def leave_out(backend: str, test: str, parameters: dict[str, Any]) -> bool:
    # A training loop computes at every step: Dask's arrays are not for it. JAX compiles for seconds for each kind.
    dear = backend == "jax" and parameters.get("activation") in ("sin", "swish", "softplus")
    return backend == "dask" or dear


def flat(library: Any, gradients: dict[str, Any]) -> dict[str, np.ndarray]:
    found = {name: library.numpy(g) for name, g in gradients.items() if name != "points"}
    for t, places in enumerate(gradients.get("points", ())):
        found |= {f"points {t} {p}": library.numpy(g) for p, g in enumerate(places)}
    return found


def compare(library: Any, network: Any, terms: Any, given: Any, tolerance: float, **options: Any) -> None:
    nested = importlib.import_module("pinn_nested")
    loss, raws, gradients = nested.loss(network, terms, given)
    found = pinn.loss_and_grad(network, terms, wavenumber=given, points=True, **options)
    assert deviation(library.numpy(found.loss), library.numpy(loss)) < tolerance
    for name, raw in raws.items():
        assert deviation(library.numpy(found.terms[name]), library.numpy(raw)) < tolerance, name
    have, want = flat(library, found.gradients), flat(library, gradients)
    assert list(have) == list(want)
    for name in want:
        assert deviation(have[name], want[name], floor=1e-3) < tolerance, name


@pytest.mark.backend("torch")
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("d", [1, 2, 3])
def test_gradients_are_those_of_double_backward(library: Any, d: int, activation: str) -> None:
    """Each kind of term by itself, and all together."""
    network = draws.network(library, d, activation=activation)
    for kind in draws.KINDS:
        terms = draws.terms(library, d, kinds=(kind,))
        compare(library, network, terms, draws.unknowns((kind,)), 1e-12, chunk=4)
    compare(library, network, draws.terms(library, d), dict(draws.UNKNOWNS), 1e-12, chunk=4)


@pytest.mark.backend("torch")
def test_gradients_of_a_problems_own_terms_are_those_of_double_backward(library: Any) -> None:
    """A layer, an interface, a period with a phase, held, open and robin sides, a source, data, and unknown numbers."""
    inside = pinn.Disk((0.5, 0.5), 0.2)
    data = pinn.Data([[0.3, 0.4], [0.6, 0.9]], [1.0, 2j])
    robin = pinn.Robin(
        pinn.Unknown(0.7, "c", times=lambda x: 1 + 1j * x[:, 1], plus=0.2), 0.1, where="bottom"
    )
    media = pinn.Unknown(5.0, times=lambda x: np.where(inside.contains(x), 1.2 + 0.1j, 1.0), plus=0.3)
    box = pinn.Box((0, 0), (1, 1))
    open_sides = pinn.Sommerfeld(where=("left", "right"))
    problems = [
        pinn.Helmholtz(box, media, 1j, [open_sides, robin, pinn.Dirichlet(0.5, where="top"), pinn.Interface(inside)], data),
        pinn.Helmholtz(
            box,
            4.0 + 0.2j,
            lambda x: x[:, 0],
            [pinn.PML(0.2, where="right"), pinn.Periodic(1, phase=0.4), pinn.Dirichlet(2.0, where="left", hard=True)],
        ),
    ]  # fmt: skip
    for problem in problems:
        network = draws.network(library, 2)
        terms = list(place_terms(problem.terms(problem.draw(12, 12)), network))
        compare(library, network, terms, dict(problem.unknowns) or None, 1e-12)


@pytest.mark.backend("torch")
@pytest.mark.parametrize("kind", ["frozen", "raw", "periodic"])
@pytest.mark.parametrize(("outputs", "hidden"), [(1, (5,)), (2, ()), (1, ())])
def test_other_embeddings_and_depths(library: Any, kind: str, outputs: int, hidden: Any) -> None:
    network = draws.network(library, 2, outputs=outputs, hidden=hidden, kind=kind)
    compare(library, network, draws.terms(library, 2), dict(draws.UNKNOWNS), 1e-12)


@pytest.mark.backend("torch")
def test_real_problem_of_a_real_field(library: Any) -> None:
    network = draws.network(library, 2, outputs=1)
    terms = draws.terms(library, 2, real=True)
    compare(library, network, terms, draws.unknowns(draws.KINDS, real=True), 1e-12)
    assert all(r.shape[1] == 1 for r in pinn.residuals(network, terms[:5]).values())


@pytest.mark.parametrize(("d", "activation"), list(zip([1, 2, 3, 2, 1], ACTIVATIONS, strict=True)))
def test_gradients_are_those_of_differences(library: Any, d: int, activation: str) -> None:
    network = draws.network(library, d, activation=activation)
    terms = draws.terms(library, d, kinds=draws.kinds_for(library))
    report = pinn.check_gradients(
        network, terms, wavenumber=dict(draws.UNKNOWNS), points=library.name == "numpy"
    )
    assert report.largest < 2e-8, str(report)
    assert "wavenumber" in report.deviations and "B" in report.deviations


@pytest.mark.parametrize("d", [1, 3])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.backend("numpy", "torch")
def test_kernels_that_write_compute_what_the_generic_ones_do(
    library: Any, d: int, activation: str, dtype: str
) -> None:
    network = draws.network(library, d, activation=activation, dtype=dtype)
    terms = draws.terms(library, d, n=37, dtype=dtype)
    given = dict(draws.UNKNOWNS)
    with scanfield.use(method="generic"):
        want = pinn.loss_and_grad(network, terms, wavenumber=given, points=True, chunk=16)
    for method in methods(library):
        with scanfield.use(method=method):
            found = pinn.loss_and_grad(network, terms, wavenumber=given, points=True, chunk=16)
        tolerance = {"float64": 1e-13, "float32": 2e-5}[dtype]
        have = flat(library, found.gradients)
        for name, g in flat(library, want.gradients).items():
            assert deviation(have[name], g, floor=1e-3) < tolerance, (method, name)
        assert deviation(library.numpy(found.loss), library.numpy(want.loss)) < tolerance


@pytest.mark.backend("torch")
def test_a_chunk_that_torch_compiles_computes_what_the_generic_one_does(library: Any) -> None:
    network = draws.network(library, 2)
    terms = draws.terms(library, 2, kinds=("operator",))
    with scanfield.use(method="generic"):
        want = flat(library, pinn.loss_and_grad(network, terms, points=True).gradients)
    with scanfield.use(method="torch.compile"):
        found = [flat(library, pinn.loss_and_grad(network, terms, points=True).gradients) for _ in range(2)]
    for name, g in want.items():
        assert deviation(found[0][name], g) < 1e-13, name
        assert np.array_equal(found[0][name], found[1][name]), name


def methods(library: Any) -> list[str]:
    if library.name == "torch":
        return ["torch.out"]
    numba = importlib.util.find_spec("numba") is not None
    return ["generic.out", "numpy.numba"] if numba else ["generic.out"]


def test_chunks_change_nothing_but_rounding(library: Any) -> None:
    network = draws.network(library, 2)
    terms = draws.terms(library, 2, n=20, kinds=("pde", "periodic"))
    want = pinn.loss_and_grad(network, terms, points=True)
    for chunk in (7,) if library.name == "jax" else (1, 7, 10, 19, 20, 21):
        found = pinn.loss_and_grad(network, terms, points=True, chunk=chunk)
        for have, g in zip(
            flat(library, found.gradients).values(), flat(library, want.gradients).values(), strict=True
        ):
            assert deviation(have, g) < 1e-13


def test_the_same_call_twice_is_the_same_bit_for_bit(library: Any, dtype: str) -> None:
    network = draws.network(library, 2, dtype=dtype)
    terms = draws.terms(library, 2, dtype=dtype, kinds=draws.kinds_for(library))
    runs = [pinn.loss_and_grad(network, terms, wavenumber=dict(draws.UNKNOWNS)) for _ in range(2)]
    for name in runs[0].gradients:
        left, right = (library.raw(run.gradients[name]) for run in runs)
        assert np.array_equal(left, right), name


def test_no_dtype_leaks(library: Any, dtype: str) -> None:
    network = draws.network(library, 2, dtype=dtype)
    terms = draws.terms(library, 2, dtype=dtype, kinds=draws.kinds_for(library))
    found = pinn.loss_and_grad(network, terms, wavenumber=dict(draws.UNKNOWNS), points=True)
    for name, g in found.gradients.items():
        for array in itertools.chain(*g) if name == "points" else [g]:
            assert library.dtype(array) == (draws.COMPLEX[dtype] if name == "admittance" else dtype), name
            assert name == "points" or library.on_device(array)
    assert all(library.dtype(value) == dtype for value in (found.loss, *found.terms.values()))


def test_terms_are_reported_raw_and_each_of_them(library: Any) -> None:
    """F088: contradicting conditions in a corner, weights of their own; the field is zero everywhere."""
    network = draws.network(library, 2, outputs=1)
    network = network.replace({name: 0.0 * value for name, value in network.parameters.items()})
    side = np.linspace(0.0, 1.0, 5)
    left, bottom = (library.array(np.stack(axes, 1)) for axes in ((0 * side, side), (side, 0 * side)))
    one = library.array(np.ones(5))
    terms = [
        pinn.Term("left", (pinn.Piece(left, value=one),), None, 3.0),
        pinn.Term("bottom", (pinn.Piece(bottom, value=one),), one, 10.0),
    ]
    found = pinn.loss_and_grad(network, terms)
    assert float(library.numpy(found.terms["left"])) == 0.0
    assert float(library.numpy(found.terms["bottom"])) == 1.0
    assert float(library.numpy(found.loss)) == pytest.approx(10.0)


def test_an_unknown_coefficient_has_its_gradient(library: Any) -> None:
    """F085: d loss / d (k^2) = 2 / N sum residual u."""
    embedding = pinn.PeriodicFeatures([2 * np.pi], 6)
    rng = np.random.default_rng(0)
    host = {"W0": rng.normal(size=(1, 12)), "b0": np.zeros(1)}
    network = pinn.Network({k: library.array(v) for k, v in host.items()}, embedding=embedding)
    x = library.array(np.linspace(0.0, 2.0, 50)[:, None])
    one = library.array(np.ones(50))
    piece = pinn.Piece(x, second=library.array(np.ones((50, 1))))
    term = pinn.Term("pde", (piece,), wavenumber=pinn.Dependence((one,), 1, "k2"))
    found = pinn.loss_and_grad(network, [term], wavenumber={"k2": 6.25})
    field = pinn.jet(network, x)
    u, end = library.numpy(field.value)[:, 0], library.numpy(field.second)[:, 0]
    want = 2.0 / 50 * np.sum((end + 6.25 * u) * u)
    assert float(library.numpy(found.gradients["k2"])) == pytest.approx(want, rel=1e-12)


def wave(library: Any, dtype: str) -> pinn.Network:
    """The field e^(3 i x), exactly."""
    B = np.array([[3.0 / (2.0 * np.pi)]])
    host = {"W0": np.array([[0.0, 1.0], [1.0, 0.0]]), "b0": np.zeros(2), "B": B}
    return pinn.Network(
        {name: library.array(value.astype(dtype)) for name, value in host.items()},
        embedding=pinn.FourierFeatures(frequencies=B),
    )


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_normals_and_imaginary_coefficients_have_their_signs(library: Any, sign: float, dtype: str) -> None:
    """F087, F089: a flux at one end, an impedance and a free complex coefficient at the other."""
    network = wave(library, dtype)

    def array(values: Any) -> Any:
        return library.array(np.array(values, draws.COMPLEX[dtype] if np.iscomplexobj(values) else dtype))

    x = array(np.linspace(0.1, 0.9, 9)[:, None])
    left, right, n_left, n_right = (array([[value]]) for value in (0.0, 1.0, -1.0, sign))
    coefficient = 2.0 + sign * 3j
    target = (3j + 2.0 + 3j) * np.exp(3j)
    terms = [
        pinn.Term("pde", (pinn.Piece(x, array([9.0] * 9), None, array(np.ones((9, 1)))),)),
        pinn.Term("flux", (pinn.Piece(left, None, n_left),), array([-3j * sign])),
        pinn.Term("impedance", (pinn.Piece(right, array([-3j]), n_right),)),
        pinn.Term("robin", (pinn.Piece(right, array([coefficient]), array([[1.0]])),), array([target])),
    ]
    found = pinn.loss_and_grad(network, terms).terms
    small = {"float64": 1e-24, "float32": 1e-10}[dtype]
    assert float(library.numpy(found["pde"])) < small
    for name in ("flux", "impedance", "robin"):
        raw = float(library.numpy(found[name]))
        assert raw < small if sign > 0 else raw == pytest.approx(36.0, rel=1e-5), name


def test_an_unknown_moves_by_its_own_gradient(library: Any, dtype: str) -> None:
    """Numbers, 0-d arrays, and whatever arithmetic with a gradient makes of them are taken."""
    network = wave(library, dtype)
    x = library.array(np.linspace(0.1, 0.9, 9, dtype=dtype)[:, None])
    one = library.array(np.ones((9, 1), dtype))
    terms = [pinn.Term("pde", (pinn.Piece(x, second=one),), wavenumber=pinn.Dependence((one[:, 0],), 2))]
    k: Any = 2.0
    for _ in range(60):
        k = k - 0.02 * pinn.loss_and_grad(network, terms, wavenumber=k).gradients["wavenumber"]
    assert float(k) == pytest.approx(3.0, rel=1e-6)


@pytest.mark.backend("torch")
def test_parameters_that_require_gradients_leave_no_graph(library: Any) -> None:
    network = draws.network(library, 1)
    network = network.replace({k: v.clone().requires_grad_() for k, v in network.parameters.items()})
    found = pinn.loss_and_grad(network, draws.terms(library, 1, kinds=("pde",)))
    assert not any(g.requires_grad for g in found.gradients.values()) and not found.loss.requires_grad


@pytest.mark.backend("jax")
def test_steps_of_one_shape_are_compiled_once(library: Any) -> None:
    """New parameters, weights, values and unknowns are no reason to compile again."""
    module = importlib.import_module("scanfield_jax.pinn_jets")
    network = draws.network(library, 2)
    terms = pinn.prepare_terms(draws.terms(library, 2, kinds=("pde", "free")), network)
    before = module._run._cache_size()
    for step in range(3):
        given = {"wavenumber": 1.0 + step, "admittance": 1.0 + 1j * step}
        found = pinn.loss_and_grad(network, terms._replace(weights=(step + 0.5, 2.0)), wavenumber=given)
        names = list(network.parameters)
        network = network.replace({k: network.parameters[k] - 1e-3 * found.gradients[k] for k in names})
    assert module._run._cache_size() == before + 1


@pytest.mark.backend("numpy", "strict")
def test_an_unknown_method_is_told_with_the_known_ones(library: Any) -> None:
    network = draws.network(library, 1)
    terms = draws.terms(library, 1, kinds=("data",))
    words = r"'generic\.recurrent' does not serve pinn on .* known are generic"
    with scanfield.use(method="generic.recurrent"), pytest.raises(scanfield.ArgumentError, match=words):
        pinn.loss_and_grad(network, terms)


# -- what is refused -------------------------------------------------------------------------------------------


def spoiled(library: Any, **changes: Any) -> list[pinn.Term]:
    (term,) = draws.terms(library, 2, kinds=("pde",))
    piece = term.pieces[0]._replace(**{k: v for k, v in changes.items() if k in pinn.Piece._fields})
    return [term._replace(pieces=(piece,), **{k: v for k, v in changes.items() if k in pinn.Term._fields})]


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (
            {"points": np.zeros((9, 3))},
            scanfield.ShapeError,
            r"pde: piece 0, points has shape \(9, 3\); expected \(9, 2\)",
        ),
        (
            {"value": np.zeros(8)},
            scanfield.ShapeError,
            r"pde: piece 0, value has shape \(8,\); expected \(9,\)",
        ),
        ({"first": np.zeros((9, 1))}, scanfield.ShapeError, "first has shape"),
        ({"second": np.zeros((9, 3))}, scanfield.ShapeError, r"expected \(9, 2\) or \(9, 1\)"),
        ({"target": np.zeros((9, 2))}, scanfield.ShapeError, "pde: target has shape"),
        ({"value": np.zeros(9, np.float32)}, scanfield.DtypeError, "float32; beside a network in float64"),
        ({"value": np.zeros(9, np.int64)}, scanfield.DtypeError, "int64"),
        ({"weight": -1.0}, scanfield.ArgumentError, "pde: weight -1.0"),
        ({"weight": float("nan")}, scanfield.ArgumentError, "weight nan"),
    ],
)
def test_a_bad_term_is_named(library: Any, changes: dict[str, Any], error: Any, words: str) -> None:
    network = draws.network(library, 2)
    changes = {k: library.array(v) if isinstance(v, np.ndarray) else v for k, v in changes.items()}
    with pytest.raises(error, match=words):
        pinn.loss_and_grad(network, spoiled(library, **changes))


def test_bad_lists_and_unknowns_are_named(library: Any) -> None:
    network = draws.network(library, 2)
    terms = draws.terms(library, 2, kinds=("pde", "free"))
    cases: list[tuple[Any, Any, str]] = [
        ([], None, "at least one"),
        (terms[0], None, r"pass \[term\]"),
        ([terms[0], terms[0]], None, "called 'pde'"),
        (terms, None, "depend on 'wavenumber'"),
        (terms, 2.0, "depend on 'admittance'"),
        (terms[:1], 2.0, "no term depends on 'wavenumber'"),
        ([terms[0]._replace(pieces=())], None, "without a piece"),
        ([terms[0]._replace(pieces=(pinn.Piece(terms[0].pieces[0].points),))], None, "no coefficient"),
    ]
    for given, wavenumber, words in cases:
        with pytest.raises(scanfield.ArgumentError, match=words):
            pinn.loss_and_grad(network, given, wavenumber=wavenumber)
    with pytest.raises(scanfield.ArgumentError, match="chunk"):
        pinn.loss_and_grad(network, terms[:1], chunk=0)
