"""What a step would use is told before it runs; a problem and a network are enough to ask."""

from __future__ import annotations

from typing import Any

import pytest

import scanfield
from scanfield import pinn


def leave_out(backend: str, test: str, parameters: dict[str, Any]) -> bool:
    return backend == "dask"  # a training loop computes at every step: Dask's arrays are not for it


def line(k: Any = 5.0) -> pinn.Helmholtz:
    return pinn.Helmholtz(
        pinn.Interval(0, 1), k, 0.0, [pinn.Dirichlet(1.0, where="left"), pinn.Sommerfeld(where="right")]
    )


def net(**where: Any) -> pinn.Network:
    return pinn.Network.create(pinn.FourierFeatures(1, 3, wavenumber=5.0), hidden=4, **where)


def test_the_kernels_that_run_are_told(library: Any, xp: Any, device: Any) -> None:
    network = net(xp=xp, device=device)
    told = pinn.explain(line(), network, chunk=300)
    chosen = pinn.selection.kernels_for(network)
    assert told.taken == {"loss_and_grad": chosen.name} and told.library == network.library
    assert [v.candidate for v in told.verdicts if v.taken] == [chosen.name]
    assert {v.candidate for v in told.verdicts} >= set(pinn.selection.methods(network, by_name=True))
    assert all(v.reason for v in told.verdicts)
    workspace, equation, left, right = told.notes
    assert workspace.startswith("a workspace serves" if chosen.in_place else "no workspace")
    assert equation == "equation: jets of 3 blocks at 1000 points, 4 sweeps of at most 300 rows, complex"
    assert left.startswith("dirichlet left: the value at 1 points") and "jets of 2 blocks" in right
    with scanfield.use(method="generic"):
        forced = scanfield.explain(pinn.loss_and_grad, network)
    assert forced.taken == {"loss_and_grad": "generic"} and "forced by method='generic'" in str(forced)
    assert len(forced.notes) == 1
    assert scanfield.explain(pinn.train, line(), network, chunk=300) == told
    assert scanfield.explain(pinn.jet, network, None).taken == told.taken


def test_what_only_runs_when_asked_says_so() -> None:
    network = net()
    told = {v.candidate: v.reason for v in pinn.explain(network).verdicts}
    assert list(told)[-1] == "generic" and told["generic"] == "one before it runs"
    with scanfield.use(method="nothing"), pytest.raises(scanfield.ArgumentError, match="method: 'nothing'"):
        pinn.explain(network)


def test_gradients_of_a_problem_are_checked_as_it_stands() -> None:
    """`check_gradients(problem, network)`, unknowns and all; and what is no network is named."""
    medium = pinn.Unknown(4.0, times=lambda x: 1 + x[:, 0], plus=0.1j)
    report = pinn.check_gradients(line(medium), net())
    assert report.largest < 1e-7 and "wavenumber" in report.deviations, str(report)
    for first, second in ((line(), 3), (3, []), (line(), None)):
        with pytest.raises(
            scanfield.ArgumentError, match=r"network is a \w+: a Network and terms, or a problem"
        ):
            pinn.check_gradients(first, second)
    with pytest.raises(scanfield.ArgumentError, match="terms: None"):
        pinn.check_gradients(net(), None)
    plane = pinn.Network.create(pinn.RawCoordinates(2), hidden=4)
    with pytest.raises(scanfield.ArgumentError, match="network: 2 coordinates and 2 outputs"):
        pinn.explain(line(), plane)
