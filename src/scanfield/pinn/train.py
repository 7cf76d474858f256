"""Training: stages of optimisers over a problem's loss, watched at points that are not trained on."""

from __future__ import annotations

import os
import warnings as warnings_module
from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np

from scanfield.advice import shown
from scanfield.errors import ArgumentError, ShapeError
from scanfield.keywords import advised
from scanfield.optimize import LevenbergMarquardt
from scanfield.pinn import checkpoint as storage
from scanfield.pinn import fingerprint
from scanfield.pinn import progress as bars
from scanfield.pinn import weights as weighting
from scanfield.pinn.diagnose import DiagnosisWarning, diagnose
from scanfield.pinn.fit import Fit
from scanfield.pinn.fourier import check_count
from scanfield.pinn.network import Network
from scanfield.pinn.problem import Helmholtz
from scanfield.pinn.reduce import Reducer
from scanfield.pinn.run import Callback, Run
from scanfield.pinn.sampling import check_rule
from scanfield.pinn.stages import Stage, resolve

__all__ = ["Callback", "train"]


@advised
def train(
    problem: Helmholtz,
    network: Network,
    *,
    points: int = 1000,
    boundary: int | None = None,
    sampling: str = "sobol",
    seed: int = 0,
    optimizer: Any = "auto",
    iterations: int | None = None,
    weights: str = "fixed",
    resample: int | None = None,
    adaptive: bool = False,
    held_out: int | None = None,
    tolerance: float = 0.0,
    patience: int | None = None,
    record: int = 10,
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int = 50,
    resume: str | os.PathLike[str] | None = None,
    chunk: int = 256,
    reducer: Reducer | None = None,
) -> Fit:
    """Fit a network to a Helmholtz problem.

    Parameters
    ----------
    problem, network
        What is solved and by what. The network has as many coordinates and outputs as the problem.
    points, boundary, sampling, seed
        Points inside; points on the boundary, shared out over its parts (None: as dense); `"sobol"`, `"latin"`,
        `"uniform"` or `"grid"`; an integer. The same on every library.
    optimizer, iterations
        `"lm"`, `"lbfgs"`, `"adam"`, an optimiser of `scanfield.optimize`, or a list of (optimizer, iterations), one after
        the other. `"auto"`: Levenberg-Marquardt up to 5,000 parameters, above them Adam, then L-BFGS; in float32
        Adam alone.
    weights
        `"fixed"`: the problem's own. `"annealing"`, `"ntk"` (Adam and L-BFGS): multipliers of them that follow the
        training.
    resample, adaptive
        Draw new points after so many iterations; with `adaptive` they are chosen where the residual is large.
    held_out, tolerance, patience
        The number of points that are watched and never trained on (None: as many as `points`, 256 to 1000). The training
        stops once the equation's residual there (rms over its scale) is at most `tolerance`, or when it has not fallen for
        `patience` records.
    record, callbacks, progress
        A `Record` is kept, and callbacks are called, after so many iterations; None shows a bar on a terminal.
    checkpoint, checkpoint_every, resume
        A file that is written every so many iterations, and one to go on from: bit for bit, as if nothing had happened. A
        file that cannot be written is told in a `RuntimeWarning`, once, and in `Fit.warnings`; the training goes on.
    chunk
        Rows that go through the network together.
    reducer
        Spreads the points over machines, as `scanfield_torch.parallel.GroupReducer`, `scanfield_jax.parallel.DeviceReducer`
        or `scanfield_dask.parallel.ClusterReducer` does; with `weights="fixed"`. The result is one machine's to rounding.

    Returns
    -------
    Fit
        With the best parameters seen, also after Ctrl-C. `reason` is the optimiser's own (`"gradient"`,
        `"iteration limit"`, `"line search"`, `"no descent"`, `"not finite"`), or `"tolerance"`, `"held-out"`, `"callback"`,
        `"interrupted"`.

    Raises
    ------
    ArgumentError, ShapeError
        A setting out of range, or a network that does not fit the problem.
    StateError
        A checkpoint that is truncated, foreign, or of another training: other settings, optimisers, fixed frequencies, or
        another problem, by what its functions give at the points.

    What is likely to spoil the field is told in a `DiagnosisWarning`, and in `Fit.warnings`.

    Examples
    --------
    >>> from scanfield import pinn
    >>> wave = pinn.solutions.plane_wave(10.0)
    >>> problem = pinn.Helmholtz(
    ...     pinn.Interval(0, 1), 10.0, boundary=[pinn.Dirichlet(1.0, where="left"), pinn.Sommerfeld(where="right")]
    ... )
    >>> features = pinn.FourierFeatures(1, 24, scale=2.0, trainable=False)
    >>> fit = train(problem, pinn.Network.create(features, hidden=[]), points=100)
    >>> fit.error(wave) < 1e-6
    True
    """
    stages = check_settings(
        problem, network, sampling=sampling, optimizer=optimizer, iterations=iterations, weights=weights,
        resample=resample, adaptive=adaptive, tolerance=tolerance, patience=patience, record=record,
        checkpoint_every=checkpoint_every, chunk=chunk,
    )  # fmt: skip
    _check_callbacks(callbacks)
    _check_reducer(reducer)
    # Plain integers from here on, whatever library they came from: a checkpoint writes them down.
    points, seed, chunk = (
        check_count("points", points),
        check_count("seed", seed, 0),
        check_count("chunk", chunk),
    )
    boundary = None if boundary is None else check_count("boundary", boundary)
    held_out = None if held_out is None else check_count("held_out", held_out)
    resample, patience = (None if count is None else int(count) for count in (resample, patience))
    record, checkpoint_every, adaptive = int(record), int(checkpoint_every), bool(adaptive)
    if checkpoint is not None:
        storage.check_place("checkpoint", checkpoint)
    if reducer is not None and weights != "fixed":
        raise ArgumentError(f"weights = {shown(weights)}: over the shards of a reducer the weights are fixed")
    sample = problem.draw(points, boundary, sampling=sampling, seed=seed)
    watched = min(max(points, 256), 1000) if held_out is None else held_out
    watched_points = problem.held_out(watched, seed=seed)
    told = diagnose(problem, sample, network, tuple(stage.optimizer for stage in stages))
    for words in told:
        warnings_module.warn(words, DiagnosisWarning, stacklevel=3)

    run = Run(problem, network, stages, seed, weights, resample, adaptive, tolerance, patience, record, chunk)
    run.draw = lambda cycle: problem.draw(points, boundary, sampling=sampling, seed=seed, cycle=cycle)
    run.callbacks, run.reducer = tuple(callbacks), reducer
    run.checkpoint, run.checkpoint_every = checkpoint, checkpoint_every
    run.watched = watched_points
    run.settings = {
        "points": points, "boundary": boundary, "sampling": sampling, "seed": seed, "weights": weights,
        "resample": resample, "adaptive": adaptive, "record": record, "chunk": chunk, "held_out": watched,
        "stages": [stage.name for stage in stages], "architecture": storage.architecture(network),
        "sample": sample.checksum, "optimizers": [fingerprint.of_optimizer(stage.optimizer) for stage in stages],
    }  # fmt: skip
    if checkpoint is not None or resume is not None:  # the problem's functions are asked once more
        run.settings["problem"] = fingerprint.of_terms(problem.terms(sample))
        run.settings["embedding"] = {"features": fingerprint.of_embedding(network.embedding)}
    run.begin(sample)
    if resume is not None:
        run.restore(resume)
    with bars.shown(sum(stage.iterations for stage in stages), progress) as tick:
        run.go(tick)
    fit = run.fit(tuple(told))
    if len(fit.warnings) > len(told) + len(run.told):
        warnings_module.warn(fit.warnings[-1], DiagnosisWarning, stacklevel=3)
    return fit


def check_settings(
    problem: Helmholtz,
    network: Network,
    *,
    sampling: str = "sobol",
    optimizer: Any = "auto",
    iterations: int | None = None,
    weights: str = "fixed",
    resample: int | None = None,
    adaptive: bool = False,
    tolerance: float = 0.0,
    patience: int | None = None,
    record: int = 10,
    checkpoint_every: int = 50,
    chunk: int = 256,
    **others: Any,
) -> tuple[Stage, ...]:
    """The stages of a training with these arguments of `train`; `others` are checked by what takes them.

    Raises what `train` raises for them. Nothing is drawn, so that a file's are checked when it is read.
    """
    counts = {"resample": resample, "patience": patience, "record": record}
    counts |= {"checkpoint_every": checkpoint_every, "chunk": chunk}
    _check(problem, network, weights, adaptive, tolerance, counts)
    check_rule(sampling)
    stages = resolve(optimizer, iterations, network)
    if weights != "fixed" and any(isinstance(stage.optimizer, LevenbergMarquardt) for stage in stages):
        raise ArgumentError(
            f"weights = {shown(weights)}: Levenberg-Marquardt takes fixed weights; use Adam or L-BFGS"
        )
    return stages


def _check(
    problem: Helmholtz,
    network: Network,
    weights: Any,
    adaptive: Any,
    tolerance: Any,
    counts: dict[str, int | None],
) -> None:
    if not isinstance(problem, Helmholtz):
        raise ArgumentError(f"problem is a {type(problem).__name__}: a Helmholtz problem is expected")
    if not isinstance(network, Network):
        raise ArgumentError(f"network is a {type(network).__name__}: Network.create(features, ...) makes one")
    if network.dimensions != problem.dimensions:
        raise ShapeError(
            f"network takes {network.dimensions} coordinates, the problem has {problem.dimensions}"
        )
    if network.outputs != problem.outputs:
        kind = "complex" if problem.complex_field else "real"
        raise ShapeError(
            f"network has {network.outputs} outputs: a {kind} field takes outputs={problem.outputs}"
        )
    if not isinstance(weights, str) or weights not in weighting.RULES:
        raise ArgumentError(
            f"weights = {shown(weights)}: allowed are {', '.join(map(repr, weighting.RULES))}"
        )
    for name, value in counts.items():
        if value is not None:
            check_count(name, value)
    resample = counts["resample"]
    if resample is not None and problem.domain.given:
        raise ArgumentError(
            f"resample = {resample}: the points of a PointSet are given, there are no others to draw"
        )
    if not isinstance(adaptive, bool | np.bool_):
        raise ArgumentError(f"adaptive = {shown(adaptive)}: True or False is expected")
    if adaptive and resample is None:
        raise ArgumentError("adaptive = True: it chooses among new points; say how often, resample=100")
    if isinstance(tolerance, bool) or not isinstance(tolerance, Real) or not float(tolerance) >= 0:
        raise ArgumentError(f"tolerance = {shown(tolerance)}: a number of at least 0 is expected")


def _check_reducer(reducer: object) -> None:
    if reducer is not None and not callable(getattr(reducer, "build", None)):
        raise ArgumentError(
            f"reducer is a {type(reducer).__name__}: None or a reducer is expected, such as pinn.InTurn(2)"
        )


def _check_callbacks(callbacks: object) -> None:
    if callable(callbacks) or not isinstance(callbacks, Sequence) or not all(map(callable, callbacks)):
        raise ArgumentError(
            f"callbacks = {shown(callbacks)}: a sequence of functions is expected, callbacks=[function]"
        )
