"""What a layer refuses, by name, and that the layer is as it was."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from arrays import Library
from checks import followed

from scanfield import layers
from scanfield.arrays import device_of
from scanfield.errors import ArgumentError, BackendError, DeviceError, DtypeError, ShapeError, StateError

X, WEIGHT, BIAS = np.ones((2, 5, 3)), np.ones((3, 4)), np.zeros(3)


def still_empty(layer: layers.Layer) -> None:
    """No parameter has got a value: the first has none, and they are looked at in order."""
    with pytest.raises(StateError, match="'weight' has no value yet"):
        layer.named_parameters()


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"x": X[0]}, ShapeError, r"x: shape \(5, 3\), must be \(batch, time, channels\)"),
        ({"weight": WEIGHT[0]}, ShapeError, r"weight: shape \(4,\), must be \(channels, width\)"),
        ({"weight": np.ones((4, 3))}, ShapeError, r"weight: shape \(4, 3\), .* the 3 channels of x"),
        ({"weight": np.ones((3, 0))}, ShapeError, r"weight: shape \(3, 0\), .* a width of at least 1"),
        ({"bias": np.zeros(4)}, ShapeError, r"bias: shape \(4,\), must be \(3,\)"),
        ({"initial_state": np.zeros((2, 4, 3))}, ShapeError, r"\(2, 4, 3\).*\(2, 3, 3\)"),
        ({"activation": "relu"}, ArgumentError, "'relu'; allowed are None and 'silu'"),
        ({"x": X.astype(int)}, DtypeError, "x: .*int"),
    ],
)
def test_convolutions_of_arrays_that_do_not_fit(library: Library, changed, error, words):
    given = {
        name: library.array(x) if isinstance(x, np.ndarray) else x
        for name, x in ({"x": X, "weight": WEIGHT, "bias": BIAS} | changed).items()
    }
    for convolve in (layers.causal_conv1d, layers.causal_conv1d_vjp):
        with pytest.raises(error, match=words):
            convolve(**given)


def test_one_token_of_a_convolution_has_no_time(library: Library):
    x, weight = library.array(X), library.array(WEIGHT)
    with pytest.raises(ShapeError, match=r"x: shape \(2, 5, 3\), one token is \(batch, channels\)"):
        layers.causal_conv1d_step(None, x, weight)


def test_cotangents_that_do_not_fit(library: Library):
    x = library.array(X)
    _, pullback = layers.causal_conv1d_vjp(x, library.array(WEIGHT))
    with pytest.raises(ArgumentError, match="d_output or d_final_state is needed"):
        pullback()
    with pytest.raises(ShapeError, match=r"d_final_state: shape \(2, 5, 3\), but the result has \(2, 3, 3\)"):
        pullback(None, x)
    assert pullback(x)["weight"].shape == (3, 4)


def test_a_width_of_more_tokens_than_came(library: Library):
    """The state holds zeros before the first, and a later piece goes on from it."""
    x, weight = library.array(X), library.array(np.arange(12.0).reshape(3, 4))
    whole = layers.causal_conv1d(x, weight)
    first = layers.causal_conv1d(x[:, :2, :], weight)
    rest = layers.causal_conv1d(x[:, 2:, :], weight, initial_state=first.final_state)
    got = np.concatenate([library.numpy(first.output), library.numpy(rest.output)], axis=1)
    np.testing.assert_array_equal(got, library.numpy(whole.output))
    none = layers.causal_conv1d(x[:, :0, :], weight, initial_state=first.final_state)
    assert none.output.shape == (2, 0, 3)
    np.testing.assert_array_equal(library.numpy(none.final_state), library.numpy(first.final_state))


def test_tokens_are_integers(library: Library):
    embedding = layers.Embedding(4, 3).init(0, library.xp, library.device)
    with pytest.raises(DtypeError, match="x: dtype float64; tokens are integers"):
        embedding(library.array(np.ones((1, 2))))
    call = {"layer": embedding, "x": [[1, 2]]}
    with pytest.raises(BackendError, match=r"^x: expected an array, came builtins.list") as said:
        embedding(call["x"])
    followed(str(said.value), call)
    assert tuple(embedding(call["x"]).output.shape) == (1, 2, 3)
    if library.name not in (
        "jax",
        "dask",
    ):  # which do not look at values: numbers that are none, an error once computed
        with pytest.raises(ArgumentError, match=r"x: .*allowed are 0 to 3"):
            embedding(library.array(np.asarray([[1, 7]]), None))


def test_a_device_that_is_none(library: Library):
    layer = layers.Linear(3, 2)
    with pytest.raises(DeviceError, match=r"device: 'nowhere' is no device of \w+ here: ."):
        layer.init(0, library.xp, "nowhere")
    still_empty(layer)


@pytest.mark.parametrize(
    ("xp", "dtype", "error", "words"),
    [
        (SimpleNamespace(zeros=None), "float32", ArgumentError, "no array namespace"),
        (np, "int32", DtypeError, "dtype: int32; allowed are float16"),
        (np, "complex64", DtypeError, "dtype: complex64; allowed are"),
        (np, float, DtypeError, "dtype: float; allowed are"),
    ],
)
def test_parameters_of_no_library_or_dtype(xp: Any, dtype: str, error: type[Exception], words: str):
    layer = layers.Linear(3, 2)
    with pytest.raises(error, match=words):
        layer.init(0, xp, dtype=dtype)
    still_empty(layer)


@pytest.mark.parametrize("dtype", ["longdouble", np.longdouble, np.dtype("longdouble"), np.float64], ids=repr)
def test_parameters_in_a_dtype_of_numpy(dtype: Any):
    """A class of scalars was no dtype, and longer numbers were rounded to float32."""
    made = layers.Linear(3, 2).init(0, np, dtype=dtype).named_parameters()["weight"]
    assert made.dtype == np.dtype(dtype)
    assert np.array_equal(made, layers.Linear(3, 2).init(0, np, dtype="float64").named_parameters()["weight"])


def test_parameters_in_a_class_of_the_library(library: Library):
    made = layers.Linear(3, 2).init(0, library.xp, library.device, dtype=library.xp.float32)
    assert made.named_parameters()["weight"].dtype == library.xp.float32
    if library.name not in ("numpy", "readonly", "dask"):
        with pytest.raises(DtypeError, match=r"dtype: float128; allowed are .*float64$"):
            layers.Linear(3, 2).init(0, library.xp, library.device, dtype="float128")


def test_parameters_are_adopted_all_or_none():
    layer, weight = layers.Linear(3, 2), np.ones((2, 3))
    good = {"weight": weight, "bias": np.zeros(2)}
    for spoilt, error, words in (
        ({"weight": weight}, StateError, r"missing are \['bias'\], unknown are \[\]"),
        (good | {"more": weight}, StateError, r"missing are \[\], unknown are \['more'\]"),
        (good | {"bias": np.zeros(3)}, ShapeError, r"bias: shape \(3,\), must be \(2,\)"),
        (good | {"bias": np.zeros(2, complex)}, DtypeError, "bias: .*complex128"),
        (good | {"bias": np.zeros(2, int)}, DtypeError, "bias: .*int64"),
    ):
        with pytest.raises(error, match=words):
            layer.adopt(spoilt)
        still_empty(layer)
    assert layer.adopt(good) is layer
    assert layer.named_parameters()["weight"] is weight


def test_a_sequence_of_no_layers_or_of_something_else():
    with pytest.raises(ArgumentError, match="Sequential takes at least one"):
        layers.Sequential()
    with pytest.raises(ArgumentError, match="layers: 0 is int; allowed are layers"):
        layers.Sequential(3)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: layers.Linear(2, 2, bias="no"), "bias: 'no'; allowed are True and False"),
        (lambda: layers.CausalConv1d(2, bias=np.ones(2)), "bias: numpy.ndarray of shape"),
        (lambda: layers.GatedMLP(2, 2, fused=None), "fused: None; allowed are True and False"),
        (lambda: layers.LanguageModel(9, 4, [layers.MambaBlock(4)], tied="no"), "tied: 'no'; allowed"),
        (lambda: layers.LanguageModel(9, 4, iter([layers.MambaBlock(4)])), "mixers: <list_iterator"),
    ],
)
def test_what_is_true_only_to_python_is_no_flag(call: Any, words: str):
    with pytest.raises(ArgumentError, match=words):
        call()


def test_integers_of_numpy_are_sizes():
    """All of a layer, those that may be 0 too."""
    two, none = np.int64(2), np.int64(0)
    for rank in (two, none):
        config = layers.GatedDeltaNet2Config(two, two, gate_rank=rank, conv_width=two)
        plain = layers.GatedDeltaNet2Config(2, 2, gate_rank=int(rank), conv_width=2)
        shapes = [
            {n: x.shape for n, x in layers.GatedDeltaNet2(size, c).init().named_parameters().items()}
            for size, c in ((two, config), (2, plain))
        ]
        assert shapes[0] == shapes[1]


def test_an_error_inside_says_in_which_layer(library: Library):
    tokens = library.array(np.array([[1, 5, 3]]))
    model = layers.LanguageModel(11, 4, [layers.MambaBlock(4), layers.MambaBlock(2)])
    model.init(0, library.xp, device=device_of(tokens))
    with pytest.raises(ShapeError, match="the last axis must have size 2") as told:
        model(tokens)
    assert told.value.__notes__ == ["in layer 'layers.1.mixer.in_proj', a Linear"]


def test_a_layer_prints_as_the_tree_of_its_parameters():
    assert repr(layers.Linear(3, 2)) == "Linear(weight (2, 3), bias (2,))"
    lines = repr(layers.Sequential(layers.Linear(3, 2, bias=False), layers.RMSNorm(2))).split("\n")
    assert lines == ["Sequential(", "  0: Linear(weight (2, 3))", "  1: RMSNorm(weight (2,))", ")"]
