"""Runs a script in a fresh interpreter, and lays out distributions that announce plugins to it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

HERE = Path(__file__).resolve().parent


def python(script: str, *arguments: object, path: tuple[Path, ...] = (), **environment: str) -> str:
    """Run `script`; its standard output. It sees tests/ and `path`; a warning that it does not catch is an error."""
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    seen = os.pathsep.join(filter(None, [*map(str, path), str(HERE), *inherited]))
    # What the caller's own shell asks of scanfield is no part of a test; where compiled kernels lie, conftest says.
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("SCANFIELD_") or name == "SCANFIELD_CACHE_DIR"
    }
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script), *map(str, arguments)],
        env=clean | {"PYTHONPATH": seen} | environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-6000:] or finished.stdout[-6000:]
    return finished.stdout


def announce(folder: Path, name: str, target: str) -> Path:
    """Lay out the metadata of an installed distribution with one entry point in the group of scanfield's backends."""
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[scanfield.backends]\n{name} = {target}\n")
    return folder
