"""CUDA tensors on the kernels for CuPy arrays, with CPU tensors in their place: device, stream, memory, autograd.

The mock says what torch's current stream is and counts what is asked of torch's allocator; kernels run on the emulator.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import standin
from arrays import deviation
from examples import Example, examples

import scanfield
from scanfield import gradients
from scanfield.dispatch import registry

torch = pytest.importorskip("torch")

OPERATIONS = ("linear_scan", "selective_scan", "gdn2")


class Side(NamedTuple):
    """A stream of torch's."""

    device: str


class Mock:
    """torch.cuda as far as the bridge asks it."""

    def __init__(self) -> None:
        self.allocated: list[tuple[int, int, Any]] = []

    def current_stream(self, device: Any) -> Side:
        return Side(str(device))

    def caching_allocator_alloc(self, size: int, device: int, stream: Any) -> int:
        self.allocated.append((size, device, stream))
        return 1


@pytest.fixture
def mock(card, monkeypatch) -> Mock:
    """CPU tensors count as CUDA tensors, which the candidate then is for."""
    made = Mock()
    for name in ("current_stream", "caching_allocator_alloc"):
        monkeypatch.setattr(torch.cuda, name, getattr(made, name))
    monkeypatch.setattr(
        registry, "device_kind", lambda array, library: "cuda" if library == "torch" else "cpu"
    )
    monkeypatch.setattr(registry, "_TABLE", {})
    return made


def tensors(example: Example, dtype: str = "float64", *, grad: bool = False) -> dict[str, Any]:
    made = {}
    for name, x in example.inputs.items():
        kind = {"float64": "complex128", "float32": "complex64"}.get(dtype) if x.dtype.kind == "c" else dtype
        made[name] = torch.as_tensor(x).to(getattr(torch, kind)).requires_grad_(grad)
    return made


def one(op: str) -> Example:
    return next(
        x for x in examples(op) if "packed" in x.name and all(a.dtype.kind != "c" for a in x.inputs.values())
    )


@pytest.mark.parametrize("op", OPERATIONS)
def test_autograd_by_the_kernels(mock, op: str):
    """Plain and packed; the gradients of autograd are those of the truth."""
    for example in examples(op)[::4]:
        inputs = tensors(example, grad=True)
        result = getattr(scanfield, op)(**inputs, **example.options, method="torch.cuda")
        d_output, d_state = (torch.as_tensor(x) for x in example.cotangents("float64"))
        torch.autograd.backward(result, (d_output, d_state))
        truth = example.truth()
        assert deviation(result.output.detach().numpy(), truth.output) <= 1e-12
        for name, want in example.gradients().items():
            assert deviation(inputs[name].grad.numpy(), want, floor=1e-2) <= 1e-12, (example, name)


@pytest.mark.parametrize("op", OPERATIONS)
def test_device_stream_and_memory_are_torchs(mock, op: str):
    example = one(op)
    standin.LAUNCHES.clear()
    standin.TRANSFERS.clear()
    result = getattr(scanfield, op)(**tensors(example), **example.options, method="torch.cuda")
    assert standin.LAUNCHES and {x.stream for x in standin.LAUNCHES} == {Side("cpu")}
    assert {x.device for x in standin.LAUNCHES} == {0}
    asked = [size for size, device, stream in mock.allocated if stream == Side("cpu") and device == 0]
    assert result.output.numel() * 8 in asked and result.final_state.numel() * 8 in asked
    assert standin.Stream.current() == "default"
    assert standin.TRANSFERS["to host"] == 0


def test_nothing_is_copied(mock):
    """The kernel reads the tensor's own memory: a strided view of a wider one too."""
    wide = torch.zeros(2, 9, 7, dtype=torch.float64)
    b = wide[..., 3:6]
    b += 1
    from scanfield_cupy import torch_bridge

    assert torch_bridge._array(b).host.ctypes.data == b.data_ptr()
    assert torch_bridge._array(b).strides == (504, 56, 8)
    back = torch_bridge._tensors(torch_bridge._array(b))
    assert back.data_ptr() == b.data_ptr() and torch.equal(back, b)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_kinds_of_numbers(mock, dtype: str):
    for op in OPERATIONS:
        example = one(op)
        inputs = tensors(example, dtype, grad=True)
        result = getattr(scanfield, op)(**inputs, **example.options, method="torch.cuda")
        assert result.output.dtype is getattr(torch, dtype) and result.final_state.dtype is torch.float32
        result.output.sum().backward()
        assert all(x.grad is not None and x.grad.dtype is x.dtype for x in inputs.values())


def test_a_gradient_of_a_gradient_is_right(mock):
    a = torch.rand(1, 5, 2, dtype=torch.float64, requires_grad=True)
    b = torch.rand(1, 5, 2, dtype=torch.float64, requires_grad=True)
    run = lambda a, b: scanfield.linear_scan(a, b, method="torch.cuda").output  # noqa: E731
    assert torch.autograd.gradcheck(run, (a, b))
    assert torch.autograd.gradgradcheck(run, (a, b))


def test_vjp_goes_to_the_kernels(mock):
    example = one("gdn2")
    standin.LAUNCHES.clear()
    result, pullback = gradients.vjp(
        scanfield.gdn2, **tensors(example), **example.options, method="torch.cuda"
    )
    pullback(result.output)
    assert {"delta_forward", "delta_backward"} <= {launch.name for launch in standin.LAUNCHES}


@pytest.mark.parametrize(
    ("form", "dtype", "tolerance", "kernels"),
    [
        ("recurrent", "float64", 1e-12, {"delta_forward", "delta_backward"}),
        ("chunk", "float64", 1e-12, {"delta_states", "delta_gradients"}),
        ("tensor", "bfloat16", 3e-2, {"delta_states", "delta_gradients"}),
        ("tensor", "float16", 4e-3, {"delta_states", "delta_gradients"}),
    ],
)
def test_each_form_of_the_gated_delta_rule(mock, form: str, dtype: str, tolerance: float, kernels: set[str]):
    """Under autograd, on torch's stream and in its memory; what it says of itself names it as torch's users do."""
    example, method = one("gdn2"), f"torch.cuda.{form}"
    inputs = tensors(example, dtype, grad=True)
    standin.LAUNCHES.clear()
    result = scanfield.gdn2(**inputs, **example.options, method=method)
    torch.autograd.backward(result, [torch.ones_like(x) for x in result])
    assert kernels <= {launch.name for launch in standin.LAUNCHES}
    assert {launch.stream for launch in standin.LAUNCHES} == {Side("cpu")} and mock.allocated
    wide = {name: x.detach().to(torch.float64).requires_grad_() for name, x in inputs.items()}
    want = scanfield.gdn2(**wide, **example.options, method="generic.recurrent")
    torch.autograd.backward(want, [torch.ones_like(x) for x in want])
    for x, y in zip(result, want, strict=True):
        assert deviation(x.detach().to(torch.float64).numpy(), y.detach().numpy()) <= tolerance
    for name, x in inputs.items():
        found = x.grad.to(torch.float64).numpy()
        assert deviation(found, wide[name].grad.numpy(), floor=1e-2) <= tolerance, name
    told = str(scanfield.explain(scanfield.gdn2, **tensors(example, dtype), **example.options, method=method))
    assert f"{method} reads query, key" in told.replace("torch.cuda reads", f"{method} reads")
    assert "cupy.rawkernel" not in told


def test_tensor_cores_multiply_half_precision_alone(mock):
    example = one("gdn2")
    with pytest.raises(
        scanfield.BackendError, match="value is float32, tensor cores multiply float16 and bfloat16"
    ):
        scanfield.gdn2(**tensors(example, "float32"), **example.options, method="torch.cuda.tensor")


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_transforms_are_declined(mock):
    a = torch.rand(1, 5, 2, dtype=torch.float64)
    with pytest.raises(scanfield.BackendError, match=r"torch\.func"):
        torch.func.grad(lambda x: scanfield.linear_scan(x, a, method="torch.cuda").output.sum())(a)
    with (
        torch.autograd.forward_ad.dual_level(),
        pytest.raises(scanfield.BackendError, match="plain operations"),
    ):
        scanfield.linear_scan(torch.autograd.forward_ad.make_dual(a, a), a, method="torch.cuda")


def test_what_the_kernels_cannot_take_is_declined_by_name(mock, monkeypatch):
    class Named(torch.Tensor):
        pass

    a = torch.full((1, 5, 2), 0.5)
    with pytest.raises(scanfield.BackendError, match=r"a Named of layout torch\.strided"):
        scanfield.linear_scan(a.as_subclass(Named), a, method="torch.cuda")
    followed = a.clone().requires_grad_()
    with pytest.raises(scanfield.BackendError, match="autograd follows its results"):
        scanfield.summarise(scanfield.linear_scan, followed, a, method="torch.cuda")
    assert scanfield.summarise(scanfield.linear_scan, a, a, method="torch.cuda").state.shape == (1, 2)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(scanfield.BackendError, match=r"torch\.compile traces plain operations"):
        scanfield.linear_scan(a, a, method="torch.cuda")


def test_results_without_cotangents_have_no_gradient(mock):
    class Cut(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, d):
            return None

    a, c = (torch.full((1, 5, 2), 0.5, requires_grad=True) for _ in range(2))
    standin.LAUNCHES.clear()
    (Cut.apply(scanfield.linear_scan(a, a.detach(), method="torch.cuda").output) + c).sum().backward()
    assert a.grad is None and c.grad is not None
    assert not any("backward" in launch.name for launch in standin.LAUNCHES)


def test_rocm_is_declined(mock, card, monkeypatch):
    monkeypatch.setattr(card.cupy.cuda.runtime, "is_hip", True)
    a = torch.rand(1, 5, 2)
    with pytest.raises(scanfield.BackendError, match="ROCm"):
        scanfield.linear_scan(a, a, method="torch.cuda")
    assert np.isfinite(scanfield.linear_scan(a, a).output.numpy()).all()
