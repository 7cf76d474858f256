"""The text of a kernel file as compilers get it: no header is looked for on a disk, what is included is put in its place."""

from __future__ import annotations

import re
from functools import cache
from importlib import resources

_INCLUDED = re.compile(r'^#include "([\w.]+)"$', re.MULTILINE)


@cache
def source(file: str) -> str:
    """A kernel file behind what all of them share, with the files that it includes."""
    folder = resources.files("scanfield_cupy") / "kernels"

    def read(name: str) -> str:
        text = (folder / name).read_text(encoding="utf-8")
        return _INCLUDED.sub(lambda found: read(found[1]), text)

    return "\n".join((read("common.cuh"), read(file)))
