"""The kernels under the address and the undefined-behaviour sanitizer: no byte outside an array is read or written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import emulator
import pytest

if emulator.missing():
    pytest.skip(emulator.missing(), allow_module_level=True)

SCRIPT = """
import sys
sys.path[:0] = sys.argv[4:]
import emulator
emulator.OPTIONS = emulator.SANITIZED
import standin, numpy as np
import scanfield
from arrays import numpy_dtype
from examples import examples
op, method, dtype = sys.argv[1:4]
with standin.installed() as cupy:
    # Off the sizes of tiles and blocks, packed, with every option; real numbers and complex ones.
    for example in examples(op)[:: 1 if method == "cupy.rawkernel" else 8]:
        arrays = {
            name: cupy.asarray(x.astype(numpy_dtype(dtype)) if x.dtype.kind == "f" else x)
            for name, x in example.inputs.items()
        }
        result, pullback = scanfield.vjp(getattr(scanfield, op), **arrays, **example.options, method=method)
        gradients = pullback(result.output * 0 + 1, result.final_state * 0 + 1)
        assert set(gradients) == set(arrays)
print("nothing found in", len(standin.LAUNCHES), "launches")
"""


@pytest.mark.parametrize(
    ("op", "method", "dtype"),
    [
        ("linear_scan", "cupy.rawkernel", "float32"),
        ("selective_scan", "cupy.rawkernel", "float32"),
        ("gdn2", "cupy.rawkernel", "float32"),
        ("gdn2", "cupy.rawkernel.chunk", "float32"),
        ("gdn2", "cupy.rawkernel.tensor", "bfloat16"),
    ],
)
def test_kernels_under_the_sanitizers(op: str, method: str, dtype: str):
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, op, method, dtype, str(here), str(here.parent)],
        env=emulator.sanitizer_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert "nothing found in" in done.stdout, (done.stdout + done.stderr)[-3000:]
    assert int(done.stdout.split()[-2]) > 10
