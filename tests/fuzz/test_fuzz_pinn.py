"""Random Helmholtz problems: gradients against central differences, and residuals linear in the field."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from arrays import Library
from comparing import DRAWS, SEED, leave_out
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from scanfield import pinn
from scanfield.pinn import Network
from scanfield.pinn.placing import place_terms

__all__ = ["leave_out"]

ACTIVATIONS = ("tanh", "sin", "swish", "softplus", "gelu")
STEP = 1e-4  # of central differences of the loss, of fourth order: a wave along the points has a large third derivative
WIDE = 1e-3  # of second differences of the field


def fuzz(draws: int) -> settings:
    return settings(max_examples=draws, derandomize="SCANFIELD_FUZZ_SEED" not in os.environ, deadline=None)


@st.composite
def functions(draw: st.DrawFn, allow_complex: bool, size: float = 1.0, positive: bool = False) -> Any:
    """A number, or a smooth function of the points, real or complex."""
    real = draw(st.floats(0.1 if positive else -1.0, 1.0)) * size
    number: Any = real
    if allow_complex and draw(st.booleans()):
        number = real + 1j * draw(st.floats(-0.5, 0.5)) * size
    if draw(st.booleans()):
        return number
    tilt = draw(st.floats(-0.4, 0.4))
    return lambda x: number * (1.0 + tilt * np.cos(2.0 * x[:, 0]))


def domain(draw: st.DrawFn, d: int) -> pinn.Domain:
    start = draw(st.floats(-2.0, 2.0))
    lengths = [draw(st.floats(0.5, 2.0)) for _ in range(d)]
    box: pinn.Domain = pinn.Box([start] * d, [start + length for length in lengths])
    middle = [start + 0.5 * length for length in lengths]
    kind = (
        draw(st.sampled_from(["box", "ball", "hole", "points"]))
        if d > 1
        else draw(st.sampled_from(["box", "points"]))
    )
    if kind == "ball":
        return pinn.Ball(middle, lengths[0])
    if kind == "hole":
        return pinn.Difference(box, pinn.Ball(middle, 0.3 * min(lengths)))
    if kind == "points":
        normals = np.zeros((3, d))
        normals[:, 0] = 2.0
        return pinn.PointSet(box.interior(7), {"side": (box.interior(3, seed=1), normals)})
    return box


def condition(draw: st.DrawFn, over: pinn.Domain, unknowns: list[str], allow_complex: bool) -> Any:
    kinds = ["dirichlet", "neumann", "robin", "impedance", "sommerfeld", "unknown robin"]
    if isinstance(over, pinn.Box):
        kinds += ["periodic", "interface", "pml"]
    kind = draw(
        st.sampled_from(
            kinds if allow_complex else [k for k in kinds if k not in ("impedance", "sommerfeld", "pml")]
        )
    )
    common: dict[str, Any] = {"weight": draw(st.floats(0.1, 10.0))}
    if kind == "interface":
        size = np.subtract(over.upper, over.lower)
        low = np.asarray(over.lower) + 0.25 * size
        return pinn.Interface(pinn.Box(low, low + 0.5 * size), ratio=draw(st.floats(0.2, 3.0)), **common)
    if kind == "periodic":
        phase = draw(st.sampled_from([0.0, 0.7])) if allow_complex else 0.0
        return pinn.Periodic(axis=draw(st.integers(0, over.dimensions - 1)), phase=phase, **common)
    where = draw(st.sampled_from([None, over.parts[0], over.parts[-1:]]))
    if kind == "pml":
        return pinn.PML(0.2, where)
    value = draw(functions(allow_complex))
    if kind == "dirichlet":
        hard = not over.given and where is None and not callable(value) and draw(st.booleans())
        return pinn.Dirichlet(value, hard, where=where, **common)
    if kind == "robin":
        return pinn.Robin(draw(functions(allow_complex)), value, where=where, **common)
    if kind == "unknown robin":
        unknowns.append("admittance")
        times = draw(functions(allow_complex))
        return pinn.Robin(pinn.Unknown(0.7, "admittance", times), value, where=where, **common)
    if kind == "sommerfeld":
        return pinn.Sommerfeld(where=where, **common)
    return {"neumann": pinn.Neumann, "impedance": pinn.Impedance}[kind](value, where=where, **common)


@st.composite
def problems(draw: st.DrawFn) -> pinn.Helmholtz:
    """A problem in one to three dimensions."""
    over = domain(draw, draw(st.integers(1, 3)))
    allow_complex = draw(st.booleans())
    wavenumber: Any = draw(functions(allow_complex, 4.0, positive=True))
    unknowns: list[str] = []
    if draw(st.booleans()):
        unknowns.append("wavenumber")
        plus = draw(functions(allow_complex)) if draw(st.booleans()) else 0.0
        wavenumber = pinn.Unknown(
            draw(st.floats(0.5, 4.0)), times=draw(functions(allow_complex, positive=True)), plus=plus
        )
    conditions = [condition(draw, over, unknowns, allow_complex) for _ in range(draw(st.integers(0, 3)))]
    kept: list[Any] = []
    for one in conditions:
        # One layer, one hard condition: two of them contradict each other. Some pairs are refused, with the way out.
        if isinstance(one, pinn.PML) and (
            "wavenumber" in unknowns or any(isinstance(c, pinn.PML) for c in kept)
        ):
            continue
        if any(c == one or (is_hard(c) and is_hard(one)) for c in kept) or is_unknown(one, kept):
            continue
        if is_hard(one) and unknowns and one.value != 0.0:
            continue
        kept.append(one)
    data = []
    if draw(st.booleans()):
        points = over.interior(4, seed=3)
        data.append(
            pinn.Data(
                points,
                np.linspace(-1.0, 1.0, len(points)) * (1j if allow_complex else 1.0),
                draw(st.floats(0.5, 2.0)),
            )
        )
    scale = draw(st.sampled_from([None, 0.3]))
    return pinn.Helmholtz(over, wavenumber, draw(functions(allow_complex)), kept, data, field_scale=scale)


def is_hard(one: Any) -> bool:
    return isinstance(one, pinn.Dirichlet) and one.hard


def is_unknown(one: Any, kept: list[Any]) -> bool:
    """Whether it has an unknown that another condition has already."""
    both = [c for c in (one, *kept) if isinstance(c, pinn.Robin) and isinstance(c.coefficient, pinn.Unknown)]
    return one in both and len(both) > 1


@st.composite
def networks(draw: st.DrawFn, library: Library, problem: pinn.Helmholtz) -> Network:
    d = problem.dimensions
    kind = draw(st.sampled_from(["fourier", "frozen", "raw", "periodic"]))
    count = draw(st.integers(0, 99))
    if kind == "raw":
        embedding: Any = pinn.RawCoordinates(
            d, mean=draw(st.floats(-1.0, 1.0)), scale=draw(st.floats(0.5, 2.0))
        )
    elif kind == "periodic":
        embedding = pinn.PeriodicFeatures([1.5, *[None] * (d - 1)], draw(st.integers(1, 2)))
    else:
        embedding = pinn.FourierFeatures(
            d, draw(st.integers(1, 4)), scale=0.4, trainable=kind == "fourier", seed=count
        )
    hidden = draw(st.sampled_from([[], [1], [4], [3, 5], [4, 3, 2]]))
    made = Network.create(
        embedding,
        hidden=hidden,
        outputs=problem.outputs,
        activation=draw(st.sampled_from(ACTIVATIONS)),
        seed=count,
    )
    rng = np.random.default_rng(count)
    host = {n: v + 0.2 * rng.normal(size=v.shape) * (n[0] == "b") for n, v in made.parameters.items()}
    moved = {n: library.array(v, "float64") for n, v in host.items()}
    return Network(moved, embedding=embedding, activation=made.activation)


def shifted(library: Library, network: Network, direction: dict[str, np.ndarray], step: float) -> Network:
    moved = {
        n: library.array(library.numpy(network.parameters[n]) + step * v, "float64")
        for n, v in direction.items()
    }
    return network.replace(moved)


def near(got: Any, want: Any, size: float, limit: float, what: Any) -> None:
    error = float(np.max(np.abs(np.asarray(got) - np.asarray(want)), initial=0.0))
    assert error <= limit * max(size, 1e-12), (what, error, size)


def slope_of(function: Any) -> float:
    """The derivative at 0."""
    ends = [function(n * STEP) for n in (-2, -1, 1, 2)]
    return float((ends[0] - 8 * ends[1] + 8 * ends[2] - ends[3]) / (12 * STEP))


def check_gradients(library: Library, data: st.DataObject) -> None:
    """For every parameter, unknown and set of points, along a random direction each."""
    problem = data.draw(problems())
    network = data.draw(networks(library, problem))
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    unknowns = dict(problem.unknowns)
    terms = place_terms(problem.terms(problem.draw(data.draw(st.integers(1, 9)))), network)
    chunk = data.draw(st.sampled_from([1, 4, 256]))

    def loss(own: Network, numbers: dict[str, float], at: Any = terms) -> float:
        return float(library.numpy(pinn.loss_and_grad(own, at, wavenumber=numbers or None, chunk=chunk).loss))

    found = pinn.loss_and_grad(network, terms, wavenumber=unknowns or None, chunk=chunk, points=True)
    residuals = pinn.residuals(network, terms, wavenumber=unknowns or None, chunk=chunk)
    total = sum(t.weight * np.mean(np.sum(library.numpy(residuals[t.name]) ** 2, axis=1)) for t in terms)
    here = float(library.numpy(found.loss))
    near(here, total, here, 1e-12, "the loss is made of the residuals")
    for name in network.parameters:
        direction = rng.normal(size=network.parameters[name].shape)
        slope = float(np.sum(library.numpy(found.gradients[name]) * direction))
        want = slope_of(lambda h, n=name, v=direction: loss(shifted(library, network, {n: v}, h), unknowns))
        near(slope, want, here + abs(slope), 1e-6, name)
    for name, value in unknowns.items():
        slope = float(library.numpy(found.gradients[name]))
        want = slope_of(lambda h, n=name, v=value: loss(network, {**unknowns, n: v + h}))
        near(slope, want, here + abs(slope), 1e-6, name)
    for place, term in enumerate(terms):
        for number, piece in enumerate(term.pieces):
            x = library.numpy(piece.points)
            direction = rng.normal(size=x.shape)

            def moved(
                h: float, place: int = place, number: int = number, x: Any = x, v: Any = direction
            ) -> float:
                term = terms[place]
                pieces = list(term.pieces)
                pieces[number] = pieces[number]._replace(points=library.array(x + h * v, "float64"))
                term = term._replace(pieces=tuple(pieces))
                return loss(network, unknowns, (*terms[:place], term, *terms[place + 1 :]))

            slope = float(np.sum(library.numpy(found.gradients["points"][place][number]) * direction))
            near(slope, slope_of(moved), here + abs(slope), 1e-6, ("points", term.name))
    jacobian = pinn.jacobian(network, terms, wavenumber=unknowns or None, chunk=chunk)
    own = 2.0 * library.numpy(jacobian.matrix).T @ library.numpy(jacobian.residual)
    flat = [library.numpy(found.gradients[name]).reshape(-1) for name in (*network.parameters, *unknowns)]
    gradient = np.concatenate(flat)
    near(own, gradient, here + float(np.max(np.abs(gradient))), 1e-10, "the Jacobian's gradient")


@pytest.mark.backend("numpy")
@fuzz(DRAWS)
@seed(SEED)
@given(data=st.data())
def test_gradients(library: Library, data: st.DataObject) -> None:
    check_gradients(library, data)


@pytest.mark.backend("torch")
@fuzz(max(2, DRAWS // 8))
@seed(SEED)
@given(data=st.data())
def test_gradients_on_tensors(library: Library, data: st.DataObject) -> None:
    check_gradients(library, data)


@pytest.mark.backend("numpy")
@fuzz(DRAWS)
@seed(SEED)
@given(data=st.data())
def test_residuals_are_affine_in_the_field(library: Library, data: st.DataObject) -> None:
    """A last layer between two others gives the residual between theirs, and a field twice as large as far from zero."""
    problem = data.draw(problems())
    network = data.draw(networks(library, problem))
    unknowns = dict(problem.unknowns) or None
    terms = place_terms(problem.terms(problem.draw(5)), network)
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    last = [f"{kind}{network.layers - 1}" for kind in "Wb"]
    other = network.replace(
        {n: network.parameters[n] + rng.normal(size=network.parameters[n].shape) for n in last}
    )
    share = data.draw(st.floats(-2.0, 2.0))
    between = network.replace(
        {n: share * network.parameters[n] + (1.0 - share) * other.parameters[n] for n in last}
    )
    one, two, mean = (pinn.residuals(n, terms, wavenumber=unknowns) for n in (network, other, between))
    for name, found in mean.items():
        want = share * one[name] + (1.0 - share) * two[name]
        near(found, want, float(np.max(np.abs(one[name])) + np.max(np.abs(two[name]))), 1e-12, name)


@pytest.mark.backend("numpy")
@fuzz(DRAWS)
@seed(SEED)
@given(data=st.data())
def test_residuals_are_what_the_field_leaves(library: Library, data: st.DataObject) -> None:
    """Each condition, written down again, in differences of the field that `field` gives."""
    problem = data.draw(problems())
    network = data.draw(networks(library, problem))
    unknowns = dict(problem.unknowns)
    sample = problem.draw(4)
    found = pinn.residuals(network, problem.terms(sample), wavenumber=unknowns or None)
    if problem.interfaces:  # differences reach across the rim, where the field jumps
        return
    if problem.layer is None:
        x = sample.interior
        k = problem.wavenumber_at(x)
        f = problem.source(x) if callable(problem.source) else problem.source
        want = [second(problem, network, x, i) for i in range(problem.dimensions)]
        compare(found["equation"], sum(want) + k**2 * problem.field(network, x) - f, 1e-4, "equation")
    names = iter([name for name in found if name != "equation"])
    for one, surface in zip(problem.conditions, sample.surfaces, strict=True):
        if isinstance(one, pinn.Dirichlet) and one.hard:
            assert surface is not None
            u = problem.field(network, surface.points)
            near(u, one.value, abs(one.value) + 1.0, 1e-12, "hard condition")
            continue
        name = next(names)
        if isinstance(one, pinn.Periodic):
            x = surface.points
            low = x.copy()
            low[:, one.axis] = problem.domain.lower[one.axis]
            turn = np.exp(1j * one.phase) if one.phase else 1.0
            value = problem.field(network, x) - turn * problem.field(network, low)
            compare(found[name], value, 1e-6, name)
            along = np.zeros_like(x)
            along[:, one.axis] = 1.0
            name = next(names)
            value = first(problem, network, x, along) - turn * first(problem, network, low, along)
            compare(found[name], value, 1e-6, name)
            continue
        x, normals = surface
        g: Any = getattr(one, "value", 0.0)
        g = g(x) if callable(g) else g
        u = problem.field(network, x)
        if isinstance(one, pinn.Dirichlet):
            compare(found[name], u - g, 1e-6, name)
            continue
        slope = first(problem, network, x, normals)
        if isinstance(one, pinn.Robin):
            c: Any = one.coefficient
            slope = slope + u * (c.at(x) if isinstance(c, pinn.Unknown) else c(x) if callable(c) else c)
        elif isinstance(one, pinn.Impedance | pinn.Sommerfeld):
            slope = slope - 1j * problem.wavenumber_at(x) * u
        compare(found[name], slope - g, 1e-6, name)


def compare(found: Any, want: np.ndarray, limit: float, what: str) -> None:
    whole = found[:, 0] + 1j * found[:, 1] if found.shape[1] == 2 else found[:, 0]
    near(whole, want, 1.0 + float(np.max(np.abs(want))), limit, what)


def first(problem: pinn.Helmholtz, network: Network, x: np.ndarray, along: np.ndarray) -> np.ndarray:
    """The slope along vectors (n, d)."""
    ends = [problem.field(network, x + sign * 1e-5 * along) for sign in (1, -1)]
    return np.asarray((ends[0] - ends[1]) / 2e-5)


def second(problem: pinn.Helmholtz, network: Network, x: np.ndarray, axis: int) -> np.ndarray:
    """The second derivative along an axis, of fourth order."""
    step = np.zeros(problem.dimensions)
    step[axis] = WIDE
    u = [problem.field(network, x + n * step) for n in (-2, -1, 0, 1, 2)]
    return np.asarray((-u[0] + 16 * u[1] - 30 * u[2] + 16 * u[3] - u[4]) / (12 * WIDE**2))
