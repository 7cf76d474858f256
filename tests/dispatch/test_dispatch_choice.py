"""What is chosen and what is told about it: the reasons of `explain`, the records, the families beside the operations."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import numpy as np
import pytest

import scanfield
from scanfield import dispatch
from scanfield.dispatch import Candidate, Manifest, families, loops, registry
from scanfield.dispatch.registry import Loaded
from scanfield.errors import ArgumentError, BackendError

A, B = np.full((1, 3, 2), 0.5), np.ones((1, 3, 2))


def reasons(method: str | None = None) -> dict[str, tuple[bool, str]]:
    told = scanfield.explain(scanfield.linear_scan, A, B, method=method)
    return {row.candidate: (row.taken, row.reason) for row in told.verdicts if row.verb == "forward"}


@pytest.fixture
def discovered():
    """The plugins are looked for once: what a test puts in the place of their list must not take them along."""
    assert registry.manifests()


@pytest.fixture
def alone(monkeypatch):
    """NumPy's linear scan without any candidate: the generic forms alone."""
    scanfield.linear_scan(A, B)
    key = ("linear_scan", "numpy", "cpu")
    monkeypatch.setitem(registry._TABLE, key, registry._TABLE[key]._replace(candidates=()))


@pytest.fixture
def with_candidate(monkeypatch, alone):
    """And with one that computes what the recurrent form does."""
    key = ("linear_scan", "numpy", "cpu")
    row = registry._TABLE[key]
    entry = row.generic["generic.recurrent"]._replace(name="numpy.same")
    monkeypatch.setitem(registry._TABLE, key, row._replace(candidates=(entry,)))


def test_reasons_without_a_candidate(alone):
    told = reasons()
    (taken,) = [name for name, (chosen, _) in told.items() if chosen]
    assert told.pop(taken)[1] == "no other candidate takes the call"
    assert told and set(told.values()) == {(False, "the generic form for other sizes")}


def test_reasons_with_a_candidate(with_candidate):
    told = reasons()
    assert told.pop("numpy.same") == (True, "the first candidate that takes the call")
    assert {reason for _, reason in told.values()} == {
        "a candidate before it takes the call",
        "the generic form for other sizes",
    }


def test_reasons_when_generic_is_forced(with_candidate):
    told = reasons("generic")
    assert told.pop("numpy.same") == (False, "method='generic' is forced")
    assert max(told.values()) == (True, "forced by method='generic'")
    assert [reason for chosen, reason in told.values() if not chosen] == ["the generic form for other sizes"]


def test_reasons_when_a_name_is_forced(with_candidate):
    told = reasons("numpy.same")
    assert told.pop("numpy.same") == (True, "forced by method='numpy.same'")
    assert set(told.values()) == {(False, "method='numpy.same' is forced")}


def test_the_table_marks_what_is_taken(with_candidate):
    told = scanfield.explain(scanfield.linear_scan, A, B)
    head, names, line, *rows = str(told).splitlines()
    assert head == "linear_scan on numpy arrays (cpu), carried in float64"
    assert names.split() == ["candidate", "verb", "why"] and set(line) == {"-", " "}
    marks = [row.split()[:3] for row in rows[: len(told.verdicts)]]
    assert marks == [[v.candidate, v.verb, "taken" if v.taken else "-"] for v in told.verdicts]
    assert {mark for *_, mark in marks} == {"taken", "-"}


@pytest.mark.parametrize("devices", [("cpu", "cuda"), ("cuda", "cpu")])
def test_of_candidates_of_one_name_that_of_the_device_runs(monkeypatch, discovered, devices):
    entries = tuple(
        Candidate("numpy.twice", ("linear_scan",), device, "dummy_backend:Loopback") for device in devices
    )
    monkeypatch.setattr(registry, "_MANIFESTS", [Manifest("numpy", "numpy", "", entries)])
    monkeypatch.setattr(registry, "_TABLE", {})
    told = reasons()
    assert told["numpy.twice"] == (True, "the first candidate that takes the call")


def test_backends_are_usable_if_they_can_be_imported(monkeypatch, discovered, tmp_path):
    """Whether they have been yet, or not: looking imports nothing."""
    (tmp_path / "library_not_yet_met.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "library_turned_off", None)
    libraries = {"here": "library_not_yet_met", "off": "library_turned_off", "gone": "library_of_nobody"}
    found = [Manifest(name, module, f"pip install {name}", ()) for name, module in libraries.items()]
    monkeypatch.setattr(registry, "_MANIFESTS", found)
    told = {backend.name: backend for backend in scanfield.backends()}
    assert [told[name].status for name in ("numpy", *libraries)] == ["usable", "usable", "missing", "missing"]
    assert "library_not_yet_met" not in sys.modules
    assert str(told["gone"]).split() == ["gone", "missing", "not", "installed:", "pip", "install", "gone"]
    assert str(told["numpy"]) == f"numpy {np.__version__} usable"


def test_an_operation_is_itself_and_no_other():
    for operation in (scanfield.linear_scan.record, scanfield.ssd.record):
        twin = dataclasses.replace(operation)
        assert operation != twin and len({operation, twin}) == 2  # and it is hashable, whatever it holds


def test_records_are_not_changed_and_those_of_words_are_equal_to_their_copies():
    operation, derived = scanfield.selective_scan.record, scanfield.ssd.record
    manifest = registry.manifests()[0]
    words = [*operation.inputs, *operation.options, manifest, *manifest.candidates]
    for record in (operation, derived, *words):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(record, dataclasses.fields(record)[0].name, "another")
    assert all(record == dataclasses.replace(record) for record in words)


@pytest.mark.parametrize(
    ("requires", "absent", "reason"),
    [
        (("numba",), "numba", "numba is not installed: pip install 'scanfield[numba]'"),
        (("dask.array",), "dask", "dask is not installed: pip install 'scanfield[dask]'"),
        (("their_library",), "their_library", "their_library is not installed"),
        # Installed, and broken: what it says itself tells more.
        (("wave",), "wave.inner", "No module named 'wave.inner' (needs wave)"),
    ],
)
def test_a_missing_package_is_named_with_its_way_out(monkeypatch, requires, absent, reason):
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {absent!r}", name=absent)

    monkeypatch.setattr(registry.importlib, "import_module", missing)
    candidate = dispatch.Candidate("theirs", ("linear_scan",), "cpu", "theirs:make", requires)
    assert registry.load_candidate("linear_scan", candidate).absent == reason


def test_a_library_is_compiled_that_brought_a_loop(monkeypatch):
    monkeypatch.setattr(loops, "LOOPS", {})
    assert loops.is_compiled(A) is False
    monkeypatch.setattr(loops, "LOOPS", {"numpy": lambda *arguments: None})
    assert loops.is_compiled(A) is True


def test_a_loop_that_a_library_brought_walks_over_time(monkeypatch):
    a, b = np.linspace(0.1, 0.9, 24).reshape(1, 12, 2), np.ones((1, 12, 2))
    walked = []

    def own(step, config, constants, carry, xs, reverse):
        walked.append(reverse)
        with monkeypatch.context() as without:
            without.setattr(loops, "LOOPS", {})
            return loops.scan(step, config, constants, carry, xs, reverse=reverse)

    def run():
        result, pullback = scanfield.vjp(scanfield.linear_scan, a, b, method="generic.recurrent")
        return [*result, *pullback(result.output).values()]

    plain = run()
    monkeypatch.setattr(loops, "LOOPS", {"numpy": own})
    for got, want in zip(run(), plain, strict=True):
        assert np.array_equal(got, want)
    assert set(walked) == {False, True}


# -- families -------------------------------------------------------------------------------------------------


def entry(name: str, default: bool = True, absent: str = "") -> Loaded:
    return Loaded(name, None if absent else f"made by {name}", frozenset(), default, absent)  # type: ignore[arg-type]


def choose(monkeypatch: pytest.MonkeyPatch, *entries: Loaded, method: str | None = None) -> Any:
    monkeypatch.setattr(families, "family", lambda name, library, device: entries)
    with scanfield.use(method=method):
        return families.choose(
            "jets", "numpy", "cpu", {"slow": "own slow", "middle": "own middle", "last": "own last"}
        )


def test_a_family_takes_its_first_usable_default(monkeypatch):
    spare, missing, first = (
        entry("spare", default=False),
        entry("missing", absent="no such library"),
        entry("first"),
    )
    assert choose(monkeypatch, spare, missing, first, entry("second")) == "made by first"
    assert choose(monkeypatch, spare, missing) == "own last"
    monkeypatch.setattr(registry, "_BLOCKED", frozenset({"first"}))
    assert choose(monkeypatch, first, entry("second")) == "made by second"


def test_a_family_obeys_a_forced_method(monkeypatch):
    spare, missing = entry("spare", default=False), entry("missing", absent="no such library")
    assert choose(monkeypatch, entry("first"), spare, method="spare") == "made by spare"
    assert choose(monkeypatch, entry("first"), method="slow") == "own slow"
    with pytest.raises(BackendError, match="'missing' cannot run jets: no such library"):
        choose(monkeypatch, missing, method="missing")
    monkeypatch.setattr(registry, "_BLOCKED", frozenset({"spare"}))
    with pytest.raises(BackendError, match="turned off by SCANFIELD_BLOCK"):
        choose(monkeypatch, spare, method="spare")
    with pytest.raises(
        ArgumentError, match=r"'other' does not serve jets .* known are slow, middle, last, spare$"
    ):
        choose(monkeypatch, spare, method="other")


def test_a_family_is_of_one_library_and_device():
    (here,) = {found.name for found in families.family("pinn", "numpy", "cpu")} or {""}
    assert here in ("", "numpy.numba")
    assert families.family("pinn", "numpy", "cuda") == ()
    assert families.family("no such family", "numpy", "cpu") == ()


@pytest.mark.parametrize("method", [3, 2.5, ("generic",)])
def test_a_method_is_a_name(method):
    for call in (scanfield.linear_scan, lambda *x, **o: scanfield.explain(scanfield.linear_scan, *x, **o)):
        with pytest.raises(ArgumentError, match=f"method: expected a name, came {type(method).__name__}"):
            call(A, B, method=method)
