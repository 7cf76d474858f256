"""The demo as a command: what it needs, what it prints and draws, and that its status is the truth of its claims.

A record with a season stands for the measured one, which packages of the demo alone would bring.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from scanfield.cli import agree, demo, main
from scanfield.cli.places import places


class Record(np.ndarray):
    """A series of pandas, as far as the demo asks: four weeks a month, and its dates."""

    @property
    def index(self) -> np.ndarray:
        return np.arange(self.size)

    def ffill(self) -> Record:
        last = np.maximum.accumulate(np.where(np.isnan(self), 0, np.arange(self.size)))
        return np.asarray(self)[last].view(Record)

    def to_numpy(self) -> np.ndarray:
        return np.asarray(self)

    def ewm(self, alpha: float, adjust: bool) -> Any:
        assert not adjust
        level, levels = self[0], []
        for value in np.asarray(self):
            level = (1 - alpha) * level + alpha * value
            levels.append(level)
        return SimpleNamespace(mean=lambda: np.asarray(levels).view(Record))

    def resample(self, rule: str) -> Any:
        assert rule == "MS"
        return SimpleNamespace(mean=lambda: np.nanmean(self.reshape(-1, 4), axis=1).view(Record))


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Record:
    """Ten years, the third week not measured."""
    t = np.arange(480.0)
    weeks = 300 + 0.03 * t + 3 * np.sin(2 * np.pi * t / 48)
    weeks[2] = np.nan
    made = weeks.view(Record)
    loaded = SimpleNamespace(load_pandas=lambda: SimpleNamespace(data={"co2": made}))
    for name in ("statsmodels", "statsmodels.datasets"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(co2=loaded))
    return made


@pytest.mark.parametrize(("updates", "wins"), [(1, False), (60, True)])
def test_a_forecast_is_told_and_drawn(
    record: Record, monkeypatch, capsys, tmp_path: Path, updates: int, wins: bool
):
    pytest.importorskip("matplotlib")
    forecast = demo.forecast
    monkeypatch.setattr(demo, "forecast", lambda months: forecast(months, updates))
    assert demo.carbon_dioxide(tmp_path / "plots") is wins
    said = capsys.readouterr().out
    assert f"scan {'beats' if wins else 'does NOT beat'} persistence" in said
    assert "smoothing 480 weeks: linear_scan and pandas' ewm differ by at most" in said
    assert (tmp_path / "plots" / "co2.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("error", [3e-6, 3e-5])
def test_a_field_is_told_and_drawn(monkeypatch, capsys, tmp_path: Path, error: float):
    from scanfield.pinn import files

    class Fit:
        network = SimpleNamespace(size=1234)
        reason = "gradient"

        def __str__(self) -> str:
            return "stopped"

        def error(self, exact: object) -> float:
            assert exact == "exact"
            return error

        def plot(self, path: Path, exact: object) -> None:
            path.write_text(str(exact))

    problem = SimpleNamespace(title="A square", exact="exact", solve=lambda progress: Fit())
    monkeypatch.setattr(files, "load_problem", {"square-1-4": problem}.get)
    assert demo.helmholtz(tmp_path / "plots") is (error < 1e-5)
    said = capsys.readouterr().out
    assert "A square\n1234 parameters, stopped" in said and f"relative L2 error {error:.1e}" in said
    assert (tmp_path / "plots" / "helmholtz.png").read_text() == "exact"
    Fit.reason = "interrupted"  # a training that Ctrl-C has ended returns what it has; the demo ends too
    with pytest.raises(KeyboardInterrupt):
        demo.helmholtz(tmp_path / "no plots")
    assert not (tmp_path / "no plots").exists()


@pytest.mark.parametrize("false", [None, "agree", "forecast", "field"])
def test_the_status_is_0_where_every_claim_holds(monkeypatch, capsys, tmp_path: Path, false: str | None):
    seen = []

    def part(name: str) -> Any:
        return lambda folder: seen.append(folder) or name != false

    def compare(names: Any, *_: Any, done: Any, **__: Any) -> Any:
        assert list(names) == [record.name for record in agree.operations()]
        done("a case")
        return SimpleNamespace(agree=false != "agree")

    monkeypatch.setattr(demo, "find_spec", lambda name: True)
    monkeypatch.setattr(demo, "places", lambda: places(["numpy"]))
    monkeypatch.setattr(demo.jobs, "compare", compare)
    monkeypatch.setattr(demo.check, "as_text", lambda report, by_operation: "as they say")
    monkeypatch.setattr(demo, "carbon_dioxide", part("forecast"))
    monkeypatch.setattr(demo, "helmholtz", part("field"))
    assert main(["demo", "--output", str(tmp_path)]) == (0 if false is None else 1)
    said = capsys.readouterr().out
    assert seen == [tmp_path] * 2 and "as they say" in said
    assert all(f"\n{number}  " in said for number in (1, 2, 3, 4))


def test_what_it_needs_is_told_at_once(monkeypatch, capsys):
    monkeypatch.setattr(demo, "find_spec", lambda name: None if name in ("pandas", "scipy") else True)
    assert main(["demo"]) == 1
    told = capsys.readouterr()
    assert told.out == "" and told.err == "the demo needs pandas, scipy: python -m pip install pandas scipy\n"
