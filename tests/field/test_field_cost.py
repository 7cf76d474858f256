"""Field reports F078 to F080: cost, as ratios of processor time and as counted bytes, never as a wall time."""

from __future__ import annotations

import resource
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from checks import before_tracing
from draws import G, M
from examples import COMPILED
from processes import python

import scanfield

HERE = (Path(__file__).resolve().parent,)

# What the rows hold to their bounds: the generic code of every library, and the compiled scans of NumPy.
EITHER = pytest.mark.parametrize("method", ["generic", COMPILED])


def arithmetic():
    """Seconds that this process computed, without those in which the system found memory for it."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime


def processor_times(runs, *, best_of, clock=time.process_time):
    """Seconds of this process's processor time of each run, the best of some rounds.

    The runs take turns, so that whatever else the machine does meets all of them; and the best of many is what is left
    when it does nothing else.
    """
    # The C library gives a large array's memory back to the system at once, and takes it again page by page, until it has
    # seen one of that size come back. That costs more than the arithmetic here, and differs between lengths.
    large = np.empty(31 << 20, dtype=np.uint8)
    del large
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(best_of):
        for name, run in runs.items():
            before = clock()
            run()
            best[name] = min(best[name], clock() - before)
    return best


def loop_over_time(u, delta, A, B, C):
    """The reference recurrence, written for float32 and without keeping the states."""
    h = np.zeros((u.shape[0], *A.shape), dtype=u.dtype)
    output = np.empty_like(u)
    for t in range(u.shape[1]):
        h = np.exp(delta[:, t, :, None] * A) * h + (delta[:, t] * u[:, t])[..., None] * B[:, t, None]
        output[:, t] = (C[:, t, None] * h).sum(axis=-1)
    return output


@pytest.mark.backend("numpy")
def test_f078_not_slower_than_a_plain_loop_over_time():
    """Some 0.83 of the loop on an idle machine; the margin is for one that is not."""
    drawn = M(78, 128, 320, 128, 64)
    inputs = {name: x.astype(np.float32) for name, x in drawn.inputs().items()}
    seconds = processor_times(
        {
            "loop": lambda: loop_over_time(**inputs),
            "ours": lambda: scanfield.selective_scan(**inputs, method="generic"),
        },
        best_of=3,
        clock=arithmetic,
    )
    assert seconds["ours"] <= 1.4 * seconds["loop"], seconds


@pytest.mark.backend("numpy")
def test_f078_the_compiled_scan_is_five_times_as_fast():
    """Some 20 times on an idle machine, the time of all threads counted; at a quarter of the row's length."""
    pytest.importorskip("numba")
    drawn = M(78, 128, 80, 128, 64)
    inputs = {name: x.astype(np.float32) for name, x in drawn.inputs().items()}
    compiled = scanfield.selective_scan(**inputs, method=COMPILED)  # and compiled it is now
    assert np.abs(compiled.output - loop_over_time(**inputs)).max() <= 1e-5 * np.abs(compiled.output).max()
    seconds = processor_times(
        {
            "loop": lambda: loop_over_time(**inputs),
            "compiled": lambda: scanfield.selective_scan(**inputs, method=COMPILED),
        },
        best_of=3,
        clock=arithmetic,
    )
    assert 5 * seconds["compiled"] <= seconds["loop"], seconds


@pytest.mark.backend("numpy")
@EITHER
def test_f078_no_array_of_one_state_a_token(method):
    """At a quarter of the row's length, so that tracing stays quick: such an array would be 336 MB."""
    drawn = M(78, 128, 80, 128, 64)
    inputs = {name: x.astype(np.float32) for name, x in drawn.inputs().items()}
    before_tracing(scanfield.selective_scan, inputs, method)
    tracemalloc.start()
    try:
        scanfield.selective_scan(**inputs, method=method)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 128 * 80 * 128 * 64 * 4 / 4, f"{peak / 1e6:.0f} MB"


@pytest.mark.backend("numpy", "torch")
@EITHER
def test_f079_the_backward_is_linear_in_the_length(library, method):
    if library.name == "readonly":
        pytest.skip("the clock sees no difference between read-only and writable arrays")
    runs = {}
    for length in (512, 1024):
        drawn = M(79, 1, length, 512, 16)
        given = library.arrays(drawn.inputs(), "float32")
        d_output, d_state = library.array(drawn.d_output, "float32"), library.array(drawn.d_state, "float32")

        def pulled(given=given, d_output=d_output, d_state=d_state):
            scanfield.vjp(scanfield.selective_scan, **given, method=method)[1](d_output, d_state)

        runs["forward", length] = lambda given=given: scanfield.selective_scan(**given, method=method)
        runs["both", length] = pulled
    seconds = processor_times(runs, best_of=9)
    assert seconds["both", 1024] / seconds["both", 512] < 2.6, seconds
    for length in (512, 1024):
        assert seconds["both", length] - seconds["forward", length] < 6 * seconds["forward", length], seconds


LONG = {"batch": 1, "time": 4096, "heads": 4, "key": 64, "value": 64}


@pytest.mark.backend("numpy")
@EITHER
def test_f080_training_keeps_no_state_a_token(library, method):
    drawn = G(80, *LONG.values())
    given = library.arrays(drawn.inputs(), "float32")
    d_output, d_state = library.array(drawn.d_output, "float32"), library.array(drawn.d_state, "float32")
    before_tracing(scanfield.gdn2, given, method)
    tracemalloc.start()
    try:
        result, pullback = scanfield.vjp(scanfield.gdn2, **given, method=method)
        gradients = pullback(d_output, d_state)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    returned = sum(x.nbytes for x in (*result, *gradients.values()))
    assert peak >= returned, "not all memory was seen"
    assert peak - returned < 60e6, f"{(peak - returned) / 1e6:.0f} MB"


HIGH_WATER = """
    import sys
    import arrays
    import scanfield
    from draws import G

    library = arrays.library("torch")

    def run(time):
        drawn = G(80, 1, time, 4, 64, 64)
        given = library.arrays(drawn.inputs(), "float32")
        cotangents = library.array(drawn.d_output, "float32"), library.array(drawn.d_state, "float32")
        del drawn
        with open("/proc/self/clear_refs", "w") as marks:
            marks.write("5")  # the high-water mark starts again from what is resident now
        before = high_water()
        result, pullback = scanfield.vjp(scanfield.gdn2, **given)
        gradients = pullback(*cotangents)
        peak = high_water()
        returned = sum(x.numel() * x.element_size() for x in (*result, *gradients.values()))
        return peak - before - returned

    def high_water():
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

    run(128)
    print(run(4096))
"""


@pytest.mark.backend("torch")
def test_f080_training_keeps_no_state_a_token_on_torch():
    peak = int(python(HIGH_WATER, path=HERE))
    assert peak < 60e6, f"{peak / 1e6:.0f} MB"
