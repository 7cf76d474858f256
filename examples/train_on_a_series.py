"""Train a small Gated DeltaNet-2 and a small Mamba on a real series, without autograd, on arrays of any library.

    python examples/train_on_a_series.py                      # NumPy
    python examples/train_on_a_series.py --library torch      # or jax, cupy
    python examples/train_on_a_series.py --compare numpy torch jax

The series is the yearly number of sunspots, 1700 to 2008 (National Geophysical Data Center, public domain; the data set
"sunspots" of statsmodels). The models forecast the next year from all years before it; the last 60 years are kept back.
Draws are made on the host, so that all libraries start from the same numbers; their losses agree step by step.
"""

# ruff: noqa: T201 (a script for people to read)
from __future__ import annotations

import argparse
import importlib
from typing import Any

import numpy

from scanfield.layers import (
    GatedDeltaNet2,
    GatedDeltaNet2Config,
    Layer,
    Linear,
    MambaBlock,
    Residual,
    RMSNorm,
    Sequential,
)
from scanfield.optimize import Adam, AdamState

NAMESPACES = {"numpy": "numpy", "torch": "torch", "jax": "jax.numpy", "cupy": "cupy"}
WIDTH, KEPT_BACK = 8, 60

# fmt: off
SUNSPOTS = (  # 1700, 1701, ...
    5, 11, 16, 23, 36, 58, 29, 20, 10, 8, 3, 0, 0, 2, 11,
    27, 47, 63, 60, 39, 28, 26, 22, 11, 21, 40, 78, 122, 103, 73,
    47, 35, 11, 5, 16, 34, 70, 81, 111, 101, 73, 40, 20, 16, 5,
    11, 22, 40, 60, 80.9, 83.4, 47.7, 47.8, 30.7, 12.2, 9.6, 10.2, 32.4, 47.6, 54,
    62.9, 85.9, 61.2, 45.1, 36.4, 20.9, 11.4, 37.8, 69.8, 106.1, 100.8, 81.6, 66.5, 34.8, 30.6,
    7, 19.8, 92.5, 154.4, 125.9, 84.8, 68.1, 38.5, 22.8, 10.2, 24.1, 82.9, 132, 130.9, 118.1,
    89.9, 66.6, 60, 46.9, 41, 21.3, 16, 6.4, 4.1, 6.8, 14.5, 34, 45, 43.1, 47.5,
    42.2, 28.1, 10.1, 8.1, 2.5, 0, 1.4, 5, 12.2, 13.9, 35.4, 45.8, 41.1, 30.1, 23.9,
    15.6, 6.6, 4, 1.8, 8.5, 16.6, 36.3, 49.6, 64.2, 67, 70.9, 47.8, 27.5, 8.5, 13.2,
    56.9, 121.5, 138.3, 103.2, 85.7, 64.6, 36.7, 24.2, 10.7, 15, 40.1, 61.5, 98.5, 124.7, 96.3,
    66.6, 64.5, 54.1, 39, 20.6, 6.7, 4.3, 22.7, 54.8, 93.8, 95.8, 77.2, 59.1, 44, 47,
    30.5, 16.3, 7.3, 37.6, 74, 139, 111.2, 101.6, 66.2, 44.7, 17, 11.3, 12.4, 3.4, 6,
    32.3, 54.3, 59.7, 63.7, 63.5, 52.2, 25.4, 13.1, 6.8, 6.3, 7.1, 35.6, 73, 85.1, 78,
    64, 41.8, 26.2, 26.7, 12.1, 9.5, 2.7, 5, 24.4, 42, 63.5, 53.8, 62, 48.5, 43.9,
    18.6, 5.7, 3.6, 1.4, 9.6, 47.4, 57.1, 103.9, 80.6, 63.6, 37.6, 26.1, 14.2, 5.8, 16.7,
    44.3, 63.9, 69, 77.8, 64.9, 35.7, 21.2, 11.1, 5.7, 8.7, 36.1, 79.7, 114.4, 109.6, 88.8,
    67.8, 47.5, 30.6, 16.3, 9.6, 33.2, 92.6, 151.6, 136.3, 134.7, 83.9, 69.4, 31.5, 13.9, 4.4,
    38, 141.7, 190.2, 184.8, 159, 112.3, 53.9, 37.6, 27.9, 10.2, 15.1, 47, 93.8, 105.9, 105.5,
    104.5, 66.6, 68.9, 38, 34.5, 15.5, 12.6, 27.5, 92.5, 155.4, 154.6, 140.4, 115.9, 66.6, 45.9,
    17.9, 13.4, 29.4, 100.2, 157.6, 142.6, 145.7, 94.3, 54.6, 29.9, 17.5, 8.6, 21.5, 64.3, 93.3,
    119.6, 111, 104, 63.7, 40.4, 29.8, 15.2, 7.5, 2.9,
)
# fmt: on


def models() -> dict[str, Layer]:
    """One number a year in, one out."""
    mixers = {
        "gated delta net 2": GatedDeltaNet2(
            WIDTH, GatedDeltaNet2Config(heads=2, latent_per_head=4, output_gate="silu")
        ),
        "mamba": MambaBlock(WIDTH, state_size=4),
    }
    return {
        name: Sequential(
            into=Linear(1, WIDTH),
            block=Residual(Sequential(norm=RMSNorm(WIDTH), mixer=mixer)),
            norm=RMSNorm(WIDTH),
            out=Linear(WIDTH, 1),
        )
        for name, mixer in mixers.items()
    }


def data(xp: Any, dtype: str) -> tuple[Any, Any]:
    """Scaled years, and each year's successor: (1, time, 1)."""
    values = numpy.sqrt(numpy.asarray(SUNSPOTS)) / 7.0 - 1.0  # the root makes high and low cycles alike
    series = values.astype(dtype)[None, :, None]
    return xp.asarray(series[:, :-1]), xp.asarray(series[:, 1:])


def train(library: str, steps: int, dtype: str) -> dict[str, list[float]]:
    """The loss of every step, and last the error on the years that were kept back, for both models."""
    xp = importlib.import_module(NAMESPACES[library])
    if library == "jax" and dtype == "float64":
        importlib.import_module("jax").config.update("jax_enable_x64", True)
    x, target = data(xp, dtype)
    seen = x.shape[1] - KEPT_BACK
    losses: dict[str, list[float]] = {}
    for name, model in models().items():
        model.init(0, xp, dtype=dtype)
        adam = Adam(learning_rate=1e-2)
        parameters = model.trainable()
        state = adam.init(parameters)
        step, forecast = steps_of(model, adam)
        if library == "jax":  # compiled as a whole; elsewhere the functions run as they are
            jax = importlib.import_module("jax")
            step, forecast = jax.jit(step), jax.jit(forecast)
        losses[name] = []
        for _ in range(steps):
            loss, parameters, state = step(parameters, state, x[:, :seen, :], target[:, :seen, :])
            losses[name].append(float(loss))
        error = (forecast(parameters, x) - target)[:, seen:, :]
        losses[name].append(float((error * error).mean()))
    return losses


def steps_of(model: Layer, adam: Adam) -> tuple[Any, Any]:
    """One step of training, and the forecast, as functions of the parameters."""

    def step(parameters: dict[str, Any], state: AdamState, x: Any, target: Any) -> tuple[Any, Any, Any]:
        (output, _), pullback = model.replaced(parameters).vjp(x)
        error = output - target
        count = error.shape[0] * error.shape[1]
        _, _, gradients = pullback(2 / count * error)
        return ((error * error).sum() / count, *adam.update(parameters, gradients, state))

    def forecast(parameters: dict[str, Any], x: Any) -> Any:
        return model.replaced(parameters)(x).output

    return step, forecast


def main(arguments: list[str] | None = None) -> dict[str, dict[str, list[float]]]:
    """Train, print, compare."""
    parser = argparse.ArgumentParser(description="Train two small layers on the sunspot series.")
    parser.add_argument("--library", choices=NAMESPACES, default="numpy")
    parser.add_argument(
        "--compare", nargs="+", choices=NAMESPACES, help="train on each and compare the losses"
    )
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float64")
    given = parser.parse_args(arguments)
    found = {
        library: train(library, given.steps, given.dtype) for library in given.compare or [given.library]
    }
    x, target = data(numpy, "float64")
    same = float(numpy.mean((target - x)[0, -KEPT_BACK:, 0] ** 2))
    for library, losses in found.items():
        for name, values in losses.items():
            shown = ", ".join(f"{values[i]:.4f}" for i in (0, len(values) // 2, -2))
            print(
                f"{library:<6} {name:<18} loss {shown}; kept back {values[-1]:.4f} (as last year: {same:.4f})"
            )
    first, *others = found
    for other in others:
        for name, values in found[other].items():
            worst = max(abs(a - b) / b for a, b in zip(values, found[first][name], strict=True))
            print(f"{other} against {first}, {name}: largest relative difference of a loss {worst:.1e}")
    return found


if __name__ == "__main__":
    main()
