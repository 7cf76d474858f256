"""State dicts and safetensors files: names of other projects, bits, and models of theirs that load into ours."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arrays import Library, deviation, same_bits

import scanfield
from scanfield.layers import (
    GatedDeltaNet2,
    GatedDeltaNet2Config,
    GatedMLP,
    LanguageModel,
    Layer,
    Mamba2Block,
    MambaBlock,
    load,
    load_state_dict,
    save,
    state_dict,
)


def leave_out(backend: str, test: str, given: dict[str, Any]) -> bool:
    """Eager calls are dear on JAX and Dask, and files hold what is on the host: one dtype, the one that is special."""
    return backend in ("jax", "dask") and given.get("width") != "bfloat16"


def model(**options: Any) -> LanguageModel:
    return LanguageModel(
        7, 4, [MambaBlock(4, 2), GatedDeltaNet2(4, GatedDeltaNet2Config.kda(1, 3))], **options
    )


def test_names():
    assert list(state_dict(model().init(), "mamba_ssm"))[:3] == [
        "backbone.embedding.weight", "backbone.layers.0.norm.weight", "backbone.layers.0.mixer.A_log",
    ]  # fmt: skip
    fla = list(state_dict(model(tied=False).init(), "fla"))
    assert fla[:2] == ["model.embeddings.weight", "model.layers.0.attn_norm.weight"]
    assert "model.layers.1.attn.q_conv1d.weight" in fla and fla[-2:] == [
        "model.norm.weight",
        "lm_head.weight",
    ]
    mlps = [GatedMLP(4, 5, fused=False), GatedMLP(4, 5, fused=False)]
    with_mlps = list(state_dict(model(mlps=mlps).init(), "fla"))
    assert [n for n in with_mlps if ".layers.1." in n and "attn." not in n] == [
        f"model.layers.1.{n}.weight" for n in ("attn_norm", "mlp_norm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    ]  # fmt: skip
    assert list(state_dict(MambaBlock(4).init(), "fla")) == list(MambaBlock(4).init().named_parameters())
    with pytest.raises(scanfield.ArgumentError, match="names: 'keras'; allowed are 'scanfield', 'mamba_ssm'"):
        state_dict(model().init(), "keras")


@pytest.mark.parametrize("width", ["float32", "float64", "bfloat16"])
def test_a_file_keeps_every_bit(library: Library, width: str, tmp_path: Path):
    if width not in library.dtypes:
        width = "float32"
    dtype = library.array(np.zeros(1), width).dtype
    one = model().init(1, library.xp, device=library.device, dtype=dtype)
    two = model().init(2, library.xp, device=library.device, dtype=dtype)
    save(one, tmp_path / "model.safetensors", "transformers")
    load(two, tmp_path / "model.safetensors", "transformers")
    for name, array in two.named_parameters().items():
        assert library.is_array(array) and library.on_device(array) and library.dtype(array) == width
        assert same_bits(library.raw(array), library.raw(one.named_parameters()[name])), name
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_the_file_is_the_packages_own(tmp_path: Path):
    """The package safetensors reads our files, and we read its."""
    peer = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    one, two = model().init(1), model().init(2)
    save(one, tmp_path / "ours")
    theirs = peer.load_file(tmp_path / "ours")
    assert all(same_bits(theirs[n], a) for n, a in one.named_parameters().items())
    peer.save_file(theirs, tmp_path / "theirs")
    load(two, tmp_path / "theirs")
    assert all(same_bits(two.named_parameters()[n], a) for n, a in one.named_parameters().items())


def test_mlps_are_as_many_as_mixers():
    for mlps in ([], [GatedMLP(4, 5)], [None, None], 3):
        with pytest.raises(scanfield.ArgumentError, match=r"(?s)mlps: .*each of 2 mixers"):
            model(mlps=mlps)


def test_a_wrong_state_dict_changes_nothing(tmp_path: Path):
    layer = model().init(0)
    before = layer.named_parameters()
    good = state_dict(model().init(5))
    tied = {**good, "lm_head.weight": good["embedding.weight"] + 1}
    bad = [
        (
            {n: a for n, a in good.items() if n != "norm_f.weight"},
            scanfield.StateError,
            r"missing are \['norm_f.weight'\]",
        ),
        ({**good, "more": np.ones(1)}, scanfield.StateError, r"unknown are \['more'\]"),
        (
            {**good, "norm_f.weight": np.ones(3)},
            scanfield.ShapeError,
            r"norm_f.weight: shape \(3,\), must be \(4,\)",
        ),
        (tied, scanfield.StateError, "this model is tied"),
    ]
    for arrays, error, message in bad:
        with pytest.raises(error, match=message):
            load_state_dict(layer, arrays)
        assert all(layer.named_parameters()[n] is a for n, a in before.items())
    load_state_dict(layer, {**good, "lm_head.weight": good["embedding.weight"]})
    assert np.array_equal(layer.named_parameters()["norm_f.weight"], good["norm_f.weight"])
    save(layer, tmp_path / "whole")
    content = (tmp_path / "whole").read_bytes()
    header = json.dumps({"a": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}}).encode()
    files = {
        "cut off": content[:-3],
        "no safetensors file": b"not a file at all",
        "broken": (4).to_bytes(8, "little") + b"[1}]",
        "dtype I64": len(header).to_bytes(8, "little") + header + bytes(8),
    }
    for message, data in files.items():
        (tmp_path / "bad").write_bytes(data)
        with pytest.raises(scanfield.StateError, match="cut off|needs" if message == "cut off" else message):
            load(layer, tmp_path / "bad")


# -- models of theirs ------------------------------------------------------------------------------------------


def theirs(kind: str) -> Any:
    transformers = pytest.importorskip("transformers", reason="the peer transformers is not installed")
    torch = importlib.import_module("torch")
    torch.manual_seed(0)
    common = {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 2, "state_size": 4, "use_cache": True}
    if kind == "mamba":
        config = transformers.MambaConfig(**common, time_step_rank=3)
        return transformers.MambaForCausalLM(config).eval()
    if kind == "falcon_mamba":
        config = transformers.FalconMambaConfig(**common, time_step_rank=3, tie_word_embeddings=True)
        return transformers.FalconMambaForCausalLM(config).eval()
    config = transformers.Mamba2Config(
        **common, head_dim=4, num_heads=4, n_groups=2, time_step_limit=(0.01, 0.5)
    )
    return transformers.Mamba2ForCausalLM(config).eval()


def ours(kind: str) -> Layer:
    if kind == "mamba":
        return LanguageModel(11, 8, [MambaBlock(8, 4, dt_rank=3) for _ in range(2)])
    if kind == "falcon_mamba":
        return LanguageModel(11, 8, [MambaBlock(8, 4, dt_rank=3, dt_bc_norm="plain") for _ in range(2)])
    blocks = [Mamba2Block(8, 4, head_dim=4, groups=2, dt_limit=(0.01, 0.5)) for _ in range(2)]
    return LanguageModel(11, 8, blocks, tied=False)


@pytest.mark.backend("torch")
@pytest.mark.filterwarnings("ignore")  # what transformers warns of is no matter of ours
@pytest.mark.parametrize("kind", ["mamba", "falcon_mamba", "mamba2"])
def test_a_model_of_transformers_is_ours(kind: str, tmp_path: Path):
    """Random weights saved by transformers: logits equal, and so do gradients of every parameter; ours on NumPy."""
    torch = importlib.import_module("torch")
    peer = theirs(kind)
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    peer.save_pretrained(tmp_path)
    model = ours(kind).init(0, dtype="float32")
    load(model, tmp_path / "model.safetensors", "transformers")
    tokens = np.random.default_rng(0).integers(0, 11, (2, 9))
    logits = peer(torch.as_tensor(tokens)).logits
    result, pullback = model.vjp(tokens)
    assert deviation(result.output, logits.detach().numpy()) <= 4e-6
    d = np.random.default_rng(1).standard_normal(result.output.shape).astype("float32")
    (logits * torch.as_tensor(d)).sum().backward()
    gradients = pullback(d)[2]
    named = dict(peer.named_parameters())
    size = max(float(p.grad.abs().max()) for p in named.values())
    for name, foreign in zip(gradients, state_dict(model, "transformers"), strict=True):
        want = named[foreign].grad.numpy()
        assert deviation(gradients[name], want, floor=1e-2 * size) <= 2e-5, name


@pytest.mark.backend("torch")
@pytest.mark.filterwarnings("ignore")  # what transformers warns of is no matter of ours
def test_the_mixer_of_jamba_is_ours():
    """With weighted norms of steps, B and C, under its own names."""
    jamba = pytest.importorskip(
        "transformers.models.jamba.modeling_jamba", reason="transformers is not installed"
    )
    torch = importlib.import_module("torch")
    torch.manual_seed(0)
    config = jamba.JambaConfig(
        hidden_size=8, mamba_d_state=4, mamba_dt_rank=3, num_hidden_layers=2, use_mamba_kernels=False
    )
    peer = jamba.JambaMambaMixer(config, layer_idx=0).eval()
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        x = torch.randn(2, 7, 8)
        want = peer(x)
    block = MambaBlock(8, 4, dt_rank=3, dt_bc_norm="weighted").init(0)
    load_state_dict(block, peer.state_dict())
    assert deviation(block(x.numpy()).output, (want[0] if isinstance(want, tuple) else want).numpy()) <= 4e-6


@pytest.mark.parametrize("dtype", ["complex128", "int64", "U8", "object"])
def test_numbers_that_are_no_real_floats_are_refused(dtype: str):
    """Cast, an imaginary part would be lost and text read as numbers."""
    layer = MambaBlock(4).init(1)
    before = {name: array.copy() for name, array in layer.named_parameters().items()}
    given = {name: array.astype(dtype) for name, array in before.items()}
    with pytest.raises(scanfield.ScanfieldError, match=r"dtype|an array"):
        load_state_dict(layer, given)
    assert all(np.array_equal(before[name], array) for name, array in layer.named_parameters().items())


def test_what_is_no_mapping_or_no_file_is_told(tmp_path: Path):
    layer = MambaBlock(4).init(1)
    for given in (3, None, [], "a"):
        with pytest.raises(scanfield.StateError, match="state dict: a "):
            load_state_dict(layer, given)  # type: ignore[arg-type]
    header = b"[" * 200_000  # deeper than json reads
    path = tmp_path / "deep.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(scanfield.StateError, match="header"):
        load(layer, path)
