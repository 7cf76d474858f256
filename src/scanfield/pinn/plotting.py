"""The picture of a fit, with matplotlib's figure class alone: no window system is asked for."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scanfield.errors import ArgumentError
from scanfield.pinn.extras import need

if TYPE_CHECKING:
    from scanfield.pinn.fit import Fit

__all__ = ["draw", "picture"]

_FEW = 30  # records: each has its mark


def picture(name: str, path: str | os.PathLike[str]) -> Path:
    """The file that matplotlib will write, a png where its name has no ending; ArgumentError for an ending it has not."""
    canvas = need("matplotlib.backend_bases", "plot").FigureCanvasBase
    allowed = sorted(canvas.get_supported_filetypes())
    place = Path(path)
    place = place if place.suffix or not place.name else place.with_suffix(".png")
    if place.suffix[1:].lower() not in allowed:
        raise ArgumentError(f"{name} = {os.fspath(path)!r}: allowed endings are {', '.join(allowed)}")
    return place


def draw(fit: Fit, exact: Callable[[np.ndarray], np.ndarray] | None = None) -> Any:
    """The field, its error where `exact` is given, and the history."""
    panels = 2 if exact is None else 3
    figure = need("matplotlib.figure", "plot").Figure(figsize=(4.5 * panels, 4), layout="constrained")
    # Squares of equal aspect beside their scales are laid out some dots off, and a label would be cut.
    figure.get_layout_engine().set(w_pad=0.12)
    axes = list(figure.subplots(1, panels))
    _field(
        axes[0],
        fit,
        "field, real part" if fit.problem.complex_field else "field",
        lambda x: np.real(fit.field(x)),
        exact,
    )
    if exact is not None:
        _field(axes[1], fit, "|field - exact|", lambda x: np.abs(fit.field(x) - exact(x)), None)
    _history(axes[-1], fit)
    return figure


def _field(
    axis: Any, fit: Fit, title: str, values: Callable[..., np.ndarray], exact: Callable[..., Any] | None
) -> None:
    problem = fit.problem
    low, high = problem.domain.lower, problem.domain.upper
    axis.set(title=title, xlabel="x")
    if problem.dimensions == 1:
        x = np.linspace(low[0], high[0], 500)[:, None]
        axis.plot(x[:, 0], values(x), label="network")
        if exact is not None:
            axis.plot(x[:, 0], np.real(exact(x)), "--", label="exact")
            axis.legend()
        return
    # In three dimensions: the slice through the middle of the third axis.
    ends = np.linspace(low[0], high[0], 150), np.linspace(low[1], high[1], 150)
    mesh = np.meshgrid(*ends, indexing="xy")
    columns = [m.reshape(-1) for m in mesh]
    columns += [np.full(columns[0].shape, 0.5 * (low[i] + high[i])) for i in range(2, problem.dimensions)]
    x = np.stack(columns, axis=1)
    centre = 0.5 * (np.asarray(low) + np.asarray(high))
    inside = problem.domain.contains(x + 1e-9 * (centre - x))  # the edges belong to the picture
    shown = np.full(x.shape[0], np.nan)
    shown[inside] = values(x[inside])
    image = axis.pcolormesh(*ends, shown.reshape(mesh[0].shape), shading="nearest", rasterized=True)
    axis.set(ylabel="y", aspect="equal")
    axis.figure.colorbar(image, ax=axis, shrink=0.8)


def _history(axis: Any, fit: Fit) -> None:
    iterations = [record.iteration for record in fit.history]
    with np.errstate(over="ignore"):  # a training that blew up is drawn too
        squared = np.asarray([record.held_out for record in fit.history]) ** 2
    loss = np.asarray([record.loss for record in fit.history])
    curves = {"loss": loss, "held-out residual, squared": squared}
    for label, values in curves.items():
        # A line through one point is nothing to see.
        axis.semilogy(
            iterations, np.maximum(values, 1e-300), label=label, marker="." if values.size < _FEW else None
        )
    axis.set(title=f"stopped: {fit.reason}", xlabel="iteration")
    axis.legend()
