"""Every layer: its gradients against central differences, and one result on every library."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from arrays import Library, deviation, same_bits
from layer_cases import CASES, PACKED, Case

from scanfield.layers import (
    Activated,
    Linear,
    Sequential,
    causal_conv1d,
    causal_conv1d_step,
    causal_conv1d_vjp,
)

TOLERANCE = {"float64": 1e-11, "float32": 2e-5}
ON_JAX = {"mamba": "float64", "gdn2": "float64", "language model: untied": "float64"}
ON_JAX |= dict.fromkeys(
    ("activations", "selective ssm", "mamba2", "gdn2: scalar gates", "residual"), "float32"
)
ON_JAX |= {"embedding": "float32", "convolution": "float64"}


def leave_out(backend: str, test: str, given: dict[str, Any]) -> bool:
    """A layer compiles for seconds on JAX and is thousands of tasks on Dask: one of each kind, in one dtype."""
    if backend == "dask":
        few = test == "test_same_on_every_library" and given["case"].name in ("convolution", "linear")
        return test != "test_convolution" and not (few and given["dtype"] == "float64")
    if backend == "jax" and test == "test_same_on_every_library":
        return ON_JAX.get(given["case"].name) != given["dtype"]
    return False


def both(case: Case, rows: int) -> tuple[np.ndarray, dict[str, np.ndarray], dict[str, Any]]:
    if rows == 1:
        return case.input(1), case.state(len(PACKED) - 1), {"cu_seqlens": PACKED}
    return case.input(), case.state(2), {}


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_central_differences(case: Case, packed: bool):
    """Each gradient along a random direction; the loss reads the output and the state that goes out."""
    layer = case.layer
    x, state, options = both(case, 1 if packed else 2)
    result, pullback = layer.vjp(x, state, **options)
    d_output, d_state = case.cotangents(result)
    d_x, d_before, gradients = pullback(d_output, d_state)

    def loss(x: Any = x, before: Any = state, parameters: Any = None) -> float:
        output, after = (layer if parameters is None else layer.replaced(parameters))(x, before, **options)
        return float(np.sum(output * d_output)) + sum(float(np.sum(after[n] * d_state[n])) for n in after)

    rng, h, exact, numeric = np.random.default_rng(0), 1e-6, {}, {}
    assert list(gradients) == list(layer.named_parameters())
    for name, array in layer.named_parameters().items():
        v = rng.standard_normal(array.shape)
        exact[name] = np.sum(gradients[name] * v)
        ends = [loss(parameters={name: array + step * v}) for step in (h, -h)]
        numeric[name] = (ends[0] - ends[1]) / (2 * h)
    for name, array in state.items():
        v = rng.standard_normal(array.shape)
        exact[f"state {name}"] = np.sum(d_before[name] * v)
        ends = [loss(before={**state, name: array + step * v}) for step in (h, -h)]
        numeric[f"state {name}"] = (ends[0] - ends[1]) / (2 * h)
    if layer.tokens:
        assert d_x is None
    else:
        v = rng.standard_normal(x.shape)
        exact["x"] = np.sum(d_x * v)
        numeric["x"] = (loss(x=x + h * v) - loss(x=x - h * v)) / (2 * h)
    size = max(abs(value) for value in numeric.values())
    for name in exact:
        assert abs(exact[name] - numeric[name]) <= 1e-7 * abs(numeric[name]) + 1e-8 * max(size, 1), name


def numbers(library: Library, tree: Any) -> dict[str, np.ndarray]:
    (output, state), d_x, d_before, gradients = tree
    named = {"output": output, "d_x": d_x, **{f"state {n}": a for n, a in state.items()}}
    named |= {f"d_state {n}": a for n, a in (d_before or {}).items()} | gradients
    return {n: library.numpy(a) for n, a in named.items() if a is not None}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_same_on_every_library(library: Library, case: Case, dtype: str):
    """Result and gradients equal those of NumPy in float64, on the arrays' device and in their dtypes."""
    x, state = case.input(), case.state(2)
    result, pullback = case.layer.vjp(x, state)
    cotangents = case.cotangents(result)
    want = numbers(Library(), (result, *pullback(*cotangents)))
    layer = case.make().init(0, library.xp, device=library.device, dtype=dtype)
    parameters = library.arrays(case.layer.named_parameters(), dtype)

    def run(parameters: Any, x: Any, state: Any, d_output: Any, d_state: Any) -> Any:
        result, pullback = layer.replaced(parameters).vjp(x, state)
        return (result, *pullback(d_output, d_state))

    arguments = (library.array(x, dtype), library.arrays(state, dtype))
    found = library.run(
        run, parameters, *arguments, library.array(cotangents[0], dtype), library.arrays(cotangents[1], dtype)
    )
    for name, array in found[3].items():
        assert library.is_array(array) and library.on_device(array) and library.dtype(array) == dtype, name
    got = numbers(library, found)
    assert got.keys() == want.keys()
    size = max(float(np.max(np.abs(a))) for n, a in want.items() if n != "output")
    for name, array in got.items():
        assert deviation(array, want[name], floor=1e-2 * size) <= TOLERANCE[dtype], name
    if library.name not in ("jax", "dask"):
        plain = layer.replaced(parameters)(*arguments)
        assert same_bits(library.raw(plain.output), library.raw(found[0].output))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.backend("numpy", "torch", "strict")
def test_cut_anywhere_step_by_step_and_packed(library: Library, case: Case):
    """A sequence in two parts, token by token, or packed behind another one: the same numbers."""
    layer = case.make().init(0, library.xp, device=library.device, dtype="float64")
    layer = layer.replaced(library.arrays(case.layer.named_parameters()))
    x = case.input()
    whole = layer(library.array(x))
    want, last = library.numpy(whole.output), {n: library.numpy(a) for n, a in whole.state.items()}
    for cut in (0, 1, 4, x.shape[1]):
        first = layer(library.array(x[:, :cut]))
        second = layer(library.array(x[:, cut:]), first.state)
        got = np.concatenate([library.numpy(first.output), library.numpy(second.output)], axis=1)
        assert deviation(got, want) <= 1e-12
        assert all(deviation(library.numpy(second.state[n]), last[n]) <= 1e-12 for n in last)
    state, tokens = None, []
    for t in range(x.shape[1]):
        token, state = layer.step(library.array(x[:, t]), state)
        tokens.append(library.numpy(token))
    assert deviation(np.stack(tokens, axis=1), want) <= 1e-12
    assert all(deviation(library.numpy(state[n]), last[n]) <= 1e-12 for n in last)
    row = np.concatenate([x[:1], x[1:]], axis=1)
    packed = layer(library.array(row), cu_seqlens=[0, x.shape[1], 2 * x.shape[1]])
    got = np.concatenate(np.split(library.numpy(packed.output), 2, axis=1))
    assert deviation(got, want) <= 1e-12
    assert all(deviation(library.numpy(packed.state[n]), last[n]) <= 1e-12 for n in last)


# -- the convolution as a function -----------------------------------------------------------------------------


def convolved(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, state: np.ndarray) -> np.ndarray:
    """The readable truth, number by number."""
    series, width = np.concatenate([state, x], axis=1), weight.shape[1]
    y = np.zeros_like(x)
    for t in range(x.shape[1]):
        for c in range(x.shape[2]):
            y[:, t, c] = bias[c] + sum(weight[c, j] * series[:, t + j, c] for j in range(width))
    return y


@pytest.mark.parametrize("time", [0, 2, 9])  # nothing, shorter than the window, longer
def test_convolution(library: Library, dtype: str, time: int):
    rng = np.random.default_rng(time)
    given = {
        "x": rng.standard_normal((2, time, 3)),
        "weight": rng.standard_normal((3, 4)),
        "bias": rng.standard_normal(3),
        "initial_state": rng.standard_normal((2, 3, 3)),
    }
    want = convolved(*given.values())
    arrays = library.arrays(given, dtype)
    got = causal_conv1d(**arrays)
    assert deviation(library.numpy(got.output), want, floor=1) <= TOLERANCE[dtype] / 10
    series = np.concatenate([given["initial_state"], given["x"]], axis=1)
    assert deviation(library.numpy(got.final_state), series[:, -3:]) <= 1e-7
    sigma = 1 / (1 + np.exp(-want))
    active, pullback = causal_conv1d_vjp(**arrays, activation="silu")
    assert deviation(library.numpy(active.output), want * sigma, floor=1) <= TOLERANCE[dtype] / 10
    d, d_last = rng.standard_normal(want.shape), rng.standard_normal((2, 3, 3))
    gradients = pullback(library.array(d, dtype), library.array(d_last, dtype))
    inner = d * sigma * (1 + want * (1 - sigma))
    d_series = np.concatenate([np.zeros((2, time, 3)), d_last], axis=1)
    for t in range(time):
        for j in range(4):
            d_series[:, t + j] += inner[:, t] * given["weight"][:, j]
    truth = {
        "x": d_series[:, 3:],
        "initial_state": d_series[:, :3],
        "bias": inner.sum(axis=(0, 1)),
        "weight": np.stack([np.sum(inner * series[:, j : j + time], axis=(0, 1)) for j in range(4)], axis=-1),
    }
    assert gradients.keys() == truth.keys()
    for name, value in truth.items():
        assert deviation(library.numpy(gradients[name]), value, floor=1) <= TOLERANCE[dtype], name


def test_convolution_by_steps():
    rng = np.random.default_rng(3)
    x, weight, state = rng.standard_normal((2, 5, 3)), rng.standard_normal((3, 4)), None
    want = causal_conv1d(x, weight, activation="silu")
    before = rng.standard_normal((2, 3, 3))
    kept = before.copy()
    causal_conv1d_step(before, x[:, 0], weight)
    assert np.array_equal(before, kept)
    for t in range(5):
        y, state = causal_conv1d_step(state, x[:, t], weight, activation="silu")
        assert deviation(y, want.output[:, t]) <= 1e-15
    assert same_bits(state, want.final_state)


def test_a_layer_in_several_places_has_its_whole_gradient_under_each_name():
    """Each name had the part of its place, and of two steps by names the last alone was kept."""
    draw = np.random.default_rng(0)
    inner = Linear(3, 3)
    layer = Sequential(inner, Activated("silu"), Sequential(inner)).init(0, np, dtype="float64")
    x, d_output, way = (
        draw.standard_normal((2, 4, 3)),
        draw.standard_normal((2, 4, 3)),
        draw.standard_normal((3, 3)),
    )
    gradients = layer.vjp(x)[1](d_output)[2]
    assert list(gradients) == ["0.weight", "0.bias", "2.0.weight", "2.0.bias"]
    weight = layer.named_parameters()["0.weight"]
    ends = []
    for step in (1e-5, -1e-5):
        layer.set_parameter("0.weight", weight + step * way)
        ends.append(np.sum(layer(x).output * d_output))
    for name in ("0.weight", "2.0.weight"):
        assert np.sum(gradients[name] * way) == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-7)
    assert np.array_equal(gradients["0.bias"], gradients["2.0.bias"])


def test_a_copy_of_a_layer_in_several_places_has_it_in_several_places():
    inner = Linear(3, 3)
    layer = Sequential(inner, Activated("silu"), Sequential(inner)).init(0, np, dtype="float64")
    x, parameters = np.random.default_rng(1).standard_normal((2, 4, 3)), layer.named_parameters()
    copied = layer.replaced(parameters)
    assert copied.children["0"] is copied.children["2"].children["0"] is not inner
    for name, gradient in layer.vjp(x)[1](x)[2].items():
        assert np.array_equal(copied.vjp(x)[1](x)[2][name], gradient), name
    # Changed under one name it is changed under the other, in the copy alone.
    copied.set_parameter("0.bias", np.ones(3))
    assert np.array_equal(copied.named_parameters()["2.0.bias"], np.ones(3))
    assert np.array_equal(layer.named_parameters()["2.0.bias"], parameters["2.0.bias"])
