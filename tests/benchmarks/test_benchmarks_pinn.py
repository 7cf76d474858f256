"""The benchmark of the PINN runs: all rivals give the same gradients, and every figure is one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "pinn.py"

pytestmark = [
    pytest.mark.backend("torch"),
    pytest.mark.skipif(not BENCHMARK.is_file(), reason="the benchmarks are not in this installation"),
]


def test_it_runs_at_small_sizes():
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--quick", "--json"],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(done.stdout)["rows"]
    assert {(line["what"], line["d"]) for line in rows} >= {
        (name, d) for name in ("numpy", "torch.out") for d in (1, 2)
    }
    for line in rows:
        assert 0 < line["measured"] < 1e6 and 0 < line["takes"] < 1e6, line
        assert line["met"] is None, "sizes are small: nothing is held to a floor"
