"""Run the examples of Markdown pages, in order and in one namespace a page, in a folder that is thrown away.

    python docs/run_examples.py                       every page that needs NumPy arrays alone
    python docs/run_examples.py --library torch       every page that imports torch
    python docs/run_examples.py README.md             this page

A `python` block that holds `>>>` is a doctest, any other is executed; a line `$ scanfield ...` of a `console` block runs
that command, which must end well. A block whose library is not installed (CuPy, where there is no GPU) is left out, and
the output says so.
"""

from __future__ import annotations

import argparse
import doctest
import importlib.util
import os
import re
import shlex
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).resolve().parent
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
IMPORT = re.compile(r"^ *(?:>>> )?(?:import|from) (\w+)(?:, (\w+))*", re.MULTILINE)
COMMAND = re.compile(r"^\$ scanfield (.*?)(?:  +#.*)?$", re.MULTILINE)
LIBRARIES = ("torch", "jax", "cupy", "dask")  # a page that imports one of these needs more than NumPy arrays


def pages(library: str) -> list[Path]:
    """The pages whose examples run where this library is installed; those of no library run with "numpy"."""
    listed = [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))]
    return [page for page in listed if "_build" not in page.parts and library in libraries_of(page)]


def libraries_of(page: Path) -> set[str]:
    """The libraries that a page imports, "numpy" if it imports none of them; empty for a page without examples.

    A page on several runs once with each, without the blocks of those that are not installed there.
    """
    blocks = BLOCK.findall(page.read_text(encoding="utf-8"))
    if page.name == "README.md":  # shows one library after another; what is missing is left out
        return {"numpy"}
    imported = {name for _, code in blocks for names in IMPORT.findall(code) for name in names}
    return (imported & set(LIBRARIES) or {"numpy"}) if blocks else set()


def run(page: Path) -> bool:
    """Run the examples of one page; False if a doctest or a command failed (an executed block raises)."""
    text = page.read_text(encoding="utf-8")
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    names: dict[str, object] = {"__name__": "__main__"}
    well, came_from = True, Path.cwd()
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        try:
            for match in BLOCK.finditer(text):
                kind, code, line = match[1], match[2], text.count("\n", 0, match.start(2))
                missing = {x for found in IMPORT.findall(code) for x in found if x and not installed(x)}
                if missing:
                    print(f"{page}:{line + 1}: left out, {', '.join(sorted(missing))} is not installed")
                elif kind == "console":
                    well &= all(command(found) for found in COMMAND.findall(code))
                elif ">>>" in code:
                    test = doctest.DocTestParser().get_doctest(code, names, page.name, str(page), line)
                    runner.run(test, clear_globs=False)
                    names.update(test.globs)
                else:
                    # Empty lines in front give an error the line number that it has in the page.
                    exec(compile("\n" * line + code, str(page), "exec"), names)  # noqa: S102 (our own page)
                    print(f"{page}:{line + 1}: run")
        finally:
            os.chdir(came_from)
    failed, tried = runner.summarize(verbose=False)
    print(f"{page}: {tried} doctest examples, {failed} failed")
    return well and not failed


def installed(name: str) -> bool:
    """Whether a module can be imported here; a stand-in in its place counts."""
    return name in sys.modules or importlib.util.find_spec(name) is not None


def command(words: str) -> bool:
    """Run `scanfield ...`; whether its exit status is 0."""
    from scanfield.cli import main

    status = main(shlex.split(words))
    print(f"scanfield {words}: exit status {status}")
    return status == 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--library", choices=("numpy", *LIBRARIES), default="numpy", help="whose pages (default: numpy)"
    )
    parser.add_argument("pages", nargs="*", type=Path, metavar="PAGE", help="these pages alone")
    given = parser.parse_args()
    passed = [run(page.resolve()) for page in given.pages or pages(given.library)]
    sys.exit(not all(passed))
