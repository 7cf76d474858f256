"""`scanfield check`: it passes what agrees, finds what does not, and says where."""

from __future__ import annotations

import json
import os
import sys
import types
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

import scanfield
from scanfield.cli import agree, check, draws, jobs, main
from scanfield.cli.check import as_json, as_text
from scanfield.cli.places import absent, places

sys.path.insert(0, str(Path(__file__).parent))
import planting  # (needs the line above)

PLANTED = ("check", "--library", "numpy", "--operation", "linear_scan")


def _pair(told):
    """The planted candidate beside the generic code that it is made of."""
    (pair,) = [
        p
        for p in told["pairs"]
        if (p["left"], p["right"]) == ("numpy planted.one", "numpy generic.recurrent")
    ]
    return pair


def _names():
    return [*(record.name for record in scanfield.operations()), "pinn", "layers"]


# -- a planted candidate, found through its entry point ------------------------------------------------------


def test_a_right_plugin_is_compared_and_agrees(tmp_path):
    done = planting.run(tmp_path, planting.NO_FAULT, *PLANTED, "--json")
    assert done.returncode == 0, done.stderr
    pair = _pair(json.loads(done.stdout))
    assert pair["compared"] > 10
    assert pair["apart"] == []


@pytest.mark.parametrize(
    ("fault", "array"),
    [
        (planting.WRONG_FORWARD, "output"),
        (planting.WRONG_BACKWARD, "d_a"),
        (planting.NAN_IN_STEP, "step's state"),
    ],
)
def test_a_wrong_candidate_is_caught_and_named(tmp_path, fault, array):
    done = planting.run(tmp_path, fault, *PLANTED, "--json")
    assert done.returncode == 1, done.stderr
    pair = _pair(json.loads(done.stdout))
    assert {worst["array"] for worst in pair["apart"]} == {array}
    assert {worst["dtype"] for worst in pair["apart"]} == {"float32", "float64"}


def test_the_wrong_element_is_shown(tmp_path):
    done = planting.run(tmp_path, planting.WRONG_FORWARD, *PLANTED)
    assert done.returncode == 1
    assert "APART  numpy planted.one and numpy generic.recurrent" in done.stdout
    assert "linear_scan float32, all inputs: output[0, 3, 1]: " in done.stdout
    assert "1.0e-03 of the largest value, where 4e-06 is allowed" in done.stdout
    assert "NOT all agree" in done.stdout


def test_a_candidate_that_raises_is_a_finding(tmp_path):
    done = planting.run(tmp_path, planting.RAISES, *PLANTED)
    assert done.returncode == 1
    assert "RAISED numpy planted.one: linear_scan, forward (float64 all inputs; " in done.stdout
    assert "ZeroDivisionError: planted" in done.stdout


def test_a_stated_tolerance_is_used(tmp_path):
    wide = {"float32": 2e-3, "float64": 2e-3}
    done = planting.run(tmp_path, planting.WRONG_FORWARD, *PLANTED, tolerance=wide)
    assert done.returncode == 0, done.stdout


def test_a_verb_that_a_candidate_lacks_is_told(tmp_path):
    done = planting.run(tmp_path, planting.NO_FAULT, *PLANTED)
    told = [line for line in done.stdout.splitlines() if line.startswith("not compared: numpy planted.one")]
    assert told
    assert all("linear_scan: " in line and "summarise" in line for line in told)


# -- the generic forms ---------------------------------------------------------------------------------------


def test_the_generic_forms_agree_on_numpy(capsys):
    assert main(["check", "--library", "numpy", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {name for pair in told["pairs"] for name in pair["worst"]} | set(told["alone"]) == set(_names())
    assert told["raised"] == []


@pytest.mark.parametrize("operation", ["gdn2", "gated_delta_product"])
def test_the_generic_forms_agree_in_every_regime(operation, capsys):
    assert main(["check", "--full", "--library", "numpy", "--operation", operation]) == 0
    assert "all agree" in capsys.readouterr().out


def test_processes_share_the_cases(capsys):
    """The report is that of one process, line by line."""
    call = ["check", "--library", "numpy", "--operation", "linear_scan", "--operation", "retention"]
    assert main(call) == 0
    alone = capsys.readouterr().out
    assert main([*call, "--jobs", "2"]) == 0
    assert capsys.readouterr().out == alone


@pytest.mark.backend("torch", "dask")  # on JAX, where it compiles for most of a minute, by `nox -s agree`
def test_libraries_agree_with_numpy(request, capsys):
    name = request.config.getoption("--backend")
    assert (
        main(["check", "--library", "numpy", "--library", name, "--operation", "selective_scan", "--json"])
        == 0
    )
    told = json.loads(capsys.readouterr().out)
    assert {pair["right"].split()[0].split(":")[0] for pair in told["pairs"]} >= {name}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--operation", "gnd2"], "unknown operation 'gnd2'"),
        (["--library", "numpyy"], "unknown library 'numpyy'"),
        (["--jobs", "0"], "--jobs: expected at least 1, came 0"),
    ],
)
def test_an_unknown_name_is_status_2(arguments, words, capsys):
    assert main(["check", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_help_shows_examples(capsys):
    for command in ("info", "check", "demo"):
        with pytest.raises(SystemExit) as stop:
            main([command, "--help"])
        assert stop.value.code == 0
        shown = capsys.readouterr().out
        assert "examples:" in shown
        assert f"scanfield {command}" in shown


# -- inputs --------------------------------------------------------------------------------------------------


def test_every_operation_meets_every_input_and_the_hard_regimes():
    for record in scanfield.operations():
        function = getattr(scanfield, record.name)
        cases = {case.regime.name: case for case in draws.cases(record, function, draws.FULL)}
        arrays = {entry.name for entry in record.inputs if entry.role != "index"}
        assert set(cases["all inputs"].arrays) == arrays
        assert {"required inputs only", "exact zeros", "reverse", "packed", "packed, reverse"} <= set(cases)
        required = {entry.name for entry in record.inputs if not entry.optional}
        assert set(cases["required inputs only"].arrays) == required
        if "log_decay" in arrays:
            assert np.min(cases["strong decay"].arrays["log_decay"]) < -150
            assert np.isneginf(cases["resets"].arrays["log_decay"]).any()


def test_draws_repeat_themselves():
    record = scanfield.gdn2.record
    first, second = (
        [case.arrays for case in draws.cases(record, scanfield.gdn2, draws.FULL)] for _ in range(2)
    )
    for left, right in zip(first, second, strict=True):
        for name in left:
            np.testing.assert_array_equal(left[name], right[name])


# -- the measure ---------------------------------------------------------------------------------------------


def test_the_measure_of_two_arrays():
    values = np.asarray([[1.0, -4.0], [2.0, 0.5]])

    def apart(left, right, size_of_all=1.0):
        return agree.apart(np.asarray(left), np.asarray(right), size_of_all, "float64")

    assert apart(values, values) == (0.0, (0, 0), (1.0, 1.0))
    moved = values + np.asarray([[0.0, 0.0], [0.04, 0.0]])
    deviation, index, both = apart(values, moved)
    assert deviation == pytest.approx(0.01)
    assert index == (1, 0)
    assert both == (2.0, 2.04)

    broken = np.where(values == 2.0, np.nan, values)
    assert apart(values, broken)[0] == np.inf
    assert apart(broken, broken)[0] == 0.0
    infinite = np.where(values == 2.0, np.inf, values)
    assert apart(values, infinite)[0] == np.inf
    assert apart(infinite, infinite)[0] == 0.0
    assert apart(infinite, -infinite)[0] == np.inf
    assert apart(values, values[:1])[0] == np.inf
    assert apart(np.zeros((0, 3)), np.zeros((0, 3)))[0] == 0.0


def test_noise_beside_exact_zeros_is_measured_by_the_other_arrays():
    zeros, noise = np.zeros(3), np.full(3, 1e-9)
    assert agree.apart(zeros, noise, 10.0, "float32")[0] == pytest.approx(1e-10)
    # One that is truly there is not noise.
    assert agree.apart(zeros, noise + 1.0, 10.0, "float32")[0] == pytest.approx(0.1)


def test_places_are_those_of_the_machine():
    found = places()
    assert found[0].library == "numpy"
    for place in found:
        with place.scope():
            back = place.numpy(place.array(np.asarray([1.0, 2.0], dtype=np.float64).astype(place.dtypes[0])))
        np.testing.assert_array_equal(back, [1.0, 2.0])


def test_a_library_without_a_place_is_named_with_its_reason(monkeypatch):
    class NoDriver(RuntimeError):
        pass

    def count():
        raise NoDriver("insufficient driver")

    absent()  # the others are imported before: dask, where it is, asks CuPy for its arrays then
    # CuPy as it is installed on a machine without a card, or without its driver.
    runtime = types.SimpleNamespace(getDeviceCount=count, CUDARuntimeError=NoDriver, is_hip=False)
    cupy = types.ModuleType("cupy")
    cupy.cuda = types.SimpleNamespace(runtime=runtime)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    assert absent()["cupy"] == "installed, and finds no device"
    monkeypatch.setitem(sys.modules, "cupy", None)
    shown = as_text(agree.Report(absent=absent()))
    assert "not here: cupy, not installed: pip install 'scanfield[cupy" in shown
    assert "numpy" not in absent() and as_json(agree.Report(absent=absent()))["not_here"] == absent()


def test_the_pairs_are_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib")
    path = tmp_path / "agreement.png"
    assert main([*PLANTED, "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr()
    assert f"plot written to {path}" in shown.out
    assert shown.err == ""  # no terminal: no progress


def test_a_pair_that_is_apart_is_drawn_too(tmp_path):
    """Infinities, and pairs that were not compared, are no error of the plot."""
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib")
    left, right, third = (agree.Run("numpy", name) for name in ("one", "two", "three"))
    worst = agree.Worst(
        float("inf"), float("inf"), 4e-6, "gdn2", "plain", "float32", "output", (0,), 1.0, np.nan
    )
    pair = agree.Pair()
    pair.add(worst)
    report = agree.Report(pairs={(left, right): pair, (left, third): agree.Pair()})
    check.draw(report, tmp_path / "agreement.svg")
    assert "<!-- inf -->" in (tmp_path / "agreement.svg").read_text()


def test_implementations_without_a_verb_in_common_are_no_pair():
    """A table of the worst element of each pair had none to show, and the check ended there."""
    one, other, third = (agree.Run("numpy", name) for name in ("one", "other", "third"))
    results = {
        one: {"output": np.ones(2)},
        other: {"step's output": np.ones(2)},
        third: {"output": np.ones(2), "step's output": np.ones(2)},
    }
    report, (record,) = agree.Report(), agree.operations(["linear_scan"])
    case = types.SimpleNamespace(regime=draws.QUICK[0])
    agree._compare_case(record, case, "float64", results, {}, report)
    assert set(report.pairs) == {(one, third), (other, third)}
    assert "2 pairs of implementations, 2 comparisons of arrays: all agree" in as_text(report)


def test_a_report_tells_all_that_was_found_by_pair_and_by_operation():
    left, right, slow = agree.Run("numpy", "one"), agree.Run("numpy", "two"), agree.Run("jax", "slow")
    pair = agree.Pair()
    for i in range(8):
        pair.add(agree.Worst(10.0 + i, 1e-3, 4e-6, "gdn2", "plain", "float32", f"d_{i}", (0, i), 1.0, 2.0))
    pair.add(agree.Worst(0.5, 2e-6, 4e-6, "linear_scan", "plain", "float32", "output", (), 1.0, 1.0))
    report = agree.Report(
        pairs={(left, right): pair},
        crashes={agree.Crash(slow, "gdn2", "forward", "ValueError: no"): ["float32 plain", "float64 plain"]},
        declined={(slow, "complex numbers"): {"selective_scan", "linear_scan"}},
        selected={"jax", "dask"},
        absent={"cupy": "not installed"},
        runs={"gdn2": {left, right}, "linear_scan": {left, right}, "selective_scan": {left}},
    )
    shown = as_text(report)
    assert (
        shown.count("APART  numpy one and numpy two") == 5 and "and 3 more arrays of numpy one and" in shown
    )
    assert shown.index("d_7[0, 7]") < shown.index("d_6[0, 6]")  # the worst first
    for words in (
        "RAISED jax slow: gdn2, forward (float32 plain; float64 plain)\n       ValueError: no",
        "not compared: jax slow, linear_scan, selective_scan: complex numbers",
        "not here: cupy, not installed",
        "only one implementation here, so nothing to compare: selective_scan",
        "dask, jax: a selection of the cases",
        "1 pair of implementations, 9 comparisons of arrays: NOT all agree",
    ):
        assert words in shown
    rows = [line.split() for line in as_text(report, by_operation=True).splitlines()[:4]]
    assert rows[2][:6] == ["gdn2", "2", "1.0e-03", "/", "4e-06", "APART"]
    assert rows[3][:5] == ["linear_scan", "2", "2.0e-06", "/", "4e-06"] and rows[3][5] == "float32,"
    assert not any("selective_scan" in row for row in rows)


def test_reports_of_several_processes_are_one():
    run, crash = (
        agree.Run("jax", "one"),
        agree.Crash(agree.Run("jax", "one"), "gdn2", "step", "ValueError: no"),
    )
    whole = agree.Report()
    for dtype, name in (("float32", "gdn2"), ("float64", "kda")):
        pair = agree.Pair()
        pair.add(
            agree.Worst(
                0.5 if name == "kda" else 2.0, 1e-6, 4e-6, name, "plain", dtype, "output", (0,), 1.0, 1.0
            )
        )
        whole.add(
            agree.Report(
                pairs={(run, run): pair},
                crashes={crash: [f"{dtype} plain"]},
                declined={(run, "complex"): {name}},
                selected={"jax"},
                runs={name: {run}},
            )
        )
    assert whole.crashes == {crash: ["float32 plain", "float64 plain"]}
    assert whole.declined == {(run, "complex"): {"gdn2", "kda"}} and whole.selected == {"jax"}
    assert whole.runs == {"gdn2": {run}, "kda": {run}}
    (pair,) = whole.pairs.values()
    assert pair.compared == 2 and set(pair.worst) == {"gdn2", "kda"} and len(pair.failed) == 1
    assert not whole.agree


@pytest.mark.parametrize("pace", ["ready", "compiles", "builds a graph"])
def test_what_slow_places_run_is_a_selection(pace):
    """The first regime and packs of a base operation; of what compiles, the first one of the others too."""
    place = types.SimpleNamespace(pace=pace)
    records = {record.name: record for record in agree.operations()}

    def met(name, dtype):
        cases = [case for _, case in agree.cases([records[name]], full=True)]
        packed = {i for i, case in enumerate(cases) if getattr(case.regime, "packed", False)}
        found = {i for i, case in enumerate(cases) if agree._is_selected(place, records[name], case, dtype)}
        return found, packed, len(cases)

    for name in ("linear_scan", "kda", "pinn"):
        for dtype in ("float32", "float64"):
            found, packed, count = met(name, dtype)
            if pace == "ready":
                want = set(range(count))
            elif name == "linear_scan":
                assert packed
                want = {0} | packed if dtype == "float32" else {0} if pace == "compiles" else set()
            else:
                want = {0} if pace == "compiles" and dtype == "float32" else set()
            assert found == want and count > len(packed) + 1, (name, dtype)


def test_a_comparison_that_is_interrupted_ends_its_processes(monkeypatch):
    ended = []

    class Pool:
        def __init__(self, *_):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def submit(self, function, *given):
            task = Future()
            task.set_result(function(*given))
            return task

        def shutdown(self, **options):
            ended.append(options)

    def impatient(words):
        raise KeyboardInterrupt

    monkeypatch.setattr(jobs, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(jobs, "_one", lambda *_: ("a case", agree.Report()))
    with pytest.raises(KeyboardInterrupt):
        jobs.compare(["linear_scan"], ["numpy"], full=False, everything=False, jobs=2, done=impatient)
    assert ended == [{"wait": False, "cancel_futures": True}]


def test_processes_keep_what_they_compile_where_all_find_it(monkeypatch, tmp_path):
    names = ("SCANFIELD_CACHE_DIR", "JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
    for name in (*names, "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    jobs._share_what_is_compiled(str(tmp_path))
    assert [os.environ[name] for name in names] == [str(tmp_path / "numba"), str(tmp_path / "jax"), "0"]
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "the user's own")
    monkeypatch.setenv("SCANFIELD_CACHE_DIR", "and this")
    jobs._share_what_is_compiled(str(tmp_path))
    assert [os.environ[name] for name in names[:2]] == ["and this", "the user's own"]


def test_nothing_to_compare_is_no_agreement(monkeypatch, capsys):
    """A check that compared nothing must not look like one that passed."""
    monkeypatch.setattr(agree, "compare", lambda *args, **options: agree.Report())
    assert main([*PLANTED]) == 1
    assert "NOTHING was compared" in capsys.readouterr().out


def test_json_says_what_it_was_measured_on(capsys):
    assert main([*PLANTED, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["versions"]["scanfield"] == scanfield.__version__ and told["threads"]["cpus"] >= 1
