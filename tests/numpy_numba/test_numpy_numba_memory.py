"""Memory of large results: given back when nothing reads it, taken again, never shared by two results."""

from __future__ import annotations

import functools
import gc
import os
import pickle
import signal
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from processes import python

import scanfield

pytest.importorskip("numba")

from scanfield_numpy import memory

pytestmark = pytest.mark.backend("numpy")

LARGE = (3, memory.SMALLEST // 4)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A pool of its own, which holds four arrays of this size."""
    own = memory._Pool(4 * (LARGE[0] * memory.SMALLEST + 64))
    monkeypatch.setattr(memory, "pool", own)
    return own


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def test_an_array_like_any_other(pool: Any):
    for dtype in (np.float32, "float64", np.complex64, np.int64):
        x = memory.fresh(LARGE, dtype)
        assert type(x) is np.ndarray and x.shape == LARGE and x.dtype == dtype
        assert x.flags.c_contiguous and x.flags.aligned and x.flags.writeable
        assert address(x) % 64 == 0
        x[...] = 7
        assert np.array_equal(pickle.loads(pickle.dumps(x)), x)
    assert np.array_equal(memory.cleared(LARGE, "float32"), np.zeros(LARGE))
    assert np.array_equal(memory.cleared(LARGE, "float32"), np.zeros(LARGE)), (
        "a block that was written before"
    )
    assert memory.fresh((0, 5), "float32").shape == (0, 5)
    assert memory.fresh(7, "float32").flags.owndata, "a small array is numpy's own"


def test_memory_comes_back(pool: Any):
    x = memory.fresh(LARGE, "float32")
    where = address(x)
    del x
    assert pool.held
    y = memory.fresh((LARGE[1], LARGE[0]), "float32")
    assert address(y) == where and not pool.held
    del y
    assert address(memory.fresh((LARGE[0] * LARGE[1] - 9,), "float32")) == where, "a little smaller"
    assert address(memory.fresh((LARGE[0] * LARGE[1] // 2,), "float32")) != where, "too small for the block"


def exports() -> dict[str, Any]:
    return {
        "view": lambda x: x[1:, ::2],
        "reshaped": lambda x: x.reshape(-1).view(np.int32)[5:6],
        "memoryview": memoryview,
        "dlpack": np.from_dlpack,
        "capsule": lambda x: x.__dlpack__(),
        "buffer": lambda x: np.frombuffer(x, np.uint8),
        "iterator": lambda x: x.flat,
    }


@pytest.mark.parametrize("name", list(exports()))
def test_whatever_reads_an_array_keeps_its_memory(pool: Any, name: str):
    x = memory.fresh(LARGE, "float32")
    where = address(x)
    kept = exports()[name](x)
    del x
    gc.collect()
    assert not pool.held
    assert address(memory.fresh(LARGE, "float32")) != where
    before = pool.held
    del kept
    gc.collect()
    assert pool.held > before


def test_no_more_is_held_than_the_limit(pool: Any):
    arrays = [memory.fresh(LARGE, "float32") for _ in range(7)]
    assert len({address(x) for x in arrays}) == 7
    last = {address(x) for x in arrays[3:]}
    while arrays:
        del arrays[0]
        assert pool.held <= pool.limit
    assert pool.held > pool.limit // 2
    assert {address(x) for x in [memory.fresh(LARGE, "float32") for _ in range(4)]} == last
    huge = memory.fresh((pool.limit + 1,), "uint8")
    del huge
    assert pool.held <= pool.limit


def test_a_pool_in_use_is_left_alone(pool: Any):
    """A destructor that runs while the pool is in use by the same thread neither waits nor fails."""
    x = memory.fresh(LARGE, "float32")
    with pool._lock:
        del x
        assert memory.fresh(LARGE, "float32").shape == LARGE
    assert not pool.held


INTERRUPTED = """
import signal, sys, time
from threading import Thread
import numpy as np
from scanfield_numpy import memory

armed = False

def interrupt(*_):
    global armed
    if armed:
        armed = False
        raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)
sys.unraisablehook = lambda _: None  # interrupts within destructors
make = memory.taking_turns((memory.SMALLEST,), np.dtype("float32"))
signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
for _ in range(3000):
    try:
        armed = True
        for _ in range(20):
            one, two = make(), memory.fresh((memory.SMALLEST,), "float32")
            del one, two
    except KeyboardInterrupt:
        pass
    armed = False
signal.setitimer(signal.ITIMER_REAL, 0)
free = []

def other():
    free.append(memory.pool._lock.acquire(blocking=False))
    memory.pool._lock.release()

thread = Thread(target=other)
thread.start()
thread.join()
assert free == [True]
assert memory.pool.held + memory.pool.kept() <= memory.pool.limit
"""


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no interval timer")
def test_an_interrupted_pool_stays_in_use():
    python(INTERRUPTED)


def test_threads_never_share_a_block(pool: Any):
    def many(mark: int) -> bool:
        right = True
        for i in range(60):
            x, y = memory.fresh(LARGE, "float32"), memory.fresh(LARGE, "float32")
            x[:, ::1024], y[:, ::1024] = mark, -mark - i
            right &= bool((x[:, ::1024] == mark).all() and (y[:, ::1024] == -mark - i).all())
        return right

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(many, range(1, 9)))
    assert 0 < pool.held <= pool.limit


def test_taking_turns(pool: Any):
    """An array comes again once nothing at all refers to it, and never before."""
    make = memory.taking_turns(LARGE, np.dtype("float32"))
    for name, export in exports().items():
        first = make()
        assert type(first) is np.ndarray and first.shape == LARGE and first.flags.writeable
        where = address(first)
        assert where % 64 == 0
        kept = export(first)
        del first
        others = [make() for _ in range(3)]
        assert len({where, *map(address, others)}) == 4, name
        del kept, others
    assert [address(make()) for _ in range(4)] == 2 * [address(make()) for _ in range(2)]
    assert pool.held + pool.kept() <= pool.limit
    other = memory.taking_turns((LARGE[1] // 2, LARGE[0]), np.dtype("float64"))
    kept = [other() for _ in range(8)]
    assert pool.kept() <= pool.limit // 2
    assert len(set(map(address, kept))) == 8
    # Any thread's own, and with no memory to keep a new one each time.
    with ThreadPoolExecutor(4) as threads:

        def own(mark: int) -> bool:
            right = True
            for _ in range(200):
                x = make()
                x[:, ::4096] = mark
                right &= bool((x[:, ::4096] == mark).all())
            return right

        assert all(threads.map(own, range(4)))
    pool.limit = 0
    pool.clear()
    assert len({address(x) for x in [make(), make()]}) == 2 and not pool.kept()


@pytest.mark.parametrize(
    "change",
    [
        lambda base: setattr(
            base.flags, "writeable", False
        ),  # what freezes an array and all that it is a view of
        lambda base: setattr(base, "shape", (-1,)),
        lambda base: base.__setstate__((1, (3,), np.dtype("int16"), False, bytes(6))),
    ],
    ids=["frozen", "reshaped", "replaced"],
)
@pytest.mark.filterwarnings(
    "ignore:Setting the shape:DeprecationWarning"
)  # by NumPy 2.5; it may still be done
def test_what_was_changed_takes_no_more_turns(pool: Any, change: Any):
    """Each result is as if it was the first, whatever became of the arrays before."""
    make = memory.taking_turns(LARGE, np.dtype("float32"))
    for _ in range(3):
        first = make()
        change(first.base)
        del first
        for _ in range(3):
            again = make()
            assert (
                again.shape == LARGE
                and again.dtype == np.float32
                and again.flags.num == np.empty(LARGE).flags.num - 4
            )


def test_who_holds_the_last_base_holds_the_memory(pool: Any):
    make = memory.taking_turns(LARGE, np.dtype("float32"))
    first = make()
    base = first.base.base
    del first
    assert not any(np.shares_memory(make(), np.asarray(base)) for _ in range(3))


def test_results_of_a_scan(pool: Any):
    a = np.full((2, 600, 1024), 0.5, np.float32)
    first = scanfield.linear_scan(a, a, method="numpy.numba").output
    second = scanfield.linear_scan(-a, a, method="numpy.numba").output
    assert not np.shares_memory(first, second)
    want, where = second.copy(), address(first)
    del first
    third = scanfield.linear_scan(a, -a, method="numpy.numba").output
    assert address(third) == where
    assert np.array_equal(second, want)
    assert not np.shares_memory(second, third)


FORK = """
import os, warnings
import numpy as np
from scanfield_numpy import memory
x = memory.fresh((memory.SMALLEST,), "float32")
kept = memory.fresh((memory.SMALLEST,), "float32")
kept[...] = 3
del x
assert memory.pool.held
child = os.fork()
if child == 0:
    y = memory.fresh((memory.SMALLEST,), "float32")
    y[...] = 5
    kept[...] = 4
    held = memory.pool.held
    del kept
    os._exit(0 if held == 0 and memory.pool.held > 0 else 3)
assert os.waitpid(child, 0)[1] == 0
assert (kept == 3).all()
at_exit = memory.fresh((memory.SMALLEST,), "float32")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_child_starts_with_an_empty_pool():
    python(FORK)


LIMIT = """
from scanfield_numpy import memory
x = memory.fresh((memory.SMALLEST,), "float32")
print(memory.pool.limit)
del x
print(memory.pool.held)
"""


def test_the_limit_is_set_by_the_environment():
    assert python(LIMIT, SCANFIELD_POOL_BYTES="0").split() == ["0", "0"]
    assert python(LIMIT).split() == [str(256 << 20), str((4 << 20) + 64)]
    for wrong in ("-1", "1GB"):  # a warning, which is an error here; the default holds where it is none
        caught = "try:\n    import scanfield_numpy.memory\nexcept UserWarning as error:\n    print(error)"
        assert f"SCANFIELD_POOL_BYTES: '{wrong}'" in python(caught, SCANFIELD_POOL_BYTES=wrong)
        quiet = "import warnings\nwarnings.simplefilter('ignore')\n" + LIMIT
        assert python(quiet, SCANFIELD_POOL_BYTES=wrong).split()[0] == str(256 << 20)


def peak(function: Any) -> int:
    """Bytes that a call holds at most beyond what was there before."""
    function()
    gc.collect()
    memory.pool.clear()
    tracemalloc.start()
    try:
        kept = function()
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert kept is not None
    return most


@pytest.mark.parametrize("lanes", [96, 3])
def test_strided_arrays_are_not_copied(lanes: int):
    rng = np.random.default_rng(0)
    time = 40_000 // lanes
    for a in (
        rng.random((time, 8, lanes)).transpose(1, 0, 2),
        rng.random((8, 2 * time, lanes))[:, ::2],
        rng.random((8, time, lanes))[:, ::-1],
        rng.random((8, time, 4 * lanes))[..., lanes : 2 * lanes],
        np.broadcast_to(rng.random((8, time, 1)), (8, time, lanes)),
    ):
        size = 8 * time * lanes * 8
        scan = functools.partial(scanfield.linear_scan, a, a, method="numpy.numba")
        assert np.array_equal(
            scan().output, scanfield.linear_scan(a.copy(), a.copy(), method="numpy.numba").output
        )
        assert peak(scan) < 1.2 * size
        _, pull = scanfield.vjp(scanfield.linear_scan, a, a, method="numpy.numba")
        cotangent = np.ones((time, 8, lanes)).transpose(1, 0, 2)
        found = pull(cotangent)
        for x, y in zip(found.values(), pull(cotangent.copy()).values(), strict=True):
            assert np.array_equal(x, y)
        assert peak(functools.partial(pull, cotangent)) < 2.3 * size


def test_parts_of_a_projection_are_not_copied():
    """Mamba's u and z are halves of one array; B, C and the step are columns of another."""
    rng = np.random.default_rng(0)
    halves, columns = rng.random((2, 900, 192)), rng.random((2, 900, 96 + 5 + 5))
    given = {
        "u": halves[..., :96],
        "z": halves[..., 96:],
        "delta": columns[..., :96],
        "B": columns[..., 96:101],
        "C": columns[..., 101:],
        "A": -rng.random((96, 5)),
    }
    scan = functools.partial(scanfield.selective_scan, **given, method="numpy.numba")
    size = 2 * 900 * 96 * 8
    alone = scanfield.selective_scan(**{name: x.copy() for name, x in given.items()}, method="numpy.numba")
    assert np.array_equal(scan().output, alone.output)
    assert peak(scan) < 1.3 * size
    _, pull = scanfield.vjp(scanfield.selective_scan, **given, wrt=("u", "z"), method="numpy.numba")
    cotangent = rng.random((900, 2, 96)).transpose(1, 0, 2)
    found = pull(cotangent)
    _, plain = scanfield.vjp(scanfield.selective_scan, **given, method="numpy.numba")
    every = plain(cotangent.copy())
    assert all(np.array_equal(x, every[name]) for name, x in found.items())
    assert peak(functools.partial(pull, cotangent)) < 2.5 * size


def test_shared_gradients_take_a_few_rows():
    """A coefficient that 64 sequences share has 8 sums, not 64; what is not wanted has none."""
    rng = np.random.default_rng(0)
    a, b = rng.random((1, 200, 96)), rng.random((64, 200, 96))
    for wrt, most in (
        ("a", 12 * a.nbytes),
        ("b", b.nbytes + 3 * a.nbytes),
        (("a", "b"), b.nbytes + 12 * a.nbytes),
    ):
        _, pull = scanfield.vjp(scanfield.linear_scan, a, b, wrt=wrt, method="numpy.numba")
        cotangent = np.ones(b.shape)
        assert peak(functools.partial(pull, cotangent)) < most


def test_gradients_written_past_the_cache_are_the_same(monkeypatch):
    """And rows far apart, which are asked for ahead: wide enough for both, with a gate."""
    rng = np.random.default_rng(5)
    shape, N = (1, 1030, 256), 3
    inputs = {name: rng.standard_normal(shape, np.float32) for name in ("u", "z")}
    inputs["delta"] = rng.random(shape, np.float32) / 10
    inputs["A"] = -rng.random((256, N), np.float32)
    inputs |= {name: rng.standard_normal((1, 1030, N), np.float32) for name in ("B", "C")}
    d_output = rng.standard_normal(shape, np.float32)

    def gradients() -> dict[str, np.ndarray]:
        return scanfield.vjp(scanfield.selective_scan, **inputs, method="numpy.numba")[1](d_output)

    monkeypatch.setattr(memory, "LAST_CACHE", 1 << 40)
    kept = gradients()
    monkeypatch.setattr(memory, "LAST_CACHE", 0)
    asked = []
    past_cache = memory.past_cache
    monkeypatch.setattr(
        "scanfield_numpy.selective.past_cache", lambda *x: asked.append(past_cache(*x)) or asked[-1]
    )
    past = gradients()
    assert asked == [True] * 3
    assert all(np.array_equal(past[name], kept[name]) for name in kept)
