"""Many threads at once, forks and spawns after use, interrupts, and the interpreter's end in the middle of work.

Each kind runs in a process of its own, which has to end by itself: `python` gives it three minutes, and what is repeated
a hundred times, with --slow, half an hour.
"""

from __future__ import annotations

import os

import pytest
from processes import python

BOTH = pytest.mark.backend("numpy", "torch")
HALF_AN_HOUR = 1800
HUNDRED = pytest.param(100, marks=pytest.mark.slow)

CALLS = """
import os, signal, sys, threading, time, warnings
import numpy as np
import scanfield

LIBRARY, TIMES = sys.argv[1], int(sys.argv[2])
if LIBRARY == "torch":
    import torch
    torch.set_num_threads(1)
    to, back = torch.from_numpy, lambda x: x.numpy()
elif LIBRARY == "jax":
    import jax.numpy
    to, back = jax.numpy.asarray, np.asarray
else:
    to = back = np.asarray
scanfield.set_num_threads(3)
rng = np.random.default_rng(0)
one = rng.uniform(0.1, 0.9, (2, 300, 1200)).astype("f4")  # work for several threads
x = rng.uniform(0.1, 0.9, (2, 40, 24)).astype("f4")
key = x.reshape(2, 40, 3, 8) / 8
A = -x[0, :24, :4]

def pull(op, *arrays):
    result, pullback = scanfield.vjp(op, *map(to, arrays))
    return [*result, *pullback(result.output, result.final_state).values()]

def relevant(op, *arrays):
    arrays = tuple(map(to, arrays))
    return [scanfield.relevance(op, op(*arrays).output, *arrays).value]

WORK = [
    lambda: scanfield.linear_scan(to(one), to(one)),
    lambda: pull(scanfield.linear_scan, one, one),
    lambda: pull(scanfield.selective_scan, x, x, A, x[..., :4], x[..., 4:8]),
    lambda: relevant(scanfield.selective_scan, x, x, A, x[..., :4], x[..., 4:8]),
    lambda: pull(scanfield.gdn2, key, key, key, -key, key, key),
    lambda: scanfield.kda(*map(to, (key, key, key, -key, key[..., 0]))),
    lambda: scanfield.linear_scan.step(to(x[:, 0]), to(x[:, 1]), to(x[:, 2])),
    lambda: scanfield.summarise(scanfield.gdn2, *map(to, (key, key, key, -key)))[:2],
]

def bits(results):
    return b"".join(back(x).tobytes() for x in results)

def everything():
    return [bits(work()) for work in WORK]
"""

THREADS = """
want = everything() if sys.argv[3] == "used" else None
found, failed = {}, []
start = threading.Barrier(16)
def caller(i):
    try:
        start.wait()
        for turn in range(TIMES):
            j = (5 * i + turn) % len(WORK)
            found.setdefault(j, set()).add(bits(WORK[j]()))
    except BaseException as error:
        failed.append(error)
callers = [threading.Thread(target=caller, args=(i,)) for i in range(16)]
for each in callers:
    each.start()
for each in callers:
    each.join()
assert not failed, failed[0]
want = want or everything()
assert len(found) == len(WORK)
assert all(found[j] == {want[j]} for j in found)
"""


def name_of(request: pytest.FixtureRequest) -> str:
    return request.config.getoption("--backend")


def leave_out(backend: str, test: str, given: dict) -> bool:
    """JAX compiles each of the calls first: a run of all tests meets them with --slow alone."""
    return backend == "jax" and "threads" in test and given.get("times") != 100


@pytest.mark.backend("numpy", "torch", "jax")
@pytest.mark.parametrize("times", [8, HUNDRED])
def test_16_threads_with_mixed_calls(request, times: int):
    python(CALLS + THREADS, name_of(request), times, "used", seconds=HALF_AN_HOUR)


@pytest.mark.backend("numpy", "torch", "jax")
@pytest.mark.parametrize("times", [1, HUNDRED])
def test_16_threads_make_the_first_call_of_all(request, times: int):
    for _ in range(times):
        python(CALLS + THREADS, name_of(request), 8, "fresh")


FORKS = """
warnings.simplefilter("ignore")  # newer Pythons warn that a process with threads forks
want = everything()
busy = threading.Event()
def worker():
    while not busy.is_set():
        WORK[0]()
threading.Thread(target=worker, daemon=True).start()
for turn in range(TIMES):
    child = os.fork()
    if not child:
        signal.alarm(60)
        os._exit(0 if everything() == want else 3)
    assert os.waitpid(child, 0)[1] == 0, turn
assert everything() == want
busy.set()
"""


@BOTH
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.parametrize("times", [4, HUNDRED])
def test_forks_while_a_thread_works(request, times: int):
    python(CALLS + FORKS, name_of(request), times, seconds=HALF_AN_HOUR)


FIRST_FORK = """
warnings.simplefilter("ignore")
import importlib.metadata
entered, found = threading.Event(), importlib.metadata.entry_points
def slow(**group):
    entered.set()
    time.sleep(0.3)
    return found(**group)
from scanfield.dispatch import registry
registry.entry_points = slow
first = threading.Thread(target=lambda: WORK[6]())
first.start()
entered.wait()
child = os.fork()  # while another thread looks for plugins
if not child:
    signal.alarm(60)
    everything()
    os._exit(0)
first.join()
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.backend("numpy")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_fork_in_the_middle_of_the_first_call(request):
    python(CALLS + FIRST_FORK, name_of(request), 1)


SPAWNED = """
import multiprocessing
if __name__ == "__main__":
    want = everything()
    with open(sys.argv[3], "w") as file:
        file.write(open_source)
    sys.path.insert(0, os.path.dirname(sys.argv[3]))
    import spawned
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=PER_CHILD) as pool:
        found = pool.map(spawned.run, range(TIMES), chunksize=1)
    assert len(found) == TIMES and all(x == want for x in found)
"""


@pytest.mark.backend("numpy")
@pytest.mark.parametrize("times", [2, HUNDRED])
def test_spawned_after_use(request, tmp_path, times: int):
    """Two calls in one child, and a hundred children with one each."""
    module = f"import sys\nsys.argv[1:] = [{name_of(request)!r}, '1']\n{CALLS}\ndef run(_):\n    return everything()\n"
    more = f"open_source, PER_CHILD = {module!r}, {1 if times == 100 else None}\n"
    place = tmp_path / "spawned.py"
    python(CALLS + more + SPAWNED, name_of(request), times, place, seconds=HALF_AN_HOUR)


INTERRUPTS = """
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are born deaf to it
want = bits(WORK[0]()), bits(WORK[1]())
caught = 0
def interrupt():
    time.sleep(wait)
    os.kill(os.getpid(), signal.SIGINT)
for turn in range(TIMES):
    wait = 0.0002 * (turn % 10)
    sender = threading.Thread(target=interrupt)
    try:
        sender.start()
        for _ in range(1000):
            WORK[turn % 2]()
    except KeyboardInterrupt:
        caught += 1
    sender.join()
    assert (bits(WORK[0]()), bits(WORK[1]())) == want
assert caught >= TIMES // 2, caught  # one that falls into a destructor is dropped by Python itself
"""


@BOTH
@pytest.mark.skipif(os.name == "nt", reason="there are no signals between processes here")
@pytest.mark.parametrize("times", [10, HUNDRED])
def test_interrupts_in_a_kernel(request, times: int):
    """The call ends with KeyboardInterrupt, and the next ones are right."""
    python(CALLS + INTERRUPTS, name_of(request), times, seconds=HALF_AN_HOUR)


ENDS = """
everything()
def for_ever():
    while True:
        WORK[0]()
        WORK[1]()
for _ in range(3):
    threading.Thread(target=for_ever, daemon=True).start()
time.sleep(0.05)
print("left", flush=True)
"""


@pytest.mark.backend("numpy")
@pytest.mark.parametrize("times", [1, HUNDRED])
def test_the_interpreter_ends_while_daemons_work(request, times: int):
    """Not on torch, whose own operations abort the process then."""
    for _ in range(times):
        assert python(CALLS + ENDS, name_of(request), 1) == "left\n"


JAX_FORK = """
import os, signal, sys, warnings
warnings.simplefilter("ignore")
import jax.numpy as jnp, numpy as np
import scanfield
a = jnp.full((1, 4, 2), 0.5)
scanfield.linear_scan(a, a)
child = os.fork()
if not child:
    signal.alarm(20)
    try:
        scanfield.linear_scan(a, a)
    except scanfield.StateError as error:
        said = str(error)
    b = np.full((1, 4, 2), 0.5)
    os._exit(0 if "spawn" in said and scanfield.linear_scan(b, b).output[0, -1, 0] == 0.9375 else 3)
assert os.waitpid(child, 0)[1] == 0
assert scanfield.linear_scan(a, a).output[0, -1, 0] == 0.9375
"""


@pytest.mark.backend("jax")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_child_of_a_process_with_jax_says_that_it_cannot():
    """XLA's threads are gone in it, and a call would wait for them; NumPy's arrays are as good as ever."""
    python(JAX_FORK)
