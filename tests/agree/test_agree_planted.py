"""`scanfield check` catches a planted wrong candidate, whatever it is wrong in, and passes an honest one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from processes import announce, python

HERE = Path(__file__).resolve().parent

CHECK = """
    import contextlib, io, json, sys
    from scanfield.cli import main
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        status = main(["check", "--library", "numpy", "--json", *sys.argv[1:]])
    print(json.dumps({"status": status} | json.loads(told.getvalue())))
"""


def check(tmp_path, which: str, *arguments: str):
    """The exit status and the report of a check of NumPy with the manifest `which` of the planted plugin installed."""
    announce(tmp_path, "planted", f"planted_backend:{which}")
    return json.loads(python(CHECK, *arguments, path=(HERE, tmp_path)))


def apart(report) -> set[tuple[str, str]]:
    """The arrays that are apart, each with the operation it is of; every one of a pair with the planted candidate."""
    found = set()
    for pair in report["pairs"]:
        for worst in pair["apart"]:
            assert "numpy.planted" in pair["left"] + pair["right"], pair
            found.add((worst["operation"], worst["array"]))
    return found


PLANTED = {
    "WRONG_OUTPUT": ("output",),
    "WRONG_STATE": ("final_state",),
    "WRONG_GRADIENT": ("d_a", "d_u", "d_query", "relevance"),  # that of u is its gradient times u
    "WRONG_STEP": ("step's output",),
    "WRONG_SUMMARY": ("summary's state",),
    "NOT_FINITE": ("output",),
}
OPERATIONS = ("linear_scan", "selective_scan", "gdn2")


@pytest.mark.parametrize("which", PLANTED)
def test_a_planted_wrong_candidate_is_caught(tmp_path, which):
    """In every base operation, in the array that is wrong, and nowhere else."""
    only = [argument for operation in OPERATIONS for argument in ("--operation", operation)]
    report = check(tmp_path, which, *only)
    assert report["status"] == 1 and report["agree"] is False
    found = apart(report)
    assert {operation for operation, _ in found} == set(OPERATIONS)
    assert {array for _, array in found} == set(PLANTED[which]), found
    assert not report["raised"]


def test_a_wrong_candidate_is_caught_in_the_derived_operations_too(tmp_path):
    report = check(tmp_path, "WRONG_OUTPUT", "--operation", "kda", "--operation", "ssd")
    assert report["status"] == 1
    assert apart(report) == {("kda", "output"), ("ssd", "output")}


def test_a_candidate_that_raises_is_no_agreement(tmp_path):
    report = check(tmp_path, "RAISES", "--operation", "linear_scan")
    assert report["status"] == 1 and report["agree"] is False
    assert report["raised"]
    for crash in report["raised"]:
        assert "numpy.planted" in crash["run"] and "misaligned address" in crash["message"]


def test_a_stated_tolerance_is_granted(tmp_path):
    """The same error of 1e-4, in a candidate that says 1e-3."""
    report = check(tmp_path, "COARSE", "--operation", "linear_scan")
    assert report["status"] == 0 and report["agree"] is True


@pytest.mark.parametrize("more", [(), ("--full",)])
def test_an_honest_candidate_agrees(tmp_path, more):
    report = check(tmp_path, "HONEST", *more)
    assert report["status"] == 0 and report["agree"] is True, report
    assert not report["raised"] and not apart(report)
    named = " ".join(pair["left"] + " " + pair["right"] for pair in report["pairs"])
    assert "numpy.planted" in named and "generic.recurrent" in named and "generic.chunk" in named
    assert not report["alone"]
    # every operation was compared
    import scanfield

    compared = {operation for pair in report["pairs"] for operation in pair["worst"]}
    assert compared == {*(record.name for record in scanfield.operations()), "pinn", "layers"}
