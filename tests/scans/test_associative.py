"""`associative_scan` against a plain loop, for any length, axis and direction."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from arrays import Library, deviation
from examples import rng_of

import scanfield

LENGTHS = (0, 1, 2, 3, 4, 5, 7, 8, 13)


def leave_out(backend: str, test: str, given: dict[str, Any]) -> bool:
    """Each length is a compilation on JAX."""
    return backend == "jax" and (
        given.get("dtype") == "float32"
        or given.get("length", 5) not in (0, 1, 5)
        or given.get("axis", 0) not in (0, -1, 3)
    )


def recurrence(left: tuple, right: tuple) -> tuple:
    """h -> a h + b, left first: associative, not commutative."""
    (a_l, b_l), (a_r, b_r) = left, right
    return a_r * a_l, a_r * b_l + b_r


def loop(combine: Any, elements: tuple[np.ndarray, ...], axis: int, reverse: bool) -> tuple[np.ndarray, ...]:
    moved = [np.moveaxis(x, axis, 0) for x in elements]
    n = moved[0].shape[0]
    order = range(n - 1, -1, -1) if reverse else range(n)
    results: list[Any] = [None] * n
    total = None
    for t in order:
        token = tuple(x[t] for x in moved)
        total = token if total is None else combine(total, token)
        results[t] = total
    if n == 0:
        return elements
    return tuple(np.moveaxis(np.stack([r[i] for r in results]), 0, axis) for i in range(len(elements)))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_lengths(library: Library, dtype: str, length: int, reverse: bool):
    rng = rng_of(f"associative {length}")
    a, b = rng.uniform(-1, 1, (2, length, 3)), rng.standard_normal((2, length, 3))
    a, b = (x.astype(dtype).astype("float64") for x in (a, b))
    got = scanfield.associative_scan(
        recurrence, (library.array(a, dtype), library.array(b, dtype)), reverse=reverse
    )
    assert isinstance(got, tuple) and len(got) == 2
    for x, want in zip(got, loop(recurrence, (a, b), 1, reverse), strict=True):
        assert library.is_array(x) and library.on_device(x) and library.dtype(x) == dtype
        assert deviation(library.numpy(x), want) <= {"float64": 1e-14, "float32": 1e-6}[dtype]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2])
def test_axes(library: Library, axis: int, reverse: bool):
    rng = rng_of("associative axes")
    a, b = rng.uniform(-1, 1, (5, 5, 5)), rng.standard_normal((5, 5, 5))
    got = scanfield.associative_scan(
        recurrence, (library.array(a), library.array(b)), axis=axis, reverse=reverse
    )
    for x, want in zip(got, loop(recurrence, (a, b), axis, reverse), strict=True):
        assert deviation(library.numpy(x), want) <= 1e-14


@pytest.mark.parametrize("reverse", [False, True])
def test_matrices(library: Library, reverse: bool):
    """A product of matrices tells left from right; the elements have further axes of their own."""
    m = rng_of("associative matrices").standard_normal((2, 6, 3, 3))
    got = scanfield.associative_scan(
        lambda left, right: (library.xp.matmul(right[0], left[0]),), (library.array(m),), reverse=reverse
    )
    want = loop(lambda left, right: (right[0] @ left[0],), (m,), 1, reverse)
    assert deviation(library.numpy(got[0]), want[0]) <= 1e-13


def test_elements_of_different_ranks(library: Library):
    """A tuple may hold any number of arrays that agree on the scanned axis: here a decay a row and a state of
    two axes.
    """
    rng = rng_of("associative ranks")
    a, s, n = rng.uniform(0, 1, (2, 5)), rng.standard_normal((2, 5, 3, 4)), np.ones((2, 5))

    def combine(left: tuple, right: tuple) -> tuple:
        return right[0] * left[0], right[0][..., None, None] * left[1] + right[1], left[2] + right[2]

    got = scanfield.associative_scan(combine, tuple(library.array(x) for x in (a, s, n)))
    for x, want in zip(got, loop(combine, (a, s, n), 1, False), strict=True):
        assert deviation(library.numpy(x), want) <= 1e-14


def test_it_is_the_linear_scan(library: Library):
    rng = rng_of("associative linear")
    a, b = library.array(rng.uniform(0, 1, (2, 5, 3))), library.array(rng.standard_normal((2, 5, 3)))
    h = scanfield.associative_scan(recurrence, (a, b))[1]
    assert deviation(library.numpy(h), library.numpy(scanfield.linear_scan(a, b).output)) <= 1e-14


@pytest.mark.backend("numpy")
def test_the_number_of_combinations_is_logarithmic(library: Library):
    """Work is done on whole slices: 1,000 steps take about 2 log2(1000) calls, not 1,000."""
    calls = 0

    def counted(left: tuple, right: tuple) -> tuple:
        nonlocal calls
        calls += 1
        return recurrence(left, right)

    x = library.array(np.full((1, 1000, 1), 0.5))
    scanfield.associative_scan(counted, (x, x))
    assert calls <= 22


@pytest.mark.backend("numpy")
@pytest.mark.parametrize("length", [1, 2, 3])
def test_the_result_shares_no_memory(library: Library, length: int):
    x = library.array(np.ones((1, length, 1)))
    for got in scanfield.associative_scan(recurrence, (x, x)):
        assert not np.shares_memory(got, x)


@pytest.mark.backend("torch")
def test_torch_autograd(library: Library):
    torch = pytest.importorskip("torch")
    rng = rng_of("associative grad")
    a = library.array(rng.uniform(0, 1, (2, 5, 3))).requires_grad_()
    b = library.array(rng.standard_normal((2, 5, 3))).requires_grad_()
    weights = library.array(rng.standard_normal((2, 5, 3)))
    got = torch.autograd.grad((scanfield.associative_scan(recurrence, (a, b))[1] * weights).sum(), (a, b))
    want = scanfield.vjp(scanfield.linear_scan, a.detach(), b.detach())[1](weights)
    for x, name in zip(got, "ab", strict=True):
        assert deviation(library.numpy(x), library.numpy(want[name])) <= 1e-13


@pytest.mark.backend("jax")
def test_jax_grad(library: Library):
    jax = pytest.importorskip("jax")
    rng = rng_of("associative grad")
    a, b, weights = (library.array(rng.uniform(0, 1, (2, 5, 3))) for _ in range(3))
    loss = lambda a, b: (scanfield.associative_scan(recurrence, (a, b))[1] * weights).sum()  # noqa: E731
    got = jax.jit(jax.grad(loss, argnums=(0, 1)))(a, b)
    want = scanfield.vjp(scanfield.linear_scan, a, b)[1](weights)
    for x, name in zip(got, "ab", strict=True):
        assert deviation(library.numpy(x), library.numpy(want[name])) <= 1e-13


def test_gradients_are_the_librarys_own(library: Library):
    """There is no closed form for an unknown combination, and `vjp` says so."""
    x = library.array(np.ones((1, 3, 1)))
    with pytest.raises(scanfield.ArgumentError, match="associative_scan"):
        scanfield.vjp(scanfield.associative_scan, recurrence, (x, x))


@pytest.mark.parametrize("axis", [3, -4])
def test_an_axis_that_is_not_there(library: Library, axis: int):
    x = library.array(np.ones((1, 3, 1)))
    with pytest.raises(scanfield.ScanfieldError, match="axis"):
        scanfield.associative_scan(recurrence, (x, x), axis=axis)


def test_elements_that_disagree(library: Library):
    x, y = library.array(np.ones((1, 3, 1))), library.array(np.ones((1, 4, 1)))
    with pytest.raises(scanfield.ShapeError):
        scanfield.associative_scan(recurrence, (x, y))


def test_no_elements_and_no_tuple(library: Library):
    with pytest.raises(scanfield.ScanfieldError, match="elements"):
        scanfield.associative_scan(recurrence, ())
    with pytest.raises(scanfield.ScanfieldError, match="elements"):
        scanfield.associative_scan(recurrence, library.array(np.ones((1, 3, 1))))


@pytest.mark.backend("numpy")
@pytest.mark.parametrize(
    ("combine", "words"),
    [
        ("max", "expected a function of two tuples, came str"),
        (lambda left, right: left[0], "returned ndarray for 2 elements"),
        (lambda left, right: left[:1], "returned 1 arrays for 2 elements"),
        (lambda left, right: (left[0], right[1][:, :, :1]), r"element 1 came back with shape \(1, \d, 1\)"),
    ],
)
def test_what_combine_may_be(combine: Any, words: str):
    x = np.ones((1, 3, 2))
    with pytest.raises(scanfield.ScanfieldError, match=f"^combine: .*{words}"):
        scanfield.associative_scan(combine, (x, x))


@pytest.mark.backend("numpy")
@pytest.mark.parametrize("axis", [True, 1.0])
def test_an_axis_is_an_integer(axis: Any):
    with pytest.raises(scanfield.ArgumentError, match="axis: expected an integer, came"):
        scanfield.associative_scan(recurrence, (np.ones((1, 3, 1)),) * 2, axis=axis)


@pytest.mark.backend("strict", "torch", "jax", "dask", "cupy")
def test_elements_of_two_libraries(library: Library):
    with pytest.raises(scanfield.BackendError):
        scanfield.associative_scan(recurrence, (library.array(np.ones((1, 3, 1))), np.ones((1, 3, 1))))
