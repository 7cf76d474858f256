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
        close = difflib.get_close_matches(keyword, known, n=1) or [
            other
            for other in known
            if (len(keyword) > 2 and other.startswith(keyword)) or keyword == _initials(other)
        ]
        likely = close[0] if len(close) == 1 else None
    hint = f"did you mean {likely!r}? " if likely else ""
    return ArgumentError(f"{name}: unknown keyword {keyword!r}; {hint}it takes {', '.join(known)}")


def _initials(name: str) -> str:
    """learning_rate: lr"""
    return "".join(word[:1] for word in name.split("_")) if "_" in name else ""


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
    """A function, or a method, that answers a call which does not fit its parameters with ArgumentError.

    A call that fits pays nothing: only after a TypeError its arguments are looked at.
    """
    name = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except TypeError:
            misfit = _misfit(name, inspect.signature(function), args, kwargs)
            if misfit is None:
                raise
        raise misfit

    return call


def _misfit(
    name: str, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> ArgumentError | None:
    """The error for arguments that do not fit; None for those that do."""
    known = tuple(given for given in signature.parameters if given not in ("self", "cls"))
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        any_keyword = any(given.kind is given.VAR_KEYWORD for given in signature.parameters.values())
        for keyword in kwargs:
            if keyword not in known and not any_keyword:
                return unknown_keyword(name, keyword, known)
        return ArgumentError(f"{name}: {error}; it takes {', '.join(known)}")
    return None


C = TypeVar("C", bound=type)


def advised_class(cls: C) -> C:
    """A class whose construction answers arguments that do not fit with ArgumentError."""
    cls.__init__ = advised(cls.__init__)  # type: ignore[misc]  # a class's __init__ and not a subclass's is meant
    return cls
