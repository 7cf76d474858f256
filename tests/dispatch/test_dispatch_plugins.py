"""Plugins: how they are found, what runs of them, and what happens when one is broken. Each test is a fresh process."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import announce, python

HERE = Path(__file__).resolve().parent

START = """
    import sys, warnings
    import numpy
    import scanfield
    from scanfield import dispatch
    import dummy_backend
    from dummy_backend import CALLS, MADE

    r = numpy.random.default_rng(0)
    def scan(time=4):
        return {"a": r.uniform(.5, 1, (2, time, 3)), "b": r.standard_normal((2, time, 3))}
    def refusal(kind, run):
        try:
            run()
        except kind as error:
            return str(error)
        raise AssertionError(f"no {kind.__name__} was raised")
"""


def run(tmp_path, which: str, script: str, *arguments: str, **environment: str) -> str:
    """The script in a process where the manifest `which` of the dummy plugin is announced.

    The compiled scans, a plugin too, are turned off: what the dummy leaves is then the generic code's, with or without
    numba.
    """
    announce(tmp_path, "dummy", f"dummy_backend:{which}")
    blocked = environment.get("SCANFIELD_BLOCK", "")
    environment["SCANFIELD_BLOCK"] = f"{blocked},numpy.numba"
    return python(START + script, *arguments, path=(HERE, tmp_path), **environment)


def test_a_plugin_is_found_and_runs(tmp_path):
    script = """
    from small_calls import EXAMPLES
    for operation, (inputs, options, token) in EXAMPLES.items():
        function = getattr(scanfield, operation)
        base = getattr(function.record, "base", function.record).name
        CALLS.clear()
        taken = scanfield.explain(function, **inputs, **options).taken
        assert set(taken.values()) == {"numpy.loopback"}, taken
        assert not CALLS, "explain ran something"
        result = function(**inputs, **options)
        assert CALLS == [("numpy.loopback", base, "forward")], CALLS
        again, pullback = scanfield.vjp(function, **inputs, **options)
        gradients = pullback(again.output, again.final_state)
        assert CALLS[1:] == [("numpy.loopback", base, "save"), ("numpy.loopback", base, "backward")], CALLS
        y, state = function.step(None, **token, **options)
        assert CALLS[3:] == [("numpy.loopback", base, "step")], CALLS
        stateless = {name: x for name, x in inputs.items() if name != "initial_state"}
        affine = scanfield.summarise(function, **stateless, **options)
        assert CALLS[4:] == [("numpy.loopback", base, "summarise")], CALLS

        with scanfield.use(method="generic.recurrent"):
            plain, pullback = scanfield.vjp(function, **inputs, **options)
            wanted = pullback(plain.output, plain.final_state)
            y2, state2 = function.step(None, **token, **options)
            affine2 = scanfield.summarise(function, **stateless, **options)
        assert len(CALLS) == 5, CALLS
        for one, other in [(result, plain), (again, plain), ((y, state), (y2, state2)), (affine[:2], affine2[:2])]:
            for x, z in zip(one, other):
                assert numpy.array_equal(x, z), operation
        assert gradients.keys() == wanted.keys() == inputs.keys()
        assert all(numpy.array_equal(gradients[name], wanted[name]) for name in wanted)
    # One implementation an operation was made, at its first use.
    assert sorted(MADE) == [("numpy.loopback", name) for name in ("gdn2", "linear_scan", "selective_scan")], MADE
    """
    run(tmp_path, "LOOPBACK", script)


def test_a_backend_reaches_any_implementation_by_its_name(tmp_path):
    script = """
    inner = dispatch.implementation("linear_scan", "generic.recurrent")
    outer = dispatch.implementation("linear_scan", "numpy.loopback")
    assert outer.inner is inner
    said = refusal(scanfield.BackendError, lambda: dispatch.implementation("linear_scan", "numpy.imagined"))
    assert "numpy.imagined" in said and "linear_scan" in said, said
    """
    run(tmp_path, "LOOPBACK", script)


def test_backends_lists_a_plugin_with_its_candidates(tmp_path):
    script = """
    (entry,) = (backend for backend in scanfield.backends() if backend.name == "numpy")
    names = ("numpy.picky", "numpy.loopback", "numpy.spare", "numpy.numba")
    assert entry.status == "usable" and entry.candidates == names, entry
    assert "numpy.loopback" in str(scanfield.backends())
    assert not MADE, "listing made an implementation"
    """
    run(tmp_path, "SEVERAL", script)


def test_residuals_belong_to_who_made_them(tmp_path):
    """A candidate that has `save` but no `backward` runs forward; gradients are generic from end to end."""
    script = """
    inputs = scan()
    explained = scanfield.explain(scanfield.linear_scan, **inputs)
    assert explained.taken["forward"] == "numpy.half"
    assert explained.taken["save"].startswith("generic."), explained
    (verdict,) = (v for v in explained.verdicts if v.candidate == "numpy.half" and v.verb == "save")
    assert not verdict.taken and verdict.reason == "has no backward (save and backward go together)", verdict
    result, pullback = scanfield.vjp(scanfield.linear_scan, **inputs)
    gradients = pullback(result.output)
    assert CALLS == [], CALLS
    scanfield.linear_scan(**inputs)
    assert CALLS == [("numpy.half", "linear_scan", "forward")], CALLS
    with scanfield.use(method="generic"):
        plain, pullback = scanfield.vjp(scanfield.linear_scan, **inputs)
    wanted = pullback(plain.output)
    assert all(numpy.array_equal(gradients[name], wanted[name]) for name in wanted)
    # Asked for by name it has to say that it cannot.
    said = refusal(scanfield.BackendError, lambda: scanfield.vjp(scanfield.linear_scan, **inputs, method="numpy.half"))
    assert "numpy.half" in said and "backward" in said and "linear_scan" in said, said
    token = {name: x[:, 0] for name, x in inputs.items()}
    with scanfield.use(method="numpy.half"):
        said = refusal(scanfield.BackendError, lambda: scanfield.linear_scan.step(None, **token))
    assert "numpy.half" in said and "step" in said, said
    """
    run(tmp_path, "HALF", script)


def test_a_candidate_that_declines_says_why(tmp_path):
    script = """
    short, long = scan(4), scan(5)
    assert scanfield.explain(scanfield.linear_scan, **short).taken["forward"] == "numpy.picky"
    explained = scanfield.explain(scanfield.linear_scan, **long)
    assert explained.taken["forward"] == "numpy.loopback", explained
    assert "takes at most 4 tokens, not 5" in str(explained)
    scanfield.linear_scan(**short), scanfield.linear_scan(**long)
    assert [name for name, *_ in CALLS] == ["numpy.picky", "numpy.loopback"], CALLS
    for run in (lambda: scanfield.linear_scan(**long, method="numpy.picky"),
                lambda: scanfield.vjp(scanfield.linear_scan, **long, method="numpy.picky"),
                lambda: scanfield.explain(scanfield.linear_scan, **long, method="numpy.picky")):
        said = refusal(scanfield.BackendError, run)
        assert "numpy.picky" in said and "takes at most 4 tokens, not 5" in said, said
    assert len(CALLS) == 2, CALLS
    """
    run(tmp_path, "SEVERAL", script)


def test_a_spare_candidate_runs_only_by_name(tmp_path):
    script = """
    inputs = scan()
    explained = scanfield.explain(scanfield.linear_scan, **inputs)
    assert explained.taken["forward"].startswith("generic.")
    assert "runs only by method='numpy.spare'" in str(explained), explained
    scanfield.linear_scan(**inputs)
    assert CALLS == []
    scanfield.linear_scan(**inputs, method="numpy.spare")
    assert CALLS == [("numpy.spare", "linear_scan", "forward")], CALLS
    """
    run(tmp_path, "SPARE", script)


def test_an_unknown_method_lists_the_known_ones(tmp_path):
    script = """
    said = refusal(scanfield.ArgumentError, lambda: scanfield.linear_scan(**scan(), method="numpy.loopbak"))
    for words in ("numpy.loopbak", "linear_scan", "generic", "generic.recurrent", "numpy.picky", "numpy.loopback",
                  "numpy.spare"):
        assert words in said, said
    """
    run(tmp_path, "SEVERAL", script)


def test_a_method_of_another_library_says_so(tmp_path):
    script = """
    said = refusal(scanfield.BackendError, lambda: scanfield.linear_scan(**scan(), method="torch.loopback"))
    for words in ("torch.loopback", "torch", "numpy", "linear_scan"):
        assert words in said, said
    """
    run(tmp_path, "TORCH", script)


BROKEN = """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = scanfield.linear_scan(**scan())
        scanfield.vjp(scanfield.linear_scan, **scan())
        scanfield.selective_scan(*(r.standard_normal(s) for s in ((1, 4, 2), (1, 4, 2), (2, 3), (1, 4, 3), (1, 4, 3))))
        listed = scanfield.backends()
        explained = scanfield.explain(scanfield.linear_scan, **scan())
"""


def test_something_that_is_no_manifest_is_a_broken_plugin(tmp_path):
    script = """
    assert len(caught) == 1 and "dummy" in str(caught[0].message) and "Manifest" in str(caught[0].message), caught
    (entry,) = (backend for backend in listed if backend.status == "broken")
    assert "dummy" in entry.name and "dict" in entry.detail, entry
    """
    run(tmp_path, "NOT_A_MANIFEST", BROKEN + script)


def test_a_name_that_the_plugin_does_not_have(tmp_path):
    script = """
    assert len(caught) == 1 and "dummy" in str(caught[0].message) and "ABSENT" in str(caught[0].message), caught
    assert [backend.status for backend in listed].count("broken") == 1
    """
    run(tmp_path, "ABSENT", BROKEN + script)


def test_a_candidate_that_cannot_be_made_is_left_out_with_a_warning(tmp_path):
    """One for each operation that is used, as each has an implementation of its own."""
    script = """
    messages = [str(w.message) for w in caught]
    assert len(messages) == 2 and all("numpy.faulty" in m and "no such instruction" in m for m in messages), messages
    assert explained.taken["forward"].startswith("generic.")
    assert "no such instruction" in str(explained)
    said = refusal(scanfield.BackendError, lambda: scanfield.linear_scan(**scan(), method="numpy.faulty"))
    assert "numpy.faulty" in said and "no such instruction" in said, said
    """
    run(tmp_path, "FAULTY", BROKEN + script)


def test_a_candidate_whose_library_is_missing_is_no_warning(tmp_path):
    script = """
    assert not caught, [str(w.message) for w in caught]
    assert explained.taken["forward"].startswith("generic.")
    assert "a_library_that_nobody_has" in str(explained), explained
    said = refusal(scanfield.BackendError, lambda: scanfield.linear_scan(**scan(), method="numpy.loopback"))
    assert "numpy.loopback" in said and "a_library_that_nobody_has" in said, said
    said = refusal(scanfield.BackendError, lambda: dispatch.implementation("linear_scan", "numpy.loopback"))
    assert "a_library_that_nobody_has" in said, said
    """
    run(tmp_path, "WANTING", BROKEN + script)


def test_two_plugins_stand_side_by_side(tmp_path):
    announce(tmp_path / "other", "other", "no_such_module:MANIFEST")
    announce(tmp_path, "dummy", "dummy_backend:LOOPBACK")
    script = """
    assert len(caught) == 1 and "other" in str(caught[0].message), caught
    assert explained.taken["forward"] == "numpy.loopback"
    assert {name for name, *_ in CALLS} == {"numpy.loopback"}
    """
    python(START + BROKEN + script, path=(HERE, tmp_path, tmp_path / "other"))


BLOCK = {
    "numpy.picky": ("numpy.loopback", "numpy.loopback"),
    "numpy.picky,numpy.loopback": ("generic", "generic"),
    "numpy.picky:backward": ("numpy.picky", "numpy.loopback"),
    "numpy.picky:save , numpy.loopback": ("numpy.picky", "generic"),
    "numpy.picky:forward": ("numpy.loopback", "numpy.picky"),
}


@pytest.mark.parametrize("blocked", BLOCK)
def test_scanfield_block_turns_candidates_or_single_verbs_off(tmp_path, blocked):
    script = """
    forward, save = sys.argv[1:]
    inputs = scan()
    explained = scanfield.explain(scanfield.linear_scan, **inputs)
    assert explained.taken["forward"].startswith(forward), explained
    assert explained.taken["save"].startswith(save), explained
    told = {v.candidate for v in explained.verdicts if "SCANFIELD_BLOCK" in v.reason}
    assert told - {"numpy.numba"}, explained
    scanfield.linear_scan(**inputs)
    result, pullback = scanfield.vjp(scanfield.linear_scan, **inputs)
    pullback(result.output)
    ran = {verb: name for name, _, verb in CALLS}
    assert ran.get("forward", "generic") == forward, CALLS
    assert ran.get("save", "generic") == ran.get("backward", "generic") == save, CALLS
    """
    run(tmp_path, "SEVERAL", script, *BLOCK[blocked], SCANFIELD_BLOCK=blocked)


def test_a_blocked_candidate_cannot_be_forced(tmp_path):
    script = """
    said = refusal(scanfield.BackendError, lambda: scanfield.linear_scan(**scan(), method="numpy.loopback"))
    assert "numpy.loopback" in said and "SCANFIELD_BLOCK" in said, said
    """
    run(tmp_path, "LOOPBACK", script, SCANFIELD_BLOCK="numpy.loopback")


@pytest.mark.parametrize(
    ("blocked", "words"),
    [
        ("numpy.lopback", ("numpy.lopback", "numpy.loopback")),
        ("numpy.loopback:bakward", ("bakward", "backward", "step")),
    ],
)
def test_scanfield_block_warns_of_names_it_does_not_know(tmp_path, blocked, words):
    script = """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scanfield.linear_scan(**scan())
        scanfield.linear_scan(**scan())
    assert len(caught) == 1, [str(w.message) for w in caught]
    message = str(caught[0].message)
    assert "SCANFIELD_BLOCK" in message, message
    for words in sys.argv[1:]:
        assert words in message, message
    assert {name for name, *_ in CALLS} == {"numpy.loopback"}
    """
    run(tmp_path, "LOOPBACK", script, *words, SCANFIELD_BLOCK=blocked)


def test_scanfield_log_tells_each_choice_once(tmp_path):
    script = """
    import logging
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("scanfield").addHandler(handler)
    logging.getLogger("scanfield").propagate = False
    for time in (4, 4, 5, 5, 3):
        scanfield.linear_scan(**scan(time))
    for _ in range(2):
        result, pullback = scanfield.vjp(scanfield.linear_scan, **scan())
        pullback(result.output)
    chosen = [(verb, name) for line in lines for verb in ("forward", "save", "backward", "step")
              for name in ("numpy.picky", "numpy.loopback") if verb in line and name in line]
    assert len(lines) == 3, lines
    assert chosen == [("forward", "numpy.picky"), ("forward", "numpy.loopback"), ("save", "numpy.picky")], lines
    assert all("linear_scan" in line and "numpy" in line and "cpu" in line for line in lines), lines
    """
    run(tmp_path, "SEVERAL", script, SCANFIELD_LOG="1")


@pytest.mark.parametrize("value", ["", "0"])
def test_nothing_is_logged_unless_asked_for(tmp_path, value):
    script = """
    import logging
    handler = logging.Handler()
    def emit(record):
        raise AssertionError(record.getMessage())
    handler.emit = emit
    logging.getLogger("scanfield").addHandler(handler)
    scanfield.linear_scan(**scan())
    """
    run(tmp_path, "SEVERAL", script, SCANFIELD_LOG=value)


def test_eight_first_calls_at_once_make_one_implementation(tmp_path):
    script = """
    import threading, importlib.metadata
    asked = []
    inner = importlib.metadata.entry_points
    from scanfield.dispatch import registry
    registry.entry_points = lambda **group: asked.append(group) or inner(**group)
    inputs = scan()
    barrier, results, errors = threading.Barrier(8), [], []
    def first():
        barrier.wait()
        try:
            results.append(scanfield.linear_scan(**inputs))
        except BaseException as error:
            errors.append(error)
    threads = [threading.Thread(target=first) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert len(results) == 8 and all(numpy.array_equal(results[0].output, result.output) for result in results)
    assert MADE == [("numpy.loopback", "linear_scan")], MADE
    assert len(asked) == 1, asked  # the environment is read once
    """
    run(tmp_path, "LOOPBACK", script)


def test_use_forces_this_thread_only(tmp_path):
    script = """
    import threading
    inputs = scan()
    ran = []
    def elsewhere():
        scanfield.linear_scan(**inputs)
    def call(**options):
        CALLS.clear()
        scanfield.linear_scan(**inputs, **options)
        return [name for name, *_ in CALLS] or ["generic"]
    assert call() == ["numpy.picky"]
    with scanfield.use(method="numpy.loopback"):
        assert call() == ["numpy.loopback"]
        assert scanfield.explain(scanfield.linear_scan, **inputs).taken["forward"] == "numpy.loopback"
        CALLS.clear()
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert [name for name, *_ in CALLS] == ["numpy.picky"], CALLS
        # the call's own method comes first, and blocks nest
        assert call(method="numpy.spare") == ["numpy.spare"]
        with scanfield.use("generic"):
            assert call() == ["generic"]
        said = refusal(TypeError, scanfield.use(3).__enter__)
        assert said == "method: 3; allowed is the name of a method, or None", said
        assert call() == ["numpy.loopback"]
    assert call() == ["numpy.picky"]
    try:
        with scanfield.use(method="numpy.loopback"):
            raise KeyError
    except KeyError:
        pass
    assert call() == ["numpy.picky"]
    assert call(method="generic") == ["generic"]
    said = refusal(TypeError, lambda: scanfield.use(method="numpy.loopback", verb="forward"))
    """
    run(tmp_path, "SEVERAL", script)


def test_a_pullback_runs_by_the_method_of_its_vjp(tmp_path):
    """The residuals are of whoever ran then; a `use` around the pullback alone cannot hand them to another."""
    script = """
    inputs = scan()
    result, pullback = scanfield.vjp(scanfield.linear_scan, **inputs, method="numpy.loopback")
    with scanfield.use(method="generic"):
        pullback(result.output)
    assert [name for name, *_ in CALLS] == ["numpy.loopback"] * 2, CALLS
    """
    run(tmp_path, "SEVERAL", script)
