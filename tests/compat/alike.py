"""Two functions of tensors are held against each other: results, states, and autograd's gradients."""

from __future__ import annotations

import arrays
import torch


def close(ours, theirs, tolerance=2e-6):
    library = arrays.library("torch")
    assert ours.dtype == theirs.dtype
    assert arrays.deviation(library.raw(ours), library.raw(theirs)) <= tolerance


def compare(ours, theirs, inputs, tolerance=2e-6):
    """Equal results, and equal gradients of a weighted sum of them; both take the same keyword arguments."""
    generator = torch.Generator().manual_seed(1)
    results = []
    for function in (ours, theirs):
        leaves = {
            name: x.clone().requires_grad_() if isinstance(x, torch.Tensor) else x
            for name, x in inputs.items()
        }
        found = function(**leaves)
        found = found if isinstance(found, tuple) else (found,)
        results.append((found, {name: x for name, x in leaves.items() if isinstance(x, torch.Tensor)}))
    (got, got_leaves), (want, _) = results
    assert len(got) == len(want)
    weights = [torch.randn(y.shape, generator=generator).to(y.dtype) for y in want]
    grads = []
    for found, leaves in results:
        total = sum(
            (y * w).real.sum() if y.is_complex() else (y * w).sum()
            for y, w in zip(found, weights, strict=True)
        )
        grads.append(torch.autograd.grad(total, tuple(leaves.values())))
    for a, b in zip(got, want, strict=True):
        close(a.detach(), b.detach(), tolerance)
    for name, a, b in zip(got_leaves, *grads, strict=True):
        assert a.dtype == got_leaves[name].dtype
        library = arrays.library("torch")
        assert arrays.deviation(library.raw(a), library.raw(b)) <= tolerance, name
