"""Holds mypy and pyright to the errors that `user_code.py` marks: `python tests/typing/check_user_code.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

CODE = Path(__file__).with_name("user_code.py")
MARK = "# wrong"


def by_mypy(page: Path) -> dict[int, str]:
    """Line -> the error that mypy tells there, under the project's own strict settings, with whose run it shares a cache."""
    command = [sys.executable, "-m", "mypy", "--output=json", str(page)]
    told = run(command, allowed=(0, 1))
    found = (json.loads(line) for line in told.splitlines() if line.startswith("{"))
    return {each["line"]: each["message"] for each in found if each["severity"] == "error"}


def by_pyright(page: Path) -> dict[int, str]:
    """Line -> the error that pyright tells there."""
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, str(page)]
    told = json.loads(run(command, allowed=(0, 1)))
    return {
        each["range"]["start"]["line"] + 1: each["message"]
        for each in told["generalDiagnostics"]
        if each["severity"] == "error"
    }


def run(command: list[str], allowed: tuple[int, ...]) -> str:
    """What a checker prints; an end for anything but its findings."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in allowed:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def differences(found: dict[int, str], text: str) -> list[str]:
    """Lines that are wrong and not told, and lines that are told and not wrong."""
    lines = text.splitlines()
    wrong = {number for number, line in enumerate(lines, start=1) if MARK in line}
    missed = [f"line {number} is no error: {lines[number - 1]}" for number in sorted(wrong - found.keys())]
    more = [f"line {number}: {found[number]}: {lines[number - 1]}" for number in sorted(found.keys() - wrong)]
    return missed + more


CHECKERS: dict[str, Callable[[Path], dict[int, str]]] = {"mypy": by_mypy, "pyright": by_pyright}


def main() -> int:
    """0 where both checkers find the marked errors and no other."""
    text, status = CODE.read_text(encoding="utf-8"), 0
    for name, checker in CHECKERS.items():
        apart = differences(checker(CODE), text)
        print(f"{name}: {text.count(MARK)} errors expected, {len(apart)} lines apart")
        for line in apart:
            print(f"  {line}")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
