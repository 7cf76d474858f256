"""Random calls of what is made of an operation: a sequence cut in two, maps of blocks, relevance."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import reference
from arrays import Library
from checks import operation
from comparing import (
    OPERATIONS,
    SEED,
    dtypes,
    fuzz,
    has_time,
    leave_out,
    like,
    moved,
    near,
    snapshot,
    without_chunks,
)
from drawing import Drawn, calls
from hypothesis import given, seed
from hypothesis import strategies as st

import scanfield
from scanfield.affine import advance

__all__ = ["leave_out"]
pytestmark = pytest.mark.backend("numpy", "strict", "torch", "jax", "dask")


def sequence(data: st.DataObject, op: str, names: tuple[str, ...], tidy: bool) -> Drawn | None:
    """A call with tokens and no pack, and with numbers that stay finite."""
    drawn = data.draw(calls(op, names, tidy=tidy))
    return None if drawn.is_packed or drawn.special in ("NaN", "inf", "huge") else drawn


def parts(drawn: Drawn, given_: dict[str, Any], cut: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arrays of the tokens before a cut, and of those behind it; what holds for all of them is in both."""
    timed = {
        e.name
        for e in operation(drawn.op).record.inputs
        if e.role == "sequence" and e.name in given_ and has_time(e, drawn.arrays[e.name])
    }
    halves = [
        {n: x[:, some, ...] if n in timed and x.shape[1] > 1 else x for n, x in given_.items()}
        for some in (slice(None, cut), slice(cut, None))
    ]
    return halves[0], halves[1]


@pytest.mark.parametrize("op", OPERATIONS)
@fuzz
@seed(SEED)
@given(data=st.data())
def test_a_cut_anywhere(library: Library, op: str, data: st.DataObject) -> None:
    """The state goes on from one part to the other, and each part is a map of it."""
    drawn = sequence(data, op, dtypes(library), library.name == "jax")
    truth = drawn and reference.forward(op, drawn.exact, **without_chunks(drawn.options))
    if truth is None or truth.output.shape[1] < 2:
        return
    given_ = moved(library, drawn)
    state, before = given_.pop("initial_state", None), snapshot(given_, library)
    halves = parts(drawn, given_, data.draw(st.integers(1, truth.output.shape[1] - 1)))
    first, second = reversed(halves) if drawn.options.get("reverse") else halves
    call = operation(op)
    one = call(**first, initial_state=state, **drawn.options)
    two = call(**second, initial_state=one.final_state, **drawn.options)
    pieces = (two, one) if drawn.options.get("reverse") else (one, two)
    got = np.concatenate([library.numpy(x.output) for x in pieces], axis=1)
    size = max(float(np.abs(x).max(initial=0.0)) for x in truth[:2])
    near(got, truth.output, drawn, "output", floor=0.05 * size)
    near(library.numpy(two.final_state), truth.final_state, drawn, "final state")

    left, right = (scanfield.summarise(call, **some, **drawn.options) for some in (first, second))
    whole = scanfield.compose(left, right)
    gone = whole.state if state is None else advance(whole, library.xp.astype(state, whole.state.dtype))
    near(library.numpy(gone), truth.final_state, drawn, "state by the map")
    assert snapshot(given_, library) == before


@pytest.mark.parametrize("op", OPERATIONS)
@fuzz
@seed(SEED)
@given(data=st.data())
def test_relevance(library: Library, op: str, data: st.DataObject) -> None:
    """That of the token-by-token form in float64, for relevance as large as the output it belongs to."""
    drawn = sequence(data, op, dtypes(library), library.name == "jax")
    if drawn is None or "z" in drawn.arrays:
        return
    exact = drawn.exact
    truth = reference.forward(op, exact, **without_chunks(drawn.options))
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    size = np.abs(truth.output)
    # An output that nearly cancels is divided by: its rounding would be most of the relevance.
    R = np.where(size > 0.1 * np.max(size, initial=0.0), size, 0.0) * like(rng, size)
    wanted = scanfield.relevance(
        operation(op), R, **exact, **drawn.options, epsilon=0.0, method="generic.recurrent"
    )
    given_ = moved(library, drawn)
    before = snapshot(given_, library)
    low = library.array(R.astype(drawn.dtype if drawn.dtype != "bfloat16" else "float32"), None)
    got = scanfield.relevance(operation(op), low, **given_, **drawn.options, epsilon=0.0)
    for name in ("value", "initial_state"):
        want = getattr(wanted, name)
        if want is not None:
            most = 10 * float(np.max(np.abs(want), initial=0.0))
            near(library.numpy(getattr(got, name)), np.asarray(want), drawn, name, floor=most)
    assert snapshot(given_, library) == before
