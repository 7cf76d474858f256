"""What writes into an array of the caller's refuses arrays that do not fit, before a number is written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pinn_draws as draws
import pytest
from arrays import Library, library

from scanfield import pinn
from scanfield.errors import ArgumentError, DtypeError, ShapeError
from scanfield.pinn.placing import to_host

A = np.arange(12.0).reshape(3, 4)


def test_numbers_of_every_library_come_to_the_host(library: Library):
    for dtype in ("float64", "float32"):
        found = to_host(library.array(A, dtype))
        assert type(found) is np.ndarray and found.dtype == dtype and np.array_equal(found, A)


@pytest.mark.parametrize(
    ("out", "error", "words"),
    [
        (np.zeros((3, 5)), ShapeError, r"out has shape \(3, 5\); expected \(3, 4\)"),
        (np.zeros((3, 4), np.float32), DtypeError, "a is float64, out is float32"),
    ],
)
def test_a_place_that_does_not_fit(out: np.ndarray, error: type[Exception], words: str):
    for write in (pinn.sub_out, pinn.tanh_deriv_mul_out):
        with pytest.raises(error, match=words.replace("a is", "(a|h) is")):
            write(A, A, out)
    assert not out.any()


def test_a_place_that_is_read_too():
    """Memory that meets: the array itself, and a stretch of it that another one reaches into."""
    whole = np.arange(20.0)
    for first in (0, 5, 7):
        before, out = whole.copy(), whole[:8].reshape(2, 4)
        with pytest.raises(ArgumentError, match="out shares memory with a; pass an array of its own"):
            pinn.sub_out(whole[first : first + 8].reshape(2, 4), A[:2], out)
        assert np.array_equal(whole, before)
    beside = whole[8:16].reshape(2, 4)  # it begins where the other ends
    pinn.sub_out(beside, A[:2], out)
    assert np.array_equal(out, beside - A[:2])
    nothing = np.zeros((0, 4))
    assert pinn.sub_out(nothing, nothing, nothing) is None  # no memory is shared


def test_a_layer_whose_arrays_do_not_fit():
    network = draws.network(library("numpy"), 2)
    given: dict[str, Any] = {
        "bar": np.ones((6, 7)),
        "h": np.ones((6, 7)),
        "before": np.ones((6, 10)),
        "W": np.ones((7, 10)),
    }
    for name, array, words in (
        ("W", np.ones((5, 10)), r"dL_dh has shape \(6, 7\), W has \(5, 10\); expected \(n, out\)"),
        ("bar", np.ones((2, 6, 7)), r"dL_dh has shape \(2, 6, 7\), W has"),
        ("h", np.ones((6, 8)), r"h has shape \(6, 8\), dL_dh has \(6, 7\)"),
        ("before", np.ones((6, 9)), r"h_prev has shape \(6, 9\); expected \(6, 10\)"),
    ):
        workspace = pinn.Workspace.of(network, 6)
        with pytest.raises(ShapeError, match=words):
            pinn.layer_backward_inplace(*(given | {name: array}).values(), 0, True, workspace)


@pytest.mark.parametrize(
    ("bar", "x", "B", "words"),
    [
        ((5, 6), (5, 3), (2, 3), r"x has shape \(5, 3\), B has \(2, 3\); expected \(n, d\), \(d, features\)"),
        ((5, 6), (5,), (2, 3), r"x has shape \(5,\), B has \(2, 3\)"),
        (
            (5, 5),
            (5, 2),
            (2, 3),
            r"dL_dphi has shape \(5, 5\); expected \(5, 6\), sines, then cosines, or jets .*\(4, 5, 6\)",
        ),
    ],
)
def test_frequencies_whose_arrays_do_not_fit(bar: Any, x: Any, B: Any, words: str):
    out = np.full((2, 3), 7.0)
    with pytest.raises(ShapeError, match=words):
        pinn.fourier_grad(np.ones(x), np.ones(bar), np.ones(B), out)
    assert (out == 7).all()


def test_values_of_functions_that_say_where_something_holds_or_what_they_take_not():
    """A function of truth values is 1 where it holds; one without a signature is called with the points alone."""

    class Compiled:
        __signature__ = "none"

        def __call__(self, x: np.ndarray) -> np.ndarray:
            return x[:, 0] > 0.5

    from scanfield.pinn.values import evaluate

    x = np.asarray([[0.2], [0.7], [0.9]])
    found = evaluate("source", Compiled(), x, np.ones((3, 1)))
    assert found.dtype == np.float64 and found.tolist() == [0.0, 1.0, 1.0]
