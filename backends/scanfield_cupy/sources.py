"""A kernel file as the compiler gets it: what it includes is put in its place, each file once."""

from __future__ import annotations

import re
from functools import cache
from importlib import resources

_FOLDER = resources.files("scanfield_cupy") / "kernels"
_INCLUDE = re.compile(r'#include "([\w.]+)"\n')


@cache
def source(file: str) -> str:
    """A kernel file behind what all of them share."""
    seen: set[str] = set()
    return _expanded("common.cuh", seen) + "\n" + _expanded(file, seen)


def _expanded(file: str, seen: set[str]) -> str:
    if file in seen:
        return ""
    seen.add(file)
    text = (_FOLDER / file).read_text(encoding="utf-8")
    return _INCLUDE.sub(lambda found: _expanded(found[1], seen), text)
