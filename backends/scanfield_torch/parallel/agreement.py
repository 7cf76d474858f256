"""What the ranks of a call must have in common, checked before anything waits for a rank that will not come."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from scanfield.errors import ArgumentError, DtypeError, ScanfieldError, ShapeError, StateError
from scanfield_torch.parallel.link import Link

T = TypeVar("T")

Description = list[tuple[str, str]]
"""Label -> what this rank has under it, as an error would say it."""

_TEXT = 1 << 16  # bytes of a description or an error that travel


def agree(link: Link, local: Callable[[], tuple[T, int, Description]]) -> tuple[T, tuple[int, ...]]:
    """What ``local`` returns first, and everybody's number of tokens.

    ``local`` checks this rank's arguments and describes them. Where it raises, every rank raises; where descriptions
    differ, the error says which ranks have what.
    """
    error: Exception | None = None
    found: Any = None
    tokens = 0
    description: Description = []
    try:
        found, tokens, description = local()
    except Exception as raised:  # told to the others first: they wait for this rank
        error = raised
    text = json.dumps(description) if error is None else f"{type(error).__name__}: {error}"
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")
    header = torch.tensor([error is not None, tokens, digest], dtype=torch.int64, device=link.device)
    rows = [[int(n) for n in row.tolist()] for row in link.gather(header, "the first word", count=False)]
    if any(row[0] for row in rows):
        texts = _texts(link, text)
        if error is not None:
            raise error
        told = "; ".join(f"rank {rank}: {texts[rank]}" for rank, row in enumerate(rows) if row[0])
        raise StateError(f"{link.name}: nothing was computed, since arguments were refused on {told}")
    if len({row[2] for row in rows}) > 1:
        raise _disagreement(link, [json.loads(text) for text in _texts(link, text)])
    return found, tuple(row[1] for row in rows)


def digest(bounds: tuple[int, ...] | None) -> str:
    """Bounds as an error would say them, and as ranks compare them."""
    if bounds is None:
        return "none"
    text = ",".join(map(str, bounds))
    short = text if len(text) < 60 else f"{text[:28]}...{text[-24:]}"
    return f"[{short}] #{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _texts(link: Link, text: str) -> list[str]:
    raw = text.encode()[:_TEXT].ljust(_TEXT, b" ")
    sent = torch.tensor(list(raw), dtype=torch.uint8, device=link.device)
    return [
        bytes(part.tolist()).decode(errors="replace").strip()
        for part in link.gather(sent, "the exchange of errors", count=False)
    ]


def _disagreement(link: Link, descriptions: Sequence[Sequence[Sequence[str]]]) -> Exception:
    rows: list[dict[str, str]] = [{row[0]: row[1] for row in description} for description in descriptions]
    for label in dict.fromkeys(label for row in rows for label in row):
        values: dict[str, list[int]] = {}
        for rank, row in enumerate(rows):
            values.setdefault(row.get(label, "nothing"), []).append(rank)
        if len(values) > 1:
            told = ", ".join(
                f"{value} on rank {' and '.join(map(str, ranks))}" for value, ranks in values.items()
            )
            kinds = {value.split(" ")[0] for value in values}
            shaped = all("(" in value and not value.startswith("None") for value in values)
            kind: type[ScanfieldError] = (
                ArgumentError if not shaped else DtypeError if len(kinds) > 1 else ShapeError
            )
            return kind(f"{label}: {told}; all ranks of {link.name} must agree")
    return ArgumentError(f"{link.name}: the ranks' arguments differ")
