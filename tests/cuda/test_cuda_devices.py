"""Field report F073: arrays on a device that is not the current one. The stand-in refuses to compute with them elsewhere.

On two cards the same calls run as they stand, with CuPy in the stand-in's place.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import standin
from arrays import deviation
from examples import EXAMPLES, Example

import scanfield
from scanfield import pinn

METHODS = ("cupy.rawkernel", "generic")
# One call of each operation, and one of each option that prepares something: flips, packs, norms, casts.
FEW = list({(x.op, x.name): x for x in EXAMPLES}.values())


def at_home(found: Any) -> None:
    for x in found.values() if isinstance(found, dict) else found:
        if x is not None:
            assert x.device.id == 1


def given(card: Any, example: Example, dtype: str | None = None) -> dict[str, Any]:
    with card.cupy.cuda.Device(1):
        return card.arrays(example.inputs, dtype)


@pytest.mark.parametrize("example", FEW, ids=str)
def test_f073_scans_and_gradients(card: Any, example: Example) -> None:
    function = getattr(scanfield, example.op)
    arrays = given(card, example, "float32")
    kernels = "cupy.rawkernel" in str(scanfield.explain(function, **arrays, **example.options))
    standin.LAUNCHES.clear()
    result, pullback = scanfield.vjp(function, **arrays, **example.options)
    with card.cupy.cuda.Device(1):
        cotangents = result.output * 0 + 1, result.final_state * 0 + 1
    found = pullback(*cotangents)
    at_home(result)
    at_home(found)
    assert card.cupy.cuda.Device().id == 0
    assert {launch.device for launch in standin.LAUNCHES} == ({1} if kernels else set())
    with card.cupy.cuda.Device(0):
        elsewhere = card.arrays(example.inputs, "float32")
        other = function(**elsewhere, **example.options)
    assert deviation(card.raw(result.output), card.raw(other.output)) == 0


@pytest.mark.parametrize("method", METHODS)
def test_f073_every_verb(card: Any, method: str) -> None:
    rng = np.random.default_rng(65)
    with card.cupy.cuda.Device(1):
        a, b, state = (card.array(rng.random(shape)) for shape in ((1, 9, 3), (1, 9, 3), (1, 3)))
        pack = card.cupy.asarray(np.array([0, 4, 9]))
        states = card.array(rng.random((2, 3)))
    scan = scanfield.linear_scan
    with scanfield.use(method=method):
        at_home(scan.step(state, a[:, 0], b[:, 0]))
        at_home(scan(a, b, states, cu_seqlens=[0, 4, 9], reverse=True, states_at=[2, 7]))
        left, right = (scanfield.summarise(scan, a[:, part], b[:, part]) for part in (slice(4), slice(4, 9)))
        whole = scanfield.compose(left, right)
        at_home((whole.transition, whole.state))
        at_home(scanfield.apply(scan, left.state, a[:, 4:], b[:, 4:]))
        at_home(scanfield.relevance(scan, b, a, b, state)[:2])
    at_home(scan(a, b, states, cu_seqlens=pack, method="cupy.rawkernel"))
    at_home(scanfield.associative_scan(lambda x, y: (x[0] * y[0], y[0] * x[1] + y[1]), (a, b)))
    assert card.cupy.cuda.Device().id == 0


@pytest.mark.parametrize("method", [None, "generic"])
def test_f073_the_pinn(card: Any, method: str | None) -> None:
    cupy = card.cupy
    with cupy.cuda.Device(1):
        network = pinn.Network.create(
            pinn.FourierFeatures(2, 4, wavenumber=3.0), hidden=5, xp=cupy, device=cupy.cuda.Device(1), seed=1
        )
        x = card.array(np.random.default_rng(1).random((7, 2)), network.dtype)
        inside = pinn.Piece(x, cupy.full((7,), 9.0, network.dtype), second=cupy.ones((7, 1), network.dtype))
    with scanfield.use(method=method):
        found = pinn.loss_and_grad(network, [pinn.Term("inside", (inside,))])
        at_home({"loss": found.loss, **found.gradients})
        at_home(pinn.jet(network, x))
    assert cupy.cuda.Device().id == 0


def test_arrays_of_two_devices_are_refused(card: Any) -> None:
    a = card.array(np.ones((1, 2, 1)))
    with card.cupy.cuda.Device(1):
        b = card.array(np.ones((1, 2, 1)))
    with pytest.raises(scanfield.DeviceError, match=r"b is on device <CUDA Device 1>"):
        scanfield.linear_scan(a, b)


def test_launches_follow_the_stream_of_their_device(card: Any) -> None:
    """A stream that is current on device 0 is none of device 1's."""
    cupy = card.cupy
    with cupy.cuda.Device(1):
        far = card.array(np.ones((1, 2, 1)))
    near = card.array(np.ones((1, 2, 1)))
    standin.LAUNCHES.clear()
    stream = cupy.cuda.Stream("side")
    with stream:
        scanfield.linear_scan(near, near)
        scanfield.linear_scan(far, far)
    scanfield.linear_scan(near, near)
    assert [(x.device, x.stream) for x in standin.LAUNCHES] == [(0, "side"), (1, "default"), (0, "default")]


def test_each_stream_has_its_own_bounds(card: Any) -> None:
    """What one stream forgets goes back to its own memory, which a kernel of another stream would not wait for."""
    from scanfield_cupy import layout

    cupy = card.cupy
    layout._uploaded.cache_clear()
    a = card.array(np.ones((1, 4, 1)))
    pack = {"cu_seqlens": (0, 1, 4)}
    standin.TRANSFERS.clear()
    for _ in range(2):
        scanfield.linear_scan(a, a, **pack)
        with cupy.cuda.Stream("side"):
            scanfield.linear_scan(a, a, **pack)
    assert standin.TRANSFERS["to device"] == 2


def test_numbers_that_lie_askew_are_left_to_the_generic_form(card: Any) -> None:
    """A card reads a complex number at once, at multiples of its bytes alone; cotangents that lie askew are copied."""
    cupy = card.cupy
    row = cupy.asarray(np.arange(1.0, 10.0))
    askew = row[1:].view("complex128").reshape((1, 4, 1))
    straight = askew.copy()
    assert askew.data.ptr % 16 == 8 and straight.data.ptr % 16 == 0
    told = str(scanfield.explain(scanfield.linear_scan, askew, straight))
    assert "an array of complex128 does not lie at multiples of its 16 bytes" in told
    standin.LAUNCHES.clear()
    with pytest.raises(scanfield.BackendError, match="does not lie at multiples"):
        scanfield.linear_scan(askew, straight, method="cupy.rawkernel")
    by_row = cupy.asarray(np.arange(24, dtype="float32")).reshape((1, 8, 3))[..., :2].view("complex64")
    assert by_row.strides[1] % 8 == 4
    with pytest.raises(scanfield.BackendError, match="does not lie at multiples"):
        scanfield.linear_scan(by_row, by_row, method="cupy.rawkernel")
    assert not standin.LAUNCHES
    _, pullback = scanfield.vjp(scanfield.linear_scan, straight, straight, method="cupy.rawkernel")
    one, other = (pullback(x)["a"] for x in (askew, straight))
    assert deviation(card.raw(one), card.raw(other)) == 0
