"""The kernels under the address and the undefined-behaviour sanitizer: no byte outside an array is read or written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import emulator
import pytest

if emulator.missing():
    pytest.skip(emulator.missing(), allow_module_level=True)

BEGIN = """
import sys
sys.path[:0] = sys.argv[4:]
import emulator
emulator.OPTIONS = emulator.SANITIZED
import standin, numpy as np
import scanfield
from arrays import numpy_dtype
"""

END = """
print("nothing found in", len(standin.LAUNCHES), "launches")
"""

SCANS = """
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
"""

# Rows and columns off the sizes of blocks, several segments, every activation.
PINN = """
from conftest import Card
import pinn_draws as draws
from scanfield import pinn
with standin.installed() as cupy:
    card = Card(cupy)
    for i, activation in enumerate(pinn.activations.ACTIVATIONS):
        network = draws.network(card, 1 + i % 3, activation=activation, dtype="float32")
        terms = draws.terms(card, 1 + i % 3, dtype="float32")
        pinn.loss_and_grad(network, terms, wavenumber=draws.UNKNOWNS, chunk=4, points=True)
    rng = np.random.default_rng(0)
    x, B, bar = (card.array(rng.random(shape), "float32") for shape in ((1500, 5), (5, 35), (1500, 70)))
    pinn.fourier_grad(x, bar, B, cupy.empty((5, 35), "float32"))
    pinn.sum_rows_out(bar[:, 1:], cupy.empty((69,), "float32"))
"""


@pytest.mark.parametrize(
    ("op", "method", "dtype"),
    [
        ("linear_scan", "cupy.rawkernel", "float32"),
        ("selective_scan", "cupy.rawkernel", "float32"),
        ("gdn2", "cupy.rawkernel", "float32"),
        ("gdn2", "cupy.rawkernel.chunk", "float32"),
        ("gdn2", "cupy.rawkernel.tensor", "bfloat16"),
        ("pinn", "cupy.rawkernel", "float32"),
    ],
)
def test_kernels_under_the_sanitizers(op: str, method: str, dtype: str):
    here = Path(__file__).parent
    script = BEGIN + (PINN if op == "pinn" else SCANS) + END
    done = subprocess.run(
        [sys.executable, "-c", script, op, method, dtype, str(here), str(here.parent)],
        env=emulator.sanitizer_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert "nothing found in" in done.stdout, (done.stdout + done.stderr)[-3000:]
    assert int(done.stdout.split()[-2]) > 10
