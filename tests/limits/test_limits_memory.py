"""Where memory ends: an error that says so, inputs as they were, and the next call right. And none that leaks."""

from __future__ import annotations

import importlib.util

import pytest
from processes import python

BOTH = pytest.mark.backend("numpy", "torch")


def leave_out(backend: str, test: str, given: dict) -> bool:
    """Torch shares the compiled scans' memory with NumPy: a run of all tests meets it with --slow alone."""
    return backend == "torch" and ("_100_" in test or given.get("ops") == ("linear_scan",))


OPERATIONS = ("linear_scan", "selective_scan", "gdn2", "kda", "ssd")

CALLS = """
import gc, sys
import numpy as np
import scanfield

OPERATIONS = ("linear_scan", "selective_scan", "gdn2", "kda", "ssd")
LIBRARY, TIME = sys.argv[1], int(sys.argv[2])
rng = np.random.default_rng(0)
if LIBRARY == "torch":
    import torch
    torch.set_num_threads(1)
if LIBRARY == "jax":
    import jax
    jax.config.update("jax_enable_x64", True)

def drawn(op, n):
    def draw(*shape):
        return rng.uniform(0.1, 0.9, shape)
    x, B, key, head = (1, n, 64), (1, n, 4), (1, n, 2, 8), (1, n, 2)
    if op == "linear_scan":
        return {"a": draw(*x), "b": draw(*x)}
    if op == "selective_scan":
        return {"u": draw(*x), "delta": draw(*x), "A": -draw(64, 4), "B": draw(*B), "C": draw(*B)}
    if op == "ssd":
        return {"x": draw(1, n, 2, 32), "dt": draw(*head), "A": -draw(2), "B": draw(1, n, 1, 8), "C": draw(1, n, 1, 8)}
    given = {"query": draw(*key), "key": draw(*key) / 8, "value": draw(1, n, 2, 32), "log_decay": -draw(*key)}
    return given | ({"erase": draw(*key)} if op == "gdn2" else {"beta": draw(*head)})

def to(x):
    return torch.from_numpy(x) if LIBRARY == "torch" else jax.numpy.asarray(x) if LIBRARY == "jax" else x

def back(x):
    return np.asarray(x.numpy() if LIBRARY == "torch" else x)

def pages(which):
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[which])

def verbs(op, given, method=None):
    run, arrays = getattr(scanfield, op), {name: to(x) for name, x in given.items()}
    ones = run(**arrays, method=method)
    state = ones.final_state
    time = {name: x[:, 0] for name, x in arrays.items() if name != "A"}
    shared = {name: x for name, x in arrays.items() if name == "A"}
    relevant = run(**arrays, method=method).output
    def pull():
        result, pullback = scanfield.vjp(run, **arrays, method=method)
        return [*result, *pullback(result.output, result.final_state).values()]
    def apart():
        whole = scanfield.summarise(run, **arrays, method=method)
        return [*scanfield.compose(whole, whole)[:2], *scanfield.apply(run, state, **arrays, method=method)]
    yield "forward", lambda: list(run(**arrays, method=method))
    yield "step", lambda: list(run.step(state, **time, **shared, method=method))
    yield "vjp", pull
    yield "relevance", lambda: [scanfield.relevance(run, relevant, **arrays, method=method).value]
    yield "affine", apart
"""

LIMITED = """
import resource
scanfield.set_num_threads(1)  # a thread that finds no memory to start in is waited for by Python itself

def free():  # blocks that wait for the next result
    gc.collect()
    if "scanfield_numpy.memory" in sys.modules:
        sys.modules["scanfield_numpy.memory"].pool.clear()

def said_so(error):
    return isinstance(error, (MemoryError, scanfield.ScanfieldError)) or (
        LIBRARY == "torch" and isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )

failed = set()
chosen = sys.argv[3:]
for op in chosen:
    given = drawn(op, TIME)
    before = {name: x.copy() for name, x in given.items()}
    for method in (None, "generic") if len(chosen) > 1 and op in ("linear_scan", "gdn2") else (None,):
        for name, verb in verbs(op, given, method):
            want = [back(x).copy() for x in verb()]
            for more in (2 << 20, 24 << 20):
                free()
                used = pages(0) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (used + more, -1))
                try:
                    verb()
                except Exception as error:
                    caught = error
                else:
                    caught = None
                resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
                if caught is not None:
                    assert said_so(caught), (op, method, name, repr(caught))
                    failed.add((op, method, name))
                caught = None
                assert all(np.array_equal(x, before[key]) for key, x in given.items()), (op, method, name)
            assert all(np.array_equal(back(x), y) for x, y in zip(verb(), want, strict=True)), (op, name)
assert {op for op, _, _ in failed} == set(chosen), failed
assert {name for _, _, name in failed} >= ({"vjp", "relevance"} if len(chosen) > 1 else {"relevance"}), failed
print(len(failed))
"""

SOON = {
    "MALLOC_MMAP_THRESHOLD_": "131072",
    "MALLOC_TRIM_THRESHOLD_": "131072",
}  # what is freed goes back at once


def name_of(request: pytest.FixtureRequest) -> str:
    return request.config.getoption("--backend")


@BOTH
@pytest.mark.skipif(importlib.util.find_spec("resource") is None, reason="this system limits no memory")
@pytest.mark.parametrize("ops", [("linear_scan",), pytest.param(OPERATIONS, marks=pytest.mark.slow)], ids=len)
def test_without_memory_an_error_and_nothing_changed(request, ops: tuple[str, ...]):
    assert int(python(CALLS + LIMITED, name_of(request), 30_000, *ops, seconds=1800, **SOON)) >= len(ops)


LEAK = """
def resident():
    return pages(1) * 4096

for op in OPERATIONS:
    for name, verb in verbs(op, drawn(op, TIME)):
        if name not in sys.argv[5:]:
            continue
        for _ in range(int(sys.argv[3])):
            verb()
        before = resident()
        for _ in range(int(sys.argv[4])):
            verb()
        print(op, name, resident() - before)
"""


def growth(request: pytest.FixtureRequest, warm: int, calls: int, *verbs: str) -> dict[tuple[str, str], int]:
    """Bytes that each operation's verbs have added."""
    lines = python(CALLS + LEAK, name_of(request), 48, warm, calls, *verbs, seconds=1800).splitlines()
    return {tuple(line.split()[:2]): int(line.split()[2]) for line in lines}


@BOTH
@pytest.mark.skipif(not importlib.util.find_spec("resource"), reason="this system tells no resident memory")
def test_100_gradients_and_steps_take_no_more_memory(request):
    """At most 1 MiB; one array of tokens that stayed behind at each call would be 2.4 MiB."""
    found = growth(request, 20, 100, "vjp", "step")
    assert len(found) == 10
    assert not {key: grown for key, grown in found.items() if grown > 1 << 20}


@pytest.mark.slow
@pytest.mark.backend("numpy", "torch", "jax")
@pytest.mark.skipif(not importlib.util.find_spec("resource"), reason="this system tells no resident memory")
def test_1000_calls_of_every_verb_take_no_more_memory(request):
    found = growth(request, 100, 1000, "forward", "step", "vjp", "relevance", "affine")
    assert len(found) == 25
    assert not {key: grown for key, grown in found.items() if grown > 1 << 20}
