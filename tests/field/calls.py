"""Runs one operation on NumPy data in the library under test, and the float64 truth of the same numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import arrays
import numpy as np
import pytest
import reference
from examples import COMPILED_FOR

import scanfield

Data = Mapping[str, np.ndarray]

# The libraries that the rows are for.
GENERIC = pytest.mark.backend("numpy", "strict", "torch", "jax", "dask")
# A generic form is many tasks a token on Dask: there the graphs over blocks run, and few short rows elsewhere.
READY = pytest.mark.backend("numpy", "strict", "torch", "jax")

# The forms of the gated delta rule that have to agree in every one of its rows; None is what size chooses.
FORMS = (
    None,
    pytest.param("generic.recurrent", marks=READY),
    pytest.param("generic.chunk", marks=READY),
    *COMPILED_FOR,
)
# The same where the row is not about the form: JAX compiles the generic ones for many seconds at every new shape.
QUICK = pytest.mark.backend("numpy", "strict", "torch")
CHEAP_FORMS = (
    None,
    pytest.param("generic.recurrent", marks=QUICK),
    pytest.param("generic.chunk", marks=QUICK),
    *COMPILED_FOR,
)


def needs_every_length(library: arrays.Library, length: int, few: tuple[int, ...]) -> None:
    """Skip most lengths on JAX, which compiles for half a second at every new one; `few` are those at the edges."""
    if library.name == "jax" and length not in few:
        pytest.skip(f"JAX compiles at every new length; there {', '.join(map(str, few))} stand for all")


def call(
    library: arrays.Library, operation: str, inputs: Data, dtype: str = "float64", **options: Any
) -> Any:
    """The operation's result, in arrays of the library."""
    return getattr(scanfield, operation)(**library.arrays(inputs, dtype), **options)


def pull(
    library: arrays.Library,
    operation: str,
    inputs: Data,
    d_output: np.ndarray | None,
    d_state: np.ndarray | None,
    dtype: str = "float64",
    **options: Any,
) -> tuple[Any, dict[str, Any]]:
    """The result and a gradient of each input, in arrays of the library."""
    result, pullback = scanfield.vjp(
        getattr(scanfield, operation), **library.arrays(inputs, dtype), **options
    )
    gradients = dict(pullback(library.array(d_output, dtype), library.array(d_state, dtype)))
    assert set(gradients) == set(inputs), f"gradients of {sorted(gradients)}, inputs {sorted(inputs)}"
    return result, gradients


def candidates(operation: str, inputs: Mapping[str, Any], **options: Any) -> Iterator[str]:
    """The names of all that can run the forward of this call (arrays of the library under test)."""
    for verdict in scanfield.explain(getattr(scanfield, operation), **inputs, **options).verdicts:
        if verdict.verb == "forward" and not verdict.reason.startswith("runs on "):  # another device
            yield verdict.candidate


def rounded(inputs: Data, dtype: str) -> dict[str, np.ndarray]:
    """The inputs in `dtype` and back in float64: what the operation was really given."""
    return {name: arrays.wide(np.asarray(x).astype(arrays.numpy_dtype(dtype))) for name, x in inputs.items()}


# -- gradients of the derived operations, from the written ones ----------------------------------------------------
def truth_vjp(
    operation: str, inputs: Data, d_output: Any, d_state: Any, **options: Any
) -> dict[str, np.ndarray]:
    """As `reference.vjp`, but quick for the derived operations: each is the base operation with some gates tied."""
    if operation in reference.WRITTEN_VJPS:
        return reference.vjp(operation, inputs, d_output, d_state, **options)
    if operation == "ssd":
        return _ssd_vjp(inputs, d_output, d_state, **options)
    given = dict(inputs)
    beta = given.pop("beta", None)
    if beta is not None:  # erase = write = beta, one number a head
        given |= {"erase": beta, "write": beta}
    gradients = reference.gdn2_vjp(d_output, d_state, **given, **options)
    if beta is not None:
        gradients["beta"] = gradients.pop("erase") + gradients.pop("write")
    return gradients


def _ssd_vjp(inputs: Data, d_output: Any, d_state: Any, **options: Any) -> dict[str, np.ndarray]:
    """ssd is the selective scan over heads * P channels, where the P channels of a head share dt and A."""
    x, dt, A, B, C = (np.asarray(inputs[name]) for name in ("x", "dt", "A", "B", "C"))
    assert set(inputs) == {"x", "dt", "A", "B", "C"}, "no more is needed here"
    batch, time, heads, size = x.shape
    state = B.shape[-1]
    gradients = reference.selective_scan_vjp(
        np.reshape(d_output, (batch, time, heads * size)),
        None if d_state is None else np.reshape(d_state, (batch, heads * size, state)),
        u=x.reshape(batch, time, heads * size),
        delta=np.repeat(dt, size, axis=2),
        A=np.broadcast_to(np.repeat(A, size)[:, None], (heads * size, state)),
        B=B,
        C=C,
        **options,
    )
    return {
        "x": gradients["u"].reshape(x.shape),
        "dt": gradients["delta"].reshape(x.shape).sum(axis=-1),
        "A": gradients["A"].reshape(heads, size, state).sum(axis=(1, 2)),
        "B": gradients["B"],
        "C": gradients["C"],
    }
