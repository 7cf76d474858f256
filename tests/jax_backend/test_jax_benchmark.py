"""The benchmark of the scans on JAX arrays runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "scans_jax.py"

pytestmark = [
    pytest.mark.backend("jax"),
    pytest.mark.skipif(not BENCHMARK.is_file(), reason="the benchmarks are not in this installation"),
]


def test_the_rows_that_compile_little():
    pytest.importorskip("numba")
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--quick", "--json", "--only", "selective", "overhead"],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(done.stdout)["rows"]
    assert len(rows) == 7
    for line in rows:
        assert 0 <= line["measured"] < 1e6, line
        assert line["met"] is None, "sizes are small: nothing is held to a floor"
