"""Ranks of a group as processes of their own, that live through many jobs.

    with Ranks("torch_jobs", 4) as ranks:
        answers = ranks.run("doubled", 3)        # doubled(link_of_this_rank, 3) on each; answers in their order

A job is a function of a module beside this file. `python ranks.py MODULE RANK SIZE FOLDER` is one rank: it asks the module
for its group (`start(rank, size, folder)`), reads jobs from its standard input and answers on its standard output.
"""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# What torch.compile says of that release of Python alone is no error.
WARNINGS = "error::RuntimeWarning,ignore:Guards may run slower on Python 3.13.0:RuntimeWarning"
PATIENCE = 240.0  # seconds for one job; a rank that takes longer is killed, and the test fails


class Ranks:
    """A group of processes."""

    def __init__(self, module: str, size: int) -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory(prefix="scanfield-ranks-")
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": WARNINGS}
        self._processes = [
            subprocess.Popen(
                [sys.executable, str(HERE / "ranks.py"), module, str(rank), str(size), self._folder.name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
            )
            for rank in range(size)
        ]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all ranks."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                pipe.close()
        self._folder.cleanup()

    def run(self, job: str, *args: Any) -> list[Any]:
        """The answers of all ranks; AssertionError with the trace of a rank that raised."""
        answers = self.answers(job, *args)
        for rank, answer in enumerate(answers):
            assert answer[0] == "done", f"rank {rank}: {answer[-1]}"
        return [answer[1] for answer in answers]

    def answers(self, job: str, *args: Any) -> list[tuple[Any, ...]]:
        """("done", value), ("raised", type, words, trace) or ("died",) of each rank."""
        timer = threading.Timer(PATIENCE, self._kill)
        timer.start()
        try:
            for process in self._processes:
                pickle.dump((job, args), process.stdin)
                process.stdin.flush()
            return [self._answer(process) for process in self._processes]
        finally:
            timer.cancel()

    def _answer(self, process: subprocess.Popen[bytes]) -> tuple[Any, ...]:
        try:
            return pickle.load(process.stdout)
        except EOFError:
            return ("died",)

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()


def main(module_name: str, rank: int, size: int, folder: str) -> None:
    """One rank."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    sys.path[:0] = [str(HERE), str(HERE.parent)]
    module = importlib.import_module(module_name)
    module.start(rank, size, folder)
    while True:
        try:
            job, args = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer: tuple[Any, ...] = ("done", getattr(module, job)(*args))
        except Exception as error:
            answer = ("raised", type(error).__name__, str(error), traceback.format_exc())
        _keep_counts()
        pickle.dump(answer, answers)
        answers.flush()


def _keep_counts() -> None:
    """Under coverage: a rank is killed in the end, and what it has not written by then is lost."""
    counting = "coverage" in sys.modules and sys.modules["coverage"].Coverage.current()
    if counting:
        counting.save()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
