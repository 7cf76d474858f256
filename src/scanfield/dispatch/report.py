"""The dispatcher's selection, told as a table: what runs a call and why, and which backends there are."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from scanfield.arrays import device_kind, library_of
from scanfield.dispatch import registry
from scanfield.dispatch.operation import VERBS, Call, Verb

_DISTRIBUTIONS = {"cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy")}


_VERBS = (
    "save is the call under vjp, with its backward; step one token; summarise a block as a map of the state"
)


class Verdict(NamedTuple):
    """One candidate for one verb of a call."""

    candidate: str
    verb: str
    taken: bool
    reason: str


@dataclass(frozen=True)
class Explanation:
    """Which implementation runs each verb of a call, and why the others do not. ``str()`` is a table."""

    operation: str
    library: str
    device: str
    compute: str
    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...] = ()
    function: str = ""
    """The name that was called, where that is not the operation's: ``kda`` runs as ``gdn2``."""

    @property
    def taken(self) -> dict[str, str]:
        """Verb -> the candidate that runs it."""
        return {verdict.verb: verdict.candidate for verdict in self.verdicts if verdict.taken}

    def __str__(self) -> str:
        derived = self.function not in ("", self.operation)
        name = f"{self.function}, which runs as {self.operation}," if derived else self.operation
        head = f"{name} on {self.library} arrays ({self.device}), carried in {self.compute}"
        rows = [("candidate", "verb", "", "why")]
        rows += [(v.candidate, v.verb, "taken" if v.taken else "-", v.reason) for v in self.verdicts]
        return "\n".join([head, *format_table(rows), _VERBS, *self.notes])


@dataclass(frozen=True)
class Backend:
    """A library or compiler: ``status`` is ``"usable"``, ``"missing"`` or ``"broken"``."""

    name: str
    status: str
    version: str
    detail: str
    install: str
    candidates: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name} {self.version} {self.status} {self.detail}".strip()


class Backends(tuple[Backend, ...]):
    """The records of ``backends()``; ``str()`` is a table."""

    __slots__ = ()

    def __str__(self) -> str:
        rows = [("backend", "version", "status", "candidates", "")]
        rows += [(b.name, b.version, b.status, ", ".join(b.candidates) or "generic", b.detail) for b in self]
        return "\n".join(format_table(rows))


def explain_call(call: Call, method: str | None = None, notes: Sequence[str] = ()) -> Explanation:
    """Every candidate for every verb of a call, taken or declined, and why."""
    operation = registry.operation_of(call)
    main = call.arrays[operation.main_index]
    library = library_of(main, operation.main).name
    key = (operation.name, library, device_kind(main, library))
    registry.ensure(*key)
    row = registry._TABLE[key]
    form = operation.choose(call)
    forced = registry.forced_method() if method is None else method
    verdicts = []
    for verb in VERBS:
        if verb == "backward":  # goes with save
            continue
        chosen = registry.select(call, verb, method).name
        for entry in (*row.candidates, *row.generic.values()):
            taken = entry.name == chosen
            verdicts.append(Verdict(entry.name, verb, taken, _reason(entry, call, verb, taken, form, forced)))
    found = registry.select(call, "forward", method).implementation
    run = {forced, *(verdict.candidate for verdict in verdicts if verdict.taken)}
    run |= {form} if getattr(found, "generic_form", False) else set()
    # Limits of all forms: who forces one by its name wants to know before.
    forms = {entry.name for entry in row.generic.values()}
    limits = [
        note if (of := note.split(maxsplit=1)[0]) in run or of not in forms else f"(Not run here: {note})"
        for note in notes
    ]
    tell = getattr(found, "notes", None)
    told = (*limits, *(tell(call) if tell is not None else ()))
    return Explanation(operation.name, library, key[2], call.compute, tuple(verdicts), told)


def _reason(
    entry: registry.Loaded, call: Call, verb: Verb, taken: bool, form: str, forced: str | None
) -> str:
    if entry.absent:
        return entry.absent
    if verb not in entry.verbs:
        return registry.missing_verb(entry, verb)
    declined = entry.implementation.declines(call, verb)  # type: ignore[union-attr]  # an absent one returned above
    if declined is not None:
        return declined
    if forced not in (None, "generic"):
        return f"forced by method={forced!r}" if taken else f"method={forced!r} is forced"
    if entry.name.startswith("generic."):
        if taken:
            return "forced by method='generic'" if forced else "no other candidate takes the call"
        return (
            "the generic form for other sizes"
            if entry.name != form
            else "a candidate before it takes the call"
        )
    if forced:
        return "method='generic' is forced"
    if not entry.default:
        return f"runs only by method={entry.name!r}"
    return "the first candidate that takes the call" if taken else "a candidate before it takes the call"


def backends() -> Backends:
    """The libraries and plugins found, what is usable, and what is missing with the command that brings it.

    Returns
    -------
    Backends
        A tuple of ``Backend`` records (name, status, version, detail, install, candidates); ``str()`` is a table.

    Examples
    --------
    >>> import scanfield
    >>> [b.status for b in scanfield.backends() if b.name == "numpy"]
    ['usable']
    """
    registry._discover()
    known = {name: (name, install) for name, install in registry.INSTALL.items()}
    offered: dict[str, list[str]] = {}
    for manifest in registry._MANIFESTS:
        known.setdefault(manifest.library, (manifest.requires, manifest.install))
        offered.setdefault(manifest.library, []).extend(candidate.name for candidate in manifest.candidates)
    records = []
    for name, (module, install) in known.items():
        usable = _importable(module)
        records.append(
            Backend(
                name,
                "usable" if usable else "missing",
                _version(name) if usable else "",
                "" if usable else f"not installed: {install}",
                install,
                tuple(dict.fromkeys(offered.get(name, ()))),
            )
        )
    records += [Backend(entry, "broken", "", reason, "", ()) for entry, reason in registry._BROKEN]
    return Backends(records)


def _importable(module: str) -> bool:
    if module in sys.modules:
        return sys.modules[module] is not None
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _version(name: str) -> str:
    for distribution in _DISTRIBUTIONS.get(name, (name,)):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return ""


def format_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of text, the first one the head, as lines with aligned columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return lines
