"""The example that trains without autograd: it learns, and the losses of two libraries agree step by step."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from arrays import Library
from processes import python

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_on_a_series.py"


def example() -> Any:
    spec = importlib.util.spec_from_file_location("train_on_a_series", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.backend("numpy")
def test_it_learns(capsys: pytest.CaptureFixture[str]):
    """Better than taking the last year for the next, on years that were kept back, after a short training."""
    losses = example().main(["--steps", "60"])["numpy"]
    shown = capsys.readouterr().out
    for name, values in losses.items():
        assert values[-2] < 0.1 * values[0] and values[-1] < 0.0865, name
        assert name in shown


@pytest.mark.backend("torch", "jax")
def test_losses_agree_step_by_step(library: Library):
    steps = 6
    module = example()
    if (
        library.name == "jax"
    ):  # which compiles for ten seconds a model; its layers are tested one by one elsewhere
        mamba = {"mamba": module.models()["mamba"]}
        module.models = lambda: mamba
    here, there = module.train(library.name, steps, "float32"), module.train("numpy", steps, "float32")
    for name, values in there.items():
        assert len(values) == steps + 1
        assert values[steps - 1] < values[0]
        for got, want in zip(here[name], values, strict=True):
            assert abs(got - want) <= 1e-5 * want, name


@pytest.mark.backend("numpy")
def test_layers_import_no_framework():
    python("""
        import sys
        import scanfield
        assert "scanfield.layers" not in sys.modules
        import scanfield.layers
        heavy = {"torch", "jax", "cupy", "dask", "numba", "scipy", "safetensors", "transformers"} & set(sys.modules)
        assert not heavy, heavy
    """)
