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
sys.path[:0] = sys.argv[2:]
import emulator
emulator.OPTIONS = emulator.SANITIZED
import standin, numpy as np
import scanfield
from examples import examples
with standin.installed() as cupy:
    # Off the sizes of tiles and blocks, packed, with every option; real numbers and complex ones.
    for example in examples(sys.argv[1]):
        arrays = {
            name: cupy.asarray(x.astype("float32") if x.dtype.kind == "f" else x) for name, x in example.inputs.items()
        }
        result, pullback = scanfield.vjp(
            getattr(scanfield, sys.argv[1]), **arrays, **example.options, method="cupy.rawkernel"
        )
        gradients = pullback(result.output * 0 + 1, result.final_state * 0 + 1)
        assert set(gradients) == set(arrays)
print("nothing found in", len(standin.LAUNCHES), "launches")
"""


@pytest.mark.parametrize("op", ["linear_scan", "selective_scan", "gdn2"])
def test_kernels_under_the_sanitizers(op: str):
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, op, str(here), str(here.parent)],
        env=emulator.sanitizer_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert "nothing found in" in done.stdout, (done.stdout + done.stderr)[-3000:]
    assert int(done.stdout.split()[-2]) > 10
