"""Field reports F017 and F018: packed sequences. (The half of F017 that calls an adapter joins with `compat`.)"""

from __future__ import annotations

import numpy as np
import pytest
from calls import CHEAP_FORMS, GENERIC, call, pull
from draws import G, bitwise, printed, within

pytestmark = GENERIC


@pytest.mark.parametrize("method", CHEAP_FORMS)
def test_f017_packed_sequences_do_not_read_each_other(library, method):
    inputs = G(20, 1, 100, 2, 8, 6).inputs()
    states = np.random.default_rng(200).standard_normal((2, 2, 8, 6))
    packed = call(library, "gdn2", inputs | {"initial_state": states}, cu_seqlens=[0, 40, 100], method=method)
    output, final_state = library.numpy(packed.output), library.numpy(packed.final_state)
    for i, (lo, hi) in enumerate([(0, 40), (40, 100)]):
        part = {name: x[:, lo:hi] for name, x in inputs.items()} | {"initial_state": states[i : i + 1]}
        alone = call(library, "gdn2", part, method=method)
        within(output[:, lo:hi], library.numpy(alone.output), 1e-12)
        within(final_state[i : i + 1], library.numpy(alone.final_state), 1e-12)
    printed(output.sum(), "8.000741612243")
    printed(final_state[1, 1, 7, 5], "0.0558432413228")

    other = {name: x.copy() for name, x in inputs.items()}
    for name, x in G(2000, 1, 100, 2, 8, 6).inputs().items():
        other[name][:, :40] = x[:, :40]
    changed = call(library, "gdn2", other | {"initial_state": states}, cu_seqlens=[0, 40, 100], method=method)
    bitwise(library.raw(changed.output)[:, 40:], library.raw(packed.output)[:, 40:])
    assert np.any(library.raw(changed.output)[:, :40] != library.raw(packed.output)[:, :40])


@pytest.mark.parametrize("method", CHEAP_FORMS)
def test_f018_empty_sequences_keep_their_states(library, method):
    drawn = G(21, 1, 9, 3, 4, 6)
    inputs = drawn.inputs()
    states = np.random.default_rng(210).standard_normal((4, 3, 4, 6))
    d_state = np.random.default_rng(211).standard_normal((4, 3, 4, 6))
    options = {"cu_seqlens": [0, 0, 5, 5, 9], "method": method}
    result, gradients = pull(
        library, "gdn2", inputs | {"initial_state": states}, drawn.d_output, d_state, **options
    )
    output, final_state = library.raw(result.output), library.raw(result.final_state)
    assert output.shape == (1, 9, 3, 6) and final_state.shape == (4, 3, 4, 6)
    for i in (0, 2):
        bitwise(final_state[i], states[i])
    for i, (lo, hi) in {1: (0, 5), 3: (5, 9)}.items():
        part = {name: x[:, lo:hi] for name, x in inputs.items()} | {"initial_state": states[i : i + 1]}
        alone = call(library, "gdn2", part, method=method)
        within(output[:, lo:hi], library.raw(alone.output), 1e-12)
        within(final_state[i : i + 1], library.raw(alone.final_state), 1e-12)
    printed(output.sum(), "3.795828732093")
    for i in (0, 2):
        bitwise(library.raw(gradients["initial_state"])[i], d_state[i])
