"""One sequence in chunks along time, and the points of a PINN, on the workers of a dask.distributed cluster.

python examples/dask_parallel.py
"""

from __future__ import annotations

import dask.array
import numpy as np
from distributed import Client, LocalCluster

import scanfield
from scanfield import pinn
from scanfield_dask.parallel import ClusterReducer


def main() -> None:
    """Compare with one call on the whole; train a PINN."""
    draw = np.random.default_rng(0)
    a, b = draw.uniform(0.5, 1.0, (1, 400, 4)), draw.standard_normal((1, 400, 4))
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        chunked = [dask.array.from_array(x, chunks=(1, 100, 4)) for x in (a, b)]
        # The default walks through the chunks; "dask.parallel" summarises them side by side and then runs each.
        result = scanfield.linear_scan(*chunked, method="dask.parallel")
        output = client.compute(result.output).result(timeout=120)
        worst = float(np.max(np.abs(output - scanfield.linear_scan(a, b).output)))
        assert worst < 1e-12

        problem = pinn.Helmholtz(pinn.Interval(0, 1), 5.0, source=1.0, boundary=pinn.Dirichlet(0.0))
        features = pinn.FourierFeatures(1, 12, scale=1.0, trainable=False)
        network = pinn.Network.create(features, hidden=[], outputs=1, dtype="float64")
        reducer = ClusterReducer(client, timeout=120)
        fit = pinn.train(
            problem, network, points=64, sampling="uniform", iterations=10, held_out=16, reducer=reducer
        )
    print(f"{reducer.size} workers: scan within {worst:.1e}, PINN {fit.loss:.1e}")  # noqa: T201


if __name__ == "__main__":
    main()
