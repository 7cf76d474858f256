"""The same numbers by every scheduler: threads, and two workers of dask.distributed."""

from __future__ import annotations

import pytest
from arrays import Library, deviation
from checks import operation
from examples import BASE, GRAPHS, op_inputs

import scanfield

pytestmark = pytest.mark.backend("dask")


def graph_of(library: Library, op: str, form: str):
    """Results and gradients of arrays in blocks along batch and time, and what they should be."""
    inputs = op_inputs(op, f"{op} schedulers")
    arrays = {
        n: x if n in ("A", "D", "delta_bias") else x.rechunk(2) for n, x in library.arrays(inputs).items()
    }
    result, pullback = scanfield.vjp(operation(op), **arrays, method=form)
    want, want_pullback = scanfield.vjp(operation(op), **inputs)
    return {**result._asdict(), **pullback(*result)}, {**want._asdict(), **want_pullback(*want)}


@pytest.mark.parametrize("form", GRAPHS)
@pytest.mark.parametrize("op", BASE)
def test_threads(library: Library, op: str, form: str):
    lazy, want = graph_of(library, op, form)
    (got,) = library.dask.compute(lazy, scheduler="threads", num_workers=4)
    for name, right in want.items():
        assert deviation(got[name], right, floor=1.0) <= 1e-11, name


def test_two_workers_in_processes_of_their_own(library: Library):
    """What a worker is sent it can unpickle and run: it has imported nothing before."""
    distributed = pytest.importorskip("distributed", reason="needs dask.distributed")
    with (
        library.dask.config.set({"distributed.worker.daemon": True, "distributed.admin.tick.limit": "1h"}),
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, silence_logs=50
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        for op, form in zip(BASE, ("dask.parallel", "dask.sequential", "dask.parallel"), strict=True):
            lazy, want = graph_of(library, op, form)
            got = client.compute(lazy, sync=True)
            for name, right in want.items():
                assert deviation(got[name], right, floor=1.0) <= 1e-11, (op, name)
