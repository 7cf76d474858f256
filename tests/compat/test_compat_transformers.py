"""transformers' models on scanfield: each type with random weights against its own plain PyTorch functions."""

from __future__ import annotations

import contextlib
import copy
import importlib
import itertools
import pickle
import sys
import threading

import pytest

import scanfield

pytestmark = pytest.mark.backend("torch")
torch = pytest.importorskip("torch", reason="transformers' models are PyTorch")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from tiny_models import OLDER, REFUSED, SIZES, TYPES, VOCABULARY, build  # noqa: E402  (needs transformers)

from scanfield.compat import _hooked, _one_token  # noqa: E402
from scanfield.compat.transformers import _users as users  # noqa: E402
from scanfield.compat.transformers import accelerate, supported  # noqa: E402

# Fed in pieces, these two differ from themselves in one piece with transformers alone, in their attention layers.
UPSTREAM_PIECES = ("bamba", "zamba2")


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """transformers says once that its slow functions run; that is what is asked for here."""
    transformers.logging.set_verbosity_error()


def tokens(time=11, batch=2, seed=1):
    return torch.randint(3, VOCABULARY, (batch, time), generator=torch.Generator().manual_seed(seed))


def logits(output):
    return output.logits if hasattr(output, "logits") else output.last_hidden_state


def cache_of(output):
    """The cache, by the name that the model's forward has for it: older ones ignore a wrong one without a word."""
    names = ("cache", "past_key_values", "cache_params")
    return next({name: getattr(output, name)} for name in names if getattr(output, name, None) is not None)


def pieces(model, ids, cuts=(6, 9, 10)):
    """A prompt in two pieces, then token by token, with the cache handed on."""
    first = model(ids[:, : cuts[0]], use_cache=True)
    cache, found = cache_of(first), [logits(first)]
    bounds = (*cuts, ids.shape[1])
    for start, stop in itertools.pairwise(bounds):
        found.append(logits(model(ids[:, start:stop], **cache, use_cache=True)))
    return torch.cat(found, dim=1)


def gradients(model, ids):
    model.train()
    model.zero_grad()
    output = logits(model(ids, use_cache=False))
    generator = torch.Generator().manual_seed(2)
    (output * torch.randn(output.shape, generator=generator)).sum().backward()
    model.eval()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def off(found, wanted):
    return float((found - wanted).abs().max() / wanted.abs().max())


def test_every_supported_type_is_tested():
    assert set(SIZES) == set(supported()) and len(supported()) == 19
    assert len(TYPES) == (11 if OLDER else 19)


@pytest.mark.parametrize("name", TYPES)
def test_logits_gradients_and_pieces(name, monkeypatch):
    model, ids = build(name), tokens()
    with torch.no_grad():
        want = logits(model(ids))
        # Their older attention takes tokens behind a cache one by one alone.
        cuts = tuple(range(6, 11)) if OLDER and name in UPSTREAM_PIECES else (6, 9, 10)
        own_pieces = pieces(model, ids, cuts) if name in UPSTREAM_PIECES else want
    want_gradients = gradients(model, ids)
    with accelerate(model) as running:
        assert running.layers >= 1 and running.models == (name,)
        with torch.no_grad():
            assert off(logits(model(ids)), want) <= 1e-5
            found = pieces(model, ids, cuts)
            monkeypatch.setattr(
                _hooked, "_SMALL_STATE", 0
            )  # small states take their steps here too, not upstream's
            steps = pieces(model, ids, cuts)
        for each in (found, steps):
            assert off(each, own_pieces) <= 2e-5
        found_gradients = gradients(model, ids)
    assert set(found_gradients) == set(want_gradients)
    largest = max(float(g.abs().max()) for g in want_gradients.values())
    for parameter, gradient in want_gradients.items():
        size = max(
            float(gradient.abs().max()), 1e-4 * largest
        )  # what is left of gradients that cancel is no measure
        assert float((found_gradients[parameter] - gradient).abs().max()) <= 1e-4 * size, parameter
    with torch.no_grad():
        assert torch.equal(logits(model(ids)), want)
    assert not _hooked.frames.running()


def layer_of(model, name):
    from scanfield.compat._models import mixer_of

    return next(x for x in model.modules() if (found := mixer_of(x)) is not None and found.name == name)


@pytest.mark.parametrize("name", TYPES)
def test_packed_sequences_do_not_meet(name):
    """A layer on three sequences in one row, told by cu_seq_lens_q and by seq_idx, against each alone."""
    model = build(name)
    layer = layer_of(model, name)
    width = getattr(layer, "hidden_size", None) or model.config.hidden_size
    hidden = torch.randn(1, 9, width, generator=torch.Generator().manual_seed(3))
    bounds = [0, 4, 5, 9]

    def run(x, **given):
        output = layer(x, **given)
        return output[0] if isinstance(output, tuple) else output

    if name == "olmo_hybrid" and OLDER:
        with accelerate(model), pytest.raises(scanfield.BackendError, match=r"seq_idx.*layers of their own"):
            run(hidden, cu_seq_lens_q=torch.tensor(bounds))
        return
    with accelerate(model), torch.no_grad():
        alone = torch.cat([run(hidden[:, a:b]) for a, b in itertools.pairwise(bounds)], dim=1)
        numbers = torch.tensor([[7, 7, 7, 7, 8, 9, 9, 9, 9]], dtype=torch.int32)
        for given in ({"seq_idx": numbers}, {"cu_seq_lens_q": torch.tensor(bounds, dtype=torch.int32)}):
            assert off(run(hidden, **given), alone) <= 1e-5
        mixed = run(hidden)
        with accelerate(model):  # once more: the keyword reaches the layer through both
            assert off(run(hidden, seq_idx=numbers), alone) <= 1e-5
    assert off(mixed, alone) > 1e-3  # or the test would prove nothing


@pytest.mark.parametrize("name", ["mamba", "falcon_mamba", "mamba2"])
def test_packed_input_of_a_whole_model(name):
    """Told to the model alone: blocks of Mamba do not hand the keyword on."""
    model, ids = build(name), tokens(9, batch=1)
    numbers = torch.tensor([[0] * 4 + [1] * 5])
    with accelerate(model):
        with torch.no_grad():
            alone = torch.cat([logits(model(x)) for x in (ids[:, :4], ids[:, 4:])], dim=1)
            assert off(logits(model(ids, seq_idx=numbers)), alone) <= 1e-5
            assert off(logits(model(ids, cu_seq_lens_q=torch.tensor([0, 4, 9]))), alone) <= 1e-5
        changed = torch.cat([tokens(4, batch=1, seed=9), ids[:, 4:]], dim=1)
        with torch.no_grad():
            two = [logits(model(x, seq_idx=numbers))[:, 4:] for x in (ids, changed)]
        assert torch.equal(*two)


def test_a_model_inside_another_has_sequences_of_its_own():
    """One that runs in the forward of a packed one: alone, packed otherwise, and the base model of its own head."""
    outer, inner = build("mamba"), build("mamba2")
    ids, numbers = tokens(9, batch=1), torch.tensor([[0] * 4 + [1] * 5])
    found = []

    def run_inner(*_):
        found.extend(logits(inner(ids, **given)) for given in ({}, {"seq_idx": 1 - numbers}))
        found.append(inner.backbone(ids)[0])

    with torch.no_grad(), accelerate(outer), accelerate(inner):
        want = [logits(inner(ids)), logits(inner(ids, seq_idx=numbers)), inner.backbone(ids)[0]]
        alone = logits(outer(ids, seq_idx=numbers))
        hook = outer.backbone.layers[0].register_forward_hook(run_inner)
        packed = logits(outer(ids, seq_idx=numbers))
        hook.remove()
        with accelerate(outer.backbone):  # hooked twice, and told of nothing
            assert torch.equal(logits(outer(ids, seq_idx=numbers)), alone)
    assert torch.equal(packed, alone) and off(want[0], want[1]) > 1e-3
    for got, right in zip(found, want, strict=True):
        assert off(got, right) <= 1e-5


@pytest.mark.parametrize("name", ["mamba", "falcon_mamba"])
def test_chunked_prefill_is_mended(name):
    """Ten tokens, then five with the cache, against fifteen at once; without the repair the state starts anew."""
    model, ids = build(name), tokens(15)
    with torch.no_grad():
        with pytest.raises(IndexError) if OLDER else contextlib.nullcontext():
            assert off(pieces(model, ids, (10,))[:, 10:], logits(model(ids))[:, 10:]) > 1e-3
        with accelerate(model):
            assert off(pieces(model, ids, (10,))[:, 10:], logits(model(ids))[:, 10:]) <= 1e-5
            # Fewer tokens than the convolution is wide.
            assert off(pieces(model, ids, (5, 7, 10)), logits(model(ids))) <= 1e-5


def test_greedy_decoding_is_upstreams():
    model, ids = build("mamba"), tokens(5)
    want = model.generate(ids, max_new_tokens=12, do_sample=False)
    with accelerate(model):
        assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False), want)


@pytest.mark.parametrize("name", ["mamba", "mamba2", "qwen3_next"])
def test_half_precision(name):
    model, ids = build(name).to(torch.bfloat16), tokens()
    with torch.no_grad():
        want, own = logits(build(name)(ids)), logits(model(ids))
        with accelerate(model):
            found, parts = logits(model(ids)), pieces(model, ids)
    assert found.dtype == parts.dtype == own.dtype
    assert off(found.float(), want) <= 0.1 and off(parts.float(), want) <= 0.1


def test_other_models_and_nested_use():
    """Only the models asked for; functions are back when the last one is done, whatever the order."""
    module = importlib.import_module("transformers.models.mamba.modeling_mamba")
    place, name = (module.MambaMixer, "slow_forward") if OLDER else (module, "mamba_selective_scan")
    original = getattr(place, name)
    calls = []

    def counted(*args, **kwargs):
        calls.append(1)
        return original(*args, **kwargs)

    setattr(place, name, counted)
    try:
        first, second, ids = build("mamba"), build("mamba"), tokens()
        with torch.no_grad():
            one = accelerate(first)
            first(ids)
            assert not calls
            second(ids)
            assert len(calls) == 2  # its two layers, by transformers' own function
            two, again = accelerate(second), accelerate(first)
            one.undo()
            one.undo()
            first(ids)
            second(ids)
            assert len(calls) == 2
            again.undo()
            first(ids)
            assert len(calls) == 4
            two.undo()
        assert getattr(place, name) is counted
    finally:
        setattr(place, name, original)


@pytest.mark.parametrize("name", ["mamba", "qwen3_next"])
def test_copies_and_pickles(name):
    """They run within the acceleration, behind it, and in one of their own, where sequences are kept apart."""
    model, ids = build(name), tokens()
    numbers = torch.tensor([[0] * 4 + [1] * 5], dtype=torch.int32)
    hidden = torch.randn(1, 9, 16, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        want = logits(model(ids))
        with accelerate(model):
            copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
            for each in copies:
                assert off(logits(each(ids)), want) <= 1e-5
        for each in copies:
            assert off(logits(each(ids)), want) <= 1e-5
            with accelerate(each):
                layer = layer_of(each, name)
                alone, packed = (
                    torch.cat([layer(hidden[:, :4]), layer(hidden[:, 4:])], dim=1),
                    layer(hidden, seq_idx=numbers),
                )
                assert off(packed, alone) <= 1e-5
    assert not any(users.values()) and not _hooked.frames.running()


def test_threads_and_errors_leave_other_models_alone():
    """One model is accelerated again and again, by a with block that an error ends, while another one runs as it is."""
    own, other, ids = build("mamba2"), build("mamba2"), tokens()
    with torch.no_grad():
        want = logits(other(ids))
    found = []

    def plain():
        with torch.no_grad():
            found.extend(torch.equal(logits(other(ids)), want) for _ in range(6))

    def accelerated():
        for _ in range(6):
            with torch.no_grad(), contextlib.suppress(KeyError), accelerate(own):
                found.append(off(logits(own(ids)), want) <= 1e-5)
                raise KeyError

    threads = [threading.Thread(target=run) for run in (plain, accelerated, accelerated)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert found == [True] * 18
    assert not users["mamba2"] and not any(layer._forward_pre_hooks for layer in own.modules())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # what torch.compile says of transformers' own lines
def test_compiled_models():
    """torch.compile of what is accelerated, and the other way round; packed sequences are told to the outermost module."""
    model, ids, numbers = (
        build("mamba", num_hidden_layers=1),
        tokens(9, batch=1),
        torch.tensor([[0] * 4 + [1] * 5]),
    )
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad(), accelerate(model):
        alone = torch.cat([logits(model(x, use_cache=False)) for x in (ids[:, :4], ids[:, 4:])], dim=1)
        want = logits(model(ids, use_cache=False))
    with torch.no_grad():
        assert off(logits(compiled(ids, use_cache=False)), want) <= 1e-5
    for outer in (compiled, model):
        with torch.no_grad(), accelerate(outer):
            assert off(logits(compiled(ids, use_cache=False)), want) <= 1e-5
            assert off(logits(compiled(ids, seq_idx=numbers, use_cache=False)), alone) <= 1e-5


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_a_model_without_data(name):
    """On the device "meta": shapes, and then weights that come later."""
    model, ids = build(name), tokens()
    with torch.no_grad():
        want = logits(model(ids))
        empty = copy.deepcopy(model).to("meta")
        with accelerate(empty):
            found = logits(empty(ids.to("meta")))
            assert (found.shape, found.dtype, found.device.type) == (want.shape, want.dtype, "meta")
            empty.to_empty(device="cpu")
            empty.load_state_dict(model.state_dict())
            assert off(logits(empty(ids)), want) <= 1e-5


def test_an_error_in_forward_leaves_nothing_behind():
    model = build("mamba")
    with accelerate(model):
        with pytest.raises(scanfield.ShapeError, match="seq_idx"), torch.no_grad():
            model(tokens(9), seq_idx=torch.zeros(2, 8, dtype=torch.int64))
        assert not _hooked.frames.running()
        with torch.no_grad():
            model(tokens(9))


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_an_interrupt_in_forward_leaves_nothing_behind(name):
    """torch calls no hook after it; the pack, the layer's state and its turn end with the call all the same."""
    model, other, ids = build(name), build(name), tokens(9)
    numbers = torch.tensor([[0] * 4 + [1] * 5] * 2)
    layer = next(x for key, x in model.named_modules() if key.endswith("mixer.out_proj"))

    def interrupt(*unused):
        raise KeyboardInterrupt

    with torch.no_grad():
        want = logits(other(ids))
        cut = logits(other(ids[:, :5]))
        for again in (False, True):
            with accelerate(model):
                kept = cache_of(model(ids[:, :6], use_cache=True))
                handle = layer.register_forward_pre_hook(interrupt)
                for given in ({"seq_idx": numbers}, {}):
                    with pytest.raises(KeyboardInterrupt):
                        model(ids, **given)
                handle.remove()
                assert torch.equal(logits(other(ids)), want)
                if not again:
                    assert off(logits(model(ids[:, 6:], **kept, use_cache=True)), want[:, 6:]) <= 1e-5
                    assert off(logits(model(ids)), want) <= 1e-5
                    assert off(logits(model(ids[:, :5])), cut) <= 1e-5
            with accelerate(model):
                assert off(logits(model(ids)), want) <= 1e-5
        assert torch.equal(logits(model(ids)), want)


def test_packs_under_gradient_checkpointing_are_refused_where_layers_are_not_told():
    model, ids = build("mamba"), tokens(9, batch=1)
    (model.gradient_checkpointing_enable if OLDER else model.activation_checkpointing_enable)()
    model.train()
    with accelerate(model):
        model(ids, use_cache=False)
        with pytest.raises(scanfield.StateError, match="checkpointing"):
            model(ids, seq_idx=torch.zeros(1, 9, dtype=torch.int64), use_cache=False)


def test_what_is_not_supported_is_named(monkeypatch):
    with pytest.raises(scanfield.ArgumentError, match=r"model: expected a torch module, came builtins\.str"):
        accelerate("state-spaces/mamba-130m-hf")
    with pytest.raises(
        scanfield.BackendError, match=r"Linear has no layer .* supported are bailing_hybrid, bamba"
    ):
        accelerate(torch.nn.Linear(2, 2))
    for name in REFUSED:
        with pytest.raises(
            scanfield.BackendError, match=rf"modeling_{name} of transformers .* tested are 5\.24 and 5\.9"
        ):
            accelerate(build(name))
    if not OLDER:
        model = build("mamba")
        monkeypatch.delattr(sys.modules["transformers.models.mamba.modeling_mamba"], "mamba_selective_scan")
        with pytest.raises(
            scanfield.BackendError, match=r"has no mamba_selective_scan; tested are 5\.24 and 5\.9"
        ):
            accelerate(model)


@pytest.mark.skipif(OLDER, reason="older mixers have no function for it")
def test_one_token_in_fewer_operations():
    """The step of the convolution and that of the state against transformers' own, whatever the cache keeps."""
    module = importlib.import_module("transformers.models.mamba.modeling_mamba")
    generator = torch.Generator().manual_seed(4)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    for kept, bias, activation in ((3, None, None), (4, draw(5), "silu"), (6, draw(5), "silu")):
        x, state, weight = draw(2, 5, 1), draw(2, 5, kept), draw(5, 4)
        states = [state.clone(), state.clone()]
        with torch.no_grad():
            want = module.causal_conv1d_update(x, states[0], weight, bias, activation=activation)
            got = _one_token.convolution(None, None, x, states[1], weight, bias, activation=activation)
        assert off(got, want) <= 1e-6 and torch.equal(*states)
    pool = draw(2, 3, 5, 4)  # a view with strides, as zamba passes
    given = (draw(2, 5), draw(2, 5), -draw(5, 4).abs(), draw(2, 4), draw(2, 4))
    for more in ({}, {"D": draw(5), "z": draw(2, 5), "dt_bias": draw(5), "dt_softplus": True}):
        states = [pool[:, 1].clone(), pool.clone()[:, 1]]
        with torch.no_grad():
            want = module.mamba_selective_state_update(states[0], *given, **more)
            got = _one_token.update(None, None, states[1], *given, **more)
        assert off(got, want) <= 1e-5 and off(states[1], states[0]) <= 1e-6
    # Where gradients are recorded, and in other dtypes, transformers' own.
    called = []
    _one_token.update(lambda *args, **kwargs: called.append(args), None, pool[:, 1], *given)
    with torch.no_grad():
        _one_token.convolution(
            lambda *args, **kwargs: called.append(args),
            None,
            draw(1, 5, 1).double(),
            draw(1, 5, 3),
            draw(5, 4),
        )
    assert len(called) == 2


@pytest.mark.skipif(
    bool(OLDER), reason="layers of older versions are copied for a prompt, which is not traced"
)
@pytest.mark.filterwarnings("ignore")  # what torch.compile says of transformers' own lines
def test_layers_compiled_one_by_one():
    """With ``fullgraph``: nothing in a hook may ask for what torch.compile does not trace."""
    model, ids = build("mamba", num_hidden_layers=1), tokens(6, batch=1)
    with torch.no_grad(), accelerate(model):
        want = logits(model(ids, use_cache=False))
        for block in model.backbone.layers:
            block.compile(backend="eager", fullgraph=True)
        assert off(logits(model(ids, use_cache=False)), want) <= 1e-5
