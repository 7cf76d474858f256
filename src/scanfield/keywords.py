"""Calls with arguments that nobody reads: one error that names them, what was probably meant, and what is taken."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from scanfield.errors import ArgumentError

P = ParamSpec("P")
T = TypeVar("T")


def unknown_keyword(
    name: str, keyword: str, known: Sequence[str], elsewhere: Mapping[str, str] | None = None
) -> ArgumentError:
    """The error for a keyword of ``name`` that is none; ``elsewhere`` are names that others have for the known ones."""
    likely = (elsewhere or {}).get(keyword)
    if likely not in known:
        close = difflib.get_close_matches(keyword, known, n=1)
        likely = close[0] if close else None
    hint = f"did you mean {likely!r}? " if likely else ""
    return ArgumentError(f"{name}: unknown keyword {keyword!r}; {hint}it takes {', '.join(known)}")


def check_no_more(
    name: str, known: Sequence[str], more: Sequence[Any] = (), others: Mapping[str, Any] | None = None
) -> None:
    """ArgumentError for what is left over, ``more`` by position and ``others`` by keyword, in a call of ``name``."""
    for keyword in others or {}:
        raise unknown_keyword(name, keyword, known)
    if more:
        raise ArgumentError(
            f"{name}: {len(known) + len(more)} arguments came; it takes {len(known)}: {', '.join(known)}"
        )


def advised(function: Callable[P, T]) -> Callable[P, T]:
    """A function, or a method, that answers a call which does not fit its parameters with ArgumentError."""
    signature = inspect.signature(function)
    name = function.__qualname__.removesuffix(".__init__")
    known = tuple(given for given in signature.parameters if given not in ("self", "cls"))

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        for keyword in kwargs:
            if keyword not in known:
                raise unknown_keyword(name, keyword, known)
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise ArgumentError(f"{name}: {error}; it takes {', '.join(known)}") from None
        return function(*args, **kwargs)

    return call
