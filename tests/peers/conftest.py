"""Prints which peers the run compared with, and in which versions."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = str(Path(__file__).resolve().parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)

import loading  # noqa: E402  (needs the line above)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section("independent peers")
    for distribution, version in loading.versions().items():
        terminalreporter.line(f"{distribution:<14} {version or 'not installed: its tests were skipped'}")
