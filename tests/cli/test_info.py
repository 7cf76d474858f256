"""`scanfield info`, and the README's support table, which it prints."""

from __future__ import annotations

import importlib.util
import io
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import scanfield
from scanfield.cli import console, info, main, parsers
from scanfield.pinn import progress

README = Path(__file__).resolve().parents[2] / "README.md"


def test_info_names_every_operation_and_what_is_missing(capsys):
    assert main(["info"]) == 0
    shown = capsys.readouterr().out
    assert f"scanfield {scanfield.__version__}" in shown
    for record in scanfield.operations():
        assert f"\n{record.name} " in shown
    for backend in scanfield.backends():
        if backend.status == "missing":
            assert backend.install in shown


def test_tables_fit_the_terminal(monkeypatch):
    rows = [
        ("name", "many", "note"),
        ("a", "one, two, three, four", "install 'that-has-a-hyphen'"),
        ("b", "", ""),
    ]
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    assert "one, two, three, four  install 'that-has-a-hyphen'" in console.table(rows)  # no terminal
    monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    for columns, widest in (("80", 56), ("50", 50), ("10", 33)):  # the longest words take 33
        monkeypatch.setenv("COLUMNS", columns)
        shown = console.table(rows).splitlines()
        assert max(map(len, shown)) == widest and all(line == line.rstrip() for line in shown)
        words = [word for line in (shown[0], *shown[2:]) for word in line.split()]
        assert sorted(words) == sorted(" ".join(cell for row in rows for cell in row).split())


def test_info_as_json(capsys):
    assert main(["info", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    on_numpy = {run["function"]: run["taken"]["forward"] for run in told["runs"] if run["place"] == "numpy"}
    assert set(on_numpy) == {record.name for record in scanfield.operations()}
    compiled = importlib.util.find_spec("numba") is not None
    assert on_numpy["linear_scan"] == ("numpy.numba" if compiled else "generic.recurrent")


def test_why_shows_every_candidate_of_one_operation(capsys):
    assert main(["info", "--why", "gdn2"]) == 0
    shown = capsys.readouterr().out
    assert "gdn2 on numpy arrays (cpu)" in shown
    assert "generic.chunk" in shown
    assert main(["info", "--why", "kda"]) == 0  # the name that was asked for, and what runs for it
    assert "kda, which runs as gdn2, on numpy arrays (cpu)" in capsys.readouterr().out
    assert main(["info", "--why", "gnd2"]) == 2
    assert "unknown operation 'gnd2'" in capsys.readouterr().err


def test_the_support_table_of_the_readme_is_the_registrys():
    text = README.read_text(encoding="utf-8")
    table = text.split("<!-- support-table: scanfield info --support-table -->\n")[1].split("\n<!-- end")[0]
    assert table.strip() == info.support_table()


@pytest.mark.parametrize("arguments", [["info", "--support-table"], ["--help"]])
def test_python_m_scanfield_is_the_command(arguments):
    import os

    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "scanfield", *arguments],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_a_missing_command_is_status_2_and_told_which_there_are(capsys):
    assert main([]) == 2
    told = capsys.readouterr()
    assert not told.out
    listed = {line.split()[0] for line in told.err.splitlines() if line.startswith("    ")}
    assert listed >= set(parsers()[1])
    assert "scanfield check   " in told.err


def test_version(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out.split() == ["scanfield", scanfield.__version__]


def test_what_a_report_of_a_fault_needs(capsys, monkeypatch):
    monkeypatch.setenv("SCANFIELD_POOL_BYTES", "0")
    assert main(["info"]) == 0
    shown = capsys.readouterr().out
    assert "devices: numpy on cpu" in shown and "settings: " in shown and "SCANFIELD_POOL_BYTES=0" in shown
    assert main(["info", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["threads"]["scanfield"] == scanfield.get_num_threads()
    assert told["settings"]["SCANFIELD_POOL_BYTES"] == "0"
    assert {"library": "numpy", "device": "cpu", "dtypes": ["float32", "float64"]} in told["devices"]


def test_why_as_json(capsys):
    assert main(["info", "--why", "gdn2", "--json"]) == 0
    on_numpy = next(each for each in json.loads(capsys.readouterr().out) if each["library"] == "numpy")
    assert all(verdict["reason"] for verdict in on_numpy["verdicts"])
    assert {"forward", "save", "step"} <= {v["verb"] for v in on_numpy["verdicts"] if v["taken"]}


@pytest.mark.parametrize("command", ["info", "check", "bench", "helmholtz", "demo"])
def test_every_command_helps_with_examples_that_parse(command):
    """Each line of the examples is a call that the parser takes."""
    parser, commands = parsers()
    shown = commands[command].format_help()
    examples = [line.strip() for line in shown.split("examples:")[1].splitlines() if "scanfield " in line]
    assert len(examples) >= 2
    for line in examples:
        words = line.split("  ")[0].split("|")[0].split(">")[0]
        assert parser.parse_args(shlex.split(words)[1:]).command == command


def test_progress_is_for_terminals(monkeypatch):
    class Stream(io.StringIO):
        def __init__(self, terminal):
            super().__init__()
            self.isatty = lambda: terminal

    shown = {}
    for terminal, rich in ((False, True), (False, False), (True, False)):
        stream = Stream(terminal)
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(console, "find_spec", lambda name, rich=rich: object() if rich else None)
        with console.progress("timing", 2) as tick:
            tick("one")
            tick("two")
        with console.progress("timing", 1, quiet=True) as tick:
            tick("three")
        shown[terminal, rich] = stream.getvalue()
    assert shown[False, True] == shown[False, False] == ""
    assert "timing: 2 of 2" in shown[True, False] and "two" in shown[True, False]
    assert "three" not in shown[True, False]


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_stream_that_is_closed_is_no_fault(monkeypatch, capsys, closed):
    """Python has None in its place then; the status is that of what was found, and the other stream has its words."""
    monkeypatch.setattr(sys, closed, None)
    assert main(["check", "--operation", "linear_scan", "--library", "numpy"]) == 0
    assert main(["info", "--why", "nothing"]) == 2
    assert getattr(sys, closed) is None
    told = capsys.readouterr()
    assert bool(told.out) == (closed == "stderr") and bool(told.err) == (closed == "stdout")


@pytest.mark.parametrize("training", [False, True])
def test_a_terminal_with_rich_has_a_bar(monkeypatch, training):
    """Of the steps of a command, and of the iterations of a training."""
    pytest.importorskip("rich", reason="the bar needs rich")

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    for name, value in {"TERM": "xterm", "COLUMNS": "120", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    if training:
        with progress.shown(2, None) as tick:
            tick(2, "d_key[0, 2]")
    else:
        with console.progress("timing", 2) as tick:
            tick("d_key[0, 1]")
            tick("d_key[0, 2]")
    # The last words are drawn at the end, and are no markup.
    assert all(words in stream.getvalue() for words in ("2/2", "d_key[0, 2]"))
