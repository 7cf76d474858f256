"""What would run a call, and why (``explain``); paying the cost of first calls ahead (``warmup``)."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy

from scanfield.advice import shown
from scanfield.arrays import COMPLEX, REAL, Array, current_device_of, dtype_of
from scanfield.dispatch import Explanation, explain_call, operation_of
from scanfield.errors import ArgumentError, BackendError, DtypeError, ShapeError
from scanfield.gradients import vjp
from scanfield.scans.binding import bind, record_of
from scanfield.scans.states import check_boundaries


def explain(op: Any, *arrays: Array, **options: Any) -> Explanation:
    """Every implementation that could run this call, which one does for each verb, and why the others do not.

    Parameters
    ----------
    op, *arrays, **options
        As in the call. Nothing is computed but what the preparation of the arrays needs. ``op`` is a scan, or what has an
        ``explain`` of its own (``pinn.loss_and_grad``).

    Returns
    -------
    Explanation
        ``taken`` maps each verb to the implementation that runs it; ``verdicts`` has a row for each pair;
        ``str()`` is a table. The verbs: ``forward`` is the call itself, ``save`` the call under ``vjp``, whose backward goes
        with it, ``step`` one token, ``summarise`` a block as a map of the state.

    Raises
    ------
    As the call itself.

    Examples
    --------
    >>> import numpy, scanfield
    >>> a, b = numpy.full((1, 4, 1), 0.5), numpy.ones((1, 4, 1))
    >>> scanfield.explain(scanfield.linear_scan, a, b, method="generic").taken["forward"]
    'generic.recurrent'
    """
    own = getattr(op, "__dict__", {}).get("explain")
    if own is not None:
        told: Explanation = own(*arrays, **options)
        return told
    bound = bind(op, arrays, options)
    with current_device_of(bound.arrays[bound.record.main]):
        prepared = bound.record.prepare(bound.arrays, bound.options)
        if bound.states_at is not None:
            check_boundaries(prepared, bound.options, bound.states_at)
        told = explain_call(prepared.call, bound.method, operation_of(prepared.call).notes)
    return replace(told, function=bound.record.name)


def warmup(
    op: Any,
    shapes: Mapping[str, Sequence[int]],
    dtype: str = "float32",
    *,
    library: str = "numpy",
    device: Any = None,
    **options: Any,
) -> Explanation:
    """Run a scan and its gradient once on zeros, so that imports and compilation are paid now.

    Parameters
    ----------
    op : a scan of scanfield
    shapes : mapping
        Name of each array to its shape; absent ones are None.
    dtype : str
        Of all arrays.
    library : str
        ``"numpy"``, ``"torch"``, ``"jax"``, ``"cupy"``, ``"dask"`` or the module of another array API namespace.
    device : optional
        As the library's ``zeros`` takes it.
    **options
        As in the call.

    Returns
    -------
    Explanation
        What ran.

    Raises
    ------
    ArgumentError
        For a name in ``shapes`` that is no array of the scan; ShapeError and DtypeError for what is no shape or dtype;
        BackendError for a library that is not installed.

    Examples
    --------
    >>> import scanfield
    >>> shape = (1, 4, 1)
    >>> scanfield.warmup(scanfield.linear_scan, {"a": shape, "b": shape}, "float64").library
    'numpy'
    """
    known = [entry.name for entry in record_of(op).inputs if entry.role != "index"]
    for name in shapes:
        if name not in known:
            raise ArgumentError(
                f"shapes: {shown(name)} is no array of {record_of(op).name}; it has {', '.join(known)}"
            )
    xp = _namespace(library)
    arrays = {name: _zeros(xp, name, shape, dtype, device) for name, shape in shapes.items()}
    result, pullback = vjp(op, **arrays, **options)
    pullback(result.output, result.final_state)
    return explain(op, **arrays, **options)


def _zeros(xp: Any, name: str, shape: Any, dtype: Any, device: Any) -> Array:
    if not isinstance(dtype, str) or dtype not in REAL + COMPLEX:
        raise DtypeError(
            f"dtype: {shown(dtype)}; allowed are the names {', '.join(REAL[:4] + COMPLEX[:2])}, as strings"
        )
    sizes = tuple(shape) if isinstance(shape, Sequence) else None
    if sizes is None or not all(
        isinstance(n, int | numpy.integer) and not isinstance(n, bool) and n >= 0 for n in sizes
    ):
        raise ShapeError(f"shapes: {shown(name)} has {shown(shape)}; expected a sequence of sizes")
    try:
        return xp.zeros(sizes, dtype=dtype_of(xp, dtype), device=device)
    except (ValueError, TypeError, RuntimeError, AttributeError) as error:
        raise BackendError(f"{xp.__name__} makes no array of {dtype} on device {device!r}: {error}") from None


def _namespace(library: str) -> Any:
    known = {
        "numpy": "array_api_compat.numpy",
        "torch": "array_api_compat.torch",
        "cupy": "array_api_compat.cupy",
        "dask": "array_api_compat.dask.array",
        "jax": "jax.numpy",
    }
    try:
        found = importlib.import_module(known.get(library, library))
    except (ImportError, AttributeError, TypeError) as error:
        raise BackendError(f"library: {shown(library)} cannot be imported: {error}") from None
    if not hasattr(found, "zeros"):
        raise BackendError(f"library: {shown(library)} is no array API namespace")
    return found
