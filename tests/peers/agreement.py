"""Holds an operation of scanfield against a peer's PyTorch function on the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import arrays
import numpy as np

SEED = 2605


def agree(
    operation: Callable[..., Any],
    peer: Callable[..., Any],
    inputs: Mapping[str, np.ndarray],
    *,
    options: Mapping[str, Any] | None = None,
    peer_dtype: str = "float32",
    tolerance: float = 1e-6,
    gradients: bool = True,
) -> None:
    """Assert equal outputs, final states and (unless switched off) gradients of every input.

    `peer` takes the inputs by scanfield's names, as tensors, and returns (output, final state) in scanfield's layout. Most
    peers compute in float32 whatever they are given: scanfield then answers the same float32 numbers twice, computing in
    float64 and in float32, and both answers must agree with the peer within `tolerance` of the largest value.
    """
    import torch

    import scanfield

    torch_dtype = getattr(torch, peer_dtype)
    leaves = {name: torch.tensor(x, dtype=torch_dtype).requires_grad_() for name, x in inputs.items()}
    output, state = peer(**leaves)
    r = np.random.default_rng(SEED)
    d_output = torch.tensor(r.standard_normal(tuple(output.shape)), dtype=torch_dtype)
    d_state = torch.tensor(r.standard_normal(tuple(state.shape)), dtype=torch_dtype)
    wanted: dict[str, Any] = {}
    if gradients:
        found = torch.autograd.grad((output, state), tuple(leaves.values()), (d_output, d_state))
        wanted = dict(zip(leaves, found, strict=True))

    library = arrays.library("torch")
    for dtype in dict.fromkeys((torch.float64, torch_dtype)):
        given = {name: x.detach().to(dtype) for name, x in leaves.items()}
        result, pullback = scanfield.vjp(operation, **given, **(options or {}))
        pairs = {"output": (result.output, output), "final_state": (result.final_state, state)}
        if gradients:
            ours = pullback(d_output.to(dtype), d_state.to(dtype))
            assert set(ours) == set(wanted)
            pairs |= {f"gradient of {name}": (ours[name], wanted[name]) for name in wanted}
        worst = {what: arrays.deviation(library.raw(a), library.raw(b)) for what, (a, b) in pairs.items()}
        assert max(worst.values()) <= tolerance, f"{dtype}: {worst}"


def positional(function: Callable[..., Any], names: Sequence[str], **fixed: Any) -> Callable[..., Any]:
    """`function` as one that takes our names: they are handed on by position, in the order of `names`."""

    def call(**given: Any) -> Any:
        state = given.pop("initial_state", None)
        assert set(given) == set(names), f"{sorted(given)} are given, {sorted(names)} handed on"
        return function(*(given[name] for name in names), initial_state=state, **fixed)

    return call
