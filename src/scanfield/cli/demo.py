"""`scanfield demo`: what runs here, whether it agrees, a forecast of measured data, a wave equation. Some minutes.

The third part is a first example of the library in use, on NumPy alone. The data is the weekly record of
carbon dioxide in the air over Mauna Loa, 1958 to 2001, as statsmodels ships it.

1. Exponential smoothing is a linear scan, and equals pandas' `ewm(adjust=False)` to rounding.
2. A small selective scan learns from the first 80 % of the months to say where the record will be half a year
   later, and forecasts the last 20 %. Its gradients come from `scanfield.vjp`, its steps from `scanfield.optimize.Adam`.

The fourth part solves a Helmholtz problem with a network, whose derivatives are closed formulas.

All forecasts of a month use the measurements up to half a year before it and nothing else.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import scanfield
from scanfield import optimize
from scanfield.cli import agree, check, info, jobs
from scanfield.cli.console import heading, progress, table
from scanfield.cli.places import places

_EXAMPLES = """\
examples:
  scanfield demo                    all four parts; the plots go to demo/
  scanfield demo --output plots     the plots go elsewhere
"""

_NEEDS = ("statsmodels", "pandas", "matplotlib", "scipy")

HORIZON = 6  # months ahead
TRAINED = 0.8  # of the months
CHANNELS, STATES, UPDATES = 16, 8, 600

Params = dict[str, np.ndarray]


def add_parser(commands: Any) -> None:
    """Describe the command to argparse."""
    parser = commands.add_parser(
        "demo",
        help="what runs here, whether it agrees, a forecast of measured data, and a Helmholtz problem",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--output", type=Path, default=Path("demo"), metavar="FOLDER", help="where the plots go"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """The four parts, one after another; the exit status is 0 where every claim held."""
    missing = [name for name in _NEEDS if find_spec(name) is None]
    if missing:
        print(
            f"the demo needs {', '.join(missing)}: python -m pip install {' '.join(missing)}", file=sys.stderr
        )
        return 1
    start = time.monotonic()
    print(f"scanfield {scanfield.__version__}")

    heading("1  Libraries found, and what runs on them")
    everywhere = places()
    print(info.libraries_table())
    print(f"\n{info.RUNS}:\n")
    print(info.runs_table(info.runs(everywhere)))

    heading("2  Do they agree?")
    records = agree.operations()
    print(
        "comparing every implementation with every other: some minutes, most of them in compilers", flush=True
    )
    with progress("comparing", len(agree.cases(records))) as tick:
        names = [record.name for record in records]
        report = jobs.compare(
            names, None, full=False, everything=False, jobs=min(2, scanfield.get_num_threads()), done=tick
        )
    print(check.as_text(report, by_operation=True))

    heading("3  The carbon dioxide record")
    forecast_holds = carbon_dioxide(arguments.output)

    heading("4  A Helmholtz problem")
    field_holds = helmholtz(arguments.output)

    print(f"\nthe demo took {time.monotonic() - start:.0f} s")
    return 0 if report.agree and forecast_holds and field_holds else 1


# ------------------------------------------------------------------------------------------------------------
# 3  The carbon dioxide record


def carbon_dioxide(folder: Path) -> bool:
    """Smooth the weekly record, forecast the monthly one, plot both; True where both claims hold."""
    from statsmodels.datasets import co2

    measured = co2.load_pandas().data["co2"]
    weekly = (
        measured.ffill()
    )  # the last measurement stands until the next one, so that no gap is filled from its future
    smooth = smoothing(weekly.to_numpy(), share=0.05)
    apart = float(np.max(np.abs(smooth - weekly.ewm(alpha=0.05, adjust=False).mean().to_numpy())))
    print(f"smoothing {len(weekly)} weeks: linear_scan and pandas' ewm differ by at most {apart:.1e} ppm")

    months = measured.resample("MS").mean().ffill()
    forecasts = forecast(months.to_numpy())
    print(f"\nforecasting each month {HORIZON} months ahead: root of the mean squared error, ppm")
    print(forecasts.table())
    verdict = "beats" if forecasts.model_wins else "does NOT beat"
    print(f"on the months held out, the selective scan {verdict} persistence and smoothing")

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "co2.png"
    _plot(path, weekly, smooth, months, forecasts)
    print(f"\nplot: {path}")
    return apart < 1e-10 and forecasts.model_wins


def smoothing(values: np.ndarray, share: float) -> np.ndarray:
    """level_t = (1 - share) level_(t-1) + share value_t, from the first value on, as a linear scan."""
    decay = np.full((1, 1, 1), 1.0 - share)  # constant over time, so one number is enough
    smooth = scanfield.linear_scan(decay, share * values[None, :, None], values[None, :1])
    return np.asarray(smooth.output[0, :, 0])


class Forecasts(NamedTuple):
    """Forecasts of every month by each method; the first `trained` ones were there to learn from."""

    truth: np.ndarray
    by_method: dict[str, np.ndarray]
    trained: int

    def error(self, method: str, *, held_out: bool) -> float:
        """Root of the mean squared error over the held-out months, or over the ones learnt from."""
        # The first year is left out of the error: nothing can know the seasons yet.
        months = slice(self.trained, None) if held_out else slice(12, self.trained)
        return float(np.sqrt(np.mean((self.by_method[method] - self.truth)[months] ** 2)))

    @property
    def model_wins(self) -> bool:
        """The claim of the demo: better than persistence and than smoothing on the months held out."""
        model, *others = (
            self.error(m, held_out=True) for m in ("selective scan", "persistence", "smoothing")
        )
        return model < min(others)

    def table(self) -> str:
        """The errors of all methods."""
        rows = [
            (method, *(f"{self.error(method, held_out=held_out):.3f}" for held_out in (False, True)))
            for method in self.by_method
        ]
        return table([("method", "first 80 %", "last 20 %, held out"), *rows])


def forecast(months: np.ndarray, updates: int = UPDATES) -> Forecasts:
    """Four methods on the same months; entry i of each is made at month i, for month i + HORIZON."""
    now, truth = months[:-HORIZON], months[HORIZON:]
    # A forecast is learnt from where the month that it is for lies in the first 80 %.
    trained = int(TRAINED * len(months)) - HORIZON

    def training_error(share: float) -> float:
        return float(np.mean((smoothing(now, share) - truth)[12:trained] ** 2))

    share = min(np.linspace(0.02, 1.0, 50), key=training_error)
    a_year_ago = np.concatenate([np.full(12, np.nan), now[:-12]])
    same_season = np.concatenate([np.full(12, np.nan), truth[:-12]])
    return Forecasts(
        truth,
        {
            "persistence": now,
            "smoothing": smoothing(now, share),
            # What a person would do: last year's value, and the growth of the year since.
            "last year plus its growth": same_season + now - a_year_ago,
            "selective scan": now + learnt_change(now, truth - now, trained, updates),
        },
        trained,
    )


# ------------------------------------------------------------------------------------------------------------
# The model: features -> selective scan -> one number


def learnt_change(now: np.ndarray, change: np.ndarray, trained: int, updates: int) -> np.ndarray:
    """The change over the horizon by a selective scan that learns from the first `trained` months."""
    features = _features(now, trained)
    mean, spread = change[:trained].mean(), change[:trained].std()
    target = ((change - mean) / spread)[:trained]
    learnt_from = features[:, :trained]

    params = initial_params(features.shape[-1])
    adam = optimize.Adam(optimize.Cosine(peak=0.02, steps=updates, warmup=updates // 30))
    state = adam.init(params)
    with progress("training", updates) as tick:
        for _ in range(updates):
            loss, gradients = loss_and_gradients(params, learnt_from, target)
            params, state = adam.update(params, gradients, state)
            tick(f"loss {loss:.4f}")
    scaled, _ = model(params, features)
    return np.asarray(mean + spread * scaled)


def _features(values: np.ndarray, trained: int) -> np.ndarray:
    """What the model sees each month, (1, time, 2): the last change, and the distance from the year's level.

    Both are scaled by the months that are learnt from.
    """
    columns = np.stack([np.diff(values, prepend=values[0]), values - smoothing(values, 1 / 12)], axis=-1)
    scaled = (columns - columns[:trained].mean(axis=0)) / columns[:trained].std(axis=0)
    return np.asarray(scaled[np.newaxis])


def initial_params(features: int, seed: int = 0) -> Params:
    """Small random projections, steps from fast to slow, decays 1 ... STATES as in Mamba."""
    rng = np.random.default_rng(seed)
    steps = np.geomspace(0.02, 0.5, CHANNELS)
    return {
        "input": rng.normal(size=(features, CHANNELS)) / np.sqrt(features),
        "step": 0.1 * rng.normal(size=(features, CHANNELS)),
        "step_bias": np.log(np.expm1(steps)),  # the softplus of this is the step
        "log_rate": np.log(np.tile(np.arange(1.0, STATES + 1), (CHANNELS, 1))),
        "write": 0.3 * rng.normal(size=(features, STATES)),
        "write_bias": np.ones(STATES),
        "read": 0.3 * rng.normal(size=(features, STATES)),
        "read_bias": 0.5 * rng.normal(size=STATES),
        "skip": np.ones(CHANNELS),
        "output": rng.normal(size=CHANNELS) / CHANNELS,
        "offset": np.zeros(1),
    }


def model(params: Params, features: np.ndarray) -> tuple[np.ndarray, Callable[[np.ndarray], Params]]:
    """The output, (time,), and the way back: its cotangent -> the gradient of every parameter."""
    rate = -np.exp(params["log_rate"])
    scan, pull = scanfield.vjp(
        scanfield.selective_scan,
        u=features @ params["input"],
        delta=features @ params["step"],
        A=rate,
        B=features @ params["write"] + params["write_bias"],  # what a month writes into the state ...
        C=features @ params["read"]
        + params["read_bias"],  # ... and what it reads from it depend on the month
        D=params["skip"],
        delta_bias=params["step_bias"],
        delta_softplus=True,
    )
    channels = scan.output[0]

    def gradients(d_output: np.ndarray) -> Params:
        d = pull(np.outer(d_output, params["output"])[None])
        across = features[0].T
        return {
            "input": across @ d["u"][0],
            "step": across @ d["delta"][0],
            "step_bias": d["delta_bias"],
            "log_rate": d["A"] * rate,
            "write": across @ d["B"][0],
            "write_bias": d["B"].sum(axis=(0, 1)),
            "read": across @ d["C"][0],
            "read_bias": d["C"].sum(axis=(0, 1)),
            "skip": d["D"],
            "output": channels.T @ d_output,
            "offset": d_output.sum(keepdims=True),
        }

    return channels @ params["output"] + params["offset"], gradients


def loss_and_gradients(params: Params, features: np.ndarray, target: np.ndarray) -> tuple[float, Params]:
    """The mean squared error after the first year, in which the state has seen no full season."""
    output, gradients = model(params, features)
    error = np.where(np.arange(target.size) < 12, 0.0, output - target)
    count = target.size - 12
    return float(error @ error) / count, gradients(2.0 * error / count)


# ------------------------------------------------------------------------------------------------------------
# 4  A Helmholtz problem


def helmholtz(folder: Path) -> bool:
    """Solve the (1, 4) problem of the literature and plot it; True where the error is below 1e-5."""
    from scanfield.pinn.files import load_problem
    from scanfield.pinn.run import INTERRUPTED

    problem = load_problem("square-1-4")
    assert problem.exact is not None
    print(problem.title)
    fit = problem.solve(progress=False)
    if fit.reason == INTERRUPTED:
        raise KeyboardInterrupt
    error = fit.error(problem.exact)
    print(f"{fit.network.size} parameters, {fit}")
    print(f"relative L2 error {error:.1e}; published networks reach 1.6e-1 to 3.5e-3")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "helmholtz.png"
    fit.plot(path, problem.exact)
    print(f"\nplot: {path}")
    return error < 1e-5


# ------------------------------------------------------------------------------------------------------------


def _plot(path: Path, weekly: Any, smooth: np.ndarray, months: Any, forecasts: Forecasts) -> None:
    # The figure class itself, without pyplot: no window system is asked for.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 8), layout="constrained")
    record, closer = figure.subplots(2, 1)
    record.plot(weekly.index, weekly, color="0.7", lw=0.8, label="weekly measurements")
    record.plot(weekly.index, smooth, color="C0", label="smoothed by linear_scan")
    record.axvspan(
        months.index[forecasts.trained + HORIZON], months.index[-1], color="C1", alpha=0.1, label="held out"
    )
    record.set(title="Carbon dioxide over Mauna Loa", ylabel="ppm")
    record.legend(loc="upper left")

    dates = months.index[HORIZON:][forecasts.trained :]
    closer.plot(dates, forecasts.truth[forecasts.trained :], color="0.5", lw=3, label="measured")
    for method, values in forecasts.by_method.items():
        label = f"{method}, error {forecasts.error(method, held_out=True):.2f} ppm"
        style = {"lw": 1.5, "color": "C3"} if method == "selective scan" else {"lw": 0.9, "ls": "--"}
        closer.plot(dates, values[forecasts.trained :], label=label, **style)
    closer.set(title=f"The held-out months, forecast {HORIZON} months ahead", ylabel="ppm")
    closer.legend(loc="upper left", fontsize="small")
    figure.savefig(path, dpi=120)
