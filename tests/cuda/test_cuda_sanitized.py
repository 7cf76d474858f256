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
sys.path[:0] = sys.argv[2:]
import emulator
emulator.OPTIONS = emulator.SANITIZED
import standin, numpy as np
import scanfield
"""

END = """
print("nothing found in", len(standin.LAUNCHES), "launches")
"""

SCANS = """
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


@pytest.mark.parametrize("op", ["linear_scan", "selective_scan", "gdn2", "pinn"])
def test_kernels_under_the_sanitizers(op: str):
    here = Path(__file__).parent
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            BEGIN + (PINN if op == "pinn" else SCANS) + END,
            op,
            *map(str, (here, here.parent)),
        ],
        env=emulator.sanitizer_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert "nothing found in" in done.stdout, (done.stdout + done.stderr)[-3000:]
    assert int(done.stdout.split()[-2]) > 10
