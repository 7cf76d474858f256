"""`scanfield check` has the CUDA kernels as a column without a card, and finds a wrong one."""

from __future__ import annotations

import json
from typing import Any

import emulator
import on_standin
import pytest

from scanfield.cli import places

if emulator.missing():
    pytest.skip(emulator.missing(), allow_module_level=True)


@pytest.fixture
def check(capsys: Any, monkeypatch: Any) -> Any:
    monkeypatch.setattr(places, "_FINDERS", dict(places._FINDERS))

    def run(*arguments: str) -> tuple[int, Any]:
        code = on_standin.main(["check", "--json", *arguments])
        return code, json.loads(capsys.readouterr().out)

    return run


def pair(told: Any, left: str, right: str) -> Any:
    return next(x for x in told["pairs"] if {x["left"], x["right"]} == {left, right})


def test_the_kernels_are_compared_with_every_other_implementation(check: Any) -> None:
    arguments = ("--operation", "linear_scan", "--operation", "pinn")
    code, told = check(*arguments, "--library", "numpy", "--library", "cupy")
    left_out = [line for line in told["not_compared"] if "numba is not installed" not in line["reason"]]
    assert code == 0 and told["raised"] == [] and left_out == []
    compared = pair(told, "cupy:cuda cupy.rawkernel", "numpy generic.recurrent")
    assert compared["compared"] > 30 and compared["apart"] == []
    jets = pair(told, "cupy:cuda cupy.rawkernel", "numpy generic")
    assert set(jets["worst"]) == {"pinn"} and jets["compared"] > 50


def test_a_wrong_kernel_is_found(check: Any, monkeypatch: Any) -> None:
    with on_standin.standin.installed():
        from scanfield_cupy import linear

    right = linear.Linear.forward

    def wrong(self: Any, call: Any) -> Any:
        output, state = right(self, call)
        return output * 1.001, state

    monkeypatch.setattr(linear.Linear, "forward", wrong)
    code, told = check("--operation", "linear_scan", "--library", "cupy")
    assert code == 1
    apart = pair(told, "cupy:cuda cupy.rawkernel", "cupy:cuda generic.recurrent")["apart"]
    assert {worst["array"] for worst in apart} == {"output"}


def test_among_all_libraries_it_gets_a_selection(check: Any, monkeypatch: Any) -> None:
    for name in ("torch", "jax", "dask"):
        places._FINDERS.pop(name)
    code, told = check("--operation", "linear_scan", "--full")
    assert code == 0 and told["selected"] == ["cupy:cuda"] and "cupy" not in told["not_here"]
