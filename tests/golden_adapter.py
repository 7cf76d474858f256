"""The golden cases in the words of this library: one place that knows how a case becomes a call.

The cases already use the public argument names, so little is left to translate: `cu_seqlens` lies among the
arrays of a case and is an option here, and some names of operations belong to relevance and PINN cases, which
other tests read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from examples import main_of
from golden.case_loader import Case, load

FOLDER = Path(__file__).resolve().parent / "golden"

# How many cases of each operation there are. A case that is lost, or added without a test, changes one of
# these.
SCAN_CASES = {
    "linear_scan": 5,
    "selective_scan": 10,
    "gdn2": 16,
    "linear_attention": 1,
    "retention": 1,
    "gla": 1,
    "delta_rule": 1,
    "gated_delta_rule": 1,
    "kda": 1,
    "ssd": 1,
}
OTHER_CASES = {"selective_scan_lrp": 3, "gdn2_lrp": 1, "pinn_helmholtz": 5, "pinn_impedance": 1}


class GoldenCall(NamedTuple):
    case: Case
    inputs: dict[str, np.ndarray]
    options: dict[str, Any]


def all_cases() -> list[Case]:
    return list(load(FOLDER))


def scan_cases() -> list[GoldenCall]:
    return [as_call(case) for case in all_cases() if case.op in SCAN_CASES]


def as_call(case: Case, dtype: str = "float64") -> GoldenCall:
    inputs = dict(case.cast(dtype).inputs)
    options = dict(case.options)
    if "cu_seqlens" in inputs:
        options["cu_seqlens"] = [int(c) for c in inputs.pop("cu_seqlens")]
    return GoldenCall(case, inputs, options)


def time_steps(call: GoldenCall) -> int:
    return call.inputs[main_of(call.case.op)].shape[1]
