"""Field report F069: nothing of a trace outlives it. (Its training half joins with `pinn`.)"""

from __future__ import annotations

import numpy as np
import pytest
from draws import within
from operations import every_operation

import scanfield
from scanfield.dispatch import Derived

pytestmark = pytest.mark.backend("jax")

SHORT = every_operation(69, 1, 9, 2, 4, 3, channels=3, state=2)
LONGER = every_operation(690, 2, 12, 2, 4, 3, channels=3, state=2)


@pytest.mark.parametrize("operation", SHORT)
def test_f069_no_tracer_leaks(library, operation):
    jax = library.jax
    options = SHORT[operation].options
    r = np.random.default_rng(6900)
    function = getattr(scanfield, operation)

    def with_gradients(given, d_output):
        if isinstance(function.record, Derived):  # whose gradients are those of what they derive from
            return function(**given, **options)
        result, pullback = scanfield.vjp(function, **given, **options)
        return result, dict(pullback(d_output, result.final_state))

    def compare(one, other):
        for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            within(library.numpy(x), library.numpy(y), 1e-6)

    first, second = (
        (library.arrays(case[operation].inputs), library.array(r.standard_normal(case[operation].output)))
        for case in (SHORT, LONGER)
    )

    # An eager JAX program moves a number to the device at every `x * 2.0`; nothing may come back.
    def nothing():
        return jax.transfer_guard("disallow")

    def nothing_back():
        return jax.transfer_guard_device_to_host("disallow")

    with jax.checking_leaks():
        with nothing():
            jitted = jax.jit(with_gradients)(*first)
        with nothing_back():
            eager = with_gradients(*first)
        with nothing():
            other = jax.jit(with_gradients)(*second)
        with nothing_back():
            eager_other = with_gradients(*second)
    compare(jitted, eager)
    compare(other, eager_other)
