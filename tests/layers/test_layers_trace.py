"""Trace: it only adds, gradients add up, the graph is in order, a patched value is followed, and calls out of order raise."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
from arrays import Library, deviation, same_bits
from layer_cases import CASES, PACKED, Case

import scanfield
from scanfield.layers import LanguageModel, MambaBlock, Trace
from scanfield.layers.tape import Kind
from scanfield.lrp.rules import Gamma


def leave_out(backend: str, test: str, given: dict[str, Any]) -> bool:
    """A trace is a list on the host: eager calls on JAX compile for seconds, on Dask they are thousands of tasks."""
    return backend in ("jax", "dask")


def on(library: Library, case: Case) -> Any:
    layer = case.make().init(0, library.xp, device=library.device, dtype="float64")
    layer.set_parameters(library.arrays(case.layer.named_parameters()))
    return layer


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_strictly_additive(library: Library, case: Case, packed: bool):
    """Output and state are the plain call's bit for bit; gradients and relevance are those of vjp and relevance."""
    layer, options = on(library, case), {"cu_seqlens": PACKED} if packed else {}
    x = library.array(case.input(1 if packed else 2))
    state = library.arrays(case.state(len(PACKED) - 1 if packed else 2))
    plain, trace = layer(x, state, **options), Trace(layer)
    got = trace.forward(x, state, **options)
    assert same_bits(library.raw(got.output), library.raw(plain.output))
    assert all(same_bits(library.raw(got.state[n]), library.raw(a)) for n, a in plain.state.items())
    cotangents = case.cotangents(
        case.layer(library.raw(x), case.state(len(PACKED) - 1 if packed else 2), **options)
    )
    d_output, d_state = library.array(cotangents[0]), library.arrays(cotangents[1])
    d_x, d_before = trace.backward(d_output, d_state)
    want_x, want_before, gradients = layer.vjp(x, state, **options)[1](d_output, d_state)
    assert trace.gradients.keys() == gradients.keys()
    pairs = [(trace.gradients[n], g) for n, g in gradients.items()]
    pairs += [(d_before[n], g) for n, g in want_before.items()]
    pairs += [] if d_x is None else [(d_x, want_x)]
    size = max(float(np.max(np.abs(library.numpy(want)))) for _, want in pairs) if pairs else 0
    assert all(deviation(library.numpy(a), library.numpy(b), floor=1e-3 * size) <= 1e-12 for a, b in pairs)
    explained = trace.relevance(d_output)
    want = layer.relevance(d_output, x, state, **options)
    assert deviation(library.numpy(explained.x), library.numpy(want.x), floor=1e-3) <= 1e-11
    assert trace.activations.keys() >= explained.activations.keys()
    # Nothing of it changed the layer.
    again = layer(x, state, **options)
    assert same_bits(library.raw(again.output), library.raw(plain.output))


def model() -> tuple[LanguageModel, np.ndarray]:
    layer = LanguageModel(7, 4, [MambaBlock(4, 2), MambaBlock(4, 2)], tied=False).init(3, dtype="float64")
    return layer, np.asarray([[1, 5, 3, 3, 6]])


def test_gradients_add_up_and_frozen_ones_do_not():
    layer, tokens = model()
    trace, d = Trace(layer), np.random.default_rng(1).standard_normal((1, 5, 7))
    trace.forward(tokens)
    trace.backward(d)
    once = {n: g.copy() for n, g in trace.gradients.items()}
    trace.backward(d)
    assert all(np.allclose(trace.gradients[n], 2 * g, rtol=1e-14) for n, g in once.items())
    trace.forward(tokens)
    trace.backward(d)
    assert all(np.allclose(trace.gradients[n], 3 * g, rtol=1e-14) for n, g in once.items())
    trace.zero_grad()
    assert trace.gradients == {}
    layer.freeze("layers")
    trace.forward(tokens)
    trace.backward(d)
    assert list(trace.gradients) == ["embedding.weight", "norm_f.weight", "lm_head.weight"]
    assert all(np.array_equal(g, once[n]) for n, g in trace.gradients.items())


def test_graph_is_in_order_and_closed():
    layer, tokens = model()
    trace = Trace(layer)
    trace.forward(tokens)
    nodes = trace.graph()
    seen: set[str] = set()
    for node in nodes:
        assert node.name not in seen and set(node.parents) <= seen, node.name
        assert node.kind in (*get_args(Kind), "input")
        seen.add(node.name)
    by_name = {node.name: node for node in nodes}
    for node in nodes:
        assert node.branches == sum(node.name in other.parents for other in nodes)
        if node.kind != "input":
            assert node.shapes[0] == trace.activations[node.name].shape
    # A residual branch leaves where the norm reads; the in-projection's halves part; the convolved one feeds two.
    assert by_name["embedding:embedding"].parents == ("x",) and by_name["embedding:embedding"].branches == 2
    assert by_name["layers.0.mixer.in_proj:linear"].parameters == ("layers.0.mixer.in_proj.weight",)
    assert by_name["layers.0.mixer:activation"].branches == 2
    assert set(by_name["layers.0.mixer:scan"].parents) > {
        "layers.0.mixer:activation",
        "layers.0.mixer.dt_proj:linear",
    }
    assert by_name["layers.0:sum"].parents == ("embedding:embedding", "layers.0.mixer.out_proj:linear")
    parameters = {name for node in nodes for name in node.parameters}
    assert parameters == set(layer.named_parameters())
    assert nodes[-1].name == "lm_head:linear" and nodes[-1].branches == 0


def test_relevance_table():
    layer, tokens = model()
    trace = Trace(layer)
    output, _ = trace.forward(tokens)
    R = np.zeros_like(output)
    R[0, -1, 2] = output[0, -1, 2]
    found = trace.relevance(R)
    assert found.x.shape == tokens.shape
    assert abs(found.x.sum() + found.report.to_bias.sum() + found.report.absorbed.sum() - R.sum()) <= 1e-12
    assert next(iter(found.balances)) == "lm_head:linear" and [*found.balances][-1] == "embedding:embedding"
    for name, row in found.balances.items():
        assert np.max(np.abs(row.gap)) <= 1e-12, name
    convolved = found.balances["layers.0.mixer.conv1d:convolution"]
    assert convolved.to_bias[0] != 0
    # Half of what comes to the gate goes to each factor.
    gate, scan = found.activations["layers.1.mixer:gate"], found.activations["layers.1.mixer:scan"]
    assert deviation(scan, gate / 2) <= 1e-12
    # What enters a layer is what stands in front of it: the sum's relevance is its branches'.
    both = found.activations["layers.0:sum"]
    parts = found.activations["embedding:embedding"].sum(), found.report.to_bias.sum()
    assert both.shape == (1, 5, 4) and np.isfinite(parts).all()
    table = str(found)
    assert table.splitlines()[0].split() == ["operation", "out", "in", "bias", "absorbed", "gap"]
    assert table.splitlines()[-1].startswith("all") and len(table.splitlines()) == len(found.balances) + 2


def test_activation_gradients_are_gradients():
    layer, tokens = model()
    trace, d = Trace(layer), np.random.default_rng(2).standard_normal((1, 5, 7))
    trace.forward(tokens)
    trace.backward(d)
    name, h = "layers.1.mixer:scan", 1e-6
    value, gradient = trace.activations[name], trace.activation_gradients[name]
    v = np.random.default_rng(3).standard_normal(value.shape)
    ends = [np.sum(trace.rerun({name: value + step * v}).output * d) for step in (h, -h)]
    assert abs((ends[0] - ends[1]) / (2 * h) - np.sum(gradient * v)) <= 1e-7


def test_rerun_follows_the_patch():
    layer, tokens = model()
    trace = Trace(layer)
    plain = trace.forward(tokens)
    same = trace.rerun({"layers.0:sum": trace.activations["layers.0:sum"]})
    assert np.array_equal(same.output, plain.output)
    assert all(np.array_equal(same.state[n], a) for n, a in plain.state.items())
    other = np.asarray([[1, 5, 2, 3, 6]])
    changed, truth = trace.rerun({"x": other}), layer(other)
    assert np.array_equal(changed.output, truth.output)
    assert all(np.array_equal(changed.state[n], a) for n, a in truth.state.items())
    # Without its mixer the second block is the identity.
    cut = trace.rerun({"layers.1.mixer.out_proj:linear": np.zeros((1, 5, 4))})
    before = layer.children["norm_f"](trace.activations["layers.0:sum"]).output
    assert np.allclose(cut.output, layer.children["lm_head"](before).output, rtol=1e-14)
    with pytest.raises(
        scanfield.ArgumentError, match=r"'layers.9' is no activation; there are x, embedding:embedding"
    ):
        trace.rerun({"layers.9": other})
    with pytest.raises(scanfield.ShapeError, match=r"layers.0:sum: shape \(1, 4\)"):
        trace.rerun({"layers.0:sum": np.ones((1, 4))})


def test_out_of_order():
    layer, tokens = model()
    trace, d = Trace(layer), np.ones((1, 5, 7))
    for call in (
        lambda: trace.backward(d),
        lambda: trace.relevance(d),
        lambda: trace.activations,
        trace.graph,
        lambda: trace.rerun({}),
        lambda: trace.activation_gradients,
    ):
        with pytest.raises(scanfield.StateError, match="there was no"):
            call()
    trace.forward(tokens)
    trace.rerun({"layers.0:sum": np.zeros((1, 5, 4))})
    for call in (lambda: trace.backward(d), lambda: trace.relevance(d)):
        with pytest.raises(scanfield.StateError, match="a rerun replaced activations"):
            call()
    trace.forward(tokens)
    trace.backward(d)
    kept = {n: g.copy() for n, g in trace.gradients.items()}
    for name in ("layers.0.mixer.dt_proj.weight", "layers.1.mixer.D"):
        trace.forward(tokens)
        layer.set_parameter(name, layer.named_parameters()[name] * 1.0)
        for call in (lambda: trace.backward(d), lambda: trace.relevance(d), lambda: trace.rerun({})):
            with pytest.raises(scanfield.StateError, match=f"parameter '{name}' changed after the forward"):
                call()
    assert all(np.array_equal(trace.gradients[n], g) for n, g in kept.items())
    trace.forward(tokens)
    trace.release()
    with pytest.raises(scanfield.StateError, match="there was no forward"):
        trace.backward(d)


def test_wrong_shapes_and_rules_change_nothing():
    layer, tokens = model()
    trace = Trace(layer)
    trace.forward(tokens)
    with pytest.raises(scanfield.ShapeError, match="d_output"):
        trace.backward(np.ones((1, 3, 7)))
    with pytest.raises(scanfield.ArgumentError, match="d_output or d_state is needed"):
        trace.backward()
    with pytest.raises(scanfield.ShapeError, match="R_output"):
        trace.relevance(np.ones((1, 3, 7)))
    with pytest.raises(scanfield.ArgumentError, match="not all of which has the rule 'gamma'"):
        trace.relevance(np.ones((1, 5, 7)), rules=scanfield.layers.Composite({MambaBlock: Gamma()}))
    assert trace.gradients == {}
    with pytest.raises(scanfield.ArgumentError, match="layer: int"):
        Trace(3)  # type: ignore[arg-type]
