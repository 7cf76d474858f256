"""JAX's own scans beyond what the shared tests see: what is compiled, traced, kept and spread over devices."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest

pytestmark = pytest.mark.backend("jax")

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from examples import BASE, op_inputs, rng_of  # noqa: E402

import scanfield  # noqa: E402
from scanfield_jax import lift  # noqa: E402


def given(op: str, time: int) -> dict[str, jax.Array]:
    return {name: jnp.asarray(x, "float32") for name, x in op_inputs(op, f"{op} jax", time=time).items()}


def shapes_of(arrays: dict[str, jax.Array]) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in arrays.items()}


def trained(op: str, method: str | None = None):
    def loss(arrays):
        result = getattr(scanfield, op)(**arrays, method=method)
        return (result.output**2).sum() + result.final_state.sum()

    return jax.value_and_grad(loss)


@pytest.mark.parametrize("op", BASE)
def test_it_is_the_default(op):
    arrays = given(op, 7)
    taken = scanfield.explain(getattr(scanfield, op), **arrays).taken
    assert set(taken.values()) == {"jax.scan"}, taken


@pytest.mark.parametrize("op", BASE)
def test_what_is_compiled_does_not_grow_with_time(op):
    """Lines of the program and of what JAX traced, forward and backward; and it is small."""
    sizes = []
    for time in (256, 4096):
        shapes = shapes_of(given(op, time))
        lowered = jax.jit(trained(op)).lower(shapes)
        sizes.append(len(lowered.as_text().splitlines()))
    assert sizes[0] == sizes[1] < 1500, sizes


def test_lengths_of_any_kind_compile_one_block_or_two():
    """A length that is no multiple of the block adds the block at its end, once: not a block a length."""
    sizes = []
    for time in (64, 67, 131, 4099):
        lowered = jax.jit(trained("gdn2")).lower(shapes_of(given("gdn2", time)))
        sizes.append(len(lowered.as_text().splitlines()))
    assert max(sizes) <= 2.5 * sizes[0], sizes


@pytest.mark.parametrize("op", BASE)
def test_states_are_kept_once_a_block(op):
    """What is kept between forward and backward: inputs, outputs and states at the blocks' starts."""
    time = 1024
    arrays = shapes_of(given(op, time))

    def kept(arrays):
        return jax.vjp(lambda x: getattr(scanfield, op)(**x), arrays)[1]

    leaves = jax.tree.leaves(jax.eval_shape(kept, arrays))
    result = jax.eval_shape(lambda x: getattr(scanfield, op)(**x), arrays)
    given_bytes = sum(x.size * x.dtype.itemsize for x in (*arrays.values(), result.output))
    states = result.final_state.size * result.final_state.dtype.itemsize * (time // 16 + 1)
    assert sum(x.size * x.dtype.itemsize for x in leaves) <= given_bytes + states + 4096


def test_eager_calls_compile_once():
    arrays = given("gdn2", 9)
    scanfield.gdn2(**arrays)
    before = lift._run._cache_size()
    assert before > 0
    for _ in range(3):
        scanfield.gdn2(**{name: x + 1 for name, x in arrays.items()})
    assert lift._run._cache_size() == before


@pytest.mark.parametrize("op", BASE)
def test_the_same_call_twice_is_the_same_bits_and_a_later_token_changes_no_earlier_output(op):
    arrays = given(op, 40)
    run = jax.jit(lambda x: getattr(scanfield, op)(**x).output)
    first = np.asarray(run(arrays))
    assert first.tobytes() == np.asarray(run(arrays)).tobytes()
    moved = {
        name: x.at[:, 20:].set(x[:, 20:] * 3) if name != "initial_state" and x.shape[1:2] == (40,) else x
        for name, x in arrays.items()
    }
    after = np.asarray(run(moved))
    assert after[:, :20].tobytes() == first[:, :20].tobytes()
    assert not np.array_equal(after[:, 20:], first[:, 20:])


@pytest.mark.parametrize("op", BASE)
def test_no_leak_and_no_transfer(op):
    arrays = given(op, 40)
    run = jax.jit(trained(op))
    with jax.checking_leaks(), jax.transfer_guard("disallow"), jax.numpy_dtype_promotion("strict"):
        value, gradients = run(arrays)
    assert np.isfinite(float(value)) and set(gradients) == set(arrays)


def test_what_nobody_differentiates_is_not_computed():
    """Of gdn2, the value's gradient alone needs no states: they are not made again."""
    arrays = given("gdn2", 64)

    def loss(value):
        return (scanfield.gdn2(**{**arrays, "value": value}).output ** 2).sum()

    def every(arrays):
        return (scanfield.gdn2(**arrays).output ** 2).sum()

    one = jax.jit(jax.grad(loss)).lower(arrays["value"]).as_text()
    both = jax.jit(jax.grad(every)).lower(arrays).as_text()
    assert one.count("dot_general") < both.count("dot_general")


@pytest.mark.parametrize("op", BASE)
@pytest.mark.parametrize("method", [None, "jax.numba"])
def test_who_asked_first_changes_no_gradient(op, method):
    """JAX keeps traces: one with a single gradient wanted must not serve another that wants all of them."""
    if method is not None:
        pytest.importorskip("numba")
    arrays = given(op, 33)
    function = getattr(scanfield, op)

    def loss(arrays, **more):
        return (function(**arrays, **more, method=method).output ** 2).sum()

    jax.jit(trained(op, method)).lower(shapes_of(arrays))
    for name in arrays:
        rest = {n: x for n, x in arrays.items() if n != name}
        jax.jit(jax.grad(lambda x, name=name, rest=rest: loss({name: x}, **rest))).lower(arrays[name])
    every = jax.jit(jax.grad(loss))(arrays)
    result, pullback = scanfield.vjp(function, **arrays)
    truth = pullback(2 * result.output)
    for name in arrays:
        scale = float(jnp.abs(truth[name]).max())
        assert float(jnp.abs(every[name] - truth[name]).max()) <= 2e-5 * scale, name


def test_the_packed_state_s_gradient_is_that_of_sequences_apart():
    rng = rng_of("packs")
    bounds = (0, 0, 3, 3, 8, 9)
    a, b = (jnp.asarray(rng.uniform(-1, 1, (1, 9, 2))) for _ in range(2))
    states = jnp.asarray(rng.standard_normal((5, 2)))

    def packed(a, b, states):
        result = scanfield.linear_scan(a, b, states, cu_seqlens=bounds)
        return (result.output**2).sum() + (result.final_state**3).sum()

    def apart(a, b, states):
        total = 0.0
        for i, (first, last) in enumerate(pairwise(bounds)):
            result = scanfield.linear_scan(a[:, first:last], b[:, first:last], states[i : i + 1])
            total += (result.output**2).sum() + (result.final_state**3).sum()
        return total

    for ours, truth in zip(
        jax.grad(packed, (0, 1, 2))(a, b, states), jax.grad(apart, (0, 1, 2))(a, b, states), strict=True
    ):
        np.testing.assert_allclose(ours, truth, rtol=1e-12, atol=1e-12)


ELSEWHERE = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2 " + os.environ.get("XLA_FLAGS", "")
import numpy as np, jax, jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec as P
import scanfield
assert not jax.config.jax_enable_x64
mesh = Mesh(np.array(jax.devices()), ("data",))
shard_map = getattr(jax, "shard_map", None)
if shard_map is None:
    from jax.experimental.shard_map import shard_map
r = np.random.default_rng(0)
def draw(*shape):
    return jnp.asarray(r.uniform(-1, 1, shape), jnp.float32)
u, delta, B, C = draw(4, 20, 3), abs(draw(4, 20, 3)), draw(4, 20, 2), draw(4, 20, 2)
A, D = -abs(draw(3, 2)), draw(3)
def scan(u, delta, A, B, C, D):
    result = scanfield.selective_scan(u, delta, A, B, C, D=D, delta_softplus=True)
    assert result.output.dtype == result.final_state.dtype == jnp.float32
    return result.output
over = (P("data"), P("data"), P(), P("data"), P("data"), P())
spread = shard_map(scan, mesh=mesh, in_specs=over, out_specs=P("data"))
def loss(run):
    return jax.jit(jax.value_and_grad(lambda *x: (run(*x) ** 2).sum(), argnums=tuple(range(6))))
(one, grads), (two, spread_grads) = loss(scan)(u, delta, A, B, C, D), loss(spread)(u, delta, A, B, C, D)
np.testing.assert_allclose(one, two, rtol=1e-5)
for x, y in zip(grads, spread_grads):
    np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
q, k, v, g = draw(2, 20, 1, 4), draw(2, 20, 1, 4), draw(2, 20, 2, 3), -abs(draw(2, 20, 2))
def rule(q, k, v, g):
    return scanfield.gdn2(q, k, v, g, abs(g)).output
spread = shard_map(rule, mesh=mesh, in_specs=(P("data"),) * 4, out_specs=P("data"))
for x, y in zip(jax.grad(lambda *x: (rule(*x) ** 2).sum(), (0, 1, 2, 3))(q, k, v, g),
                jax.jit(jax.grad(lambda *x: (spread(*x) ** 2).sum(), (0, 1, 2, 3)))(q, k, v, g)):
    np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
wide = jnp.asarray(np.ones((1, 3, 1)))
assert wide.dtype == scanfield.linear_scan(wide, wide).output.dtype == jnp.float32
assert not jax.config.jax_enable_x64
"""


def test_over_two_devices_and_in_single_precision():
    """``shard_map`` over the batch, arrays alike on all devices among them; 64-bit types off, and no flag is changed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", ELSEWHERE],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


SPREAD = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2 " + os.environ.get("XLA_FLAGS", "")
import numpy as np, jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import scanfield
r = np.random.default_rng(0)
def draw(*shape):
    return jnp.asarray(r.uniform(0, 1, shape), jnp.float32)
a, b = draw(2, 20, 3), draw(2, 20, 3)
q, k, v, beta = draw(2, 20, 1, 4), 0.5 * draw(2, 20, 1, 4), draw(2, 20, 1, 3), draw(2, 20, 1)
def square(result):
    return (result.output**2).sum() + (result.final_state**2).sum()
calls = [
    (lambda *x: square(scanfield.linear_scan(*x)), (a, b)),
    (lambda *x: square(scanfield.delta_rule(*x)), (q, k, v, beta)),
    (lambda *x: square(scanfield.delta_rule(*x, method="generic")), (q, k, v, beta)),
]
for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,))
    for loss, given in calls:
        spread = [jax.device_put(x, NamedSharding(mesh, P("data", *[None] * (x.ndim - 1)))) for x in given]
        loss(*spread)
        run = jax.jit(jax.value_and_grad(loss, argnums=tuple(range(len(given)))))
        for x, y in zip(jax.tree.leaves(run(*given)), jax.tree.leaves(run(*spread)), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    # A parameter that lies on one device beside what is spread.
    u, A = spread[0][:, :, 0], -jnp.ones((4, 2))
    B = jax.device_put(draw(2, 20, 2), NamedSharding(mesh, P("data")))
    assert jax.jit(scanfield.selective_scan)(u, u, A, B, B).output.shape == u.shape
far = jax.device_put(a, jax.devices()[1])
near = jax.device_put(a, NamedSharding(jax.make_mesh((1,), ("data",)), P()))
for one, other in ((jax.device_put(a, NamedSharding(mesh, P("data"))), far), (far, near)):
    try:
        scanfield.linear_scan(one, other)
    except scanfield.DeviceError:
        continue
    raise AssertionError("taken")
print("alike")
"""


@pytest.mark.skipif(not hasattr(jax.sharding, "reshard"), reason="this JAX has no meshes with explicit axes")
def test_arrays_spread_over_devices():
    """With ``jax.make_mesh`` and no ``shard_map``: as types say (explicit axes), or as XLA decides."""
    done = subprocess.run(
        [sys.executable, "-c", SPREAD], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.stdout == "alike\n", done.stderr[-3000:]
