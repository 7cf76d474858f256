"""The safetensors file format: an 8-byte length, a JSON header, the arrays' bytes. A page of code, and no package needed.

(Format: github.com/huggingface/safetensors, README, version 0.4 and later. The header has for each name its dtype, shape and
the range of its bytes after the header; all little-endian, row-major, without holes.)
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import reprlib
import secrets
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy

from scanfield.errors import DtypeError, StateError

# Our names of dtypes, theirs, and the bits in which NumPy holds them (it has no bfloat16).
_KINDS = {
    "float16": ("F16", "<f2"),
    "bfloat16": ("BF16", "<u2"),
    "float32": ("F32", "<f4"),
    "float64": ("F64", "<f8"),
}
# In bytes: some 80,000 arrays. The reference implementation reads ten times as much, and lists of lists grow twentyfold.
_LARGEST_HEADER = 10_000_000
_MOST_DIGITS = 20
_MOST_AXES, _LARGEST_SIZE = 32, 2**56


def write(
    path: str | os.PathLike[str], arrays: Mapping[str, tuple[str, Any]], metadata: Mapping[str, str]
) -> None:
    """Write name -> (dtype, NumPy array of its bits), and texts. The file appears whole or not at all."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    pieces, place = [], 0
    for name, (dtype, bits) in arrays.items():
        if dtype not in _KINDS:
            raise DtypeError(f"{name}: dtype {dtype}; allowed in a file are {', '.join(_KINDS)}")
        code, kind = _KINDS[dtype]
        data = numpy.ascontiguousarray(bits).view(kind).tobytes()
        header[name] = {"dtype": code, "shape": list(bits.shape), "data_offsets": [place, place + len(data)]}
        pieces.append(data)
        place += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the bytes of the arrays start at a multiple of 8
    with whole_file(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.writelines(pieces)


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file to write into that takes its place at the end: until then, and if anything fails, the old one is there."""
    target = Path(path)
    # A name that nobody can foresee, and a file that did not exist: a link that lies there is not written through.
    scratch = target.with_name(f"{target.name}.{secrets.token_hex(8)}.part")
    try:
        with open(scratch, "xb") as file:
            yield file
        scratch.replace(target)
    finally:
        scratch.unlink(missing_ok=True)


def read(path: str | os.PathLike[str]) -> tuple[dict[str, tuple[str, Any]], dict[str, str]]:
    """Name -> (dtype, NumPy array of its bits), and the texts; StateError for what is no such file, or has integers in it.

    The file is not trusted: nothing is read or allocated that its size does not cover, each byte belongs to one array, and no
    name stands twice.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe or a device would never end
        raise StateError(f"{path}: not a file")
    with open(path, "rb") as file:
        whole = os.fstat(file.fileno()).st_size
        start = file.read(8)
        size = int.from_bytes(start, "little")
        if len(start) < 8 or size > min(_LARGEST_HEADER, whole - 8):
            raise StateError(f"{path}: no safetensors file, or cut off")
        try:
            # As text: from bytes json would also take UTF-16 and UTF-32.
            header = json.loads(
                file.read(size).decode("utf-8"), object_pairs_hook=_distinct, parse_int=_whole
            )
            metadata = _texts(header.pop("__metadata__", None) or {})
            entries = {name: _entry(path, name, entry) for name, entry in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise StateError(
                f"{path}: the header of the safetensors file is broken: {error!s:.200}"
            ) from None
        _check_places(path, entries, whole - 8 - size)
        return {name: _filled(path, file, 8 + size, entry) for name, entry in entries.items()}, metadata


class _Entry(NamedTuple):
    """Where an array lies, in bytes after the header."""

    name: str
    dtype: str
    kind: str
    shape: tuple[int, ...]
    start: int
    stop: int


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands twice")
    return found


def _whole(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:  # reading many long ones takes for ever
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _texts(given: Any) -> dict[str, str]:
    if not isinstance(given, dict) or not all(isinstance(value, str) for value in given.values()):
        raise ValueError("__metadata__ has to hold texts by name")
    return given


def _entry(path: Any, name: str, entry: Any) -> _Entry:
    if not name.isprintable():  # half a surrogate, or what a terminal would obey where the name is shown
        raise ValueError(f"{name!r:.80} is no name")
    kinds = {code: (dtype, kind) for dtype, (code, kind) in _KINDS.items()}
    if entry["dtype"] not in kinds:
        came = str(entry["dtype"])
        came = came if came.isprintable() else repr(came)
        raise StateError(f"{path}: {name:.80} has dtype {came:.80}; allowed are {', '.join(kinds)}")
    dtype, kind = kinds[entry["dtype"]]
    shape, (start, stop) = entry["shape"], entry["data_offsets"]
    # Checked before they are multiplied.
    if not isinstance(shape, list) or len(shape) > _MOST_AXES or not all(map(_is_size, shape)):
        raise ValueError(f"{name:.80} has shape {reprlib.repr(shape)}")
    if not _is_size(start) or not _is_size(stop):
        raise ValueError(f"{name:.80} has data_offsets {reprlib.repr([start, stop])}")
    wanted = math.prod(shape) * numpy.dtype(kind).itemsize
    # An empty array may have a long axis still, and NumPy none beyond its index.
    if stop - start != wanted or math.prod(n or 1 for n in shape) > _LARGEST_SIZE:
        raise StateError(f"{path}: {name:.80} needs {wanted} bytes, the file has {start} to {stop}")
    return _Entry(name, dtype, kind, tuple(shape), start, stop)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST_SIZE


def _check_places(path: Any, entries: Mapping[str, _Entry], size: int) -> None:
    """StateError unless the arrays lie one after the other and fill the file: shared bytes would multiply its size."""
    place = 0
    for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.stop)):
        if entry.start != place or entry.stop > size:
            raise StateError(
                f"{path}: {entry.name:.80} needs the bytes {entry.start} to {entry.stop} of {size}, expected is a start "
                f"at {place}: the file is cut off, or its arrays overlap or leave holes"
            )
        place = entry.stop
    if place != size:
        raise StateError(f"{path}: {size} bytes of numbers, its header needs {place}")


def _filled(path: Any, file: BinaryIO, begin: int, entry: _Entry) -> tuple[str, Any]:
    bits = numpy.empty(entry.shape, entry.kind)
    file.seek(begin + entry.start)
    if file.readinto(bits.reshape(-1).view(numpy.uint8).data) != entry.stop - entry.start:  # type: ignore[attr-defined]
        raise StateError(f"{path}: cut off while it was read")
    return entry.dtype, bits.astype(bits.dtype.newbyteorder("="), copy=False)
