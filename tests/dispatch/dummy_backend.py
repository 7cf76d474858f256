"""A stranger's plugin, in as many manifests as there are ways to behave; a test announces one of them.

Every implementation here computes by the generic code, which it reaches the way a backend has to: by name, through the
dispatcher. `CALLS` lists what was asked of them.
"""

from __future__ import annotations

from typing import Any

from scanfield import dispatch
from scanfield.dispatch import Candidate, Manifest

CALLS: list[tuple[str, str, str]] = []  # candidate, operation, verb
MADE: list[tuple[str, str]] = []  # candidate, operation: which implementations were made

OPERATIONS = ("linear_scan", "selective_scan", "gdn2")


class Loopback:
    """All verbs, handed on to the recurrent generic form."""

    name = "numpy.loopback"

    def __init__(self, operation: str) -> None:
        MADE.append((self.name, operation))
        self.operation = operation
        self.inner = dispatch.implementation(operation, "generic.recurrent")

    def note(self, verb: str) -> None:
        CALLS.append((self.name, self.operation, verb))

    def declines(self, call: dispatch.Call, verb: str) -> str | None:
        return None

    def forward(self, call: dispatch.Call) -> Any:
        self.note("forward")
        return self.inner.forward(call)

    def save(self, call: dispatch.Call) -> Any:
        self.note("save")
        return self.inner.save(call)

    def backward(self, call: dispatch.Call, residuals: Any, d_output: Any, d_state: Any, wanted: Any) -> Any:
        self.note("backward")
        return self.inner.backward(call, residuals, d_output, d_state, wanted)

    def step(self, call: dispatch.Call) -> Any:
        self.note("step")
        return self.inner.step(call)

    def summarise(self, call: dispatch.Call) -> Any:
        self.note("summarise")
        return self.inner.summarise(call)


class Spare(Loopback):
    """The same, but never chosen unless asked for by name."""

    name = "numpy.spare"


class Half(Loopback):
    """Keeps residuals of its own that nobody can run backward on: forward and save, no backward."""

    name = "numpy.half"
    backward = None  # type: ignore[assignment]  # the verb is missing
    step = None  # type: ignore[assignment]
    summarise = None  # type: ignore[assignment]

    def save(self, call: dispatch.Call) -> Any:
        raise AssertionError("save was called although there is no backward for its residuals")


class Picky(Loopback):
    """Takes calls of at most four tokens."""

    name = "numpy.picky"

    def declines(self, call: dispatch.Call, verb: str) -> str | None:
        time = next(x for x in call.arrays if x is not None).shape[1]
        return None if time <= 4 else f"takes at most 4 tokens, not {time}"


class Faulty(Loopback):
    """Cannot even be made."""

    name = "numpy.faulty"

    def __init__(self, operation: str) -> None:
        raise ValueError("no such instruction")


def candidate(kind: type[Loopback], *, library: str = "numpy", **more: Any) -> Candidate:
    return Candidate(
        name=kind.name.replace("numpy", library),
        operations=OPERATIONS,
        device=more.pop("device", "cpu"),
        target=f"dummy_backend:{kind.__name__}",
        **more,
    )


def manifest(*candidates: Candidate, library: str = "numpy") -> Manifest:
    return Manifest(
        library=library, requires=library, install="pip install dummy-backend", candidates=candidates
    )


LOOPBACK = manifest(candidate(Loopback))
SPARE = manifest(candidate(Spare, default=False))
HALF = manifest(candidate(Half))
PICKY = manifest(candidate(Picky))
FAULTY = manifest(candidate(Faulty))
WANTING = manifest(candidate(Loopback, requires=("a_library_that_nobody_has",)))
TORCH = manifest(candidate(Loopback, library="torch"), library="torch")
CUPY = manifest(candidate(Loopback, library="cupy", device="cuda"), library="cupy")
SEVERAL = manifest(candidate(Picky), candidate(Loopback), candidate(Spare, default=False))
NOT_A_MANIFEST = {"library": "numpy"}
