"""What is refused with the line that mends it, and what is carried as the call says whatever torch is told."""

from __future__ import annotations

import numpy as np
import pytest

import scanfield
from scanfield.optimize import Adam, Cosine, Exponential


@pytest.mark.backend("numpy")
def test_relevance_without_its_first_argument_names_it():
    a = np.full((1, 4, 1), 0.5)
    with pytest.raises(
        scanfield.ArgumentError, match=r"R_output: comes before .*linear_scan, R_output, a, b\)"
    ):
        scanfield.relevance(scanfield.linear_scan, a, a)


@pytest.mark.backend("numpy")
def test_a_series_and_a_sequence_without_batch_are_told_how_to_get_their_axes():
    x, A = np.ones(4), -np.ones((1, 2))
    with pytest.raises(scanfield.ShapeError, match=r"a = a\[None, :, None\]"):
        scanfield.linear_scan(x, x)
    with pytest.raises(scanfield.ShapeError, match=r"u = u\[None, :, None\]"):
        scanfield.selective_scan(x, x, A, x, x)
    with pytest.raises(scanfield.ShapeError, match=r"query = query\[None, \.\.\.\]"):
        scanfield.gdn2(*[np.ones((4, 2, 3))] * 3)


@pytest.mark.backend("numpy")
@pytest.mark.parametrize("wrong", [[5], "chunk", 3])
def test_explain_refuses_the_boundaries_that_the_call_refuses(wrong):
    a = np.full((1, 4, 1), 0.5)
    said = []
    for run in (scanfield.linear_scan, lambda *x, **o: scanfield.explain(scanfield.linear_scan, *x, **o)):
        with pytest.raises(scanfield.ScanfieldError) as caught:
            run(a, a, states_at=wrong)
        said.append(str(caught.value))
    assert said[0] == said[1]


@pytest.mark.backend("numpy")
def test_a_rate_of_decay_of_minus_infinity():
    """It resets the state at each step above 0; at a step of 0, 0 times infinity is NaN, as IEEE has it."""
    u, B = np.ones((1, 3, 1)), np.ones((1, 3, 1))
    for method in (None, "generic"):
        output = scanfield.selective_scan(u, u, np.full((1, 1), -np.inf), B, B, method=method).output
        assert (output == 1).all()
        output = scanfield.selective_scan(u, 0 * u, np.full((1, 1), -np.inf), B, B, method=method).output
        assert np.isnan(output).all()


@pytest.mark.backend("jax")
def test_schedules_of_a_traced_step():
    import jax
    import jax.numpy as jnp

    for rate in (Cosine(1.0, 10, warmup=4), Cosine(1.0, 3, warmup=3, final=0.1), Exponential(0.1, 0.5, 7)):
        found = jax.jit(jax.vmap(rate))(jnp.arange(14))
        np.testing.assert_allclose(found, [rate(step) for step in range(14)], rtol=1e-6, atol=1e-7)
    adam, value = Adam(Cosine(0.1, 5, warmup=2)), {"x": jnp.ones(3)}
    state = adam.init(value)
    eager = adam.update(value, value, state)
    traced = jax.jit(lambda value, state: adam.update(value, value, state))(value, state)
    np.testing.assert_allclose(traced[0]["x"], eager[0]["x"], rtol=1e-6)


@pytest.mark.backend("torch")
@pytest.mark.filterwarnings("ignore")  # torch's own, about prototypes
@pytest.mark.parametrize("kind", ["sparse_coo", "sparse_csr", "nested"])
def test_tensors_that_are_not_dense(kind: str):
    import torch

    dense = torch.ones(1, 4, 2)
    if kind == "nested":
        odd = torch._nested_tensor_from_tensor_list(list(torch.ones(2, 4, 2)))
    else:
        dense = dense[0] if kind == "sparse_csr" else dense
        odd = dense.to_sparse(layout=getattr(torch, kind))
    for a, b, name in ((odd, dense, "a"), (dense, odd, "b")):
        with pytest.raises(scanfield.BackendError, match=rf"^{name}: a .*allowed are dense .*; {name} = "):
            scanfield.linear_scan(a, b)
    with pytest.raises(scanfield.BackendError, match=r"^value: a "):
        scanfield.gdn2(torch.ones(1, 4, 2, 2), torch.ones(1, 4, 2, 2), odd)


@pytest.mark.backend("torch")
@pytest.mark.parametrize("form", ["generic.recurrent", "generic.chunk"])
def test_autocast_changes_no_forced_generic_form(form: str):
    import torch

    x = torch.rand(1, 9, 2, 4, generator=torch.Generator().manual_seed(0))

    def both():
        result, pull = scanfield.vjp(scanfield.gdn2, x, x, x, -x, x, method=form)
        block = scanfield.summarise(scanfield.gdn2, x, x, x, -x, x, method=form)
        return [*result, *pull(result.output, None).values(), *scanfield.compose(block, block)[:2]]

    want = both()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = both()
    assert all(torch.equal(x, y) for x, y in zip(found, want, strict=True))


@pytest.mark.backend("torch")
def test_softplus_is_curved_at_0():
    """A quarter, by autograd through the generic form's own operations."""
    import torch
    from array_api_compat import torch as xp

    from scanfield.scans.selective_forms import softplus

    x = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(softplus(xp, x).sum(), x, create_graph=True)
    (curved,) = torch.autograd.grad(slope.sum(), x)
    assert slope.item() == 0.5 and curved.item() == 0.25
