"""What an operation loses in each dtype, measured over draws of its inputs; the bounds stand in docs/numerical-bounds.md.

A draw is a row of a batch: rows do not touch each other (a law of their own). Its error is the largest difference over the
largest value of the truth in that row, of an output, a final state or a gradient; the truth is the token recurrence in
float64 (in extended precision for float64) on the inputs as the dtype has them. A gradient that is a thousand times
smaller than that of the median draw is measured against a thousandth of it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from arrays import numpy_dtype
from checks import operation
from examples import op_inputs, rng_of

import scanfield

ROWS, TIME = 500, 33
SEEDS = 20  # so many batches of rows are ten thousand draws
SHARED_INPUTS = {"A", "D", "delta_bias", "dt_bias"}
DTYPES = ("float64", "float32", "float16", "bfloat16")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "numerical-bounds.md"

Change = Callable[[dict[str, np.ndarray], np.random.Generator], None]


def plain(x: dict[str, np.ndarray], rng: np.random.Generator) -> None:
    """As drawn."""


def strong(x: dict[str, np.ndarray], rng: np.random.Generator) -> None:
    """Decays over all sizes: log decays from -1e-4 to -200, factors from 1 to 1e-6, steps of a selective scan to 50."""
    if "log_decay" in x:
        x["log_decay"] = -(10.0 ** rng.uniform(-4.0, 2.3, x["log_decay"].shape))
    if "a" in x:
        x["a"] = np.sign(x["a"]) * 10.0 ** rng.uniform(-6.0, 0.0, x["a"].shape)
    for name in ("delta", "dt"):
        if name in x:
            x[name] = 10.0 ** rng.uniform(-3.0, 1.7, x[name].shape)


def resets(x: dict[str, np.ndarray], rng: np.random.Generator) -> None:
    """A fifth of the gates forget everything, a fifth nothing."""
    kind = rng.random(x[gate_of(x)].shape)
    name = gate_of(x)
    lost, kept = {"log_decay": (-np.inf, 0.0), "a": (0.0, 1.0)}.get(name, (60.0, 0.0))
    x[name] = np.where(kind < 0.2, lost, np.where(kind < 0.4, kept, x[name]))


def growth(x: dict[str, np.ndarray], rng: np.random.Generator) -> None:
    """Every third gate grows, by up to a tenth."""
    name = gate_of(x)
    more = np.where(rng.random(x[name].shape) < 1 / 3, rng.uniform(0.0, 0.1, x[name].shape), np.nan)
    grown = {"log_decay": more, "a": np.exp(more)}.get(name, -more)
    x[name] = np.where(np.isnan(more), x[name], grown)


def near_keys(x: dict[str, np.ndarray], rng: np.random.Generator) -> None:
    """Keys of a row all but equal, gates that erase up to once over, hardly a decay."""
    key = x["key"]
    key = key[:, :1] + 1e-3 * rng.standard_normal(key.shape)
    x["key"] = key / np.linalg.norm(key, axis=-1, keepdims=True)
    if "erase_key" in x:
        x["erase_key"] = x["key"] * 1.0
    if "log_decay" in x:
        x["log_decay"] = x["log_decay"] * 1e-3


REGIMES: dict[str, Change] = {
    change.__name__.replace("_", " "): change for change in (plain, strong, resets, growth, near_keys)
}


def gate_of(x: dict[str, np.ndarray]) -> str:
    """The input that makes a state decay."""
    return next(name for name in ("log_decay", "a", "delta", "dt", "beta") if name in x)


def regimes(op: str) -> list[str]:
    """Those that this operation can meet."""
    inputs = op_inputs(op, "contract")
    decays = any(name in inputs for name in ("log_decay", "a", "delta", "dt"))
    corrects = any(name in inputs for name in ("erase", "beta"))
    return [
        name
        for name in REGIMES
        if (name == "plain" or decays or name == "near keys") and (name != "near keys" or corrects)
    ]


def draw(op: str, regime: str, seed: int) -> dict[str, np.ndarray]:
    name = f"contract {op} {regime} {seed}"
    inputs = op_inputs(op, name, batch=ROWS, time=TIME)
    REGIMES[regime](inputs, rng_of(name + " change"))
    return inputs


class Errors(NamedTuple):
    """The largest of all rows, and where it is."""

    forward: float
    gradients: float
    where: str


def _run(op: str, inputs: dict[str, Any], cotangents: Any, method: str) -> dict[str, np.ndarray]:
    result, pullback = scanfield.vjp(operation(op), **inputs, method=method)
    d_output, d_state = cotangents
    gradients = pullback(d_output.astype(result.output.dtype), d_state.astype(result.final_state.dtype))
    return {"output": result.output, "final_state": result.final_state} | {
        f"d_{name}": x for name, x in gradients.items()
    }


def errors(op: str, regime: str, seed: int, dtype: str, methods: list[str]) -> dict[str, Errors]:
    """By method."""
    low, wide = numpy_dtype(dtype), np.longdouble if dtype == "float64" else np.float64
    inputs = draw(op, regime, seed)
    given = {name: x.astype(low) for name, x in inputs.items()}
    rng = rng_of(f"contract {op} {regime} {seed} cotangents")
    shapes = result_shapes(op, given)
    cotangents = [rng.standard_normal(shape).astype(low) for shape in shapes]
    truth = _run(
        op,
        {name: x.astype(wide) for name, x in given.items()},
        [x.astype(wide) for x in cotangents],
        "generic.recurrent",
    )
    found = {}
    for method in methods:
        forward = gradients = 0.0
        where = ""
        for name, x in _run(op, given, cotangents, method).items():
            size = rows_of(name, truth[name])
            off = np.abs(x.astype(wide) - truth[name])
            off[np.abs(truth[name]) > finfo(low).max] = 0.0  # a sum over all rows has no room in float16
            off = off.reshape(size.shape[0], -1).max(axis=1)
            error = float((off / np.maximum(size, 1e-3 * np.median(size))).max())
            assert np.isfinite(error), (op, regime, seed, dtype, method, name)
            if name in ("output", "final_state"):
                forward = max(forward, error)
            else:
                gradients = max(gradients, error)
            if error == max(forward, gradients):
                where = name
        found[method] = Errors(forward, gradients, where)
    return found


def finfo(dtype: np.dtype) -> Any:
    """Also of bfloat16."""
    try:
        return np.finfo(dtype)
    except ValueError:
        import ml_dtypes

        return ml_dtypes.finfo(dtype)


def rows_of(name: str, truth: np.ndarray) -> np.ndarray:
    """The largest value of each row; of the whole array where rows share it."""
    if truth.shape[0] != ROWS or name.removeprefix("d_") in SHARED_INPUTS:
        return np.abs(truth).max(keepdims=True).reshape(1)
    return np.abs(truth).reshape(ROWS, -1).max(axis=1)


def result_shapes(op: str, given: dict[str, np.ndarray]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    one = {name: x if name in SHARED_INPUTS else x[:1] for name, x in given.items()}
    result = operation(op)(**one)
    return tuple((ROWS, *x.shape[1:]) for x in result)[:2]


def bounds() -> dict[tuple[str, str, str], tuple[float, float]]:
    """(operation, regime, dtype) -> bounds of the forward and of the gradients, as the page states them."""
    found = {}
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 2 + len(DTYPES) and cells[0].startswith("`"):
            for dtype, cell in zip(DTYPES, cells[2:], strict=True):
                forward, gradients = (float(x) for x in cell.split(","))
                found[cells[0].strip("`"), cells[1], dtype] = (forward, gradients)
    return found


# The others of the family are gdn2 under names of their own.
OPERATIONS = ("linear_scan", "selective_scan", "gdn2", "ssd", "gated_delta_product")
# The batch of rows whose float32 was worst, of each.
WORST = {
    ("linear_scan", "plain"): 8,
    ("linear_scan", "strong"): 12,
    ("linear_scan", "resets"): 3,
    ("linear_scan", "growth"): 17,
    ("selective_scan", "plain"): 8,
    ("selective_scan", "strong"): 8,
    ("selective_scan", "resets"): 16,
    ("selective_scan", "growth"): 18,
    ("gdn2", "plain"): 3,
    ("gdn2", "strong"): 11,
    ("gdn2", "resets"): 18,
    ("gdn2", "growth"): 13,
    ("gdn2", "near keys"): 9,
    ("ssd", "plain"): 3,
    ("ssd", "strong"): 1,
    ("ssd", "resets"): 8,
    ("ssd", "growth"): 15,
    ("gated_delta_product", "plain"): 17,
    ("gated_delta_product", "strong"): 9,
    ("gated_delta_product", "resets"): 3,
    ("gated_delta_product", "growth"): 17,
    ("gated_delta_product", "near keys"): 17,
}
METHODS = {
    "linear_scan": [None, "generic.recurrent", "generic.blocked"],
    "selective_scan": [None, "generic.recurrent"],
}
FORMS = [None, "generic.recurrent", "generic.chunk"]


def rounded_up(x: float) -> str:
    """To one digit, with a fifth to spare."""
    x = max(1.2 * x, 1e-17)
    scale = 10.0 ** np.floor(np.log10(x))
    return f"{np.ceil(x / scale) * scale:.0e}"


def main(operations: list[str]) -> None:
    """Measure ten thousand draws of each operation and regime; print the rows of the page, and the worst batches."""
    worst = {}
    for op in operations or OPERATIONS:
        for regime in regimes(op):
            cells = []
            for dtype in DTYPES:
                forward = gradients = 0.0
                for seed in range(SEEDS):
                    for error in errors(op, regime, seed, dtype, METHODS.get(op, FORMS)).values():
                        if max(error[:2]) > max(forward, gradients):
                            worst[op, regime, dtype] = seed
                        forward, gradients = max(forward, error.forward), max(gradients, error.gradients)
                cells.append(f"{rounded_up(forward)}, {rounded_up(gradients)}")
            print(f"| `{op}` | {regime} | {' | '.join(cells)} |", flush=True)
    print({key: seed for key, seed in worst.items() if key[2] == "float32"})


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
