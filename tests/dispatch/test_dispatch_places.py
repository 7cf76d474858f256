"""Libraries and devices that no fast path knows: an unknown namespace, mocked accelerators, JAX and torch in a mix."""

from __future__ import annotations

import importlib
from pathlib import Path

import arrays
import numpy as np
import pytest
from processes import announce, python

HERE = Path(__file__).resolve().parent

STRANGER = """
    import numpy, scanfield
    import strange_arrays as xp
    xp.set_strange_arrays_flags(boolean_indexing=False, data_dependent_shapes=False, enabled_extensions=())
    import reference, arrays
    from small_calls import EXAMPLES

    for operation, (inputs, options, token) in EXAMPLES.items():
        function = getattr(scanfield, operation)
        given = {name: xp.asarray(x) for name, x in inputs.items()}
        result, pullback = scanfield.vjp(function, **given, **options)
        truth = reference.forward(operation, inputs, **options)
        for one, other in zip(result, truth):
            assert type(one).__module__.startswith("strange_arrays"), type(one)
            assert arrays.deviation(numpy.asarray(one), other) <= 1e-12, operation
        for name, gradient in pullback(result.output, result.final_state).items():
            assert type(gradient).__module__.startswith("strange_arrays") and gradient.shape == inputs[name].shape
        y, state = function.step(None, **{name: xp.asarray(x) for name, x in token.items()}, **options)
        assert type(y).__module__.startswith("strange_arrays")
        explained = scanfield.explain(function, **given, **options)
        assert explained.taken["forward"].startswith("generic."), explained
        assert explained.library == "strange_arrays", explained.library
        assert "strange_arrays" in str(explained), explained
    import sys
    assert "array_api_strict" not in sys.modules

    # and it does not mix with NumPy either
    inputs = EXAMPLES["linear_scan"][0]
    try:
        scanfield.linear_scan(xp.asarray(inputs["a"]), inputs["b"])
    except scanfield.BackendError as error:
        said = str(error)
    assert "strange_arrays" in said and "numpy" in said and "b = strange_arrays.asarray" in said, said
"""


@pytest.mark.backend("strict")
def test_an_unknown_namespace_runs_generic(tmp_path):
    """array-api-strict under another name: nothing in scanfield can have heard of it."""
    source = Path(pytest.importorskip("array_api_strict").__file__).parent
    for file in source.rglob("*.py"):
        copy = tmp_path / "strange_arrays" / file.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(
            file.read_text(encoding="utf-8").replace("array_api_strict", "strange_arrays"), encoding="utf-8"
        )
    python(STRANGER, path=(HERE, tmp_path))


ELSEWHERE = """
    import sys, torch, scanfield

    class Elsewhere(torch.Tensor):
        # A tensor that says it lives on an accelerator; nothing is computed with it here.
        @property
        def device(self):
            return torch.device(sys.argv[1])

    here = {name: torch.rand(1, 4, 3) for name in ("a", "b")}
    there = {name: x.as_subclass(Elsewhere) for name, x in here.items()}
    assert scanfield.explain(scanfield.linear_scan, **here).taken["forward"] == "torch.loopback"
    explained = scanfield.explain(scanfield.linear_scan, **there)
    assert explained.device == sys.argv[1], explained
    assert set(explained.taken.values()) <= {"generic.recurrent", "generic.chunk"}, explained
    reasons = {v.reason for v in explained.verdicts if v.candidate == "torch.loopback"}
    assert reasons and all("cpu" in reason and sys.argv[1] in reason for reason in reasons), explained
    try:
        scanfield.linear_scan(**there, method="torch.loopback")
    except scanfield.BackendError as error:
        said = str(error)
    assert "torch.loopback" in said and "cpu" in said and sys.argv[1] in said, said
"""


@pytest.mark.backend("torch")
@pytest.mark.parametrize("device", ["mps", "xpu"])
def test_a_fast_path_declines_a_torch_device_it_does_not_know(tmp_path, device):
    announce(tmp_path, "dummy", "dummy_backend:TORCH")
    python(ELSEWHERE, device, path=(HERE, tmp_path))


@pytest.mark.backend("torch")
def test_generic_code_runs_on_a_torch_device_it_has_never_seen(library):
    """The meta device has shapes and dtypes and no numbers: whatever is made elsewhere would fail or come back moved."""
    import torch
    from small_calls import EXAMPLES

    import scanfield

    for operation, (inputs, options, _) in EXAMPLES.items():
        given = {name: torch.asarray(x, device="meta") for name, x in inputs.items()}
        function = getattr(scanfield, operation)
        result, pullback = scanfield.vjp(function, **given, **options)
        gradients = pullback(result.output, result.final_state)
        plain = function(**{name: np.asarray(x) for name, x in inputs.items()}, **options)
        for one, other in zip(result, plain, strict=True):
            assert (
                one.device.type == "meta" and tuple(one.shape) == other.shape and one.dtype == torch.float64
            )
        for name, x in gradients.items():
            assert x.device.type == "meta" and tuple(x.shape) == inputs[name].shape, (operation, name)
        assert scanfield.explain(function, **given, **options).device == "meta"


ROCM = """
    import contextlib, os, sys, types
    import numpy

    os.environ["SCANFIELD_BLOCK"] = "cupy.rawkernel"  # real kernels stand before the dummy's

    # A CuPy made of NumPy: enough of it to be recognised, and a runtime that says what it was built for.
    cupy = types.ModuleType("cupy")
    cupy.__dict__.update({name: getattr(numpy, name) for name in numpy.__all__ if not name.startswith("_")})
    class ndarray(numpy.ndarray):
        @property
        def device(self):
            return GPU
    GPU = contextlib.nullcontext()  # a CuPy device is entered by `with`
    cupy.ndarray = ndarray
    cupy.cuda = types.SimpleNamespace(
        runtime=types.SimpleNamespace(is_hip=sys.argv[1] == "rocm", getDeviceCount=lambda: 1),
        Device=lambda *_: GPU, Stream=object, is_available=lambda: True,
    )
    sys.modules["cupy"] = cupy

    import scanfield
    from scanfield import arrays as core
    one = numpy.ones((1, 4, 3)).view(ndarray)
    assert core.device_kind(one, "cupy") == sys.argv[1]

    # The table has a row for that kind of device, in which the CUDA candidate is declined with its reason.
    from scanfield.dispatch import registry
    core._LIBRARIES[ndarray] = core.Library("cupy", core.library_of(numpy.ones(1), "x").namespace)
    explained = scanfield.explain(scanfield.linear_scan, a=one, b=one)
    assert explained.device == sys.argv[1], explained
    verdicts = [v for v in explained.verdicts if v.candidate == "cupy.loopback" and v.verb == "forward"]
    if sys.argv[1] == "cuda":
        assert [v.taken for v in verdicts] == [True], explained
    else:
        assert [v.taken for v in verdicts] == [False], explained
        assert "cuda" in verdicts[0].reason and "rocm" in verdicts[0].reason, explained
        assert explained.taken["forward"].startswith("generic."), explained
"""


@pytest.mark.parametrize("built_for", ["cuda", "rocm"])
def test_cuda_kernels_decline_cupy_on_rocm(tmp_path, built_for):
    announce(tmp_path, "dummy", "dummy_backend:CUPY")
    python(ROCM, built_for, path=(HERE, tmp_path))


CONVERSION = {
    "torch": "b = torch.as_tensor(b, device=a.device)",
    "jax": "b = jax.numpy.asarray(b)",
    "strict": "b = array_api_strict.asarray(b, device=a.device)",
}


@pytest.mark.backend("torch", "jax", "strict")
def test_a_mix_names_the_line_that_converts(library):
    import scanfield

    a, b = np.full((1, 4, 3), 0.5), np.ones((1, 4, 3))
    with pytest.raises(scanfield.BackendError) as refused:
        scanfield.linear_scan(library.array(a), b)
    said = str(refused.value)
    assert CONVERSION[library.name] in said, said
    # and the line does it
    module = CONVERSION[library.name].removeprefix("b = ").partition(".")[0]
    names = {"a": library.array(a), "b": b, module: importlib.import_module(module)}
    if module == "jax":
        importlib.import_module("jax.numpy")
    exec(CONVERSION[library.name], names)  # noqa: S102
    result = scanfield.linear_scan(names["a"], names["b"])
    assert (
        arrays.deviation(library.numpy(result.output), [[[1.0] * 3, [1.5] * 3, [1.75] * 3, [1.875] * 3]]) == 0
    )


@pytest.mark.backend("strict")
def test_a_mix_of_devices_names_the_line_that_moves(library):
    import array_api_compat

    import scanfield

    names = {"a": library.array(np.full((1, 4, 3), 0.5)), "b": library.xp.asarray(np.ones((1, 4, 3)))}
    with pytest.raises(scanfield.DeviceError) as refused:
        scanfield.linear_scan(**names)
    line = str(refused.value).rpartition(": ")[2]
    names["array_api_compat"] = array_api_compat
    exec(line, names)  # noqa: S102
    result = scanfield.linear_scan(names["a"], names["b"])
    assert library.on_device(result.output)
