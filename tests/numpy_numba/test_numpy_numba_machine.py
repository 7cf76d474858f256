"""Threads, forks, vector widths, compiled signatures and the cache of the compiled scans; the vectors' own functions."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from processes import python

import scanfield

pytest.importorskip("numba")

pytestmark = pytest.mark.backend("numpy")

METHOD = "numpy.numba"


def calls() -> dict[str, dict[str, np.ndarray]]:
    """Work enough for several threads."""
    rng = np.random.default_rng(0)
    time = 256

    def draw(*shape: int) -> np.ndarray:
        return rng.random(shape, dtype=np.float32)

    return {
        "linear_scan": {"a": draw(3, time, 2100), "b": draw(1, time, 2100)},
        "selective_scan": {
            "u": draw(2, time, 200),
            "delta": draw(2, time, 200),
            "A": -draw(200, 5),
            "B": draw(2, time, 5),
            "C": draw(2, time, 5),
        },
        "gdn2": {
            "query": draw(1, time, 3, 40),
            "key": draw(1, time, 3, 40) / 40,
            "value": draw(1, time, 6, 70),
            "log_decay": -draw(1, time, 6, 40),
            "erase": draw(1, time, 6),
        },
    }


def everything(op: str) -> list[np.ndarray]:
    result, pull = scanfield.vjp(getattr(scanfield, op), **calls()[op], method=METHOD)
    return [*result, *pull(np.ones_like(result.output), np.ones_like(result.final_state)).values()]


@pytest.mark.parametrize("op", ["linear_scan", "selective_scan", "gdn2"])
def test_the_same_bits_for_every_number_of_threads(op: str):
    try:
        scanfield.set_num_threads(1)
        want = everything(op)
        for count in (2, 3, 5):
            scanfield.set_num_threads(count)
            for x, y in zip(everything(op), want, strict=True):
                assert x.tobytes() == y.tobytes()
    finally:
        scanfield.set_num_threads(None)


@pytest.mark.parametrize("shape", [(1, 256, 2100), (1, 256, 1), (1, 1, 2100), (1, 1, 1)])
def test_one_sequence_cut_into_blocks_of_lanes(shape: tuple[int, ...]):
    """Of the coefficient's shape depends whether its gradient is a sum, whose parts must not follow the threads."""
    rng = np.random.default_rng(0)
    a, b = rng.random(shape, dtype=np.float32), rng.random((1, 256, 2100), dtype=np.float32)
    found = []
    try:
        for count in (1, 2, 7):
            scanfield.set_num_threads(count)
            result, pull = scanfield.vjp(scanfield.linear_scan, a, b, method=METHOD)
            found.append([*result, *pull(b[:, ::-1]).values()])
    finally:
        scanfield.set_num_threads(None)
    for other in found[1:]:
        assert [x.tobytes() for x in other] == [x.tobytes() for x in found[0]]


def test_callers_in_several_threads():
    want = everything("gdn2")
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: everything("gdn2"), range(8)):
            assert all(np.array_equal(x, y) for x, y in zip(found, want, strict=True))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_child_has_threads_of_its_own():
    python(
        """
        import os, warnings
        import numpy, scanfield
        from scanfield_numpy import memory, threads
        scanfield.set_num_threads(3)
        a = numpy.full((4, 512, 1100), 0.5, numpy.float32)
        want = scanfield.linear_scan(a, a, method="numpy.numba").output
        assert threads._pool is not None
        # One token, a kind that goes straight to its kernel, to memory that results take in turns.
        x = numpy.full((1, 300_000), 0.5, numpy.float32)
        tokens = [scanfield.linear_scan.step(x, x, x) for _ in range(6)]
        assert memory.pool.kept() > 0
        del tokens[1:]
        def token():
            found = [scanfield.linear_scan.step(x, x, x) for _ in range(2)]
            return all(numpy.array_equal(y, z) for token in found for y, z in zip(token, tokens[0]))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # newer Pythons warn that a process with threads forks
            child = os.fork()
        if child == 0:
            same = numpy.array_equal(scanfield.linear_scan(a, a, method="numpy.numba").output, want)
            os._exit(0 if same and token() else 3)
        assert token() and os.waitpid(child, 0)[1] == 0
        assert numpy.array_equal(scanfield.linear_scan(a, a, method="numpy.numba").output, want)
        """
    )


WIDTHS = """
import numpy as np
from golden_adapter import scan_cases
import scanfield
from scanfield_numpy import vector
assert vector.REGISTER_BYTES == {width}, vector.REGISTER_BYTES
for call in scan_cases():
    if any(x.dtype.kind == "c" for x in call.inputs.values()):
        continue
    given = {{n: x.astype("float32") for n, x in call.inputs.items()}}
    result, pull = scanfield.vjp(getattr(scanfield, call.case.op), **given, **call.options, method="numpy.numba")
    cotangents = [call.case.cotangents[n].astype("float32") for n in ("output", "final_state")]
    found = {{"expected/output": result.output, "expected/final_state": result.final_state}}
    found |= {{f"gradient/{{n}}": x for n, x in pull(*cotangents).items()}}
    for key, x in found.items():
        assert call.case.error(key, x, "float32") <= 1, (call.case.name, key)
"""


def test_what_first_calls_rely_on_is_in_this_numba():
    """A numba without it would be taken as it is, and first calls take a third longer, which no other test would say."""
    from scanfield_numpy import lean, parts

    assert lean.LOWERING.__module__ == lean.__name__
    assert parts.pipeline()["pipeline_class"].__module__ == parts.__name__


def test_an_interrupt_while_an_interrupted_call_is_given_up(monkeypatch):
    """Whoever holds the arrays waits for the kernels that write them, however often the user is impatient."""
    from scanfield_numpy import threads

    interrupts, told = [KeyboardInterrupt, KeyboardInterrupt, None], []

    class Task:
        def cancel(self) -> None:
            told.append("cancel")

    def wait(waiting: list[Task]) -> None:
        told.append("wait")
        raised = interrupts[told.count("wait") - 1]
        if raised is not None:
            raise raised

    monkeypatch.setattr(threads, "wait", wait)
    threads._abandon([Task(), Task()])
    assert told == ["cancel", "cancel", "wait"] * 3


def test_no_tasks_compile_nothing():
    from scanfield_numpy import threads

    def kernel(dtype: str, size: int) -> None:
        raise AssertionError("compiled")

    threads.run(kernel, "float32", 0, 1e9, 4, (), ())


@pytest.mark.parametrize(
    ("features", "name", "asked", "width"),
    [
        ("+avx, -avx512f,+fma", None, "", 32),
        ("+avx,+avx512f", None, "", 64),
        ("-avx", "generic", "", 16),
        (None, "nocona", "", 16),  # a processor by its name alone: nobody says what it has
        ("+avx", None, "64", 64),
    ],
)
def test_the_width_of_another_processor(monkeypatch, features, name, asked, width):
    """numba may be told to compile for another machine than this one; then this one's registers do not count."""
    from scanfield_numpy import vector

    monkeypatch.setattr(vector.config, "CPU_FEATURES", features)
    monkeypatch.setattr(vector.config, "CPU_NAME", name)
    monkeypatch.setenv("SCANFIELD_VECTOR_BYTES", asked)
    assert vector._register_bytes() == width


def test_a_width_that_no_register_has(monkeypatch):
    from scanfield_numpy import vector

    monkeypatch.setenv("SCANFIELD_VECTOR_BYTES", "24")
    with pytest.raises(ValueError, match="SCANFIELD_VECTOR_BYTES: '24'; allowed are 16, 32 and 64"):
        vector._register_bytes()


@pytest.mark.parametrize("width", [16, 32, 64])
def test_golden_cases_at_forced_vector_widths(width: int):
    """4, 8 and 16 numbers of float32."""
    python(WIDTHS.format(width=width), SCANFIELD_VECTOR_BYTES=str(width))


def test_golden_cases_where_numba_uses_no_avx():
    """By its own choice on some processors; the vectors are then as wide as the registers that are left."""
    from scanfield_numpy import vector

    wide = 16 if vector.platform.machine() in ("x86_64", "AMD64") else vector.REGISTER_BYTES
    python(WIDTHS.format(width=wide), NUMBA_ENABLE_AVX="0")


def test_where_numba_compiles_nothing_the_generic_code_runs():
    said = python(
        """
        from importlib.util import find_spec
        import numpy as np, scanfield
        a = np.full((1, 3, 2), 0.5)
        for _ in range(5):
            assert scanfield.linear_scan(a, 2 * a).output[0, 2, 0] == 1.75
        for backend in scanfield.backends():
            assert backend.status != "broken"
        try:
            scanfield.linear_scan(a, a, method="numpy.numba")
        except scanfield.BackendError as error:
            print(error)
        if find_spec("torch"):
            import torch
            scanfield.linear_scan(torch.from_numpy(a), torch.from_numpy(a))  # a warning is an error here
        """,
        NUMBA_DISABLE_JIT="1",
    )
    assert "NUMBA_DISABLE_JIT" in said


def test_a_numba_that_is_switched_off_later():
    said = python(
        """
        import numba, numpy as np, scanfield, scanfield.pinn
        a = np.full((1, 3, 2), 0.5)
        scanfield.linear_scan(a, 2 * a)
        numba.config.DISABLE_JIT = True
        result, pullback = scanfield.vjp(scanfield.linear_scan, a, 2 * a)
        assert result.output[0, 2, 0] == 1.75 and pullback(a)["b"].shape == a.shape
        try:
            scanfield.linear_scan(a, a, method="numpy.numba")
        except scanfield.BackendError as error:
            print(error)
        numba.config.DISABLE_JIT = False
        scanfield.vjp(scanfield.linear_scan, a, 2 * a, method="numpy.numba")[1](a)
        """
    )
    assert "numba.config.DISABLE_JIT" in said


def test_threads_whose_kinds_come_again_at_the_same_time():
    """What tells kinds apart is made once, and lives as long as what asks it."""
    python(
        """
        import sys, threading
        import numpy as np, scanfield
        sys.setswitchinterval(1e-5)
        calls = [np.full((2, n, 3), 0.5, "float32") for n in (1, 40, 700)]
        want = [scanfield.linear_scan(a, a).output for a in calls]
        start, wrong = threading.Barrier(8), []

        def work(first):
            start.wait()
            for turn in range(300):
                i = (first + turn) % 3
                if not np.array_equal(scanfield.linear_scan(calls[i], calls[i]).output, want[i]):
                    wrong.append(i)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert not wrong
        """
    )


def test_a_first_call_while_numba_compiles():
    """What is called to type a user's function may call a scan, which has a kernel to compile: no lock waits for itself."""
    python(
        """
        import numpy as np, scanfield
        from numba import njit
        from numba.extending import overload

        def last(x):
            raise NotImplementedError

        @overload(last)
        def typed(x):
            a = np.full((1, 3, 2), 0.5)
            found = float(scanfield.linear_scan(a, 2 * a, method="numpy.numba").output[0, 2, 0])
            return lambda x: x + found

        @njit
        def user(x):
            return last(x)

        assert user(1.0) == 2.75
        """,
        SCANFIELD_CACHE_DIR="",
    )


def test_one_compiled_signature_for_each_dtype():
    """Options, absent arrays, read-only flags and strides compile nothing anew."""
    from scanfield_numpy import gated_delta_forward as kernels

    rng = np.random.default_rng(0)
    query = rng.random((1, 5, 2, 3))
    gate = -rng.random((1, 5, 2))
    scanfield.gdn2(query, query, query, method=METHOD)
    found = kernels.forward("float64")
    scanfield.gdn2(query, query, query, gate, -gate, method=METHOD)
    frozen = np.broadcast_to(query[:, :1], query.shape)
    scanfield.gdn2(frozen, query[..., ::-1], query, gate, reverse=True, cu_seqlens=[0, 2, 5], method=METHOD)
    assert kernels.forward("float64") is found
    assert len(found.signatures) == 1


CACHE = """
import sys, warnings
import numpy as np, scanfield
from processes import read_only_but
if len(sys.argv) > 1:
    read_only_but(sys.argv[1])
    warnings.filterwarnings("default", "SCANFIELD_CACHE_DIR")  # one line that says why the next process is slow again
from scanfield_numpy import linear_kernels as kernels
a = np.full((1, 3, 2), 0.5, np.float32)
assert scanfield.linear_scan(a, np.ones_like(a), method="numpy.numba").output[0, 2, 0] == 1.75
print(sum(kernels.forward("float32").stats.cache_hits.values()))
"""


def test_the_cache_on_disk(tmp_path):
    """Several processes fill it at once, and the next one compiles nothing."""
    with ThreadPoolExecutor(3) as pool:
        said = list(pool.map(lambda _: python(CACHE, SCANFIELD_CACHE_DIR=str(tmp_path)), range(3)))
    assert all(hits.strip() in "01" for hits in said) and "0\n" in said
    assert any(tmp_path.rglob("*.nbi"))
    assert python(CACHE, SCANFIELD_CACHE_DIR=str(tmp_path)).split() == ["1"]


@pytest.mark.parametrize("filled", [False, True])
def test_a_cache_that_cannot_be_written(tmp_path, filled: bool):
    """One that was filled before is read; one that is empty costs a slower first call."""
    cache, writable = tmp_path / "cache", tmp_path / "writable"
    writable.mkdir()
    if filled:
        python(CACHE, SCANFIELD_CACHE_DIR=str(cache))
    assert python(CACHE, writable, SCANFIELD_CACHE_DIR=str(cache)).split() == [str(int(filled))]
    assert not any(writable.rglob("*.nbi"))


def test_a_changed_module_of_vectors_is_compiled_anew(tmp_path):
    """The cache outlives an upgrade; kernels in it must not."""
    package = tmp_path / "installed" / "scanfield_numpy"
    ours = Path(find_spec("scanfield_numpy").origin).parent
    shutil.copytree(ours, package, ignore=shutil.ignore_patterns("__pycache__"))
    cache = str(tmp_path / "cache")
    python(CACHE, path=(package.parent,), SCANFIELD_CACHE_DIR=cache)
    with (package / "vector.py").open("a") as source:
        source.write("\n# changed\n")
    assert python(CACHE, path=(package.parent,), SCANFIELD_CACHE_DIR=cache).split() == ["0"]


NOTHING = """
import numpy as np, scanfield
from numba.core import event
x, heads = np.full((1, 4, 2), 0.5, np.float32), np.full((1, 4, 1, 2), 0.5, np.float32)
arrays = {"linear_scan": (x, x), "selective_scan": (x, x, x[0, :2], x, x), "gdn2": (heads,) * 6}
with event.install_recorder("numba:compile") as recorder:
    for name, given in arrays.items():
        result, pullback = scanfield.vjp(getattr(scanfield, name), *given, method="numpy.numba")
        pullback(result.output)
print(len(recorder.buffer))
"""


def test_a_second_process_compiles_nothing():
    """Forward and backward of every operation, from the cache that the tests share."""
    python(NOTHING)
    assert python(NOTHING).split() == ["0"]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_elementary_functions(dtype: str):
    """Within 3 units in the last place of the exact value, at all ends of the range; NaN and infinities as they are."""
    from numba import njit

    from scanfield_numpy.elementary import exp, exp2, sigmoid, softplus
    from scanfield_numpy.vector import ONE, TWO, lane_count, load, numbers, store

    @njit(error_model="numpy")
    def fill(x, to_exp, to_softplus, to_sigmoid, to_power, to_wide, count, width, kind):
        for i in range(0, count, width):
            value = load(numbers(x, kind), i, ONE)
            store(numbers(to_exp, kind), i, exp(value))
            store(numbers(to_softplus, kind), i, softplus(value))
            store(numbers(to_sigmoid, kind), i, sigmoid(value))
            store(numbers(to_power, kind), i, exp2(value))
        for i in range(0, count, 2 * width):
            store(numbers(to_wide, kind), i, exp2(load(numbers(x, kind), i, TWO)))

    edge = 152.0 if dtype == "float32" else 1080.0
    special = [
        np.nan,
        -np.inf,
        np.inf,
        0.0,
        -0.0,
        1e-30,
        -87.5,
        -100.1,
        88.7,
        88.8,
        709.7,
        -744.9,
        -1e30,
        1e30,
    ]
    x = np.concatenate([np.linspace(-edge, edge, 9999), special, np.zeros(32 - (9999 + 14) % 32)]).astype(
        dtype
    )
    found = [np.empty_like(x) for _ in range(5)]
    width = lane_count(x.itemsize)
    fill(x.ctypes.data, *(y.ctypes.data for y in found), x.size, width, x.dtype.type(0))
    wide = x.astype(np.longdouble)
    with np.errstate(all="ignore"):
        exact = (
            np.exp(wide),
            np.maximum(wide, 0) + np.log1p(np.exp(-np.abs(wide))),
            np.where(wide < 0, np.exp(np.minimum(wide, 0)), 1) / (1 + np.exp(-np.abs(wide))),
            np.exp2(wide),
            np.exp2(wide),
        )
        for got, want in zip(found, exact, strict=True):
            rounded = want.astype(dtype)
            finite = np.isfinite(rounded)
            assert np.array_equal(got[~finite], rounded[~finite], equal_nan=True)
            error = np.abs(got[finite] - want[finite]) / np.spacing(np.abs(rounded[finite]))
            assert error.max() <= 3
