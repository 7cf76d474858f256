"""Field report F072: the inputs' device. (Its relevance and training parts join with `lrp` and `pinn`; F073 and F074
with the CUDA kernels.)"""

from __future__ import annotations

import numpy as np
import pytest
from operations import every_operation, token

import scanfield

strict = pytest.importorskip("array_api_strict", reason="array-api-strict is not installed")
pytestmark = pytest.mark.backend("strict")

PLACES = [("device1", "float32"), ("device1", "float64"), ("no_float64", "float32")]


SMALL = every_operation(48, 1, 7, 1, 3, 2, channels=2, state=3)


def place(mapping, device, dtype):
    return {
        name: strict.asarray(x.astype(dtype), device=strict.Device(device)) for name, x in mapping.items()
    }


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("operation", SMALL)
def test_f072_everything_stays_on_the_inputs_device(operation, device, dtype):
    inputs, options, _ = SMALL[operation]
    function = getattr(scanfield, operation)
    given = place(inputs, device, dtype)

    def at_home(x, what):
        assert x.device == strict.Device(device), f"{what} is on {x.device}"
        assert str(x.dtype).rpartition(".")[2] == dtype, f"{what} is {x.dtype}"

    result, pullback = scanfield.vjp(function, **given, **options)
    at_home(result.output, "output")
    at_home(result.final_state, "final_state")
    for name, gradient in pullback(result.output * 1, result.final_state * 1).items():
        at_home(gradient, f"gradient of {name}")
    without = function(**{name: x for name, x in given.items() if name != "initial_state"}, **options)
    at_home(without.output, "output without a state")
    at_home(without.final_state, "state without a state")
    first = place(token(inputs, 0), device, dtype)
    for state in (None, given["initial_state"]):
        y, new = function.step(state, **first, **options)
        at_home(y, "a step's output")
        at_home(new, "a step's state")


@pytest.mark.parametrize("operation", SMALL)
def test_f072_a_mix_of_devices_is_refused(operation):
    inputs, options, _ = SMALL[operation]
    for name in inputs:
        given = place(inputs, "device1", "float32")
        given[name] = strict.asarray(inputs[name].astype(np.float32), device=strict.Device("CPU_DEVICE"))
        with pytest.raises(scanfield.DeviceError) as refused:
            getattr(scanfield, operation)(**given, **options)
        for words in (name, "CPU_DEVICE", "device1"):
            assert words in str(refused.value)
