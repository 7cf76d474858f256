"""The mutation check changes what it says, and draws the same again."""

from __future__ import annotations

import ast
from pathlib import Path

import mutants as module
from mutants import PACKAGES, draw, mutants

ROOT = Path(__file__).resolve().parent.parent.parent / module.ROOT
SOURCE = '''"""A docstring: 1 + 2."""

Number = int | float


def f(x: "int | None", n: int = 3) -> "int | float":
    """Another: 3 < 4."""
    if not (x is None or n<=2):  # é < 3
        raise ValueError(f"{n + 1}: {x * 2}")
    y = [-x, (x) - # not a + here
         n][0:n]
    if isinstance(y, int | list) and x not in y:
        y += [True]
    return y if n else None
'''
CHANGES = {
    "n: int = 3 -> n: int = 4",
    "if not (x -> if     (x",
    "x is None or n -> x is not None or n",
    "is None or n -> is None and n",
    "n<=2 -> n<2",
    "n<=2 -> n<=3",
    "[-x, (x) -> [ x, (x)",
    "(x) - # not -> (x) + # not",
    "][0:n] -> ][1:n]",
    "][0:n] -> ][0:]",
    "list) and x -> list) or x",
    "x not in y -> x in y",
    "y += [ -> y -= [",
    "[True] -> [False]",
    "y if n else None -> None",
    "if n else -> if (not n) else",
}


def test_every_change_is_one_that_is_meant(tmp_path):
    path = tmp_path / "sample.py"
    path.write_text(SOURCE)
    found = mutants(path, tmp_path)
    want = {SOURCE.replace(*change.split(" -> ")) for change in CHANGES}
    assert {mutant.applied(SOURCE) for mutant in found} == want and len(found) == len(want)
    for mutant in found:
        ast.parse(mutant.applied(SOURCE))
        assert mutant.at_import == (mutant.line == 6)


def test_the_draw_is_the_same_again_and_takes_packages_in_turn(tmp_path):
    for package in PACKAGES:
        (tmp_path / package).mkdir()
        smallest = min((ROOT / package).glob("[a-z]*.py"), key=lambda path: path.stat().st_size)
        (tmp_path / package / smallest.name).write_text(smallest.read_text() + SOURCE)
    one, again, other = (draw(seed, 40, tmp_path) for seed in (0, 0, 1))
    assert one == again and one != other
    assert one[:8] == draw(0, 8, tmp_path)
    assert [Path(m.file).parent.name for m in one] == list(PACKAGES) * 10


def test_an_edit_elsewhere_keeps_the_names(tmp_path):
    path = tmp_path / "sample.py"
    path.write_text(SOURCE)
    before = {mutant.name for mutant in mutants(path, tmp_path)}
    path.write_text(SOURCE.replace("Number", "\n\nOTHER = 1\nNumber"))
    after = {mutant.name for mutant in mutants(path, tmp_path)}
    assert before < after and len(after) == len(before) + 1
