"""The examples of several machines, each as its first lines say it is run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


# What C++ says of a thread that outlives its owner. It was seen once in some twenty runs, after the example had printed its
# result: PyTorch's own threads at the end of a process. Once more, then.
ABORTED = "terminate called without an active exception"


def run(name: str, *before: str, **environment: str) -> str:
    for _ in range(2):
        finished = subprocess.run(
            [sys.executable, *before, str(EXAMPLES / name)],
            env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        if finished.returncode == 0 or ABORTED not in finished.stderr:
            break
    assert finished.returncode == 0, finished.stdout + finished.stderr[-4000:]
    return finished.stdout


@pytest.mark.backend("torch")
def test_torch():
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert "2 ranks" in run("torch_parallel.py", *launcher)


PAGE = """
import json, scaling
report, page = json.load(open("docs/scaling.json")), open("docs/scaling.md").read()
assert scaling.rewritten(page, scaling.tables(report)) == page, "made anew, the page is another"
assert all(run["bytes"] == run["formula"] for run in report["runs"]) and len(report["runs"]) == 10
try:
    scaling.rewritten("a page of nothing", {"strong": ""})
except SystemExit as refused:
    assert "no part <!-- strong" in str(refused)
else:
    raise AssertionError("a page without the parts was taken")
"""


@pytest.mark.backend("torch")
def test_the_page_on_scaling_is_that_of_its_run():
    """In a process of its own: a benchmark sets threads before NumPy is imported."""
    path = os.pathsep.join([str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", PAGE],
        check=False,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.backend("jax")
def test_jax():
    assert "2 devices" in run("jax_parallel.py", XLA_FLAGS="--xla_force_host_platform_device_count=2")


@pytest.mark.backend("dask")
def test_dask():
    pytest.importorskip("distributed", reason="needs dask.distributed")
    assert "2 workers" in run("dask_parallel.py", SCANFIELD_BLOCK="numpy.numba")
