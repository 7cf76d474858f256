"""Between the host, where problems are stated in float64, and the library, device and precision of a network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from scanfield.arrays import COMPLEX_OF, Array, device_of, dtype_of, library_of
from scanfield.pinn.network import Network
from scanfield.pinn.terms import Dependence, Piece, Term

__all__ = ["place", "place_terms", "to_host"]


def place(values: np.ndarray, network: Network) -> Array:
    """Host numbers as an array beside the network's parameters: complex ones in the complex dtype of its precision."""
    like = network.parameters["W0"]
    name = COMPLEX_OF[network.dtype] if values.dtype.kind == "c" else network.dtype
    device = device_of(like)
    where = {} if device is None else {"device": device}
    return network.xp.asarray(np.array(values, dtype=name), dtype=dtype_of(network.xp, name), **where)


def place_terms(terms: Sequence[Term], network: Network) -> tuple[Term, ...]:
    """Terms of host arrays as terms that the network takes."""

    def moved(values: np.ndarray | None) -> Array | None:
        return None if values is None else place(values, network)

    def dependence(given: Dependence) -> Dependence:
        return given._replace(factors=tuple(moved(factor) for factor in given.factors))

    def term(given: Term) -> Term:
        unknown = given.wavenumber
        if isinstance(unknown, Dependence):
            unknown = dependence(unknown)
        elif unknown is not None:
            unknown = tuple(map(dependence, unknown))
        pieces = tuple(Piece(*map(moved, piece)) for piece in given.pieces)
        return given._replace(pieces=pieces, target=moved(given.target), wavenumber=unknown)

    return tuple(map(term, terms))


def to_host(array: Array) -> np.ndarray:
    """An array of any library as a NumPy array of the same dtype."""
    library = library_of(array, "array").name
    found: Any = array
    if library == "torch":
        found = array.detach().cpu().numpy()
    elif library == "cupy":
        found = array.get()
    elif library == "dask":
        found = array.compute()
    elif library not in ("numpy", "jax"):
        import array_api_compat

        try:
            found = np.from_dlpack(array)
        except (AttributeError, BufferError, RuntimeError, ValueError, TypeError):
            found = np.from_dlpack(array_api_compat.to_device(array, "cpu"))
    return np.asarray(found)
