"""Every golden scan case, forward and all gradients, by every candidate; and by the library's own autodiff."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from arrays import Library, deviation
from checks import operation, vjp
from examples import METHODS
from golden_adapter import SCAN_CASES, GoldenCall, as_call, scan_cases, time_steps

import scanfield

CALLS = scan_cases()
RUNS = [
    pytest.param(call, method, id=f"{call.case.name}-{method or 'default'}")
    for call in CALLS
    for method in (None, *METHODS[call.case.op])
]


def test_every_scan_case_is_here():
    """A case that the loader or the adapter dropped would otherwise pass unseen."""
    counted = {op: sum(call.case.op == op for call in CALLS) for op in SCAN_CASES}
    assert counted == SCAN_CASES
    assert len(CALLS) == 38
    assert len(RUNS) == sum(1 + len(METHODS[call.case.op]) for call in CALLS)
    for call in CALLS:  # and none of its arrays is left out
        compared = {"expected/output", "expected/final_state", *(f"gradient/{n}" for n in call.inputs)}
        assert compared == set(call.case.keys()), call.case.name


def leave_out(backend: str, test: str, given: dict[str, Any]) -> bool:
    """Dask: a time step of a generic form is hundreds of tasks, so the shortest cases only. JAX: a case in float32
    compiles all anew, and a method that runs by itself is not forced once more.
    """
    if backend == "dask" and given.get("method", "") is not None:
        steps = time_steps(given["call"]) if "call" in given else given.get("geometry", (0, 0, 99))[2]
        return steps > 6 or given.get("dtype") == "float32"
    if backend == "jax" and test == "test_golden":
        chosen_by_size = given["method"] is None
        return not chosen_by_size and (given["dtype"] == "float32" or given["method"] != "generic.recurrent")
    if backend == "jax" and test == "test_burn_geometries":
        return given["method"] != "jax.scan" or given["chunk_size"] not in (6, 64)
    return False


@pytest.mark.parametrize(("call", "method"), RUNS)
def test_golden(library: Library, dtype: str, call: GoldenCall, method: str | None):
    case = call.case
    cotangents = case.cotangents["output"], case.cotangents["final_state"]
    options = call.options if method is None else {**call.options, "method": method}
    # What runs by itself in the usual dtype is compiled as users compile it; the others may be compiled quickly.
    users = method is None and dtype == "float32"
    with library.as_users_compile() if users else nullcontext():
        got = vjp(library, case.op, call.inputs, cotangents, dtype, **options)
    found: dict[str, Any] = {"expected/output": got.output, "expected/final_state": got.final_state}
    found |= {f"gradient/{name}": gradient for name, gradient in got.gradients.items()}
    assert set(found) == set(case.keys())
    errors = {key: case.error(key, library.raw(x), dtype) for key, x in found.items()}
    assert all(error <= 1 for error in errors.values()), {k: e for k, e in errors.items() if not e <= 1}


# -- the library's own autodiff through the same code --------------------------------------------------------
@pytest.mark.backend("torch")
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.case.name)
def test_torch_autograd(library: Library, call: GoldenCall):
    torch = pytest.importorskip("torch")
    case = call.case
    inputs = {n: x.requires_grad_() for n, x in library.arrays(call.inputs, "float64").items()}
    result = operation(case.op)(**inputs, **call.options)
    loss = torch.zeros((), dtype=torch.float64)
    for name, x in zip(("output", "final_state"), result, strict=True):
        loss = loss + (library.array(case.cotangents[name]).conj() * x).real.sum()
    for name, gradient in zip(inputs, torch.autograd.grad(loss, list(inputs.values())), strict=True):
        assert case.error(f"gradient/{name}", library.raw(gradient)) <= 1, name


@pytest.mark.backend("jax")
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.case.name)
def test_jax_grad(library: Library, call: GoldenCall):
    """`jax.grad` of a real loss is the conjugate of the torch rule that the cases use."""
    jax = pytest.importorskip("jax")
    jnp = library.xp
    case = call.case
    cotangents = [library.array(case.cotangents[name]) for name in ("output", "final_state")]

    def loss(inputs: dict[str, Any]) -> Any:
        result = operation(case.op)(**inputs, **call.options)
        return sum(jnp.real(jnp.conj(c) * x).sum() for c, x in zip(cotangents, result, strict=True))

    for name, gradient in jax.jit(jax.grad(loss))(library.arrays(call.inputs)).items():
        assert case.error(f"gradient/{name}", np.conj(library.raw(gradient))) <= 1, name


# -- the four geometries of the Burn tests -------------------------------------------------------------------
# Element i of the flat (batch, heads, time, dim) array is ((i * stride) mod modulus) / modulus + offset.
BURN_DATA = {
    "query": (3, 23, -0.35),
    "key": (5, 29, -0.25),
    "value": (7, 31, -0.2),
    "erase": (11, 37, 0.1),
    "write": (13, 41, 0.2),
    "log_decay": (17, 43, -1.2),
    "initial_state": (19, 47, -0.1),
    "weights": (23, 53, -0.3),
}
# The geometries that no golden case holds: sums over all elements of float64 results, and Frobenius norms
# ("norm").
BURN_SUMS = {
    (1, 2, 9, 5, 37): {
        "output": 19.3103001800,
        "loss": 3.7492770984,
        "final_state": 26.9933888097,
        "query": 31.466830663,
        "key": 5.515600822,
        "value": 8.791976978,
        "log_decay": 6.372396920,
        "erase": -1.245118552,
        "write": 3.816537808,
        "initial_state": 3.108187497,
        "norm query": 3.964616179,
        "norm key": 1.386776269,
        "norm log_decay": 1.463897758,
    },
    (1, 4, 12, 64, 128): {
        "output": 56078.9796390225,
        "loss": 10423.7727971663,
        "final_state": 8923018.1427931543,
        "query": 138720.958157935,
        "key": 700577.772897863,
        "value": -3676.725611960,
        "log_decay": 132067.426402256,
        "erase": 281335.834289400,
        "write": -1116.717417587,
        "initial_state": 29098.519549773,
        "norm query": 25268.661861916,
        "norm key": 38594.510525413,
        "norm log_decay": 7311.496417933,
    },
}
BURN_CASES = {(1, 2, 5, 3, 4): "gdn2_burn_1_2_5_3_4", (1, 2, 64, 16, 32): "gdn2_burn_1_2_64_16_32"}
CHUNK_SIZES = (2, 4, 6, 64)


def burn_data(B: int, H: int, T: int, K: int, V: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The seven inputs of the public API, and the weights of the loss."""
    made = {}
    for name, (stride, modulus, offset) in BURN_DATA.items():
        width = V if name in ("value", "write", "weights") else K
        shape = (B, H, K, V) if name == "initial_state" else (B, H, T, width)
        flat = (np.arange(np.prod(shape)) * stride) % modulus / modulus + offset
        made[name] = (
            flat.reshape(shape) if name == "initial_state" else flat.reshape(shape).transpose(0, 2, 1, 3)
        )
    weights = made.pop("weights")
    return made, weights


@pytest.mark.parametrize("method", METHODS["gdn2"])
@pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
@pytest.mark.parametrize("geometry", [*BURN_CASES, *BURN_SUMS], ids=str)
def test_burn_geometries(library: Library, geometry: tuple[int, ...], chunk_size: int, method: str):
    inputs, weights = burn_data(*geometry)
    options = {"chunk_size": chunk_size, "method": method}
    if geometry in BURN_CASES:  # every element, and with a cotangent of the final state
        (call,) = (c for c in CALLS if c.case.name == BURN_CASES[geometry])
        for name, x in inputs.items():
            assert deviation(x, call.inputs[name]) < 1e-15, name
        case = as_call(call.case).case
        got = vjp(
            library,
            "gdn2",
            call.inputs,
            (case.cotangents["output"], case.cotangents["final_state"]),
            **options,
        )
        assert case.error("expected/output", library.raw(got.output)) <= 1
        assert case.error("expected/final_state", library.raw(got.final_state)) <= 1
        for name, gradient in got.gradients.items():
            assert case.error(f"gradient/{name}", library.raw(gradient)) <= 1, name
        return
    got = vjp(library, "gdn2", inputs, (weights, None), **options)
    output, state = library.numpy(got.output), library.numpy(got.final_state)
    found = {"output": output.sum(), "loss": (output * weights).sum(), "final_state": state.sum()}
    for name, gradient in library.numpys(got.gradients).items():
        found[name] = gradient.sum()
        found[f"norm {name}"] = np.linalg.norm(gradient)
    # The table has ten digits after the point, and a sum may cancel: the size of the terms sets the scale.
    terms = {
        "output": np.abs(output).sum(),
        "loss": np.abs(output * weights).sum(),
        "final_state": np.abs(state).sum(),
    }
    terms |= {name: np.abs(g).sum() for name, g in library.numpys(got.gradients).items()}
    for name, want in BURN_SUMS[geometry].items():
        size = terms.get(name, abs(want))
        assert abs(found[name] - want) <= 1e-9 + 1e-12 * size, (name, found[name], want)


@pytest.mark.parametrize("method", METHODS["gdn2"])
def test_burn_tolerance_in_float32(library: Library, method: str):
    """The tolerance of the tests we follow, 3e-3 + 3e-3 max|ref|, on the geometry whose states reach 1680."""
    inputs, weights = burn_data(1, 4, 12, 64, 128)
    want = vjp(library, "gdn2", inputs, (weights, None), "float64", method=method)
    got = vjp(library, "gdn2", inputs, (weights, None), "float32", method=method, chunk_size=6)
    pairs = {"output": (got.output, want.output), "final_state": (got.final_state, want.final_state)}
    pairs |= {name: (got.gradients[name], want.gradients[name]) for name in want.gradients}
    assert float(np.max(np.abs(library.numpy(want.final_state)))) > 1000
    for name, (low, high) in pairs.items():
        low, high = library.numpy(low), library.numpy(high)
        assert np.max(np.abs(low - high)) <= 3e-3 + 3e-3 * np.max(np.abs(high)), name


def test_the_table_of_candidates_is_the_registry_s():
    """`METHODS` drives all tests of "every candidate": a form added to the library must be added there."""
    from scanfield.dispatch import Derived, manifests

    for record in scanfield.operations():
        base = record.base if isinstance(record, Derived) else record
        forms = {f"generic.{form}" for form in base.generic}
        compiled = {
            candidate.name
            for manifest in manifests()
            for candidate in manifest.candidates
            if manifest.library in ("numpy", "torch", "jax")
            and candidate.device == "cpu"
            and candidate.default
            and base.name in candidate.operations
        }
        assert set(METHODS[record.name]) == forms | compiled, record.name
