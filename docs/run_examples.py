"""Run the Python blocks of Markdown pages, in order and in one namespace a page.

    python docs/run_examples.py README.md

A block that holds `>>>` is a doctest; any other is executed. A block whose library is not installed (CuPy, where there
is no GPU) is left out, and the output says so.
"""

from __future__ import annotations

import doctest
import importlib.util
import re
import sys
from pathlib import Path

BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
IMPORT = re.compile(r"^(?:>>> )?(?:import|from) (\w+)", re.MULTILINE)


def run(page: Path) -> bool:
    """Run the blocks of one page; False if a doctest failed (an executed block raises)."""
    text = page.read_text(encoding="utf-8")
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    names: dict[str, object] = {"__name__": "__main__"}
    for match in BLOCK.finditer(text):
        code, line = match[1], text.count("\n", 0, match.start(1))
        missing = {name for name in IMPORT.findall(code) if importlib.util.find_spec(name) is None}
        if missing:
            print(f"{page}:{line + 1}: left out, {', '.join(sorted(missing))} is not installed")
        elif ">>>" in code:
            test = doctest.DocTestParser().get_doctest(code, names, page.name, str(page), line)
            runner.run(test, clear_globs=False)
            names.update(test.globs)
        else:
            # Empty lines in front give an error the line number that it has in the page.
            exec(compile("\n" * line + code, str(page), "exec"), names)  # noqa: S102 (our own page)
            print(f"{page}:{line + 1}: run")
    failed, tried = runner.summarize(verbose=False)
    print(f"{page}: {tried} doctest examples, {failed} failed")
    return not failed


if __name__ == "__main__":
    passed = [run(Path(page)) for page in sys.argv[1:]]
    sys.exit(not all(passed))
