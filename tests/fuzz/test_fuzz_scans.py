"""Random calls of every operation and verb against the float64 recurrence: `nox -s fuzz` draws ten thousand of each."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import reference
from arrays import Library, deviation
from checks import operation
from drawing import Drawn, calls
from examples import methods
from hypothesis import given, seed, settings
from hypothesis import strategies as st

import scanfield

pytestmark = pytest.mark.backend("numpy", "strict", "torch", "jax")

OPERATIONS = [record.name for record in scanfield.operations()]
DRAWS = int(os.environ.get("SCANFIELD_FUZZ_DRAWS", "8"))
SEED = int(os.environ.get("SCANFIELD_FUZZ_SEED", "0"))
fuzz = settings(max_examples=DRAWS, derandomize="SCANFIELD_FUZZ_SEED" not in os.environ, deadline=None)


def leave_out(session: str, test: str, given: dict[str, Any]) -> bool:
    """Read-only arrays are among the ways in which arrays lie; JAX, which compiles for each draw, is for `nox -s fuzz`."""
    return given.get("library") == "readonly" or (
        session == "jax" and "SCANFIELD_FUZZ_SEED" not in os.environ
    )


LIMITS = {"float64": 1e-11, "float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}


def dtypes(library: Library) -> tuple[str, ...]:
    return tuple(d for d in ("float64", "float32", "float16", "bfloat16") if d in library.dtypes)


def moved(library: Library, drawn: Drawn) -> dict[str, Any]:
    """The arrays in the library, lying as they do where it can have that."""
    if library.name in ("numpy", "readonly"):
        return dict(drawn.arrays)
    return {name: library.array(np.asarray(x), None) for name, x in drawn.arrays.items()}


def snapshot(arrays: dict[str, Any], library: Library) -> dict[str, bytes]:
    return {name: np.ascontiguousarray(library.raw(x)).tobytes() for name, x in arrays.items()}


def chosen(data: st.DataObject, library: Library, drawn: Drawn) -> str | None:
    """A method; forms in blocks spread what is not finite within a block, as they say."""
    names = [None, *methods(library, drawn.op)]
    if drawn.special in ("NaN", "inf", "huge"):
        with np.errstate(all="ignore"):  # array-api-strict warns of infinities as NumPy does
            told = scanfield.explain(operation(drawn.op), **moved(library, drawn), **drawn.options).verdicts
        spreads = any("chunk" in row.candidate for row in told if row.taken and row.verb == "forward")
        names = [name for name in names if ("recurrent" in name if name else not spreads)]
    return data.draw(st.sampled_from(names))


def near(got: Any, want: np.ndarray, drawn: Drawn, what: str, floor: float = 0.0) -> None:
    with np.errstate(all="ignore"):
        if drawn.special in ("NaN", "inf", "huge"):
            # What is finite in the truth, and not so large that the dtype or a product of two has no room for it.
            safe = np.isfinite(want) & (np.abs(want) < 1e20)
            got, want = np.where(safe, got, 0.0), np.where(safe, want, 0.0)
        error = deviation(got, want, floor=max(floor, 1e-6))
    assert error <= LIMITS[drawn.dtype], (what, error)


def _read(drawn: Drawn, state: np.ndarray) -> float:
    """A part of what an output is made of: a query that stands across the state leaves rounding alone."""
    if "query" not in drawn.arrays:
        return 0.0
    states = [
        state,
        drawn.exact.get("initial_state"),
        drawn.exact["value"] if drawn.special != "none" else None,
    ]
    return 0.05 * _size(drawn.exact["query"]) * max(_size(x) for x in states if x is not None)


def _size(array: np.ndarray) -> float:
    """The largest absolute value, special ones left out."""
    sizes = np.abs(array)
    return float(np.max(sizes, initial=0.0, where=sizes < 1e3))  # not of NaN


def _least_norm(drawn: Drawn, name: str) -> float:
    """At most 1: by so much the gradient of what is normalised is divided, and its rounding, where nothing else is left."""
    if name not in ("query", "key") or not drawn.options.get("qk_l2norm"):
        return 1.0
    norms = np.linalg.norm(drawn.exact[name], axis=-1)
    return float(np.min(norms, initial=1.0, where=norms > 0))


@pytest.mark.parametrize("op", OPERATIONS)
@fuzz
@seed(SEED)
@given(data=st.data())
def test_forward(library: Library, op: str, data: st.DataObject) -> None:
    drawn = data.draw(calls(op, dtypes(library), tidy=library.name == "jax"))
    given_ = moved(library, drawn)
    before = snapshot(given_, library)
    method = chosen(data, library, drawn)
    with np.errstate(all="ignore"):
        result = operation(op)(**given_, **drawn.options, method=method)
    assert snapshot(given_, library) == before
    with np.errstate(all="ignore"):
        truth = reference.forward(op, drawn.exact, **_without_chunks(drawn.options))
    near(library.numpy(result.output), truth.output, drawn, "output", floor=_read(drawn, truth.final_state))
    near(library.numpy(result.final_state), truth.final_state, drawn, "final state")


@pytest.mark.parametrize("op", OPERATIONS)
@fuzz
@seed(SEED)
@given(data=st.data())
def test_gradients(library: Library, op: str, data: st.DataObject) -> None:
    drawn = data.draw(calls(op, dtypes(library), tidy=library.name == "jax"))
    if drawn.special in ("NaN", "inf", "huge"):
        return
    given_ = moved(library, drawn)
    before = snapshot(given_, library)
    result, pullback = scanfield.vjp(
        operation(op), **given_, **drawn.options, method=chosen(data, library, drawn)
    )
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    cotangents = [_like(rng, library.numpy(x)) for x in (result.output, result.final_state)]
    low = [library.array(x.astype(_kind(library, y))) for x, y in zip(cotangents, result[:2], strict=True)]
    gradients = library.numpys(dict(pullback(*low)))
    assert snapshot(given_, library) == before
    truth, pull = scanfield.vjp(operation(op), **drawn.exact, **drawn.options, method="generic.recurrent")
    exact = [x.astype(np.asarray(y).dtype) for x, y in zip(map(library.numpy, low), truth[:2], strict=True)]
    wanted = {name: np.asarray(x) for name, x in pull(*exact).items()}
    assert set(gradients) == set(wanted) == set(drawn.arrays)
    size = max((float(np.abs(x).max()) for x in wanted.values() if x.size), default=0.0)
    for name, want in wanted.items():
        near(gradients[name], want, drawn, f"gradient of {name}", floor=0.1 * size / _least_norm(drawn, name))


@pytest.mark.parametrize("op", OPERATIONS)
@fuzz
@seed(SEED)
@given(data=st.data())
def test_steps_are_the_sequence(library: Library, op: str, data: st.DataObject) -> None:
    drawn = data.draw(calls(op, dtypes(library), tidy=library.name == "jax"))
    options = {n: v for n, v in drawn.options.items() if n not in ("reverse", "cu_seqlens", "chunk_size")}
    sequences = [e for e in operation(op).record.inputs if e.role == "sequence" and e.name in drawn.arrays]
    timed = {e.name for e in sequences if _has_time(e, drawn.arrays[e.name])}
    if len(timed) < len(sequences):  # a token's arrays always have their batch: what is constant has no token
        return
    time = max(drawn.arrays[name].shape[1] for name in timed)
    if drawn.is_packed or drawn.special in ("NaN", "inf", "huge") or time == 0:
        return
    given_ = moved(library, drawn)
    state = given_.pop("initial_state", None)
    for t in range(time):
        token = {n: x[:, t if x.shape[1] > 1 else 0, ...] if n in timed else x for n, x in given_.items()}
        output, state = operation(op).step(state, **token, **options)
    truth = reference.forward(op, drawn.exact, **_without_chunks(options))
    near(library.numpy(output), truth.output[:, -1], drawn, "last output")
    near(library.numpy(state), truth.final_state, drawn, "state")


def _without_chunks(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "chunk_size"}


def _like(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
    drawn = rng.standard_normal(x.shape)
    return drawn + 1j * rng.standard_normal(x.shape) if x.dtype.kind == "c" else drawn


def _kind(library: Library, x: Any) -> Any:
    return np.asarray(library.raw(x)).dtype


def _has_time(entry: Any, x: np.ndarray) -> bool:
    layout = next(
        (known for known in entry.layouts if len([a for a in known.split() if a != "1"]) == x.ndim), ""
    )
    return "time" in layout.split()
