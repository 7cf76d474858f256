"""The safetensors file format: an 8-byte length, a JSON header, the arrays' bytes. A page of code, and no package needed.

(Format: github.com/huggingface/safetensors, README, version 0.4 and later. The header has for each name its dtype, shape and
the range of its bytes after the header; all little-endian, row-major, without holes.)
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy

from scanfield.errors import DtypeError, StateError

# Our names of dtypes, theirs, and the bits in which NumPy holds them (it has no bfloat16).
_KINDS = {
    "float16": ("F16", "<f2"),
    "bfloat16": ("BF16", "<u2"),
    "float32": ("F32", "<f4"),
    "float64": ("F64", "<f8"),
}
_LARGEST_HEADER = 100_000_000  # bytes, the limit of the reference implementation


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
    target = Path(path)
    scratch = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        with open(scratch, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.writelines(pieces)
        scratch.replace(target)
    finally:
        scratch.unlink(missing_ok=True)


def read(path: str | os.PathLike[str]) -> tuple[dict[str, tuple[str, Any]], dict[str, str]]:
    """Name -> (dtype, NumPy array of its bits), and the texts; StateError for what is no such file, or has integers in it."""
    content = Path(path).read_bytes()
    size = int.from_bytes(content[:8], "little")
    if len(content) < 8 or size > min(_LARGEST_HEADER, len(content) - 8):
        raise StateError(f"{path}: no safetensors file, or cut off")
    try:
        header = json.loads(content[8 : 8 + size])
        metadata = dict(header.pop("__metadata__", None) or {})
        data = memoryview(content)[8 + size :]
        return {name: _entry(path, name, entry, data) for name, entry in header.items()}, metadata
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StateError(f"{path}: the header of the safetensors file is broken: {error}") from None


def _entry(path: Any, name: str, entry: Any, data: memoryview) -> tuple[str, Any]:
    kinds = {code: (dtype, kind) for dtype, (code, kind) in _KINDS.items()}
    if entry["dtype"] not in kinds:
        raise StateError(f"{path}: {name} has dtype {entry['dtype']}; allowed are {', '.join(kinds)}")
    dtype, kind = kinds[entry["dtype"]]
    start, stop = entry["data_offsets"]
    wanted = math.prod(entry["shape"]) * numpy.dtype(kind).itemsize
    if not 0 <= start <= stop <= len(data) or stop - start != wanted:
        raise StateError(
            f"{path}: {name} needs {wanted} bytes, the file has {start} to {stop} of {len(data)}"
        )
    bits = numpy.frombuffer(data[start:stop], dtype=kind).reshape(entry["shape"])
    return dtype, bits.astype(bits.dtype.newbyteorder("="))
