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


def test_it_runs_at_small_sizes(tmp_path):
    figures = tmp_path / "performance-pinn.json"
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--quick", "--output", str(figures)],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(figures.read_text())["rows"]
    assert {line["work"] for line in rows} >= {
        f"{name}, d = {d}" for name in ("numpy", "torch.out") for d in (1, 2)
    }
    for line in rows:
        assert 0 < line["measured"] < 1e6 and (line["ms"] is None or 0 < line["ms"] < 1e6), line
        assert line["met"] is None, "sizes are small: nothing is held to a floor"

    # Its tables follow those of the main report, which it lies beside.
    main = {"command": "python benchmarks/scans_numpy.py", "machine": {}, "rows": []}
    (tmp_path / "performance.json").write_text(json.dumps(main))
    arguments = [str(tmp_path / "performance.json"), str(tmp_path / "page.md")]
    subprocess.run([sys.executable, str(BENCHMARK.with_name("_page.py")), *arguments], check=True)
    text = (tmp_path / "page.md").read_text()
    assert (
        text.count("4096 points, 64 Fourier features") == 1 and text.count("python benchmarks/pinn.py") == 2
    )
    for line in rows:
        assert f"## {line['table']}\n" in text and f"| {line['work']} | {line['beside']} |" in text
