"""One training as it goes: where it stands, what each iteration does, and its checkpoints."""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from scanfield.arrays import Array
from scanfield.errors import ShapeError, StateError
from scanfield.pinn import checkpoint as storage
from scanfield.pinn import fingerprint, stored
from scanfield.pinn import weights as weighting
from scanfield.pinn.diagnose import aliasing
from scanfield.pinn.fit import Fit, Record
from scanfield.pinn.network import Network
from scanfield.pinn.objective import Objective
from scanfield.pinn.placing import place, to_host
from scanfield.pinn.problem import PDE, Helmholtz, Sample
from scanfield.pinn.progress import Tick
from scanfield.pinn.reduce import Reducer, Sharded
from scanfield.pinn.sampling import weighted_choice
from scanfield.pinn.stages import Stage

__all__ = ["Callback", "Moment", "Run"]

Callback = Callable[[Record, Network], Any]
"""Called with each record and the network of that moment; a true answer stops the training."""

INTERRUPTED, CALLBACK, HELD_OUT, REACHED = "interrupted", "callback", "held-out", "tolerance"
_CANDIDATES = 4  # for each point of an adaptive sample
_WEIGHTS_EVERY = 10
_COMPARED = ("problem", "embedding")
"""Settings that are fingerprints: compared to nine digits."""


@dataclass
class Moment:
    """Where a training stands: all that a checkpoint holds."""

    x: Array
    best: Array
    score: float = math.inf
    stage: int = 0
    done: int = 0  # iterations of this stage
    total: int = 0
    cycle: int = 0
    stale: int = 0  # records without a lower held-out residual
    lowest: float = math.inf
    state: Any = None
    multipliers: dict[str, float] = field(default_factory=dict)
    history: list[Record] = field(default_factory=list)
    seconds: float = 0.0


@dataclass
class Run:
    """One training."""

    problem: Helmholtz
    network: Network
    stages: tuple[Stage, ...]
    seed: int
    weights: str
    resample: int | None
    adaptive: bool
    tolerance: float
    patience: int | None
    record: int
    chunk: int
    draw: Callable[[int], Sample] = field(init=False)
    callbacks: tuple[Callback, ...] = ()
    checkpoint: str | os.PathLike[str] | None = None
    checkpoint_every: int = 50
    watched: np.ndarray = field(init=False)
    settings: dict[str, Any] = field(default_factory=dict)
    objective: Objective = field(init=False)
    now: Moment = field(init=False)
    reason: str = ""
    reducer: Reducer | None = None
    told: list[str] = field(default_factory=list)
    """Warnings of the training itself, in words."""

    def begin(self, sample: Sample) -> None:
        """At the network's own parameters."""
        self.objective = self._objective(sample, None)
        x = self.objective.start()
        self.now = Moment(x, x, multipliers=self.objective.multipliers)

    def go(self, tick: Tick) -> None:
        """Run what is left of the stages."""
        started = time.process_time() - self.now.seconds
        try:
            while self.now.stage < len(self.stages):
                self._stage(tick, started)
                if self.reason in (INTERRUPTED, CALLBACK, HELD_OUT, REACHED, "not finite"):
                    break
                self.now = replace(self.now, stage=self.now.stage + 1, done=0, state=None)
        except KeyboardInterrupt:
            self.reason = INTERRUPTED
        if not self.now.history or self.now.history[-1].iteration != self.now.total:
            self._record(self.now.stage)
        self.now.seconds = time.process_time() - started

    def _stage(self, tick: Tick, started: float) -> None:
        now, stage = self.now, self.stages[self.now.stage]
        if now.state is None:
            now.state = stage.init(self.objective, now.x)
        self.reason = "iteration limit"
        while now.done < stage.iterations:
            stopped = stage.stopped(now.state)
            if stopped:
                self.reason = stopped
                return
            before = now.done
            now.x, now.state = stage.step(self.objective, now.x, now.state)
            if stage.stopped(now.state) and _steps(now.state) == before:
                continue  # the last try changed nothing: it is no iteration
            now.done, now.total = now.done + 1, now.total + 1
            self._change_loss(stage)
            if now.total % self.record == 0:
                line = self._record(now.stage)
                tick(now.total, f"{stage.name}, loss {line.loss:.1e}, held-out {line.held_out:.1e}")
                self.reason = self._judge(line) or self.reason
            if self.checkpoint is not None and now.total % self.checkpoint_every == 0:
                now.seconds = time.process_time() - started
                self._try_to_store(self.checkpoint)
            if self.reason != "iteration limit":
                return

    def _change_loss(self, stage: Stage) -> None:
        """New points and multipliers, where they are due."""
        now = self.now
        if self.resample is not None and now.total % self.resample == 0:
            now.cycle += 1
            self._sample(now.cycle)
        elif self.weights != "fixed" and now.total % _WEIGHTS_EVERY == 0:
            now.multipliers = weighting.updated(self.weights, self.objective, now.x)
            self.objective.reweight(now.multipliers)
        else:
            return
        now.state = stage.restart(self.objective, now.x, now.state)

    def _sample(self, cycle: int, interior: np.ndarray | None = None) -> None:
        sample = self.draw(cycle)
        if interior is not None:
            sample = sample._replace(interior=interior)
        elif self.adaptive:
            count = sample.interior.shape[0]
            candidates = self.problem.domain.interior(_CANDIDATES * count, seed=(self.seed, cycle, 1))
            residual = self.objective.equation_residual(self.now.x, candidates)
            chosen = weighted_choice(residual, count, (self.seed, cycle, 2))
            sample = sample._replace(interior=candidates[chosen])
        self.objective = self._objective(sample, self.now.multipliers)

    def _objective(self, sample: Sample, multipliers: dict[str, float] | None) -> Objective:
        if self.reducer is not None:
            return Sharded(self.problem, self.network, sample, self.reducer, chunk=self.chunk)
        return Objective(self.problem, self.network, sample, multipliers, chunk=self.chunk)

    def _record(self, stage: int) -> Record:
        now = self.now
        raw = self.objective.raw(now.x)
        residual = self.objective.equation_residual(now.x, self.watched)
        held_out = float(np.sqrt(np.mean(residual**2)))
        line = Record(
            now.total,
            self.stages[min(stage, len(self.stages) - 1)].name,
            self.objective.weighted(raw),
            raw,
            held_out,
            dict(self.objective.multipliers),
            self.objective.sample.checksum,
        )
        now.history.append(line)
        # The score does not follow the multipliers, and counts the equation where it is not trained.
        own = self.objective.scaled(raw) | {PDE: max(held_out**2, self.objective.scaled(raw)[PDE])}
        score = sum(own.values())
        if math.isfinite(score) and score < now.score:
            now.score, now.best = score, now.x
        now.stale = 0 if held_out < now.lowest else now.stale + 1
        now.lowest = min(now.lowest, held_out) if math.isfinite(held_out) else now.lowest
        return line

    def _judge(self, line: Record) -> str:
        if not math.isfinite(line.loss):
            return "not finite"
        if line.held_out <= self.tolerance:
            return REACHED
        if self.patience is not None and self.now.stale >= self.patience:
            return HELD_OUT
        if self.callbacks:
            network, _ = self.objective.split(self.now.x)
            answers = [callback(line, network) for callback in self.callbacks]  # also after one that stops
            if any(answers):
                return CALLBACK
        return ""

    def fit(self, told: tuple[str, ...]) -> Fit:
        """What there is now, with the best parameters."""
        now = self.now
        network, _ = self.objective.split(now.best)
        last = now.history[-1]
        trained = math.sqrt(self.objective.scaled(last.terms)[PDE])
        words = aliasing(trained, last.held_out)
        return Fit(
            self.problem,
            network,
            self.objective.unknowns(now.best),
            tuple(now.history),
            self.reason,
            now.total,
            now.seconds,
            (*told, *self.told, *([words] if words else [])),
        )

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def store(self, path: str | os.PathLike[str]) -> None:
        """Write where the training stands."""
        now = self.now
        held, state = self.stages[now.stage].pack(now.state)
        tensors = {f"state.{name}": value for name, value in held.items()}
        tensors |= {
            "x": to_host(now.x),
            "best": to_host(now.best),
            "interior": self.objective.sample.interior,
        }
        numbers = ("score", "stage", "done", "total", "cycle", "stale", "lowest", "multipliers", "seconds")
        facts = {name: getattr(now, name) for name in numbers}
        facts |= {
            "state": state,
            "history": [line._asdict() for line in now.history],
            "settings": self.settings,
        }
        storage.write(path, "training", tensors, facts)

    def _try_to_store(self, path: str | os.PathLike[str]) -> None:
        """A full disk is told, the first time, and costs no training; what was written before stays."""
        try:
            self.store(path)
        except OSError as error:
            words = (
                f"checkpoint = {os.fspath(path)!r}: it could not be written ({error}); the training went on"
            )
            if not any(found.startswith("checkpoint = ") for found in self.told):
                self.told.append(words)
                warnings.warn(words, RuntimeWarning, stacklevel=2)

    def restore(self, path: str | os.PathLike[str]) -> None:
        """Go on from a checkpoint; StateError, and nothing changed, for one of another training."""
        tensors, facts = storage.read(path, "training")
        _same_settings(path, facts.get("settings"), self.settings)
        size, own = tuple(self.now.x.shape), self.objective.sample.interior.shape
        try:
            stage = stored.whole("stage", facts["stage"], len(self.stages))
            held = {
                name.removeprefix("state."): v for name, v in tensors.items() if name.startswith("state.")
            }
            state = self.stages[stage].unpack(held, facts["state"], self.network, size)
            past = stored.history(facts["history"])
            done, total, cycle, stale = (
                stored.whole(name, facts[name]) for name in ("done", "total", "cycle", "stale")
            )
            score, lowest = (stored.real(name, facts[name]) for name in ("score", "lowest"))
            seconds = stored.real("seconds", facts["seconds"], finite=True)
            multipliers = stored.numbers("multipliers", facts["multipliers"], finite=True)
            x, best, interior = (tensors[name] for name in ("x", "best", "interior"))
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise StateError(f"{path}: its record of the training is incomplete ({error!s:.200})") from None
        except StateError as error:
            raise StateError(f"{path}: {error}") from None
        for name, value, shape in (("x", x, size), ("best", best, size), ("interior", interior, own)):
            if value.shape != shape:
                raise ShapeError(f"{path}: {name} has shape {value.shape}, the training's is {shape}")
        if not np.all(np.isfinite(interior)):
            raise StateError(f"{path}: interior holds NaN or infinity")
        vectors = place(x, self.network), place(best, self.network)
        self.now = Moment(
            *vectors, score, stage, done, total, cycle, stale, lowest, state, multipliers, past, seconds
        )
        if self.now.cycle or self.weights != "fixed":
            self._sample(self.now.cycle, interior)


def _steps(state: Any) -> int:
    return int(state.step)


def _same_settings(path: Any, found: Any, own: dict[str, Any]) -> None:
    if not isinstance(found, dict):
        raise StateError(f"{path}: holds no settings of a training")
    missing = [name for name in (*_COMPARED, "optimizers") if name not in found]
    if missing:  # without it nobody can tell whether it is this training
        raise StateError(
            f"{path}: it has no record of its {missing[0]}, so an older scanfield wrote it, and whether it is this training "
            "cannot be told; train anew"
        )
    for name, value in own.items():
        if name in _COMPARED:
            words = fingerprint.difference(found[name], value)
            if words:
                raise StateError(f"{path}: the {name} differs in {words}: another training")
        elif found.get(name) != value:
            raise StateError(
                f"{path}: {name} was {found.get(name)!r:.80} there and is {value!r} here: another training"
            )
