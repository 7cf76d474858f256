"""Runs a script in a fresh interpreter, where nothing can be written if need be, and announces plugins to it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# torch.compile says it of that release of Python alone (see pyproject.toml too).
SLOW_GUARDS = "ignore:Guards may run slower on Python 3.13.0:RuntimeWarning"


def python(
    script: str, *arguments: object, path: tuple[Path, ...] = (), seconds: int = 180, **environment: str
) -> str:
    """Run `script`; its standard output. It sees tests/ and `path`; a warning that it does not catch is an error.

    It has so many `seconds` to end by itself.
    """
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    seen = os.pathsep.join(filter(None, [*map(str, path), str(HERE), *inherited]))
    # What the caller's own shell asks of scanfield is no part of a test; where compiled kernels lie, conftest says.
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("SCANFIELD_") or name == "SCANFIELD_CACHE_DIR"
    }
    finished = subprocess.run(
        [
            sys.executable,
            "-W",
            "error",
            "-W",
            SLOW_GUARDS,
            "-c",
            textwrap.dedent(script),
            *map(str, arguments),
        ],
        env=clean | {"PYTHONPATH": seen} | environment,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-6000:] or finished.stdout[-6000:]
    return finished.stdout


def read_only_but(folder: str) -> None:
    """From here on this process may write into that folder alone, which is its temporary folder too.

    By an audit hook, which binds a superuser as well. What is tried elsewhere fails as on a read-only disk.
    """

    def guard(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) or set(mode or "") & set("wax+")
        elif event in ("os.mkdir", "os.rename", "os.remove"):
            path, writes = arguments[0], True
        else:
            return
        if not writes or not isinstance(path, str | bytes):
            return
        if not os.path.abspath(os.fsdecode(path)).startswith((folder, os.devnull)):
            raise PermissionError(errno.EROFS, os.strerror(errno.EROFS), path)

    tempfile.tempdir = folder
    sys.addaudithook(guard)


def announce(folder: Path, name: str, target: str) -> Path:
    """Lay out the metadata of an installed distribution with one entry point in the group of scanfield's backends."""
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[scanfield.backends]\n{name} = {target}\n")
    return folder
