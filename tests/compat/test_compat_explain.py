"""Relevance of transformers' models: MambaLRP's detached factors by autograd, conservation, and what is refused."""

from __future__ import annotations

import pytest

import scanfield
from scanfield.lrp import explain

pytestmark = pytest.mark.backend("torch")
torch = pytest.importorskip("torch", reason="transformers' models are PyTorch")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from tiny_models import TYPES, VOCABULARY, build  # noqa: E402  (needs transformers)

from scanfield.compat._explain_models import language_model  # noqa: E402
from scanfield.compat.transformers import accelerate  # noqa: E402

EXPLAINED = ("falcon_mamba", "mamba", "mamba2")


@pytest.fixture(autouse=True)
def quiet():
    """transformers says once that its slow functions run."""
    transformers.logging.set_verbosity_error()


def model_of(name, **more):
    """With biases wherever the type may have them."""
    model = build(name, **more)
    with torch.no_grad():
        for parameter_name, parameter in sorted(model.named_parameters()):
            if parameter_name.endswith("bias"):
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def tokens(time=11, batch=2, seed=1):
    return torch.randint(3, VOCABULARY, (batch, time), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", EXPLAINED)
def test_conservation_and_the_layers_own(name, dtype):
    model, ids = model_of(name, use_bias=True).to(dtype), tokens()
    before = {n: p.clone() for n, p in model.state_dict().items()}
    with torch.no_grad():
        logits = model(ids).logits
    with accelerate(model):
        found = explain(model, ids)
    assert found.tokens.dtype == dtype and not found.tokens.requires_grad and found.tokens.shape == (2, 11)
    assert found.target.tolist() == logits[:, -1].argmax(-1).tolist()
    assert (found.value - logits[:, -1].max(-1).values).abs().max() <= 1e-5  # upstream's norms are float32's
    report = found.report
    left = report.sum_out - report.sum_in - report.to_bias
    share = report.to_bias.abs() / report.sum_out.abs()
    bound = 1e-5 if dtype == torch.float32 else 1e-12
    assert (left.abs() <= bound * report.sum_out.abs()).all() and (share > 1e-3).all()
    assert (found.tokens.sum(1) - report.sum_in).abs().max() <= bound

    ours = language_model(model)
    parameters = dict(model.named_parameters())
    assert ours.named_parameters()["layers.1.mixer.A_log"].data_ptr() == (
        parameters["backbone.layers.1.mixer.A_log"].data_ptr()
    )
    output = ours(ids).output
    R = torch.zeros_like(output)
    for row, token in enumerate(found.target.tolist()):
        R[row, -1, token] = output[row, -1, token]
    want = ours.relevance(R, ids).x
    assert (found.tokens - want).abs().max() <= 1e-5 * want.abs().max()
    assert all(torch.equal(p, before[n]) for n, p in model.state_dict().items())


def by_autograd(model, ids, target):
    """Gradient times input of a Mamba or FalconMamba whose forward is written out with detached factors."""

    def norm(x, weight, epsilon):
        return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon).detach()

    def silu(x):
        return x * torch.sigmoid(x).detach()

    e = model.backbone.embeddings(ids).detach().requires_grad_()
    x = e
    for block in model.backbone.layers:
        m = block.mixer
        inside = norm(x, block.norm.weight, block.norm.variance_epsilon)
        u, z = (inside @ m.in_proj.weight.T).chunk(2, dim=-1)
        u = silu(m.conv1d(u.transpose(1, 2))[..., : ids.shape[1]]).transpose(1, 2)
        sizes = [m.time_step_rank, m.ssm_state_size, m.ssm_state_size]
        low, B, C = (u @ m.x_proj.weight.T).split(sizes, dim=-1)
        if hasattr(m, "rms_eps"):
            low, B, C = (norm(y, 1.0, m.rms_eps) for y in (low, B, C))
        step = torch.nn.functional.softplus(m.dt_proj(low)).detach()
        B, C, A = B.detach(), C.detach(), -torch.exp(m.A_log).detach()
        h, outputs = 0.0, []
        for t in range(ids.shape[1]):
            s = step[:, t, :, None]
            h = torch.exp(s * A) * h + s * u[:, t, :, None] * B[:, t, None, :]
            outputs.append((h * C[:, t, None, :]).sum(-1))
        y = torch.stack(outputs, 1) + m.D * u
        gated = y * silu(z)
        x = x + (0.5 * gated + 0.5 * gated.detach()) @ m.out_proj.weight.T
    last = norm(x, model.backbone.norm_f.weight, model.config.layer_norm_epsilon)[:, -1]
    (grad,) = torch.autograd.grad((last @ model.lm_head.weight[target]).sum(), e)
    return (e * grad).sum(-1)


@pytest.mark.parametrize("name", ["falcon_mamba", "mamba"])
def test_detached_factors_by_autograd(name):
    model, ids = model_of(name).double(), tokens()
    found, want = explain(model, ids, 5).tokens, by_autograd(model, ids, 5)
    assert (found - want).abs().max() <= 1e-9 * want.abs().max()


def test_half_precision_and_masks():
    model, ids = model_of("mamba").to(torch.bfloat16), tokens()
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    found = explain(model, ids, torch.tensor([5, 6]), attention_mask=mask)
    assert found.tokens.dtype == torch.float32 and not found.tokens[1, :4].any()
    left = found.report.sum_out - found.report.sum_in - found.report.to_bias
    assert (left.abs() <= 1e-5 * found.report.sum_out.abs()).all()


@pytest.mark.parametrize("name", [name for name in TYPES if name not in EXPLAINED])
def test_other_types_are_refused_by_name(name):
    with pytest.raises(
        scanfield.BackendError, match=rf"\({name}\) is not explained: .* falcon_mamba, mamba, mamba2"
    ):
        explain(build(name), tokens())


def test_what_is_no_plain_model_is_refused():
    model, ids = build("mamba"), tokens()
    with pytest.raises(scanfield.BackendError, match=r"MambaModel .* no logits"):
        explain(model.backbone, ids)
    with pytest.raises(scanfield.BackendError, match="hidden_act='gelu'"):
        explain(build("mamba", hidden_act="gelu"), ids)
    with pytest.raises(scanfield.ArgumentError, match=r"model: torch\.nn\.modules\.linear\.Linear"):
        explain(torch.nn.Linear(2, 2), ids)
    with pytest.raises(scanfield.BackendError, match="numpy"):
        explain(model, ids.numpy())
    model.backbone.layers[0].mixer.in_proj.register_parameter("lora_A", torch.nn.Parameter(torch.ones(2)))
    with pytest.raises(scanfield.BackendError, match=r"lora_A.*merge adapters"):
        explain(model, ids)


def test_a_class_of_ones_own_is_the_type_that_it_inherits_from():
    base = model_of("mamba").double()
    own = type("Mine", (type(base),), {})(base.config).double()
    own.load_state_dict(base.state_dict())
    for found, want in zip(explain(own.eval(), tokens())[:2], explain(base, tokens())[:2], strict=True):
        torch.testing.assert_close(found, want)


def test_a_model_of_no_type_is_refused():
    class Stranger(transformers.PreTrainedModel):
        config_class = transformers.MambaConfig

        def forward(self, ids):
            return ids

    with pytest.raises(scanfield.BackendError, match="Stranger is no model of a type; explained are"):
        language_model(Stranger(build("mamba").config))
