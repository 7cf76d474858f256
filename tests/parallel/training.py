"""A training that every engine runs. Its boundary is two points: shards are uneven, and some lack a term."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from scanfield import pinn

OPTIMIZERS = {"adam": 8, "lbfgs": 8, "lm": 4}


def problem() -> pinn.Helmholtz:
    """An unknown wavenumber too, whose gradient is a sum of shares like every other."""
    x = np.linspace(0.1, 0.9, 7)[:, None]
    data = pinn.Data(x, np.sin(3.0 * x[:, 0]))
    return pinn.Helmholtz(
        pinn.Interval(0.0, 1.0),
        pinn.Unknown(2.5),
        boundary=[pinn.Dirichlet(0.0, where="left"), pinn.Dirichlet(float(np.sin(3.0)), where="right")],
        data=[data],
    )


def trained(optimizer: str, xp: Any, reducer: Any = None, **options: Any) -> dict[str, Any]:
    """History and parameters, on the host."""
    features = pinn.FourierFeatures(1, 5, scale=1.0, seed=1)
    network = pinn.Network.create(features, hidden=[6], outputs=1, seed=2, xp=xp, dtype="float64")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pinn.DiagnosisWarning)
        fit = pinn.train(
            problem(),
            network,
            points=29,
            held_out=16,
            sampling="uniform",
            seed=3,
            optimizer=optimizer,
            iterations=OPTIMIZERS[optimizer],
            record=2,
            reducer=reducer,
            **options,
        )
    vector = fit.network.flatten()
    vector = vector.detach() if hasattr(vector, "detach") else vector
    return {
        "loss": np.asarray([line.loss for line in fit.history]),
        "held out": np.asarray([line.held_out for line in fit.history]),
        "terms": np.asarray([list(line.terms.values()) for line in fit.history]),
        "parameters": np.asarray(vector),
        "unknowns": np.asarray(list(fit.unknowns.values())),
    }


def same(got: dict[str, Any], want: dict[str, Any], limit: float = 1e-8) -> None:
    """To the rounding of some iterations; Levenberg-Marquardt divides it by its damping, the others stay below 1e-14."""
    for name, right in want.items():
        assert np.max(np.abs(got[name] - right)) <= limit * max(np.max(np.abs(right)), 1e-3), name
