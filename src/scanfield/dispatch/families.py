"""Candidates of what is no recurrence and has a protocol of its own (the PINN's kernels): found by the same manifests.

A manifest names them like any candidate, with the family's name where an operation's would stand; the target is called with
that name and returns whatever the family's protocol asks for.
"""

from __future__ import annotations

from typing import Any

from scanfield.dispatch import registry
from scanfield.dispatch.registry import Loaded, load_candidate
from scanfield.errors import ArgumentError, BackendError

_LOADED: dict[tuple[str, str, str], tuple[Loaded, ...]] = {}


def family(name: str, library: str, device: str) -> tuple[Loaded, ...]:
    """The candidates of a family for one library and device, in order, loaded; those that cannot be say why."""
    key = (name, library, device)
    found = _LOADED.get(key)
    if found is None:
        found = _LOADED[key] = tuple(
            load_candidate(name, candidate)
            for manifest in registry.manifests()
            if manifest.library == library
            for candidate in manifest.candidates
            if name in candidate.operations and candidate.device == device
        )
    return found


def choose(name: str, library: str, device: str, own: dict[str, Any]) -> Any:
    """A forced method's implementation; else the first default candidate's; else the last of ``own``.

    ``own`` holds the forms that need no backend, by name, the one that is meant to run last.
    """
    candidates = family(name, library, device)
    method = registry.forced_method()
    if method is None:
        for entry in candidates:
            if entry.default and not entry.absent and not registry.is_blocked(entry.name):
                return entry.implementation
        return own[list(own)[-1]]
    if method in own:
        return own[method]
    for entry in candidates:
        if entry.name == method:
            if entry.absent or registry.is_blocked(method):
                reason = entry.absent or "turned off by SCANFIELD_BLOCK"
                raise BackendError(f"method {method!r} cannot run {name}: {reason}")
            return entry.implementation
    known = ", ".join([*own, *(entry.name for entry in candidates)])
    raise ArgumentError(
        f"method: {method!r} does not serve {name} on {library} arrays on {device}; known are {known}"
    )
