"""Whose call it is, and which argument is which."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from scanfield.advice import class_of, shown
from scanfield.dispatch import Record, registry
from scanfield.errors import ArgumentError
from scanfield.keywords import unknown_keyword


class Bound(NamedTuple):
    """A user's call, sorted by kind."""

    record: Record
    arrays: dict[str, Any]
    options: dict[str, Any]
    states_at: Sequence[int] | str | None
    method: str | None


# What other projects call these arguments: an unknown keyword is answered with our name.
ELSEWHERE = {
    "g": "log_decay",
    "gk": "log_decay",
    "alpha": "log_decay",
    "gate": "log_decay",
    "decay": "log_decay",
    "log_alpha": "log_decay",
    "q": "query",
    "k": "key",
    "v": "value",
    "w": "write",
    "p": "erase_key",
    "x": "u",
    "dt": "delta",
    "dt_bias": "delta_bias",
    "dt_softplus": "delta_softplus",
    "h0": "initial_state",
    "initial_states": "initial_state",
    "attention_mask": "cu_seqlens",
    "use_qk_l2norm_in_kernel": "qk_l2norm",
}


def check_binding(name: str, signature: inspect.Signature, args: Any, kwargs: Any) -> inspect.BoundArguments:
    """The arguments by name; ArgumentError if there is one too many, twice, or too few."""
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ArgumentError(f"{name}: {error}; it takes {', '.join(signature.parameters)}") from None


def bind(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Bound:
    """The arguments of a public scan, sorted: arrays by name, options, and what concerns the call alone."""
    record = record_of(op)
    signature = op.signature
    for keyword in kwargs:
        if keyword not in signature.parameters:
            raise unknown_keyword(record.name, keyword, tuple(signature.parameters), ELSEWHERE)
    bound = check_binding(record.name, signature, args, kwargs)
    bound.apply_defaults()
    arguments = dict(bound.arguments)
    names = [entry.name for entry in record.inputs]
    arrays = {name: arguments.pop(name) for name in names}
    states_at, method = arguments.pop("states_at"), arguments.pop("method")
    return Bound(record, arrays, arguments, states_at, method)


def record_of(op: Any) -> Record:
    """The record behind a public scan; ArgumentError for anything else."""
    record = getattr(op, "record", None)
    if record is None and getattr(op, "__name__", "") == "associative_scan":
        raise ArgumentError(
            "op: associative_scan takes any rule, so that it has no hand-written gradient and no candidates; use your "
            "library's own differentiation (torch.autograd, jax.grad)"
        )
    if record is None:
        known = [record.name for record in registry.operations()]
        if isinstance(op, str) and op.rsplit(".", 1)[-1] in known:
            raise ArgumentError(
                f"op: {op!r} is a name; pass the function itself: scanfield.{op.rsplit('.', 1)[-1]}"
            )
        name = op if isinstance(op, str) else getattr(op, "__name__", None)
        told = class_of(op) if name is None else shown(name)
        raise ArgumentError(f"op: {told} is no scan of scanfield; known are {', '.join(known)}")
    return cast(Record, record)
