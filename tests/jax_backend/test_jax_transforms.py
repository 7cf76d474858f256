"""Every operation, verb and transform of JAX, from the registry: numbers are right to 1e-9, or an error says what is not.

Transforms of one operation and verb are compiled together: what JAX compiles costs more than what it runs.
"""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.backend("jax")

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from lines import PLACE, PLACES, TANGENT, Line, along, gradient, hessian  # noqa: E402

import scanfield  # noqa: E402
from scanfield.dispatch import Operation  # noqa: E402

OPERATIONS = tuple(record.name for record in scanfield.operations())
BASE = tuple(record.name for record in scanfield.operations() if isinstance(record, Operation))
VERBS = ("forward", "step", "vjp")

# What a transform says of a line, at a place, and what it must be by differences of NumPy's results.
REVERSE = {
    "jit": (lambda line: line, lambda line: line(PLACE)),
    "grad": (lambda line: jax.grad(line.loss), lambda line: gradient(line.loss)),
    "value_and_grad": (
        lambda line: lambda t: jnp.append(*jax.value_and_grad(line.loss)(t)[::-1]),
        lambda line: np.append(gradient(line.loss), line.loss(PLACE)),
    ),
    "checkpoint": (lambda line: jax.grad(jax.checkpoint(line.loss)), lambda line: gradient(line.loss)),
    "grad of grad": (
        lambda line: jax.grad(lambda t: (jax.grad(line.loss)(t) * TANGENT).sum()),
        lambda line: hessian(line.loss) @ TANGENT,
    ),
    "vmap": (
        lambda line: lambda t: jax.vmap(line)(_places(t)),
        lambda line: np.stack([line(place) for place in PLACES]),
    ),
    "vmap of grad": (
        lambda line: lambda t: jax.vmap(jax.grad(line.loss))(_places(t)),
        lambda line: np.stack([gradient(line.loss, place) for place in PLACES]),
    ),
    "grad through vmap": (
        lambda line: jax.grad(lambda t: jax.vmap(line.loss)(_places(t)).sum()),
        lambda line: gradient(lambda t: sum(line.loss(place) for place in _places(t))),
    ),
}
FORWARD = {
    "jvp": (
        lambda line: lambda t: jax.jvp(line, (t,), (jnp.asarray(TANGENT),))[1],
        lambda line: along(line, PLACE, TANGENT),
    ),
    "jacfwd": (jax.jacfwd, gradient),
    "hessian": (lambda line: jax.hessian(line.loss), lambda line: hessian(line.loss)),
}


def _places(t):
    """``PLACES`` as a function of the first of them."""
    return t + (PLACES - PLACE)


# A derived operation is another one behind a few operations of JAX's own: some transforms stand for the others.
DERIVED = {"forward": ("grad of grad", "vmap"), "step": ("grad",), "vjp": ("jit",)}
# What XLA calls is one function: the verbs differ in which rule of ours leads to it.
OPAQUE = {"forward": tuple(REVERSE), "step": ("grad",), "vjp": ("jit", "grad", "vmap")}


def check(operation: str, verb: str, transforms, method: str | None) -> None:
    line, truth = Line(operation, verb, jnp, method), Line(operation, verb)

    @jax.jit
    def together(t):
        return {name: transform(line)(t) for name, (transform, _) in transforms.items()}

    found = together(jnp.asarray(PLACE))
    for name, (_, wanted) in transforms.items():
        got, want = np.asarray(found[name]), wanted(truth)
        assert got.shape == want.shape, name
        assert np.max(np.abs(want)) > 0, name
        assert np.max(np.abs(got - want)) <= 1e-9 * np.max(np.abs(want)), name


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_reverse(operation, verb):
    names = [*REVERSE] if operation in BASE else DERIVED[verb]
    if verb == "vjp" and operation != "linear_scan":
        names = [
            name for name in names if name != "grad of grad"
        ]  # a third derivative, which compiles for long
    chosen = {name: REVERSE[name] for name in names}
    check(operation, verb, chosen, None)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("operation", BASE)
def test_reverse_by_the_kernels_for_numpy(operation, verb):
    pytest.importorskip("numba")
    check(operation, verb, {name: REVERSE[name] for name in OPAQUE[verb]}, "jax.numba")


@pytest.mark.parametrize("operation", BASE)
def test_forward_by_the_generic_form(operation):
    check(operation, "forward", FORWARD, "generic")


def words(operation: str, verb: str, transform, method: str | None) -> str:
    """What JAX says before it compiles, in one line; empty where it says nothing."""
    try:
        jax.jit(transform(Line(operation, verb, jnp, method))).lower(jnp.asarray(PLACE))
    except TypeError as error:
        return str(error).splitlines()[0]
    return ""


@pytest.mark.parametrize("method", [None, "jax.numba", "generic"])
def test_the_cells_that_raise(method):
    """Forward-mode derivatives over a custom_vjp, in JAX's own words, and nothing else; by the generic form none.

    Cells in reverse mode are those of the tests above, which would fail if they raised.
    """
    if method == "jax.numba":
        pytest.importorskip("numba")
    found = {
        (operation, verb, name): words(operation, verb, FORWARD[name][0], method)
        for operation in (OPERATIONS if method is None else BASE)
        for verb in VERBS
        for name in (FORWARD if operation in BASE else ("jvp",))
    }
    raising = {cell: said for cell, said in found.items() if said}
    for cell, said in raising.items():
        print(*cell, ":", said)
    # The plain operations of `vjp`, and the backward pass of `jax.scan`, are differentiated in either mode.
    opaque = {cell for cell in found if cell[1] != "vjp" and cell[2] != "hessian"}
    assert set(raising) == {None: opaque, "jax.numba": set(found), "generic": set()}[method]
    assert all("forward-mode autodiff (jvp)" in said and "custom_vjp" in said for said in raising.values())
