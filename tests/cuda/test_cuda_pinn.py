"""The PINN on CuPy arrays: jets through activations and the steps of single layers by kernels, whole steps of a training."""

from __future__ import annotations

from typing import Any

import numpy as np
import pinn_draws as draws
import pytest
import standin
from arrays import deviation, library, same_bits

import scanfield
from scanfield import optimize, pinn
from scanfield.pinn.activations import ACTIVATIONS
from scanfield.pinn.inplace import InPlace
from scanfield.pinn.kernels import Kernels
from scanfield.pinn.memory import NOTHING, Buffers

TOLERANCE = {"float64": 2e-14, "float32": 3e-6}
METHOD = "cupy.rawkernel"


def fused(card: Any) -> Any:
    from scanfield_cupy.pinn_jets import kernels

    return kernels("pinn")


def generic() -> Kernels:
    from scipy.special import erf

    return Kernels(library("numpy").xp, erf)


def weights_of(kind: str, rng: np.random.Generator, n: int, d: int) -> tuple[Any, ...]:
    drawn = rng.standard_normal((2, n, d))
    return {"none": (), "laplacian": (None,), "weighted": (drawn[0],), "two": tuple(drawn)}[kind]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", ["value", "none", "laplacian", "weighted", "two"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_jet_through_an_activation(card: Any, activation: str, kind: str, dtype: str) -> None:
    """Forward and back, 3 x 11 numbers in a block: neither is a multiple of anything."""
    d = {"none": 1, "two": 3}.get(kind, 2)
    n, width = 3, 11
    rng = np.random.default_rng(d)
    channels = () if kind == "value" else weights_of(kind, rng, n, d)
    blocks = 1 if kind == "value" else 1 + d + len(channels)
    z, bar = (2 * rng.standard_normal((blocks, n, width)) for _ in range(2))
    z, bar = z.astype(dtype), bar.astype(dtype)
    channels = tuple(None if a is None else a.astype(dtype) for a in channels)
    wide = tuple(None if a is None else a.astype("float64") for a in channels)
    h = generic().activate(activation, z.astype("float64"), d, wide, NOTHING, "h")
    want = generic().activate_back(
        activation, z.astype("float64"), h, bar.astype("float64"), d, wide, NOTHING, ""
    )
    ours, on_card = fused(card), tuple(None if a is None else card.array(a) for a in channels)
    memory = Buffers(card.cupy, dtype, None)
    standin.LAUNCHES.clear()
    got_h = ours.activate(activation, card.array(z), d, on_card, memory, "h")
    place = card.array(bar)
    got = ours.activate_back(activation, card.array(z), got_h, place, d, on_card, memory, "bar")
    assert [launch.name for launch in standin.LAUNCHES] == [
        f"jet_forward_{activation}",
        f"jet_backward_{activation}",
    ] and got is place
    assert got.dtype == got_h.dtype == dtype
    assert deviation(card.raw(got_h), h) <= TOLERANCE[dtype]
    assert deviation(card.raw(got), want) <= TOLERANCE[dtype]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_far_out(card: Any, activation: str) -> None:
    """Where exponentials overflow or vanish, and what is no number."""
    z = np.array([0.0, -0.0, 1e-300, 40.0, -40.0, 800.0, -800.0, np.inf, -np.inf, np.nan])[None, None, :]
    z = np.concatenate([z, np.ones_like(z), np.zeros_like(z)])
    with np.errstate(all="ignore"):
        want = generic().activate(activation, z, 1, (None,), NOTHING, "h")
    got = fused(card).activate(
        activation, card.array(z), 1, (None,), Buffers(card.cupy, "float64", None), "h"
    )
    # A normal law's tail: erfc keeps digits there that 1 + erf has lost.
    same = np.isclose(card.raw(got), want, rtol=1e-13, atol=1e-14, equal_nan=True)
    assert np.all(same), (card.raw(got)[~same], want[~same])


def test_what_lies_otherwise_goes_through_cupys_own_functions(card: Any) -> None:
    z = np.random.default_rng(1).standard_normal((4, 5, 3))
    turned = card.array(z.swapaxes(1, 2).copy()).swapaxes(1, 2)
    memory = Buffers(card.cupy, "float64", None)
    standin.LAUNCHES.clear()
    h = fused(card).activate("tanh", turned, 2, (None,), memory, "h")
    bar = fused(card).activate_back("tanh", turned, h, card.array(z), 2, (None,), memory, "bar")
    assert not standin.LAUNCHES
    want = generic().activate("tanh", z, 2, (None,), NOTHING, "h")
    assert deviation(card.raw(h), want) <= 1e-14
    assert (
        deviation(card.raw(bar), generic().activate_back("tanh", z, want, z, 2, (None,), NOTHING, ""))
        <= 1e-14
    )


# -- steps of single layers ----------------------------------------------------------------------------------------


def slices(card: Any, dtype: str, *shape: int) -> list[Any]:
    """Four arrays of a shape: contiguous, a slice of a wider one, turned, with every other row."""
    rng = np.random.default_rng(shape)
    n, width = shape
    wide, turned, other = rng.random((n, width + 3)), rng.random((width, n)), rng.random((2 * n, width))
    given = [card.array(x, dtype) for x in (rng.random(shape), wide, turned, other)]
    return [given[0], given[1][:, 2:-1], given[2].T, given[3][::2]]


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_steps_of_one_element(card: Any, dtype: str, accumulate: bool) -> None:
    """Every step reads and writes arrays as they lie, and nothing beside them."""
    shape = (5, 7)
    steps = {
        "subtract": (lambda a, b, out: pinn.sub_out(a, b, out, accumulate=accumulate), lambda a, b: a - b),
        "scale": (
            lambda a, b, out: pinn.mul_scalar_out(a, 1.7, out, accumulate=accumulate),
            lambda a, b: a * 1.7,
        ),
        "tanh_slope_times": (
            lambda a, b, out: pinn.tanh_deriv_mul_out(a, b, out, accumulate=accumulate),
            lambda a, b: (1 - a * a) * b,
        ),
    }
    for name, (write, formula) in steps.items():
        for i in range(4):
            a, b = slices(card, dtype, *shape)[i], slices(card, dtype, *shape)[(i + 1) % 4]
            out = slices(card, dtype, *shape)[(i + 2) % 4]
            whole = [x.astype(dtype) for x in (card.raw(a), card.raw(b), card.raw(out))]
            standin.LAUNCHES.clear()
            write(a, b, out)
            assert [launch.name for launch in standin.LAUNCHES] == [name]
            want = formula(*(x.astype("float64") for x in whole[:2])) + (whole[2] if accumulate else 0)
            assert deviation(card.raw(out), want) <= TOLERANCE[dtype], (name, i)


def test_steps_of_what_is_no_plane_go_through_cupys_own_functions(card: Any) -> None:
    rng = np.random.default_rng(2)
    a, b = rng.random((2, 3, 4)), rng.random((2, 3, 4))
    out = card.cupy.ones((2, 3, 8))[:, :, ::2]
    standin.LAUNCHES.clear()
    pinn.sub_out(card.array(a), card.array(b), out)
    assert same_bits(card.raw(out), a - b)
    pinn.mul_scalar_out(card.array(a), 1.7, out)
    assert same_bits(card.raw(out), a * 1.7)
    pinn.tanh_deriv_mul_out(card.array(a), card.array(b), out, accumulate=True)
    assert deviation(card.raw(out), a * 1.7 + (1 - a * a) * b) <= 1e-15
    none = card.cupy.ones((2, 3))
    pinn.fourier_grad(card.cupy.ones((0, 2)), card.cupy.ones((0, 6)), card.cupy.ones((2, 3)), none)
    assert not card.raw(none).any() and not standin.LAUNCHES


def test_cotangents_of_features_that_lie_otherwise(card: Any) -> None:
    """Left to CuPy's own functions: the phases, the points and the sum for the frequencies are the generic ones."""
    rng = np.random.default_rng(6)
    n, d, m, r = 5, 2, 3, 1
    x, omega, raw, hbar = (rng.standard_normal(s) for s in ((n, d), (d, m), (d, r), (4, n, 2 * m + r)))
    results, ours = [], fused(card)
    for kernels, place in ((generic(), library("numpy")), (ours, card), (ours, card)):
        memory = NOTHING if kernels is not ours else Buffers(card.cupy, "float64", None)
        given = [place.array(y) for y in (x, omega, raw)]
        _, kept = kernels.features(*given, place.array(np.zeros(r)), (None,), True, memory)
        cotangents = place.array(hbar.swapaxes(1, 2).copy() if len(results) == 1 else hbar)
        cotangents = cotangents.swapaxes(1, 2) if len(results) == 1 else cotangents
        standin.LAUNCHES.clear()
        pbar, points, rows = kernels.features_back(cotangents, *given, kept, (None,), True, memory)
        total = kernels.add_frequencies(place.array(np.zeros((d, m))), rows, memory)
        launched = [launch.name for launch in standin.LAUNCHES]
        assert launched == ([] if len(results) < 2 else ["embed_back", "omega_gradient"])
        results.append([place.raw(y) for y in (pbar, points, total)])
    for found in results[1:]:
        assert all(deviation(y, want) <= 1e-13 for y, want in zip(found, results[0], strict=True))


def test_zero_is_set_where_an_array_lies(card: Any) -> None:
    parent = card.array(np.ones((4, 6)))
    pinn.memset_zero_out(parent[:, 1:3])
    assert np.array_equal(card.raw(parent).sum(axis=1), [4.0] * 4) and not card.raw(parent)[:, 1:3].any()
    others = [
        card.cupy.ones(shape, kind)
        for shape, kind in (((2, 3, 4), "float64"), ((3,), "complex64"), ((), "float32"))
    ]
    for x in (*others, card.cupy.ones((2, 3, 4))[:, ::2]):
        pinn.memset_zero_out(x)
        assert not card.raw(x).any()


def test_more_elements_than_threads_are_taken_in_turns(card: Any, monkeypatch: Any) -> None:
    """A grid has at most 2^31 - 1 blocks: here it has two, of 256 threads."""
    from scanfield_cupy import pinn_jets, pinn_steps

    for module in (pinn_jets, pinn_steps):
        monkeypatch.setattr(module, "blocks_for", lambda elements: 2)
    rng = np.random.default_rng(9)
    z, bar, weights = rng.standard_normal((4, 33, 41)), rng.standard_normal((4, 33, 41)), rng.random((33, 2))
    memory = Buffers(card.cupy, "float64", None)
    h = fused(card).activate("swish", card.array(z), 2, (card.array(weights),), memory, "h")
    back = fused(card).activate_back(
        "swish", card.array(z), h, card.array(bar), 2, (card.array(weights),), memory, "bar"
    )
    want = generic().activate("swish", z, 2, (weights,), NOTHING, "h")
    assert deviation(card.raw(h), want) <= 2e-14
    want = generic().activate_back("swish", z, want, bar, 2, (weights,), NOTHING, "bar")
    assert deviation(card.raw(back), want) <= 2e-14
    wide = card.array(np.zeros((33, 50)))
    pinn.sub_out(card.array(z[0]), card.array(bar[0]), wide[:, 4:45])
    assert np.array_equal(card.raw(wide)[:, 4:45], z[0] - bar[0]) and not card.raw(wide)[:, 45:].any()


def test_f048_rows_far_apart(card: Any) -> None:
    """Steps from row to row of which a few pass 2^31 numbers."""
    parent = np.zeros((5, 2**29 + 64), np.float32)  # pages that nobody touches cost nothing
    view = parent[:, :3]
    view[...] = np.random.default_rng(60).uniform(0.5, 1, (5, 3))
    given, out = standin.ndarray(view), card.cupy.empty((3,), "float32")
    pinn.sum_rows_out(given, out)
    assert deviation(card.raw(out), view.astype("float64").sum(axis=0)) <= 1e-6
    pinn.mul_scalar_out(card.array(view), 2.0, standin.ndarray(parent[:, 40:43]))
    assert np.array_equal(parent[:, 40:43], 2 * view)


# 1 row, a block's run and one more, several segments of unequal length; columns off the 32 of a block.
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("n", "width"), [(1, 1), (9, 33), (2500, 5), (70_000, 1)])
def test_sums_of_rows(card: Any, n: int, width: int, dtype: str) -> None:
    for a in slices(card, dtype, n, width)[: 1 if n > 9 else 4]:
        out = card.array(np.full(width, 3.0), dtype)
        pinn.sum_rows_out(a, out)
        want = card.raw(a).astype("float64").sum(axis=0)
        assert deviation(card.raw(out), want) <= TOLERANCE[dtype]
        again = card.array(np.full(width, np.nan), dtype)
        pinn.sum_rows_out(a, again)
        assert same_bits(card.raw(out), card.raw(again))
        pinn.sum_rows_out(a, out, accumulate=True)
        assert deviation(card.raw(out), 2 * want) <= TOLERANCE[dtype]
    pinn.sum_rows_out(card.cupy.empty((0, 2)), nothing := card.array(np.ones(2)))
    assert not card.raw(nothing).any()


# One dimension and more than a block takes at once, one segment and several.
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("n", "d", "m"), [(1, 1, 1), (7, 2, 35), (1500, 3, 3), (30, 5, 2)])
def test_the_gradient_of_the_frequencies(card: Any, n: int, d: int, m: int, dtype: str) -> None:
    rng = np.random.default_rng(n)
    x, B, bar = (rng.uniform(-1, 1, shape).astype(dtype) for shape in ((n, d), (d, m), (n, 2 * m)))
    want = pinn.fourier_backward(*(y.astype("float64") for y in (bar, x, B)))
    out = card.array(np.ones((d, m)), dtype)
    standin.LAUNCHES.clear()
    pinn.fourier_grad(card.array(x), card.array(bar), card.array(B), out)
    assert standin.LAUNCHES[0].name == "frequency_gradient"
    assert deviation(card.raw(out), want) <= 3 * TOLERANCE[dtype]
    pinn.fourier_grad(card.array(x), card.array(bar), card.array(B), out, accumulate=True)
    assert deviation(card.raw(out), 2 * want) <= 3 * TOLERANCE[dtype]
    wide = card.array(np.ones((d, m + 2)), dtype)  # what lies around it stays
    pinn.fourier_grad(card.array(x), card.array(bar), card.array(B), wide[:, 1:-1], accumulate=True)
    assert deviation(card.raw(wide)[:, 1:-1], want + 1) <= 3 * TOLERANCE[dtype]
    assert (card.raw(wide)[:, [0, -1]] == 1).all()


def test_the_sweep_back_of_a_layer_in_a_workspace(card: Any) -> None:
    rng = np.random.default_rng(4)
    network = draws.network(card, 2, kind="fourier")
    ws, host = pinn.Workspace.of(network, 6), pinn.Workspace.of(draws.network(library("numpy"), 2), 6)
    bar, h, before, W = (rng.random(shape) for shape in ((6, 7), (6, 7), (6, 10), (7, 10)))
    for accumulate in (False, True):
        pinn.layer_backward_inplace(
            *card.arrays({"a": bar, "b": h, "c": before, "d": W}).values(), 0, True, ws, accumulate=accumulate
        )
        pinn.layer_backward_inplace(bar, h, before, W, 0, True, host, accumulate=accumulate)
    for name in ("dW", "db", "dL_dz", "dL_dh_prev"):
        assert deviation(card.raw(getattr(ws, name)[0]), getattr(host, name)[0]) <= 1e-14


# -- whole evaluations and trainings -------------------------------------------------------------------------------


def everything(found: pinn.LossAndGrad) -> dict[str, Any]:
    gradients = {name: g for name, g in found.gradients.items() if name != "points"}
    return {"loss": found.loss, **found.terms, **gradients}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("activation", "d"), [("tanh", 1), ("sin", 2), ("gelu", 3)])
def test_losses_of_every_kind_with_all_gradients(card: Any, activation: str, d: int, dtype: str) -> None:
    results = {}
    for name, place in (("numpy", library("numpy")), ("cupy", card)):
        network = draws.network(place, d, activation=activation, dtype=dtype)
        terms = draws.terms(place, d, dtype=dtype)
        found = pinn.loss_and_grad(network, terms, wavenumber=draws.UNKNOWNS, chunk=4, points=True)
        results[name] = everything(found) | {
            f"points {t} {p}": g
            for t, pieces in enumerate(found.gradients["points"])
            for p, g in enumerate(pieces)
        }
    for name, want in results["numpy"].items():
        assert deviation(card.raw(results["cupy"][name]), want) <= 10 * TOLERANCE[dtype], name


@pytest.mark.parametrize(("kind", "d"), [("frozen", 2), ("raw", 2), ("periodic", 3), ("fourier", 5)])
def test_embeddings_of_every_kind(card: Any, kind: str, d: int) -> None:
    """Jets, losses with all gradients, and the rows that a Jacobian is made of."""
    results = []
    for place in (library("numpy"), card):
        network, terms = draws.network(place, d, kind=kind), draws.terms(place, d, real=True)[:5]
        found = everything(pinn.loss_and_grad(network, terms))
        jet = pinn.jet(network, terms[0].pieces[0].points)
        r, J = pinn.jacobian(network, terms, chunk=4)
        results.append(
            {**found, "value": jet.value, "first": jet.first, "second": jet.second, "r": r, "J": J}
        )
    for name, want in results[0].items():
        assert deviation(card.raw(results[1][name]), want) <= 1e-12, name


@pytest.mark.parametrize(("n", "d"), [(1500, 2), (2100, 5)])
def test_frequencies_of_many_points_at_once(card: Any, n: int, d: int) -> None:
    """Rows in several segments, which are added up in their order."""
    results = []
    for place in (library("numpy"), card, card):
        network, terms = draws.network(place, d), draws.terms(place, d, n=n, kinds=("operator",))
        results.append(place.raw(pinn.loss_and_grad(network, terms, chunk=n).gradients["B"]))
    assert deviation(results[1], results[0]) <= 1e-12
    assert same_bits(results[1], results[2])


def test_the_users_default_writes_by_kernels(card: Any) -> None:
    from scanfield.pinn.selection import kernels_for, methods

    network = draws.network(card, 2)
    assert kernels_for(network).name == METHOD and isinstance(kernels_for(network), InPlace)
    assert methods(network) == ["generic", "generic.out", METHOD]
    with scanfield.use(method="generic.out"):
        assert kernels_for(network).name == "generic.out"


def train(place: Any, steps: int) -> tuple[list[Any], pinn.Network]:
    """Adam on a small Helmholtz problem, into a workspace; the losses stay where they are."""
    network = draws.network(place, 2, dtype="float64")
    prepared = pinn.prepare_terms(draws.terms(place, 2, kinds=("data", "pde", "robin")), network)
    workspace, adam = pinn.Workspace.of(network, 4), optimize.Adam(1e-2)
    losses, state = [], adam.init(network.parameters)
    for _ in range(steps):
        found = pinn.loss_and_grad(network, prepared, workspace=workspace)
        losses.append(found.loss)
        parameters, state = adam.update(network.parameters, found.gradients, state)
        network = network.replace(parameters)
    return losses, network


def test_a_training_is_numpys_and_stays_on_the_card(card: Any) -> None:
    want, network = train(library("numpy"), 5)
    copies = []
    for steps in (1, 5):
        standin.TRANSFERS.clear()
        standin.LAUNCHES.clear()
        got, trained = train(card, steps)
        copies.append(dict(standin.TRANSFERS))
    assert copies[0] == copies[1]  # a step copies nothing, either way
    assert {launch.name for launch in standin.LAUNCHES} == {
        "embed", "jet_forward_tanh", "jet_backward_tanh", "embed_back", "omega_gradient", "row_sums",
    }  # fmt: skip
    for x, y in zip(got, want, strict=True):
        assert deviation(card.raw(x), y) <= 1e-12
    for name, x in network.parameters.items():
        assert deviation(card.raw(trained.parameters[name]), x) <= 1e-11, name
