"""How wrong is float64? The same scans on mparray's arrays, whose numbers have as many digits as you ask for.

    python examples/arbitrary_precision.py                 # errors of every implementation against 50 digits
    python examples/arbitrary_precision.py --digits 100

mparray follows the array API standard, so the generic code runs on its arrays as it stands; gradients too. Slow, and a truth
beyond float64: it tells the rounding of a result from a fault in it. It needs `pip install mparray`.
"""

# ruff: noqa: T201 (a script for people to read)
from __future__ import annotations

import argparse
from typing import Any

import numpy as np

import scanfield

METHODS = ("generic.recurrent", "generic.chunk", "numpy.numba")


def draw(operation: str, time: int, seed: int = 0) -> dict[str, np.ndarray]:
    """float64 inputs, which are exact numbers to start from; decays from none to e^-30 a step."""
    rng = np.random.default_rng(seed)
    decay = -rng.choice([0.0, 1e-3, 1.0, 30.0], (1, time, 2, 3))
    keys = rng.normal(size=(2, 1, time, 2, 3))
    return {
        "linear_scan": {"a": np.exp(decay), "b": rng.normal(size=(1, time, 2, 3))},
        "selective_scan": {
            "u": rng.normal(size=(1, time, 3)),
            "delta": rng.uniform(0.01, 1.0, (1, time, 3)),
            "A": -rng.uniform(0.5, 20.0, (3, 2)),
            "B": rng.normal(size=(1, time, 2)),
            "C": rng.normal(size=(1, time, 2)),
        },
        "gdn2": {
            "query": keys[0],
            "key": keys[1] / np.linalg.norm(keys[1], axis=-1, keepdims=True),
            "value": rng.normal(size=(1, time, 2, 4)),
            "log_decay": decay,
            "erase": rng.random((1, time, 2, 3)),
            "write": rng.random((1, time, 2, 4)),
        },
    }[operation]


def exact(operation: str, arrays: dict[str, np.ndarray], digits: int) -> dict[str, np.ndarray]:
    """Output, state and gradients (of half the sum of the output's squares) as mpmath numbers of so many digits."""
    import mparray
    from mpmath import mp

    with mp.workdps(digits):
        given = {name: mparray.asarray(values) for name, values in arrays.items()}
        result, pullback = scanfield.vjp(getattr(scanfield, operation), **given)
        found = {"output": result.output, "final_state": result.final_state}
        found |= {f"d_{name}": gradient for name, gradient in pullback(d_output=result.output).items()}
        return {name: numbers(array) for name, array in found.items()}


def numbers(array: Any) -> np.ndarray:
    """The mpmath numbers of an array of mparray, all their digits kept."""
    from mpmath import mpf

    values = np.empty(array.shape, dtype=object)
    for index in np.ndindex(*array.shape):
        values[index] = mpf(array[index]._data.item())  # mparray has no public way to one number
    return values


def errors(operation: str, time: int, digits: int, seed: int = 0) -> dict[str, dict[str, float]]:
    """Method -> array -> the largest error in units of its largest value, in float64."""
    arrays = draw(operation, time, seed)
    truth = exact(operation, arrays, digits)
    found: dict[str, dict[str, float]] = {}
    for method in METHODS:
        try:
            result, pullback = scanfield.vjp(getattr(scanfield, operation), **arrays, method=method)
        except scanfield.ScanfieldError:  # an operation has not every form, a machine not numba
            continue
        got = {"output": result.output, "final_state": result.final_state}
        got |= {f"d_{name}": x for name, x in pullback(d_output=result.output).items()}
        found[method] = {
            # The difference in full precision: a float64 is an exact number.
            name: float(
                max(abs(truth[name] - got[name].astype(object)).ravel()) / max(abs(truth[name]).ravel())
            )
            for name in truth
        }
    return found


def main(arguments: list[str] | None = None) -> float:
    """A table; the largest error of all."""
    parser = argparse.ArgumentParser(description="Errors of float64 against arbitrary precision.")
    parser.add_argument("--digits", type=int, default=50)
    parser.add_argument("--time", type=int, default=20)
    given = parser.parse_args(arguments)
    largest = 0.0
    for operation in ("linear_scan", "selective_scan", "gdn2"):
        for method, by_array in errors(operation, given.time, given.digits).items():
            name = max(by_array, key=lambda x: by_array[x])
            print(f"{operation:<15} {method:<18} {by_array[name]:.1e} ({name})")
            largest = max(largest, by_array[name])
    return largest


if __name__ == "__main__":
    main()
