"""The scans on JAX arrays beside `jax.grad` of `lax.scan` as JAX's users write it, in one run.

float32, median CPU time of one thread; the peers take turns with scanfield. What a peer computes is compared with what
scanfield does first. A row says what was measured, the floor or limit that was set before, and whether it is met.

    taskset -c 0 python benchmarks/scans_jax.py
    taskset -c 0 python benchmarks/scans_jax.py --only gdn2 compile
    python benchmarks/scans_jax.py --json
    python benchmarks/scans_jax.py --quick      # small sizes: does it run?
"""

from __future__ import annotations

import os

# XLA reads it when JAX is imported: work that is spread over threads is not what is compared.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
).strip()

import _timing  # before NumPy: it sets the number of BLAS threads

# isort: split
import argparse
import importlib.util
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from scans_numpy import Row, alike, gdn2_inputs, linear_inputs, row, selective_inputs

import scanfield

Call = Callable[[], Any]
METHODS = ("jax.scan", "jax.numba") if importlib.util.find_spec("numba") else ("jax.scan",)


# -- what users write ----------------------------------------------------------------------------------------------
def _loop(step: Callable[..., Any], state: Any, *xs: Any) -> Any:
    """Outputs of a loop over axis 1."""
    return jnp.moveaxis(lax.scan(step, state, tuple(jnp.moveaxis(x, 1, 0) for x in xs))[1], 0, 1)


def selective_prepared(u, delta, A, B, C):
    """Coefficients of all tokens first, as the paper's formulas stand: (batch, time, channels, state) twice."""

    def step(h, slices):
        a, b, c = slices
        h = a * h + b
        return h, jnp.einsum("bdn,bn->bd", h, c)

    a = jnp.exp(delta[..., None] * A)
    b = (delta * u)[..., None] * B[:, :, None, :]
    return _loop(step, jnp.zeros((u.shape[0], *A.shape), u.dtype), a, b, C)


def selective_inside(u, delta, A, B, C):
    """The same with the coefficients inside of the loop."""

    def step(h, slices):
        u, s, b, c = slices
        h = jnp.exp(s[..., None] * A) * h + (s * u)[..., None] * b[:, None, :]
        return h, jnp.einsum("bdn,bn->bd", h, c)

    return _loop(step, jnp.zeros((u.shape[0], *A.shape), u.dtype), u, delta, B, C)


def gdn2_loop(query, key, value, log_decay, erase, write):
    """Gated DeltaNet-2 token by token."""

    def step(S, slices):
        q, k, v, g, b, w = slices
        S = jnp.exp(g)[..., None] * S
        up = w * v - jnp.einsum("bhk,bhkv->bhv", b * k, S)
        S = S + k[..., None] * up[..., None, :]
        return S, jnp.einsum("bhk,bhkv->bhv", q, S)

    batch, _, heads, size = query.shape
    state = jnp.zeros((batch, heads, size, value.shape[-1]), query.dtype)
    return _loop(step, state, query * size**-0.5, key, value, log_decay, erase, write)


def linear_loop(a, b):
    """h = a h + b."""

    def step(h, slices):
        h = slices[0] * h + slices[1]
        return h, h

    return _loop(step, jnp.zeros_like(a[:, 0]), a, b)


def linear_associative(a, b):
    """The same in log(time) passes."""
    return lax.associative_scan(lambda x, y: (x[0] * y[0], y[0] * x[1] + y[1]), (a, b), axis=1)[1]


# -- rows --------------------------------------------------------------------------------------------------------------
def training(function: Callable[..., Any], arrays: dict[str, np.ndarray]) -> Call:
    """Forward and backward: every gradient of the outputs' weighed sum."""
    given = {name: jnp.asarray(x) for name, x in arrays.items()}
    shape = jax.eval_shape(lambda x: function(**x), given).shape
    weights = jnp.asarray(np.random.default_rng(1).standard_normal(shape), jnp.float32)
    run = jax.jit(jax.grad(lambda x: (function(**x) * weights).sum()))
    return lambda: {name: np.asarray(x) for name, x in run(given).items()}


def ours(op: Any, method: str) -> Callable[..., Any]:
    """The output of a scan by a method."""
    return lambda **arrays: op(**arrays, method=method).output


def beside(
    work: str, op: Any, arrays: Any, peers: dict[str, tuple[Any, dict[str, float]]], quick: bool
) -> Iterator[Row]:
    """Rows of one work: each method beside each peer, with its floor."""
    calls = {method: training(ours(op, method), arrays) for method in METHODS}
    calls |= {name: training(peer, arrays) for name, (peer, _) in peers.items()}
    wanted = calls[next(iter(peers))]()
    for name, call in calls.items():
        alike(wanted, call(), f"{work}: {name}")
    taken = _timing.rivals(calls, least=0.02 if quick else 1.0, rounds=3 if quick else 5)
    for method in METHODS:
        for name, (_, floors) in peers.items():
            least = None if quick else floors.get(method)
            times = {"ms": 1e3 * taken[method], "peer ms": 1e3 * taken[name]}
            table = f'Forward and backward by jax.grad, method="{method}"'
            yield row(table, work, name, taken[name] / taken[method], least=least, **times)


def selective(quick: bool) -> Iterator[Row]:
    """selective_scan."""
    sizes = (1, 64, 48, 16) if quick else (1, 2048, 1024, 16)
    peers = {
        "lax.scan, coefficients before it": (selective_prepared, {"jax.scan": 5.0, "jax.numba": 12.0}),
        "lax.scan, coefficients in it": (selective_inside, {"jax.scan": 5.0, "jax.numba": 12.0}),
    }
    yield from beside(
        f"selective_scan, B, T, D, N = {sizes}",
        scanfield.selective_scan,
        selective_inputs(*sizes),
        peers,
        quick,
    )


def gdn2(quick: bool) -> Iterator[Row]:
    """gdn2, by the generic chunk form too."""
    sizes = (1, 64, 2, 16) if quick else (1, 4096, 4, 64)
    peers = {
        "lax.scan": (gdn2_loop, {"jax.scan": 3.0, "jax.numba": 10.0}),
        'method="generic.chunk" by jax.grad': (ours(scanfield.gdn2, "generic.chunk"), {}),
    }
    yield from beside(f"gdn2, B, T, H, K = V = {sizes}", scanfield.gdn2, gdn2_inputs(*sizes), peers, quick)


def linear(quick: bool) -> Iterator[Row]:
    """linear_scan."""
    sizes = (1, 64, 48) if quick else (1, 4096, 1024)
    peers = {"lax.scan": (linear_loop, {}), "lax.associative_scan": (linear_associative, {})}
    yield from beside(
        f"linear_scan, B, T, D = {sizes}", scanfield.linear_scan, linear_inputs(*sizes), peers, quick
    )


def compile(quick: bool) -> Iterator[Row]:  # noqa: A001  # the row's name
    """Seconds to trace and compile forward and backward, whatever the length."""
    works = {
        "selective_scan": (scanfield.selective_scan, selective_inputs, (16, 16)),
        "gdn2": (scanfield.gdn2, gdn2_inputs, (2, 32)),
        "linear_scan": (scanfield.linear_scan, linear_inputs, (64,)),
    }
    for name, (op, make, rest) in works.items():
        for length in (64, 128) if quick else (256, 4096, 4099):
            call = training(ours(op, "jax.scan"), make(1, length, *rest))
            start = time.process_time()
            call()
            yield row(
                "First call, forward and backward, CPU seconds", f"{name}, {length} tokens", "",
                time.process_time() - start, most=None if quick else 3.0, unit="s",
            )  # fmt: skip


def overhead(quick: bool) -> Iterator[Row]:
    """A jitted call of 32 numbers: what reaching the kernels costs."""
    a, b = jnp.full((1, 4, 8), 0.5), jnp.ones((1, 4, 8))

    def jitted(function: Callable[..., Any]) -> Call:
        run = jax.jit(function)
        return lambda: run(a=a, b=b).block_until_ready()

    calls = {method: jitted(ours(scanfield.linear_scan, method)) for method in METHODS}
    shape = jax.ShapeDtypeStruct(a.shape, a.dtype)

    def there(a, b):
        return scanfield.linear_scan(np.asarray(a), np.asarray(b)).output

    back = jitted(lambda a, b: jax.pure_callback(there, shape, a, b))
    calls["jax.pure_callback of the same on NumPy arrays"] = back
    taken = _timing.rivals(calls, least=0.02 if quick else 1.0, rounds=3 if quick else 7)
    for name, seconds in taken.items():
        yield row("Call of 32 numbers under jit", "linear_scan", name, 1e6 * seconds, unit="us")


ROWS = {make.__name__: make for make in (selective, gdn2, linear, compile, overhead)}


def main() -> None:
    """All rows, or some."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run?")
    parser.add_argument("--only", nargs="+", choices=ROWS, metavar="ROWS", help=f"some of {', '.join(ROWS)}")
    asked = parser.parse_args()
    scanfield.set_num_threads(1)
    rows = [found for name in asked.only or ROWS for found in ROWS[name](asked.quick)]
    _timing.show([{"ms": "", "peer ms": "", **found} for found in rows], as_json=asked.json)


if __name__ == "__main__":
    main()
