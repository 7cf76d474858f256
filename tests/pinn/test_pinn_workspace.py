"""The workspace: its fields and functions, steps that allocate nothing, memory that does not grow with the points."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pinn_draws as draws
import pytest
from arrays import deviation

import scanfield
from scanfield import pinn


def leave_out(backend: str, test: str, parameters: dict[str, Any]) -> bool:
    return backend == "dask"  # a training loop computes at every step: Dask's arrays are not for it


writing = pytest.mark.backend("numpy", "torch", "cupy")
WIDE = {"batch": 256, "hidden": (128, 64)}


def make(library: Any, *sizes: Any, dtype: str = "float64", **more: Any) -> pinn.Workspace:
    return pinn.Workspace(*sizes, xp=library.xp, dtype=dtype, **more)


def fresh(library: Any, network: pinn.Network, batch: int) -> pinn.Workspace:
    return pinn.Workspace.of(network, batch)


# -- the tests of the original -------------------------------------------------------------------------------------


@writing
def test_the_original_test_of_its_buffers(library: Any) -> None:
    ws = make(library, 32, 16, [64, 64, 64])
    assert ws.num_layers == 4 and (ws.batch_size, ws.hidden_dim, ws.ff_dim) == (32, [64, 64, 64], 16)
    assert [len(each) for each in (ws.z, ws.h, ws.dW, ws.db)] == [4, 4, 4, 4]
    assert [tuple(w.shape) for w in ws.dW] == [(64, 32), (64, 64), (64, 64), (2, 64)]
    assert [tuple(z.shape) for z in ws.z] == [(32, 64)] * 3 + [(32, 2)]
    assert tuple(ws.h[0].shape) == (32, 64) and tuple(ws.fourier_features.shape) == (32, 32)
    assert tuple(ws.dB.shape) == (1, 16) and tuple(ws.du_dx.shape) == tuple(ws.d2u_dx2.shape) == (32, 2)
    assert tuple(ws.dL_dphi_sin.shape) == tuple(ws.dL_dphi_cos.shape) == tuple(ws.Bx.shape) == (32, 16)
    assert [tuple(g.shape) for g in ws.dL_dh_prev] == [(32, 32)] + [(32, 64)] * 3
    everything = [
        *ws.z,
        *ws.h,
        *ws.dW,
        *ws.db,
        ws.dB,
        *ws.dL_dz,
        *ws.dL_dh_prev,
        ws.d_loss,
        ws.cos_Bx,
        ws.sin_Bx,
    ]
    assert all(not np.any(library.numpy(array)) for array in everything)


def test_the_original_test_of_the_loss(library: Any, dtype: str) -> None:
    pred = library.array(np.array([[1.0, 2.0], [3.0, 4.0]], dtype))
    found = pinn.mse_backward(pred, library.array(np.zeros((2, 2), dtype)))
    assert library.dtype(found) == dtype
    assert np.allclose(library.numpy(found), [[1.0, 2.0], [3.0, 4.0]], atol=1e-5)


@writing
@pytest.mark.parametrize("hidden", [[], 5, [4, 3]])
def test_any_number_of_hidden_layers(library: Any, hidden: Any) -> None:
    ws = make(library, 8, 3, hidden, 2)
    widths = [hidden] if isinstance(hidden, int) else hidden
    assert ws.num_layers == len(ws.dW) == len(ws.db) == len(ws.z) == len(widths) + 1
    assert ws.dW[0].shape[1] == 6 and ws.dW[-1].shape[0] == 2
    assert tuple(ws.du_dx.shape) == (2, 8, 2)


# -- a step --------------------------------------------------------------------------------------------------------


@writing
@pytest.mark.parametrize("hidden", [(), (7, 6)])
@pytest.mark.parametrize("d", [1, 2, 3])
def test_a_step_with_it_is_the_step_without(library: Any, d: int, hidden: Any, dtype: str) -> None:
    network = draws.network(library, d, hidden=hidden, dtype=dtype)
    terms = draws.terms(library, d, n=21, dtype=dtype)
    given = dict(draws.UNKNOWNS)
    ws = fresh(library, network, 8)
    want = pinn.loss_and_grad(network, terms, wavenumber=given, chunk=8)
    for _ in range(2):  # what the first step left must not come back in the second
        found = pinn.loss_and_grad(network, terms, wavenumber=given, workspace=ws)
        assert library.numpy(found.loss) == library.numpy(want.loss)
        assert list(found.gradients) == list(want.gradients)
        for name, g in want.gradients.items():
            assert np.array_equal(library.numpy(found.gradients[name]), library.numpy(g)), name
    assert found.gradients["W0"] is ws.dW[0] and found.gradients["B"] is ws.dB


@writing
def test_its_views_hold_the_jet_of_the_last_chunk(library: Any) -> None:
    network = draws.network(library, 2)
    (term,) = draws.terms(library, 2, n=8, kinds=("pde",))
    ws = fresh(library, network, 8)
    pinn.loss_and_grad(network, [term], workspace=ws)
    jet = pinn.jet(network, term.pieces[0].points)
    for have, want in ((ws.z[-1], jet.value), (ws.du_dx, jet.first), (ws.d2u_dx2, jet.second)):
        assert deviation(library.numpy(have), library.numpy(want)) < 1e-14
    assert deviation(library.numpy(ws.h[0]), np.tanh(library.numpy(ws.z[0]))) < 1e-14


@writing
def test_zero_grad_keeps_the_arrays(library: Any) -> None:
    network = draws.network(library, 2)
    ws = fresh(library, network, 16)
    pinn.loss_and_grad(network, draws.terms(library, 2, kinds=("data",)), workspace=ws)
    before = [*ws.dW, *ws.db, ws.dB]
    assert all(np.any(library.numpy(array)) for array in before)
    ws.zero_grad()
    after = [*ws.dW, *ws.db, ws.dB]
    assert all(a is b for a, b in zip(before, after, strict=True))
    assert not any(np.any(library.numpy(array)) for array in after)


@pytest.mark.backend("numpy")
def test_it_says_what_memory_it_takes() -> None:
    pinn.Workspace(2, 2, [2])  # what the first one imports is not counted
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        ws = pinn.Workspace(1000, 32, [64, 64])
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert ws.bytes <= taken < 1.05 * ws.bytes


def heavy(library: Any, n: int, activation: str = "tanh") -> tuple[pinn.Network, pinn.PreparedTerms]:
    network = draws.network(library, 2, hidden=WIDE["hidden"], activation=activation, dtype="float32")
    kinds = ("operator", "periodic")
    return network, pinn.prepare_terms(draws.terms(library, 2, n=n, kinds=kinds, dtype="float32"), network)


@pytest.mark.backend("numpy")
@pytest.mark.parametrize("activation", ["tanh", "sin", "swish", "softplus", "gelu"])
@pytest.mark.parametrize("method", ["generic.out", None])
def test_a_step_allocates_nothing_of_the_size_of_the_batch(method: str | None, activation: str) -> None:
    library = draws.plain()
    network, terms = heavy(library, 300, activation)
    ws = pinn.Workspace.of(network, 256)
    with scanfield.use(method=method):
        for _ in range(2):
            pinn.loss_and_grad(network, terms, workspace=ws)
        size = ws.bytes
        tracemalloc.start()
        try:
            pinn.loss_and_grad(network, terms, workspace=ws)  # Python's own caches
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            pinn.loss_and_grad(network, terms, workspace=ws)
            peak = tracemalloc.get_traced_memory()[1] - before
        finally:
            tracemalloc.stop()
    block = 256 * 128 * 4  # of the first layer
    assert ws.bytes == size > 20 * block
    assert peak < block // 2  # NumPy's iterators buffer 8192 numbers, whatever the arrays are


@pytest.mark.backend("torch")
def test_a_step_asks_torch_for_no_memory(library: Any) -> None:
    from torch.profiler import ProfilerActivity, profile

    network, terms = heavy(library, 300)
    ws = pinn.Workspace.of(network, 256)
    for _ in range(2):
        pinn.loss_and_grad(network, terms, workspace=ws)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as told:
        pinn.loss_and_grad(network, terms, workspace=ws)
    asked = [event.self_cpu_memory_usage for event in told.events()]
    assert max(asked) < 256 * 64 * 4 // 2


@pytest.mark.backend("numpy")
def test_memory_does_not_grow_with_the_points() -> None:
    """A hundred times the points, and the same memory beside them: 1e6 points need 16 bytes each and this."""
    peaks = []
    library = draws.plain()
    network = draws.network(library, 2, hidden=(32, 32), dtype="float32")
    for n in (512, 512, 50_000):
        terms = pinn.prepare_terms(draws.terms(library, 2, n=n, kinds=("pde",), dtype="float32"), network)
        tracemalloc.start()
        try:
            pinn.loss_and_grad(network, terms)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert peaks[2] < 1.2 * peaks[1] < 8e6
    wide = pinn.Workspace(256, 64, [128] * 4, 2)  # the size of the benchmark: points and coefficients on top
    assert wide.bytes + 1_000_000 * 4 * (2 + 1 + 1 + 2) < 300e6


# -- layer by layer --------------------------------------------------------------------------------------------------


def layers(library: Any, dtype: str = "float64") -> dict[str, Any]:
    rng = np.random.default_rng(2)
    host = {
        "dL_dh": rng.normal(size=(6, 4)),
        "h": np.tanh(rng.normal(size=(6, 4))),
        "h_prev": rng.normal(size=(6, 10)),
        "W": rng.normal(size=(4, 10)),
    }
    return {name: library.array(value.astype(dtype)) for name, value in host.items()}


@pytest.mark.parametrize("tanh", [True, False])
def test_layer_backward_is_the_formula(library: Any, tanh: bool) -> None:
    given = layers(library)
    host = {name: library.numpy(value) for name, value in given.items()}
    dz = host["dL_dh"] * (1 - host["h"] ** 2) if tanh else host["dL_dh"]
    found = pinn.layer_backward(*given.values(), tanh)
    for have, want in zip(found, (dz.T @ host["h_prev"], dz.sum(0), dz @ host["W"]), strict=True):
        assert deviation(library.numpy(have), want) < 1e-14


@writing
def test_layer_backward_in_place_writes_and_adds(library: Any) -> None:
    given = layers(library)
    ws = make(library, 6, 5, [4])
    want = [library.numpy(x) for x in pinn.layer_backward(*given.values(), True)]
    for times, accumulate in ((1, False), (2, True), (1, False)):
        pinn.layer_backward_inplace(*given.values(), 0, True, ws, accumulate=accumulate)
        assert deviation(library.numpy(ws.dW[0]), times * want[0]) < 1e-14
        assert deviation(library.numpy(ws.db[0]), times * want[1]) < 1e-14
        assert deviation(library.numpy(ws.dL_dh_prev[0]), want[2]) < 1e-14
    assert deviation(library.numpy(ws.dL_dphi_cos), want[2][:, 5:]) < 1e-14


@pytest.mark.parametrize("d", [1, 2])
def test_fourier_backward_is_the_formula(library: Any, d: int) -> None:
    rng = np.random.default_rng(4)
    bar, x, B = rng.normal(size=(7, 6)), rng.normal(size=(7, d)), rng.normal(size=(d, 3))
    p = 2 * np.pi * x @ B
    want = 2 * np.pi * x.T @ (np.cos(p) * bar[:, :3] - np.sin(p) * bar[:, 3:])
    given = [library.array(value) for value in (bar, x, B)]
    found = pinn.fourier_backward(*given)
    assert tuple(found.shape) == (d, 3) and deviation(library.numpy(found), want) < 1e-14
    if library.name in ("numpy", "torch"):
        ws = make(library, 7, 3, [], d)
        for times, accumulate in ((1, False), (2, True)):
            pinn.fourier_backward_inplace(*given, ws, accumulate=accumulate)
            assert deviation(library.numpy(ws.dB), times * want) < 1e-14
        out = library.xp.zeros_like(ws.dB)
        pinn.fourier_grad(given[1], given[0], given[2], out)
        assert deviation(library.numpy(out), want) < 1e-14


def jets(library: Any, d: int, n: int = 6) -> tuple[pinn.Network, dict[str, Any]]:
    """A network of one hidden layer, and a term of everything that a jet has."""
    network = draws.network(library, d, hidden=(4,))
    (term,) = draws.terms(library, d, n=n, kinds=("pde",))
    first = library.array(np.random.default_rng(3).normal(size=(n, d)))
    piece = term.pieces[0]._replace(first=first)
    return network, {"term": term._replace(pieces=(piece,)), "x": piece.points}


@writing
@pytest.mark.parametrize("d", [1, 2, 3])
def test_whole_jets_are_swept_back_layer_by_layer(library: Any, d: int) -> None:
    """From the output's cotangent to every gradient of ``loss_and_grad``: as new arrays, and in place."""
    network, given = jets(library, d)
    ws = fresh(library, network, 6)
    found = pinn.loss_and_grad(network, [given["term"]], workspace=ws)
    want = {name: library.array(library.numpy(g)) for name, g in found.gradients.items()}
    x, B = given["x"], network.parameters["B"]
    weights = [network.parameters["W0"], network.parameters["W1"]]
    h, features = [1.0 * stack for stack in ws.h_stacks], 1.0 * ws.feature_stack
    rbar, piece = 1.0 * ws.d_loss, given["term"].pieces[0]
    blocks = [piece.value, *(piece.first[:, i] for i in range(d)), piece.second[:, 0]]
    bar = library.xp.stack([_conjugate_times(library, c, rbar) for c in blocks])

    dW1, db1, dh = pinn.layer_backward(bar, h[1], h[0], weights[1], False)
    dW0, db0, dphi = pinn.layer_backward(dh, h[0], features, weights[0], True)
    made = {"W1": dW1, "b1": db1, "W0": dW0, "b0": db0, "B": pinn.fourier_backward(dphi, x, B)}
    for name, g in want.items():
        assert deviation(library.numpy(made[name]), library.numpy(g)) < 1e-13, name

    alone = library.xp.zeros_like(ws.dB)
    for times, accumulate in ((1, False), (2, True), (1, False)):
        pinn.fourier_grad(x, dphi, B, alone, accumulate=accumulate)  # without a workspace
        assert deviation(library.numpy(alone), times * library.numpy(want["B"])) < 1e-13
        pinn.layer_backward_inplace(bar, h[1], h[0], weights[1], 1, False, ws, accumulate=accumulate)
        dh = 1.0 * ws.dL_dh_prev_stacks[1]
        pinn.layer_backward_inplace(dh, h[0], features, weights[0], 0, True, ws, accumulate=accumulate)
        dphi = 1.0 * ws.dL_dh_prev_stacks[0]
        pinn.fourier_backward_inplace(dphi, x, B, ws, accumulate=accumulate)
        held = {"W1": ws.dW[1], "b1": ws.db[1], "W0": ws.dW[0], "b0": ws.db[0], "B": ws.dB}
        for name, g in want.items():
            assert deviation(library.numpy(held[name]), times * library.numpy(g)) < 1e-13, (name, times)
    size = ws.bytes
    pinn.layer_backward_inplace(dh, h[0], features, weights[0], 0, True, ws)
    assert ws.bytes == size
    with pytest.raises(scanfield.ArgumentError, match=r"ws\.dL_dz_stacks shares memory with dL_dh"):
        pinn.layer_backward_inplace(ws.dL_dz_stacks[0], h[0], features, weights[0], 0, True, ws)
    with pytest.raises(scanfield.ShapeError, match=r"expected \(n, out\) or \(d \+ 2, n, out\)"):
        pinn.layer_backward(bar[:2, ...], h[1][:2, ...], h[0][:2, ...], weights[1], False)


def _conjugate_times(library: Any, c: Any, rbar: Any) -> Any:
    """conj(c) rbar in real parts."""
    host, r = library.numpy(c), library.numpy(rbar)
    turned = np.conj(host) * (r[:, 0] + 1j * r[:, 1])
    return library.array(np.stack([turned.real, turned.imag], axis=1))


@pytest.mark.backend("numpy")
def test_what_is_added_makes_no_array_of_its_size() -> None:
    """(2000, 64) of float64 is a megabyte; a scratch of 8192 numbers, and NumPy's own, stay far below."""
    rng = np.random.default_rng(6)
    a, b, out = rng.normal(size=(2000, 64)), rng.normal(size=(2000, 64)), np.zeros((2000, 64))
    row = np.zeros(64)
    calls = [
        lambda: pinn.mul_scalar_out(a, 2.0, out, accumulate=True),
        lambda: pinn.tanh_deriv_mul_out(a, b, out, accumulate=True),
        lambda: pinn.mse_backward_inplace(a, b, out, accumulate=True),
        lambda: pinn.sub_out(a, b, out, accumulate=True),
        lambda: pinn.sum_rows_out(a, row, accumulate=True),
    ]
    for call in calls:
        call()
        tracemalloc.start()
        try:
            call()
            assert tracemalloc.get_traced_memory()[1] < a.nbytes / 4
        finally:
            tracemalloc.stop()
    want = 2 * (2.0 * a + (1 - a * a) * b + (a - b) * (2 / 2000) + (a - b))
    assert deviation(out, want) < 1e-14 and deviation(row, 2 * a.sum(0)) < 1e-14


@writing
def test_primitive_operations_write_and_add(library: Any, dtype: str) -> None:
    given = layers(library, dtype)
    a, h = given["dL_dh"], given["h"]
    host = {name: library.numpy(value) for name, value in given.items()}
    cases = [
        (lambda out, add: pinn.sub_out(a, h, out, accumulate=add), host["dL_dh"] - host["h"]),
        (lambda out, add: pinn.mul_scalar_out(a, -0.5, out, accumulate=add), -0.5 * host["dL_dh"]),
        (
            lambda out, add: pinn.tanh_deriv_mul_out(h, a, out, accumulate=add),
            (1 - host["h"] ** 2) * host["dL_dh"],
        ),
        (lambda out, add: pinn.sum_rows_out(a, out, accumulate=add), host["dL_dh"].sum(0)),
        (
            lambda out, add: pinn.mse_backward_inplace(a, h, out, accumulate=add),
            (host["dL_dh"] - host["h"]) / 3,
        ),
    ]
    for write, want in cases:
        out = library.xp.ones_like(a[0, :] if want.ndim == 1 else a)
        write(out, True)
        assert deviation(library.numpy(out), 1 + want) < 1e-6
        write(out, False)
        assert deviation(library.numpy(out), want) < 1e-6
        assert library.dtype(out) == dtype
        pinn.memset_zero_out(out)
        assert not np.any(library.numpy(out))


@writing
def test_no_rows_are_written_nowhere(library: Any) -> None:
    """A shard without points adds nothing, and shares no memory with what it came from."""
    base, sums = (library.xp.ones_like(library.array(np.ones(shape))) for shape in ((4, 3), 3))
    none = base[:0, :]
    pinn.sub_out(none, none, library.xp.ones_like(none))
    pinn.sum_rows_out(none, base[1, :], accumulate=True)
    assert np.all(library.numpy(base) == 1.0)
    pinn.sum_rows_out(none, sums)
    assert not np.any(library.numpy(sums))


# -- what is refused -------------------------------------------------------------------------------------------------


@writing
def test_arguments_that_share_memory_are_refused_and_nothing_is_written(library: Any) -> None:
    base = library.xp.ones_like(library.array(np.ones((5, 8))))
    a, out = base[:4, :], base[1:, :]
    cases = [
        lambda: pinn.sub_out(a, a, out),
        lambda: pinn.sub_out(base, base, base),
        lambda: pinn.mul_scalar_out(a, 3.0, out),
        lambda: pinn.tanh_deriv_mul_out(a, a, out),
        lambda: pinn.sum_rows_out(a, base[2, :]),
        lambda: pinn.mse_backward_inplace(a, a, out),
    ]
    for case in cases:
        with pytest.raises(scanfield.ArgumentError, match="shares memory with"):
            case()
    ws = make(library, 6, 5, [4])
    given = layers(library)
    with pytest.raises(scanfield.ArgumentError, match=r"ws\.dL_dz shares memory with dL_dh"):
        pinn.layer_backward_inplace(ws.dL_dz[0], given["h"], given["h_prev"], given["W"], 0, True, ws)
    assert np.all(library.numpy(base) == 1.0) and not np.any(library.numpy(ws.dW[0]))
    pinn.sub_out(base[:2, :], base[:2, :], base[2:4, :])  # beside each other is no sharing
    assert not np.any(library.numpy(base[2:4, :]))


@writing
def test_a_workspace_for_something_else_is_refused(library: Any) -> None:
    network = draws.network(library, 2)
    terms = draws.terms(library, 2, kinds=("data",))
    with pytest.raises(scanfield.ShapeError, match=r"features 4 \(the network: 5\), widths"):
        pinn.loss_and_grad(network, terms, workspace=make(library, 8, 4, [7], 2))
    with pytest.raises(scanfield.ShapeError, match="dtype float32"):
        pinn.loss_and_grad(network, terms, workspace=make(library, 8, 5, [7, 6], 2, dtype="float32"))
    with pytest.raises(scanfield.ArgumentError, match="chunk: 3"):
        pinn.loss_and_grad(network, terms, chunk=3, workspace=fresh(library, network, 8))
    with scanfield.use(method="generic"), pytest.raises(scanfield.BackendError, match="leave workspace out"):
        pinn.loss_and_grad(network, terms, workspace=fresh(library, network, 8))
    for bad, error in (
        ((0, 4, [7]), scanfield.ArgumentError),
        ((8, -1, [7]), scanfield.ArgumentError),
        ((8, 4, [0]), scanfield.ArgumentError),
        ((8, 4, [7], 0), scanfield.ArgumentError),
    ):
        with pytest.raises(error, match="allowed is an integer"):
            make(library, *bad)
    with pytest.raises(scanfield.DtypeError, match="float16"):
        make(library, 8, 4, [7], dtype="float16")
    with pytest.raises(scanfield.ArgumentError, match="layer_idx"):
        pinn.layer_backward_inplace(*layers(library).values(), 2, True, make(library, 6, 5, [4]))


@pytest.mark.backend("jax", "strict")
def test_libraries_that_are_not_written_say_so(library: Any) -> None:
    with pytest.raises(scanfield.BackendError, match="cannot be written"):
        make(library, 8, 4, [7])
    a = library.array(np.ones(3))
    with pytest.raises(scanfield.BackendError, match="cannot be written"):
        pinn.sub_out(a, a, a)
