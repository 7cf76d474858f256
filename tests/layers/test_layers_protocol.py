"""What all layers share: names, draws, changes that are refused whole, what is trained, states, half precision."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from arrays import Library, deviation, same_bits
from layer_cases import CASES, WIDTH, Case

import scanfield
from scanfield.layers import (
    Embedding,
    GatedDeltaNet2,
    GatedDeltaNet2Config,
    LanguageModel,
    Layer,
    Linear,
    Mamba2Block,
    MambaBlock,
    Residual,
    RMSNorm,
    SelectiveSSM,
    Sequential,
    causal_conv1d,
)
from scanfield.layers.scan import BoundedDecay, LogDecay
from scanfield.layers.tape import Saved

HALF = {"torch": "bfloat16", "numpy": "float16", "readonly": "bfloat16"}


def leave_out(backend: str, test: str, given: dict[str, Any]) -> bool:
    """Eager calls compile at each step on JAX; what is on the host alone is the same there."""
    return backend in ("jax", "dask") and test != "test_one_seed_is_one_set_of_numbers"


def names_of(layer: Layer) -> list[str]:
    return list(layer.init().named_parameters())


# -- names and draws -------------------------------------------------------------------------------------------


def test_names_are_those_of_upstream():
    mamba = "A_log D in_proj.weight conv1d.weight conv1d.bias x_proj.weight dt_proj.weight dt_proj.bias out_proj.weight"
    assert sorted(names_of(MambaBlock(4))) == sorted(mamba.split())
    mamba2 = "dt_bias A_log D in_proj.weight conv1d.weight conv1d.bias norm.weight out_proj.weight"
    assert names_of(Mamba2Block(4, 3, head_dim=2)) == mamba2.split()
    assert names_of(SelectiveSSM(3, 4)) == ["w_delta", "bias_delta", "w_b", "w_c", "a", "d"]
    gdn2 = "A_log dt_bias q_proj.weight k_proj.weight v_proj.weight q_conv1d.weight k_conv1d.weight v_conv1d.weight"
    gdn2 += " f_proj.0.weight f_proj.1.weight b_proj.weight w_proj.weight g_proj.0.weight g_proj.1.weight g_proj.1.bias"
    gdn2 += " o_norm.weight o_proj.weight"
    assert names_of(GatedDeltaNet2(4, GatedDeltaNet2Config(2, 3))) == gdn2.split()
    gdn = names_of(GatedDeltaNet2(4, GatedDeltaNet2Config.gated_delta_net(2, 3)))
    assert {"a_proj.weight", "b_proj.weight", "g_proj.weight"} < set(gdn)
    assert not any(name.startswith(("w_proj", "f_proj")) for name in gdn)


def test_shapes_of_the_selective_ssm():
    shapes = {n: a.shape for n, a in SelectiveSSM(3, 4).init().named_parameters().items()}
    assert list(shapes.values()) == [(3, 3), (3,), (3, 4), (3, 4), (3, 4), (3,)]


def test_one_seed_is_one_set_of_numbers(library: Library, dtype: str):
    def make() -> Layer:
        return LanguageModel(5, WIDTH, [MambaBlock(WIDTH, 2)], tied=False)

    want = make().init(3, np, dtype=dtype).named_parameters()
    layer = make().init(3, library.xp, device=library.device, dtype=dtype)
    got = layer.named_parameters()
    assert list(got) == list(want)
    for name, array in got.items():
        assert library.is_array(array) and library.on_device(array)
        assert same_bits(library.raw(array), want[name]), name
    assert not np.array_equal(
        library.raw(make().init(4, library.xp).named_parameters()["lm_head.weight"]), want["lm_head.weight"]
    )


def test_a_layer_more_moves_no_other():
    one = Sequential(a=Linear(3, 3)).init(0).named_parameters()
    two = Sequential(b=Linear(3, 3), a=Linear(3, 3)).init(0).named_parameters()
    assert np.array_equal(one["a.weight"], two["a.weight"])
    assert not np.array_equal(two["a.weight"], two["b.weight"])


def test_the_fields_schemes():
    block = MambaBlock(64, 8).init(0, dtype="float64")
    p = block.named_parameters()
    assert np.allclose(p["A_log"], np.log(np.arange(1, 9))) and np.all(p["D"] == 1)
    steps = np.logaddexp(0, p["dt_proj.bias"])
    assert 1e-3 <= steps.min() < 2e-3 and 5e-2 < steps.max() <= 1e-1
    bound = 1 / math.sqrt(64)
    assert 0.98 * bound < np.abs(p["in_proj.weight"]).max() <= bound
    normal = MambaBlock(64, 8).init(0, dtype="float64", scheme="normal").named_parameters()
    assert abs(normal["in_proj.weight"].std() - 0.02) < 1e-3 and np.all(normal["conv1d.bias"] == 0)
    assert np.array_equal(normal["A_log"], p["A_log"])
    zeros = block.init(0, scheme="zeros").named_parameters()
    assert all(not np.any(a) for a in zeros.values())
    one, eight = (LanguageModel(9, 32, [MambaBlock(32, 4, bias=True) for _ in range(n)]) for n in (1, 8))
    plain = eight.init(0, dtype="float64").named_parameters()
    deep = eight.init(0, dtype="float64", scheme="mamba_ssm").named_parameters()
    for name, array in deep.items():
        if name.endswith(("in_proj.bias", "out_proj.bias")):
            assert not np.any(array)
        else:
            factor = math.sqrt(8) if name.endswith("out_proj.weight") else 1
            assert np.allclose(array * factor, plain[name], rtol=1e-15), name
    assert (
        np.abs(one.init(0, scheme="mamba_ssm").named_parameters()["layers.0.mixer.out_proj.weight"]).max()
        > 0.12
    )
    heads = np.exp(Mamba2Block(32, 4, head_dim=1).init(0).named_parameters()["A_log"])
    assert 1 <= heads.min() < 3 and 14 < heads.max() <= 16


def test_a_gate_with_a_lower_bound():
    """FIELD F043: log decay -ln 2 of the softplus gate, -2.5 of the bounded one; and the bound holds at any rate."""
    f, zero = np.zeros((1, 1, 1)), np.zeros(1)
    assert np.allclose(LogDecay().forward(np, f, zero, zero)[0], -math.log(2), rtol=1e-15)
    assert BoundedDecay(-5.0).forward(np, f, zero, zero)[0] == -2.5
    # FIELD F003: the slope has underflowed where the rate is huge: no gradient, and none that is no number.
    for rate in (100.0, 1000.0):
        f = np.asarray([[[[50.0, -50.0]]]])
        gate, given = BoundedDecay(-5.0), (f, np.asarray([rate]), np.zeros((1, 2)))
        (g,) = gate.forward(np, *given)
        assert np.array_equal(g.ravel(), [-5, 0])
        for gradient in gate.backward(np, Saved(given, (g,), None), (np.ones_like(g),), (True, True, True)):
            assert np.array_equal(gradient, np.zeros_like(gradient))


# -- changes ---------------------------------------------------------------------------------------------------


def test_set_parameter_is_checked_and_all_or_nothing(library: Library):
    layer = Linear(3, 2).init(0, library.xp, device=library.device)
    before = layer.named_parameters()
    good = library.array(np.ones((2, 3)), "float32")
    bad = [
        (
            "weight",
            library.array(np.ones((3, 2)), "float32"),
            scanfield.ShapeError,
            r"weight: shape \(3, 2\), must be",
        ),
        ("weight", library.array(np.ones((2, 3)), "float64"), scanfield.DtypeError, "weight: dtype float64"),
        ("weights", good, scanfield.ArgumentError, "'weights': unknown; the layer has weight, bias"),
        ("weight", [[1.0]], scanfield.BackendError, "weight"),
    ]
    for name, array, error, message in bad:
        with pytest.raises(error, match=message):
            layer.set_parameters({"bias": library.array(np.ones(2), "float32"), name: array})
        assert all(layer.named_parameters()[n] is a for n, a in before.items())
    layer.set_parameter("weight", good)
    assert layer.named_parameters()["weight"] is good
    other = layer.replaced({"weight": before["weight"]})
    assert (
        other.named_parameters()["weight"] is before["weight"] and layer.named_parameters()["weight"] is good
    )


@pytest.mark.backend("strict")
def test_a_parameter_stays_on_its_device(library: Library):
    layer = Linear(1, 1).init(0, library.xp, device=library.device)
    with pytest.raises(scanfield.DeviceError, match="weight"):
        layer.set_parameter("weight", library.xp.asarray([[1.0]], dtype=library.xp.float32))


def test_freeze_by_name_or_prefix():
    layer = Sequential(a=MambaBlock(WIDTH, 2), ab=Linear(WIDTH, 3)).init(0, dtype="float64")
    x = np.ones((1, 3, WIDTH))
    d = np.ones((1, 3, 3))
    full = layer.vjp(x)[1](d)
    for prefix in ("a.in", "c", "a.in_proj.weight.x", "ab.w"):
        with pytest.raises(scanfield.ArgumentError, match="no parameter and no prefix of one"):
            layer.freeze(prefix)
    assert list(layer.trainable()) == list(layer.named_parameters())
    layer.freeze("a")
    assert list(layer.trainable()) == ["ab.weight", "ab.bias"]
    d_x, _, gradients = layer.vjp(x)[1](d)
    assert list(gradients) == ["ab.weight", "ab.bias"] and np.array_equal(d_x, full[0])
    layer.unfreeze("a.conv1d.bias")
    assert np.array_equal(layer.vjp(x)[1](d)[2]["a.conv1d.bias"], full[2]["a.conv1d.bias"])
    layer.unfreeze()
    layer.freeze("ab.weight")
    assert (
        "ab.weight" not in layer.trainable() and len(layer.trainable()) == len(layer.named_parameters()) - 1
    )


def test_train_and_eval_reach_all():
    layer = Residual(Sequential(RMSNorm(3), Linear(3, 3)))
    assert layer.training
    layer.eval()
    assert not any(inner.training for _, inner in layer.named_layers())
    assert layer.train() is layer and all(inner.training for _, inner in layer.named_layers())


def test_nothing_is_mutated():
    case = next(case for case in CASES if case.name == "mamba")
    x, state = case.input(), case.state(2)
    parameters = {n: a.copy() for n, a in case.layer.named_parameters().items()}
    copies = x.copy(), {n: a.copy() for n, a in state.items()}
    result, pullback = case.layer.vjp(x, state)
    pullback(*case.cotangents(result))
    case.layer.step(x[:, 0], state)
    assert np.array_equal(x, copies[0]) and all(np.array_equal(state[n], copies[1][n]) for n in state)
    assert all(np.array_equal(a, parameters[n]) for n, a in case.layer.named_parameters().items())


# -- errors ----------------------------------------------------------------------------------------------------

BAD: list[tuple[Callable[[], Any], str]] = [
    (lambda: SelectiveSSM(0, 2), "d_model: 0"),
    (lambda: SelectiveSSM(2, -1), "state_size: -1"),
    (lambda: Linear(3, True), "outputs: True"),
    (lambda: RMSNorm(4, groups=3), "width: 4, no multiple of groups, 3"),
    (lambda: RMSNorm(4, epsilon=0), "epsilon: 0"),
    (lambda: MambaBlock(4, 2, conv_width=0), "conv_width: 0"),
    (lambda: MambaBlock(4, 2, dt_bc_norm="rms"), "dt_bc_norm: 'rms'; allowed are None, 'plain'"),  # type: ignore[arg-type]
    (lambda: MambaBlock(4, 2, norm_epsilon=0), "norm_epsilon: 0"),
    (
        lambda: GatedDeltaNet2Config(2, 4, decay_lower_bound=3.0),
        "decay_lower_bound: 3.0; it is the most negative",
    ),
    (lambda: GatedDeltaNet2Config(2, 4, decay_lower_bound=-1, decay="disabled"), "but decay is 'disabled'"),
    (lambda: Mamba2Block(4, 2, head_dim=3), "width: 8, no multiple of head_dim, 3"),
    (lambda: Mamba2Block(4, 2, head_dim=4, groups=4), "heads: 2, no multiple of groups, 4"),
    (lambda: Mamba2Block(4, 2, head_dim=4, dt_limit=(1, 0.5)), "dt_limit"),
    (lambda: GatedDeltaNet2Config(2, 0), "latent_per_head: 0"),
    (lambda: GatedDeltaNet2Config(2, 4, value_heads=3), "value_heads: 3, no multiple of heads, 2"),
    (lambda: GatedDeltaNet2Config(2, 4, chunk_size=0), "chunk_size: 0"),
    (lambda: GatedDeltaNet2Config(2, 4, decay="row"), "decay: 'row'; allowed are 'channel'"),  # type: ignore[arg-type]
    (lambda: GatedDeltaNet2Config(2, 4, output_gate="relu"), "output_gate: 'relu'"),  # type: ignore[arg-type]
    (lambda: GatedDeltaNet2Config(2, 4, output_scale=math.inf), "output_scale: inf"),
    (lambda: GatedDeltaNet2(4, {"heads": 2}), "config: dict"),  # type: ignore[arg-type]
    (lambda: LanguageModel(5, 4, []), "mixers"),
    (Sequential, "layers: none"),
    (lambda: Residual(3), "inner: 3"),
    (lambda: Linear(2, 2).init(scheme="kaiming"), "scheme: 'kaiming'; allowed are 'uniform'"),
    (lambda: Linear(2, 2).init(-1), "seed: -1"),
    (lambda: Linear(2, 2).init(0, math), r"xp: .* is no array namespace"),
    (lambda: Linear(2, 2).init(0, "torch"), "import torch, then xp=torch"),  # type: ignore[arg-type]
    (lambda: causal_conv1d(np.ones((1, 2, 3)), np.ones((3, 2)), activation="gelu"), "activation: 'gelu'"),
    (Linear(2, 2).init().vjp(np.ones((1, 2, 2)))[1], "d_output or d_state is needed"),
]


@pytest.mark.parametrize(("make", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_config(make: Callable[[], Any], message: str):
    with pytest.raises(scanfield.ArgumentError, match=message):
        make()


def test_bad_input():
    layer = MambaBlock(4, 2)
    with pytest.raises(scanfield.StateError, match=r"'A_log' has no value yet; layer.init"):
        layer(np.ones((1, 2, 4)))
    layer.init()
    with pytest.raises(scanfield.ShapeError, match=r"x: shape \(2, 4\), must be \(batch, time, width\)"):
        layer(np.ones((2, 4)))
    with pytest.raises(scanfield.ShapeError, match="last axis must have size 4"):
        layer(np.ones((1, 2, 3)))
    with pytest.raises(scanfield.ShapeError, match=r"one token is \(batch, width\)"):
        layer.step(np.ones((1, 1, 4)))
    with pytest.raises(scanfield.DtypeError, match="x: dtype int64"):
        layer(np.ones((1, 2, 4), dtype=np.int64))
    with pytest.raises(scanfield.DtypeError, match="tokens are integers"):
        LanguageModel(5, 4, [layer]).init()(np.ones((1, 2)))
    with pytest.raises(scanfield.StateError, match=r"state: holds \['ssm'\], this layer's is"):
        layer(np.ones((1, 2, 4)), {"ssm": np.ones((1, 8, 2))})
    state = layer(np.ones((1, 2, 4))).state
    with pytest.raises(scanfield.ShapeError, match="initial_state"):
        layer(np.ones((2, 2, 4)), state)
    with pytest.raises(scanfield.ShapeError, match="batch must be 1"):
        layer(np.ones((2, 2, 4)), cu_seqlens=[0, 1, 2])
    with pytest.raises(scanfield.ArgumentError, match="d_state: 'conv'"):
        layer.vjp(np.ones((1, 2, 4)))[1](None, {"conv": np.ones((1, 3, 8))})
    with pytest.raises(scanfield.ShapeError, match=r"weight: shape \(3,\)"):
        causal_conv1d(np.ones((1, 2, 3)), np.ones(3))
    with pytest.raises(scanfield.ShapeError, match=r"weight: shape \(2, 4\), must be .* 3 channels"):
        causal_conv1d(np.ones((1, 2, 3)), np.ones((2, 4)))


# -- half precision --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [c for c in CASES if c.name in ("mamba", "mamba2", "gdn2", "convolution", "language model")],
    ids=lambda c: c.name,
)
@pytest.mark.backend("numpy", "torch")
def test_half_precision_is_computed_in_float32(library: Library, case: Case):
    """Outputs and gradients in the dtypes of what they belong to, each rounded once from float32; states in float32."""
    half = HALF[library.name]
    dtype = library.array(np.zeros(1), half).dtype
    layer = case.make().init(0, library.xp, device=library.device, dtype=dtype)
    layer = layer.replaced(library.arrays(case.layer.named_parameters(), half))
    x = library.array(case.input(), half)
    result, pullback = layer.vjp(x)
    ones = library.array(np.ones(result.output.shape), half)
    _, _, gradients = pullback(ones)
    single = case.make().init(0, np, dtype="float32")
    single = single.replaced(
        {n: library.numpy(a).astype("float32") for n, a in layer.named_parameters().items()}
    )
    wide = library.raw(x) if layer.tokens else library.numpy(x).astype("float32")
    truth, back = single.vjp(wide)
    assert library.dtype(result.output) == half
    assert all(library.dtype(a) == "float32" for a in result.state.values())
    step = {"float16": 2.0**-10, "bfloat16": 2.0**-7}[half]
    assert deviation(library.numpy(result.output), truth.output) <= step
    for name, want in back(np.ones(truth.output.shape, "float32"))[2].items():
        assert library.dtype(gradients[name]) == half
        assert deviation(library.numpy(gradients[name]), want) <= step, name
    # At an epsilon of 1 no output is divided by that is nothing but rounding.
    found = layer.relevance(ones, x, epsilon=1.0)
    explained = single.relevance(np.ones(truth.output.shape, "float32"), wide, epsilon=1.0)
    assert library.dtype(found.x) == library.dtype(found.report.sum_in) == "float32"
    assert deviation(library.numpy(found.x), explained.x) <= 1e-5


def test_states_and_names_that_are_none():
    layer = MambaBlock(WIDTH, 2).init(1)
    x = np.ones((2, 3, WIDTH), np.float32)
    result, pullback = layer.vjp(x)
    for bad in (3, [], "conv"):
        for call in (
            lambda bad=bad: layer(x, bad),
            lambda bad=bad: pullback(result.output, bad),
            lambda bad=bad: layer.relevance(result.output, x, R_state=bad),
        ):
            with pytest.raises(scanfield.StateError, match="arrays by name"):
                call()
    with pytest.raises(scanfield.DtypeError, match="state"):
        layer(x, {name: a.astype("int64") for name, a in result.state.items()})
    with pytest.raises(scanfield.ShapeError, match="cu_seqlens: holds nothing"):
        layer(x[:1], cu_seqlens=[])
    for prefix in (3, None):
        with pytest.raises(scanfield.ArgumentError, match="prefix"):
            layer.freeze(prefix)  # type: ignore[arg-type]
    assert len(layer.trainable()) == len(layer.named_parameters())


@pytest.mark.parametrize("token", [-1, -100, 7])
def test_a_token_outside_the_vocabulary(library: Library, token: int):
    """-1 and -100 mark padding elsewhere; libraries count the first from the end, and its gradient was lost."""
    layer = Embedding(7, 3).init(1, library.xp, device=library.device)
    x = library.array(np.asarray([[0, token]]))
    errors = (scanfield.ArgumentError, IndexError)
    with pytest.raises(errors):
        layer(x)
    with pytest.raises(errors):
        layer.vjp(x)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16"])
def test_tokens_in_few_bits_of_a_large_vocabulary(library: Library, dtype: str):
    layer = Embedding(300, 2).init(1, library.xp, device=library.device)
    result, pullback = layer.vjp(library.array(np.asarray([[5, 100]], dtype)))
    gradient = library.numpy(pullback(result.output)[2]["weight"])
    assert sorted(set(np.nonzero(gradient)[0])) == [5, 100]
