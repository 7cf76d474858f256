"""The benchmark of whole models runs: scanfield and its peers agree, and every row has its figure."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "models.py"

pytestmark = [
    pytest.mark.backend("torch"),
    pytest.mark.skipif(not BENCHMARK.is_file(), reason="the benchmarks are not in this installation"),
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
    ),
]


def test_it_runs_at_small_sizes_and_has_a_section_of_the_page(tmp_path):
    figures = tmp_path / "models.json"
    done = subprocess.run(
        [
            sys.executable,
            str(BENCHMARK),
            "--quick",
            "--only",
            "prefill",
            "relevance",
            "--output",
            str(figures),
        ],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(figures.read_text(encoding="utf-8"))["rows"]
    assert {line["table"] for line in rows} == {
        "Whole models of transformers, beside their own slow path",
        "The recurrences of these models alone",
        "Relevance of a model's tokens",
        "How exact",
    }
    for line in rows:
        assert 0 <= line["measured"] < 1e6, line
        assert line["met"] is None, "sizes are small: nothing is held to a floor"
    page = tmp_path / "page.md"
    maker = BENCHMARK.with_name("_page.py")
    (tmp_path / "models-again.json").write_bytes(figures.read_bytes())
    subprocess.run([sys.executable, str(maker), str(figures), str(page)], check=True, timeout=60)
    text = page.read_text(encoding="utf-8")
    assert (
        text.count("## Relevance of a model's tokens") == 2
        and "beside their own slow paths; processor time of one thread (`python benchmarks/models.py" in text
    )
