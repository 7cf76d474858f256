"""Field reports F023, F024, F026 to F030: carrying a state on, and how it is laid out.

The halves of F029 and all of F025 that call adapters join with `compat`.
"""

from __future__ import annotations

import numpy as np
import pytest
from calls import CHEAP_FORMS, GENERIC, call, pull
from draws import G, M, bitwise, printed, within

import scanfield

pytestmark = GENERIC


@pytest.mark.parametrize("operation", ["gdn2", "selective_scan"])
def test_f023_a_cut_anywhere_changes_nothing(library, dtype, operation):
    if operation == "gdn2":
        drawn = G(22, 1, 33, 2, 6, 5)
        sequences, shared = drawn.inputs(), {}
    else:
        drawn = M(22, 1, 33, 4, 3)
        sequences = drawn.inputs()
        shared = {"A": sequences.pop("A")}
    tolerance = {"float64": 1e-12, "float32": 2e-6}[dtype]
    whole = call(library, operation, sequences | shared | {"initial_state": drawn.state}, dtype)
    output, final_state = library.numpy(whole.output), library.numpy(whole.final_state)
    given, common = library.arrays(sequences, dtype), library.arrays(shared, dtype)
    state = library.array(drawn.state, dtype)
    function = getattr(scanfield, operation)
    # JAX compiles for half a second at every new length; there a few cuts stand for all.
    for k in (0, 17) if library.name == "jax" else range(34):
        left = function(**{n: x[:, :k, ...] for n, x in given.items()}, **common, initial_state=state)
        right = function(
            **{n: x[:, k:, ...] for n, x in given.items()}, **common, initial_state=left.final_state
        )
        joined = np.concatenate([library.numpy(left.output), library.numpy(right.output)], axis=1)
        within(joined, output, tolerance, f"cut at {k}")
        within(library.numpy(right.final_state), final_state, tolerance, f"state, cut at {k}")
    if operation == "gdn2" and dtype == "float64":
        printed(output.sum(), "-5.126685518587")
        printed(final_state.sum(), "1.169678308071")


@pytest.mark.parametrize("method", CHEAP_FORMS)
def test_f024_alone_batched_or_packed_a_row_is_the_same(library, method):
    drawn = G(23, 3, 50, 2, 8, 5)
    inputs = drawn.inputs()
    zeros = np.zeros_like(drawn.state)
    d_output, d_state = drawn.d_output, drawn.d_state

    def host(result, gradients):
        named = {"output": result.output, "final_state": result.final_state} | gradients
        return {name: library.raw(x) for name, x in named.items()}

    batch = host(*pull(library, "gdn2", inputs, d_output, d_state, "float32", method=method))
    from_zeros = pull(
        library, "gdn2", inputs | {"initial_state": zeros}, d_output, d_state, "float32", method=method
    )
    from_zeros = host(*from_zeros)
    for name, x in batch.items():
        bitwise(from_zeros[name], x, f"{name}, None against zeros")

    for row in range(3):
        one = {name: x[row : row + 1] for name, x in inputs.items()}
        cotangents = d_output[row : row + 1], d_state[row : row + 1]
        alone = host(*pull(library, "gdn2", one, *cotangents, "float32", method=method))
        for name, x in alone.items():
            within(x, batch[name][row : row + 1], 1e-6, f"{name} of row {row}")

    def end_to_end(x):
        return x.reshape(1, 150, *x.shape[2:])

    packed = host(
        *pull(
            library, "gdn2", {name: end_to_end(x) for name, x in inputs.items()}, end_to_end(d_output), d_state,
            "float32", method=method, cu_seqlens=[0, 50, 100, 150],
        )
    )  # fmt: skip
    for name, x in packed.items():
        wanted = batch[name] if name == "final_state" else end_to_end(batch[name])
        within(x, wanted, 2e-6, f"{name}, packed")


def memory(library, x):
    """What identifies the memory behind an array, as a NumPy view of it."""
    if library.name == "torch":
        return x.numpy()
    return x._array if library.name == "strict" else x


def test_f026_states_are_never_written_in_place(library):
    drawn = G(24, 1, 10, 2, 4, 3)
    given = library.arrays(drawn.inputs())

    def token(t):
        return {name: x[:, t, ...] for name, x in given.items()}

    def decode(state, tokens):
        outputs = []
        for t in tokens:
            before = None if state is None else library.raw(state).copy()
            y, new = scanfield.gdn2.step(state, **token(t))
            if state is not None:
                bitwise(library.raw(state), before, "the state passed in")
                if library.name not in (
                    "jax",
                    "dask",
                ):  # whose arrays cannot be written at all, and have no memory yet
                    assert not np.shares_memory(memory(library, state), memory(library, new))
            state = new
            states.append(new)
            outputs.append(library.raw(y))
        return outputs, state

    states = []
    decode(None, range(10))
    after_six, first = states[5], [library.raw(state).copy() for state in states]
    branch, branch_state = decode(after_six, [7, 8, 9])
    states = states[:10]
    for kept, copy in zip(states, first, strict=True):
        bitwise(library.raw(kept), copy, "a kept state")
    fresh, fresh_state = decode(None, [0, 1, 2, 3, 4, 5, 7, 8, 9])
    for one, other in zip(branch, fresh[6:], strict=True):
        bitwise(one, other, "the second branch")
    bitwise(library.raw(branch_state), library.raw(fresh_state))

    initial = library.array(drawn.state)
    runs = [scanfield.gdn2(**given, initial_state=initial) for _ in range(2)]
    bitwise(library.raw(runs[0].output), library.raw(runs[1].output))
    bitwise(library.raw(initial), drawn.state)
    for time in (10, 0):
        cut = {name: x[:, :time, ...] for name, x in given.items()}
        result = scanfield.gdn2(**cut, initial_state=initial)
        if library.name not in ("jax", "dask"):
            assert not np.shares_memory(memory(library, initial), memory(library, result.final_state)), (
                f"T = {time}"
            )


def test_f027_truncated_training_gets_every_gradient(library):
    drawn = M(25, 2, 20, 4, 3)
    inputs = drawn.inputs("D", "z", "delta_bias") | {"initial_state": drawn.state}
    options = {"delta_softplus": True}
    _, whole = pull(library, "selective_scan", inputs, drawn.d_output, drawn.d_state, **options)
    whole = library.numpys(whole)

    shared = ("A", "D", "delta_bias")
    halves = [
        {name: x if name in shared else x[:, part] for name, x in inputs.items() if name != "initial_state"}
        for part in (slice(0, 10), slice(10, 20))
    ]
    first = call(library, "selective_scan", halves[0] | {"initial_state": drawn.state}, **options)
    carried = library.numpy(first.final_state)
    _, right = pull(
        library,
        "selective_scan",
        halves[1] | {"initial_state": carried},
        drawn.d_output[:, 10:],
        drawn.d_state,
        **options,
    )
    right = library.numpys(right)
    _, left = pull(
        library, "selective_scan", halves[0] | {"initial_state": drawn.state}, drawn.d_output[:, :10],
        right["initial_state"], **options,
    )  # fmt: skip
    left = library.numpys(left)
    for name, x in whole.items():
        if name in shared:
            within(left[name] + right[name], x, 1e-12, name)
        elif name == "initial_state":
            within(left[name], x, 1e-12, name)
        else:
            within(np.concatenate([left[name], right[name]], axis=1), x, 1e-12, name)
    printed(whole["initial_state"].sum(), "1.349896715621")
    printed(whole["A"].sum(), "6.336323285612")


@pytest.mark.parametrize("method", CHEAP_FORMS)
def test_f028_heads_are_not_time(library, method):
    inputs = G(26, 1, 5, 7, 4, 6).inputs()
    result = call(library, "gdn2", inputs, method=method)
    output, final_state = library.numpy(result.output), library.numpy(result.final_state)
    assert output.shape == (1, 5, 7, 6) and final_state.shape == (1, 7, 4, 6)
    for head in range(7):
        alone = call(
            library, "gdn2", {name: x[:, :, head : head + 1] for name, x in inputs.items()}, method=method
        )
        within(library.numpy(alone.output), output[:, :, head : head + 1], 1e-12)
        within(library.numpy(alone.final_state), final_state[:, head : head + 1], 1e-12)


def test_f029_the_state_is_key_by_value(library):
    drawn = G(7, 1, 1, 2, 16, 24)
    result = call(library, "gdn2", drawn.inputs())
    wanted = drawn.key[:, 0, :, :, None] * (drawn.write * drawn.value)[:, 0, :, None, :]
    assert wanted.shape == (1, 2, 16, 24)
    within(library.numpy(result.final_state), wanted, 1e-12)
    with pytest.raises(scanfield.ShapeError) as refused:
        call(library, "gdn2", drawn.inputs() | {"initial_state": np.zeros((1, 2, 24, 16))})
    for words in ("initial_state", "(1, 2, 24, 16)", "(1, 2, 16, 24)"):
        assert words in str(refused.value)


def test_f030_a_group_serves_consecutive_channels(library):
    one = np.ones((1, 1, 4))
    B = np.array([1.0, 10.0]).reshape(1, 1, 2, 1)
    inputs = {"u": one, "delta": one, "A": np.zeros((4, 1)), "B": B, "C": np.ones((1, 1, 1))}
    output = library.numpy(call(library, "selective_scan", inputs).output)
    assert np.array_equal(output.ravel(), [1, 1, 10, 10])
    dual = {"x": one[..., None], "dt": one, "A": np.zeros(4), "B": B, "C": np.ones((1, 1, 2, 1))}
    assert np.array_equal(library.numpy(call(library, "ssd", dual).output).ravel(), [1, 1, 10, 10])

    three = inputs | {"u": one[..., :3], "delta": one[..., :3], "A": np.zeros((3, 1))}
    with pytest.raises(scanfield.ShapeError) as refused:
        call(library, "selective_scan", three)
    assert "B" in str(refused.value) and "3" in str(refused.value) and "2" in str(refused.value)
    with pytest.raises(scanfield.ShapeError) as refused:
        call(library, "ssd", dual | {"x": one[..., :3, None], "dt": one[..., :3], "A": np.zeros(3)})
    assert "B" in str(refused.value) and "3" in str(refused.value) and "2" in str(refused.value)
