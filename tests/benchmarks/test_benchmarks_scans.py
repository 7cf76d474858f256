"""The benchmark of the compiled scans runs, and its page says what its figures say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

pytestmark = pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="the benchmarks are not in this installation")


def run(script: str, *arguments: str) -> str:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *arguments],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_rows_that_need_no_other_library():
    """Those beside PyTorch and JAX, and those in processes of their own, take too long here."""
    pytest.importorskip("numba")
    chosen = ["step", "linear", "memory", "length", "c", "threads"]
    report = json.loads(run("scans_numpy.py", "--quick", "--json", "--only", *chosen))
    assert report["machine"]["numba"] and report["command"].endswith(" ".join(chosen))
    works = [line["work"] for line in report["rows"]]
    for name in ("gdn2 one decoding step", "linear_scan forward", "gdn2 forward + backward"):
        assert any(work.startswith(name) for work in works), works
    for line in report["rows"]:
        assert line["note"].startswith("not measured") or 0 < line["measured"] < 1e6, line
        assert line["met"] is None, "sizes are small: nothing is held to a floor"


def figure(table: str, work: str, measured: float | None, **more: Any) -> dict[str, Any]:
    missing = {"at least": None, "at most": None, "met": None, "note": "", "unit": "times"}
    return {"table": table, "work": work, "beside": "a peer", "measured": measured, **missing, **more}


def page(tmp_path: Path, rows: list[dict[str, Any]]) -> str:
    machine = {"processor": "an abacus", "gcc": None}
    report = {"command": "python benchmarks/scans_numpy.py", "machine": machine, "rows": rows}
    (tmp_path / "figures.json").write_text(json.dumps(report))
    run("_page.py", str(tmp_path / "figures.json"), str(tmp_path / "page.md"))
    return (tmp_path / "page.md").read_text()


def test_the_page_tells_what_is_met_and_what_bounds_the_rest(tmp_path):
    slow = {"case": "scan", "at least": 30.0, "met": False, "ms": 2.0, "peer ms": 50.0}
    in_c = {
        "case": "scan",
        "at least": 85.0,
        "met": False,
        "ms": 2.0,
        "peer ms": 1.25,
        "unit": "% of its speed",
    }
    text = page(
        tmp_path,
        [
            figure("Peers", "a scan", 25.0, **slow),
            figure("Peers", "a step", 6.0, **{"at least": 5.0, "met": True}),
            figure("Against C of the same loops", "a scan", 62.5, **in_c),
            figure("Memory", "a scan", 1.71, **{"at most": 1.5, "met": False}),
            figure("Memory", "a step", None, note="not measured: no gcc here"),
            figure(
                "Peers", "a copy", 3.0, **{"at least": 8.0, "met": False, "bound": "Memory allows 5 times."}
            ),
        ],
    )
    assert "| processor | an abacus |" in text and "| gcc | not installed |" in text
    assert "Of 5 rows with a floor or a limit, 1 meet it." in text
    assert "| a scan | a peer | 2 | 50 | 25 times | at least 30 | **no** |" in text
    assert "| a step | a peer |  |  | 6 times | at least 5 | yes |" in text
    assert "| a scan | a peer | 1.71 times | at most 1.5 | **no** |" in text
    assert "not measured: no gcc here" in text
    missed = text.split("## Not met")[1].split("## Peers")[0]
    assert missed.count("\n- ") == 4
    assert "3 times, at least 8. Memory allows 5 times." in missed
    assert (
        "25 times, at least 30. Compiled C of the same loop (a peer) reaches 40 times in this run." in missed
    )
    assert "1.71 times, at most 1.5. What bounds it was not measured in this run." in missed


def test_a_page_on_which_all_is_met_names_nothing_that_is_not(tmp_path):
    text = page(tmp_path, [figure("Peers", "a scan", 40.0, **{"at least": 30.0, "met": True})])
    assert "Of 1 rows with a floor or a limit, 1 meet it." in text
    assert "Not met" not in text


def test_the_page_of_the_manual_is_made_from_its_figures(tmp_path):
    """An edited page, or figures that were replaced alone, would tell two stories."""
    docs = BENCHMARKS.parent / "docs"
    others = sorted(map(str, docs.glob("performance-*.json")))
    run("_page.py", str(docs / "performance.json"), str(tmp_path / "page.md"), *others)
    assert (tmp_path / "page.md").read_text() == (docs / "performance.md").read_text()
