"""Field reports F019 to F022: which update a token makes, worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from calls import CHEAP_FORMS, GENERIC, call
from draws import within

pytestmark = GENERIC


@pytest.mark.parametrize("method", CHEAP_FORMS)
def test_f019_the_state_decays_before_it_is_read_for_the_correction(library, method):
    inputs = {
        "query": np.ones((1, 2, 1, 2)),
        "key": np.array([[1, 0], [0.6, 0.8]]).reshape(1, 2, 1, 2),
        "value": np.array([2.0, 3.0]).reshape(1, 2, 1, 1),
        "log_decay": np.array([[0, 0], [math.log(0.5), math.log(0.25)]]).reshape(1, 2, 1, 2),
        "erase": np.array([[1, 1], [0.5, 1]]).reshape(1, 2, 1, 2),
        "write": np.ones((1, 2, 1, 1)),
    }
    result = call(library, "gdn2", inputs, scale=1.0, method=method)
    within(library.numpy(result.output).ravel(), np.array([2, 4.78]), 1e-12)
    within(library.numpy(result.final_state)[0, 0], np.array([[2.62], [2.16]]), 1e-12)


@pytest.mark.parametrize("tiled", [False, True])
def test_f020_a_constant_b_is_in_the_returned_state(library, tiled):
    one = np.ones((1, 2, 1))
    inputs = {
        "u": one,
        "delta": one,
        "A": np.array([[math.log(0.5), math.log(0.25)]]),
        "B": np.array([[2.0, 3.0]]),
        "C": np.array([[1.0, 1.0]]),
    }
    if tiled:
        inputs |= {name: np.tile(inputs[name][None], (1, 2, 1)) for name in "BC"}
    result = call(library, "selective_scan", inputs)
    within(library.numpy(result.output).ravel(), np.array([5, 6.75]), 1e-12)
    within(library.numpy(result.final_state), np.array([[[3, 3.75]]]), 1e-12)


def test_f021_the_reversed_scan_is_right_for_every_length(library, dtype):
    inputs = {"a": np.ones((2, 9, 1)), "b": np.arange(18.0).reshape(2, 9, 1)}
    result = call(library, "linear_scan", inputs, dtype, reverse=True)
    wanted = [[36, 36, 35, 33, 30, 26, 21, 15, 8], [117, 108, 98, 87, 75, 62, 48, 33, 17]]
    assert np.array_equal(library.numpy(result.output)[..., 0], wanted)
    assert np.array_equal(library.numpy(result.final_state), [[36], [117]])
    # JAX compiles for half a second at every new length; there a few stand for all.
    for length in (1, 16, 17) if library.name == "jax" else range(1, 18):
        r = np.random.default_rng(2100 + length)
        inputs = {"a": r.uniform(0.5, 1, (2, length, 1)), "b": r.standard_normal((2, length, 1))}
        backward = call(library, "linear_scan", inputs, dtype, reverse=True)
        flipped = call(library, "linear_scan", {name: x[:, ::-1] for name, x in inputs.items()}, dtype)
        assert np.array_equal(library.raw(backward.output), library.raw(flipped.output)[:, ::-1]), length
        assert np.array_equal(library.raw(backward.final_state), library.raw(flipped.final_state)), length


@pytest.mark.parametrize("method", CHEAP_FORMS)
def test_f022_erase_and_write_act_channel_by_channel(library, method):
    inputs = {
        "query": np.array([1.0, 0]).reshape(1, 1, 1, 2),
        "key": np.array([0.6, 0.8]).reshape(1, 1, 1, 2),
        "value": np.array([10.0, 20]).reshape(1, 1, 1, 2),
        "log_decay": np.zeros((1, 1, 1, 2)),
        "erase": np.array([1.0, 0]).reshape(1, 1, 1, 2),
        "write": np.array([0, 1.0]).reshape(1, 1, 1, 2),
        "initial_state": np.array([[1.0, 2], [3, 4]]).reshape(1, 1, 2, 2),
    }
    state = np.array([[0.64, 13.28], [2.52, 19.04]])
    result = call(library, "gdn2", inputs, scale=1.0, method=method)
    within(library.numpy(result.final_state)[0, 0], state, 1e-12)
    within(library.numpy(result.output).ravel(), state[0], 1e-12)
    other = call(library, "gdn2", inputs | {"query": inputs["query"][..., ::-1]}, scale=1.0, method=method)
    within(library.numpy(other.output).ravel(), state[1], 1e-12)
    swapped = inputs | {"erase": inputs["write"], "write": inputs["erase"]}
    assert np.any(
        library.numpy(call(library, "gdn2", swapped, scale=1.0, method=method).final_state)[0, 0] != state
    )
