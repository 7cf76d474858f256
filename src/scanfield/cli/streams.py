"""Commands that nobody listens to: where stdout or stderr is closed (`2>&-`), Python has None in its place."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout


@contextmanager
def present() -> Iterator[None]:
    """A place to write for stdout and stderr, which is nowhere if they are closed.

    Opened before anything else it also takes their numbers, which a file with the results would get otherwise, and with
    it all that a library in C writes to stderr.
    """
    with ExitStack() as opened:
        for stream, redirect in ((sys.stdout, redirect_stdout), (sys.stderr, redirect_stderr)):
            if stream is None:
                nowhere = opened.enter_context(open(os.devnull, "w", encoding="utf-8"))
                opened.enter_context(redirect(nowhere))
        yield
