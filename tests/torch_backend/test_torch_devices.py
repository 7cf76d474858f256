"""What CUDA tensors take where no kernels of our own serve them. Tensors on the CPU are passed off as such here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import scanfield
from scanfield.dispatch import registry, report

pytestmark = pytest.mark.backend("torch")

torch = pytest.importorskip("torch")


@pytest.fixture
def on_cuda(monkeypatch):
    """The dispatcher takes every tensor for one on CUDA."""
    for module in (registry, report):
        monkeypatch.setattr(module, "device_kind", lambda array, library: "cuda")
    monkeypatch.setattr(registry, "_TABLE", {})


def taken(*arrays, **options):
    return scanfield.explain(scanfield.linear_scan, *arrays, **options).taken


def test_torch_compile_is_the_default(on_cuda, monkeypatch):
    from scanfield_torch import unrolled

    walks = []
    whole = unrolled._compiled
    monkeypatch.setattr(unrolled, "_compiled", lambda step: walks.append(step) or whole(step))
    given = [torch.rand(2, 9, 3, requires_grad=True) for _ in range(2)]
    told = scanfield.explain(scanfield.linear_scan, *given)
    assert told.taken["forward"] == told.taken["save"] == "torch.compile"
    (numba,) = {row.reason for row in told.verdicts if row.candidate == "torch.numba"}
    assert numba == "runs on cpu, not on cuda"
    found = {}
    for method in (None, "generic.recurrent"):
        output = scanfield.linear_scan(*given, chunk_size=4, method=method).output
        found[method] = [output, *torch.autograd.grad(output.square().sum(), given)]
    assert len(walks) == 2  # forward and back
    for x, y in zip(*found.values(), strict=True):
        torch.testing.assert_close(x, y)


def test_what_it_declines_torch_generic_takes(on_cuda):
    x, z = torch.ones(1, 3, 2), torch.ones(1, 3, 2, dtype=torch.complex64)
    assert set(taken(z, z).values()) == {"torch.generic"}
    assert set(taken(x, x, cu_seqlens=[0, 1, 3]).values()) == {"torch.generic"}
    seen = []

    def look(y):
        seen.append(taken(y, y))
        return scanfield.linear_scan(y, y).output

    rows = torch.vmap(look)(torch.stack([x, 2 * x]))
    assert set(seen[0].values()) == {"torch.generic"}
    assert torch.equal(rows[1], scanfield.linear_scan(2 * x, 2 * x, method="generic.recurrent").output)


def test_on_the_cpu_it_runs_by_name_only():
    x = torch.ones(1, 3, 2)
    told = scanfield.explain(scanfield.linear_scan, x, x)
    assert "torch.compile" not in told.taken.values()
    assert sum(row.candidate == "torch.compile" for row in told.verdicts) == len(told.taken)  # told once


def test_without_triton_it_declines(monkeypatch):
    from scanfield_torch import unrolled

    monkeypatch.setattr(unrolled, "_has_triton", lambda: False)
    tensor = SimpleNamespace(is_complex=lambda: False, is_cuda=True)
    assert "triton" in unrolled.Unrolled("linear_scan").declines(tensor)
    assert unrolled.Unrolled("linear_scan").declines(torch.ones(2)) is None
