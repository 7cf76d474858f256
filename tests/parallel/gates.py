"""Gates that reset the state, let it grow, or keep it for long."""

from __future__ import annotations

import numpy as np
from examples import rng_of


def changed(inputs: dict[str, np.ndarray], change: str) -> dict[str, np.ndarray]:
    """Gates that reset the state at some tokens, let it grow, or keep it: of a token something is left after hundreds."""
    inputs = dict(inputs)
    rng = rng_of(change)
    if change == "resets":
        gate = next((n for n in ("log_decay", "a") if n in inputs), None)
        if gate is not None:
            x = inputs[gate].copy()
            x[:, [0, 17, 50, 64, 65, 99, 129]] = -np.inf if gate == "log_decay" else 0.0
            inputs[gate] = x
    if change == "growth":
        for name in ("log_decay", "a", "delta"):
            if name in inputs:
                x = inputs[name]
                inputs[name] = {
                    "log_decay": rng.uniform(-0.1, 0.15, x.shape),
                    "a": rng.uniform(-1.1, 1.2, x.shape),
                    "delta": -x / 40,
                }[name]
    if change == "slow":
        for name in ("log_decay", "A", "erase", "beta"):
            if name in inputs:
                inputs[name] = inputs[name] / 50
        if "a" in inputs:
            inputs["a"] = rng.uniform(0.97, 1.01, inputs["a"].shape)
    return inputs
