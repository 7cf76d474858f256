"""Gradients that are to be differentiated again: by the kernels, and by plain operations only when somebody does."""

from __future__ import annotations

import pytest
from examples import BASE, EXAMPLES

import scanfield

pytestmark = pytest.mark.backend("torch")

torch = pytest.importorskip("torch")
pytest.importorskip("numba")

from tensors import METHOD, tensors  # noqa: E402

FIRST = {op: next(one for one in EXAMPLES if one.op == op) for op in BASE}


@pytest.fixture
def calls(monkeypatch):
    """How often kernels and the generic forms ran backward."""
    from scanfield.dispatch import implementation

    counted = {"kernels": 0, "plain": 0}

    def count(kind, holder):
        original = holder.backward

        def backward(*arguments):
            counted[kind] += 1
            return original(*arguments)

        monkeypatch.setattr(holder, "backward", backward)

    for op in BASE:
        count("kernels", implementation(op, METHOD).kernels)
        for form in getattr(scanfield, op).record.generic.values():
            count("plain", form)
    return counted


def vjp(op, given, method=None):
    result, pullback = scanfield.vjp(getattr(scanfield, op), **given, **FIRST[op].options, method=method)
    return result, pullback(torch.sin(result.output), torch.cos(result.final_state))


@pytest.mark.parametrize("op", BASE)
def test_vjp_of_tensors_that_require_a_gradient(op, calls):
    given = tensors(FIRST[op].inputs, requires_grad=True)
    assert scanfield.explain(getattr(scanfield, op), **given, **FIRST[op].options).taken["save"] == METHOD
    result, gradients = vjp(op, given)
    assert calls == {"kernels": 1, "plain": 0}
    with torch.no_grad():
        plain, wanted = vjp(op, given)
    assert torch.equal(result.output, plain.output) and torch.equal(result.final_state, plain.final_state)
    for name, x in gradients.items():
        assert x.requires_grad and torch.equal(x, wanted[name]), name
    # All of it goes on in torch's graph: the results, the cotangents, the arrays.
    calls.update(kernels=0, plain=0)
    found = torch.autograd.grad(sum((x**2).sum() for x in gradients.values()), list(given.values()))
    assert calls == {
        "kernels": 1,
        "plain": 1,
    }  # of the result that the cotangents are made of; of the gradients
    slow = vjp(op, given, "generic.recurrent")[1]
    right = torch.autograd.grad(sum((x**2).sum() for x in slow.values()), list(given.values()))
    for x, y in zip(found, right, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("op", BASE)
def test_a_graph_that_nobody_goes_back_through_costs_nothing(op, calls):
    given = tensors(FIRST[op].inputs, requires_grad=True)
    output = getattr(scanfield, op)(**given, **FIRST[op].options).output
    torch.autograd.grad(output.sum(), list(given.values()), create_graph=True, allow_unused=True)
    assert calls == {"kernels": 1, "plain": 0}


def test_the_gradient_of_one_input_alone():
    """Where not all gradients are wanted, and not all arrays require one."""
    given = tensors(FIRST["gdn2"].inputs)
    given["key"].requires_grad_()
    found = {}
    for method in (METHOD, "generic.recurrent"):
        result, pullback = scanfield.vjp(scanfield.gdn2, **given, wrt=["value", "key"], method=method)
        gradients = pullback(None, torch.ones_like(result.final_state))
        assert set(gradients) == {"value", "key"}
        found[method] = torch.autograd.grad(gradients["value"].square().sum(), given["key"])[0]
    torch.testing.assert_close(*found.values(), rtol=1e-10, atol=1e-10)


def test_half_precision_differentiated_twice():
    given = {
        name: x.bfloat16().requires_grad_()
        for name, x in tensors(FIRST["gdn2"].inputs, torch.float32).items()
    }
    second = {}
    for method in (METHOD, "generic.recurrent"):
        output = scanfield.gdn2(**given, method=method).output
        first = torch.autograd.grad(output.float().square().sum(), given["value"], create_graph=True)[0]
        assert first.dtype is torch.bfloat16
        second[method] = torch.autograd.grad(first.float().square().sum(), given["value"])[0]
    one, other = second.values()
    assert one.dtype is torch.bfloat16
    assert (one - other).abs().max() <= 0.05 * other.abs().max()
