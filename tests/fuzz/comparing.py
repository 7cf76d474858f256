"""How random calls run on a library and are compared with what is true."""

from __future__ import annotations

import os
import zlib
from typing import Any

import numpy as np
from arrays import Library, deviation
from checks import operation
from drawing import Drawn
from examples import methods
from hypothesis import settings
from hypothesis import strategies as st

import scanfield

OPERATIONS = [record.name for record in scanfield.operations()]
DRAWS = int(os.environ.get("SCANFIELD_FUZZ_DRAWS", "8"))
SEED = int(os.environ.get("SCANFIELD_FUZZ_SEED", "0"))
fuzz = settings(max_examples=DRAWS, derandomize="SCANFIELD_FUZZ_SEED" not in os.environ, deadline=None)


def leave_out(session: str, test: str, given: dict[str, Any]) -> bool:
    """Read-only arrays are among the ways in which arrays lie.

    JAX, which compiles for each draw, and Dask, for which each is some hundred tasks, are for `nox -s fuzz`.
    """
    return given.get("library") == "readonly" or (
        session in ("jax", "dask") and "SCANFIELD_FUZZ_SEED" not in os.environ
    )


LIMITS = {"float64": 1e-11, "float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}


def dtypes(library: Library) -> tuple[str, ...]:
    return tuple(d for d in ("float64", "float32", "float16", "bfloat16") if d in library.dtypes)


def moved(library: Library, drawn: Drawn) -> dict[str, Any]:
    """The arrays in the library, lying as they do where it can have that."""
    if library.name in ("numpy", "readonly"):
        return dict(drawn.arrays)
    arrays = {name: library.array(np.asarray(x), None) for name, x in drawn.arrays.items()}
    if library.name == "dask":
        arrays = {name: x.rechunk(_blocks(drawn.arrays[name])) for name, x in arrays.items()}
    return arrays


def _blocks(x: np.ndarray) -> tuple[tuple[int, ...], ...]:
    """Sizes of blocks: up to three along time, the second axis, and two along the others."""
    rng = np.random.default_rng(zlib.crc32(x.tobytes()))
    cuts = [rng.integers(0, n + 1, 2 if axis == 1 else 1).tolist() for axis, n in enumerate(x.shape)]
    bounds = [sorted({0, n, *some}) for n, some in zip(x.shape, cuts, strict=True)]
    return tuple(tuple(np.diff(some).tolist()) or (0,) for some in bounds)


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


def read_size(drawn: Drawn, state: np.ndarray) -> float:
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


def least_norm(drawn: Drawn, name: str) -> float:
    """At most 1: by so much the gradient of what is normalised is divided, and its rounding, where nothing else is left."""
    if name not in ("query", "key") or not drawn.options.get("qk_l2norm"):
        return 1.0
    norms = np.linalg.norm(drawn.exact[name], axis=-1)
    return float(np.min(norms, initial=1.0, where=norms > 0))


def without_chunks(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "chunk_size"}


def like(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
    drawn = rng.standard_normal(x.shape)
    return drawn + 1j * rng.standard_normal(x.shape) if x.dtype.kind == "c" else drawn


def kind(library: Library, x: Any) -> Any:
    return np.asarray(library.raw(x)).dtype


def has_time(entry: Any, x: np.ndarray) -> bool:
    layout = next(
        (known for known in entry.layouts if len([a for a in known.split() if a != "1"]) == x.ndim), ""
    )
    return "time" in layout.split()
