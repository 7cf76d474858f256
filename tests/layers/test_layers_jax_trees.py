"""Layers as nodes of JAX's trees: transforms take them whole, and the structure says what they compute."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from arrays import Library, deviation
from layer_cases import CASES, WIDTH

from scanfield.layers import (
    Activated,
    Embedding,
    GatedDeltaNet2,
    GatedDeltaNet2Config,
    Layer,
    Linear,
    MambaBlock,
    Residual,
    Sequential,
)
from scanfield.layers.functions import Sum

pytestmark = pytest.mark.backend("jax")

jax = pytest.importorskip("jax")


@pytest.mark.parametrize("name", ["mamba: norms inside", "kda"])
def test_the_gradient_of_a_layer_is_its_vjps(library: Library, name: str):
    """jit of grad with respect to the whole layer, x and the state, against the layer's own gradients on NumPy."""
    case = next(case for case in CASES if case.name == name)
    x, state = case.input(), case.state(2)
    result, pullback = case.layer.vjp(x, state)
    d_output, d_state = case.cotangents(result)
    d_x, d_before, gradients = pullback(d_output, d_state)
    layer = case.make().replaced(library.arrays(case.layer.named_parameters()))
    weights = library.array(d_output), library.arrays(d_state)

    def loss(layer: Any, x: Any, state: Any) -> Any:
        output, after = layer(x, state)
        return (output * weights[0]).sum() + sum((after[n] * weights[1][n]).sum() for n in after)

    found = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(layer, library.array(x), library.arrays(state))
    assert type(found[0]) is type(layer)
    got = found[0].named_parameters() | {"x": found[1]} | {f"state {n}": a for n, a in found[2].items()}
    want = gradients | {"x": d_x} | {f"state {n}": a for n, a in d_before.items()}
    assert got.keys() == want.keys()
    size = max(float(np.max(np.abs(a))) for a in want.values())
    for key, truth in want.items():
        assert deviation(library.numpy(got[key]), truth, floor=1e-3 * size) <= 1e-11, key


def test_trees(library: Library):
    """Maps over layers, by name; equal structures for layers that are built alike, whatever was drawn."""
    one, two = (
        Sequential(Linear(WIDTH, 3), a=Linear(3, 2)).init(seed, library.xp, dtype="float64")
        for seed in (0, 1)
    )
    keys = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(one)[0]]
    assert keys == [f"['{name}']" for name in one.named_parameters()]
    stepped = jax.tree.map(lambda p, g: p - 0.5 * g, one, two)
    want = library.numpy(one.named_parameters()["a.bias"]) - 0.5 * library.numpy(
        two.named_parameters()["a.bias"]
    )
    assert np.array_equal(library.numpy(stepped.named_parameters()["a.bias"]), want)
    traces = []

    @jax.jit
    def run(layer: Any, x: Any) -> Any:
        traces.append(layer)
        return layer(x).output

    x = library.array(np.ones((2, 3, WIDTH)))
    outputs = [run(layer, x) for layer in (one, two, pickle.loads(pickle.dumps(two)))]
    assert (
        len(traces) == 1
        and np.array_equal(outputs[1], outputs[2])
        and not np.array_equal(outputs[0], outputs[1])
    )
    many = jax.tree.map(lambda *leaves: library.xp.stack(leaves), one, two)
    each = jax.vmap(lambda layer: layer(x).output)(many)
    assert deviation(library.numpy(each[1]), library.numpy(outputs[1])) <= 1e-14
    two.freeze("a")
    run(two, x)
    assert len(traces) == 2  # what is frozen is part of what a layer is: its vjp gives other names


def test_structures_that_differ():
    """An option, a size or a class that is another makes another structure; the same ones make the same."""

    def structure(layer: Layer) -> Any:
        return jax.tree.structure(layer.init(0, jax.numpy))

    def gdn2(**options: Any) -> Layer:
        return GatedDeltaNet2(4, GatedDeltaNet2Config(1, 2, **options))

    made = [
        lambda: MambaBlock(4, 2), lambda: MambaBlock(4, 2, dt_bc_norm="plain"), lambda: MambaBlock(4, 2, method="generic"),
        gdn2, lambda: gdn2(output_scale=2.0), lambda: gdn2(allow_neg_eigval=True), lambda: gdn2(decay_lower_bound=-1.0),
        lambda: Linear(2, 3), lambda: Embedding(2, 3),
    ]  # fmt: skip
    assert not jax.tree.leaves(Activated("silu").init(0, jax.numpy))
    first, second = ([structure(make()) for make in made] for _ in range(2))
    for i, left in enumerate(first):
        assert [left == right for right in second] == [i == j for j in range(len(made))]
        assert hash(left) == hash(second[i])


def test_a_layer_of_ones_own():
    """Its class is registered when it gets arrays."""

    class Doubled(Linear):
        def define(self, run: Any, x: Any) -> Any:
            y = super().define(run, x)
            return run.one(Sum(), y, y)

    x = jax.numpy.ones((1, 2, 3))
    layer = Doubled(3, 1, bias=False).init(0, jax.numpy)
    slope = jax.grad(lambda layer: layer(x).output.sum())(layer)
    assert slope.named_parameters()["weight"].tolist() == [[4.0, 4.0, 4.0]]


def test_structures_are_equal_where_layers_are_built_alike():
    """What JAX compiles for one layer serves another: structures are its keys."""
    made = {
        "one": Sequential(Linear(3, 4), Linear(4, 2)),
        "other": Sequential(Linear(3, 4), Linear(4, 2)),
        "narrower": Sequential(Linear(3, 4), Linear(4, 1)),
        "another": Sequential(Linear(3, 2)),
    }
    trees = {
        name: jax.tree.structure(layer.init(i, jax.numpy)) for i, (name, layer) in enumerate(made.items())
    }
    assert trees["one"] == trees["other"] and hash(trees["one"]) == hash(trees["other"])
    assert trees["one"] != trees["narrower"] and trees["one"] != trees["another"]
    assert "Structure(Sequential)" in str(trees["one"])


def test_a_layer_around_layers_that_have_arrays():
    """It never sees ``init``; nor does one whose parameters are set."""

    class Row(Sequential):
        pass

    class Around(Residual):
        pass

    class Set(Linear):
        pass

    inner = Linear(4, 4).init(0, jax.numpy)
    row = Row(inner, Around(Sequential(Linear(4, 4).init(1, jax.numpy))))
    set_later = Set(4, 4)
    set_later.set_parameters(inner.named_parameters())
    x = jax.numpy.ones((1, 3, 4))
    for layer in (row, row.children["1"], set_later):
        slopes = jax.jit(jax.grad(lambda layer: (layer(x).output ** 2).sum()))(layer)
        assert slopes.named_parameters().keys() == layer.named_parameters().keys()
        assert len(jax.tree.leaves(layer)) == len(layer.named_parameters())


def test_a_class_that_its_author_registered_stays_as_its_author_has_it():
    class Own(Linear):
        pass

    jax.tree_util.register_pytree_node(Own, lambda layer: ((), layer), lambda layer, _: layer)
    layer = Own(3, 2).init(0, jax.numpy)
    assert jax.tree.leaves(layer) == [] and layer.named_parameters()["weight"].shape == (2, 3)
