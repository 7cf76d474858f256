"""What accelerated layers do beside the scans: the convolution of a prompt, and the rule on tensors as they lie."""

from __future__ import annotations

import itertools

import pytest

pytestmark = pytest.mark.backend("torch")
torch = pytest.importorskip("torch", reason="transformers' models are PyTorch")

from torch.autograd import forward_ad  # noqa: E402
from torch.func import grad, hessian, jvp, vmap  # noqa: E402

import scanfield  # noqa: E402
from scanfield.compat import _hooked  # noqa: E402
from scanfield.compat.fla import chunk_gated_delta_rule  # noqa: E402


def upstream(x, weight, bias, activation=None):
    """The convolution as transformers has it."""
    y = torch.nn.functional.conv1d(x, weight[:, None], bias, padding=weight.shape[1] - 1, groups=x.shape[1])
    y = y[:, :, : x.shape[2]]
    return y if activation is None else torch.nn.functional.silu(y)


def convolved(x, weight, bias, activation=None):
    """The hook's; it may not hand this on."""
    return _hooked.convolution(None, _hooked.Frame(), x, weight, bias, activation=activation, unused=1)


def alike(found, wanted, tolerance=1e-5):
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    found, wanted = found.detach(), wanted.detach()
    assert float((found - wanted).abs().max()) <= tolerance * (1e-2 + float(wanted.abs().max()))


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


LAYOUTS = {
    "times side by side": lambda x: x.contiguous(),
    "channels side by side": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "part of a projection": lambda x: torch.cat([x, x], dim=1).transpose(1, 2).contiguous().transpose(1, 2)[:, : x.shape[1]],
    "behind a cache": lambda x: torch.cat([x[:, :, :2], x], dim=2)[:, :, 2:],
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_convolution_in_every_layout(layout):
    """Values, gradients and gradients of these, for sizes on both sides of the width and of a block of tokens."""
    sizes = itertools.product(((1, 5), (3, 1)), (2, 130), ((1, True), (4, False), (4, True)), (None, "silu"))
    for (batch, channels), time, (width, biased), activation in sizes:
        x = LAYOUTS[layout](drawn(batch, channels, time)).requires_grad_()
        given = [x, drawn(channels, width).requires_grad_()]
        if biased:
            given.append(drawn(channels).requires_grad_())
        bias = given[2] if biased else None
        found, wanted = (f(*given[:2], bias, activation) for f in (convolved, upstream))
        cotangent = drawn(*wanted.shape)
        alike(found, wanted)
        with torch.no_grad():
            alike(convolved(*given[:2], bias, activation), wanted.detach())
        once = [torch.autograd.grad(y, given, cotangent, create_graph=True) for y in (found, wanted)]
        plain = torch.autograd.grad(convolved(*given[:2], bias, activation), given, cotangent)
        for got, want, also in zip(*once, plain, strict=True):
            alike(got, want)
            alike(also, want)
        sums = [sum((g * g.detach().cos()).sum() for g in grads) for grads in once]
        for got, want in zip(*(torch.autograd.grad(s, given, allow_unused=True) for s in sums), strict=True):
            assert (got is None or float(got.abs().max()) == 0) if want is None else got is not None
            if want is not None:
                alike(got, want, 1e-3)  # sums that cancel


def test_convolution_leaves_channels_side_by_side():
    for layout in LAYOUTS.values():
        for wanted in (False, True):
            x = layout(drawn(2, 5, 7)).requires_grad_(wanted)
            assert convolved(x, drawn(5, 4), None, "silu").stride(1) == 1


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch warns of its own use of it
def test_convolution_under_transforms():
    x, weight, bias = given = drawn(2, 9, 5).transpose(1, 2), drawn(5, 4), drawn(5)
    tangents = tuple(t.cos() for t in given)

    def batched(c):
        leaf = weight.clone().requires_grad_()
        y = c(x, leaf, bias, "silu")
        many = torch.stack([torch.ones_like(y), y.detach()])
        return torch.autograd.grad(y, leaf, many, is_grads_batched=True)[0]

    def dual(c):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(c(forward_ad.make_dual(x, x.cos()), weight, bias, "silu")).tangent

    for call in (
        lambda c: vmap(grad(lambda x: c(x[None], weight, bias, "silu").sin().sum()))(x),
        lambda c: jvp(lambda *given: c(*given, "silu"), given, tangents)[1],
        lambda c: jvp(lambda *given: c(*given, None), given, tangents)[1],
        lambda c: hessian(lambda weight: c(x, weight, bias, "silu").sum())(weight),
        batched,
        dual,
    ):
        alike(call(convolved), call(upstream))


@pytest.mark.parametrize("change", ["dtype", "activation", "nothing there"])
def test_other_convolutions_are_upstreams(change):
    called = []
    x, weight, activation = drawn(1, 3, 6), drawn(3, 4), "silu"
    if change == "dtype":
        x, weight = x.double(), weight.double()
    if change == "nothing there":
        x = x[:, :, :0]
    if change == "activation":
        activation = "gelu"

    def original(*args, **kwargs):
        called.append((args, kwargs))

    _hooked.convolution(original, _hooked.Frame(), x, weight, activation=activation)
    assert len(called) == 1 and called[0][0][0] is x and called[0][1] == {"activation": activation}


@pytest.mark.parametrize("lie", ["split", "times side by side", "apart"])
@pytest.mark.parametrize("followed", [False, True])
def test_rule_reads_tensors_as_they_lie(lie, followed):
    """Two heads of queries and keys for four of values, one key of zeros; nothing given is written to."""
    batch, time, sizes = 2, 37, ((2, 8), (2, 8), (4, 6))
    whole = drawn(batch, time, sum(h * w for h, w in sizes))
    if lie == "times side by side":
        whole = whole.transpose(1, 2).contiguous().transpose(1, 2)
    parts = [
        x.reshape(batch, time, *size)
        for x, size in zip(whole.split([h * w for h, w in sizes], dim=2), sizes, strict=True)
    ]
    parts[1][:, 3] = 0
    if lie == "apart":
        parts = [x.contiguous() for x in parts]
    g, beta, state = -drawn(batch, time, 4).abs(), drawn(batch, time, 4).sigmoid(), drawn(batch, 4, 8, 6)
    leaves = [x.detach().requires_grad_(followed) for x in (*parts, g, beta, state)]
    before = [x.detach().clone() for x in leaves]
    words = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    found = _hooked.gated_delta_rule(
        None, _hooked.Frame(), *leaves[:3], g=leaves[3], beta=leaves[4], initial_state=leaves[5], **words
    )
    exact = [x.detach().double().requires_grad_(followed) for x in leaves]
    with scanfield.use(method="generic"):
        wanted = chunk_gated_delta_rule(*exact[:5], initial_state=exact[5], **words)
    for got, want in zip(found, wanted, strict=True):
        alike(got, want.float())
    if followed:
        grads = [
            torch.autograd.grad([*results], own, [drawn(*r.shape).to(r.dtype) for r in results])
            for results, own in ((found, leaves), (wanted, exact))
        ]
        for got, want in zip(*grads, strict=True):
            alike(got, want.float())
    for x, kept in zip(leaves, before, strict=True):
        assert torch.equal(x, kept)
