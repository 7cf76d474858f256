"""A pytest plugin: which test reaches which line, and how much CPU time each test takes.

Under `python -m coverage run` the context of every measured line is the test that ran it (`-p reach`, with this folder
on PYTHONPATH). The times go to the JSON file that SCANFIELD_MUTATION_TIMES names.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import coverage
import pytest

_TIMES: dict[str, float] = {}
_FAILED: set[str] = set()  # these could tell nothing of a mutant


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    measuring = coverage.Coverage.current()
    if measuring is not None:
        measuring.switch_context(item.nodeid)
    before = time.process_time()
    try:
        return (yield)
    finally:
        _TIMES[item.nodeid] = round(time.process_time() - before, 4)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _FAILED.add(report.nodeid)


def pytest_sessionfinish() -> None:
    place = os.environ.get("SCANFIELD_MUTATION_TIMES")
    if place:
        Path(place).write_text(
            json.dumps({test: spent for test, spent in _TIMES.items() if test not in _FAILED}, indent=0)
        )
