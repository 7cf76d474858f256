"""Empty axes, gradients beside what is not finite, growth, interrupts, the end of a process, a damaged cache."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest
from processes import python

import scanfield

pytest.importorskip("numba")

pytestmark = pytest.mark.backend("numpy")

METHOD = "numpy.numba"


def gradients(op: str, *arrays: np.ndarray, method: str = METHOD) -> dict[str, np.ndarray]:
    result, pull = scanfield.vjp(getattr(scanfield, op), *arrays, method=method)
    return pull(np.ones_like(result.output), np.ones_like(result.final_state))


@pytest.mark.parametrize("empty", ["a", "b"])
def test_no_rows_by_broadcasting_have_a_gradient_of_zero(empty: str):
    shapes = {"a": (1, 64, 300), "b": (1, 64, 300)} | {empty: (0, 64, 300)}
    for array, shape in zip(
        gradients("linear_scan", *map(np.ones, shapes.values())).values(), shapes.values(), strict=True
    ):
        assert array.shape == shape
        assert not array.any()


@pytest.mark.parametrize("shape", [(1, 64, 0), (2, 64, 3, 0), (0, 64, 0)])
def test_no_lanes(shape: tuple[int, ...]):
    a = np.ones(shape)
    assert {array.shape for array in gradients("linear_scan", a, a).values()} == {shape}


def _empty(op: str, axis: str, kind: str) -> dict[str, np.ndarray]:
    """Inputs of an operation with an axis of no size; D, a gate and a state among them."""
    size = {"batch": 2, "time": 3, "channels": 3, "states": 2, "heads": 2, "key": 3, "value": 4} | {axis: 0}
    B, T, C, N, H, K, V = size.values()
    real = "float32" if kind == "complex64" else kind
    if op == "linear_scan":
        given = {name: np.ones((B, T, C), kind) for name in "ab"}
        return given | {"initial_state": np.full((B, C), 2, kind)}
    if op == "selective_scan":
        given = {name: np.ones((B, T, C), real) for name in ("u", "delta", "z")}
        given |= {
            "A": np.ones((C, N), kind),
            "D": np.ones(C, real),
            "initial_state": np.ones((B, C, N), kind),
        }
        return given | {name: np.ones((B, T, N), kind) for name in "BC"}
    given = {name: np.ones((B, T, H, K), kind) for name in ("query", "key", "log_decay", "erase")}
    return given | {"value": np.ones((B, T, H, V), kind), "initial_state": np.ones((B, H, K, V), kind)}


@pytest.mark.parametrize(
    ("op", "kind", "axis"),
    [
        *(
            (op, kind, axis)
            for op in ("linear_scan", "selective_scan")
            for kind in ("float32", "complex64")
            for axis in ("batch", "time", "channels")
        ),
        *(("gdn2", "float32", axis) for axis in ("batch", "time", "heads", "key", "value")),
    ],
)
def test_an_axis_of_no_size_in_every_verb(op: str, kind: str, axis: str):
    """What the generic form answers, number by number and shape by shape."""
    given, function = _empty(op, axis, kind), getattr(scanfield, op)
    state = given["initial_state"]
    found = {}
    for method in (METHOD, "generic.recurrent"):
        result, pullback = scanfield.vjp(function, **given, method=method)
        block = scanfield.summarise(
            function, **{n: x for n, x in given.items() if n != "initial_state"}, method=method
        )
        found[method] = [*result, *pullback(result.output, result.final_state).values(), *block[:2]]
        if axis != "time":
            steady = ("A", "D", "initial_state")
            token = {n: x if n in steady else x[:, 0] for n, x in given.items() if n != "initial_state"}
            found[method] += function.step(state, **token, method=method)
    for x, y in zip(*found.values(), strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            assert x.dtype == y.dtype and x.shape == y.shape
            np.testing.assert_allclose(x, y, rtol=1e-6)


def test_no_state_leaves_the_skip_connection():
    u, none, D = np.full((2, 5, 3), 2.0), np.zeros((3, 0)), np.full(3, 0.5)
    result = scanfield.selective_scan(u, u, none, none, none, D, method=METHOD)
    assert np.array_equal(result.output, u / 2)
    assert (gradients("selective_scan", u, u, none, none, none, D)["u"] == 0.5).all()


def test_a_bad_last_token_spares_the_gradients_before_it():
    query = np.ones((1, 6, 1, 2))
    key = query.copy()
    key[0, 5, 0, 1] = np.nan
    found = gradients("linear_attention", query, key, query)
    want = gradients("linear_attention", query, key, query, method="generic.recurrent")
    for name, array in found.items():
        np.testing.assert_allclose(array, want[name], rtol=1e-14, err_msg=name)
    assert np.isfinite(found["value"][0, :5]).all()


def test_gradients_under_growth_whose_products_overflow():
    query = np.ones((1, 8, 1, 1), np.float32)
    log_decay = np.tile(np.array([-45, 45], np.float32), 4).reshape(1, 8, 1, 1)
    found = gradients("gla", query, query, query, log_decay)
    want = gradients("gla", query, query, query, log_decay, method="generic.recurrent")
    for name, array in found.items():
        np.testing.assert_allclose(array, want[name], rtol=1e-5, err_msg=name)
    u, A = np.ones((1, 2, 1), np.float32), np.full((1, 1), 60, np.float32)
    assert np.isfinite(gradients("selective_scan", u, u * np.float32(0.9), A, u, u)["A"]).all()


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no timers that interrupt")
def test_nothing_of_an_interrupted_call_runs_on():
    """Its workers hold what they read and write; the call ends with the last of them."""
    python(
        """
        import signal, threading, time
        import numpy as np, scanfield
        scanfield.set_num_threads(2)
        a, b = np.full((16, 1000, 300), 0.5, "f4"), np.full((16, 10000, 300), 0.5, "f4")
        scanfield.linear_scan(a, a)
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        for wait in (0.002, 0.01, 0.03):
            busy = threading.Thread(target=lambda: scanfield.linear_scan(b, b))  # keeps the worker from the next call
            busy.start()
            time.sleep(0.005)
            signal.setitimer(signal.ITIMER_REAL, wait)
            try:
                scanfield.linear_scan(a, a)
                time.sleep(2 * wait)
            except KeyboardInterrupt:
                pass
            junk = [np.full(size, 7, np.int64) for size in range(1, 100) for _ in range(20)]
            busy.join()
            time.sleep(0.05)
            assert all((x == 7).all() for x in junk)
            assert scanfield.linear_scan(a, a).output[0, -1, 0] == 1
        """
    )


def test_calls_after_the_main_thread_has_ended():
    said = python(
        """
        import threading, time
        import numpy as np, scanfield
        scanfield.set_num_threads(4)
        a = np.full((8, 300, 800), 0.5, "f4")
        scanfield.linear_scan(a, a)
        def late():
            time.sleep(0.3)
            print(scanfield.linear_scan(a, a).output[0, -1, 0], flush=True)
            print(scanfield.linear_scan(a.astype("f8"), a.astype("f8")).output[0, -1, 0], flush=True)  # compiles
        threading.Thread(target=late).start()
        """
    )
    assert said.split() == ["1.0", "1.0"]


SCAN = """
import warnings
import numpy as np, scanfield
warnings.simplefilter("always")
a = np.full((1, 3, 2), 0.5, np.float32)
with warnings.catch_warnings(record=True) as said:
    assert scanfield.linear_scan(a, np.ones_like(a), method="numpy.numba").output[0, 2, 0] == 1.75
print(any("SCANFIELD_CACHE_DIR" in str(warning.message) for warning in said))
"""


@pytest.mark.parametrize("kind", ["nbi", "nbc"])
def test_a_damaged_cache_is_made_anew(tmp_path: Path, kind: str):
    def run() -> str:
        return python(SCAN, SCANFIELD_CACHE_DIR=str(tmp_path)).strip()

    assert run() == "False"
    damaged = list(tmp_path.rglob(f"*.{kind}"))
    assert damaged
    for path in damaged:
        path.write_bytes(b"garbage")
    assert run() == "True"
    assert run() == "False"


def test_a_cache_that_is_a_file(tmp_path: Path):
    (tmp_path / "file").write_text("here")
    assert python(SCAN, SCANFIELD_CACHE_DIR=str(tmp_path / "file")).strip() == "True"
