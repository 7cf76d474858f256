"""Field report F061: one sequence over several shards. (The half with two processes joins with the parallel layer.)"""

from __future__ import annotations

import numpy as np
import pytest
from calls import CHEAP_FORMS, GENERIC, pull
from draws import G, within

import scanfield

pytestmark = GENERIC


@pytest.mark.parametrize("method", CHEAP_FORMS)
def test_f061_every_shard_gets_the_gradients_of_the_whole(library, method):
    drawn = G(44, 1, 24, 2, 5, 3)
    inputs = drawn.inputs()
    whole, wanted = pull(
        library, "gdn2", inputs | {"initial_state": drawn.state}, drawn.d_output, drawn.d_state, method=method
    )
    wanted = library.numpys(wanted)

    parts = [
        {name: library.array(x[:, cut]) for name, x in inputs.items()}
        for cut in (slice(0, 10), slice(10, 24))
    ]
    start = library.array(drawn.state)
    maps = [scanfield.summarise(scanfield.gdn2, **part) for part in parts]

    # The state that enters the second shard, and the one that leaves it, from the shards' maps alone.
    def through(affine, state):
        step = affine.transition * state if affine.diagonal else affine.transition @ state
        return step + affine.state

    entering = through(maps[0], start)
    leaving = through(scanfield.compose(maps[0], maps[1]), start)
    within(library.numpy(leaving), library.numpy(whole.final_state), 1e-12)

    first = scanfield.apply(scanfield.gdn2, start, **parts[0], method=method)
    second = scanfield.apply(scanfield.gdn2, entering, **parts[1], method=method)
    within(library.numpy(first.final_state), library.numpy(entering), 1e-12)
    output = np.concatenate([library.numpy(first.output), library.numpy(second.output)], axis=1)
    within(output, library.numpy(whole.output), 1e-12)
    within(library.numpy(second.final_state), library.numpy(whole.final_state), 1e-12)

    # The second shard runs backwards first: the gradient of what entered it is the first one's final cotangent.
    _, pullback = scanfield.vjp(scanfield.gdn2, **parts[1], initial_state=entering, method=method)
    right = dict(pullback(library.array(drawn.d_output[:, 10:]), library.array(drawn.d_state)))
    _, pullback = scanfield.vjp(scanfield.gdn2, **parts[0], initial_state=start, method=method)
    left = dict(pullback(library.array(drawn.d_output[:, :10]), right["initial_state"]))
    within(library.numpy(left["initial_state"]), wanted["initial_state"], 1e-12)
    for name in inputs:
        joined = np.concatenate([library.numpy(left[name]), library.numpy(right[name])], axis=1)
        within(joined[:, :10], wanted[name][:, :10], 1e-12, f"{name}, first shard")
        within(joined[:, 10:], wanted[name][:, 10:], 1e-12, f"{name}, second shard")
