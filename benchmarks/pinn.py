"""A training step of the PINN beside what users of other frameworks write, in one run.

4096 points, 64 features, four hidden layers of 128, complex output, Helmholtz residual; median CPU time of one thread. The
rivals take turns, and all gradients are compared before anything is timed. Memory is what a step holds beyond its inputs.

    torch nested    the residual by nested torch.autograd.grad, one component at a time, as DeepXDE's jacobian and hessian
                    make it (the rows of the Jacobian kept), then one backward
    jax jvp of jvp  jax.jit(jax.grad) of a loss whose Laplacian is a jvp of a jvp along each axis: the fastest form found

    python benchmarks/pinn.py
    python benchmarks/pinn.py --json
    python benchmarks/pinn.py --output docs/performance-pinn.json    # for docs/performance.md
    python benchmarks/pinn.py --quick      # small sizes: does it run?
"""

from __future__ import annotations

import _timing  # before NumPy: it sets the number of BLAS threads

# isort: split
import argparse
import importlib.util
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import scanfield
from scanfield import pinn

K2 = 36.0
WEIGHT = 1e-3
Row = dict[str, Any]
# The reference, and how much faster (or smaller) at least.
SPEED = {
    ("numpy", 1): 4.5,
    ("numpy", 2): 5.5,
    ("torch", 1): 2.2,
    ("torch", 2): 2.2,
    ("jax", 1): 1.0,
    ("jax", 2): 1.0,
}
MEMORY = {"numpy": 20.0, "jax": 5.0}
STEP = "PINN: a training step beside automatic differentiation"
HELD = "PINN: memory of a step beyond its inputs"
ABOUT = (
    "4096 points, 64 Fourier features, four hidden layers of 128, complex output, Helmholtz residual, float32; CPU time of "
    "one thread."
)


class Problem:
    """Sizes, and the same draws for every library."""

    def __init__(self, d: int, dtype: str, quick: bool) -> None:
        self.n, self.features, self.hidden = (300, 8, [16] * 2) if quick else (4096, 64, [128] * 4)
        self.d, self.dtype = d, dtype
        self.x = np.random.default_rng(0).uniform(size=(self.n, d)).astype(dtype)

    def network(self, xp: Any) -> pinn.Network:
        """The network on a library."""
        embedding = pinn.FourierFeatures(self.d, self.features, wavenumber=math.sqrt(K2))
        return pinn.Network.create(embedding, hidden=self.hidden, xp=xp, dtype=self.dtype)

    def terms(self, array: Callable[[np.ndarray], Any], network: pinn.Network) -> pinn.PreparedTerms:
        """The Helmholtz residual."""
        value, second = np.full(self.n, K2, self.dtype), np.ones((self.n, 1), self.dtype)
        piece = pinn.Piece(array(self.x), array(value), None, array(second))
        return pinn.prepare_terms([pinn.Term("pde", (piece,), weight=WEIGHT)], network)


def ours(problem: Problem, library: str, method: str | None) -> Callable[[], dict[str, np.ndarray]]:
    """A step of scanfield's; gradients by name."""
    xp: Any = np
    array: Callable[[Any], Any] = np.asarray
    if library == "torch":
        import torch as xp

        array = xp.as_tensor
    elif library == "jax":
        import jax.numpy as xp

        array = xp.asarray
    network = problem.network(xp)
    terms = problem.terms(array, network)
    writes = library != "jax" and method != "torch.compile"
    workspace = pinn.Workspace.of(network) if writes else None
    # A compiled graph has a cost of its own for each chunk: fewer, larger ones.
    chunk = 1024 if method == "torch.compile" else None

    def step() -> Any:
        with scanfield.use(method=method):
            found = pinn.loss_and_grad(network, terms, workspace=workspace, chunk=chunk).gradients
        return {name: np.asarray(g) for name, g in found.items()}

    return step


def nested_torch(problem: Problem, n: int | None = None) -> Callable[[], dict[str, np.ndarray]]:
    """A step by nested automatic differentiation in PyTorch."""
    import torch

    network = problem.network(torch)
    leaves = {name: value.clone().requires_grad_() for name, value in network.parameters.items()}
    points = torch.as_tensor(problem.x[:n])

    def step() -> dict[str, np.ndarray]:
        x = points.clone().requires_grad_()
        p = 2 * math.pi * x @ leaves["B"]
        h = torch.cat([p.sin(), p.cos()], 1)
        for i in range(network.layers):
            h = torch.nn.functional.linear(h, leaves[f"W{i}"], leaves[f"b{i}"])
            h = torch.tanh(h) if i < network.layers - 1 else h
        loss = torch.zeros((), dtype=h.dtype)
        one = torch.ones_like(h[:, :1])
        for c in range(2):
            slope = torch.autograd.grad(h[:, c : c + 1], x, one, create_graph=True)[0]
            r = K2 * h[:, c : c + 1]
            for i in range(problem.d):
                row = torch.autograd.grad(slope[:, i : i + 1], x, one, create_graph=True)[0]
                r = r + row[:, i : i + 1]
            loss = loss + (r**2).mean()
        found = torch.autograd.grad(WEIGHT * loss, list(leaves.values()))
        return {name: g.numpy() for name, g in zip(leaves, found, strict=True)}

    return step


def nested_jax(problem: Problem) -> tuple[Callable[..., Any], dict[str, Any], Any]:
    """The gradient function of the rival in JAX, its parameters and its points."""
    import jax
    import jax.numpy as jnp

    network = problem.network(jnp)
    layers = network.layers

    def field(parameters: Any, x: Any) -> Any:
        p = 2 * math.pi * x @ parameters["B"]
        h = jnp.concatenate([jnp.sin(p), jnp.cos(p)], axis=-1)
        for i in range(layers):
            h = h @ parameters[f"W{i}"].T + parameters[f"b{i}"]
            h = jnp.tanh(h) if i < layers - 1 else h
        return h

    def loss(parameters: Any, points: Any) -> Any:
        def u(x: Any) -> Any:
            return field(parameters, x)

        r = K2 * u(points)
        for i in range(problem.d):
            axis = jnp.zeros_like(points).at[:, i].set(1.0)

            def along(x: Any, axis: Any = axis) -> Any:
                return jax.jvp(u, (x,), (axis,))[1]

            r = r + jax.jvp(along, (points,), (axis,))[1]
        return WEIGHT * jnp.sum(jnp.mean(r**2, axis=0))

    return jax.jit(jax.grad(loss)), dict(network.parameters), jnp.asarray(problem.x)


def step_of_jax(problem: Problem) -> Callable[[], dict[str, np.ndarray]]:
    """A step of the rival in JAX."""
    gradient, parameters, points = nested_jax(problem)
    return lambda: {name: np.asarray(g) for name, g in gradient(parameters, points).items()}


def alike(calls: dict[str, Callable[[], dict[str, np.ndarray]]], tolerance: float) -> None:
    """Raise unless all give the same gradients."""
    results = {name: call() for name, call in calls.items()}
    first, want = next(iter(results.items()))
    for name, found in results.items():
        for key, g in want.items():
            off = np.max(np.abs(found[key] - g)) / np.max(np.abs(g))
            if not off < tolerance:
                raise AssertionError(f"{name} and {first} differ in the gradient of {key} by {off:.1e}")


def have(module: str) -> bool:
    """Whether a library is installed."""
    return importlib.util.find_spec(module) is not None


def speed(quick: bool) -> list[Row]:
    """Steps beside the reference of each library's users."""
    rows: list[Row] = []
    for d in (1, 2):
        problem = Problem(d, "float32", quick)
        calls: dict[str, Any] = {"numpy": ours(problem, "numpy", None)}
        if have("torch"):
            import torch

            torch.set_num_threads(1)
            calls["torch nested"] = nested_torch(problem)
            calls["torch.out"] = ours(problem, "torch", "torch.out")
            if not quick:
                calls["torch.compile"] = ours(problem, "torch", "torch.compile")
        if have("jax"):
            calls["jax jvp of jvp"] = step_of_jax(problem)
            calls["jax.jit"] = ours(problem, "jax", None)
        alike(calls, 2e-3)
        taken = _timing.rivals(calls, least=0.5 if quick else 2.0)
        best = min(
            (name for name in ("torch.out", "torch.compile") if name in taken),
            key=taken.__getitem__,
            default="",
        )
        for name, reference, library in (
            ("numpy", "torch nested", "numpy"),
            (best, "torch nested", "torch"),
            ("jax.jit", "jax jvp of jvp", "jax"),
        ):
            if name in taken and reference in taken:
                mine, theirs = ((one, taken[one] * 1e3) for one in (name, reference))
                rows.append(row(STEP, d, mine, theirs, SPEED[library, d], quick))
    return rows


def row(
    table: str, d: int, mine: tuple[str, float], theirs: tuple[str, float], floor: float | None, quick: bool
) -> Row:
    """A name and a figure (ms or MB) beside another, and whether the ratio is what was asked for."""
    ratio = theirs[1] / mine[1]
    timed = table == STEP
    return {
        "table": table,
        "work": f"{mine[0]}, d = {d}",
        "beside": theirs[0],
        "ms": mine[1] if timed else None,
        "peer ms": theirs[1] if timed else None,
        "measured": ratio,
        "unit": "times faster" if timed else "times less",
        "at least": floor,
        "at most": None,
        "met": None if quick or floor is None else bool(ratio >= floor),
        "note": "" if timed else f"{mine[1]:.3g} of {theirs[1]:.3g} MB",
    }


def memory(quick: bool) -> list[Row]:
    """What a step holds beyond its inputs."""
    rows: list[Row] = []
    for d in (1, 2):
        problem = Problem(d, "float32", quick)

        def step(problem: Problem = problem) -> None:
            ours(problem, "numpy", None)()

        step()
        held = _timing.peak_bytes(step) / 1e6
        if have("torch") and sys.platform == "linux":
            command = [sys.executable, __file__, "--torch-memory", str(d), *(["--quick"] if quick else [])]
            done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
            theirs = ("torch nested", float(done.stdout))
            rows.append(row(HELD, d, ("numpy", held), theirs, MEMORY["numpy"], quick))
        if have("jax"):
            rows.append(row(HELD, d, *_jax_memory(problem), MEMORY["jax"], quick))
    return rows


def _jax_memory(problem: Problem) -> tuple[tuple[str, float], tuple[str, float]]:
    """What XLA plans for temporaries."""
    import jax
    import jax.numpy as jnp

    gradient, parameters, points = nested_jax(problem)
    network = problem.network(jnp)
    terms = problem.terms(jnp.asarray, network)

    def step(parameters: Any, terms: Any) -> Any:
        return pinn.loss_and_grad(network.replace(parameters), terms).gradients

    def planned(compiled: Any) -> float:
        return float(compiled.memory_analysis().temp_size_in_bytes) / 1e6

    # The terms' arrays are arguments, as the rival's points are, and no constants of the program.
    mine = jax.jit(lambda p, residuals: step(p, terms._replace(residuals=residuals)))
    return (
        ("jax.jit", planned(mine.lower(parameters, terms.residuals).compile())),
        ("jax jvp of jvp", planned(gradient.lower(parameters, points).compile())),
    )


def torch_memory(d: int, quick: bool) -> float:
    """Megabytes that the nested step adds to this process's memory; in a process of its own."""
    import torch

    torch.set_num_threads(1)
    problem = Problem(d, "float32", quick)
    nested_torch(problem, 16)()  # whatever torch loads at first use
    step = nested_torch(problem)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak starts anew
    before = _status("VmRSS")
    step()
    return (_status("VmHWM") - before) / 1e3


def _status(name: str) -> float:
    with open("/proc/self/status") as lines:
        return float(next(line for line in lines if line.startswith(name)).split()[1])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--output", metavar="FILE", help="write JSON")
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run?")
    parser.add_argument("--torch-memory", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    scanfield.set_num_threads(1)
    if given.torch_memory:
        print(json.dumps(torch_memory(given.torch_memory, given.quick)))
        return
    rows = [*speed(given.quick), *memory(given.quick)]
    if given.output:
        packages = ("scanfield", "numpy", "numba", "torch", "jax")
        _timing.write(given.output, "python benchmarks/pinn.py", ABOUT, rows, packages)
    else:
        _timing.show(rows, as_json=given.json)


if __name__ == "__main__":
    main()
