"""What a call costs beside the computation: selection, preparation, a whole step. NumPy, one thread, median.

python benchmarks/overhead.py
python benchmarks/overhead.py --json
"""

from __future__ import annotations

import _timing  # first: it sets the number of BLAS threads
import numpy as np

import scanfield
from scanfield import dispatch


class _Nothing:
    """An implementation that returns at once, so that what remains is the dispatcher."""

    def declines(self, call: dispatch.Call, verb: str) -> None:
        return None

    def forward(self, call: dispatch.Call) -> None:
        return None


def rows(quick: bool) -> list[dict[str, object]]:
    """One row for each thing measured."""
    rng = np.random.default_rng(0)
    least = 0.02 if quick else 0.5
    batch, time, heads, K, V = 1, 4, 2, 8, 6
    gdn2 = {
        "query": rng.standard_normal((batch, time, heads, K)),
        "key": rng.standard_normal((batch, time, heads, K)),
        "value": rng.standard_normal((batch, time, heads, V)),
        "log_decay": -rng.random((batch, time, heads, K)),
        "erase": rng.random((batch, time, heads, K)),
        "write": rng.random((batch, time, heads, V)),
        "initial_state": rng.standard_normal((batch, heads, K, V)),
    }
    linear = {"a": rng.random((1, 4, 3)), "b": rng.random((1, 4, 3)), "initial_state": rng.random((1, 3))}
    selective = {
        "u": rng.standard_normal((1, 4, 6)),
        "delta": rng.random((1, 4, 6)),
        "A": -rng.random((6, 3)),
        "B": rng.standard_normal((1, 4, 3)),
        "C": rng.standard_normal((1, 4, 3)),
    }

    found: list[dict[str, object]] = []

    def measure(what: str, call) -> None:
        found.append({"table": "microseconds", "what": what, "us": 1e6 * _timing.seconds(call, least=least)})

    probe = dispatch.Operation(
        name="probe",
        inputs=(dispatch.Input("x", ("batch time",)),),
        options=(),
        main="x",
        relevant="x",
        prepare=lambda *a, **k: None,
        generic={"only": _Nothing()},
        choose=lambda call: "generic.only",
    )
    dispatch.register(probe)
    call = dispatch.Call("probe", (np.zeros((1, 4)),), (), "float64")
    measure("dispatch.call, an implementation that returns at once", lambda: dispatch.call(call, "forward"))

    for function, arrays in (
        (scanfield.linear_scan, linear),
        (scanfield.selective_scan, selective),
        (scanfield.gdn2, gdn2),
    ):
        record, options = function.record, _defaults(function)
        whole = dict.fromkeys(entry.name for entry in record.inputs) | arrays
        measure(
            f"prepare of {record.name}, {len(arrays)} arrays",
            lambda record=record, whole=whole, options=options: record.prepare(whole, options),
        )
        measure(f"{record.name}, whole", lambda function=function, arrays=arrays: function(**arrays))
        token = {
            entry.name: arrays[entry.name][:, 0] if entry.role == "sequence" else arrays[entry.name]
            for entry in record.inputs
            if entry.name in arrays and entry.role != "state"
        }
        state = function(**arrays).final_state
        measure(
            f"{record.name}.step, whole",
            lambda function=function, state=state, token=token: function.step(state, **token),
        )
    return found


def _defaults(function) -> dict[str, object]:
    """The options of a call that names none."""
    from scanfield.scans.binding import bind

    names = [entry.name for entry in function.record.inputs if not entry.optional]
    return bind(function, [None] * len(names), {}).options


if __name__ == "__main__":
    asked = _timing.arguments(__doc__)
    _timing.show(rows(asked.quick), as_json=asked.json)
