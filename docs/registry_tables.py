"""Tables of the manual that are made from the registry, so that they cannot differ from what runs.

conf.py writes them into docs/_generated before Sphinx reads the pages that include them.
"""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import scanfield
from scanfield import dispatch
from scanfield.cli import agree, parsers
from scanfield.cli.info import support_table
from scanfield.dispatch import Derived


def write(folder: Path) -> None:
    """All tables, each a file."""
    folder.mkdir(exist_ok=True)
    tables = {
        "support": support_table(),
        "tolerances": tolerances(),
        "operations": operations(),
        "commands": commands(),
    }
    for name, text in tables.items():
        path = folder / f"{name}.md"
        if not path.exists() or path.read_text(encoding="utf-8") != text:  # Sphinx reads again what is newer
            path.write_text(text, encoding="utf-8")


def tolerances() -> str:
    """What each implementation states, beside what `scanfield check` allows any."""
    allowed = agree.TOLERANCE
    lines = ["| implementation | library, device | float32 | float64 |", "|---|---|---|---|"]
    lines.append(f"| the generic forms | any | {allowed['float32']:.0e} | {allowed['float64']:.0e} |")
    for manifest in sorted(dispatch.manifests(), key=lambda manifest: manifest.library):
        for candidate in manifest.candidates:
            own = {dtype: max(candidate.tolerance.get(dtype, 0.0), least) for dtype, least in allowed.items()}
            lines.append(
                f"| `{candidate.name}` of {', '.join(candidate.operations)} | {manifest.library}, {candidate.device} "
                f"| {own['float32']:.0e} | {own['float64']:.0e} |"
            )
    return "\n".join(dict.fromkeys(lines))


def operations() -> str:
    """Each operation with its arrays in their layouts, and what it is made of."""
    lines = ["| operation | arrays, optional ones in brackets | is |", "|---|---|---|"]
    for record in scanfield.operations():
        arrays = [_layout(entry) for entry in record.inputs if entry.role != "index"]
        base = (
            f"`{record.base.name}` with other arguments"
            if isinstance(record, Derived)
            else "a recurrence of its own"
        )
        lines.append(f"| `{record.name}` | {', '.join(arrays)} | {base} |")
    return "\n".join(lines)


def _layout(entry: dispatch.Input) -> str:
    axes = [axis.split("_")[0] for axis in entry.layouts[0].split() if axis != "1"]
    text = f"`{entry.name}` ({', '.join(axes)})"
    return f"[{text}]" if entry.optional else text


def commands() -> str:
    """What `--help` prints, of scanfield and of each command."""
    with mock.patch.dict(os.environ, {"COLUMNS": "110"}):
        _, of = parsers()
        return "\n".join(
            f"## scanfield {name}\n\n```text\n{parser.format_help()}```\n" for name, parser in of.items()
        )
