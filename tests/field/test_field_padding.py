"""Field reports F031 and F032: padding. (The half of F031 that runs a model joins with `compat`.)"""

from __future__ import annotations

import numpy as np
import pytest
import reference
from calls import CHEAP_FORMS, GENERIC, call, needs_every_length, pull
from draws import G, M, bitwise, printed, within

pytestmark = GENERIC


def test_f031_neutral_tokens_on_the_left_change_nothing_in_the_selective_scan(library):
    drawn = M(27, 2, 12, 4, 3)
    inputs = drawn.inputs("D", "z")
    inputs["delta"][1, :5] = 0
    padded = call(library, "selective_scan", inputs)
    shared = ("A", "D")
    unpadded = {name: x if name in shared else x[1:, 5:] for name, x in inputs.items()}
    alone = call(library, "selective_scan", unpadded)
    within(library.numpy(padded.output)[1:, 5:], library.numpy(alone.output), 1e-12)
    within(library.numpy(padded.final_state)[1:], library.numpy(alone.final_state), 1e-12)


@pytest.mark.parametrize("method", CHEAP_FORMS)
def test_f031_neutral_tokens_on_the_left_change_nothing_in_gdn2(library, method):
    """A neutral token (log_decay, erase and write 0) leaves the state as it is, to the last bit.

    So does the chunk form; but there five tokens more also move what is summed with what, which may change a last digit.
    """
    drawn = G(27, 1, 12, 2, 4, 3)
    inputs = drawn.inputs()
    for gate in ("log_decay", "erase", "write"):
        inputs[gate][:, :5] = 0
    state = {"initial_state": drawn.state}
    padded = call(library, "gdn2", inputs | state, method=method)
    alone = call(library, "gdn2", {name: x[:, 5:] for name, x in inputs.items()} | state, method=method)
    if method == "generic.chunk":
        within(library.numpy(padded.output)[:, 5:], library.numpy(alone.output), 1e-12)
        within(library.numpy(padded.final_state), library.numpy(alone.final_state), 1e-12)
        only = call(library, "gdn2", {name: x[:, :5] for name, x in inputs.items()} | state, method=method)
        bitwise(library.raw(only.final_state), drawn.state)
    else:
        bitwise(library.raw(padded.output)[:, 5:], library.raw(alone.output))
        bitwise(library.raw(padded.final_state), library.raw(alone.final_state))


@pytest.mark.parametrize("time", [1, 31, 33, 63, 65, 127, 129])
def test_f032_a_ragged_tail_does_not_decay_the_state(library, time):
    needs_every_length(library, time, (1, 65))
    drawn = M(28, 1, time, 3, 4)
    inputs = drawn.inputs() | {"delta_bias": np.ones(3)}
    options = {"delta_softplus": True}
    result, gradients = pull(library, "selective_scan", inputs, drawn.d_output, drawn.d_state, **options)
    truth = reference.forward("selective_scan", inputs, **options)
    within(library.numpy(result.output), truth.output, 1e-10)
    within(library.numpy(result.final_state), truth.final_state, 1e-10)
    wanted = reference.vjp("selective_scan", inputs, drawn.d_output, drawn.d_state, **options)
    for name, gradient in gradients.items():
        within(library.numpy(gradient), wanted[name], 1e-10, name)
    if time == 65:
        printed(library.numpy(result.final_state).sum(), "-1.646302747462")
