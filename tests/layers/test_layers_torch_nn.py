"""Layers as torch modules: the layer's own numbers and gradients, and what people do to modules."""

from __future__ import annotations

import copy
import doctest
import io
import os
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from arrays import Library, deviation
from layer_cases import CASES, PACKED, WIDTH, Case

import scanfield
from scanfield import layers
from scanfield.layers import GatedDeltaNet2Config, LayerResult

pytestmark = pytest.mark.backend("torch")

torch = pytest.importorskip("torch")
from scanfield_torch import nn  # noqa: E402
from scanfield_torch.nn import classes as classes_file  # noqa: E402
from scanfield_torch.nn import module as module_file  # noqa: E402

BLOCKS = [
    lambda **o: nn.MambaBlock(WIDTH, 3, dt_bc_norm="weighted", **o),
    lambda **o: nn.Mamba2Block(WIDTH, 3, head_dim=2, groups=2, **o),
    lambda **o: nn.GatedDeltaNet2(WIDTH, GatedDeltaNet2Config(2, 3, decay_lower_bound=-5.0), **o),
]
NAMES = ["mamba", "mamba2", "gdn2"]


def model(**options: Any) -> nn.LanguageModel:
    mixers = [layers.MambaBlock(WIDTH, 2), layers.GatedDeltaNet2(WIDTH, GatedDeltaNet2Config.kda(1, 3))]
    return nn.LanguageModel(7, WIDTH, mixers, **options)


def tokens() -> Any:
    return torch.as_tensor(np.random.default_rng(0).integers(0, 7, (2, 6)))


def output_of(found: Any) -> Any:
    return found.output if isinstance(found, LayerResult) else found


# -- the layer itself ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_layers_numbers_and_gradients(library: Library, case: Case, packed: bool):
    """The call gives the layer's result on NumPy, autograd through it what the layer's vjp gives."""
    layer = case.layer
    x, state = case.input(1 if packed else 2), case.state(len(PACKED) - 1 if packed else 2)
    options: dict[str, Any] = {"cu_seqlens": PACKED} if packed else {}
    result, pullback = layer.vjp(x, state, **options)
    cotangents = case.cotangents(result)
    d_x, d_state, gradients = pullback(*cotangents)
    module = nn.Module(layer)
    assert list(dict(module.named_parameters())) == sorted(
        gradients, key=[*dict(module.named_parameters())].index
    )
    x = library.array(x) if layer.tokens else library.array(x).requires_grad_()
    before = {n: library.array(a).requires_grad_() for n, a in state.items()}
    found = module(x, before, **options)
    assert isinstance(found, LayerResult) == bool(state)
    output, after = found if state else (found, {})
    assert deviation(library.numpy(output), result.output) <= 1e-13
    loss = (output * library.array(cotangents[0])).sum()
    loss = loss + sum((after[n] * library.array(d)).sum() for n, d in cotangents[1].items())
    loss.backward()
    got = {n: p.grad for n, p in module.named_parameters()} | {
        f"state {n}": a.grad for n, a in before.items()
    }
    want = gradients | {f"state {n}": d for n, d in d_state.items()}
    if d_x is not None:
        got["x"], want["x"] = x.grad, d_x
    size = max(float(np.max(np.abs(a))) for a in want.values())
    for name, truth in want.items():
        grad = np.zeros(truth.shape) if got[name] is None else library.numpy(got[name])
        assert deviation(grad, truth, floor=1e-3 * size) <= 1e-11, name


@pytest.mark.parametrize("make", BLOCKS, ids=NAMES)
def test_steps_are_the_whole(make: Any):
    block = make(seed=0, dtype=torch.float64)
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    whole, state = block(x), None
    for t in range(5):
        y, state = block.step(x[:, t], state)
        torch.testing.assert_close(y, whole.output[:, t], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, whole.state, rtol=1e-12, atol=1e-12)


def test_the_layer_behind_it():
    """Relevance, Trace and vjp run on the module's own tensors; what needs no gradient is frozen there."""
    block = nn.MambaBlock(WIDTH, 2, seed=0, dtype=torch.float64)
    block.conv1d.requires_grad_(False)
    x = torch.randn(1, 4, WIDTH, dtype=torch.float64)
    assert list(block.layer.trainable()) == [n for n, p in block.named_parameters() if p.requires_grad]
    with torch.no_grad():
        block.D.mul_(2)
        y = block(x).output
    assert torch.equal(block.layer(x).output, y)
    assert float(block.layer.relevance(y, x).report.gap.abs().max()) <= 1e-12
    assert torch.equal(layers.Trace(block.layer).forward(x).output, y)


# -- names -----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # what transformers warns of is no matter of ours
@pytest.mark.parametrize("kind", ["Mamba", "Mamba2"])
def test_a_state_dict_of_upstream_loads(kind: str):
    """transformers' own, and the same under mamba_ssm's names: equal logits, equal names in order of neither."""
    transformers = pytest.importorskip("transformers", reason="the peer transformers is not installed")
    torch.manual_seed(0)
    common = {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 2, "state_size": 4}
    if kind == "Mamba":
        peer = transformers.MambaForCausalLM(transformers.MambaConfig(**common, time_step_rank=3)).eval()
        mixers = [layers.MambaBlock(8, 4, dt_rank=3) for _ in range(2)]
    else:
        config = transformers.Mamba2Config(**common, head_dim=4, num_heads=4, n_groups=2)
        peer = transformers.Mamba2ForCausalLM(config).eval()
        mixers = [layers.Mamba2Block(8, 4, head_dim=4, groups=2) for _ in range(2)]
    tied = kind == "Mamba"
    x = torch.as_tensor(np.random.default_rng(0).integers(0, 11, (2, 9)))
    with torch.no_grad():
        logits = peer(x).logits
        given = peer.state_dict()
        renamed = {n.replace("backbone.embeddings", "backbone.embedding"): a for n, a in given.items()}
        fewer = {n: a for n, a in given.items() if n != "lm_head.weight"} if tied else given
        for names, state_dict in (("transformers", given), ("transformers", fewer), ("mamba_ssm", renamed)):
            ours = nn.LanguageModel(11, 8, mixers, tied=tied, names=names)
            ours.load_state_dict(state_dict)
            assert deviation(ours(x).output.numpy(), logits.numpy()) <= 4e-6
        assert set(renamed) == set(ours.state_dict())
        ours.load_state_dict({n: a.clone() for n, a in renamed.items()}, assign=True)
        assert (ours.lm_head.weight is ours.backbone.embedding.weight) == tied
        peer.load_state_dict(
            {n.replace("embedding.", "embeddings."): a for n, a in ours.state_dict().items()}
        )
    file = io.BytesIO()
    torch.save(ours.state_dict(), file)
    file.seek(0)
    ours.load_state_dict(torch.load(file, weights_only=True))


def test_names_of_flash_linear_attention():
    found = model(names="fla", tied=False)
    assert next(iter(found.state_dict())) == "model.embeddings.weight"
    assert set(found.state_dict()) == set(layers.state_dict(found.layer, "fla"))
    assert found.model.layers[1].attn.q_conv1d.weight.shape == (3, 1, 4)
    x = torch.randn(1, 3, WIDTH)
    inside = found.model.layers(x)  # a part of it runs by itself, under its own names
    by_hand = x
    for block in found.model.layers:
        by_hand = by_hand + block.attn(block.attn_norm(by_hand)).output
    torch.testing.assert_close(inside.output, by_hand)


def test_a_tied_head_that_differs_is_refused():
    ours = model(names="mamba_ssm")
    assert ours.lm_head.weight is ours.backbone.embedding.weight
    before = {n: a.clone() for n, a in ours.state_dict().items()}
    bad = {n: a + 1 for n, a in before.items()}
    bad["lm_head.weight"] = bad["lm_head.weight"] + 1
    with pytest.raises(scanfield.StateError, match=r"lm_head\.weight: differs"):
        ours.load_state_dict(bad)
    assert all(torch.equal(a, before[n]) for n, a in ours.state_dict().items())
    with pytest.raises(RuntimeError, match=r"backbone\.norm_f\.weight"):
        ours.load_state_dict({n: a for n, a in before.items() if "norm_f" not in n})


def test_modules_inside_stay_themselves():
    norm, block = nn.RMSNorm(WIDTH), nn.MambaBlock(WIDTH, 2)
    whole = nn.Residual(nn.Sequential(norm, block))
    x = torch.randn(2, 3, WIDTH)
    with torch.no_grad():
        torch.testing.assert_close(whole(x).output, x + block(norm(x)).output)
    ids = {id(p) for p in whole.parameters()}
    assert ids == {id(p) for m in (norm, block) for p in m.parameters()}
    assert list(whole.state_dict())[:2] == ["0.weight", "1.A_log"]
    assert next(iter(nn.Residual(block).state_dict())) == "A_log"
    shared = nn.LanguageModel(7, WIDTH, [block, block])
    assert len([*shared.parameters()]) == len([*block.parameters()]) + 4
    with torch.no_grad():
        assert torch.equal(shared(tokens()).output, shared.layer(tokens()).output)
    assert nn.Sequential(nn.Activated("silu"))(x).shape == x.shape


def test_what_is_said_of_a_model_reaches_the_modules_inside():
    """Its seed, scheme, dtype: the numbers of the layer's own init; nothing that somebody has chosen is drawn anew."""

    def made(*mixers: Any, **options: Any) -> Any:
        return nn.LanguageModel(7, WIDTH, list(mixers), **options)

    inner = [layers.MambaBlock(WIDTH, 2) for _ in range(2)]
    for options in ({}, {"scheme": "mamba_ssm"}, {"dtype": torch.float64}):
        layer = layers.LanguageModel(7, WIDTH, inner).init(3, torch, **{"dtype": torch.float32} | options)
        first, wide = nn.MambaBlock(WIDTH, 2), copy.deepcopy(nn.MambaBlock(WIDTH, 2)).double()
        plain = made(first, wide, seed=3, **options)
        for name, want in layer.named_parameters().items():
            got = plain.get_parameter(name)
            assert got.is_leaf and got.requires_grad and torch.equal(got.to(want.dtype), want), name
            assert got.dtype == (torch.float64 if "layers.1.mixer" in name else want.dtype)
        assert plain.layers[0].mixer is first
    seeded, held = nn.MambaBlock(WIDTH, 2, seed=5), nn.Module(layers.MambaBlock(WIDTH, 2).init(6))
    row, set_by_hand = (
        nn.Sequential(nn.MambaBlock(WIDTH, 2), nn.MambaBlock(WIDTH, 2)),
        nn.MambaBlock(WIDTH, 2),
    )
    with torch.no_grad():
        set_by_hand.D[0] = 2.0
    given = [seeded, held, set_by_hand, copy.deepcopy(set_by_hand), row[0]]
    kept = [{n: p.clone() for n, p in mixer.named_parameters()} for mixer in given]
    whole = made(*given[:4], nn.Sequential(given[4], nn.RMSNorm(WIDTH)), seed=3, dtype=torch.float64)
    for mixer, before in zip(given[:4], kept, strict=False):
        assert all(torch.equal(p, before[n].double()) for n, p in mixer.named_parameters())
    changed = {n: p.double() for n, p in kept[4].items()}
    assert not torch.equal(
        row[0].in_proj.weight, changed["in_proj.weight"]
    )  # drawn by chance, two modules deep
    assert {p.dtype for p in whole.parameters()} == {torch.float64} and row[1].D.dtype == torch.float32
    untouched = {n: p.clone() for n, p in row[1].named_parameters()}
    made(row[1], dtype=torch.float32)
    assert all(torch.equal(p, untouched[n]) for n, p in row[1].named_parameters())
    empty = made(nn.MambaBlock(WIDTH, 2, device="meta"), seed=3, device="cpu")
    assert torch.equal(empty.layers[0].mixer.D, torch.ones(2 * WIDTH))


def test_arrays_that_some_of_the_layers_have_are_handed_over():
    """Those of one layer inside, and the others drawn."""
    block = layers.MambaBlock(WIDTH, 2).init(4)
    found = nn.LanguageModel(7, WIDTH, [block, layers.MambaBlock(WIDTH, 2)], seed=3)
    for name, array in block.named_parameters().items():
        assert np.array_equal(found.get_parameter(f"layers.0.mixer.{name}").detach().numpy(), array)


# -- what people do to modules ---------------------------------------------------------------------------------


def test_copies_and_pickles():
    ours = model(names="transformers", seed=3)
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert other.lm_head.weight is other.backbone.embeddings.weight is not ours.lm_head.weight
        assert torch.equal(other(tokens()).output, ours(tokens()).output)
        with torch.no_grad():
            other.lm_head.weight.add_(1)
        assert not torch.equal(other(tokens()).output, ours(tokens()).output)
    mode = ours.eval().backbone.layers[0].mixer
    assert not mode.training and ours.train() is ours and mode.training


@pytest.mark.parametrize("make", BLOCKS, ids=NAMES)
def test_half_parameters_and_autocast(make: Any):
    """bfloat16 parameters: rounded once from float32. Autocast: gradients in the parameters' dtype, states whole."""
    block = make(seed=0, dtype=torch.bfloat16)
    wide = copy.deepcopy(block).float()
    x = torch.randn(2, 5, WIDTH)
    half, single = block(x.bfloat16()), wide(x.bfloat16().float())
    assert half.output.dtype == torch.bfloat16 and {a.dtype for a in half.state.values()} == {torch.float32}
    assert deviation(half.output.detach().float().numpy(), single.output.detach().numpy()) <= 2.0**-7
    half.output.float().sum().backward()
    assert {p.grad.dtype for p in block.parameters()} == {torch.bfloat16}
    single.output.sum().backward()
    truth = {n: p.grad.clone() for n, p in wide.named_parameters()}
    wide.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = wide(x)
        again = wide(x, found.state)
    assert {a.dtype for a in again.state.values()} == {torch.float32}
    found.output.float().sum().backward()
    size = max(float(g.abs().max()) for g in truth.values())
    for name, parameter in wide.named_parameters():
        assert parameter.grad.dtype == torch.float32
        assert deviation(parameter.grad.numpy(), truth[name].numpy(), floor=1e-1 * size) <= 0.1, name


def test_frozen_moved_and_drawn():
    one, two = nn.MambaBlock(WIDTH, 2, seed=1), nn.MambaBlock(WIDTH, 2, seed=2)
    assert not torch.equal(one.in_proj.weight, two.in_proj.weight)
    two.reset_parameters(seed=1)
    assert torch.equal(one.in_proj.weight, two.in_proj.weight)
    torch.manual_seed(0)
    first = nn.Linear(3, 2)
    torch.manual_seed(0)
    assert torch.equal(first.weight, nn.Linear(3, 2).weight)
    one.x_proj.requires_grad_(False)
    one(torch.randn(1, 3, WIDTH)).output.sum().backward()
    assert [n for n, p in one.named_parameters() if p.grad is None] == ["x_proj.weight"]
    assert one.double()(torch.randn(1, 3, WIDTH, dtype=torch.float64)).output.dtype == torch.float64
    empty = nn.MambaBlock(WIDTH, 2, device="meta").to_empty(device="cpu")
    empty.reset_parameters(seed=1)
    assert torch.equal(empty.A_log.double(), one.A_log)


def test_parametrised_and_called_by_functions():
    """The tensors are read from the modules at each call: LoRA, weight norms and torch.func reach them."""

    class Twice(torch.nn.Module):
        def forward(self, weight: Any) -> Any:
            return 2 * weight

    block, x = nn.MambaBlock(WIDTH, 2, seed=0), torch.randn(2, 3, WIDTH)
    with torch.no_grad():
        plain = copy.deepcopy(block)
        plain.out_proj.weight.mul_(2)
        parameters = {n: p.clone() for n, p in block.named_parameters()}
        parameters["out_proj.weight"] *= 2
        called = torch.func.functional_call(block, parameters, (x,))
        torch.nn.utils.parametrize.register_parametrization(block.out_proj, "weight", Twice())
        assert torch.equal(block(x).output, plain(x).output)
        assert torch.equal(called.output, plain(x).output)
        # A class that torch derived from one of ours is not what a new block takes.
        assert type(nn.MambaBlock(WIDTH, 2).out_proj) is nn.Linear
        within = nn.Sequential(block)
        assert torch.equal(within(x).output, plain(x).output)
        many = [nn.MambaBlock(WIDTH, 2) for _ in range(3)]
        stacked, _ = torch.func.stack_module_state(many)
        each = torch.func.vmap(lambda p: torch.func.functional_call(plain, p, (x,)).output)(stacked)
        torch.testing.assert_close(each[1], many[1](x).output)


def test_one_graph():
    """torch.compile(fullgraph=True): same result, same gradients; other numbers compile nothing more."""
    block, x = BLOCKS[2](seed=0), torch.randn(2, 5, WIDTH)
    want = block(x).output
    want.square().sum().backward()
    gradients = {n: p.grad.clone() for n, p in block.named_parameters()}
    block.zero_grad()
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    got = compiled(x).output
    torch.testing.assert_close(got, want)
    got.square().sum().backward()
    for name, parameter in block.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name])
    with torch._dynamo.config.patch(error_on_recompile=True):
        torch.testing.assert_close(compiled(-x).output, block(-x).output)


def test_one_graph_of_a_pack_at_the_first_call(monkeypatch: pytest.MonkeyPatch):
    """Nothing was met before: neither the class of parameters, which is not that of x, nor the bounds."""
    block, x = nn.CausalConv1d(WIDTH, 3, seed=0), torch.randn(1, 7, WIDTH)
    monkeypatch.delitem(scanfield.arrays._LIBRARIES, torch.nn.Parameter, raising=False)
    monkeypatch.setattr(scanfield.arrays, "_ENTERED", set())
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    got = compiled(x, cu_seqlens=[0, 2, 7])
    want = block(x, cu_seqlens=[0, 2, 7])
    torch.testing.assert_close(got.output, want.output)
    torch.testing.assert_close(got.state, want.state)


PARALLEL = """
import os, sys, tempfile, torch
from torch.nn.parallel import DistributedDataParallel
from scanfield import layers
from scanfield_torch import nn
store = os.path.join(tempfile.mkdtemp(), "store")
child = os.fork()
rank = int(child == 0)
torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
torch.set_num_threads(1)
model = nn.LanguageModel(7, 4, [layers.MambaBlock(4, 2)], names="mamba_ssm", seed=rank)
parallel = DistributedDataParallel(model)
tokens = torch.tensor([[1, 5, 3, 2], [6, 0, 4, 4]])
parallel(tokens[rank : rank + 1]).output.square().mean().backward()
alone = nn.LanguageModel(7, 4, [layers.MambaBlock(4, 2)], names="mamba_ssm", seed=0)
alone(tokens).output.square().mean().backward()
for (name, one), (_, other) in zip(model.named_parameters(), alone.named_parameters(), strict=True):
    torch.testing.assert_close(one, other)
    torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-7)
torch.distributed.destroy_process_group()
if rank:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print("equal")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_two_processes_are_one_batch():
    """DistributedDataParallel by gloo: parameters of rank 0 everywhere, gradients of the whole batch."""
    if not torch.distributed.is_available():
        pytest.skip("this torch was built without torch.distributed")
    done = subprocess.run(
        [sys.executable, "-c", PARALLEL], check=False, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0 and done.stdout.strip().endswith("equal"), done.stderr


def test_the_examples_of_the_docstrings():
    for module in (module_file, classes_file):
        found = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
        assert found.attempted > 5 and not found.failed


# -- errors ----------------------------------------------------------------------------------------------------


def test_what_is_wrong_is_told():
    with pytest.raises(scanfield.ArgumentError, match=r"layer: .*one layer of scanfield\.layers"):
        nn.Module(torch.nn.Linear(2, 2))
    with pytest.raises(scanfield.ArgumentError, match="names: 'keras'"):
        model(names="keras")
    with pytest.raises(
        scanfield.ArgumentError, match=r"called 'layer' \(layer\), which means something else"
    ):
        nn.Sequential(layer=nn.Linear(2, 2))
    with pytest.raises(TypeError, match="wide"):
        nn.MambaBlock(4, wide=3)
    block = nn.MambaBlock(4, 2)
    with pytest.raises(scanfield.ShapeError, match=r"one token is \(batch, width\)"):
        block.step(torch.ones(1, 1, 4))
    with pytest.raises(scanfield.StateError, match="state: holds"):
        block(torch.ones(1, 1, 4), {"ssm": torch.ones(1, 8, 2)})
    with pytest.raises(scanfield.BackendError, match="x"):
        block(np.ones((1, 2, 4)))


def test_a_tied_model_takes_its_one_parameter_under_either_name():
    """In the package's own names the model has one; a dictionary from elsewhere may have both."""
    model = nn.LanguageModel(7, 4, [layers.MambaBlock(4, 2)], seed=0)
    state = dict(model.state_dict())
    embedding = state.pop("embedding.weight")
    for number, names in enumerate(
        (["lm_head.weight"], ["embedding.weight"], ["lm_head.weight", "embedding.weight"])
    ):
        weight = torch.full_like(embedding, float(number))
        given = state | {name: weight.clone() for name in names}
        assert not any(model.load_state_dict(given))
        assert torch.equal(model.get_parameter("embedding.weight"), weight) and sorted(given) == sorted(
            [*state, *names]
        )
    for other in (embedding + 1, embedding[:3], [1.0]):
        with pytest.raises(
            scanfield.StateError,
            match=r"lm_head\.weight: differs from embedding\.weight, and this model is tied",
        ):
            model.load_state_dict(state | {"embedding.weight": embedding, "lm_head.weight": other})
        assert torch.equal(model.get_parameter("embedding.weight"), weight)
