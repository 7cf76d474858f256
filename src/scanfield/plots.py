"""Pictures of what scanfield finds; they need matplotlib (`pip install 'scanfield[plot]'`) and no window system.

`Fit.plot` of `scanfield.pinn`, `scanfield check --plot` and `scanfield bench --plot` draw theirs.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from scanfield.advice import class_of
from scanfield.arrays import Array
from scanfield.errors import ArgumentError, BackendError, DtypeError, ShapeError

__all__ = ["relevance"]

_LINE = 24  # tokens; what is longer goes on in the next line


def relevance(
    R: Array,
    tokens: Sequence[str] | None = None,
    *,
    path: str | os.PathLike[str] | None = None,
    title: str | None = None,
) -> Any:
    """A heat map of relevance over the tokens of one sequence: red speaks for the output, blue against it.

    Parameters
    ----------
    R
        (time,) or (time, channels), one number a token; channels are added up. An array of any library whose values are on
        the host.
    tokens
        time words to write into the cells; None for the positions 0, 1, ...
    path
        Also write the figure there; its ending says the format.
    title
        A line above it.

    Returns a matplotlib Figure. Raises `ShapeError` where R is not of one sequence or tokens are not as many, `DtypeError`
    for complex relevance, `ArgumentError` where a value is not finite or not on the host, and `BackendError` without
    matplotlib.

    >>> figure = relevance(np.array([0.1, 2.0, -0.4]), ["the", "red", "door"])  # doctest: +SKIP
    >>> figure.savefig("relevance.png")                                         # doctest: +SKIP
    """
    values = _per_token(R)
    words = [str(i) for i in range(values.shape[0])] if tokens is None else [str(word) for word in tokens]
    if len(words) != values.shape[0]:
        raise ShapeError(f"tokens has {len(words)} words, R has {values.shape[0]} tokens: one word a token")
    figure_class = figure_of("relevance")

    across = min(_LINE, max(1, values.shape[0]))
    lines = max(1, -(-values.shape[0] // across))
    cells = np.full(lines * across, np.nan)
    cells[: values.shape[0]] = values
    bound = float(np.max(np.abs(values), initial=0.0)) or 1.0
    figure = figure_class(figsize=(1 + 0.55 * across, 0.9 + 0.5 * lines), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(cells.reshape(lines, across), cmap="RdBu_r", vmin=-bound, vmax=bound, aspect="auto")
    for i, word in enumerate(words):
        strong = abs(values[i]) > 0.6 * bound  # white on dark
        axes.text(
            i % across,
            i // across,
            _plain(word),
            ha="center",
            va="center",
            fontsize="small",
            color="white" if strong else "black",
            parse_math=False,  # a token may hold a dollar sign
        )
    axes.set_xticks([])
    axes.set_yticks(range(lines), [str(across * i) for i in range(lines)])
    axes.set_ylabel("token")
    if title is not None:
        axes.set_title(title, parse_math=False)
    figure.colorbar(image, label="relevance")
    if path is not None:
        figure.savefig(os.fspath(path), dpi=120)
    return figure


def figure_of(what: str) -> Any:
    """matplotlib's Figure class, without pyplot; BackendError, naming what needed it, where it is missing."""
    try:
        return importlib.import_module("matplotlib.figure").Figure
    except ImportError:
        raise BackendError(
            f"the plot of {what} needs matplotlib, which is not installed: pip install 'scanfield[plot]'"
        ) from None


def _per_token(R: Array) -> np.ndarray:
    try:
        values = np.asarray(R)
    except (TypeError, RuntimeError) as error:
        raise ArgumentError(
            f"R is a {class_of(R)} that NumPy cannot read ({error}); "
            f"pass it as a host array: cupy.asnumpy(R), R.detach().cpu()"
        ) from None
    if values.dtype.kind not in "fiu":
        raise DtypeError(f"R has dtype {values.dtype}; relevance is real numbers")
    if values.ndim not in (1, 2):
        raise ShapeError(
            f"R has shape {values.shape}; one sequence is drawn, (time,) or (time, channels): R[0] is the first"
        )
    values = values.astype(np.float64)
    values = values if values.ndim == 1 else values.sum(axis=1)
    if not np.isfinite(values).all():
        raise ArgumentError(f"R is not finite at token {int(np.argmin(np.isfinite(values)))}")
    return values


def _plain(word: str) -> str:
    """A word that a cell can show: no line breaks, visible spaces, eight characters at most."""
    shown = "".join(c if c.isprintable() else "\N{MIDDLE DOT}" for c in word)
    return shown if len(shown) <= 8 else shown[:7] + "\N{HORIZONTAL ELLIPSIS}"
