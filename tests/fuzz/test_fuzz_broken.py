"""Calls with one argument spoilt: they work or say what is wrong, in the library's own errors, and change nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from arrays import Library
from checks import operation
from comparing import OPERATIONS, SEED, fuzz, leave_out, moved, snapshot
from drawing import calls
from hypothesis import given, seed
from hypothesis import strategies as st

import scanfield

__all__ = ["leave_out"]
pytestmark = pytest.mark.backend("numpy", "strict", "torch")


class Odd:
    """An object that is no array and no number."""

    def __bool__(self) -> bool:
        raise TypeError("neither true nor false")


SPOILT_ARRAYS = {
    "None": lambda x: None,
    "text": lambda x: "text",
    "a number": lambda x: 3.5,
    "a list": lambda x: [[1.0, 2.0], [3.0, 4.0]],
    "an object": lambda x: Odd(),
    "an axis more": lambda x: x[None, ...],
    "an axis less": lambda x: x[0, ...] if x.ndim and x.shape[0] else x,
    "no axis": lambda x: x.reshape(-1)[0:1].reshape(()) if x.size else x,
    "one longer": lambda x: np.concatenate([x, x[..., -1:]], axis=-1) if x.ndim else x,
    "first one longer": lambda x: np.concatenate([x, x[-1:]], axis=0) if x.ndim else x,
    "integers": lambda x: np.zeros(x.shape, np.int64),
    "truths": lambda x: np.zeros(x.shape, bool),
    "complex": lambda x: x.astype(np.complex128),
    "another float": lambda x: x.real.astype(np.float64),
    "objects": lambda x: np.full(x.shape, None, dtype=object),
    "words": lambda x: np.full(x.shape, "a"),
    "dates": lambda x: np.zeros(x.shape, "datetime64[s]"),
    "records": lambda x: np.zeros(x.shape, [("a", float)]),
    "another byte order": lambda x: x.astype(x.dtype.newbyteorder()),
    "masked": np.ma.masked_invalid,
    "long double": lambda x: x.astype(np.clongdouble if x.dtype.kind == "c" else np.longdouble),
    "empty": lambda x: x[:0],
}
SPOILT_OPTIONS = [
    "text", -1, 0, 1.5, float("nan"), float("inf"), Odd(), [1], (0.4, 0.1), (None, None), np.ones(3), 10**30, b"", {}, 2 + 1j,
]  # fmt: skip
SPOILT_PACKS = [
    [], [0], [1, 5], [0, 3], [0, 9999], [0, 5, 3], [-1, 5], [0.0, 5.0], [[0, 5]], "pack", np.array(5), np.array([0, 2**40]),
    [None], np.array([0, 5], np.uint8), np.array([0.0, np.nan]), Odd(),
]  # fmt: skip


@pytest.mark.parametrize("op", OPERATIONS)
@fuzz
@seed(SEED)
@given(data=st.data())
def test_one_argument_spoilt(library: Library, op: str, data: st.DataObject) -> None:
    drawn = data.draw(calls(op, ("float32", "float64"), tidy=True))
    given_: dict[str, Any] = moved(library, drawn)
    options: dict[str, Any] = dict(drawn.options)
    what = data.draw(st.sampled_from(["array", "array", "option", "pack", "keyword", "method", "states_at"]))
    if what == "array":
        name = data.draw(st.sampled_from(sorted(given_)))
        spoil = SPOILT_ARRAYS[data.draw(st.sampled_from(sorted(SPOILT_ARRAYS)))]
        spoilt = spoil(np.asarray(drawn.arrays[name]))
        if isinstance(spoilt, np.ndarray) and library.name != "numpy":
            try:
                spoilt = library.array(spoilt, None)
            except Exception:  # the library has no such arrays
                return
        given_[name] = spoilt
    elif what == "option":
        name = data.draw(
            st.sampled_from(["reverse", "scale", "chunk_size", "qk_l2norm", "delta_softplus", "dt_limit"])
        )
        options[name] = data.draw(st.sampled_from(SPOILT_OPTIONS))
    elif what == "pack":
        options["cu_seqlens"] = data.draw(st.sampled_from(SPOILT_PACKS))
    elif what == "keyword":
        options[data.draw(st.sampled_from(["g", "alpha", "h0", "Reverse", "x0"]))] = 1
    elif what == "method":
        options["method"] = data.draw(
            st.sampled_from(["generic", "numpy.numba2", "", 3, Odd(), "torch.numba", None])
        )
    else:
        options["states_at"] = data.draw(
            st.sampled_from(["all", "chunks", [0, 5], [99], [-1], 3, [1.5], Odd(), [3, 2], [True], ["a"]])
        )
    known = {name: x for name, x in given_.items() if library.is_array(x) and not _is_objects(x)}
    before = snapshot(known, library)
    verb = data.draw(st.sampled_from(["forward", "vjp", "step", "explain"]))
    try:
        with np.errstate(all="ignore"):
            if verb == "forward":
                operation(op)(**given_, **options)
            elif verb == "vjp":
                result, pullback = scanfield.vjp(operation(op), **given_, **options)
                pullback(result.output)
            elif verb == "step":
                state = given_.pop("initial_state", None)
                operation(op).step(state, **given_, **options)
            else:
                str(scanfield.explain(operation(op), **given_, **options))
    except scanfield.ScanfieldError:
        pass  # whatever else is raised fails the test
    assert snapshot(known, library) == before


def _is_objects(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.dtype.hasobject
