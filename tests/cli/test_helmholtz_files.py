"""`scanfield helmholtz` on broken files: one line that names the entry, before any training, and never a traceback."""

from __future__ import annotations

import numpy as np
import pytest

from scanfield import cli

GOOD = """
[parameters]
k = 2.0
[problem]
wavenumber = "k"
exact = "sin(k*x)"
[domain]
kind = "interval"
lower = 0
upper = 1
[[boundary]]
kind = "dirichlet"
value = "sin(k*x)"
[network]
features = 6
scale = 1.0
hidden = []
[training]
points = 20
optimizer = "lm"
iterations = 2
"""

BROKEN = [
    ("[parameters]\nk = 2.0", "parameters = 5", "a table, [parameters], is expected"),
    ("k = 2.0", "k = 2.0\nx = 2.0", "parameter 'x'"),  # the coordinate won, silently
    ("k = 2.0", "k = 1e308", "wavenumber = 1e+308"),
    ("k = 2.0", "k = 1" + 400 * "0", "finite real number"),
    ('wavenumber = "k"', f'wavenumber = "{1900 * "-"}x"', "nested too deeply"),
    ('wavenumber = "k"', "", "[problem] wavenumber is missing"),
    ("[problem]", "[problems]", "[problems]"),
    ('exact = "sin(k*x)"', 'exact = "y"', "there is no y here"),
    ('exact = "sin(k*x)"', 'exact = "arctan2(x)"', "arctan2"),
    ('exact = "sin(k*x)"', 'exact = "log(x - x)"', "exact"),
    ('kind = "interval"', 'kind = ["interval"]', "kind = ['interval']: allowed are"),
    ("upper = 1\n", "upper = 1\nhole = 3\n", "hole = 3"),
    ("upper = 1\n", "upper = 1e300\n", "its size is 1e+300"),  # the diagnosis counted 1e300 modes
    ("upper = 1\n", "upper = 1e-300\n", "its size is 1e-300"),
    ("[[boundary]]", "[boundary]", "write [[boundary]] above each"),
    ('kind = "dirichlet"', 'kind = "dirichlet"\nwhere = 3', "where = 3"),
    ('kind = "dirichlet"', 'kind = "dirichlet"\nhard = "no"', "hard = 'no'"),
    ("features = 6", f"features = 1{15 * '0'}", "parameters, allowed are"),
    ("scale = 1.0", 'scale = 1.0\ntrainable = "no"', "trainable = 'no'"),
    ("scale = 1.0", "scale = 1.0\nseed = 1.5", "[network] seed: 1.5; allowed is"),
    ("scale = 1.0", "scale = 1.0\noutputs = 2", "[network] outputs: allowed are"),
    ("points = 20", 'points = 20\nseed = "a"', "[training] seed: 'a'"),
    ("points = 20", 'points = 20\ntolerance = "a"', "tolerance = 'a'"),
    ("points = 20", 'points = 20\nadaptive = "no"', "adaptive = 'no'"),
    ("points = 20", 'points = 20\nprogress = "no"', "[training] progress"),
    ('"lm"\niterations = 2', '[["adam", "x"]]', "iterations: 'x'"),
    *(
        (
            "points = 20",
            f"points = 20\n{name} = {value}",
            f"{name}: {value.replace(chr(34), chr(39))}; allowed is an integer",
        )
        for name in ("resample", "patience", "record", "boundary", "checkpoint_every", "held_out")
        for value in ('"a"', "1.5")
    ),
    ("iterations = 2", "iterations = true", "iterations: True"),
    ("iterations = 2", "iterations = -1", "[training] iterations: -1; allowed is"),
    ('"lm"', '"newton"', "[training] optimizer = 'newton': allowed are 'auto', 'adam'"),
    (
        "points = 20",
        'points = 20\nweights = "ntk"',
        "[training] weights = 'ntk': Levenberg-Marquardt takes fixed",
    ),
    (
        "points = 20",
        'points = 20\nsampling = "halton"',
        "[training] sampling = 'halton': allowed are 'sobol'",
    ),
    ("points = 20", "points = 20\nchunk = 0", "[training] chunk: 0; allowed is"),
    ("points = 20", "points = 20\nreducer = 1", "[training] reducer: allowed are"),
    ('exact = "sin(k*x)"', 'exact = "a*x"', "the name 'a' is unknown; known are pi, x, k"),
    ('exact = "sin(k*x)"', 'exact = "nx"', "there is no nx here; known are pi, x, k"),
    ('value = "sin(k*x)"', 'value = "ny"', "there is no ny here; known are pi, x, nx, k"),
    ("scale = 1.0", 'scale = "x"', "there is no x here; known are pi, k"),
]


@pytest.mark.parametrize(("old", "new", "words"), BROKEN, ids=lambda text: text[-30:])
def test_broken(tmp_path, capsys, old, new, words):
    assert GOOD.count(old) == 1
    status, out, err = _run(tmp_path, capsys, GOOD.replace(old, new))
    assert status == 2 and words in err and len(err.splitlines()) == 1, err
    assert out == "" and not (tmp_path / "field.npz").exists()


def test_a_lack_of_memory_is_one_line(tmp_path, capsys, monkeypatch):
    """What a file asks for is bounded; a machine may have less."""

    def full(*arguments, **options):
        raise MemoryError("Unable to allocate")

    monkeypatch.setattr(cli.helmholtz, "_network", full)
    status, _, err = _run(tmp_path, capsys, GOOD)
    assert status == 2 and "not enough memory (Unable to allocate)" in err and len(err.splitlines()) == 1


def test_whole_and_with_stages(tmp_path, capsys):
    """A TOML file has no tuples: its stages are lists."""
    for text in (GOOD, GOOD.replace('"lm"\niterations = 2', '[["adam", 3], ["lm", 2]]')):
        status, out, _ = _run(tmp_path, capsys, text)
        assert status == 0 and out.splitlines()[-1].startswith("relative L2 error")
    assert "stopped after 5 iterations" in out


COSINES = """
[parameters]
k = 3.0
[problem]
wavenumber = "solution.wavenumber"
source = "solution.source"
[solution]
kind = "manufactured"
function = "cos"
wavenumber = "k"
a = [2.0]
[domain]
kind = "interval"
lower = 0
upper = 1
[[boundary]]
kind = "neumann"
value = "solution.normal"
[network]
features = 24
scale = 1.5
trainable = false
hidden = []
[training]
points = 80
iterations = 20
"""


def test_a_known_solution_gives_medium_source_and_data(tmp_path, capsys):
    """cos(2 pi x): 1 at both ends, with slope 0."""
    status, out, err = _run(tmp_path, capsys, COSINES)
    assert status == 0 and float(out.splitlines()[-1].split()[-1]) < 1e-6, err
    written = np.load(tmp_path / "field.npz")
    np.testing.assert_allclose(written["exact"], np.cos(2 * np.pi * written["x"][:, 0]), atol=1e-14)
    for old, new, words in (
        ('"cos"', '"tan"', "[solution] function = 'tan': allowed are 'sin' and 'cos'"),
        ('"solution.source"', '"solution.value"', "known here: solution.source, with a [solution]"),
        (
            '"solution.normal"',
            '"solution.slope"',
            "solution.value and solution.normal and solution.impedance",
        ),
    ):
        status, _, err = _run(tmp_path, capsys, COSINES.replace(old, new))
        assert status == 2 and words in err and len(err.splitlines()) == 1, err


def test_an_exact_field_of_zero_has_no_relative_error(tmp_path, capsys):
    """The training was not in vain: all is written, and the exit is a good one."""
    text = GOOD.replace('exact = "sin(k*x)"', "exact = 0.0").replace('value = "sin(k*x)"', "value = 0.0")
    status, out, _ = _run(tmp_path, capsys, text)
    assert status == 0 and "the exact field is zero" in out
    assert not np.any(np.load(tmp_path / "field.npz")["exact"])


def test_a_place_that_cannot_be_written_is_known_before_the_training(tmp_path, capsys):
    (tmp_path / "folder").mkdir()
    status, out, err = _run(tmp_path, capsys, GOOD, "--output", str(tmp_path / "folder"))
    assert status == 2 and "it is a folder" in err and "stopped" not in out
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    status, out, err = _run(tmp_path, capsys, GOOD, "--plot", str(tmp_path / "folder"))
    assert status == 2 and "it is a folder" in err and "stopped" not in out
    status, out, err = _run(tmp_path, capsys, GOOD, "--plot", str(tmp_path / "field.txt"))
    assert status == 2 and "allowed endings are" in err and "stopped" not in out


@pytest.mark.parametrize(
    ("which", "device"),
    [
        ("numpy", "foo"),
        ("torch", "foo"),
        ("torch", "meta"),
        ("torch", ""),
        ("torch", "cpu"),
        ("jax", "foo"),
        ("jax", "cpu"),
    ],
)
def test_devices(tmp_path, capsys, which, device):
    """One that the library has runs, by its name on JAX too; any other is told in a line."""
    pytest.importorskip(which, reason=f"needs {which}")
    status, out, err = _run(tmp_path, capsys, GOOD, "--library", which, "--device", device)
    if device == "cpu":
        assert status == 0 and "relative L2 error" in out
    else:
        assert status == 2 and f"--device {device!r}" in err and len(err.splitlines()) == 1


def test_a_disk_that_is_full_and_ctrl_c_outside_the_training(tmp_path, capsys, monkeypatch):
    status, _, err = _run(tmp_path, capsys, GOOD, "--output", str(tmp_path / ("n" * 300)))
    assert status == 2 and "name too long" in err.lower() and len(err.splitlines()) == 1

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("scanfield.pinn.files.load_problem", interrupted)
    status, _, err = _run(tmp_path, capsys, GOOD)
    assert status == 130 and err == "scanfield helmholtz: interrupted\n"


def test_ctrl_c_in_the_training_is_status_130(tmp_path, capsys, monkeypatch):
    """The field as it is then goes where it was asked for, not over an older one."""

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("scanfield.pinn.run.Run._stage", interrupted)
    monkeypatch.chdir(tmp_path)
    status, out, err = _run(tmp_path, capsys, GOOD)
    assert status == 130 and err == "scanfield helmholtz: interrupted\n" and ": interrupted; loss" in out
    assert np.load(tmp_path / "field.npz")["field"].size
    assert cli.main(["helmholtz", "mine.toml", "--quiet"]) == 130
    assert "field written to mine.npz" in capsys.readouterr().out
    older = tmp_path / "mine.npz"
    older.write_bytes(b"older")
    assert cli.main(["helmholtz", "mine.toml", "--quiet"]) == 130
    assert "no field is written: one of that name is there already" in capsys.readouterr().out
    assert older.read_bytes() == b"older"


def test_no_file_of_a_call_is_written_over_another(tmp_path, capsys):
    """Nor is anything trained for a file that cannot be written; what was there stays, and nothing is left behind."""
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    (tmp_path / "mine.toml").write_text(GOOD)
    (tmp_path / "link.npz").symlink_to(tmp_path / "mine.toml")
    (tmp_path / "picture.npz").symlink_to(tmp_path / "x.png")
    before = sorted(path.name for path in tmp_path.iterdir())
    for words, said in (
        (("--output", str(tmp_path / "link.npz")), "is the file of PROBLEM too"),
        (
            ("--output", str(tmp_path / "picture.npz"), "--plot", f"{tmp_path}/./x.png"),
            "is the file of --plot too",
        ),
        (("--output", str(tmp_path / "x.npz" / ".." / "n" / "x.npz")), "there is no folder"),
        (("--output", "/proc/x.npz"), "/proc"),
    ):
        status, out, err = _run(tmp_path, capsys, GOOD, *words)
        assert status == 2 and said in err and len(err.splitlines()) == 1 and "stopped" not in out, words
    assert (tmp_path / "mine.toml").read_text() == GOOD
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def _run(tmp_path, capsys, text, *words):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    status = cli.main(
        [
            "helmholtz",
            str(path),
            "--quiet",
            *(("--output", str(tmp_path / "field.npz")) if "--output" not in words else ()),
            *words,
        ]
    )
    captured = capsys.readouterr()
    return status, captured.out, captured.err
