"""Rules in the middle of a network, packs of nothing and more packs than are remembered, options told by name."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arrays import Library, same_bits

from scanfield import layers, tensorfile
from scanfield.errors import ArgumentError, DtypeError, ShapeError, StateError
from scanfield.layers import Composite, Linear, Sequential, convolution
from scanfield.layers.functions import Activation
from scanfield.layers.linear import Lookup
from scanfield.layers.scan import Scan
from scanfield.layers.tape import Saved
from scanfield.lrp.rules import Epsilon, Flat, Gamma


def test_a_rule_that_ignores_values_inside_a_network():
    """Flat deals out equal parts, whatever the hidden values are; the layer below takes these parts as relevance."""
    draw = np.random.default_rng(3)
    net = Sequential(Linear(3, 4), Linear(4, 2)).init(0, np, dtype="float64")
    x, R = draw.standard_normal((1, 5, 3)), draw.standard_normal((1, 5, 2))
    found = net.relevance(R, x, rules=Composite({"1": Flat(epsilon=0.0)}), epsilon=0.0)

    given = net.named_parameters()
    hidden = x @ given["0.weight"].T + given["0.bias"]
    parts = np.broadcast_to(np.sum(R, axis=-1, keepdims=True) / 4, hidden.shape)
    want = x * ((parts / hidden) @ given["0.weight"])
    np.testing.assert_allclose(found.x, want, rtol=1e-10)
    np.testing.assert_allclose(found.report.sum_out, np.sum(R, axis=(1, 2)), rtol=1e-12)
    assert np.all(np.abs(found.report.gap) < 1e-12)


@pytest.mark.parametrize("epsilon", [0.0, 0.3])
def test_a_scan_whose_rule_absorbs(epsilon: float):
    """epsilon scales what stands at each output by |y| / (|y| + epsilon); the rest is told as absorbed."""
    draw = np.random.default_rng(1)
    a, b, r = 0.5 + 0.1 * draw.random((1, 6, 2)), *draw.standard_normal((2, 1, 6, 2))
    scan = Scan("linear_scan", ("a", "b", "initial_state"))
    outputs, residuals = scan.save(np, a, b, None)
    saved, y = Saved((a, b, None), outputs, residuals), outputs[0]

    found = scan.relevance(np, saved, (r, None), Epsilon(epsilon))
    kept = r * np.abs(y) / (np.abs(y) + epsilon)
    want = scan.relevance(np, saved, (kept, None), None)
    assert found.rho[0] is None and found.rho[2] is None
    np.testing.assert_allclose(found.rho[1], want.rho[1], rtol=1e-12)
    if epsilon:
        np.testing.assert_allclose(found.absorbed, y * (r - kept), rtol=1e-12, atol=1e-15)
    else:
        assert found.absorbed is None
    with pytest.raises(ArgumentError, match=r"Gamma\(gamma=0.25.*a scan has the rule 'epsilon'"):
        scan.relevance(np, saved, (r, None), Gamma())


def test_a_pack_of_no_sequences(library: Library):
    """No state stands before the first token; the gradient was one of padding that is not there."""
    x, weight = library.array(np.ones((1, 0, 3))), library.array(np.ones((3, 4)))
    found, pullback = layers.causal_conv1d_vjp(x, weight, cu_seqlens=[0])
    assert found.output.shape == (1, 0, 3) and found.final_state.shape == (0, 3, 3)
    gradients = pullback(found.output, found.final_state)
    assert gradients["x"].shape == (1, 0, 3) and not np.any(library.numpy(gradients["weight"]))


def test_packs_beyond_those_remembered(monkeypatch: pytest.MonkeyPatch):
    """The oldest is forgotten, and worked out once more when it comes again."""
    monkeypatch.setattr(convolution, "_MOST_PLACES", 2)
    monkeypatch.setattr(convolution, "_PLACES", {})
    x, weight = np.random.default_rng(0).standard_normal((1, 6, 3)), np.ones((3, 2))
    packs = [(0, cut, 6) for cut in (1, 2, 3, 4)]
    first = [layers.causal_conv1d(x, weight, cu_seqlens=pack).output for pack in packs]
    assert [key[0] for key in convolution._PLACES] == packs[-2:]
    again = [layers.causal_conv1d(x, weight, cu_seqlens=pack).output for pack in packs]
    assert all(map(same_bits, first, again)) and len(convolution._PLACES) == 2
    for pack, found in zip(packs, first, strict=True):
        parts = [layers.causal_conv1d(x[:, i:j], weight).output for i, j in pairwise(pack)]
        np.testing.assert_array_equal(found, np.concatenate(parts, axis=1))


def test_options_that_no_layer_has():
    with pytest.raises(ArgumentError, match="activation: 'swish'; allowed are 'silu'"):
        Activation("swish")
    with pytest.raises(ArgumentError, match="output_gate: 'tanh'; allowed are 'sigmoid', 'silu' and None"):
        layers.GatedDeltaNet2(8, layers.GatedDeltaNet2Config(heads=1, latent_per_head=8, output_gate="tanh"))
    for rank in (-1, True, 2.0):
        with pytest.raises(ArgumentError, match=f"gate_rank: {rank}; allowed is an integer of at least 0"):
            layers.GatedDeltaNet2(8, layers.GatedDeltaNet2Config(heads=1, latent_per_head=8, gate_rank=rank))
    with pytest.raises(DtypeError, match="x: dtype float64; tokens are integers"):
        Lookup().forward(np, np.zeros((1, 2)), np.ones((3, 2)))


def test_what_does_not_fit_a_layer_is_told():
    block = layers.CausalConv1d(3, 4).init(0, np)
    with pytest.raises(ShapeError, match=r"x: shape \(1, 5, 2\)"):
        block(np.ones((1, 5, 2), np.float32))
    norm = layers.RMSNorm(4).init(0, np)
    with pytest.raises(ShapeError, match=r"x: shape \(1, 5, 3\), but the last axis must have size 4"):
        norm(np.ones((1, 5, 3), np.float32))


def test_numbers_that_no_file_holds_leave_none(tmp_path: Path):
    layer = Linear(3, 2).init(0, np, dtype="longdouble")
    if layer.named_parameters()["weight"].dtype == np.float64:
        pytest.skip("this system has no longer numbers than float64")
    with pytest.raises(DtypeError, match=r"weight: dtype float\d+; allowed in a file are .*bfloat16"):
        layers.save(layer, tmp_path / "w.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_file_cut_off_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its header was whole; another process truncated it then. The layer is as it was."""
    layer = Linear(64, 128).init(0, np)  # more than a buffer of the system's
    layers.save(layer, path := tmp_path / "w.safetensors")
    before = {name: array.copy() for name, array in layer.named_parameters().items()}
    filled = tensorfile._filled

    def late(path: Path, file: Any, begin: int, entry: Any) -> Any:
        os.truncate(path, begin + 16)
        return filled(path, file, begin, entry)

    monkeypatch.setattr(tensorfile, "_filled", late)
    with pytest.raises(StateError, match=r"w\.safetensors: cut off while it was read"):
        layers.load(layer, path)
    assert all(same_bits(array, before[name]) for name, array in layer.named_parameters().items())


def test_a_frozen_embedding_and_a_frozen_layer_in_two_places():
    """Nothing is worked out for them, and what is left has the gradients that it had."""
    model = layers.LanguageModel(5, 4, [layers.MambaBlock(4, 2)]).init(0, np, dtype="float64")
    tokens = np.asarray([[0, 3, 3, 1]])
    d_output = np.random.default_rng(2).standard_normal((1, 4, 5))
    whole = model.vjp(tokens)[1](d_output)[2]
    names = [name for name in whole if not name.startswith("embedding")]
    model.freeze("embedding")
    fewer = model.vjp(tokens)[1](d_output)[2]
    assert sorted(fewer) == sorted(names) and all(same_bits(fewer[name], whole[name]) for name in names)

    inner = Linear(3, 3)
    net = Sequential(inner, Linear(3, 3), inner).init(0, np, dtype="float64")
    net.freeze("0")
    assert list(net.vjp(np.ones((1, 2, 3)))[1](np.ones((1, 2, 3)))[2]) == ["1.weight", "1.bias"]
