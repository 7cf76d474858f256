"""The truth is itself checked: against the golden cases (made by other means) and against differences of
itself.
"""

from __future__ import annotations

import numpy as np
import pytest
import reference
from arrays import deviation
from examples import BASE, EXAMPLES, Example, examples
from golden_adapter import OTHER_CASES, SCAN_CASES, GoldenCall, all_cases, scan_cases


def test_no_golden_case_is_lost():
    counted: dict[str, int] = {}
    for case in all_cases():
        counted[case.op] = counted.get(case.op, 0) + 1
    assert counted == {**SCAN_CASES, **OTHER_CASES}
    assert len(scan_cases()) == sum(SCAN_CASES.values()) == 38


@pytest.mark.parametrize("call", scan_cases(), ids=lambda call: call.case.name)
def test_reference_meets_the_golden_cases(call: GoldenCall):
    case = call.case
    truth = reference.forward(case.op, call.inputs, **call.options)
    assert case.error("expected/output", truth.output) <= 1
    assert case.error("expected/final_state", truth.final_state) <= 1
    if case.op in reference.WRITTEN_VJPS:
        got = reference.vjp(
            case.op, call.inputs, case.cotangents["output"], case.cotangents["final_state"], **call.options
        )
        assert set(got) == set(case.gradients)
        for name, gradient in got.items():
            assert case.error(f"gradient/{name}", gradient) <= 1, name


@pytest.mark.parametrize("example", examples(*BASE), ids=repr)
def test_written_gradients_equal_differences(example: Example):
    """MATH's token gradients of the three base operations against extended-precision differences of the
    recurrence.
    """
    written = example.gradients()
    differences = reference.numeric_vjp(example.op, example.inputs, *example.cotangents(), **example.options)
    assert set(written) == set(differences) == set(example.inputs)
    for name, gradient in differences.items():
        assert written[name].dtype == gradient.dtype
        assert deviation(written[name], gradient) < 1e-11, name


def test_reverse_is_a_flip_and_packed_is_separate():
    """The two ways to walk time are written once in the reference: check them on one operation by hand."""
    rng = np.random.default_rng(3)
    a, b, state = rng.uniform(0, 1, (1, 6, 2)), rng.standard_normal((1, 6, 2)), rng.standard_normal((3, 2))
    flipped = reference.linear_scan(a[:, ::-1], b[:, ::-1], state[:1])
    back = reference.linear_scan(a, b, state[:1], reverse=True)
    assert np.array_equal(back.output, flipped.output[:, ::-1])
    assert np.array_equal(back.final_state, flipped.final_state)
    assert np.array_equal(back.states[:, 0], back.final_state) and np.array_equal(
        back.states[:, 6], state[:1]
    )
    packed = reference.linear_scan(a, b, state, cu_seqlens=[0, 2, 2, 6])
    first = reference.linear_scan(a[:, :2], b[:, :2], state[:1])
    last = reference.linear_scan(a[:, 2:], b[:, 2:], state[2:])
    assert np.array_equal(packed.output, np.concatenate([first.output, last.output], axis=1))
    assert np.array_equal(
        packed.final_state, np.concatenate([first.final_state, state[1:2], last.final_state])
    )


def test_derived_recurrences_equal_gdn2_with_their_gates():
    """Two ways to the same numbers: each paper's recurrence, and gdn2 with the gates the paper's rule amounts
    to.
    """
    rng = np.random.default_rng(5)
    q, k = rng.standard_normal((2, 5, 2, 3)), rng.standard_normal((2, 5, 2, 3))
    v, g = rng.standard_normal((2, 5, 4, 6)), -rng.uniform(0, 2, (2, 5, 4, 3))
    beta, state = rng.uniform(0, 1, (2, 5, 4)), rng.standard_normal((2, 4, 3, 6))
    pairs = [
        (reference.linear_attention(q, k, v, state), reference.gdn2(q, k, v, initial_state=state)),
        (reference.gla(q, k, v, g, state), reference.gdn2(q, k, v, g, initial_state=state)),
        (reference.delta_rule(q, k, v, beta, state), reference.gdn2(q, k, v, None, beta, beta, state)),
        (
            reference.gated_delta_rule(q, k, v, g[..., 0], beta, state),
            reference.gdn2(q, k, v, g[..., 0], beta, beta, state),
        ),
        (reference.kda(q, k, v, g, beta, state), reference.gdn2(q, k, v, g, beta, beta, state)),
    ]
    for derived, base in pairs:
        for got, want in zip(derived, base, strict=True):
            assert deviation(got, want) < 1e-14


def test_example_names_are_unique():
    assert len({e.name for e in EXAMPLES}) == len(EXAMPLES)
