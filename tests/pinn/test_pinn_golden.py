"""The golden cases of the PINN on every library: jets, losses and all gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from arrays import wide
from golden_adapter import all_cases

from scanfield import pinn


def leave_out(backend: str, test: str, parameters: dict[str, Any]) -> bool:
    # A training loop computes at every step: Dask's arrays are not for it. JAX compiles for a second for each case.
    dear = (
        backend == "jax" and parameters.get("dtype") == "float32" and "d2" not in str(parameters.get("name"))
    )
    return backend == "dask" or dear


CASES = {case.name: case for case in all_cases() if case.op.startswith("pinn")}


def network_of(inputs: dict[str, np.ndarray], library: Any) -> pinn.Network:
    names = [name for name in inputs if name == "B" or (name[0] in "Wb" and name[1:].isdigit())]
    embedding = pinn.FourierFeatures(frequencies=inputs["B"])
    return pinn.Network({name: library.array(inputs[name]) for name in names}, embedding=embedding)


def terms_of(case: Any, inputs: dict[str, np.ndarray], library: Any) -> list[pinn.Term]:
    x, n = inputs["x"], len(inputs["x"])
    complexed = {"float32": "complex64", "float64": "complex128"}[x.dtype.name]

    def field(values: np.ndarray) -> Any:
        return library.array((values[:, 0] + 1j * values[:, 1]).astype(complexed))

    def real(values: Any) -> Any:
        return library.array(np.broadcast_to(np.asarray(values, x.dtype), (n,)).copy())

    points = library.array(x)
    k = inputs["k"].reshape(-1) if "k" in inputs else case.options["k"]
    terms = []
    if case.op == "pinn_helmholtz":
        inside = pinn.Piece(points, value=real(np.square(k)), second=library.array(np.ones((n, 1), x.dtype)))
        source = field(inputs["f"]) if "f" in inputs else None
        terms.append(pinn.Term("pde", (inside,), source, case.options["w_pde"]))
        data = pinn.Piece(points, value=real(1.0))
        terms.append(pinn.Term("data", (data,), field(inputs["u_target"]), case.options["w_data"]))
    else:
        value = library.array((-1j * np.broadcast_to(k, (n,))).astype(complexed))
        edge = pinn.Piece(points, value=value, first=library.array(inputs["normal"]))
        terms.append(pinn.Term("impedance", (edge,)))
    return terms


@pytest.mark.parametrize("name", list(CASES))
def test_golden_case(library: Any, name: str, dtype: str) -> None:
    case = CASES[name]
    inputs = case.cast(dtype).inputs
    network, terms = network_of(inputs, library), terms_of(case, inputs, library)
    chunk = 256 if library.name == "jax" else 13  # a loop over chunks doubles what JAX compiles
    jet = pinn.jet(network, library.array(inputs["x"]), chunk=chunk)
    found = pinn.loss_and_grad(network, terms, chunk=chunk)
    assert all(library.dtype(g) == dtype for g in found.gradients.values())
    results = {f"gradient/{name}": g for name, g in found.gradients.items()}
    results |= {"expected/u": jet.value, "expected/laplacian": jet.second, "expected/loss": found.loss}
    results |= {f"expected/loss_{name}": raw for name, raw in found.terms.items()}
    results["expected/residual"] = pinn.residuals(network, terms[:1])[terms[0].name]
    results["expected/gradient"] = np.moveaxis(library.numpy(jet.first), 0, 1)
    compared = 0
    for key in results:
        if key in case.info["scale"]:
            assert case.error(key, wide(_host(library, results[key])), dtype) <= 1, key
            compared += 1
    assert compared >= len(case.gradients) + 3


def _host(library: Any, x: Any) -> np.ndarray:
    return x if isinstance(x, np.ndarray | np.generic) else library.raw(x)


def test_every_case_is_here() -> None:
    assert len(CASES) == 6
