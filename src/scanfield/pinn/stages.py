"""The optimisers of `scanfield.optimize` as stages of a training: one way to begin, to step, to stop, to be stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from scanfield.advice import shown
from scanfield.arrays import Array
from scanfield.errors import ArgumentError, StateError
from scanfield.optimize import LBFGS, Adam, AdamState, Cosine, LBFGSState, LevenbergMarquardt, LMState
from scanfield.pinn import stored
from scanfield.pinn.diagnose import LM_LIMIT
from scanfield.pinn.fourier import check_count
from scanfield.pinn.network import Network
from scanfield.pinn.objective import Objective
from scanfield.pinn.placing import place, to_host

__all__ = ["Optimizer", "Stage", "resolve"]

Optimizer: TypeAlias = Adam | LBFGS | LevenbergMarquardt
_NAMES = ("auto", "adam", "lbfgs", "lm")
_ITERATIONS = {"adam": 2000, "lbfgs": 2000, "lm": 200}
_X = "x"


class Stage(NamedTuple):
    """An optimiser and how many iterations it may take."""

    optimizer: Optimizer
    iterations: int

    @property
    def name(self) -> str:
        """Of the optimiser, in reports."""
        return {Adam: "Adam", LBFGS: "L-BFGS", LevenbergMarquardt: "Levenberg-Marquardt"}[
            type(self.optimizer)
        ]

    def init(self, objective: Objective, x: Array) -> Any:
        """The optimiser's state at x."""
        if isinstance(self.optimizer, Adam):
            return self.optimizer.init({_X: x})
        if isinstance(self.optimizer, LBFGS):
            return self.optimizer.init(objective.loss_and_gradient, x)
        return self.optimizer.init(objective.residuals, x)

    def restart(self, objective: Objective, x: Array, state: Any) -> Any:
        """The state after the loss has changed: moments, damping and count stay, what was measured is measured anew."""
        if isinstance(state, AdamState):
            return state
        fresh = self.init(objective, x)._replace(step=state.step)
        return fresh._replace(damping=state.damping) if isinstance(state, LMState) else fresh

    def step(self, objective: Objective, x: Array, state: Any) -> tuple[Array, Any]:
        """One iteration."""
        if isinstance(self.optimizer, Adam):
            _, gradient = objective.loss_and_gradient(x)
            moved, state = self.optimizer.update({_X: x}, {_X: gradient}, state)
            return moved[_X], state
        if isinstance(self.optimizer, LBFGS):
            return self.optimizer.step(objective.loss_and_gradient, x, state)
        return self.optimizer.step(objective.residuals, objective.jacobian, x, state)

    def stopped(self, state: Any) -> str:
        """Why the optimiser will not go on; "" while it does."""
        return "" if isinstance(state, AdamState) else str(state.stopped)

    def pack(self, state: Any) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """A state as tensors and facts."""
        if isinstance(state, AdamState):
            return {"first": to_host(state.first[_X]), "second": to_host(state.second[_X])}, {
                "step": state.step
            }
        if isinstance(state, LMState):
            return {}, state._asdict()
        pairs = {f"step.{i}": to_host(s) for i, s in enumerate(state.steps)}
        pairs |= {f"change.{i}": to_host(y) for i, y in enumerate(state.changes)}
        facts = {name: getattr(state, name) for name in ("step", "value", "evaluations", "stopped")}
        return {"gradient": to_host(state.gradient), **pairs}, facts | {"pairs": len(state.steps)}

    def unpack(
        self, tensors: dict[str, np.ndarray], facts: dict[str, Any], network: Network, size: tuple[int, ...]
    ) -> Any:
        """The state that `pack` took apart, its tensors of this shape; StateError for that of another optimiser."""
        try:
            for name, value in tensors.items():
                if value.shape != size:
                    raise ValueError(f"{name:.40} has shape {value.shape}, expected {size}")
            held = {name: place(value, network) for name, value in tensors.items()}
            if isinstance(self.optimizer, Adam):
                return AdamState(
                    stored.whole("step", facts["step"]), {_X: held["first"]}, {_X: held["second"]}
                )
            common = (
                stored.whole("step", facts["step"]),
                stored.real("value", facts["value"]),
                stored.whole("evaluations", facts["evaluations"]),
                stored.texts("stopped", facts["stopped"]),
            )
            if isinstance(self.optimizer, LevenbergMarquardt):
                damping = stored.real("damping", facts["damping"], finite=True)
                if not damping >= 0.0:
                    raise ValueError(f"damping = {damping}")
                return LMState(common[0], common[1], damping, common[2], common[3])
            pairs = stored.whole("pairs", facts["pairs"], len(held) + 1)
            steps, changes = (tuple(held[f"{kind}.{i}"] for i in range(pairs)) for kind in ("step", "change"))
            return LBFGSState(common[0], common[1], held["gradient"], steps, changes, common[2], common[3])
        except (KeyError, TypeError, ValueError, StateError) as error:
            raise StateError(f"the checkpoint holds no state of {self.name} ({error!s:.200})") from None


def resolve(optimizer: Any, iterations: int | None, network: Network) -> tuple[Stage, ...]:
    """Stages from what a caller may give: a name, an optimiser, or pairs of these and iterations."""
    if isinstance(optimizer, Sequence) and not isinstance(optimizer, str):
        if iterations is not None:
            raise ArgumentError(
                f"iterations = {iterations}: each stage of a list has its own, [(Adam(1e-3), 500), ...]"
            )
        # Files write pairs as lists.
        pairs = [
            pair if isinstance(pair, tuple | list) and len(pair) == 2 else (pair, None) for pair in optimizer
        ]
        if not pairs:
            raise ArgumentError("optimizer: an empty list; give at least one stage")
        return tuple(_stage(one, count, network) for one, count in pairs)
    auto = isinstance(optimizer, str) and optimizer == "auto"
    if auto and network.dtype == "float32":  # too few digits for the others
        return (_stage("adam", iterations, network),)
    if auto and network.size > LM_LIMIT:
        return _stage("adam", iterations, network), _stage("lbfgs", iterations, network)
    return (_stage(optimizer, iterations, network),)


def _stage(given: Any, iterations: int | None, network: Network) -> Stage:
    made: Optimizer
    if iterations is not None:
        iterations = check_count("iterations", iterations)
    if isinstance(given, str):
        if given not in _NAMES:
            raise ArgumentError(
                f"optimizer = {shown(given)}: allowed are {', '.join(map(repr, _NAMES))}, or an optimiser"
            )
        key = "lm" if given == "auto" else given
        count = _ITERATIONS[key] if iterations is None else iterations
        if key == "adam":
            made = Adam(Cosine(peak=5e-3, steps=count, warmup=count // 50, final=1e-5))
        else:
            # In units of the scaled loss, which is of order one at the start. A damping that falls slowly keeps the last
            # digits out of reach for hundreds of steps.
            lm = LevenbergMarquardt(damping=1e-5, decrease=5.0)
            made = LBFGS(tolerance=1e-12) if key == "lbfgs" else lm
    elif isinstance(given, Optimizer):
        made = given
        kinds = {Adam: "adam", LBFGS: "lbfgs", LevenbergMarquardt: "lm"}
        count = _ITERATIONS[kinds[type(given)]] if iterations is None else iterations
    else:
        raise ArgumentError(
            f"optimizer is a {type(given).__name__}: a name, Adam, LBFGS, LevenbergMarquardt, or a list of "
            "(optimizer, iterations) is expected"
        )
    return Stage(made, count)
