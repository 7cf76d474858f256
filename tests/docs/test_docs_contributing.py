"""The backend of CONTRIBUTING.md, as a reader would type it: it is found, runs what it takes, and agrees with all others."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "CONTRIBUTING.md"

SCRIPT = """
import numpy, scanfield
from scanfield.cli import main
b = numpy.random.default_rng(0).normal(size=(2, 50, 3))
a = numpy.full((1, 1, 1), 0.9)
told = scanfield.explain(scanfield.linear_scan, a, b)
assert told.taken["forward"] == "numpy.lfilter", told
assert told.taken["save"] != "numpy.lfilter", told          # it has no gradients: others' are used
print(told)
for state in (None, b[:, 0]):
    ours = scanfield.linear_scan(a, b, state)
    generic = scanfield.linear_scan(a, b, state, method="generic.recurrent")
    for x, y in zip(ours, generic, strict=True):
        numpy.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12)
assert scanfield.explain(scanfield.linear_scan, 0 * b + 0.5, b).taken["forward"] != "numpy.lfilter"
assert main(["check", "--operation", "linear_scan", "--library", "numpy", "--full"]) == 0
"""


def test_the_backend_of_the_page_runs(tmp_path):
    pytest.importorskip("scipy", reason="the page's backend is made of SciPy's filter")
    text = PAGE.read_text(encoding="utf-8")
    files = dict(
        re.findall(r"^```\w+\n# (\S+\.(?:toml|py))[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    )
    assert set(files) == {"pyproject.toml", "scanfield_lfilter/__init__.py", "scanfield_lfilter/scan.py"}
    for name, code in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(code)
    # What an installation would write of it.
    project = tomllib.loads(files["pyproject.toml"])["project"]
    facts = tmp_path / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    (point,) = project["entry-points"]["scanfield.backends"].items()
    (facts / "entry_points.txt").write_text(f"[scanfield.backends]\n{point[0]} = {point[1]}\n")

    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # The page shows what explain() prints: the same first line and candidates.
    for line in (
        "linear_scan on numpy arrays (cpu), carried in float64",
        "numpy.lfilter      forward    taken",
    ):
        assert line in text and line in done.stdout
