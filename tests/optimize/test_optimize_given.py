"""What callers give: complex numbers, arrays that are written again, tensors that autograd follows, NumPy's numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from arrays import Library

from scanfield.errors import ArgumentError, BackendError, DtypeError
from scanfield.optimize import (
    LBFGS,
    Adam,
    Constant,
    Cosine,
    Exponential,
    LevenbergMarquardt,
    Normal,
    least_squares,
    minimise,
)


def test_complex_numbers_have_no_order(library: Library):
    """Neither as parameters nor as a loss, its gradient, residuals, their Jacobian or the products of these."""
    xp, x = library.xp, library.array(np.ones(2))
    wrong = library.array(np.ones(2) + 1j)
    square = wrong[:, None] * wrong[None, :]
    for name, call in {
        "x": lambda: minimise(lambda z: (0.0, z), wrong),
        "loss": lambda: minimise(lambda z: (xp.sum(wrong), z), x),
        "gradient": lambda: minimise(lambda z: (0.0, wrong), x),
        "residuals": lambda: least_squares(lambda z: wrong, lambda z: (z, square), x),
        "Jacobian": lambda: least_squares(lambda z: z, lambda z: (z, square), x),
        r"J\^T J": lambda: least_squares(lambda z: z, lambda z: Normal(z, square), x),
    }.items():
        with pytest.raises(
            DtypeError, match=f"^{name}: dtype complex128 is not taken; allowed are .*float64"
        ):
            call()
    with pytest.raises(DtypeError, match="loss: a complex number"):
        minimise(lambda z: (1j, z), x)
    with pytest.raises(BackendError, match="gradient: expected an array"):
        minimise(lambda z: (1.0, [1.0, 2.0]), x)


def _valley(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rosenbrock's, as residuals and their Jacobian."""
    return np.asarray([10 * (x[1] - x[0] ** 2), 1 - x[0]]), np.asarray([[-20 * x[0], 10.0], [-1.0, 0.0]])


@pytest.mark.parametrize("form", ["lbfgs", "primal", "residual", "normal"])
def test_a_function_may_write_into_one_array(form: str):
    """Each of its calls into the same: the results are those of a function that makes new ones."""
    held: dict[str, np.ndarray] = {}

    def owned(name: str, array: np.ndarray, again: bool) -> np.ndarray:
        if not again:
            return array
        held.setdefault(name, np.zeros(array.shape))[...] = array
        return held[name]

    def run(again: bool) -> Any:
        def jacobian(x: np.ndarray) -> Any:
            r, j = _valley(x)
            if form == "normal":
                return Normal(owned("J^T r", j.T @ r, again), owned("J^T J", j.T @ j, again))
            return owned("r", r, again), owned("J", j, again)

        def residuals(x: np.ndarray) -> np.ndarray:
            found = jacobian(x)
            return np.sum(_valley(x)[0] ** 2)[()] if form == "normal" else found[0]

        def loss(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            r, j = _valley(x)
            return np.sum(r**2), owned("gradient", 2 * j.T @ r, again)

        start = np.asarray([-1.2, 1.0])
        if form == "lbfgs":
            return minimise(loss, start)
        system = "auto" if form == "normal" else form
        return least_squares(
            residuals, jacobian, start, optimizer=LevenbergMarquardt(system=system, damping=1e-6)
        )

    want, got = run(False), run(True)
    assert np.array_equal(got.x, want.x) and got[1:] == want[1:] and want.reason == "gradient"
    assert want.evaluations > want.iterations + 1  # some steps were tried twice


@pytest.mark.backend("torch")
def test_autograd_does_not_follow_an_optimiser(library: Library):
    """What comes back is a leaf that requires a gradient where the parameter did, with the same numbers."""
    torch = pytest.importorskip("torch")
    start = np.asarray([1.0, -2.0])

    def loss(x: Any) -> tuple[Any, Any]:
        if x.requires_grad:
            value = (x**4).sum()
            return value, torch.autograd.grad(value, x, create_graph=True)[0]
        return (x**4).sum(), 4 * x**3

    def residuals(x: Any) -> Any:
        return torch.cat([x - 3.0, x**2])

    def jacobian(x: Any) -> Any:
        return residuals(x), torch.cat([torch.eye(2, dtype=x.dtype), torch.diag(2 * x)])

    found = []
    for required in (False, True):
        x, adam = library.array(start).requires_grad_(required), Adam(0.1)
        params = {"x": x, "fixed": library.array(start)}
        state = adam.init(params)
        for _ in range(2):
            gradient = loss(params["x"])[1]
            params, state = adam.update(params, {"x": gradient, "fixed": gradient}, state)
        assert not any(a.requires_grad for a in (params["fixed"], state.first["x"], state.second["x"]))
        ends = [params["x"], minimise(loss, x, iterations=5).x, least_squares(residuals, jacobian, x).x]
        assert all(end.is_leaf and end.requires_grad == required for end in ends)
        found.append(torch.cat(ends).detach())
    torch.testing.assert_close(*found, rtol=1e-12, atol=0)

    def updated(value: Any) -> Any:
        params = {"x": value}
        return Adam(0.1, weight_decay=1.0).update(params, params, Adam(0.1).init(params))[0]["x"]

    slope = torch.func.grad(lambda value: updated(value).sum())(library.array(start))
    torch.testing.assert_close(
        slope, torch.full_like(slope, 0.9)
    )  # who differentiates an update gets all of it


def test_numbers_of_numpy_are_numbers():
    """As settings, which become Python's, as a count of iterations and as what a schedule gives."""
    single, count = np.float32(0.5), np.int64(3)
    for made, plain in (
        (Adam(single, beta1=single, weight_decay=single), Adam(0.5, beta1=0.5, weight_decay=0.5)),
        (LBFGS(history=count, tolerance=single, c2=single), LBFGS(history=3, tolerance=0.5, c2=0.5)),
        (LevenbergMarquardt(damping=single, tries=count), LevenbergMarquardt(damping=0.5, tries=3)),
        (Cosine(single, count), Cosine(0.5, 3)),
        (Constant(single), Constant(0.5)),
        (Exponential(single, np.float16(0.25), count), Exponential(0.5, 0.25, 3)),
    ):
        assert repr(made) == repr(plain)
    x = np.ones(2)
    assert minimise(lambda z: (np.sum(z**4), 4 * z**3), x, iterations=count).iterations == 3
    assert (
        least_squares(lambda z: z**3, lambda z: (z**3, np.diag(3 * z**2)), x, iterations=count).iterations
        == 3
    )
    wide = {"x": np.ones(2, np.float32)}
    adam = Adam(lambda step: np.float64(0.1))
    assert adam.update(wide, wide, adam.init(wide))[1].first["x"].dtype == np.float32
    with pytest.raises(ArgumentError, match="learning_rate = "):
        Adam(np.float32(-1.0))


@pytest.mark.parametrize(("rows", "parameters"), [(0, 0), (3, 0), (0, 3)])
def test_nothing_to_fit_is_the_end(rows: int, parameters: int):
    """No parameters or no residuals: the gradient is zero, as it is to L-BFGS."""
    found = least_squares(
        lambda x: np.ones(rows), lambda x: (np.ones(rows), np.ones((rows, parameters))), np.zeros(parameters)
    )
    assert found.reason == "gradient" and found.value == rows and found.x.shape == (parameters,)
    assert minimise(lambda x: (1.0, x), np.zeros(parameters)).reason == "gradient"
