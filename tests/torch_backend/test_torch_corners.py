"""Rare ways through the implementations on tensors: derivatives that are zero, transforms entered late, what is declined."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from examples import BASE, EXAMPLES

import scanfield

pytestmark = pytest.mark.backend("torch")

torch = pytest.importorskip("torch")

from tensors import METHOD, canonical, tensors  # noqa: E402

OWN = {op: next(one for one in EXAMPLES if one.op == op) for op in BASE}
METHODS = ["torch.numba", "torch.generic"]


def pair():
    return tuple(torch.linspace(lo, 1, 10, dtype=torch.float64).reshape(1, 5, 2) for lo in (0.2, -1.0))


@pytest.mark.parametrize("method", METHODS)
def test_a_second_derivative_that_is_zero(method):
    """Nothing that the gradient of b is made of depends on b."""
    a, b = pair()
    b.requires_grad_()
    (first,) = torch.autograd.grad(
        scanfield.linear_scan(a, b, method=method).output.sum(), b, create_graph=True
    )
    assert first.any()
    assert torch.autograd.grad(first.sum(), b, allow_unused=True) == (None,)


@pytest.mark.parametrize("method", METHODS)
def test_a_graph_walked_back_under_a_transform_that_began_later(method):
    a, b = (x.requires_grad_() for x in pair())
    weights = torch.arange(10.0, dtype=torch.float64).reshape(1, 5, 2)
    output = scanfield.linear_scan(a, b, method=method).output
    want = torch.autograd.grad(output, (a, b), weights, retain_graph=True)
    with torch.autograd.forward_ad.dual_level():
        found = torch.autograd.grad(output, (a, b), weights)
    for x, y in zip(found, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("method", [*METHODS, "torch.compile"])
@pytest.mark.parametrize("op", BASE)
def test_summaries_are_those_of_the_generic_form(op, method):
    """With autograd and without; torch.compile takes what is shorter than a block as it is."""
    inputs = {k: x for k, x in tensors(OWN[op].inputs).items() if k != "initial_state"}
    if method == "torch.compile" and any(x.is_complex() for x in inputs.values()):
        inputs = {k: x.real if x.is_complex() else x for k, x in inputs.items()}
    call = getattr(scanfield, op)
    options = {k: x for k, x in OWN[op].options.items() if k not in ("cu_seqlens", "states_at")}
    want = scanfield.summarise(call, **inputs, **options, method="generic.recurrent")
    found = scanfield.summarise(call, **inputs, **options, method=method)
    for x, y in zip(found[:2], want[:2], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


def test_what_is_declined_by_its_layout_or_its_bounds():
    from scanfield_torch import numba_scans, views

    call = canonical(OWN["linear_scan"])
    scans = numba_scans.implementation("linear_scan")
    assert scans.declines(call, "forward") is None
    at = scans.index
    on_card = call._replace(arrays=(*call.arrays[:at], torch.tensor([0, 1]), *call.arrays[at + 1 :]))
    assert "values are not on the host" in scans.declines(on_card, "forward")
    sparse = call._replace(arrays=(call.arrays[0].to_sparse(), *call.arrays[1:]))
    assert "layout torch.sparse_coo" in scans.declines(sparse, "forward")
    assert "dtype torch.complex32: kernels" in views.dtype_reason(torch.complex32)


def test_the_form_of_a_step_is_filled_in_its_order():
    from scanfield_torch.unrolled import _filled, _flatten

    a, b, c = pair()[0].unbind(1)[:3]
    tree, leaves = ((a, None), (), ((b,), c)), []
    form = _flatten(tree, leaves)
    assert [x is y for x, y in zip(leaves, (a, b, c), strict=True)] == [True] * 3
    filled = _filled(form, iter(leaves))
    assert filled[0][0] is a and filled[0][1] is None and filled[1] == () and filled[2] == ((b,), c)


def test_tensors_on_a_card_without_triton_are_declined(monkeypatch):
    from scanfield_torch import unrolled

    compiled = unrolled.Unrolled("linear_scan")
    on_card = SimpleNamespace(is_complex=lambda: False, is_cuda=True)
    for has in (False, True):
        monkeypatch.setattr(unrolled.importlib.util, "find_spec", lambda name, has=has: has or None)
        unrolled._has_triton.cache_clear()
        assert (compiled.declines(on_card) is None) is has
    unrolled._has_triton.cache_clear()


def test_a_cotangent_is_followed_while_a_graph_is_recorded():
    """The pullback alone is differentiated, of arrays that are not; recorded or not, that is the same."""
    from torch.fx.experimental.proxy_tensor import make_fx

    a, b = pair()

    def second(weights):
        weights = weights.detach().requires_grad_()
        _, pullback = scanfield.vjp(scanfield.linear_scan, a, b, method=METHOD)
        loss = sum((g**2).sum() for g in pullback(weights).values())
        return torch.autograd.grad(loss, weights)[0]

    want = second(b.cos())
    found = make_fx(second)(b.sin())(b.cos())
    assert want.any()
    torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)
