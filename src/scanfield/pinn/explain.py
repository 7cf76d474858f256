"""Which kernels a step would use, and why not the others: what ``scanfield.explain`` is for scans."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from scanfield.dispatch import Explanation, family, forced_method
from scanfield.dispatch.registry import is_blocked
from scanfield.dispatch.report import Verdict
from scanfield.errors import ArgumentError
from scanfield.pinn.jacobian import jacobian
from scanfield.pinn.jets import jet
from scanfield.pinn.loss import loss_and_grad, residuals
from scanfield.pinn.network import Network
from scanfield.pinn.placing import place_terms
from scanfield.pinn.problem import Helmholtz
from scanfield.pinn.selection import FAMILY, kernels_for, own_kernels
from scanfield.pinn.terms import PreparedTerms, Residual, Shape, Term, prepare_terms
from scanfield.pinn.train import train

__all__ = ["explain", "terms_of"]

VERB = "loss_and_grad"


def explain(
    network: Network | Helmholtz,
    terms: Sequence[Term] | PreparedTerms | Helmholtz | Network | None = None,
    *,
    chunk: int = 256,
    **settings: Any,
) -> Explanation:
    """Every kind of kernels that could run a network's sweeps, which one does, and why the others do not.

    Parameters
    ----------
    network, terms
        As in ``loss_and_grad``; or a problem and a network, as in ``train``. Without terms the notes say nothing of them.
    chunk : int
        Rows that would go through the network together.
    **settings
        What else those functions take changes no choice.

    Returns
    -------
    Explanation
        ``taken["loss_and_grad"]`` is the name of the kernels; ``notes`` say what a step sweeps; ``str()`` is a table.
        ``scanfield.explain(pinn.loss_and_grad, network, terms)`` and ``scanfield.explain(pinn.train, problem, network)`` are
        the same.

    Raises
    ------
    ArgumentError
        No network; a method asked for by ``scanfield.use`` that cannot run it raises as the call itself.

    Examples
    --------
    >>> import scanfield
    >>> from scanfield import pinn
    >>> network = pinn.Network.create(pinn.RawCoordinates(2), hidden=8)
    >>> with scanfield.use(method="generic"):
    ...     pinn.explain(network).taken
    {'loss_and_grad': 'generic'}
    """
    asked, given = terms_of(network, terms)
    chosen = kernels_for(asked)
    own = own_kernels(asked.library, asked.xp)
    method = forced_method()
    verdicts = []
    for entry in family(FAMILY, asked.library, asked.device):
        taken = not entry.absent and entry.name == chosen.name
        reason = entry.absent or ("turned off by SCANFIELD_BLOCK" if is_blocked(entry.name) else "")
        if not reason and not entry.default and method is None:
            reason = f"runs only by method={entry.name!r}"
        verdicts.append(Verdict(entry.name, VERB, taken, reason or _reason(taken, method)))
    for name in reversed(own):
        taken = name == chosen.name and not any(verdict.taken for verdict in verdicts)
        verdicts.append(Verdict(name, VERB, taken, _reason(taken, method)))
    notes = [
        "a workspace serves: nothing is allocated after the first step"
        if chosen.in_place
        else "no workspace: these kernels make new arrays, or their compiler plans the memory"
    ]
    if given is not None:
        prepared = prepare_terms(given, asked)
        pairs = zip(prepared.shapes, prepared.residuals, strict=True)
        notes += [_told(shape, residual, chunk) for shape, residual in pairs]
    return Explanation("pinn", asked.library, asked.device, asked.dtype, tuple(verdicts), tuple(notes))


def _reason(taken: bool, method: str | None) -> str:
    if method is not None:
        return f"forced by method={method!r}" if taken else f"method={method!r} is forced"
    return "the first that runs here" if taken else "one before it runs"


def _told(shape: Shape, residual: Residual, chunk: int) -> str:
    """What a step sweeps for a term."""
    blocks = max(len(operator.coefficients) for operator in residual.operators)
    kind = "complex" if shape.parts == 2 else "real"
    sweeps = len(residual.operators) * math.ceil(shape.points / chunk)
    stack = "the value" if blocks == 1 else f"jets of {blocks} blocks"
    rows = f"{sweeps} sweeps of at most {chunk} rows" if sweeps > 1 else "1 sweep"
    return f"{shape.name}: {stack} at {shape.points} points, {rows}, {kind}"


def terms_of(first: Any, second: Any) -> tuple[Network, Any]:
    """A network and terms, from these or from a problem and a network; ArgumentError where no network is among them."""
    if isinstance(second, Network):
        first, second = second, first
    if not isinstance(first, Network):
        raise ArgumentError(
            f"network is a {type(first).__name__}: a Network and terms, or a problem and a Network, are expected"
        )
    if isinstance(second, Helmholtz):
        if (first.dimensions, first.outputs) != (second.dimensions, second.outputs):
            raise ArgumentError(
                f"network: {first.dimensions} coordinates and {first.outputs} outputs, the problem has "
                f"{second.dimensions} and needs {second.outputs}"
            )
        second = place_terms(second.terms(second.draw()), first)
    return first, second


def _of_jet(network: Network, points: Any = None, **settings: Any) -> Explanation:
    """A jet has no terms."""
    return explain(network)


# What ``scanfield.explain`` asks a function that is no scan.
for _function in (loss_and_grad, jacobian, residuals, train):
    _function.__dict__["explain"] = explain
jet.__dict__["explain"] = _of_jet
