"""What a compiler that traces Python may take for a constant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


def constant_for_compilers(function: _Function) -> _Function:
    """Mark a function whose result torch.compile may compute once, while it traces, instead of tracing into it.

    Its arguments must be constants (strings, classes); what it does beside returning is done at trace time, once.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # the name that Dynamo looks for
    return function
