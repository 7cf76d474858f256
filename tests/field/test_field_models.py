"""Field reports F025, and the half of F031 that runs a model: transformers' own models, accelerated."""

from __future__ import annotations

import importlib

import pytest

pytestmark = pytest.mark.backend("torch")
torch = pytest.importorskip("torch", reason="transformers' models are PyTorch")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from scanfield.compat.transformers import accelerate  # noqa: E402  (the models need transformers)


@pytest.fixture(autouse=True)
def quiet():
    """transformers says once that its slow functions run."""
    transformers.logging.set_verbosity_error()


def model_of(name):
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2}
    config = getattr(transformers, f"{name}Config")(**sizes)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def tokens(batch=1):
    return torch.randint(3, 97, (batch, 15), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ["Mamba", "FalconMamba"])
@torch.no_grad()
def test_f025_a_prompt_in_chunks_keeps_its_state(name):
    model, ids = model_of(name), tokens()
    place = {"Mamba": "mamba", "FalconMamba": "falcon_mamba"}[name]
    module = importlib.import_module(f"transformers.models.{place}.modeling_{place}")
    own = module.mamba_selective_scan

    def in_chunks():
        first = model(ids[:, :10], use_cache=True)
        return model(ids[:, 10:], cache=first.cache, use_cache=True).logits

    whole = model(ids).logits[:, 10:]
    before = in_chunks()
    with accelerate(model):
        assert (in_chunks() - whole).abs().max() <= 1e-5
        assert module.mamba_selective_scan is not own
    assert module.mamba_selective_scan is own
    assert torch.equal(in_chunks(), before)
    assert (before - whole).abs().max() > 1e-4  # without the repair, or the test would prove nothing


@torch.no_grad()
def test_f031_padding_on_the_left_changes_no_logits():
    model, ids = model_of("Mamba"), tokens(2)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    with accelerate(model):
        padded = model(ids, attention_mask=mask).logits
        assert (padded[:1] - model(ids[:1]).logits).abs().max() <= 1e-5
        assert (padded[1:, 5:] - model(ids[1:, 5:]).logits).abs().max() <= 1e-5
        unmasked = model(ids).logits
    assert (unmasked[1:, 5:] - padded[1:, 5:]).abs().max() > 1e-4
