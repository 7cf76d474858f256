"""Field reports F049, F073 and F074 where only a card can show them; what can be shown without one stands in `tests/cuda`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from arrays import deviation
from draws import G, M

import scanfield

pytestmark = pytest.mark.gpu


@pytest.mark.backend("cupy")
def test_f049_saved_states_past_32_bits(library: Any) -> None:
    """Needs a card with 64 GB: 2^32 numbers of saved states, of which the last row's are as they are alone."""
    cupy = library.cupy
    need, (free, _) = 64 * 2**30, cupy.cuda.runtime.memGetInfo()
    if free < need:
        pytest.skip(f"needs {need / 2**30:.0f} GB of the card's memory, {free / 2**30:.0f} are free")
    draw, rows = M(61, 1, 1024, 8192, 256), 64
    alone = library.arrays({name: getattr(draw, name) for name in ("u", "delta", "A", "B", "C")}, "float32")
    many = dict(alone)
    for name in ("u", "delta", "B", "C"):
        many[name] = cupy.zeros((rows, *alone[name].shape[1:]), "float32")
        many[name][-1] = alone[name][0]
    found = []
    for arrays in (many, alone):
        result, pullback = scanfield.vjp(
            scanfield.selective_scan, **arrays, wrt=("u", "A"), method="cupy.rawkernel"
        )
        gradients = pullback(result.output * 0 + 1)
        found.append((library.raw(gradients["u"][-1]), library.raw(gradients["A"])))
    for got, want in zip(*found, strict=True):
        assert deviation(got, want) <= 1e-2


@pytest.mark.backend("cupy", "torch")
def test_f073_arrays_on_a_second_card(library: Any) -> None:
    """Needs two cards: the current one is not that of the arrays."""
    inputs = G(65, 1, 70, 2, 16, 8).inputs()
    if library.name == "cupy":
        count, current = library.cupy.cuda.runtime.getDeviceCount(), lambda: library.cupy.cuda.Device().id
    else:
        count, current = library.torch.cuda.device_count(), library.torch.cuda.current_device
    if count < 2:
        pytest.skip(f"needs two cards, {count} found")
    if library.name == "cupy":
        with library.cupy.cuda.Device(1):
            arrays = library.arrays(inputs, "float32")
    else:
        arrays = {name: x.to("cuda:1") for name, x in library.arrays(inputs, "float32").items()}
    result, pullback = scanfield.vjp(scanfield.gdn2, **arrays)
    gradients = pullback(d_output=result.output)
    want, pull = scanfield.vjp(scanfield.gdn2, **inputs)
    numbers = pull(d_output=want.output)
    for x, y in ((result.output, want.output), *((gradients[name], numbers[name]) for name in numbers)):
        where = x.device.id if library.name == "cupy" else x.device.index
        assert where == 1
        assert deviation(library.numpy(x if library.name == "cupy" else x.cpu()), y) <= 1e-5
    assert current() == 0


@pytest.mark.backend("torch")
def test_f074_kernels_wait_for_the_producer_on_torchs_stream(library: Any) -> None:
    """Needs a card: fifty runs on a side stream, none of which is synchronised before the scan."""
    torch = library.torch
    side = torch.cuda.Stream()
    b = torch.ones(1, 512, 4096, device="cuda")
    with torch.cuda.stream(side):
        matrix = torch.rand(4096, 4096, device="cuda") / 4096
        outputs = []
        for _ in range(50):
            product = matrix
            for _ in range(20):
                product = product @ matrix
            a = product[:512].reshape(1, 512, 4096)
            outputs.append(scanfield.linear_scan(a, b, method="torch.cuda").output)
        side.synchronize()
        want = scanfield.linear_scan(a, b, method="torch.cuda").output
    assert all(torch.equal(x, want) for x in outputs)


@pytest.mark.backend("cupy")
def test_f074_kernels_wait_for_the_producer_on_cupys_stream(library: Any) -> None:
    """Needs a card: as above, on a stream of CuPy's that waits for no other."""
    cupy = library.cupy
    b = cupy.ones((1, 512, 4096), "float32")
    side = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with side:
        matrix = cupy.random.random((4096, 4096), dtype="float32") / np.float32(4096)
        outputs = []
        for _ in range(50):
            product = matrix
            for _ in range(20):
                product = product @ matrix
            a = product[:512].reshape(1, 512, 4096)
            outputs.append(scanfield.linear_scan(a, b).output)
        side.synchronize()
        want = scanfield.linear_scan(a, b).output
        same = [bool((x == want).all()) for x in outputs]
    assert all(same)
