"""Problem files and checkpoints from anywhere: they load or are refused in the library's own errors, at no great cost."""

from __future__ import annotations

import functools
import json
import os
import re
import tempfile
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from spoiling import DRAWS, SEED, odd_bytes, odd_toml, odd_tree, packed, unpacked

from scanfield import pinn, tensorfile
from scanfield.errors import ArgumentError, ScanfieldError, ShapeError, StateError
from scanfield.pinn import checkpoint, files
from scanfield.pinn.formula import FUNCTIONS, Formula

fuzz = settings(max_examples=DRAWS, derandomize="SCANFIELD_FUZZ_SEED" not in os.environ, deadline=None)
mutators = st.randoms(use_true_random=False)
MEBIBYTE = 2**20


def line() -> pinn.Helmholtz:
    return pinn.Helmholtz(pinn.Interval(0, 1), 3.0, 1.0, pinn.Dirichlet(1.0))


def network() -> pinn.Network:
    return pinn.Network.create(pinn.FourierFeatures(1, 3, wavenumber=3.0), hidden=[3], outputs=1)


def trained(optimizer: str, iterations: int = 3, **paths: Any) -> pinn.Fit:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pinn.DiagnosisWarning)
        # A number that is valid and absurd may overflow; that is told by the reason, not by an error.
        warnings.simplefilter("ignore", RuntimeWarning)
        options = {"points": 8, "optimizer": optimizer, "record": 1, "resample": 2, "progress": False}
        return pinn.train(line(), network(), iterations=iterations, **options, **paths)


@functools.cache
def original(kind: str) -> bytes:
    """A good file of each kind."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        if kind == "network":
            pinn.save_network(path, network(), {"wavenumber": 1.0})
        else:
            trained(kind, 2, checkpoint=path, checkpoint_every=2)
        return path.read_bytes()


def loader(kind: str) -> Callable[[Path], Any]:
    return pinn.load_network if kind == "network" else lambda path: trained(kind, resume=path)


def tried(load: Callable[[Path], Any], content: bytes, name: str = "file.toml") -> Any:
    """What a file loads as, None if it is refused; whatever else is raised, or written, fails the test."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(content)
        found, message = None, ""
        try:
            found = load(path)
        except ScanfieldError as error:
            message = str(error)
        assert len(message) < 1500 and message.replace("\n", " ").isprintable(), message
        assert path.read_bytes() == content and os.listdir(folder) == [name]
        return found


def peak(call: Callable[[], Any]) -> float:
    """The most memory that a call holds, in MiB."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1] / MEBIBYTE
    finally:
        tracemalloc.stop()


# -- spoilt by a generator -----------------------------------------------------------------------------------------


@fuzz
@seed(SEED)
@given(mutators)
def test_spoilt_problem_files(rng: Random) -> None:
    text = files.source(rng.choice(files.shipped()))
    content = odd_toml(rng, text).encode() if rng.random() < 0.75 else odd_bytes(rng, text.encode())
    found = tried(files.load_problem, content)
    if found is not None:  # what loads can be used
        sample = found.problem.draw(20)
        assert np.all(np.isfinite(sample.interior)) and found.problem.terms(sample)


@pytest.mark.parametrize("kind", ["network", "lm", "adam", "lbfgs"])
@fuzz
@seed(SEED)
@given(rng=mutators)
def test_spoilt_checkpoints(kind: str, rng: Random) -> None:
    content = original(kind)
    if rng.random() < 0.3:
        content = odd_bytes(rng, content)
    else:
        header, body = unpacked(content)
        record = json.loads(header["__metadata__"]["scanfield"])
        if rng.random() < 0.3:
            header = odd_tree(rng, header)
        elif rng.random() < 0.3:
            header["__metadata__"]["scanfield"] = json.dumps(odd_tree(rng, record))
        else:
            record["facts"] = odd_tree(rng, record["facts"])
            header["__metadata__"]["scanfield"] = json.dumps(record)
        content = packed(header, body)
    found = tried(loader(kind), content, "file")
    if kind == "network" and found is not None:
        assert pinn.jet(found, np.zeros((2, 1))).value.shape == (2, 1)


# -- spoilt on purpose ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("(" * 900 + "x" + ")" * 900, "cannot be read"),
        ("-" * 1990 + "x", "nested too deeply|cannot be read"),
        ("x+" * 300 + "x", None),
        ("9**9**9**9**9", "too large|out of range"),
        ("9" * 1999, "too large|cannot be read|float"),
        ("x" * 2001, "at most 2000"),
        ("__import__('os').system('true')", "has no prefix|not arithmetic|no function"),
        ("().__class__.__bases__[0]", "not arithmetic"),
        ("x.real", "not arithmetic"),
        ("[x for x in (1, 2)]", "not arithmetic"),
        ("(lambda: 0)()", "not arithmetic"),
        ("open('/etc/passwd')", "no function 'open'"),
        ("sin(*x)", "not arithmetic"),
        ("sin(x, out=x)", "not arithmetic"),
        ("1or 2", "cannot be read"),
        ("x\x00", "cannot be read"),
        ("\ud800", "cannot be read"),
        ("'a'*9", "not arithmetic"),
    ],
    ids=range(18),
)
def test_formulas(text: str, words: str | None) -> None:
    x = np.linspace(0.0, 1.0, 5)[:, None]
    if words is None:
        np.testing.assert_allclose(Formula(text)(x), 301 * x[:, 0])
        return
    with pytest.raises(ArgumentError, match=words):
        Formula(text)(x)


def test_a_formula_writes_into_no_points() -> None:
    """A ufunc's argument too many is where it writes."""
    x = np.random.default_rng(0).random((5, 2))
    before = x.copy()
    for name in FUNCTIONS:
        for count in (0, 1, 2, 3, 4):
            try:
                Formula(f"{name}({', '.join(['x', 'y', 'x', 'y'][:count])})")(x)
            except ArgumentError:
                continue
    np.testing.assert_array_equal(x, before)
    with pytest.raises(ArgumentError, match="sin takes 1 arguments, came 2"):
        Formula("sin(x, y)")


HEAD = '[problem]\nwavenumber = 3.0\n[domain]\nkind = "interval"\nlower = 0\nupper = 1\n'
HEAD += "[network]\nfeatures = 4\nscale = 1.0\n"
SQUARE = "[problem]\nwavenumber = 3.0\n[network]\nfeatures = 4\nscale = 1.0\n[domain]\n"
DISK = 'kind = "disk"\ncenter = [0, 0]\n'
BOUNDARY = '[[boundary]]\nkind = "dirichlet"\n'
HUGE_PROBLEMS = {
    "features": (HEAD.replace("features = 4", "features = 1000000000"), "parameters, allowed are"),
    "hidden": (HEAD + "hidden = [5000000, 5000000]\n", "parameters, allowed are"),
    "points": (HEAD + "[training]\npoints = 1000000000000\n", "points = 1000000000000: at most"),
    "held out": (HEAD + "[training]\nheld_out = 1000000000000\n", "held_out = 1000000000000: at most"),
    "digits": (HEAD + "[parameters]\na = " + "1" * 5000, "not TOML"),
    "hexadecimal": (HEAD.replace("wavenumber = 3.0", "wavenumber = 0x" + "f" * 5000), "no float holds"),
    "long": (HEAD + "#" * 70_000, "longer than 65536"),
    "nested": (HEAD + "[parameters]\na = " + "[" * 20_000, "not TOML"),
    "dotted": (HEAD + "[parameters]\n" + "a." * 30_000 + "a = 1", "more than 200 dots"),
    "many dotted": (HEAD + "[parameters]\n" + "".join("a." * 190 + f"a{i} = 1\n" for i in range(160)),
    "nested|a number or a formula"),
    "many parameters": (HEAD + "[parameters]\n" + "".join(f"a{i} = '1'\n" for i in range(1500)), None),
    "holes": (HEAD + "".join(f"[domain{'.hole' * n}]\nkind = 'interval'\n" for n in range(1, 90)), "lower"),
    "deep hole": (HEAD + f"[domain{'.hole' * 3000}]\nkind = 'interval'\n", "more than 200 dots"),
    "thin": (
        SQUARE + DISK + "radius = 1.0\n[domain.hole]\n" + DISK + "radius = 0.9999999\n",
        "too little to draw",
    ),
    "far": (SQUARE + 'kind = "disk"\ncenter = [1e17, 0]\nradius = 1.0\n', "too little to draw"),
    "wide": (SQUARE + 'kind = "disk"\ncenter = [0, 0]\nradius = 1e200\n', "too little to draw|its size is"),
    "orders": (
        HEAD + '[solution]\nkind = "hard_disk"\nwavenumber = 3.0\nradius = 0.1\norders = 1000000000000\n',
        "orders = 1000000000000",
    ),
    "series": (HEAD + '[solution]\nkind = "hard_disk"\nwavenumber = 1e9\nradius = 1.0\n', "more than 2000 orders"),
    "a point source nowhere": (HEAD + '[solution]\nkind = "green"\nwavenumber = 1.0\nsource = 3.0\n',
    "source = 3.0"),
    "overflow": (HEAD + '[solution]\nkind = "manufactured"\nwavenumber = 1e300\na = [1.0]\n' + BOUNDARY, None),
    "a checkpoint elsewhere": (HEAD + '[training]\ncheckpoint = "/elsewhere"\n', "checkpoint: allowed are"),
    "another to go on from": (HEAD + '[training]\nresume = "../../elsewhere"\n', "resume: allowed are"),
    "a name for a name": (HEAD + "[[boundary]]\nkind = 'dirichlet'\nname = [1]\n", "name = .1."),
    "a terminal's orders": (HEAD + '["\\u001b[2J\\u0007"]\na = 1\n', "x1b.2J"),
}  # fmt: skip


@pytest.mark.parametrize("what", HUGE_PROBLEMS)
def test_problem_files_that_ask_for_much(what: str, tmp_path: Path) -> None:
    text, words = HUGE_PROBLEMS[what]
    path = tmp_path / "a.toml"
    path.write_text(text, encoding="utf-8")
    files.shipped()

    def call() -> None:
        try:
            files.load_problem(path)
        except ArgumentError as error:
            message = str(error)
        else:
            message = ""
        if words is not None:
            assert re.search(words, message), message
            assert message.isprintable() and len(message) < 1000

    assert peak(call) < 64


def test_a_title_gives_no_orders_to_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('title = "\\u001b[2J wave"\n' + HEAD)
    assert files.load_problem(tmp_path / "a.toml").title == "\\x1b[2J wave"


def test_only_files_named_toml_are_read(tmp_path: Path) -> None:
    """Neither a folder nor a pipe, which would never end, nor what a shipped problem's name climbs to."""
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "broken.toml").symlink_to(tmp_path / "nowhere.toml")
    for name in ("pipe.toml", "folder.toml", "broken.toml"):
        with pytest.raises(ArgumentError, match="no such file"):
            files.load_problem(tmp_path / name)
    for name in ("../problems/square-1-4", "/etc/passwd", "..", "", "square-1-4\x00"):
        with pytest.raises(ArgumentError, match=r"no such file|shipped are"):
            files.load_problem(name)
        with pytest.raises(ArgumentError, match="shipped are"):
            files.source(name)


def test_facts_of_a_training(tmp_path: Path) -> None:
    """Each spoilt where no checksum guards it: refused with its name, nothing trained."""
    header, body = unpacked(original("lm"))
    record = json.loads(header["__metadata__"]["scanfield"])
    good = record["facts"]
    bad = {
        "stage": (-1, 1, True, "0", None, 2**70), "done": (-1, 1.5, "a"), "cycle": (-1, None), "seconds": ("a",
        float("nan")),
        "multipliers": ([], {"equation": "a"}, {"equation": -1.0}, {"equation": float("nan")}), "total": (None,
        10**400),
        "history": (3, [3], [{}], [{**good["history"][0], "iteration": "a"}], [{**good["history"][0], "terms": 3}]),
        "state": (None, {}, {**good["state"], "damping": "a"}, {**good["state"], "damping": -1.0},
        {**good["state"], "step": None}),
    }  # fmt: skip
    for name, values in bad.items():
        for value in values:
            record["facts"] = {**good, name: value}
            header["__metadata__"]["scanfield"] = json.dumps(record)
            (tmp_path / "bad").write_bytes(packed(header, body))
            with pytest.raises(StateError, match=r"training|checkpoint|expected|broken"):
                trained("lm", resume=tmp_path / "bad")


def test_tensors_of_a_training(tmp_path: Path) -> None:
    """With a right checksum and a wrong shape."""
    path = tmp_path / "run"
    path.write_bytes(original("adam"))
    tensors, facts = checkpoint.read(path, "training")
    for name, value, error in (
        ("best", np.zeros(3), ShapeError),
        ("x", np.zeros((1, 1)), ShapeError),
        ("interior", np.zeros((8, 2)), ShapeError),
        ("interior", np.full((8, 1), np.nan), StateError),
        ("state.first", np.zeros(1), StateError),
        ("x", np.zeros(3, np.float16), StateError),
    ):
        checkpoint.write(tmp_path / "bad", "training", {**tensors, name: value}, facts)
        with pytest.raises(error, match=name.replace("state.", "")):
            trained("adam", resume=tmp_path / "bad")


def test_descriptions_of_an_embedding(tmp_path: Path) -> None:
    own = network()
    tensors: dict[str, Any] = {f"network.{name}": value for name, value in own.parameters.items()}
    tensors["embedding.frequencies"] = own.embedding.frequencies
    good = checkpoint.architecture(own)
    for change in (
        {"axes": [5]}, {"axes": [-1]}, {"axes": [0, 0]}, {"axes": [0.5]}, {"axes": [float("inf")]}, {"axes": 3},
        {"scale": [float("nan")]},
        {"mean": [float("inf")]}, {"mean": [10**400]}, {"scale": [[1.0], [2.0, 3.0]]}, {"trainable": "no"},
        {"activation": ["tanh"]},
        {"activation": {}}, {"dtype": []},
    ):  # fmt: skip
        checkpoint.write(tmp_path / "net", "network", tensors, {"architecture": good | change})
        with pytest.raises(StateError, match="does not make a network"):
            pinn.load_network(tmp_path / "net")
    tensors["embedding.frequencies"] = np.zeros((0, 3))
    checkpoint.write(tmp_path / "net", "network", tensors, {"architecture": good})
    with pytest.raises(StateError, match="does not make a network"):
        pinn.load_network(tmp_path / "net")


def test_a_file_is_not_written_through_a_link(tmp_path: Path) -> None:
    """A link in the file's place is replaced, and no foreseeable name beside it is written to."""
    (tmp_path / "elsewhere").write_text("mine")
    (tmp_path / "net").symlink_to(tmp_path / "elsewhere")
    (tmp_path / f"net.{os.getpid()}.part").symlink_to(tmp_path / "elsewhere")
    pinn.save_network(tmp_path / "net", network())
    assert (tmp_path / "elsewhere").read_text() == "mine" and not (tmp_path / "net").is_symlink()
    assert pinn.load_network(tmp_path / "net").size == network().size
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "net", f"net.{os.getpid()}.part"]
    with pytest.raises(OSError, match="refused"):
        _refuse_to_write(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "net", f"net.{os.getpid()}.part"]


def _refuse_to_write(folder: Path) -> None:
    class Full:
        shape = ()

        def __array__(self, *args: Any, **options: Any) -> Any:
            raise OSError("refused")

    tensorfile.write(folder / "net", {"a": ("float64", Full())}, {})
