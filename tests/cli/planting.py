"""Puts a plugin on the import path of a fresh process, as `pip install` would, and runs a command there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SOURCE = '''
from scanfield.dispatch import Candidate, Manifest, implementation


class Planted:
    """The generic code, and one thing wrong with it."""

    def __init__(self, operation):
        self.right = implementation(operation, "generic.recurrent")

    def declines(self, call, verb):
        return None

    def forward(self, call):
        return self.right.forward(call)

    def save(self, call):
        return self.right.save(call)

    def backward(self, call, residuals, d_output, d_final_state, wanted):
        return self.right.backward(call, residuals, d_output, d_final_state, wanted)

    def step(self, call):
        return self.right.step(call)


{fault}

MANIFEST = Manifest(
    "numpy",
    "numpy",
    "pip install planted",
    (Candidate("planted.one", ("linear_scan",), "cpu", "planted:Planted", tolerance={tolerance!r}),),
)
'''

NO_FAULT = ""

WRONG_FORWARD = """
def forward(self, call):
    output, state = self.right.forward(call)
    output = output.copy()
    output[0, 3, 1] += 1e-3 * abs(output).max()
    return output, state

Planted.forward = forward
"""

WRONG_BACKWARD = """
def backward(self, call, residuals, d_output, d_final_state, wanted):
    d_a, *others = self.right.backward(call, residuals, d_output, d_final_state, wanted)
    return [d_a * (1 + 1e-3), *others]

Planted.backward = backward
"""

NAN_IN_STEP = """
def step(self, call):
    output, state = self.right.step(call)
    return output, state * float("nan")

Planted.step = step
"""

RAISES = """
def forward(self, call):
    raise ZeroDivisionError("planted")

Planted.forward = forward
"""


def run(
    folder: Path, fault: str, *command: str, tolerance: dict[str, float] | None = None
) -> subprocess.CompletedProcess[str]:
    """`scanfield COMMAND` in a process where a plugin with this fault is installed."""
    stated = {"float32": 4e-6, "float64": 1e-12} if tolerance is None else tolerance
    (folder / "planted.py").write_text(SOURCE.format(fault=fault, tolerance=stated), encoding="utf-8")
    info = folder / "planted-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(
        "[scanfield.backends]\nplanted = planted:MANIFEST\n", encoding="utf-8"
    )
    path = os.pathsep.join([str(folder), *(entry for entry in sys.path if entry)])
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "scanfield", *command],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
