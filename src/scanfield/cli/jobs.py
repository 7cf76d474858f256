"""The comparison of `scanfield check`, its cases dealt out to several processes.

Nearly all of its time goes into compilers of one thread each, so two processes take half as long.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

from scanfield.cli import agree
from scanfield.cli.places import places


def compare(
    operations: Sequence[str],
    libraries: Sequence[str] | None,
    *,
    full: bool,
    everything: bool,
    jobs: int,
    done: Callable[[str], None] = lambda words: None,
) -> agree.Report:
    """The report of `agree.compare` over these operations and libraries, by so many processes.

    They are started afresh (a process that has used JAX or threads cannot be forked), so each finds for itself
    what is installed: what was registered by hand in this process is not there.
    """
    count = len(agree.cases(agree.operations(operations), full=full))
    report = agree.Report()
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory(prefix="scanfield-check-", ignore_cleanup_errors=True) as folder,
        ProcessPoolExecutor(min(jobs, count), context, _share_what_is_compiled, (folder,)) as pool,
    ):
        # One case a task: the first of an operation compiles far longer than the others.
        tasks = {
            pool.submit(_one, tuple(operations), libraries, full, everything, index): index
            for index in range(count)
        }
        parts: dict[int, agree.Report] = {}
        try:
            for task in as_completed(tasks):
                words, parts[tasks[task]] = task.result()
                done(words)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    for index in range(count):  # in their order, whoever was first: two runs print the same
        report.add(parts[index])
    return report


def _share_what_is_compiled(folder: str) -> None:
    """What one process compiled the others need not; libraries read these variables when they are first imported."""
    os.environ.setdefault("SCANFIELD_CACHE_DIR", os.path.join(folder, "numba"))
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = os.path.join(folder, "jax")
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


def _one(
    operations: tuple[str, ...], libraries: Sequence[str] | None, full: bool, everything: bool, index: int
) -> tuple[str, agree.Report]:
    case = agree.cases(agree.operations(operations), full=full)[index]
    return f"{case[0].name}, {case[1].regime.name}", agree.compare_cases(
        [case], places(libraries), everything=everything
    )
