"""Seeded networks and terms of every kind, for the tests of this folder."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from scanfield import pinn

COMPLEX = {"float32": "complex64", "float64": "complex128"}
KINDS = ("data", "pde", "operator", "robin", "periodic", "free")


def kinds_for(library: Any) -> tuple[str, ...]:
    """All kinds of terms; for JAX, which compiles for a second for each, the two that have everything."""
    return ("operator", "free") if library.name == "jax" else KINDS


def embedding(d: int, kind: str = "fourier") -> pinn.Embedding:
    if kind == "fourier":
        return pinn.FourierFeatures(d, 5, wavenumber=3.0, seed=1)
    if kind == "frozen":
        return pinn.FourierFeatures(d, 5, scale=0.5, trainable=False, seed=1)
    if kind == "raw":
        return pinn.RawCoordinates(d, mean=0.1, scale=[1.0 + 0.5 * i for i in range(d)])
    return pinn.PeriodicFeatures([2.0, *[None] * (d - 1)], 2, scale=1.5)


def network(
    library: Any,
    d: int,
    *,
    activation: str = "tanh",
    outputs: int = 2,
    hidden: Any = (7, 6),
    dtype: str = "float64",
    kind: str = "fourier",
) -> pinn.Network:
    made = pinn.Network.create(
        embedding(d, kind), hidden=hidden, outputs=outputs, activation=activation, seed=3
    )
    rng = np.random.default_rng(5)
    host = {
        name: (value + 0.3 * rng.normal(size=value.shape) if name[0] == "b" else value).astype(dtype)
        for name, value in made.parameters.items()
    }
    return pinn.Network(
        {name: library.array(value) for name, value in host.items()},
        embedding=made.embedding,
        activation=activation,
    )


def terms(
    library: Any, d: int, *, n: int = 9, kinds: Any = KINDS, dtype: str = "float64", real: bool = False
) -> list[pinn.Term]:
    """One term of each kind; ``real`` leaves out every imaginary part."""
    rng = np.random.default_rng(11)

    def array(values: np.ndarray) -> Any:
        if values.dtype.kind == "c":
            return library.array(values.real.astype(dtype) if real else values.astype(COMPLEX[dtype]))
        return library.array(values.astype(dtype))

    def draw(*shape: int) -> np.ndarray:
        return rng.normal(size=shape)

    def complexes(*shape: int) -> np.ndarray:
        return draw(*shape) + 1j * draw(*shape)

    def points() -> Any:
        return array(rng.uniform(-1.0, 1.0, size=(n, d)))

    x = points()
    made = {
        "data": pinn.Term("data", (pinn.Piece(x, value=array(np.ones(n))),), array(complexes(n)), 1.3),
        "pde": pinn.Term(
            "pde",
            (pinn.Piece(x, array(complexes(n)), None, array(np.ones((n, 1)))),),
            array(complexes(n)),
            0.02,
        ),
        "operator": pinn.Term(
            "operator",
            (pinn.Piece(x, array(draw(n)), array(complexes(n, d)), array(complexes(n, d))),),
            None,
            0.05,
        ),
        "robin": pinn.Term(
            "robin", (pinn.Piece(points(), array(complexes(n)), array(draw(n, d))),), array(draw(n)), 0.7
        ),
        "periodic": pinn.Term(
            "periodic",
            (
                pinn.Piece(points(), array(np.ones(n)), array(draw(n, d))),
                pinn.Piece(points(), array(-np.ones(n)), array(draw(n, d)), array(draw(n, d))),
            ),
            None,
            0.4,
        ),
        "free": pinn.Term(
            "free",
            (pinn.Piece(x, None, None, array(np.ones((n, 1)))),),
            array(complexes(n)),
            0.03,
            (
                pinn.Dependence((array(draw(n)),), 2),
                pinn.Dependence((array(complexes(n)),), 1, "admittance"),
            ),
        ),
    }
    return [made[kind] for kind in kinds]


UNKNOWNS: Mapping[str, Any] = {"wavenumber": 2.5, "admittance": 1.5 - 0.5j}
"""Values of what the term "free" depends on."""


def unknowns(kinds: Any, real: bool = False) -> dict[str, Any] | None:
    if "free" not in kinds:
        return None
    return {name: value.real if real else value for name, value in UNKNOWNS.items()}


def plain() -> Any:
    """Writable NumPy arrays, for tests that measure one library only."""
    return importlib.import_module("arrays").library("numpy")
