"""Offsets past 2^31 and 2^32 elements: views with far strides over memory that is never touched, and large results.

What CUDA kernels do with such offsets, the emulator's tests show (tests/cuda/test_cuda_field.py).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import scanfield

pytestmark = pytest.mark.backend("numpy", "torch")

FAR = 2**32 + 64  # elements from one token to the next


def leave_out(backend: str, test: str, given: dict) -> bool:
    """Read-only arrays lie as others do."""
    return given.get("library") == "readonly"


def far_away(x: np.ndarray, axis: int, path: Path) -> np.ndarray:
    """A view of the same numbers, FAR elements from one to the next along an axis, over a file that is a hole."""
    size = (x.shape[axis] - 1) * FAR + x.size
    try:
        with path.open("wb") as file:
            file.truncate(size * x.itemsize)
        memory = np.memmap(path, x.dtype, "r+", shape=(size,))
    except OSError as error:
        pytest.skip(f"no room for a sparse file: {error}")
    strides = list(np.empty(x.shape, x.dtype).strides)
    strides[axis] = FAR * x.itemsize
    view = as_strided(np.asarray(memory), x.shape, strides)
    view[...] = x
    return view


def drawn(op: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)

    def draw(*shape: int) -> np.ndarray:
        return rng.uniform(0.1, 1, shape).astype(np.float32)

    if op == "linear_scan":
        return {"a": draw(2, 3, 5), "b": draw(2, 3, 5), "initial_state": draw(2, 5)}
    if op == "selective_scan":
        x, B = (2, 3, 5), (2, 3, 4)
        return {"u": draw(*x), "delta": draw(*x), "A": -draw(5, 4), "B": draw(*B), "C": draw(*B)}
    key = (2, 3, 2, 4)
    given = {name: draw(*key) / 2 for name in ("query", "key", "erase")}
    return given | {"log_decay": -draw(*key), "value": draw(2, 3, 2, 5)}


def to(library, x: np.ndarray):
    """Without a copy."""
    if library.name != "torch":
        return x
    import torch

    return torch.from_numpy(x)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("op", ["linear_scan", "selective_scan", "gdn2"])
def test_a_view_with_far_strides(library, op: str, axis: int, tmp_path: Path):
    """Of batch, time and channels; forward, gradients, and time backwards."""
    run = getattr(scanfield, op)
    given = drawn(op)
    far = {name: far_away(x, axis if x.ndim > 2 else 0, tmp_path / name) for name, x in given.items()}
    assert all(abs(x.strides[axis if x.ndim > 2 else 0]) > 2**33 for x in far.values())
    for options in ({}, {"method": "generic"}, {"reverse": True}):
        found = [
            scanfield.vjp(run, **{name: to(library, x) for name, x in arrays.items()}, **options)
            for arrays in (given, far)
        ]
        grads = [pull(result.output, result.final_state) for result, pull in found]
        pairs = list(zip(found[0][0], found[1][0], strict=True))
        pairs += [(grads[0][name], grads[1][name]) for name in grads[0]]
        for near, distant in pairs:
            near, distant = library.raw(near), library.raw(distant)
            # torch's own einsum sums in another order where strides differ
            rounding = 1e-6 if "method" in options else 0
            np.testing.assert_allclose(distant, near, rtol=rounding, err_msg=str(options))


def gibibytes_free() -> float:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0.0
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) / 2**20


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 2**16 + 1, 2**16), (2**16 + 1, 1, 2**16), (3, 2, 2**30 - 1)])
def test_results_of_more_than_2_to_the_32_elements(library, shape: tuple[int, int, int]):
    """Inputs of one number, with strides of zero; output in half precision, 8 GiB and more."""
    if gibibytes_free() < 14:
        pytest.skip(f"{gibibytes_free():.0f} GiB of memory are free, 14 are needed")
    a = np.broadcast_to(np.float16(0.5), shape)
    b = np.broadcast_to(np.float16(1.0), shape)
    output, state = scanfield.linear_scan(to(library, a), to(library, b))
    output, state = library.raw(output), library.raw(state)
    assert output.size > 2**32 or shape[0] == 3
    truth = [np.float16(2 - 0.5**t) for t in range(min(shape[1], 30))]
    for t, want in enumerate(truth):
        assert (output[:: max(shape[0] - 1, 1), t, ::4097] == want).all(), t
        assert (output[-1, t, -5:] == want).all(), t
    assert (output[-1, -1] == truth[-1]).all() and (
        state[-1] == np.float32(2 - 0.5 ** min(shape[1], 60))
    ).all()
