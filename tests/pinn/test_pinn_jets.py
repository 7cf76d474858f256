"""Jets of the field, embeddings and networks: known fields, finite precision, seeds, and what is refused."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pinn_draws as draws
import pytest
from arrays import deviation

import scanfield
from scanfield import pinn


def leave_out(backend: str, test: str, parameters: dict[str, Any]) -> bool:
    # A training loop computes at every step: Dask's arrays are not for it. JAX compiles for seconds for each kind.
    dear = backend == "jax" and parameters.get("activation") in ("sin", "swish")
    return backend == "dask" or dear


def linear(library: Any, frequencies: Any, weights: Any, dtype: str = "float64") -> pinn.Network:
    """A field that is a sum of sines and cosines: rows of [sines | cosines]."""
    B, W = np.array(frequencies, dtype), np.array(weights, dtype)
    host = {"W0": W, "b0": np.zeros(len(W), dtype), "B": B}
    return pinn.Network(
        {name: library.array(value) for name, value in host.items()},
        embedding=pinn.FourierFeatures(frequencies=B),
    )


def test_laplacian_of_a_product_of_sines(library: Any) -> None:
    """F082: sin(pi x) sin(pi y), whose mixed derivative is not zero."""
    network = linear(library, [[0.5, 0.5], [-0.5, 0.5]], [[0.0, 0.0, 0.5, -0.5]])
    points = np.array([[0.25, 0.25], [0.3, 0.7], [-0.4, 0.2]])
    jet = pinn.jet(network, library.array(points))
    want = [-9.869604401089, -12.919479888784, 11.034553175933]
    assert np.max(np.abs(library.numpy(jet.second)[:, 0] - want)) < 1e-10
    u = np.sin(np.pi * points[:, 0]) * np.sin(np.pi * points[:, 1])
    assert np.max(np.abs(library.numpy(jet.value)[:, 0] - u)) < 1e-14


def test_a_feature_of_one_is_a_whole_wave(library: Any) -> None:
    """F083: the factor 2 pi is in, and sines come first."""
    network = linear(library, [[1.0]], [[1.0, 0.0]])
    jet = pinn.jet(network, library.array(np.array([[0.25], [0.1]])))
    for have, want in (
        (jet.value, (1.0, 0.587785252292)),
        (jet.first[0, ...], (0.0, 5.083203692315)),
        (jet.second, (-39.478417604357, -23.204831651685)),
    ):
        assert np.max(np.abs(library.numpy(have)[:, 0] - want)) < 1e-10


def quadratic(library: Any, form: Any) -> pinn.Network:
    """x^T A x for each output, to fourth order in a small step: a softplus unit along a direction and its mirror.

    softplus(t) + softplus(-t) = 2 log 2 + t^2 / 4 - t^4 / 96 + ...
    """
    step, rows, out = 1e-2, [], []
    for A in form:
        values, vectors = np.linalg.eigh(np.array(A))
        rows += [step * v for v in vectors.T for _ in (0, 1)]
        out.append([4.0 * value / (2.0 * step**2) for value in values for _ in (0, 1)])
    count = len(rows)
    W0 = np.array([row if i % 2 == 0 else -row for i, row in enumerate(rows)]) * np.sqrt(2.0)
    W1 = np.zeros((len(out), count))
    for i, coefficients in enumerate(out):
        W1[i, i * len(coefficients) : (i + 1) * len(coefficients)] = coefficients
    host = {"W0": W0, "b0": np.zeros(count), "W1": W1, "b1": np.zeros(len(out))}
    return pinn.Network(
        {name: library.array(value) for name, value in host.items()},
        embedding=pinn.RawCoordinates(2),
        activation="softplus",
    )


@pytest.mark.parametrize(
    ("form", "laplacian"),
    [
        ([[[0.0, 0.5], [0.5, 0.0]]], [0.0]),  # u = x y
        ([[[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, -1.0]]], [4.0, 0.0]),  # (x^2 + y^2, x^2 - y^2)
    ],
)
def test_laplacian_of_quadratic_fields(library: Any, form: Any, laplacian: Any) -> None:
    network = quadratic(library, form)
    points = np.array([[0.3, -0.2], [0.0, 0.0], [0.5, 0.7]])
    jet = pinn.jet(network, library.array(points))
    want = np.broadcast_to(laplacian, (3, len(form)))
    assert np.max(np.abs(library.numpy(jet.second) - want)) < 1e-3
    slopes = np.stack([2 * points @ np.array(A) for A in form], axis=-1)
    assert np.max(np.abs(np.moveaxis(library.numpy(jet.first), 0, 1) - slopes)) < 1e-3


@pytest.mark.backend("torch")
@pytest.mark.parametrize("kind", ["fourier", "raw", "periodic"])
@pytest.mark.parametrize("d", [1, 2, 3])
def test_jets_are_those_of_automatic_differentiation(library: Any, d: int, kind: str) -> None:
    nested = importlib.import_module("pinn_nested")
    network = draws.network(library, d, kind=kind)
    rng = np.random.default_rng(0)
    points, weights = (library.array(rng.normal(size=(11, d))) for _ in range(2))
    u, first, second = nested.jet(network, network.parameters, points.clone().requires_grad_())
    jet = pinn.jet(network, points, chunk=4)
    assert deviation(library.numpy(jet.value), library.numpy(u)) < 1e-13
    assert deviation(library.numpy(jet.first), library.numpy(first)) < 1e-13
    assert deviation(library.numpy(jet.second), library.numpy(second.sum(0))) < 1e-13
    weighted = pinn.jet(network, points, second=weights).second
    want = (weights.T[:, :, None] * second).sum(0)
    assert deviation(library.numpy(weighted), library.numpy(want)) < 1e-13


@pytest.mark.parametrize("order", [0, 1])
def test_lower_orders_are_the_same_numbers(library: Any, order: int) -> None:
    network = draws.network(library, 2)
    points = library.array(np.random.default_rng(0).normal(size=(7, 2)))
    whole, part = pinn.jet(network, points), pinn.jet(network, points, order=order)
    assert part.second is None and (part.first is None) == (order == 0)
    assert deviation(library.numpy(part.value), library.numpy(whole.value)) < 1e-14
    if order:
        assert deviation(library.numpy(part.first), library.numpy(whole.first)) < 1e-14


@pytest.mark.parametrize("activation", ["tanh", "sin", "swish"])
def test_float32_has_second_derivatives_worth_the_name(library: Any, activation: str) -> None:
    """F086: where finite differences have nothing left."""
    host = pinn.Network.create(
        pinn.FourierFeatures(2, 16, wavenumber=20.0), hidden=[64] * 3, activation=activation
    )
    points = np.random.default_rng(1).uniform(size=(200, 2))
    found = {}
    for dtype in ("float32", "float64"):
        narrow = {name: value.astype("float32").astype(dtype) for name, value in host.parameters.items()}
        network = pinn.Network(
            {name: library.array(value) for name, value in narrow.items()},
            embedding=host.embedding,
            activation=activation,
        )
        x = library.array(points.astype("float32").astype(dtype))
        jet = pinn.jet(network, x)
        one = library.array(np.ones((200, 1), dtype))
        gradients = pinn.loss_and_grad(network, [pinn.Term("pde", (pinn.Piece(x, second=one),))]).gradients
        found[dtype] = (library.numpy(jet.second), {k: library.numpy(g) for k, g in gradients.items()})
    assert deviation(found["float32"][0], found["float64"][0]) < 1e-4
    for name, g in found["float64"][1].items():
        assert deviation(found["float32"][1][name], g) < 1e-3, name


def test_a_seed_gives_the_same_network_on_every_library(library: Any, dtype: str) -> None:
    def create(**place: Any) -> pinn.Network:
        embedding = pinn.FourierFeatures(2, 6, wavenumber=4.0, seed=7)
        return pinn.Network.create(embedding, hidden=[5, 4], seed=7, dtype=dtype, **place)

    place = {} if library.device is None else {"device": library.device}
    here, host = create(xp=library.xp, **place), create()
    assert list(here.parameters) == list(host.parameters) == ["W0", "b0", "W1", "b1", "W2", "b2", "B"]
    for name, array in here.parameters.items():
        assert library.is_array(array) and library.dtype(array) == dtype and library.on_device(array)
        assert np.array_equal(library.raw(array), host.parameters[name]), name
    other = pinn.Network.create(here.embedding, hidden=[5, 4], seed=8, dtype=dtype)
    assert not np.array_equal(other.parameters["W0"], host.parameters["W0"])


@pytest.mark.parametrize("d", [1, 2, 3])
def test_frequencies_lie_on_the_circle_of_waves(d: int) -> None:
    """F094"""
    B = pinn.FourierFeatures(d, 32, wavenumber=20.0, seed=0).frequencies
    assert B.shape == (d, 32)
    assert np.max(np.abs(np.linalg.norm(2 * np.pi * B, axis=0) - 20.0)) < 1e-12
    assert len(np.unique(B.round(9), axis=1).T) == (2 if d == 1 else 32)
    other = pinn.FourierFeatures(d, 4000, scale=0.7, seed=0).frequencies
    assert np.std(other) == pytest.approx(0.7, rel=0.05)


def test_periodic_features_are_periodic_and_all_different() -> None:
    embedding = pinn.PeriodicFeatures([2.0, None, 0.5], 2)
    assert embedding.features == 12 and embedding.axes == (1,) and not embedding.trainable
    assert len(np.unique(embedding.frequencies, axis=1).T) == 12
    network = pinn.Network.create(embedding, hidden=[8])
    x = np.random.default_rng(0).normal(size=(5, 3))
    left, right = (pinn.jet(network, points) for points in (x, x + np.array([2.0, 0.0, -0.5])))
    for a, b in zip(left, right, strict=True):
        assert deviation(a, b) < 1e-11


def test_flatten_and_back(library: Any) -> None:
    network = draws.network(library, 2)
    vector = network.flatten()
    assert tuple(vector.shape) == (network.size,)
    back = network.unflatten(vector)
    assert list(back) == list(network.parameters)
    for name, array in network.parameters.items():
        assert np.array_equal(library.numpy(back[name]), library.numpy(array))
    assert np.array_equal(library.numpy(network.replace(back).flatten()), library.numpy(vector))
    with pytest.raises(scanfield.ShapeError, match=r"expected \(\d+,\)"):
        network.unflatten(vector[1:])


def test_no_points_have_an_empty_jet(library: Any) -> None:
    jet = pinn.jet(draws.network(library, 2), library.array(np.zeros((0, 2))))
    shapes = [tuple(part.shape) for part in jet]
    assert shapes == [(0, 2), (2, 0, 2), (0, 2)]


def test_what_does_not_fit_is_named(library: Any) -> None:
    network = draws.network(library, 2)
    good = dict(network.parameters)
    cases: list[tuple[dict[str, Any], Any, str]] = [
        ({k: v for k, v in good.items() if k != "b1"}, scanfield.ArgumentError, "expected W0, b0, W1, b1"),
        ({**good, "C": good["B"]}, scanfield.ArgumentError, "came .*, C"),
        ({**good, "W1": good["W0"]}, scanfield.ShapeError, r"W1 has shape \(7, 10\); expected \(out, 7\)"),
        ({**good, "b0": good["b1"]}, scanfield.ShapeError, r"b0 has shape \(6,\); expected \(7,\)"),
        ({**good, "B": good["W0"]}, scanfield.ShapeError, "B has shape"),
        (
            {**good, "b0": library.array(np.zeros(7, np.float32))},
            scanfield.DtypeError,
            "b0 is float32; allowed is one of float32 and float64 for all",
        ),
        ({**good, "b0": 1.0}, scanfield.BackendError, "b0: expected an array"),
    ]
    for parameters, error, words in cases:
        with pytest.raises(error, match=words):
            pinn.Network(parameters, embedding=network.embedding)
    points = library.array(np.zeros((4, 2)))
    for bad, error, words in (
        (points[:, :1], scanfield.ShapeError, r"points has shape \(4, 1\); expected \(n, 2\)"),
        (library.array(np.zeros((4, 2), np.float32)), scanfield.DtypeError, "points is float32"),
    ):
        with pytest.raises(error, match=words):
            pinn.jet(network, bad)
    with pytest.raises(scanfield.ShapeError, match=r"second has shape \(3, 2\); expected \(4, 2\)"):
        pinn.jet(network, points, second=points[:3, :])
    with pytest.raises(scanfield.ArgumentError, match="order: 3"):
        pinn.jet(network, points, order=3)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: pinn.FourierFeatures(2, 4), "exactly one of"),
        (lambda: pinn.FourierFeatures(2, 4, wavenumber=1.0, scale=1.0), "came wavenumber, scale"),
        (lambda: pinn.FourierFeatures(2, 4, wavenumber=0.0), "wavenumber: 0.0"),
        (lambda: pinn.FourierFeatures(2, 0, scale=1.0), "features: 0"),
        (lambda: pinn.FourierFeatures(frequencies=[1.0, 2.0]), r"expected finite numbers \(d, features\)"),
        (lambda: pinn.RawCoordinates(2, scale=[1.0, 0.0]), "scale"),
        (lambda: pinn.RawCoordinates(2, mean=[1.0, 0.0, 2.0]), "3 numbers for 2 dimensions"),
        (lambda: pinn.PeriodicFeatures([None], 2), "periods: none"),
        (lambda: pinn.PeriodicFeatures([-1.0], 2), "periods"),
        (lambda: pinn.Network.create(pinn.RawCoordinates(1), hidden=[4, 0]), "hidden: 0"),
        (lambda: pinn.Network.create(pinn.RawCoordinates(1), outputs=3), "expected 1 .* or 2"),
        (lambda: pinn.Network.create(pinn.RawCoordinates(1), dtype="float16"), "float16"),
    ],
)
def test_embeddings_and_sizes_that_make_no_sense(make: Any, words: str) -> None:
    with pytest.raises(scanfield.ScanfieldError, match=words):
        make()
