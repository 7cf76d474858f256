"""The MPI example, on two and four ranks of whatever MPI is installed beside mpi4py."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "mpi_scan.py"
# An MPI from PyPI puts its launcher beside the interpreter.
LAUNCHER = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")


@pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None, reason="needs mpi4py (pip install mpi4py mpich)"
)
@pytest.mark.skipif(LAUNCHER is None, reason="needs mpiexec (pip install mpich)")
@pytest.mark.parametrize("ranks", [2, 4])
def test_example(ranks: int):
    """It compares outputs and all gradients with one call, and fails above 1e-12."""
    finished = subprocess.run(
        [LAUNCHER, "-n", str(ranks), sys.executable, str(EXAMPLE)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert f"{ranks} ranks" in finished.stdout
