"""`scanfield helmholtz`: what it prints, what it writes, and what it refuses."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from scanfield import cli, tensorfile
from scanfield.cli import demo
from scanfield.errors import ArgumentError
from scanfield.pinn import files
from scanfield.pinn.formula import Formula, number
from scanfield.pinn.reproduce import ENTRIES, reproduce

# What each shipped problem must reach; the two with a hole follow below.
REACHED = {
    "square-1-4": 1e-5,
    "square-4pi": 2e-5,
    "line-impedance": 5e-4,
    "plane-wave-k20": 1e-5,
    "two-media": 1e-5,
}


def _run(capsys, *words):
    status = cli.main(["helmholtz", *words])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.mark.parametrize("name", REACHED)
def test_shipped_problems_reach_their_error(name, tmp_path, capsys):
    """The error is computed anew from the field that was written."""
    output = tmp_path / "field.npz"
    status, out, _ = _run(capsys, name, "--output", str(output), "--quiet")
    assert status == 0
    written = np.load(output)
    problem = files.load_problem(name)
    exact = problem.exact(written["x"])
    error = np.linalg.norm(written["field"] - exact) / np.linalg.norm(exact)
    assert error < REACHED[name]
    assert out.splitlines()[-1] == f"relative L2 error {error:.1e}"
    np.testing.assert_array_equal(written["exact"], exact)
    assert written["x"].shape[0] >= 100**problem.problem.dimensions


@pytest.mark.parametrize(("name", "bound"), [("square-with-hole", 2e-3), ("hard-disk", 2e-2)])
def test_holes_are_solved(name, bound):
    # Slower waves and less of all than their files say: no two minutes of CI.
    problem = files.load_problem(name, k=4.5)
    problem = dataclasses.replace(problem, features=dict(problem.features) | {"features": 280})
    fit = problem.solve(points=900, boundary=300, iterations=8, progress=False)
    assert fit.error(problem.exact) < bound


def test_other_parameters_and_files(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, _ = _run(capsys, "square-1-4", "--set", "a1=2.5", "--set", "a2=3.3", "--quiet")
    assert status == 0 and float(out.split()[-1]) < 1e-5
    assert (tmp_path / "square-1-4.npz").is_file()
    _, shown, _ = _run(capsys, "--show", "line-impedance")
    assert "sommerfeld" in shown
    (tmp_path / "mine.toml").write_text(
        shown.replace("k = 100.0", "k = 12.0").replace('exact = "exp(1j*k*x)"\n', "")
    )
    status, out, _ = _run(capsys, "mine.toml", "--quiet")
    assert status == 0 and "relative" not in out and "mine.npz" in out
    written = np.load(tmp_path / "mine.npz")
    assert "exact" not in written
    np.testing.assert_allclose(written["field"], np.exp(12j * written["x"][:, 0]), atol=1e-4)


def test_pictures(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    for name in ("line-impedance", "plane-wave-k20"):
        plot = tmp_path / f"{name}.png"
        status, _, _ = _run(capsys, name, "--plot", str(plot), "--output", str(tmp_path / "f.npz"), "--quiet")
        assert status == 0 and plot.read_bytes()[:4] == b"\x89PNG"
    status, out, _ = _run(
        capsys, name, "--plot", str(tmp_path / "bare"), "--output", str(tmp_path / "f.npz"), "--quiet"
    )
    assert status == 0 and "bare.png" in out and (tmp_path / "bare.png").is_file()
    assert demo.helmholtz(tmp_path / "demo") and (tmp_path / "demo" / "helmholtz.png").is_file()


def test_as_a_module_and_in_a_list(tmp_path):
    found = subprocess.run(
        [sys.executable, "-m", "scanfield", "helmholtz", "line-impedance", "--output", str(tmp_path / "f.npz")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert found.stdout.splitlines()[-1].startswith("relative L2 error ")
    # A problem that needs SciPy is listed without it.
    code = "import sys; sys.modules['scipy'] = None; from scanfield.cli import main; main(['helmholtz', '--list'])"
    listed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [line.split(maxsplit=1) for line in listed.stdout.splitlines()] == [
        [name, files.load_problem(name).title] for name in files.shipped()
    ]


def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    """It was emptied before anything was written. A link is written through, a device into."""
    output, link = tmp_path / "wave.npz", tmp_path / "link.npz"
    output.write_bytes(b"the good one")
    link.symlink_to(output)
    whole_file = tensorfile.whole_file

    @contextlib.contextmanager
    def full(path):
        with whole_file(path) as file:
            yield file
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensorfile, "whole_file", full)
    arguments = ["helmholtz", "line-impedance", "--quiet", "--output"]
    assert cli.main([*arguments, str(output)]) != 0
    assert output.read_bytes() == b"the good one" and len(list(tmp_path.iterdir())) == 2
    monkeypatch.undo()
    assert cli.main([*arguments, str(link)]) == 0 and link.is_symlink()
    assert set(np.load(output)) == {"x", "field", "exact"}
    assert cli.main([*arguments, os.devnull]) == 0 and not Path(os.devnull).is_file()


def test_wrong_calls_are_named(tmp_path, capsys):
    for words, message in (
        ((), "PROBLEM is missing"),
        (("square-9",), "no such file, and shipped are"),
        ((__file__,), "a problem file ends in .toml"),
        (("square-1-4", "--set", "a9=1"), "a9"),
        (("square-1-4", "--set", "a1"), "NAME=NUMBER"),
        (("square-1-4", "--output", str(tmp_path / "no" / "f.npz")), "there is no folder"),
        (("square-1-4", "--output", str(tmp_path / "field.csv")), "the allowed ending is .npz"),
        (("--show", "nothing"), "shipped are"),
        (("line-impedance", "--plot", str(tmp_path / "f.foo")), "allowed endings are"),
        (("line-impedance", "--library", "cupy", "--output", str(tmp_path / "f.npz")), "cupy"),
    ):
        if ("cupy" in words and _installed("cupy")) or ("--plot" in words and not _installed("matplotlib")):
            continue
        status, out, err = _run(capsys, *words)
        assert status == 2 and message in err and "Traceback" not in err + out and "stopped" not in out
    assert not list(tmp_path.iterdir())


def _installed(name):
    from importlib.util import find_spec

    return find_spec(name) is not None


def test_problem_files_that_make_no_sense(tmp_path):
    good = files.source("square-4pi")
    tomllib.loads(good)
    for old, new, words in (
        ('wavenumber = "k"', 'wavenumber = "k', "not TOML"),
        ('wavenumber = "k"', 'wavenumber = "q"', "'q' is unknown"),
        ('wavenumber = "k"', "wavenumber = true", "True"),
        ('source = "', 'sauce = "', "allowed are wavenumber"),
        ('kind = "box"', 'kind = "blob"', "allowed are interval"),
        ('kind = "dirichlet"', 'kind = "wall"', "allowed are dirichlet"),
        ("hard = true", "rigid = true", "rigid"),
        ("value = 0.0", 'value = "solution.value"', "solution"),
        ("features = 300", "features = 0", "features"),
        ("points = 1200", "dots = 1200", "dots"),
        ("[network]", "[net]", "net"),
        ('sin(k*x)*sin(k*y)"\nexact', '__import__(x)"\nexact', "no function"),
        ("upper = [1, 1]", "upper = [1]", "upper"),
        ('[problem]\nwavenumber = "k"', "[problem]", r"\[problem\] wavenumber is missing"),
        ("upper = [1, 1]", "", r"\[domain\] upper is missing: kind = 'box' takes lower, upper"),
        ("upper = [1, 1]", "uper = [1, 1]", r"\[domain\] uper: kind = 'box' takes lower, upper"),
        ("trainable = false", 'trainable = "no"', r"trainable = 'no': allowed are true and false"),
        ("seed = 0", 'seed = "x"', r"seed: 'x'; allowed is an integer"),
        ("features = 300", "", r"\[network\] features is missing"),
        ("features = 300", "width = 300", r"\[network\] width: allowed are features"),
        ("[[boundary]]", "[boundary]", r"write \[\[boundary\]\]"),
        ("[domain]\n", "", r"\[domain\] is missing"),
    ):
        assert old in good
        path = tmp_path / "bad.toml"
        path.write_text(good.replace(old, new, 1))
        with pytest.raises((ArgumentError, ValueError), match=words) as caught:
            files.load_problem(path)
        assert "bad" in str(caught.value)
    (tmp_path / "bad.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ArgumentError, match="cannot be read"):
        files.load_problem(tmp_path / "bad.toml")


@pytest.mark.parametrize("key", ["points", "boundary", "held_out", "iterations", "resample"])
def test_counts_in_a_file_are_named(tmp_path, capsys, key):
    text = files.source("line-impedance")
    lines = [line for line in text.splitlines() if not line.startswith(f"{key} =")]
    for value in ("-4", "100.5"):
        (tmp_path / "bad.toml").write_text("\n".join([*lines, f"{key} = {value}"]))
        status, out, err = _run(capsys, str(tmp_path / "bad.toml"), "--output", str(tmp_path / "f.npz"))
        assert status == 2 and f"{key}: {value}; allowed is an integer" in err
        assert "stopped" not in out and not (tmp_path / "f.npz").exists()


def test_stages_in_a_file(tmp_path):
    text = files.source("line-impedance")
    lines = [line for line in text.splitlines() if not line.startswith(("optimizer", "iterations"))]
    (tmp_path / "staged.toml").write_text("\n".join([*lines, 'optimizer = [["adam", 3], ["lm", 2]]']))
    fit = files.load_problem(tmp_path / "staged.toml").solve()
    assert {record.stage for record in fit.history} >= {"Adam", "Levenberg-Marquardt"}


def test_the_documented_file_is_solved(tmp_path, capsys):
    """The file of docs/pinn.md, smaller; what is doubtful is told before the training, not after it."""
    page = Path(__file__).parents[2] / "docs" / "pinn.md"
    shown = page.read_text(encoding="utf-8").split("```toml\n")[1].split("```")[0]
    for old, new in (
        ("features = 300", "features = 150"),
        ("points = 1500", "points = 12"),
        ("boundary = 300", "boundary = 8"),
    ):
        assert old in shown
        shown = shown.replace(old, new)
    path = tmp_path / "disk.toml"
    path.write_text(shown.replace("iterations = 20", "iterations = 1"))
    status, out, err = _run(capsys, str(path), "--output", str(tmp_path / "f.npz"), "--quiet")
    assert status == 0 and out.splitlines()[-1].startswith("no exact field is stated")
    assert "warning: " in err and "per wavelength" in err and "DiagnosisWarning" not in err
    with np.load(tmp_path / "f.npz") as written:
        assert written["field"].dtype == "complex128" and written["x"].shape == (written["field"].size, 2)


def test_formulas_are_arithmetic_and_nothing_else():
    x, n = np.asarray([[1.0, 2.0], [3.0, 4.0]]), np.asarray([[0.0, 1.0], [1.0, 0.0]])
    for text, want in (
        ("x + 2*y", [5.0, 11.0]),
        ("-x**2/2", [-0.5, -4.5]),
        ("where(x < 2, a, 1j)", [7.0, 1j]),
        ("exp(1j*pi*x) + 0*y", [-1.0, -1.0]),
        ("nx*x + ny*y", [2.0, 3.0]),
        ("3", [3.0, 3.0]),
    ):
        np.testing.assert_allclose(Formula(text, {"a": 7.0})(x, n), want, atol=1e-12)
    assert number("2*pi", "k", {}) == 2 * np.pi
    for text in (
        "x.__class__", "().__class__", "[x for x in y]", "lambda: 1", "open('f')", "x if y else 1", "'a'*9", "f\"{x}\"",
        "x[0]", "exp(x=1)", "True", "x and y", "__import__('os')", "q", "1 +", "(" * 500, "x" * 3000, "a := 1", "not x",
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match="formula"):
            Formula(text, {"a": 1.0})
    with pytest.raises(ArgumentError, match="formula"):
        Formula("9**9**9**9")(x)
    for text, words in (
        ("x^2", r"write \*\*"),
        ("np.exp(x)", r"write exp\(\.\.\.\)"),
        ("np.cbrt(x)", "no function 'cbrt'; there are sin"),
        ("x and y", "BoolOp is not arithmetic; allowed are"),
    ):
        with pytest.raises(ArgumentError, match=words):
            Formula(text)
    with pytest.raises(ArgumentError, match=r"^formula 'nx': there is no nx here"):
        Formula("nx")(x)
    with pytest.raises(ArgumentError, match="finite real"):
        number("log(0)", "k", {})


def _interrupt(*_):
    raise KeyboardInterrupt


def test_published_problems_are_beaten(capsys, monkeypatch):
    """The quick entries; each reference value is above ours by far."""
    quick = [
        entry for entry in ENTRIES if entry.title in ("square k = 4 pi", "plane wave k = 40", "line k = 100")
    ]
    seen = []
    rows = reproduce(quick, done=seen.append)
    assert rows == seen and len(rows) == 3
    # The table of the command is made of these rows.
    monkeypatch.setattr("scanfield.pinn.reproduce.reproduce", lambda **_: rows)
    status, out, _ = _run(capsys, "--reproduce", "--quiet")
    assert status == 0
    for row in rows:
        (shown,) = [line for line in out.splitlines() if line.startswith(f"{row.entry.title} ")]
        assert f"{row.error:.1e}" in shown and shown.count(row.entry.reference) == 1
        assert row.entry.source in shown
    # An interrupt ends it, in a training that returns what it has too: that is no row.
    monkeypatch.setattr(
        "scanfield.pinn.reproduce.reproduce", lambda done: (done(rows[0]), reproduce(quick))[1]
    )
    monkeypatch.setattr("scanfield.pinn.run.Run._stage", _interrupt)
    status, out, err = _run(capsys, "--reproduce", "--quiet")
    assert status == 130 and err == "scanfield helmholtz: interrupted\n"
    assert len(out.splitlines()) == 3 and f"{rows[0].error:.1e}" in out
    for row in rows:
        assert row.error < 0.05 * float(row.entry.reference.split()[0]) and row.parameters > 0
