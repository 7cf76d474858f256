"""`scanfield bench`: what it times is the user's own call; what is wrong in a call is said before anything is timed."""

from __future__ import annotations

import importlib.util
import json

import numpy as np
import pytest

import scanfield
from scanfield.cli import bench, info, main
from scanfield.cli.places import places

SMALL = ["--library", "numpy", "--seconds", "0.001", "--size", "time=5"]
SMALL_CALL = ["bench", "linear_scan", *SMALL]


def rival(name: str, verb: str, *, without: tuple[str, ...] = (), **sizes: int) -> bench._Rival:
    record = info.operation(name)
    (chosen,) = bench._sizes(record, [f"{axis}={size}" for axis, size in sizes.items()])
    (place,) = places(["numpy"])
    made = bench._Rival(
        record, bench._case(record, chosen, without), place, verb, "generic.recurrent", "float64"
    )
    made.prepare()
    return made


@pytest.mark.parametrize("name", [record.name for record in scanfield.operations()])
def test_every_operation_is_timed_in_every_verb(name, capsys):
    few = ["--size", "batch=2"] if name == "linear_scan" else []
    verbs = ["--verb", "forward", "--verb", "gradients", "--verb", "step"]
    assert main(["bench", name, *SMALL, *few, *verbs, "--method", "generic.recurrent", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["verb"] for row in told["rows"]] == ["forward", "gradients", "step"]
    assert all(row["seconds"] > 0 and row["candidate"] == "generic.recurrent" for row in told["rows"])
    assert told["operation"] == name and told["versions"]["scanfield"] == scanfield.__version__


def test_what_is_timed_is_the_call_of_a_user():
    made = rival("gdn2", "gradients", time=7, heads=2, key=3, value=5)
    arrays = {name: values.astype("float64") for name, values in made.case.arrays.items()}
    assert {name: x.shape for name, x in arrays.items()} == {
        "query": (1, 7, 2, 3),
        "key": (1, 7, 2, 3),
        "value": (1, 7, 2, 5),
        "log_decay": (1, 7, 2, 3),
        "erase": (1, 7, 2, 3),
        "write": (1, 7, 2, 5),
    }
    output, *gradients = made.call()
    expected, pullback = scanfield.vjp(scanfield.gdn2, **arrays, method="generic.recurrent")
    np.testing.assert_array_equal(output, expected.output)
    cotangent = np.random.default_rng(0).standard_normal(output.shape)
    for ours, theirs in zip(gradients, pullback(d_output=cotangent).values(), strict=True):
        np.testing.assert_array_equal(ours, theirs)

    stepped, state = rival("gdn2", "step", time=7, heads=2, key=3, value=5).call()
    token = {name: values.astype("float64") for name, values in made.case.token.items()}
    whole, last = scanfield.gdn2.step(expected.final_state, **token, method="generic.recurrent")
    np.testing.assert_array_equal(stepped, whole)
    np.testing.assert_array_equal(state, last)


def test_inputs_can_be_left_out():
    assert set(rival("gdn2", "forward", without=("erase", "write"), time=3).case.arrays) == {
        "query",
        "key",
        "value",
        "log_decay",
    }
    assert "initial_state" not in rival("selective_scan", "forward", time=3).case.arrays


def test_one_axis_may_have_several_sizes_and_a_plot(tmp_path, capsys):
    path = tmp_path / "bench.png"
    call = ["bench", "linear_scan", *SMALL, "--size", "time=4,8", "--method", "generic.recurrent"]
    if importlib.util.find_spec("matplotlib") is None:
        assert main([*call, "--plot", str(path)]) == 2
        assert "pip install 'scanfield[plot]'" in capsys.readouterr().err
        return
    assert main([*call, "--plot", str(path)]) == 0
    shown = capsys.readouterr()
    assert "time 4" in shown.out and "time 8" in shown.out and "1.0" in shown.out
    assert path.read_bytes().startswith(b"\x89PNG")
    assert shown.err == ""  # no terminal: no progress
    assert main([*call, "--size", "time=4", "--plot", str(path)]) == 0  # the last word counts: bars


def test_what_declines_is_a_line_with_its_reason_and_a_status(capsys):
    call = [*SMALL_CALL, "--method", "no.such", "--method", "generic.recurrent"]
    assert main([*call, "--json"]) == 1
    bad, good, *_ = json.loads(capsys.readouterr().out)["rows"]
    assert bad["seconds"] is None and "no.such" in bad["note"]
    assert good["seconds"] > 0 and good["note"] == ""
    assert main(call) == 1
    shown = capsys.readouterr().out
    assert "no.such" in shown and "first call, s  note" in shown
    assert main([*SMALL_CALL, "--method", "generic.recurrent"]) == 0
    shown = capsys.readouterr().out
    assert "note" not in shown and "NumPy and PyTorch share kernels" in shown
    assert all(line == line.rstrip() for line in shown.splitlines())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing"], "unknown operation 'nothing'"),
        (["gdn2", "--size", "width=3"], "has the axes batch, time, heads, key, vheads, value"),
        (["gdn2", "--size", "key"], "whole numbers"),
        (["gdn2", "--size", "key=0"], "at least 1"),
        (["gdn2", "--size", "key=4,8", "--size", "time=4,8"], "key and time"),
        (["gdn2", "--size", "heads=3", "--size", "vheads=4"], "vheads must be a multiple of heads"),
        (["gdn2", "--dtype", "int8"], "float32, float64"),
        (["gdn2", "--seconds", "0"], "above 0"),
        (["gdn2", "--seconds", "nan"], "above 0"),
        (["gdn2", "--without", "query"], "erase, log_decay, write"),
        (["gdn2", "--library", "nothing"], "unknown library"),
        (["gdn2", "--plot", "map.nothing"], "has to end in one of"),
        (["gdn2", "--plot", "no/such/folder/map.png"], "there is no folder"),
    ],
)
def test_a_wrong_call_is_told_before_anything_is_timed(words, said, capsys):
    if "--plot" in words:
        pytest.importorskip("matplotlib", reason="a plot needs matplotlib")
    assert main(["bench", *words]) == 2
    assert said in capsys.readouterr().err


def test_what_is_left_over_is_told_with_the_usage_of_the_command(capsys):
    for words, usage in (
        (["bench", "gdn2", "--size", "time", "64"], "scanfield bench"),
        (["--nothing"], "scanfield [-h]"),
    ):
        with pytest.raises(SystemExit) as left:
            main(words)
        told = capsys.readouterr().err
        assert (
            left.value.code == 2
            and f"usage: {usage}" in told
            and f"unrecognized arguments: {words[-1]}" in told
        )


def test_shared_heads_and_groups():
    record = info.operation("selective_scan")
    (sizes,) = bench._sizes(record, ["channels=8", "groups=4"])
    case = bench._case(record, sizes, ())
    assert case.arrays["B"].shape == (1, 1024, 4, 16) == case.arrays["C"].shape
    (sizes,) = bench._sizes(info.operation("gdn2"), ["heads=2", "vheads=6"])
    assert sizes["heads"] == 2 and sizes["vheads"] == 6
