"""The examples of the manual's pages, each on the library that it imports; those on NumPy arrays run in `nox -s docs`."""

from __future__ import annotations

import doctest
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from arrays import Library

DOCS = Path(__file__).resolve().parents[2] / "docs"
SCRIPT = DOCS / "run_examples.py"
_spec = importlib.util.spec_from_file_location("run_examples", SCRIPT)
run_examples = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(run_examples)


def run_pages(library: str) -> None:
    """In a process of its own, as a reader's is: with the library's own defaults."""
    pages = run_examples.pages(library)
    command = [sys.executable, "-W", "error::DeprecationWarning:__main__", str(SCRIPT), "--library", library]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert pages and all(f"{page}: " in done.stdout for page in pages)
    left_out = [line for line in done.stdout.splitlines() if "left out" in line]
    assert not [line for line in left_out if library in line], left_out


@pytest.mark.backend("torch")
def test_the_pages_on_torch_run():
    run_pages("torch")


@pytest.mark.backend("jax")
def test_the_pages_on_jax_run():
    run_pages("jax")


@pytest.mark.backend("dask")
def test_the_pages_on_dask_run():
    run_pages("dask")


@pytest.mark.backend("torch", "jax", "dask")
def test_the_examples_of_a_backends_docstrings_run(library: Library):
    """`nox -s docs`, which has none of these libraries, runs those of src/."""
    root = DOCS.parent / "backends"
    files = sorted((root / f"scanfield_{library.name}").rglob("*.py"))
    with_examples = [path for path in files if ">>> " in path.read_text(encoding="utf-8")]
    options = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    for path in with_examples:
        name = ".".join(path.relative_to(root).with_suffix("").parts)
        failed, tried = doctest.testmod(importlib.import_module(name), optionflags=options)
        assert tried > 0 and failed == 0, name
    assert with_examples


def test_every_page_has_a_run_that_meets_it():
    met = {page for library in ("numpy", *run_examples.LIBRARIES) for page in run_examples.pages(library)}
    with_examples = {page for page in DOCS.rglob("*.md") if "```python" in page.read_text()}
    assert with_examples <= met and DOCS / "torch.md" in run_examples.pages("torch")


@pytest.mark.parametrize("page", sorted((DOCS / "notebooks").glob("*.ipynb")), ids=lambda page: page.stem)
def test_a_notebook_lies_here_without_results(page):
    """What is shown is what the manual's own build gave; `%matplotlib inline` shows figures that a call returns."""
    cells = [cell for cell in json.loads(page.read_text())["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    assert cells[0]["source"][0].strip() == "%matplotlib inline"
    assert any("assert " in "".join(cell["source"]) for cell in cells)


def test_a_wrong_example_is_caught(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("```python\n>>> 1 + 1\n3\n```\n")
    assert not run_examples.run(page)
    page.write_text("```python\nassert 1 + 1 == 3\n```\n")
    with pytest.raises(AssertionError):
        run_examples.run(page)
    page.write_text("```console\n$ scanfield info --why nothing   # no such operation\n```\n")
    assert not run_examples.run(page)
    assert "nothing" in capsys.readouterr().err
