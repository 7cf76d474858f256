"""The command `scanfield` with the stand-in in CuPy's place: ``python tests/cuda/on_standin.py check --library cupy``.

The kernels run on the emulator, so that whoever has no card compares them with every other implementation.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import emulator
import standin

from scanfield.cli import main as command
from scanfield.cli import places


@contextmanager
def installed() -> Iterator[str | None]:
    """The stand-in as an installed library with a place; or why there is none."""
    reason = emulator.missing()
    if reason:
        yield reason
        return
    found = places._FINDERS["cupy"]
    # An emulated thread takes some thousand times what a card's does: a selection of the cases, unless asked for by name.
    places._FINDERS["cupy"] = lambda: (replace(place, pace="compiles") for place in found())
    try:
        with standin.installed():
            yield None
    finally:
        places._FINDERS["cupy"] = found


def main(arguments: list[str]) -> int:
    """The command's exit status."""
    with installed() as reason:
        if reason:
            print(f"without the CUDA kernels: {reason}", file=sys.stderr)
        return command(arguments)


if __name__ == "__mp_main__":  # a process that takes some of the cases begins with this file
    kept = installed()
    kept.__enter__()

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
