"""What a plot of a fit shows: the field on a line, in a plane or on the middle slice, its error, the history."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from scanfield import pinn
from scanfield.pinn.plotting import draw

pytest.importorskip("matplotlib")

HISTORY = [SimpleNamespace(iteration=10 * i, loss=0.1**i, held_out=0.2**i) for i in range(3)]


def fit(domain: pinn.Domain, field: Any, **settings: Any) -> Any:
    problem = pinn.Helmholtz(domain, 2.0, boundary=pinn.Dirichlet(1.0), **settings)
    return SimpleNamespace(problem=problem, field=field, history=HISTORY, reason="it is done")


def test_a_line_with_the_exact_field():
    given = fit(pinn.Interval(1, 3), lambda x: np.exp(1j * x[:, 0]), complex_field=True)
    left, middle, right = draw(given, lambda x: np.exp(1j * x[:, 0]) + 0.5).axes
    network, exact = left.lines
    x = np.linspace(1, 3, 500)
    assert left.get_title() == "field, real part"
    assert np.allclose(network.get_xdata(), x) and np.allclose(network.get_ydata(), np.cos(x))
    assert np.allclose(exact.get_ydata(), np.cos(x) + 0.5) and left.get_legend() is not None
    (error,) = middle.lines
    assert middle.get_title() == "|field - exact|" and np.allclose(error.get_ydata(), 0.5)
    loss, held_out = right.lines
    assert right.get_title() == "stopped: it is done" and list(loss.get_xdata()) == [0, 10, 20]
    assert np.allclose(loss.get_ydata(), [1, 0.1, 0.01]) and np.allclose(
        held_out.get_ydata(), [1, 0.04, 0.0016]
    )


@pytest.mark.parametrize(
    ("domain", "third"), [(pinn.Disk((1, 2), 1.0), None), (pinn.Box((0, 1, 2), (2, 3, 6)), 4.0)]
)
def test_a_plane_or_the_slice_through_the_middle(domain: pinn.Domain, third: float | None):
    seen: list[np.ndarray] = []

    def field(x: np.ndarray) -> np.ndarray:
        seen.append(x)
        return x[:, 0] + 10.0 * x[:, 1]

    axis = draw(fit(domain, field)).axes[0]
    (image,) = axis.collections
    x, y = np.meshgrid(np.linspace(0, 2, 150), np.linspace(1, 3, 150))
    shown = np.ma.filled(image.get_array(), np.nan).reshape(150, 150)
    inside = (x - 1) ** 2 + (y - 2) ** 2 <= 1 if third is None else np.ones_like(x, dtype=bool)
    assert np.array_equal(np.isfinite(shown), inside)
    assert np.allclose(shown[inside], (x + 10 * y)[inside])
    assert axis.get_title() == "field" and axis.get_ylabel() == "y"
    assert third is None or np.all(seen[0][:, 2] == third)


def test_a_history_of_one_record_is_seen():
    given = fit(pinn.Interval(0, 1), lambda x: x[:, 0])
    for count, mark in ((1, "."), (3, "."), (300, "None")):
        given.history = (HISTORY * 100)[:count]
        assert [line.get_marker() for line in draw(given).axes[-1].lines] == [mark, mark]


@pytest.mark.parametrize("half", [1.0, 100.0])
def test_no_label_of_a_plane_is_cut(tmp_path, half: float):
    given = fit(pinn.Box((-half, -half), (half, half)), lambda x: x[:, 0])
    figure = draw(given, lambda x: 0 * x[:, 0])
    figure.savefig(tmp_path / "plane.png", dpi=120)
    for axis in figure.axes:
        box = axis.get_tightbbox()
        assert box.x0 > 0 and box.x1 < figure.bbox.x1 and box.y0 > 0 and box.y1 < figure.bbox.y1
