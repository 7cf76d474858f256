"""Where arrays can lie, told by libraries that are stood in for: cards, Apple's GPUs, a driver that is missing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import scanfield
from scanfield.cli import places
from scanfield.errors import ArgumentError, BackendError


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Puts a module in the place of one, installed or not."""

    def put(name: str, **attributes: Any) -> Any:
        made = SimpleNamespace(**attributes)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    return put


def test_torch_has_a_place_for_each_kind_of_device_that_is_there(module: Any):
    waited: list[str] = []
    sync = {
        kind: SimpleNamespace(synchronize=lambda kind=kind: waited.append(kind)) for kind in ("cuda", "mps")
    }
    matmul = SimpleNamespace(allow_tf32=True)
    sync["cuda"].is_available = lambda: True
    module(
        "torch",
        **sync,
        backends=SimpleNamespace(
            mps=SimpleNamespace(is_available=lambda: True), cuda=SimpleNamespace(matmul=matmul)
        ),
        asarray=lambda array, device: (array, device),
    )
    found = list(places._torch())
    assert [(place.device, place.dtypes) for place in found] == [
        ("cpu", ("float32", "float64")),
        ("cuda", ("float32", "float64")),
        ("mps", ("float32",)),
    ]
    given = np.ones(2)
    for place in found:
        array, device = place.array(given)
        assert device == place.device and array is not given  # torch would share its memory
        with place.scope():
            assert matmul.allow_tf32 is (place.device != "cuda")
        assert matmul.allow_tf32
        place.wait([])
    assert waited == ["cuda", "mps"]


@pytest.mark.parametrize(("hip", "kind"), [(False, "cuda"), (True, "rocm")])
def test_cupy_has_a_place_where_it_has_a_device(module: Any, hip: bool, kind: str):
    class CUDARuntimeError(Exception):
        pass

    def no_driver() -> int:
        raise CUDARuntimeError

    waited: list[str] = []
    runtime = SimpleNamespace(getDeviceCount=lambda: 1, is_hip=hip, CUDARuntimeError=CUDARuntimeError)
    stream = SimpleNamespace(synchronize=lambda: waited.append("stream"))
    cuda = SimpleNamespace(runtime=runtime, get_current_stream=lambda: stream)
    module("cupy", cuda=cuda, asarray=np.asarray, asnumpy=np.asarray)
    (place,) = places._cupy()
    assert place.device == kind and str(place) == f"cupy:{kind}"
    place.wait([])
    assert waited == ["stream"]
    for count in (no_driver, lambda: 0):
        runtime.getDeviceCount = count
        assert list(places._cupy()) == []


def test_jax_has_a_place_on_its_default_device_and_on_the_host(module: Any):
    asked: list[Any] = []
    module(
        "jax",
        default_backend=lambda: "gpu",
        devices=lambda kind: [f"{kind} 0", f"{kind} 1"],
        device_put=lambda array, device: device,
        enable_x64=lambda on: asked.append(on) or nullcontext(),
        default_matmul_precision=lambda name: asked.append(name) or nullcontext(),
        jit=None,
        block_until_ready=None,
    )
    found = list(places._jax())
    assert [place.device for place in found] == ["cuda", "cpu"]
    assert [place.array(np.ones(1)) for place in found] == ["gpu 0", "cpu 0"]
    with found[0].scope():
        assert asked == [True, "highest"]


def test_a_library_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(
        ArgumentError, match="unknown library 'pandas'; known are numpy, torch, jax, cupy, dask"
    ):
        places.places(["numpy", "pandas"])
    here = [
        SimpleNamespace(name="numpy", status="usable", install="", detail=""),
        SimpleNamespace(name="jax", status="missing", install="pip install jax", detail="not installed"),
        SimpleNamespace(name="cupy", status="usable", install="", detail=""),
    ]
    monkeypatch.setattr(scanfield, "backends", lambda: here)
    monkeypatch.setitem(places._FINDERS, "cupy", lambda: iter(()))
    with pytest.raises(BackendError, match="jax is not installed: pip install jax"):
        places.places(["jax"])
    with pytest.raises(BackendError, match="dask is not installed: dask"):
        places.places(["dask"])
    with pytest.raises(BackendError, match="cupy is installed and finds no device"):
        places.places(["cupy"])
    assert [str(place) for place in places.places()] == ["numpy"]
    assert places.absent() == {
        "torch": "not known",
        "jax": "not installed",
        "cupy": "installed, and finds no device",
        "dask": "not known",
    }
