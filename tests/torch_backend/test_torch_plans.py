"""Whole calls made ready as the one before: gradients, transforms, compilers and devices are asked for anew each time."""

from __future__ import annotations

import threading

import pytest

pytestmark = [
    pytest.mark.backend("torch"),
    # Once a process, torch itself compiles its forward-mode formulas with what it has deprecated.
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]

torch = pytest.importorskip("torch")
pytest.importorskip("numba")

import scanfield  # noqa: E402
from scanfield.errors import DeviceError  # noqa: E402
from scanfield.scans import plans, surface  # noqa: E402


@pytest.fixture
def built(monkeypatch):
    """Whether each whole call found a plan; none is there at first."""
    monkeypatch.setattr(surface, "_PLANS", plans.Plans())
    found: list[bool] = []
    get = plans.Plans.get

    def counted(self, key):
        plan = get(self, key)
        found.append(plan is not None)
        return plan

    monkeypatch.setattr(plans.Plans, "get", counted)
    return found


def pair(*shape: int, dtype=torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(sum(shape))
    return torch.rand(shape, dtype=dtype), torch.rand(shape, dtype=dtype)


def loop(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The recurrence in plain operations."""
    h, found = torch.zeros_like(b[:, 0]), []
    for t in range(b.shape[1]):
        h = a[:, t] * h + b[:, t]
        found.append(h)
    return torch.stack(found, 1)


def test_gradients_are_asked_for_anew(built):
    a, b = pair(2, 5, 3)
    for needed in ((), (0,), (0, 1), (1,), ()):
        given = [x.clone().requires_grad_(i in needed) for i, x in enumerate((a, b))]
        output = scanfield.linear_scan(*given).output
        assert output.requires_grad == bool(needed)
        torch.testing.assert_close(output.detach(), loop(a, b))
        if needed:
            asked = [given[i] for i in needed]
            ours = torch.autograd.grad(output.sum(), asked)
            wanted = torch.autograd.grad(loop(*given).sum(), asked)
            torch.testing.assert_close(ours, wanted)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert not scanfield.linear_scan(*(x.clone() for x in given)).output.requires_grad
    assert built == [False] + [True] * 6


def test_a_parameter_strides_and_methods(built):
    a, b = pair(2, 5, 3)
    wanted = loop(a, b)
    transposed = a.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    for given in (a, torch.nn.Parameter(a), transposed, torch.conj(a + 0j).real):
        torch.testing.assert_close(scanfield.linear_scan(given, b).output.detach(), wanted)
    for method in ("generic", "torch.numba"):
        torch.testing.assert_close(scanfield.linear_scan(a, b, method=method).output, wanted)
    assert built == [False] + [True] * 5
    half = scanfield.linear_scan(a.to(torch.bfloat16), b.to(torch.bfloat16)).output
    assert half.dtype is torch.bfloat16


def test_groups_and_gates_get_their_axes(built):
    """Arrays of other shapes than the kernels': views that autograd follows."""
    torch.manual_seed(0)
    u, delta, A = torch.rand(2, 4, 6).double(), torch.rand(2, 4, 6).double(), -torch.rand(6, 3).double()
    for _ in range(2):
        B, C = (torch.rand(2, 4, 3).double().requires_grad_() for _ in range(2))
        ours = scanfield.selective_scan(u, delta, A, B, C).output
        wanted = scanfield.selective_scan(u, delta, A, B[:, :, None], C[:, :, None], states_at=[]).output
        assert torch.equal(ours, wanted)
        found = zip(*(torch.autograd.grad(x.square().sum(), (B, C)) for x in (ours, wanted)), strict=True)
        assert all(torch.equal(x, y) for x, y in found)
    assert built == [False, False, True, False]


def test_transforms_and_compilers_after_a_plan(built):
    a, b = pair(1, 4, 2)
    scanfield.linear_scan(a, b)
    loss = lambda a: scanfield.linear_scan(a, b).output.square().sum()  # noqa: E731
    plain = lambda a: loop(a, b).square().sum()  # noqa: E731
    torch.testing.assert_close(torch.func.grad(loss)(a), torch.func.grad(plain)(a))
    rows = torch.stack([a, 2 * a])
    torch.testing.assert_close(torch.vmap(loss)(rows), torch.vmap(plain)(rows))
    tangent = torch.func.jvp(loss, (a,), (b,))[1]
    torch.testing.assert_close(tangent, torch.func.jvp(plain, (a,), (b,))[1])
    assert all(built[1:])
    compiled = torch.compile(lambda a: scanfield.linear_scan(a, b).output, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(a), loop(a, b))
    assert not built[-1]
    # What torch.jit.trace records has sizes that are tensors.
    kept = len(surface._PLANS._found)
    with pytest.warns():  # deprecated, and sizes that become constants
        traced = torch.jit.trace(lambda a, b: scanfield.linear_scan(a, b).output, (a, b), check_trace=False)
    assert len(surface._PLANS._found) == kept
    torch.testing.assert_close(traced(2 * a, b), loop(2 * a, b))


def test_devices_and_subclasses_have_no_plan_of_others(built):
    a, b = pair(1, 4, 2)
    scanfield.linear_scan(a, b)
    with pytest.raises(DeviceError, match="meta"):
        scanfield.linear_scan(a, b.to("meta"))
    meta = scanfield.linear_scan(a.to("meta"), b.to("meta")).output
    assert meta.device.type == "meta"

    class Tagged(torch.Tensor):
        pass

    assert type(scanfield.linear_scan(a.as_subclass(Tagged), b).output) is not None
    assert built == [False] * 4


def test_autocast_and_threads_change_nothing(built):
    a, b = pair(3, 4, 2, dtype=torch.float32)
    wanted = scanfield.linear_scan(a, b).output
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(scanfield.linear_scan(a, b).output, wanted)
    found: list[torch.Tensor] = []

    def work(row: int) -> None:
        found.extend(scanfield.linear_scan(a[: row + 1], b[: row + 1]).output[0] for _ in range(20))

    threads = [threading.Thread(target=work, args=(row,)) for row in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 60
    assert all(torch.equal(x, wanted[0]) for x in found)
