"""A worker of dask.distributed that dies in the middle of a run: its tasks run again elsewhere, to the same numbers."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from arrays import Library, deviation
from checks import operation
from examples import op_inputs

import scanfield
from scanfield_dask.parallel import ClusterReducer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "parallel"))
import training

pytestmark = pytest.mark.backend("dask")


def slowly(x: np.ndarray, folder: str) -> np.ndarray:
    """The block itself, after a while; each block that runs leaves a mark of its own."""
    if not x.size:  # Dask asks for the kind of the result, in the process that makes the graph
        return x
    open(os.path.join(folder, f"{os.getpid()}-{time.monotonic_ns()}"), "w").close()
    time.sleep(0.05)
    return x


@pytest.fixture(autouse=True)
def no_compiling(monkeypatch: pytest.MonkeyPatch):
    """Workers that start again compile nothing: their blocks go by the generic code."""
    monkeypatch.setenv("SCANFIELD_BLOCK", "numpy.numba")


def test_a_lost_worker(library: Library, tmp_path):
    distributed = pytest.importorskip("distributed", reason="needs dask.distributed")
    with (
        library.dask.config.set({"distributed.worker.daemon": True, "distributed.admin.tick.limit": "1h"}),
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, silence_logs=50
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        for op in ("linear_scan", "gdn2"):
            folder = tmp_path / op
            folder.mkdir()
            inputs = op_inputs(op, f"{op} lost worker", 2, 12)
            arrays = {
                n: x
                if n in ("A", "D", "delta_bias")
                else x.rechunk((1, 4, *(-1,) * (x.ndim - 2)) if n != "initial_state" else x.shape)
                for n, x in library.arrays(inputs).items()
            }
            slow = next(n for n in ("b", "u", "value") if n in arrays)
            arrays[slow] = arrays[slow].map_blocks(slowly, str(folder), dtype=arrays[slow].dtype)
            result, pullback = scanfield.vjp(operation(op), **arrays, method="dask.parallel")
            future = client.compute({**result._asdict(), **pullback(*result)})

            until = time.monotonic() + 60
            while not (seen := sorted(folder.iterdir())) and time.monotonic() < until:
                time.sleep(0.01)
            assert seen, "no block began"
            os.kill(int(seen[0].name.split("-")[0]), signal.SIGKILL)

            got = future.result(timeout=120)
            want, want_pullback = scanfield.vjp(operation(op), **inputs)
            for name, right in {**want._asdict(), **want_pullback(*want)}.items():
                assert deviation(got[name], right, floor=1.0) <= 1e-11, (op, name)
            assert len({mark.name.split("-")[0] for mark in folder.iterdir()}) > 1  # another worker took over

        # Points of a training on the same workers; their shards outlive one of them.
        want = training.trained("lm", np)
        reducer = ClusterReducer(client, 3, timeout=120)
        training.same(training.trained("lm", np, reducer), want)
        (pid, *_) = client.run(os.getpid).values()
        killer = threading.Timer(0.3, os.kill, (pid, signal.SIGKILL))
        killer.start()
        training.same(training.trained("lm", np, reducer), want)
        killer.join()


def test_a_run_that_kills_every_worker_ends_in_an_error(library: Library):
    distributed = pytest.importorskip("distributed", reason="needs dask.distributed")
    with (
        library.dask.config.set(
            {
                "distributed.worker.daemon": True,
                "distributed.admin.tick.limit": "1h",
                "distributed.scheduler.allowed-failures": 0,
            }
        ),
        distributed.LocalCluster(
            n_workers=1, threads_per_worker=1, processes=True, dashboard_address=None, silence_logs=50
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        inputs = library.arrays(op_inputs("linear_scan", "linear_scan deadly", 2, 8))
        inputs["b"] = inputs["b"].rechunk(2).map_blocks(deadly, dtype=inputs["b"].dtype)
        result = scanfield.linear_scan(**inputs, method="dask.parallel")
        with pytest.raises(distributed.KilledWorker, match="worker"):
            client.compute(result.output).result(timeout=60)


def deadly(x: np.ndarray) -> np.ndarray:
    """Ends the process that it runs in."""
    if x.size:
        os._exit(1)
    return x
