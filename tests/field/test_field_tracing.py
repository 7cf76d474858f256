"""Field reports F069, nothing of a trace outlives it, and F070, what is compiled is right where the eager call is. (The
training half of F069 joins with `pinn`.)
"""

from __future__ import annotations

import numpy as np
import pytest
from draws import G, M, within
from operations import every_operation

import scanfield
from scanfield.dispatch import Derived

pytestmark = pytest.mark.backend("jax")

SHORT = every_operation(69, 1, 9, 2, 4, 3, channels=3, state=2)
LONGER = every_operation(690, 2, 12, 2, 4, 3, channels=3, state=2)


# One of each kind: the other members of the family are gdn2 under their own names.
@pytest.mark.parametrize("operation", ["linear_scan", "selective_scan", "gdn2", "ssd", "gated_delta_product"])
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


@pytest.mark.parametrize("operation", ["gdn2", "selective_scan"])
def test_f070_compiled_is_what_eager_is(library, operation):
    """65 tokens: whole blocks and a token more. Compiled together with its gradients, and one after the other."""
    jax = library.jax
    drawn = G(35, 1, 65, 2, 16, 8) if operation == "gdn2" else M(35, 1, 65, 4, 3)
    inputs = (
        drawn.inputs()
        if operation == "gdn2"
        else {name: getattr(drawn, name) for name in ["u", "delta", "A", "B", "C", "D"]}
    )
    given = library.arrays(inputs, "float32")
    weights = library.array(drawn.d_output, "float32")

    def loss(given):
        result = getattr(scanfield, operation)(**given)
        return (result.output * weights).sum(), result

    def both(given):
        (_, result), gradients = jax.value_and_grad(loss, has_aux=True)(given)
        return {"output": result.output, "final_state": result.final_state, **gradients}

    eager, jitted = both(given), jax.jit(both)(given)
    for name, x in eager.items():
        assert np.isfinite(library.numpy(x)).all(), name
        within(library.numpy(jitted[name]), library.numpy(x), 1e-6, name)
