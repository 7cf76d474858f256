"""Operations on tensors as the tests of this folder call them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from examples import Example, rng_of

import scanfield
from scanfield.dispatch import Call
from scanfield.scans.binding import bind

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "dispatch"))

from small_calls import EXAMPLES as SMALL

METHOD = "torch.numba"


def tensors(
    inputs: dict[str, np.ndarray], dtype: torch.dtype = torch.float64, **options: Any
) -> dict[str, Any]:
    """Complex data get the complex dtype of the same width."""
    return {
        name: torch.tensor(x, dtype=dtype.to_complex() if x.dtype.kind == "c" else dtype, **options)
        for name, x in inputs.items()
    }


def canonical(example: Example, dtype: torch.dtype = torch.float64, **options: Any) -> Call:
    """What an implementation sees of an example."""
    function = getattr(scanfield, example.op)
    bound = bind(function, (), {**tensors(example.inputs, dtype, **options), **example.options})
    return bound.record.prepare(bound.arrays, bound.options).call


def arguments(call: Call) -> tuple[Any, ...]:
    """The arguments of a call's operator."""
    return (*call.arrays, *call.options, call.compute)


class Line:
    """An operation along a line: all its arrays move with one short vector, so that derivatives are small."""

    size = 2

    def __init__(self, operation: str, verb: str) -> None:
        inputs, options, token = SMALL[operation]
        self._function, self._verb, self._options = getattr(scanfield, operation), verb, options
        state = inputs.get("initial_state")
        if verb == "step":
            self._options = {k: x for k, x in options.items() if k not in ("reverse", "chunk_size")}
            inputs = {"state": state, **token} if state is not None else token
        draw = rng_of(f"{operation} {verb}")
        self._start = tensors(inputs)
        self._along = {
            name: torch.tensor(draw.uniform(-0.1, 0.1, (self.size, *x.shape))) for name, x in inputs.items()
        }

    def __call__(self, t: torch.Tensor, method: str | None = None) -> torch.Tensor:
        """All numbers that come out, at the place t."""
        given = {name: x + torch.tensordot(t, self._along[name], dims=1) for name, x in self._start.items()}
        if self._verb == "vjp":
            result, pullback = scanfield.vjp(self._function, **given, **self._options, method=method)
            found = [*result, *pullback(result.output, result.final_state).values()]
        else:
            call = self._function.step if self._verb == "step" else self._function
            if self._verb == "step" and "state" not in given:
                given = {"state": None, **given}
            found = list(call(**given, **self._options, method=method))
        return torch.cat([x.reshape(-1) for x in found])

    def loss(self, t: torch.Tensor) -> torch.Tensor:
        """A number that is not linear in the output."""
        return (self(t) ** 2).sum()
