"""What the calls that run in a thread have left for the ones inside of them.

One hook of a torch module opens an entry, another one closes it, after an error too. After an interrupt torch calls
none: so each entry knows the Python frame of its call, and one whose call is over is dropped when somebody looks.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any


def calling() -> FrameType | None:
    """The frame that has called the function that asks; None while torch.compile traces, which looks at no frames."""
    torch: Any = sys.modules["torch"]
    return None if torch.compiler.is_compiling() else sys._getframe(2)


class Open(threading.local):
    """The entries of a thread, innermost last."""

    def __init__(self) -> None:
        self._entries: list[tuple[FrameType | None, Any]] = []

    def enter(self, entry: Any, call: FrameType | None) -> None:
        """Open an entry, for as long as a call runs."""
        self.running()
        self._entries.append((call, entry))

    def leave(self) -> None:
        """Close the innermost entry."""
        if self._entries:
            self._entries.pop()

    def running(self) -> list[Any]:
        """The entries of the calls that still run."""
        torch: Any = sys.modules["torch"]
        while not torch.compiler.is_compiling() and self._entries and not _runs(self._entries[-1][0]):
            self._entries.pop()
        return [entry for _, entry in self._entries]

    def innermost(self) -> Any:
        """The last one of them, or None."""
        found = self.running()
        return found[-1] if found else None


def _runs(call: FrameType | None) -> bool:
    if call is None:
        return True
    at: FrameType | None = sys._getframe(1)
    while at is not None and at is not call:
        at = at.f_back
    return at is call
