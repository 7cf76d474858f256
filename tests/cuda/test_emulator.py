"""The emulator finds what goes wrong on a card: a missing barrier, a divergent shuffle, memory nobody wrote or owns."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import emulator
import numpy as np
import pytest

if emulator.missing():
    pytest.skip(emulator.missing(), allow_module_level=True)

CODE = r"""
extern "C" __global__ void barrier(const float* x, float* y) {
    __shared__ float s[64];
    s[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    y[threadIdx.x] = s[63 - threadIdx.x];
}
extern "C" __global__ void no_barrier(const float* x, float* y) {
    __shared__ float s[64];
    s[threadIdx.x] = x[threadIdx.x];
    y[threadIdx.x] = s[63 - threadIdx.x];
}
extern "C" __global__ void blocks_meet(float* y) { y[0] = 2 * y[0] + blockIdx.x; }
extern "C" __global__ void divergent(const float* x, float* y) {
    float v = x[threadIdx.x];
    if (threadIdx.x < 16) v += __shfl_xor_sync(0xffffffffu, v, 1);
    __syncthreads();
    y[threadIdx.x] = v;
}
extern "C" __global__ void left_behind(float* y) {
    if (threadIdx.x == 0) return;
    __syncthreads();
    y[threadIdx.x] = 1;
}
extern "C" __global__ void prefix(const double* x, double* y) {
    double v = x[threadIdx.x];
    const int lane = threadIdx.x % 32;
    for (int by = 1; by < 32; by *= 2) {
        const double other = __shfl_up_sync(0xffffffffu, v, by);
        if (lane >= by) v += other;
    }
    y[threadIdx.x] = v;
}
extern "C" __global__ void shuffles(const int* x, int* y) {
    const unsigned all = 0xffffffffu;
    const int v = x[threadIdx.x], n = blockDim.x;
    y[threadIdx.x] = __shfl_sync(all, v, 3, 8);
    y[n + threadIdx.x] = __shfl_xor_sync(all, v, 5);
    y[2 * n + threadIdx.x] = __shfl_down_sync(all, v, 2, 16);
    y[3 * n + threadIdx.x] = (int)__ballot_sync(all, v > 40);
    y[4 * n + threadIdx.x] = __syncthreads_or(v > 62) + 2 * __syncthreads_and(v >= 0) + 4 * __syncthreads_count(v > 40);
    atomicAdd(y + 5 * n, v);
}
extern "C" __global__ void unwritten(float* y) { y[threadIdx.x] = ((float*)emulator::dynamic_shared)[threadIdx.x]; }
extern "C" __global__ void past_shared(float* y) { ((float*)emulator::dynamic_shared)[threadIdx.x + 1] = y[threadIdx.x]; }
extern "C" __global__ void past_array(const float* x, float* y) { y[threadIdx.x + 1] = x[threadIdx.x]; }
extern "C" __global__ void typed(float* y, int a, long long b, double c) { y[0] = a + b + c; }
"""


@pytest.fixture(scope="module")
def module() -> emulator.Module:
    return emulator.Module(CODE)


X = np.arange(64, dtype=np.float32)


def empty(size: int = 64) -> np.ndarray:
    return np.zeros(size, np.float32)


def test_threads_of_a_block_share_and_wait(module):
    y = empty()
    module.get_function("barrier")((1,), (64,), (X, y))
    assert np.array_equal(y, X[::-1])


@pytest.mark.parametrize(
    ("name", "grid", "block", "array"), [("no_barrier", 1, 64, True), ("blocks_meet", 3, 1, False)]
)
def test_a_result_that_depends_on_the_order_is_an_error(module, name, grid, block, array):
    with pytest.raises(emulator.LaunchError, match="depends on the order"):
        module.get_function(name)((grid,), (block,), (X, empty()) if array else (empty(),))


def test_collectives(module):
    x, y = np.arange(64, dtype=np.int32), np.zeros(5 * 64 + 1, np.int32)
    module.get_function("shuffles")((1,), (64,), (x, y))
    parts = y[:320].reshape(5, 64)
    assert np.array_equal(parts[0], x // 8 * 8 + 3)
    assert np.array_equal(parts[1], x ^ 5)
    assert np.array_equal(parts[2], np.where(x % 16 < 14, x + 2, x))
    ballots = [sum(int(x[32 * w + i] > 40) << i for i in range(32)) for w in range(2)]
    assert np.array_equal(parts[3].astype(np.uint32), np.repeat(np.array(ballots, np.uint32), 32))
    assert np.array_equal(parts[4], np.full(64, 1 + 2 + 4 * 23))
    assert y[320] == x.sum()


def test_shuffles_move_eight_bytes(module):
    x = np.random.default_rng(0).standard_normal(32)
    y = np.zeros(32)
    module.get_function("prefix")((1,), (32,), (x, y))
    assert np.allclose(y, np.cumsum(x), rtol=1e-14)


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("divergent", True, "names a lane that does not take part"),
        ("left_behind", False, "returned before a barrier"),
    ],
)
def test_threads_that_never_meet_are_an_error(module, name, array, message):
    with pytest.raises(emulator.LaunchError, match=message):
        module.get_function(name)((1,), (32,), (X, empty()) if array else (empty(),))


def test_shared_memory_starts_as_nan(module):
    y = empty(32)
    module.get_function("unwritten")((1,), (32,), (y,), shared_mem=128)
    assert np.isnan(y).all()


def test_arguments_are_compared_with_the_parameters(module):
    kernel, y = module.get_function("typed"), empty(1)
    kernel((1,), (1,), (y, np.int32(1), np.int64(2), np.float64(3)))
    assert y[0] == 6
    kernel((1,), (1,), (y, np.int32(1), 2, 3.0))  # as CuPy passes Python's own
    for wrong in [
        (1, 2, 3.0),
        (np.int32(1), np.int32(2), 3.0),
        (np.int32(1), 2, np.float32(3)),
        (np.int32(1), 2),
    ]:
        with pytest.raises(emulator.LaunchError, match="argument"):
            kernel((1,), (1,), (y, *wrong))


def test_limits_of_a_launch(module):
    kernel = module.get_function("unwritten")
    for grid in [(0,), (1, 65536), (1, 1, 65536), (2**31,)]:
        with pytest.raises(emulator.LaunchError, match="grid"):
            kernel(grid, (32,), (empty(),), shared_mem=128)
    with pytest.raises(emulator.LaunchError, match="block"):
        kernel((1,), (1025,), (empty(),))
    with pytest.raises(emulator.LaunchError, match="shared memory"):
        kernel((1,), (32,), (empty(),), shared_mem=50_000)
    kernel.max_dynamic_shared_size_bytes = 50_000
    kernel((1,), (32,), (empty(),), shared_mem=50_000)


# Races that no order of threads shows: the emulator's shuffles wait for each other, a card's put no memory in order; the
# same number twice; blocks that read what another one writes.
RACES = r"""
extern "C" __global__ void shuffled(const float* x, float* y) {
    float* s = (float*)emulator::dynamic_shared;
    s[threadIdx.x] = x[threadIdx.x];
    __shfl_sync(0xffffffffu, 0, 0);
    y[threadIdx.x] = s[threadIdx.x ^ 1];
}
extern "C" __global__ void over_again(const float* x, float* y) {
    float* s = (float*)emulator::dynamic_shared;
    for (int i = 0; i < 2; ++i) {
        s[threadIdx.x] = x[threadIdx.x];
        __syncthreads();
        y[threadIdx.x] = s[63 - threadIdx.x];
    }
}
extern "C" __global__ void same_number(const float* x, float* y) { y[0] = x[0]; }
extern "C" __global__ void of_another_block(const float* x, float* y) {
    if (threadIdx.x == 0) y[blockIdx.x] = x[0] + 0 * y[0];
}
extern "C" __global__ void in_order(const float* x, float* y) {
    float* s = (float*)emulator::dynamic_shared;
    for (int i = 0; i < 2; ++i) {
        s[threadIdx.x] = x[threadIdx.x];
        __syncwarp();
        const float near = s[threadIdx.x ^ 1];
        __syncthreads();
        if (threadIdx.x == 0) y[64 * blockIdx.x + 1] = near;
        __syncthreads();
        y[64 * blockIdx.x + threadIdx.x] = s[63 - threadIdx.x] + near;
        __syncthreads();
    }
}
"""


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("shuffled", "thread 1 of block 0 and thread 0 of block 0 write and read byte 4 of shared memory"),
        ("over_again", "thread 31 of block 0 and thread 32 of block 0 .* of shared memory"),
        ("same_number", "thread 0 of block 0 and thread 1 of block 0 write byte 0 of argument 1"),
        (
            "of_another_block",
            "thread 0 of block 0 and thread 0 of block 1 write and read byte 0 of argument 1",
        ),
        ("in_order", None),
    ],
)
def test_races_that_no_order_shows(name: str, found: str | None):
    x = np.zeros(64, np.float32)
    for options in (emulator.OPTIONS, emulator.RACES):
        kernel = emulator.Module(RACES, options).get_function(name)
        if options == emulator.OPTIONS or found is None:
            kernel((2,), (64,), (x, empty(128)), shared_mem=256)
        else:
            with pytest.raises(emulator.LaunchError, match=f"a race: {found}"):
                kernel((2,), (64,), (x, empty(128)), shared_mem=256)


SANITIZED = """
import sys
sys.path.insert(0, sys.argv[1])
import emulator, numpy as np
from test_emulator import CODE
module = emulator.Module(CODE, emulator.SANITIZED, both_orders=False)
arrays = [np.zeros(64, np.float32) for _ in range(2 if sys.argv[2] in ("barrier", "past_array") else 1)]
module.get_function(sys.argv[2])((1,), (64,), arrays, shared_mem=256)
print("nothing found")
"""


@pytest.mark.parametrize(("name", "found"), [("barrier", False), ("past_shared", True), ("past_array", True)])
def test_sanitizers_see_memory_nobody_owns(name, found):
    done = subprocess.run(
        [sys.executable, "-c", SANITIZED, str(Path(__file__).parent), name],
        env=emulator.sanitizer_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    report = done.stdout + done.stderr
    assert ("AddressSanitizer" in report) == found, report[-2000:]
    assert ("nothing found" in report) == (not found), report[-2000:]
