"""No kernel has two threads at the same memory, one of them writing, without a barrier in between (`races.h`)."""

from __future__ import annotations

from typing import Any

import emulator
import numpy as np
import pinn_draws as draws
import pytest
import standin
from arrays import numpy_dtype
from examples import examples

import scanfield
from scanfield import pinn


@pytest.fixture
def watched(card: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Kernels compiled anew, with every access to memory watched; and forgotten."""
    from scanfield_cupy import modules

    monkeypatch.setattr(emulator, "OPTIONS", emulator.RACES)
    caches = modules._function, modules._module
    for cache in caches:
        cache.cache_clear()
    standin.LAUNCHES.clear()
    yield card
    for cache in caches:
        cache.cache_clear()


# Packs and options in turns. The chunk kernels have their barriers in the same places with tensor cores and without.
@pytest.mark.parametrize(
    ("op", "method", "dtype", "every", "kernels"),
    [
        ("linear_scan", "cupy.rawkernel", "float32", 4, {"forward_8", "backward_8"}),
        ("selective_scan", "cupy.rawkernel", "float32", 5, {"scan_forward", "scan_backward"}),
        ("gdn2", "cupy.rawkernel", "float32", 6, {"delta_forward", "delta_backward"}),
        (
            "gdn2",
            "cupy.rawkernel.tensor",
            "bfloat16",
            9,
            {"delta_inside", "delta_states", "delta_output", "delta_states_back", "delta_gradients"},
        ),
    ],
)
def test_scans(watched: Any, op: str, method: str, dtype: str, every: int, kernels: set[str]):
    for example in examples(op)[::every]:
        arrays = {
            name: watched.cupy.asarray(x.astype(numpy_dtype(dtype)) if x.dtype.kind == "f" else x)
            for name, x in example.inputs.items()
        }
        result, pullback = scanfield.vjp(getattr(scanfield, op), **arrays, **example.options, method=method)
        pullback(result.output * 0 + 1, result.final_state * 0 + 1)
    assert kernels <= {launch.name for launch in standin.LAUNCHES}


def test_segments_of_long_series(watched: Any):
    """Blocks of a launch walk side by side through parts of one series; no two meet."""
    rng = np.random.default_rng(0)
    a, b = (watched.array(rng.random((1, 17_000, 1)), "float32") for _ in range(2))
    result, pullback = scanfield.vjp(scanfield.linear_scan, a, b, method="cupy.rawkernel")
    pullback(result.output)
    u, delta, A, B, C = (
        rng.random(shape) for shape in ((1, 300, 2), (1, 300, 2), (2, 3), (1, 300, 3), (1, 300, 3))
    )
    arrays = watched.arrays({"u": u, "delta": delta, "A": -A, "B": B, "C": C}, "float32")
    result, pullback = scanfield.vjp(scanfield.selective_scan, **arrays, method="cupy.rawkernel")
    pullback(result.output)
    names = {launch.name for launch in standin.LAUNCHES}
    assert {"summary_1", "summary_back_1", "scan_summary", "scan_summary_back"} <= names


def test_the_pinn(watched: Any):
    network = draws.network(watched, 2, activation="tanh", dtype="float32")
    terms = draws.terms(watched, 2, dtype="float32")
    pinn.loss_and_grad(network, terms, wavenumber=draws.UNKNOWNS, chunk=4, points=True)
    rng = np.random.default_rng(0)
    shapes = (1500, 5), (5, 35), (1500, 70)
    x, B, bar = (watched.array(rng.random(shape), "float32") for shape in shapes)
    pinn.fourier_grad(x, bar, B, watched.cupy.empty((5, 35), "float32"))
    assert {"row_sums", "frequency_gradient", "omega_gradient"} <= {
        launch.name for launch in standin.LAUNCHES
    }
