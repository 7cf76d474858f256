"""The loss of the same terms by PyTorch's nested automatic differentiation: an independent truth for every gradient."""

from __future__ import annotations

import math
from typing import Any

import torch

from scanfield import pinn

_SIGMA = {
    "tanh": torch.tanh,
    "sin": torch.sin,
    "swish": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "softplus": torch.nn.functional.softplus,
}


def output(network: pinn.Network, parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    embedding = network.embedding
    B = parameters.get("B", torch.tensor(embedding.frequencies, dtype=x.dtype))
    p = 2 * math.pi * x @ B
    raw = [(x[:, i : i + 1] - embedding.mean[i]) / embedding.scale[i] for i in embedding.axes]
    h = torch.cat([p.sin(), p.cos(), *raw], 1)
    for i in range(network.layers):
        h = h @ parameters[f"W{i}"].T + parameters[f"b{i}"]
        if i < network.layers - 1:
            h = _SIGMA[network.activation](h)
    return h


def jet(network: pinn.Network, parameters: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """u (n, m), u_i (d, n, m), u_ii (d, n, m), by two passes of autograd."""
    u = output(network, parameters, x)
    columns = range(u.shape[1])
    slopes = [torch.autograd.grad(u[:, c].sum(), x, create_graph=True)[0] for c in columns]
    d = x.shape[1]
    first = torch.stack([torch.stack([slopes[c][:, i] for c in columns], 1) for i in range(d)])
    second = []
    for i in range(d):
        ends = [_grad(slopes[c][:, i].sum(), x)[:, i] for c in columns]
        second.append(torch.stack(ends, 1))
    return u, first, torch.stack(second)


def _grad(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    if not y.requires_grad:  # a derivative that is constant
        return torch.zeros_like(x)
    found = torch.autograd.grad(y, x, create_graph=True, allow_unused=True)[0]
    return torch.zeros_like(x) if found is None else found


def loss(
    network: pinn.Network, terms: list[pinn.Term], unknowns: dict[str, Any] | None = None
) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, Any]]:
    """Loss, raw means, and gradients under the names that ``loss_and_grad`` uses."""
    leaves = {name: value.detach().clone().requires_grad_() for name, value in network.parameters.items()}
    free = {
        name: torch.tensor(value, dtype=torch.complex128 if isinstance(value, complex) else torch.float64)
        for name, value in (unknowns or {}).items()
    }
    for value in free.values():
        value.requires_grad_()
    raws, points = {}, []
    total = torch.zeros((), dtype=torch.float64)
    for term in terms:
        r: Any = 0.0 if term.target is None else -term.target
        places = []
        for p, piece in enumerate(term.pieces):
            x = piece.points.detach().clone().requires_grad_()
            places.append(x)
            parts = jet(network, leaves, x)
            u, first, second = (
                torch.complex(part[..., 0], part[..., 1]) if part.shape[-1] == 2 else part[..., 0]
                for part in parts
            )
            value = 0.0 if piece.value is None else piece.value
            for dependence in _dependences(term):
                value = value + dependence.factors[p] * free[dependence.name] ** dependence.power
            r = r + value * u
            if piece.first is not None:
                r = r + (piece.first.T * first).sum(0)
            if piece.second is not None:
                r = r + (piece.second.T * second).sum(0)
        points.append(places)
        raws[term.name] = (r.abs() ** 2).mean()
        total = total + term.weight * raws[term.name]
    everything = [*leaves.values(), *free.values(), *(x for places in points for x in places)]
    found = list(torch.autograd.grad(total, everything, allow_unused=True))
    found = [torch.zeros_like(v) if g is None else g for g, v in zip(found, everything, strict=True)]
    gradients: dict[str, Any] = dict(zip([*leaves, *free], found, strict=False))
    rest = iter(found[len(leaves) + len(free) :])
    gradients["points"] = tuple(tuple(next(rest) for _ in places) for places in points)
    return total.detach(), {name: raw.detach() for name, raw in raws.items()}, gradients


def _dependences(term: pinn.Term) -> tuple[pinn.Dependence, ...]:
    given = term.wavenumber
    return () if given is None else (given,) if isinstance(given, pinn.Dependence) else given
