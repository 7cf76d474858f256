"""A training allocates nothing of the size of its points once it runs, and its memory does not grow with them."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import scanfield
from scanfield import optimize, pinn
from scanfield.pinn.objective import Objective
from scanfield.pinn.placing import to_host
from scanfield.pinn.stages import resolve
from scanfield.pinn.weights import annealed

WAVE = pinn.solutions.plane_wave(6.0, (3.0, 4.0))


def square() -> pinn.Helmholtz:
    return pinn.Helmholtz(pinn.Box((0, 0), (1, 1)), 6.0, 0.0, pinn.Impedance(WAVE.impedance))


def net(features: int = 6, hidden: Any = (16,), **where: Any) -> pinn.Network:
    return pinn.Network.create(pinn.FourierFeatures(2, features, wavenumber=6.0), hidden=hidden, **where)


def peak(work: Callable[[], Any]) -> int:
    """Bytes that are held at most during some work, beside what is there before it."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        work()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


@pytest.mark.backend("numpy")
@pytest.mark.parametrize("optimizer", ["adam", "lbfgs"])
def test_a_training_step_allocates_nothing_of_the_size_of_a_chunk(optimizer: str) -> None:
    """Vectors as long as the parameters come and go, and NumPy's iterators buffer 8192 numbers, whatever the arrays are."""
    network, chunk = net(4, (8,)), 16_384
    objective = Objective(square(), network, square().draw(40_000, 4000), chunk=chunk)
    (stage,) = resolve(optimizer, 100, network)
    x = objective.start()
    state = stage.init(objective, x)
    for _ in range(2):
        x, state = stage.step(objective, x, state)
    workspace = objective.workspace()
    held = workspace.bytes
    used = peak(lambda: stage.step(objective, x, state))
    smallest = chunk * 4 * 8  # the sines of the points
    assert objective.workspace() is workspace and workspace.bytes == held > 20 * smallest
    assert used < smallest // 2


@pytest.mark.backend("numpy")
def test_a_million_points_take_less_than_300_megabytes() -> None:
    """All that a training holds for a point: coordinates, coefficients, residuals of a report (a million took 82 MB)."""

    def held(points: int) -> int:
        adam = optimize.Adam(1e-3)
        return peak(lambda: pinn.train(square(), net(2, (4,)), points=points, optimizer=adam, iterations=1))

    held(1000)
    few, many = held(20_000), held(120_000)
    assert few + (many - few) / 100_000 * 980_000 < 150e6


@pytest.mark.backend("numpy", "torch")
def test_the_workspace_changes_no_bit_of_a_training(library: Any, xp: Any, device: Any) -> None:
    """The same steps without one; and a chunk longer than the points makes no longer buffers."""
    network = net(xp=xp, device=device)
    sample = square().draw(40)
    plain, kept = (Objective(square(), network, sample, {"impedance left": 3.0}, chunk=16) for _ in range(2))
    plain.workspace = lambda: None  # type: ignore[method-assign]
    x = plain.start()
    want, found = ([each.loss_and_gradient(x * scale) for scale in (1.0, 0.5)] for each in (plain, kept))
    for (loss, gradient), (other, same) in zip(want, found, strict=True):
        assert float(loss) == float(other)
        np.testing.assert_array_equal(to_host(gradient), to_host(same))
    assert annealed(plain, x) == annealed(kept, x)
    with scanfield.use(method="generic"):
        assert kept.workspace() is None
        assert float(kept.loss_and_gradient(x)[0]) == pytest.approx(float(want[0][0]), rel=1e-12)
    long = Objective(square(), network, sample, chunk=10**9).workspace()
    assert long is not None and long.batch_size == 40
