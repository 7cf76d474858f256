"""Write a scan as an ONNX model: scanfield runs on ndonnx's arrays, which record what is done to them.

    python examples/onnx_model.py                          # gdn2 and selective_scan, run by onnxruntime and compared
    python examples/onnx_model.py --write gdn2.onnx --operation gdn2 --time 16

No operator of ONNX expresses these rules. ndonnx is an array library that follows the array API standard, so the generic
forms run on its arrays as on any other, and each step becomes nodes of a graph. Loops over time are unrolled: a model is
made for one length, and its size grows with it. For long sequences write a model of one token (`--step`) and loop.
It needs `pip install ndonnx onnxruntime`.
"""

# ruff: noqa: T201 (a script for people to read)
from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

import scanfield

BATCH, HEADS, KEY, VALUE, CHANNELS, STATE = 1, 2, 8, 6, 12, 4


def shapes(operation: str, time: int) -> dict[str, tuple[int, ...]]:
    """The arrays of a call by name."""
    keys, values, row = (BATCH, time, HEADS, KEY), (BATCH, time, HEADS, VALUE), (BATCH, time, CHANNELS)
    return {
        "gdn2": {
            "query": keys,
            "key": keys,
            "value": values,
            "log_decay": keys,
            "erase": keys,
            "write": values,
            "initial_state": (BATCH, HEADS, KEY, VALUE),
        },
        "selective_scan": {
            "u": row,
            "delta": row,
            "A": (CHANNELS, STATE),
            "B": (BATCH, time, STATE),
            "C": (BATCH, time, STATE),
            "D": (CHANNELS,),
            "z": row,
            "initial_state": (BATCH, CHANNELS, STATE),
        },
    }[operation]


OPTIONS: dict[str, dict[str, Any]] = {"gdn2": {"qk_l2norm": True}, "selective_scan": {"delta_softplus": True}}
SHARED = ("A", "D", "initial_state")  # what has no time


def draw(operation: str, time: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Numbers as a model would have them."""
    rng = np.random.default_rng(seed)
    arrays = {name: rng.normal(size=shape) for name, shape in shapes(operation, time).items()}
    for name in arrays.keys() & {"log_decay", "A"}:
        arrays[name] = -np.abs(arrays[name])
    for name in arrays.keys() & {"erase", "write"}:
        arrays[name] = 1 / (1 + np.exp(-arrays[name]))
    return {name: values.astype(np.float32) for name, values in arrays.items()}


def whole(operation: str, time: int) -> Any:
    """The ONNX model of a sequence: outputs `output` and `final_state`."""
    import ndonnx as ndx

    given = {
        name: ndx.argument(shape=shape, dtype=ndx.float32) for name, shape in shapes(operation, time).items()
    }
    result = getattr(scanfield, operation)(**given, **OPTIONS[operation])
    return ndx.build(given, {"output": result.output, "final_state": result.final_state})


def step(operation: str) -> Any:
    """The ONNX model of one token: the state goes in and comes out."""
    import ndonnx as ndx

    given = {
        name: ndx.argument(shape=shape if name in SHARED else shape[:1] + shape[2:], dtype=ndx.float32)
        for name, shape in shapes(operation, 1).items()
    }
    token = {name: array for name, array in given.items() if name != "initial_state"}
    output, state = getattr(scanfield, operation).step(given["initial_state"], **token, **OPTIONS[operation])
    return ndx.build(given, {"output": output, "final_state": state})


def run(model: Any, arrays: dict[str, np.ndarray]) -> list[np.ndarray]:
    """What onnxruntime makes of these arrays."""
    import onnxruntime

    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return [np.asarray(found) for found in session.run(["output", "final_state"], arrays)]


def worst(found: list[np.ndarray], expected: Any) -> float:
    """The largest difference of output and state, in units of the largest value of each."""
    return max(float(np.max(np.abs(x - y)) / np.max(np.abs(y))) for x, y in zip(found, expected, strict=True))


def main(arguments: list[str] | None = None) -> float:
    """Trace, run, compare; the largest difference."""
    parser = argparse.ArgumentParser(description="Scans as ONNX models.")
    parser.add_argument("--operation", choices=tuple(OPTIONS), help="only this one")
    parser.add_argument("--time", type=int, default=12, help="tokens of the model (default: 12)")
    parser.add_argument("--write", type=Path, metavar="FILE.onnx", help="keep the model")
    parser.add_argument("--step", action="store_true", help="the model of one token, called in a loop")
    given = parser.parse_args(arguments)
    differences = []
    for operation in [given.operation] if given.operation else list(OPTIONS):
        arrays = draw(operation, given.time)
        expected = getattr(scanfield, operation)(**arrays, **OPTIONS[operation])
        if given.step:
            model, state, outputs = step(operation), arrays["initial_state"], []
            for t in range(given.time):
                token = {name: x if name in SHARED else x[:, t] for name, x in arrays.items()}
                output, state = run(model, token | {"initial_state": state})
                outputs.append(output)
            found = [np.stack(outputs, axis=1), state]
        else:
            model = whole(operation, given.time)
            found = run(model, arrays)
        differences.append(worst(found, expected))
        print(f"{operation}: {len(model.graph.node)} nodes, onnxruntime differs by {differences[-1]:.1e}")
        if given.write is not None:
            given.write.write_bytes(model.SerializeToString())
            print(f"model written to {given.write}")
    return max(differences)


if __name__ == "__main__":
    main()
