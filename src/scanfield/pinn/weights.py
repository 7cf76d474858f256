"""Loss weights that follow the training: learning-rate annealing and the neural tangent kernel.

| rule | multiplier of term i, every few updates |
|---|---|
| `annealing` | lam_i <- 0.9 lam_i + 0.1 max |grad L_r| / mean |lam_i grad L_i| |
| `ntk` | lam_i = tr K / tr K_ii |

L_r is the equation's loss, L_i the term's without its multiplier. (Wang, Teng & Perdikaris, arXiv 2001.04536, algorithm 1;
Wang, Yu & Perdikaris, arXiv 2007.14527, equation 6.5.) The mean over the gradient's entries is taken layer by layer, over
the weights W alone, as in the first authors' code. Their text leaves lam_i out of the mean: that form runs away, since
nothing answers a multiplier that has grown; `weighted=False` is that form.
"""

from __future__ import annotations

from scanfield.arrays import Array
from scanfield.pinn.jacobian import jacobian
from scanfield.pinn.loss import loss_and_grad
from scanfield.pinn.objective import Objective
from scanfield.pinn.problem import PDE

__all__ = ["RULES", "annealed", "ntk", "updated"]

RULES = ("fixed", "annealing", "ntk")
_MEMORY = 0.9


def updated(rule: str, objective: Objective, x: Array) -> dict[str, float]:
    """The multipliers of the next updates by a rule's name."""
    if rule == "annealing":
        return annealed(objective, x)
    return ntk(objective, x) if rule == "ntk" else dict(objective.multipliers)


def annealed(objective: Objective, x: Array, *, weighted: bool = True) -> dict[str, float]:
    """Multipliers by learning-rate annealing. The equation's own stays as it is."""
    network, unknowns = objective.split(x)
    xp = network.xp
    sizes: dict[str, list[Array]] = {}
    for index, name in enumerate(objective.names):
        alone = tuple(
            w / objective.multipliers[name] if i == index else 0.0
            for i, w in enumerate(objective.terms.weights)
        )
        own = objective.workspace()
        found = loss_and_grad(
            network,
            objective.terms._replace(weights=alone),
            wavenumber=unknowns,
            chunk=None if own is not None else objective.chunk,
            workspace=own,
        )
        sizes[name] = [xp.abs(found.gradients[f"W{i}"]) for i in range(network.layers)]
    largest = max(float(xp.max(size)) for size in sizes[PDE])
    multipliers = dict(objective.multipliers)
    for name in objective.names:
        if name == PDE:
            continue
        mean = sum(float(xp.mean(size)) for size in sizes[name]) / network.layers
        mean *= multipliers[name] if weighted else 1.0
        if mean > 0:
            multipliers[name] = _MEMORY * multipliers[name] + (1.0 - _MEMORY) * largest / mean
    return multipliers


def ntk(objective: Objective, x: Array) -> dict[str, float]:
    """Multipliers by the traces of the neural tangent kernel's blocks; K = J J^T of the rows, all of them."""
    network, unknowns = objective.split(x)
    found = jacobian(network, objective.terms, wavenumber=unknowns, chunk=objective.chunk)
    traces, first = {}, 0
    for shape, weight, name in zip(
        objective.terms.shapes, objective.terms.weights, objective.names, strict=True
    ):
        last = first + shape.points * shape.parts
        block = found.matrix[first:last, :]
        # The rows carry the weights, multipliers among them; the kernel is that of the residuals in their own scale.
        own = objective.multipliers[name] / shape.points if weight > 0 else 1.0
        traces[name] = float(network.xp.sum(block * block)) / own
        first = last
    total = sum(traces.values())
    return {name: total / trace if trace > 0 else 1.0 for name, trace in traces.items()}
