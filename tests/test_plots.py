"""The heat map of relevance: it draws what it was given, and says what is wrong with it."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import scanfield
from scanfield import plots

pytest.importorskip("matplotlib", reason="plots need matplotlib")


def drawn(figure):
    """The cells of the picture, and the words in them."""
    axes = figure.axes[0]
    cells = axes.images[0].get_array()
    return np.ma.filled(np.ma.masked_invalid(cells), np.nan), [text.get_text() for text in axes.texts]


def test_each_token_is_a_cell_with_its_word(tmp_path):
    R = np.random.default_rng(0).normal(size=30).astype(np.float32)
    words = [f"w{i}" for i in range(30)]
    figure = plots.relevance(R, words, path=tmp_path / "map.png", title="of $5 words")
    cells, shown = drawn(figure)
    assert shown == words
    np.testing.assert_array_equal(cells.reshape(-1)[:30], R.astype(np.float64))
    assert np.isnan(cells.reshape(-1)[30:]).all()
    image = figure.axes[0].images[0]
    assert image.norm.vmax == -image.norm.vmin == abs(R).max()  # 0 is white
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def test_channels_are_added_and_positions_stand_for_words():
    R = np.arange(12.0).reshape(4, 3)
    cells, shown = drawn(plots.relevance(R))
    np.testing.assert_array_equal(cells.reshape(-1), R.sum(axis=1))
    assert shown == ["0", "1", "2", "3"]


def test_odd_words_and_empty_maps(tmp_path):
    _, shown = drawn(
        plots.relevance(np.zeros(3), ["a\nb", "$x", "very long token"], path=tmp_path / "map.svg")
    )
    assert shown == ["a\N{MIDDLE DOT}b", "$x", "very lo\N{HORIZONTAL ELLIPSIS}"]
    assert drawn(plots.relevance(np.zeros(0)))[1] == []


@pytest.mark.parametrize(
    ("R", "tokens", "error", "said"),
    [
        (np.zeros(3), ["a"], scanfield.ShapeError, "1 words, R has 3 tokens"),
        (np.zeros((2, 3, 4)), None, scanfield.ShapeError, "R\\[0\\]"),
        (np.float64(1.0), None, scanfield.ShapeError, "one sequence"),
        (np.zeros(3, complex), None, scanfield.DtypeError, "complex128"),
        (np.array(["a"]), None, scanfield.DtypeError, "real numbers"),
        (np.array([0.0, np.nan]), None, scanfield.ArgumentError, "token 1"),
    ],
)
def test_what_cannot_be_drawn_is_told(R, tokens, error, said):
    with pytest.raises(error, match=said):
        plots.relevance(R, tokens)


def test_arrays_that_are_not_on_the_host_are_told():
    class OnACard:
        def __array__(self, *args, **options):
            raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    with pytest.raises(scanfield.ArgumentError, match=r"cupy\.asnumpy"):
        plots.relevance(OnACard())


def test_without_matplotlib_the_error_has_the_line_that_brings_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(scanfield.BackendError, match=r"pip install 'scanfield\[plot\]'"):
        plots.relevance(np.zeros(3))
