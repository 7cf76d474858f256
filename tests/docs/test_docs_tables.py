"""Tables of the manual that are made from the registry: nothing that runs is missing, no number is another."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import scanfield
from scanfield import dispatch
from scanfield.cli import agree, parsers

DOCS = Path(__file__).resolve().parents[2] / "docs"
_spec = importlib.util.spec_from_file_location("registry_tables", DOCS / "registry_tables.py")
registry_tables = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(registry_tables)


def test_every_implementation_and_its_tolerance():
    lines = registry_tables.tolerances().splitlines()
    for manifest in dispatch.manifests():
        for candidate in manifest.candidates:
            served = f"| `{candidate.name}` of {', '.join(candidate.operations)} |"
            (line,) = [
                x
                for x in lines
                if x.startswith(served) and f"| {manifest.library}, {candidate.device} |" in x
            ]
            stated = [
                f"{max(candidate.tolerance.get(d, 0.0), agree.TOLERANCE[d]):.0e}"
                for d in ("float32", "float64")
            ]
            assert line.endswith(f"| {stated[0]} | {stated[1]} |"), line


def test_every_operation_with_all_its_arrays():
    lines = registry_tables.operations().splitlines()
    for record in scanfield.operations():
        (line,) = [x for x in lines if x.startswith(f"| `{record.name}` |")]
        for entry in record.inputs:
            assert entry.role == "index" or f"`{entry.name}` (" in line
    assert "[`initial_state` (sequence, vheads, key, value)]" in "".join(lines)


def test_every_command(tmp_path):
    registry_tables.write(tmp_path / "made")
    text = (tmp_path / "made" / "commands.md").read_text()
    _, commands = parsers()
    assert {f"## scanfield {name}" for name in commands} <= set(text.splitlines())
    before = (tmp_path / "made" / "support.md").stat().st_mtime_ns
    registry_tables.write(
        tmp_path / "made"
    )  # what has not changed is not written: Sphinx would read all again
    assert (tmp_path / "made" / "support.md").stat().st_mtime_ns == before
