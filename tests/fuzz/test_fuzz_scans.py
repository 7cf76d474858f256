"""Random calls of every operation and verb against the float64 recurrence: `nox -s fuzz` draws ten thousand of each."""

from __future__ import annotations

import numpy as np
import pytest
import reference
from arrays import Library
from checks import operation
from comparing import (
    OPERATIONS,
    SEED,
    chosen,
    dtypes,
    fuzz,
    has_time,
    kind,
    least_norm,
    leave_out,
    like,
    moved,
    near,
    read_size,
    snapshot,
    without_chunks,
)  # fmt: skip
from drawing import SPECIAL, calls
from hypothesis import given, seed
from hypothesis import strategies as st

import scanfield

__all__ = ["leave_out"]
pytestmark = pytest.mark.backend("numpy", "strict", "torch", "jax", "dask")


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
        output, final_state = library.numpy(result.output), library.numpy(result.final_state)
    assert snapshot(given_, library) == before
    with np.errstate(all="ignore"):
        truth = reference.forward(op, drawn.exact, **without_chunks(drawn.options))
    # Of a huge state that is erased token by token some roundings are left, in forms that take several tokens together.
    # It may be so large between two tokens' boundaries only (gated_delta_product).
    finite = np.abs(truth.states)[np.isfinite(truth.states)]
    between = SPECIAL["huge"] ** (2 if op == "gated_delta_product" else 1)  # a key counts twice
    left = 1e-2 * float(finite.max(initial=between)) if drawn.special == "huge" else 0.0
    near(output, truth.output, drawn, "output", floor=max(left, read_size(drawn, truth.final_state)))
    near(final_state, truth.final_state, drawn, "final state", floor=left)


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
    cotangents = [like(rng, library.numpy(x)) for x in (result.output, result.final_state)]
    low = [library.array(x.astype(kind(library, y))) for x, y in zip(cotangents, result[:2], strict=True)]
    gradients = library.numpys(dict(pullback(*low)))
    assert snapshot(given_, library) == before
    truth, pull = scanfield.vjp(operation(op), **drawn.exact, **drawn.options, method="generic.recurrent")
    exact = [x.astype(np.asarray(y).dtype) for x, y in zip(map(library.numpy, low), truth[:2], strict=True)]
    wanted = {name: np.asarray(x) for name, x in pull(*exact).items()}
    assert set(gradients) == set(wanted) == set(drawn.arrays)
    size = max((float(np.abs(x).max()) for x in wanted.values() if x.size), default=0.0)
    for name, want in wanted.items():
        near(gradients[name], want, drawn, f"gradient of {name}", floor=0.1 * size / least_norm(drawn, name))


@pytest.mark.parametrize("op", OPERATIONS)
@fuzz
@seed(SEED)
@given(data=st.data())
def test_steps_are_the_sequence(library: Library, op: str, data: st.DataObject) -> None:
    drawn = data.draw(calls(op, dtypes(library), tidy=library.name == "jax"))
    options = {n: v for n, v in drawn.options.items() if n not in ("reverse", "cu_seqlens", "chunk_size")}
    sequences = [e for e in operation(op).record.inputs if e.role == "sequence" and e.name in drawn.arrays]
    timed = {e.name for e in sequences if has_time(e, drawn.arrays[e.name])}
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
    truth = reference.forward(op, drawn.exact, **without_chunks(options))
    near(library.numpy(output), truth.output[:, -1], drawn, "last output")
    near(library.numpy(state), truth.final_state, drawn, "state")
