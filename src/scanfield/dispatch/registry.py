"""Candidates, the manifests that entry points find, and the selection of what runs.

The hot path reads one immutable row of ``_TABLE``; everything slow (entry points, imports, locks, logging) happens in
``ensure``, which torch.compile treats as a constant, so that a call traces on the very first use too.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple

from scanfield.advice import shown
from scanfield.arrays import Array, device_kind, library_of
from scanfield.dispatch import loops
from scanfield.dispatch.operation import (
    VERBS,
    Call,
    Candidate,
    Derived,
    Grads,
    Implementation,
    Manifest,
    Operation,
    Record,
    Verb,
)
from scanfield.errors import ArgumentError, BackendError
from scanfield.keywords import advised
from scanfield.threads import SLOW_LOCK
from scanfield.tracing import constant_for_compilers

GROUP = "scanfield.backends"
LOGGER = logging.getLogger("scanfield")


class Loaded(NamedTuple):
    """One entry of a row: a candidate for a library and device, with the verbs it may run."""

    name: str
    implementation: Implementation | None
    verbs: frozenset[str]
    default: bool
    absent: str
    """Why there is no implementation (a missing package, an import that failed); empty where there is one."""


class Row(NamedTuple):
    """All that may run an operation on one library and device: candidates in order, then the generic forms."""

    candidates: tuple[Loaded, ...]
    generic: dict[str, Loaded]


class Broken(NamedTuple):
    """A plugin that could not be read."""

    entry_point: str
    reason: str


_OPERATIONS: dict[str, Operation] = {}
_DERIVED: dict[str, Derived] = {}
_TABLE: dict[tuple[str, str, str], Row] = {}
_MANIFESTS: list[Manifest] = []
_BROKEN: list[Broken] = []
_LOCK = SLOW_LOCK


class _Local(threading.local):
    """A thread's own: the method that ``use`` forces."""

    method: str | None = None


_LOCAL = _Local()
_discovered = False
_logged: set[tuple[str, ...]] = set()
_BLOCKED: frozenset[str] = frozenset()
_LOGGING = False


def register(record: Record) -> None:
    """Make an operation known. Called once by the module that defines it."""
    if isinstance(record, Derived):
        _DERIVED[record.name] = record
    else:
        _OPERATIONS[record.name] = record


def operations() -> tuple[Record, ...]:
    """Every operation's record, base and derived, in the order of their definition."""
    return (*_OPERATIONS.values(), *_DERIVED.values())


def operation_of(call: Call) -> Operation:
    """The record of the operation that a call is of."""
    return _OPERATIONS[call.operation]


# ---------------------------------------------------------------------------------------------------------------------
# selection: the hot path


def call(call: Call, verb: Verb = "forward", method: str | None = None) -> Any:
    """Run one verb of a call with the implementation that selection chooses."""
    return getattr(select(call, verb, method).implementation, verb)(call)


def save(call: Call, method: str | None = None) -> tuple[Array, Array, tuple[Array, ...], Loaded]:
    """Output, final state, residuals, and who made them: only that implementation can run backward on them."""
    chosen = select(call, "save", method)
    output, state, residuals = chosen.implementation.save(call)  # type: ignore[union-attr]  # selected by this verb
    return output, state, residuals, chosen


def backward(
    chosen: Loaded,
    call: Call,
    residuals: tuple[Array, ...],
    d_output: Array | None,
    d_final_state: Array | None,
    wanted: Sequence[bool],
) -> Grads:
    """The gradients, by the implementation that saved the residuals."""
    grads: Grads = chosen.implementation.backward(  # type: ignore[union-attr]  # selected by the verb "save"
        call, residuals, d_output, d_final_state, tuple(wanted)
    )
    return grads


def select(call: Call, verb: Verb, method: str | None = None) -> Loaded:
    """What runs this verb of this call: a forced method, else the first candidate that takes it, else generic."""
    operation = _OPERATIONS[call.operation]
    main = call.arrays[operation.main_index]
    library = library_of(main, operation.main).name
    key = (operation.name, library, device_kind(main, library))
    ensure(*key)
    row = _TABLE[key]
    if method is None:
        method = _LOCAL.method
    chosen = _forced(row, call, verb, method, key) if method is not None else _first(row, call, verb)
    if chosen is None:
        chosen = row.generic[operation.choose(call)]
    if _LOGGING:
        log_choice(*key, verb, chosen.name)
    return chosen


def _first(row: Row, call: Call, verb: Verb) -> Loaded | None:
    for entry in row.candidates:
        if entry.default and verb in entry.verbs and entry.implementation.declines(call, verb) is None:  # type: ignore[union-attr]
            return entry
    return None


def _forced(row: Row, call: Call, verb: Verb, method: str, key: tuple[str, str, str]) -> Loaded | None:
    if not isinstance(method, str):
        raise ArgumentError(f"method: expected a name, came {type(method).__name__}")
    if method == "generic":
        return None
    found = row.generic.get(method)
    if found is None:
        found = next((entry for entry in row.candidates if entry.name == method), None)
    if found is None:
        raise _unknown_method(method, row, key)
    if found.absent:
        raise BackendError(f"method {method!r} cannot run {call.operation}: {found.absent}")
    if verb not in found.verbs:
        raise BackendError(
            f"method {method!r} cannot run {verb} of {call.operation}: {missing_verb(found, verb)}"
        )
    reason = found.implementation.declines(call, verb)  # type: ignore[union-attr]  # an absent one raised above
    if reason is not None:
        raise BackendError(f"method {method!r} declines {call.operation}: {reason}")
    return found


def missing_verb(entry: Loaded, verb: Verb) -> str:
    """Why an implementation is not used for a verb."""
    pair = ("save", "backward") if verb in ("save", "backward") else (verb,)
    if entry.name in _BLOCKED or any(f"{entry.name}:{one}" in _BLOCKED for one in pair):
        return "turned off by SCANFIELD_BLOCK"
    lacks = [one for one in pair if not callable(getattr(entry.implementation, one, None))]
    return f"has no {' and no '.join(lacks)}" + (" (save and backward go together)" if len(pair) > 1 else "")


def _unknown_method(method: str, row: Row, key: tuple[str, str, str]) -> Exception:
    operation, library, device = key
    here = ["generic", *row.generic, *(entry.name for entry in row.candidates)]
    elsewhere = {candidate.name: manifest for manifest in _MANIFESTS for candidate in manifest.candidates}
    if method in elsewhere:
        manifest = elsewhere[method]
        return BackendError(
            f"method {method!r} serves {manifest.library} arrays, not {operation} on {library} arrays on {device}; "
            f"here: {', '.join(here)}"
        )
    return ArgumentError(
        f"method: unknown name {method!r}; known for {operation} on {library}: {', '.join(here)}"
    )


@advised
@contextmanager
def use(method: str | None) -> Iterator[None]:
    """Force a method for every call in a ``with`` block, in this thread only.

    Parameters
    ----------
    method : str or None
        ``"generic"``, or a name that ``scanfield.explain`` or ``scanfield.backends`` shows.

    Raises
    ------
    ArgumentError
        At once for what is no name, by the call inside for an unknown one.
    BackendError
        By the call inside, when the method declines it or serves another library.

    Examples
    --------
    >>> import numpy, scanfield
    >>> a, b = numpy.full((1, 3, 1), 0.5), numpy.ones((1, 3, 1))
    >>> with scanfield.use(method="generic"):
    ...     scanfield.linear_scan(a, b).output[0, :, 0]
    array([1.  , 1.5 , 1.75])
    """
    if not isinstance(method, str | None):
        raise ArgumentError(f"method: {shown(method)}; allowed is the name of a method, or None")
    before = _LOCAL.method
    _LOCAL.method = method
    try:
        yield
    finally:
        _LOCAL.method = before


def forced_method() -> str | None:
    """The method that ``use`` forces in this thread (for a backend whose tasks run in other threads)."""
    return _LOCAL.method


def implementation(operation: str, name: str) -> Implementation:
    """One named implementation of an operation: how a backend reaches generic code or another backend's kernels."""
    record = _OPERATIONS[operation]
    if name.startswith("generic."):
        return record.generic[name.removeprefix("generic.")]
    _discover()
    for manifest in _MANIFESTS:
        for candidate in manifest.candidates:
            if candidate.name == name and operation in candidate.operations:
                loaded = load_candidate(operation, candidate)
                if loaded.implementation is None:
                    raise BackendError(f"{name} cannot run {operation}: {loaded.absent}")
                return loaded.implementation
    raise BackendError(f"no implementation of {operation} is called {name!r}")


def row_of(key: tuple[str, str, str]) -> Row | None:
    """What may run an operation on a library's arrays on a device, if that was asked for before; replaced, never changed."""
    return _TABLE.get(key)


# ---------------------------------------------------------------------------------------------------------------------
# discovery: everything slow


@constant_for_compilers
def ensure(operation: str, library: str, device: str) -> bool:
    """Fill the table's row for this operation, library and device, if it is not there; True when it stands.

    Called before the table is read: a compiler that traces the first call sees it as it is at its first reading.
    """
    key = (operation, library, device)
    if key in _TABLE:
        return True
    with _LOCK:
        if key not in _TABLE:
            _discover()
            record = _OPERATIONS[operation]
            candidates = tuple(
                load_candidate(operation, candidate)
                if candidate.device == device
                else _elsewhere(candidate, device)
                for manifest in _MANIFESTS
                if manifest.library == library
                for candidate in _offered(manifest, operation, device)
            )
            generic = {
                f"generic.{form}": Loaded(f"generic.{form}", code, _verbs(f"generic.{form}", code), True, "")
                for form, code in record.generic.items()
            }
            _load_loop(library)
            _TABLE[key] = Row(candidates, generic)
    return True


@constant_for_compilers
def log_choice(operation: str, library: str, device: str, verb: str, candidate: str) -> bool:
    """Log a choice, once for each (operation, library, device, verb, candidate)."""
    entry = (operation, library, device, verb, candidate)
    if entry not in _logged:
        _logged.add(entry)
        LOGGER.warning("%s on %s arrays (%s), %s: %s", operation, library, device, verb, candidate)
    return True


def _discover() -> None:
    """Read the environment and every plugin's manifest, once. A plugin that fails is one warning, and listed."""
    global _discovered, _LOGGING
    with _LOCK:
        if _discovered:
            return
        _discovered = True
        _LOGGING = os.environ.get("SCANFIELD_LOG", "") not in ("", "0")
        messages = []
        for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
            try:
                _MANIFESTS.append(_manifest(entry))
            # Whatever a stranger's plugin raises must not take the library down with it.
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                _BROKEN.append(Broken(f"{entry.name} ({entry.value})", reason))
                messages.append(
                    f"the scanfield plugin {entry.name} ({entry.value}) is broken and left out: {reason}"
                )
        messages += _read_blocked()
        for message in messages:
            warnings.warn(message, RuntimeWarning, stacklevel=2)


def _manifest(entry: EntryPoint) -> Manifest:
    manifest = entry.load()
    if not isinstance(manifest, Manifest):
        raise TypeError(f"expected a scanfield.dispatch.Manifest, came {type(manifest).__name__}")
    return manifest


def is_blocked(name: str) -> bool:
    """Whether ``SCANFIELD_BLOCK`` turns a candidate off."""
    return name in _BLOCKED


def _read_blocked() -> list[str]:
    """``SCANFIELD_BLOCK=name,name:verb`` turns candidates, or one verb of them, off."""
    global _BLOCKED
    asked = [part.strip() for part in os.environ.get("SCANFIELD_BLOCK", "").split(",") if part.strip()]
    known = candidate_names()
    messages = []
    for part in asked:
        name, _, verb = part.partition(":")
        if name not in known:
            messages.append(
                f"SCANFIELD_BLOCK: unknown candidate {name!r}; known are {', '.join(known) or 'none'}"
            )
        elif verb and verb not in VERBS:
            messages.append(f"SCANFIELD_BLOCK: unknown verb {verb!r} of {name}; known are {', '.join(VERBS)}")
    _BLOCKED = frozenset(asked)
    return messages


def manifests() -> tuple[Manifest, ...]:
    """What the plugins offer, in the order of their entry points' names."""
    _discover()
    return tuple(_MANIFESTS)


def candidate_names() -> tuple[str, ...]:
    """The names of all candidates that plugins offer, generic code aside (which cannot be turned off)."""
    return tuple(
        dict.fromkeys(candidate.name for manifest in _MANIFESTS for candidate in manifest.candidates)
    )


def _offered(manifest: Manifest, operation: str, device: str) -> list[Candidate]:
    """A manifest's candidates for an operation, in order; of those of one name that for this device, else the first."""
    found: dict[str, Candidate] = {}
    for candidate in manifest.candidates:
        if operation in candidate.operations and (candidate.name not in found or candidate.device == device):
            found[candidate.name] = candidate
    return list(found.values())


# What brings each library or compiler that scanfield knows; a plugin's manifest adds its own.
INSTALL = {
    "numpy": "pip install numpy",
    "numba": "pip install 'scanfield[numba]'",
    "torch": "pip install 'scanfield[torch]'",
    "jax": "pip install 'scanfield[jax]'",
    "dask": "pip install 'scanfield[dask]'",
    "cupy": "pip install 'scanfield[cupy-cuda13]' (or cupy-cuda12)",
}


def _absence(candidate: Candidate, error: ImportError) -> str:
    """Why a candidate cannot be imported, and the way out where it is a package that is not there."""
    packages = [module.partition(".")[0] for module in candidate.requires]
    if isinstance(error, ModuleNotFoundError) and error.name in packages:
        return f"{error.name} is not installed" + (
            f": {INSTALL[error.name]}" if error.name in INSTALL else ""
        )
    return f"{error}" + (f" (needs {', '.join(candidate.requires)})" if candidate.requires else "")


def load_candidate(operation: str, candidate: Candidate) -> Loaded:
    """A candidate's implementation of an operation, or why there is none."""
    try:
        for module in candidate.requires:
            importlib.import_module(module)
        module_name, _, attribute = candidate.target.partition(":")
        code = getattr(importlib.import_module(module_name), attribute)(operation)
    except ImportError as error:
        return Loaded(candidate.name, None, frozenset(), candidate.default, _absence(candidate, error))
    except BackendError as error:  # of another candidate that it rests on
        return Loaded(candidate.name, None, frozenset(), candidate.default, str(error))
    # As with manifests: one broken candidate leaves the others, and the generic code, running.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        warnings.warn(
            f"the candidate {candidate.name} is broken and left out: {reason}", RuntimeWarning, stacklevel=2
        )
        return Loaded(candidate.name, None, frozenset(), candidate.default, reason)
    return Loaded(candidate.name, code, _verbs(candidate.name, code), candidate.default, "")


def _elsewhere(candidate: Candidate, device: str) -> Loaded:
    reason = f"runs on {candidate.device}, not on {device}"
    return Loaded(candidate.name, None, frozenset(), candidate.default, reason)


def _verbs(name: str, code: Implementation) -> frozenset[str]:
    if name in _BLOCKED:
        return frozenset()
    have = {
        verb for verb in VERBS if callable(getattr(code, verb, None)) and f"{name}:{verb}" not in _BLOCKED
    }
    # Residuals belong to who made them: save without backward, or the reverse, serves nobody.
    if not {"save", "backward"} <= have:
        have -= {"save", "backward"}
    return frozenset(have)


def tell(library: str, classes: Iterable[type]) -> None:
    """Tell a library's backend of classes whose instances hold its arrays (JAX: nodes of a pytree)."""
    _discover()
    for manifest in _MANIFESTS:
        if manifest.library == library and manifest.classes:
            module_name, _, attribute = manifest.classes.partition(":")
            told = getattr(importlib.import_module(module_name), attribute)
            for found in classes:
                told(found)


def _load_loop(library: str) -> None:
    for manifest in _MANIFESTS:
        if manifest.library == library and manifest.loop and library not in loops.LOOPS:
            module_name, _, attribute = manifest.loop.partition(":")
            loops.LOOPS[library] = getattr(importlib.import_module(module_name), attribute)
