"""Golden cases and the walk through every option, by every kernel: the user's own calls, forced onto the kernels."""

from __future__ import annotations

from typing import Any

import pytest
from checks import check_kind, check_truth, run_example, vjp
from examples import EXAMPLES, MAIN, Example
from golden_adapter import GoldenCall, scan_cases, time_steps

import scanfield
from scanfield.dispatch import Derived, operations
from scanfield_cupy import MANIFEST

METHOD = "cupy.rawkernel"
CANDIDATE = next(each for each in MANIFEST.candidates if each.name == METHOD)


def on_kernels(op: str) -> bool:
    record = next(record for record in operations() if record.name == op)
    base = record.base if isinstance(record, Derived) else record
    return base.name in CANDIDATE.operations


CALLS = [call for call in scan_cases() if on_kernels(call.case.op)]
WALKS = [example for example in EXAMPLES if on_kernels(example.op)]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.case.name)
def test_golden(card, call: GoldenCall, dtype: str):
    case = call.case
    if dtype == "float32" and time_steps(call) > 200:
        dtype = "float64"  # once is enough for the longest
    cotangents = case.cotangents["output"], case.cotangents["final_state"]
    got = vjp(card, case.op, call.inputs, cotangents, dtype, **call.options, method=METHOD)
    found: dict[str, Any] = {"expected/output": got.output, "expected/final_state": got.final_state}
    found |= {f"gradient/{name}": gradient for name, gradient in got.gradients.items()}
    assert set(found) == set(case.keys())
    errors = {key: case.error(key, card.raw(x), dtype) for key, x in found.items()}
    assert all(error <= 1 for error in errors.values()), {k: e for k, e in errors.items() if not e <= 1}


@pytest.mark.parametrize("example", WALKS, ids=str)
def test_every_option(card, example: Example):
    for dtype in ("float64", "float32"):
        got = run_example(card, example, dtype, METHOD)
        check_kind(card, got, example.op, example.inputs, dtype)
        check_truth(card, got, example, dtype)


# Half precision rounds each output once; its gradients are rounded sums. The truth is that of the rounded inputs.
HALF_TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2}


@pytest.mark.parametrize("dtype", HALF_TOLERANCE)
@pytest.mark.parametrize("op", CANDIDATE.operations)
def test_half_precision(card, op: str, dtype: str):
    for example in [
        x for x in WALKS if x.op == op and not any(a.dtype.kind == "c" for a in x.inputs.values())
    ]:
        got = run_example(card, example, dtype, METHOD)
        check_kind(card, got, op, example.inputs, dtype)
        check_truth(card, got, example, dtype, HALF_TOLERANCE[dtype])


def test_the_kernels_are_the_users_default(card):
    """Without a method too: nothing but the array's type chooses them."""
    for op in CANDIDATE.operations:
        example = next(x for x in WALKS if x.op == op)
        told = scanfield.explain(getattr(scanfield, op), **card.arrays(example.inputs), **example.options)
        taken = {v.verb for v in told.verdicts if v.candidate == METHOD and v.taken}
        assert {"forward", "save"} <= taken, str(told)
    assert MAIN["linear_scan"] == "a"
