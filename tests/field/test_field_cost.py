"""Field reports F078 to F080: cost, as ratios of processor time and as counted bytes, never as a wall time.

The half of F078 about compiled candidates joins with the numba kernels.
"""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from draws import G, M
from processes import python

import scanfield

HERE = (Path(__file__).resolve().parent,)


def processor_time(run, *, best_of, times=1):
    """Seconds of this process's processor time for `times` runs in a row, the best of some tries."""
    best = float("inf")
    for _ in range(best_of):
        before = time.process_time()
        for _ in range(times):
            run()
        best = min(best, time.process_time() - before)
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
    drawn = M(78, 128, 320, 128, 64)
    inputs = {name: x.astype(np.float32) for name, x in drawn.inputs().items()}
    loop = processor_time(lambda: loop_over_time(**inputs), best_of=2)
    ours = processor_time(lambda: scanfield.selective_scan(**inputs), best_of=2)
    assert ours <= 1.1 * loop, f"{ours:.2f} s against {loop:.2f} s"


@pytest.mark.backend("numpy")
def test_f078_no_array_of_one_state_a_token():
    """At a quarter of the row's length, so that tracing stays quick: such an array would be 336 MB."""
    drawn = M(78, 128, 80, 128, 64)
    inputs = {name: x.astype(np.float32) for name, x in drawn.inputs().items()}
    tracemalloc.start()
    try:
        scanfield.selective_scan(**inputs)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 128 * 80 * 128 * 64 * 4 / 4, f"{peak / 1e6:.0f} MB"


@pytest.mark.backend("numpy", "torch")
def test_f079_the_backward_is_linear_in_the_length(library):
    if library.name == "readonly":
        pytest.skip("the clock sees no difference between read-only and writable arrays")
    forward, backward = {}, {}
    for length in (512, 1024):
        drawn = M(79, 1, length, 512, 16)
        given = library.arrays(drawn.inputs(), "float32")
        d_output, d_state = library.array(drawn.d_output, "float32"), library.array(drawn.d_state, "float32")

        def pulled(given=given, d_output=d_output, d_state=d_state):
            scanfield.vjp(scanfield.selective_scan, **given)[1](d_output, d_state)

        # One run takes a few milliseconds, near the resolution of the clock.
        many = {"best_of": 3, "times": 4}
        forward[length] = processor_time(lambda given=given: scanfield.selective_scan(**given), **many)
        backward[length] = processor_time(pulled, **many) - forward[length]
    assert (forward[1024] + backward[1024]) / (forward[512] + backward[512]) < 2.6
    for length in (512, 1024):
        assert backward[length] < 6 * forward[length]


LONG = {"batch": 1, "time": 4096, "heads": 4, "key": 64, "value": 64}


@pytest.mark.backend("numpy")
def test_f080_training_keeps_no_state_a_token(library):
    drawn = G(80, *LONG.values())
    given = library.arrays(drawn.inputs(), "float32")
    d_output, d_state = library.array(drawn.d_output, "float32"), library.array(drawn.d_state, "float32")
    tracemalloc.start()
    try:
        result, pullback = scanfield.vjp(scanfield.gdn2, **given)
        gradients = pullback(d_output, d_state)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    returned = sum(x.nbytes for x in (*result, *gradients.values()))
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
