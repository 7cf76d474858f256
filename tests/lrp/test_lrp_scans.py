"""Relevance of the scans: golden values, gradient times input with detached gates, conservation, states with a stabiliser."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import reference
from arrays import Library, deviation, same_bits
from checks import operation
from examples import EXAMPLES, OPERATIONS, PACKED, Example, methods, op_inputs, rng_of, selective_inputs
from golden_adapter import OTHER_CASES, all_cases

import scanfield
from scanfield.lrp import Relevance, relevance, supports

GOLDEN = [case for case in all_cases() if case.op.endswith("_lrp")]
# The gate z has the half rule, which belongs to the block around the scan.
CASES = [Example(e.name, e.op, {n: x for n, x in e.inputs.items() if n != "z"}, e.options) for e in EXAMPLES]


def leave_out(backend: str, test: str, given: dict[str, Any]) -> bool:
    """Each call compiles anew on JAX and is hundreds of tasks on Dask: the golden cases and the base operations."""
    if backend not in ("jax", "dask"):
        return False
    if test == "test_gradient_times_input_with_detached_gates":
        return given["example"].name not in ("linear_scan: complex", "gdn2: plain")
    if backend == "jax" and given.get("dtype") == "float32":
        return True
    if test == "test_a_small_state_epsilon_changes_little":
        return (given["packed"], given["reverse"]) != (True, True)
    return test == "test_conservation" and given["op"] != "gdn2"


def value_of(op: str) -> str:
    return operation(op).record.relevant


def on(
    library: Library, op: str, inputs: dict[str, Any], R: Any, dtype: str = "float64", **options: Any
) -> Relevance:
    arrays = library.arrays(inputs, dtype)
    R_final = options.pop("R_final_state", None)
    given = [None if x is None else library.array(x, dtype) for x in (R, R_final)]

    def call(given: list[Any], arrays: dict[str, Any]) -> Relevance:
        return relevance(operation(op), given[0], **arrays, R_final_state=given[1], **options)

    return library.run(call, given, arrays)


def numbers(library: Library, report: Any) -> dict[str, np.ndarray]:
    return {name: library.numpy(x) for name, x in (*report._asdict().items(), ("gap", report.gap))}


# -- golden values ---------------------------------------------------------------------------------------------------


def test_every_relevance_case_is_here():
    assert len(GOLDEN) == OTHER_CASES["selective_scan_lrp"] + OTHER_CASES["gdn2_lrp"]


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case.name)
def test_golden(library: Library, dtype: str, case: Any):
    op = case.op.removesuffix("_lrp")
    inputs = dict(case.cast(dtype).inputs)
    R = inputs.pop("relevance")
    for method in (None, *methods(library, op)):
        if method is not None and (library.name in ("jax", "dask") or case.options.get("state_epsilon")):
            continue  # eager calls compile for seconds, or are many tasks; a stabiliser of states is generic alone
        chosen = {} if method is None else {"method": method}
        got = on(library, op, inputs, R, dtype, **case.options, **chosen)
        # The smallest output is divided by, 1/1188 of the largest: the chunk form's rounding of it shows 1188-fold.
        limit = 2 if (dtype, method) == ("float32", "generic.chunk") else 1
        assert case.error(f"expected/relevance_{value_of(op)}", library.raw(got.value), dtype) <= limit
        if "initial_state" in inputs:
            assert (
                case.error("expected/relevance_initial_state", library.raw(got.initial_state), dtype) <= limit
            )
        else:
            assert got.initial_state is None


# -- gradient times input --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("example", CASES, ids=lambda example: example.name)
def test_gradient_times_input_with_detached_gates(library: Library, example: Example):
    """The scan is linear in its value and state once the gates are fixed, and those inputs enter nowhere else."""
    op, value = example.op, value_of(example.op)
    truth = reference.forward(op, example.inputs, **example.options)
    rng = rng_of(example.name + " relevance")
    R, R_final = rng.standard_normal(truth.output.shape), rng.standard_normal(truth.final_state.shape)
    rho = (
        R * np.exp(1j * np.angle(truth.output))
        if np.iscomplexobj(truth.output)
        else R * np.sign(truth.output)
    )
    rho = rho / (np.abs(truth.output) + 1e-3)
    with np.errstate(invalid="ignore", divide="ignore"):
        rho_final = np.where(truth.final_state == 0, 0, R_final / np.conj(truth.final_state))
    gradients = reference.vjp(op, example.inputs, rho, rho_final, **example.options)
    got = on(library, op, dict(example.inputs), R, epsilon=1e-3, R_final_state=R_final, **example.options)
    want = np.real(np.conj(gradients[value]) * example.inputs[value])
    assert deviation(library.numpy(got.value), want) <= 1e-11
    if "initial_state" in example.inputs:
        want = np.real(np.conj(gradients["initial_state"]) * example.inputs["initial_state"])
        assert deviation(library.numpy(got.initial_state), want) <= 1e-11


# -- conservation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPERATIONS)
def test_conservation(library: Library, op: str):
    """Row by row: what goes in comes out, but for what the stabiliser took, which is told."""
    inputs = {n: x for n, x in op_inputs(op, f"{op} conserves", batch=4, time=6).items() if n != "z"}
    truth = reference.forward(op, inputs)
    rng = rng_of(f"{op} conserves R")
    R, R_final = rng.standard_normal(truth.output.shape), rng.standard_normal(truth.final_state.shape)
    for epsilon in (0.0, 1e-6, 0.1):
        got = on(library, op, inputs, R, epsilon=epsilon, R_final_state=R_final)
        found = numbers(library, got.report)
        size = float(np.max(np.abs(R / (np.abs(truth.output) + epsilon))))
        assert found["gap"].shape == (4,)
        assert np.max(np.abs(found["gap"])) <= 1e-12 * max(1.0, size)
        rows = R.reshape(4, -1).sum(-1) + R_final.reshape(4, -1).sum(-1)
        assert deviation(found["sum_out"], rows) <= 1e-13
        into = library.numpy(got.value).reshape(4, -1).sum(-1) + library.numpy(got.initial_state).reshape(
            4, -1
        ).sum(-1)
        assert np.max(np.abs(found["sum_in"] - into)) <= 1e-12 * max(1.0, size)
        stable = np.abs(truth.output) + epsilon
        leak = (R * epsilon / stable).reshape(4, -1).sum(-1)
        assert np.max(np.abs(found["leak_readout"] - leak)) <= 1e-12 * max(1.0, size)
        assert np.all(found["leak_state"] == 0)
        largest = max(np.max(np.abs(R) / stable), np.max(np.abs(R_final / truth.final_state)))
        assert deviation(found["largest_rho"], np.array([largest])) <= 1e-12
    one = on(
        library,
        op,
        {n: x if n in ("A", "D", "delta_bias", "dt_bias") else x[:1] for n, x in inputs.items()},
        R[:1],
    )
    four = on(library, op, inputs, R)
    assert deviation(library.numpy(one.value), library.numpy(four.value)[:1]) <= 1e-12
    assert (
        deviation(library.numpy(one.report.leak_readout), library.numpy(four.report.leak_readout)[:1]) <= 1e-9
    )


def test_relevance_of_an_output_that_is_zero(library: Library):
    """With epsilon 0 there is nothing to hand it to: it is told as a leak, and no NaN comes of it."""
    a, b = np.full((1, 3, 1), 0.5), np.array([[[0.0], [1.0], [-0.5]]])  # states 0, 1, 0
    got = on(library, "linear_scan", {"a": a, "b": b}, np.ones((1, 3, 1)), epsilon=0.0)
    assert library.numpy(got.value).ravel().tolist() == [0.0, 1.0, 0.0]
    assert numbers(library, got.report)["leak_readout"].tolist() == [2.0]


# -- a stabiliser at every state -------------------------------------------------------------------------------------


def stabilised(
    decay: np.ndarray, enters: np.ndarray, d_h: np.ndarray, last: np.ndarray, h: np.ndarray, epsilon: float
):
    """The closed form token by token: kappa g of every state, what the first state gets, and the leak."""
    time = decay.shape[1]
    states, g = [], last
    for t in range(time):
        h = decay[:, t] * h + enters[:, t]
        states.append(h)
    kappas = [np.abs(x) / (np.abs(x) + epsilon) for x in states]
    received, leak = np.zeros_like(d_h), 0.0
    for t in reversed(range(time)):
        g = d_h[:, t] + g
        received[:, t] = kappas[t] * g
        leak += np.real(np.sum((1 - kappas[t]) * np.conj(g) * states[t]))
        g = np.conj(decay[:, t]) * kappas[t] * g
    return received, g, leak


@pytest.mark.parametrize("complex_", [False, True], ids=["real", "complex"])
def test_state_epsilon_of_a_selective_scan(library: Library, complex_: bool):
    name = f"state epsilon {complex_}"
    inputs = {n: x for n, x in selective_inputs(name, time=9, complex_=complex_).items() if n != "z"}
    u, B, C, A, h = (inputs[n] for n in ("u", "B", "C", "A", "initial_state"))
    s = reference.softplus(inputs["delta"] + inputs["delta_bias"])
    truth = reference.forward("selective_scan", inputs, delta_softplus=True)
    R = rng_of(name).standard_normal(u.shape)
    R_final = rng_of(name + " final").standard_normal(h.shape)
    rho = R * np.sign(truth.output) / (np.abs(truth.output) + 1e-6)
    decay = np.exp(s[..., None] * A)
    enters = (s * u)[..., None] * B[:, :, None, :]
    d_h = (2 if complex_ else 1) * rho[..., None] * np.conj(C)[:, :, None, :]
    received, first, leak = stabilised(decay, enters, d_h, R_final / np.conj(truth.final_state), h, 0.05)
    want_u = u * (inputs["D"] * rho + s * np.real(np.sum(received * np.conj(B)[:, :, None, :], axis=-1)))
    for chunk in (None, 4):
        got = on(
            library, "selective_scan", inputs, R, R_final_state=R_final, state_epsilon=0.05, delta_softplus=True,
            chunk_size=chunk,
        )  # fmt: skip
        assert deviation(library.numpy(got.u), want_u) <= 1e-11
        assert deviation(library.numpy(got.initial_state), np.real(np.conj(first) * h)) <= 1e-11
        found = numbers(library, got.report)
        assert abs(found["leak_state"].sum() - leak) <= 1e-10 * max(1, abs(leak))
        assert np.max(np.abs(found["gap"])) <= 1e-10


@pytest.mark.parametrize("complex_", [False, True], ids=["real", "complex"])
def test_state_epsilon_of_a_linear_scan(library: Library, complex_: bool):
    rng = rng_of(f"state epsilon linear {complex_}")
    a, b = rng.uniform(-1, 1, (2, 5, 3)), rng.standard_normal((2, 5, 3))
    h = rng.standard_normal((2, 3))
    if complex_:
        a, b, h = a * np.exp(1j * rng.uniform(-3, 3, a.shape)), b + 0.5j, h - 0.3j
    y = reference.forward("linear_scan", {"a": a, "b": b, "initial_state": h}).output
    R = rng.standard_normal(y.shape)
    rho = R * y / np.abs(y) / (np.abs(y) + 1e-6)
    received, first, leak = stabilised(a, b, rho, np.zeros_like(h), h, 0.02)
    got = on(library, "linear_scan", {"a": a, "b": b, "initial_state": h}, R, state_epsilon=0.02)
    assert deviation(library.numpy(got.b), np.real(np.conj(received) * b)) <= 1e-11
    assert deviation(library.numpy(got.initial_state), np.real(np.conj(first) * h)) <= 1e-11
    found = numbers(library, got.report)
    assert abs(found["leak_state"].sum() - leak) <= 1e-10 * max(1, abs(leak))
    assert np.max(np.abs(found["gap"])) <= 1e-9


@pytest.mark.parametrize("op", ["linear_scan", "selective_scan"])
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_a_small_state_epsilon_changes_little(library: Library, op: str, packed: bool, reverse: bool):
    options = {"reverse": reverse, **({"cu_seqlens": PACKED} if packed else {})}
    states = len(PACKED) - 1 if packed else None
    batch = 1 if packed else 2
    inputs = {n: x for n, x in op_inputs(op, f"{op} tiny", batch, 7, states).items() if n != "z"}
    truth = reference.forward(op, inputs, **options)
    R = rng_of(f"{op} tiny R").standard_normal(truth.output.shape)
    R = R * np.abs(truth.output)  # no output blows its relevance up
    plain = on(library, op, inputs, R, epsilon=0.0, **options)
    close = on(library, op, inputs, R, epsilon=0.0, state_epsilon=1e-9, **options)
    for name in ("value", "initial_state"):
        assert deviation(library.numpy(getattr(close, name)), library.numpy(getattr(plain, name))) <= 1e-6
    assert np.max(np.abs(numbers(library, close.report)["gap"])) <= 1e-12 * np.max(np.abs(R)) * R.size


def test_a_shared_input_gathers_the_relevance_of_every_token(library: Library):
    a, b = np.full((2, 4, 3), 0.5), rng_of("shared b").standard_normal((1, 1, 3))
    R = np.ones((2, 4, 3))
    full = on(
        library, "linear_scan", {"a": a, "b": np.broadcast_to(b, a.shape).copy()}, R, state_epsilon=0.01
    )
    got = on(library, "linear_scan", {"a": a, "b": b}, R, state_epsilon=0.01)
    assert deviation(library.numpy(got.b), library.numpy(full.b).sum((0, 1), keepdims=True)) <= 1e-12
    assert numbers(library, got.report)["sum_out"].tolist() == [24.0]  # rows cannot be told apart


# -- precision -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("low", ["float16", "bfloat16"])
def test_half_precision_gives_relevance_in_float32(library: Library, low: str):
    if low not in library.dtypes:
        pytest.skip(f"{library.name} has no {low} here")
    inputs = op_inputs("gdn2", "half relevance")
    R = np.ones(reference.forward("gdn2", inputs).output.shape)
    arrays = library.arrays(inputs, low)
    got = relevance(scanfield.gdn2, library.array(R, "float32"), **arrays)
    assert library.dtype(got.value) == library.dtype(got.initial_state) == "float32"


def test_arrays_by_position_and_by_name():
    inputs = op_inputs("gdn2", "relevance by name")
    R = np.ones(reference.forward("gdn2", inputs).output.shape)
    want = relevance(scanfield.gdn2, R, **inputs)
    first = [inputs.pop(name) for name in ("query", "key")]
    assert same_bits(relevance(scanfield.gdn2, R, *first, **inputs).value, want.value)


def test_twice_the_same_bits(library: Library):
    inputs = op_inputs("gdn2", "same relevance")
    R = np.ones(reference.forward("gdn2", inputs).output.shape)
    first, second = (on(library, "gdn2", inputs, R) for _ in range(2))
    assert same_bits(library.raw(first.value), library.raw(second.value))


# -- what is refused -------------------------------------------------------------------------------------------------


def test_a_report_is_a_table_of_sums():
    a, b = np.full((2, 3, 1), 0.5), np.ones((2, 3, 1))
    found = relevance(scanfield.linear_scan, b, a, b)
    assert found.b is found.u is found.x is found.value
    told = dict(line.split() for line in str(found.report).splitlines())
    assert list(told) == [*found.report._fields, "gap"]
    assert float(told["sum_out"]) == pytest.approx(6.0) and abs(float(told["gap"])) < 1e-12


def test_supports():
    assert [op for op in OPERATIONS if supports(operation(op), "state_epsilon")] == [
        "linear_scan",
        "selective_scan",
    ]
    assert all(supports(operation(op), "epsilon") for op in OPERATIONS)
    with pytest.raises(
        scanfield.ArgumentError, match="rule: 'gamma'; the rules of scans are 'epsilon', 'state_epsilon'"
    ):
        supports(scanfield.gdn2, "gamma")
    with pytest.raises(scanfield.ArgumentError, match="is no scan of scanfield"):
        supports(len, "epsilon")


def refused(library: Library, op: str, **changes: Any) -> pytest.ExceptionInfo[scanfield.ScanfieldError]:
    inputs = {n: x for n, x in op_inputs(op, f"{op} refused", time=3).items() if n != "z"}
    R = changes.pop("R_output", np.ones(reference.forward(op, inputs).output.shape))
    arrays = library.arrays(inputs)
    R = library.array(R) if isinstance(R, np.ndarray) else R
    with pytest.raises(scanfield.ScanfieldError) as caught:
        relevance(operation(op), R, **arrays, **changes)
    return caught


def test_bad_input_is_named(library: Library):
    z = library.array(np.ones((2, 3, 4)))
    assert "z: relevance of a gated output is the half rule's" in str(
        refused(library, "selective_scan", z=z).value
    )
    assert "gdn2 mixes its states" in str(refused(library, "gdn2", state_epsilon=1e-6).value)
    assert "epsilon: -1.0; allowed" in str(refused(library, "gdn2", epsilon=-1.0).value)
    assert "epsilon: nan; allowed" in str(refused(library, "gdn2", epsilon=float("nan")).value)
    assert "states_at: not in relevance" in str(refused(library, "gdn2", states_at=[1]).value)
    assert "both are None" in str(refused(library, "gdn2", R_output=None).value)
    assert "R_output: shape (1, 3, 4, 4)" in str(
        refused(library, "gdn2", R_output=np.ones((1, 3, 4, 4))).value
    )
    assert "gdn2: unknown keyword 'rule'" in str(refused(library, "gdn2", rule="epsilon").value)
    caught = refused(library, "linear_scan", R_final_state=library.array(np.ones((7, 7))))
    assert "R_final_state: shape (7, 7)" in str(caught.value)
    if library.name != "strict":
        caught = refused(library, "linear_scan", R_output=np.ones((2, 3, 3)) * 1j)
        assert "relevance is real" in str(caught.value)


def test_a_method_without_state_epsilon_says_so():
    u = np.ones((1, 3, 2))
    pytest.importorskip("numba")
    with pytest.raises(scanfield.BackendError, match=r"'numpy.numba' has no state_epsilon"):
        relevance(
            scanfield.selective_scan, u, u, u, -np.ones((2, 3)), np.ones((1, 3, 3)), np.ones((1, 3, 3)),
            state_epsilon=0.1, method="numpy.numba",
        )  # fmt: skip


@pytest.mark.parametrize("turn", [1.0, 1j])
@pytest.mark.backend("numpy", "strict", "torch")  # XLA takes subnormal numbers for zeros
def test_subnormal_outputs_pass_relevance_on(library: Library, turn: complex):
    """A complex one had none of 1 / size, and NaN came."""
    kind = "complex64" if turn == 1j else "float32"
    b = np.array([[[1e-40, -2e-40]]])
    arrays = [library.array(x.astype(kind), None) for x in (np.full((1, 1, 2), 0.5), b * turn)]
    R = library.array(np.abs(b).astype("float32"), None)
    found = relevance(scanfield.linear_scan, R, *arrays, epsilon=0.0)
    np.testing.assert_allclose(library.numpy(found.value), np.abs(b), rtol=1e-4)
