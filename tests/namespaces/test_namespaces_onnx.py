"""Scans traced to ONNX models by ndonnx: onnxruntime gives the numbers that scanfield gives, whole and token by token."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import scanfield

sys.path.insert(0, str(Path(__file__).parent))
import example_files  # (needs the line above)

ndonnx = pytest.importorskip("ndonnx", reason="ndonnx is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

example = example_files.load("onnx_model")
TIME = 5


@pytest.mark.parametrize("operation", ["gdn2", "selective_scan"])
def test_a_model_of_a_sequence_gives_equal_results(operation):
    arrays = example.draw(operation, TIME)
    found = example.run(example.whole(operation, TIME), arrays)
    expected = getattr(scanfield, operation)(
        **arrays, **example.OPTIONS[operation], method="generic.recurrent"
    )
    assert [x.shape for x in found] == [x.shape for x in expected]
    assert example.worst(found, expected) < 4e-6
    assert example.worst(found, [2 * x for x in expected]) > 0.1  # the measure sees a difference


def test_models_of_one_token_in_a_loop(tmp_path, capsys):
    path = tmp_path / "step.onnx"
    call = ["--operation", "selective_scan", "--time", str(TIME), "--step", "--write", str(path)]
    assert example.main(call) < 4e-6
    assert "model written" in capsys.readouterr().out
    import onnx

    onnx.checker.check_model(onnx.load(path))


def test_gradients_are_traced_too():
    """The way back is plain operations as well: a model that trains, without ONNX's own gradients."""
    a = ndonnx.argument(shape=(1, TIME, 2), dtype=ndonnx.float32)
    result, pullback = scanfield.vjp(scanfield.linear_scan, a, a)
    model = ndonnx.build(
        {"x": a}, {"output": pullback(d_output=result.output)["a"], "final_state": result.final_state}
    )
    x = np.random.default_rng(0).uniform(0.2, 0.9, (1, TIME, 2)).astype(np.float32)
    expected, pullback = scanfield.vjp(scanfield.linear_scan, x, x, method="generic.recurrent")
    want = [pullback(d_output=expected.output)["a"], expected.final_state]
    assert example.worst(example.run(model, {"x": x}), want) < 4e-6


def test_a_size_that_is_a_name_is_refused_in_words():
    a = ndonnx.argument(shape=("batch", "time", 2), dtype=ndonnx.float32)
    with pytest.raises(scanfield.ShapeError, match=r"a: shape .* unknown"):
        scanfield.linear_scan(a, a)


def test_explain_says_that_generic_code_runs():
    a = ndonnx.argument(shape=(1, TIME, 2), dtype=ndonnx.float32)
    assert set(scanfield.explain(scanfield.linear_scan, a, a).taken.values()) == {"generic.recurrent"}
