"""A layer of ``scanfield.layers`` on one rank's slice of time: its convolutions look back, its scans run, across ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

import scanfield
from scanfield.errors import ArgumentError
from scanfield.layers.convolution import Convolution
from scanfield.layers.layer import Layer
from scanfield.layers.scan import Scan
from scanfield.layers.tape import Function, Run, Value
from scanfield.shards import bounds_of, whole_bounds
from scanfield_torch.parallel.exchange import Exchange
from scanfield_torch.parallel.halo import looked_back
from scanfield_torch.parallel.link import Link
from scanfield_torch.parallel.sequence import sequence_parallel

Tensor = torch.Tensor


def layer_parallel(
    layer: Layer,
    x: Tensor,
    parameters: Mapping[str, Tensor] | None = None,
    *,
    group: Any = None,
    cu_seqlens: Any = None,
    exchange: Exchange = "scan",
    timeout: float | None = None,
) -> Tensor:
    """A layer's output on this rank's tokens, as one call on the whole sequence would give it; torch's autograd follows.

    Parameters
    ----------
    layer : Layer
        ``MambaBlock``, ``GatedDeltaNet2`` or any other of ``scanfield.layers``, of causal parts.
    x : tensor (batch, time, width)
        This rank's slice of time.
    parameters : mapping of str to tensor, optional
        By the layer's own names, for instance those of a torch module that trains them; the layer's own, if absent.
    group, cu_seqlens, exchange, timeout
        As in ``sequence_parallel``.

    Returns
    -------
    tensor (batch, time, width)

    Raises
    ------
    ArgumentError
        For anything but a layer, and for names that are not the layer's; else as ``sequence_parallel``.

    Notes
    -----
    A block exchanges (conv_width - 1) tokens of its inner width with its neighbour, and the states of its scan. The
    gradient of a parameter is the part of this rank's tokens: sum it over the ranks.

    Examples
    --------
    >>> import torch
    >>> from scanfield.layers import MambaBlock
    >>> from scanfield_torch.parallel import layer_parallel
    >>> torch.distributed.init_process_group(
    ...     "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    ... )
    >>> layer_parallel(MambaBlock(4, 3).init(0, torch), torch.ones(1, 6, 4)).shape
    torch.Size([1, 6, 4])
    >>> torch.distributed.destroy_process_group()
    """
    if not isinstance(layer, Layer):
        raise ArgumentError(f"layer: {type(layer).__name__}; allowed are layers of scanfield.layers")
    run, value = layer.start(x, None, None)
    own = run.parameters
    if parameters is not None:
        if set(parameters) != set(own):
            raise ArgumentError(
                f"parameters: {sorted(set(parameters) ^ set(own))}; the layer's names are {', '.join(sorted(own))}"
            )
        run = replace(run, parameters=parameters)
    bounds = None if cu_seqlens is None else whole_bounds(cu_seqlens)
    given = {field.name: getattr(run, field.name) for field in fields(run)}
    sharded = _ShardedRun(**{**given, "bounds": bounds}, group=group, exchange=exchange, timeout=timeout)
    output: Tensor = layer.finish(sharded, layer.through(sharded, value), x).output
    return output


@dataclass
class _ShardedRun(Run):
    """A run whose functions that look along time ask other ranks. Its bounds are those of the whole pack."""

    group: Any = None
    exchange: Exchange = "scan"
    timeout: float | None = None

    def many(self, function: Function, *inputs: Value | None) -> tuple[Value, ...]:
        """Run an operation."""
        arrays: list[Any] = [None if value is None else value.array for value in inputs]
        if isinstance(function, Convolution):
            outputs = self._convolved(*arrays)
        elif isinstance(function, Scan):
            given: dict[str, Any] = dict(zip(function.names, arrays, strict=True))
            how: dict[str, Any] = {"exchange": self.exchange, "states": "own", "timeout": self.timeout}
            op = getattr(scanfield, function.op)
            outputs = tuple(sequence_parallel(op, **given, **dict(function.options), **how, group=self.group))
        else:
            outputs = function.forward(self.xp, *arrays)
        return tuple([self.enter(array, False) for array in outputs])

    def _convolved(self, x: Tensor, weight: Tensor, bias: Tensor | None, _: None) -> tuple[Tensor, ...]:
        link = Link(self.group, self.timeout, "layer_parallel", [x])
        state, place, bounds = looked_back(x, weight.shape[1] - 1, link, self.bounds)
        first, behind = place.sequences or (0, 0)
        if bounds is None or first == behind:  # no pack, or nothing of it here
            return Convolution(None).forward(self.xp, x, weight, bias, state)
        # Only the first sequence here has begun before.
        rest = state.new_zeros((behind - first - 1, *state.shape[1:]))
        state = torch.cat([state, rest])
        return Convolution(bounds_of(place, bounds)).forward(self.xp, x, weight, bias, state)
