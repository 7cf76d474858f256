"""What `gpu.py` checks and times of the PINN: a jet through each activation, and whole steps of a training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np

import scanfield
from scanfield import pinn
from scanfield.pinn.activations import ACTIVATIONS
from scanfield.pinn.memory import Buffers
from scanfield.pinn.selection import kernels_for

# Points, dimensions, features, hidden layers of a training; a chunk as large as all points, since a card wants much at once.
SIZE = {"n": 65_536, "d": 2, "features": 128, "hidden": (256, 256, 256)}
SMALL = {"n": 300, "d": 2, "features": 8, "hidden": (33, 17)}
LIMIT = 1e-5


def problem(
    xp: Any, activation: str, dtype: str, n: int, d: int, features: int, hidden: tuple[int, ...]
) -> Any:
    """A network and the Helmholtz residual at random points, in arrays of a library; the same numbers in each."""
    network = pinn.Network.create(
        pinn.FourierFeatures(d, features, wavenumber=6.0),
        hidden=hidden,
        activation=activation,
        xp=xp,
        dtype=dtype,
        seed=0,
    )
    rng = np.random.default_rng(0)
    x, source = rng.uniform(-1, 1, (n, d)), rng.standard_normal(n)
    made = [
        xp.asarray(values.astype("float32").astype(dtype))
        for values in (x, np.full(n, 36.0), np.ones((n, 1)), source)
    ]
    inside = pinn.Term("inside", (pinn.Piece(made[0], made[1], second=made[2]),), made[3])
    return network, pinn.prepare_terms([inside], network)


def worst(cupy: Any, activation: str) -> float:
    """The largest deviation of loss and gradients from float64 on the CPU, relative to the largest value of each."""
    results = []
    for xp, dtype in ((cupy, "float32"), (np, "float64")):
        network, terms = problem(xp, activation, dtype, **SMALL)
        if xp is not np:  # the same parameters, rounded
            parameters = {
                name: cupy.asnumpy(value).astype("float64") for name, value in network.parameters.items()
            }
        else:
            network = network.replace(parameters)
        found = pinn.loss_and_grad(network, terms, chunk=128)
        results.append({"loss": found.loss, **found.gradients})
    deviations = []
    for name, want in results[1].items():
        got = cupy.asnumpy(results[0][name]).astype("float64")
        deviations.append(float(np.max(np.abs(got - want)) / np.max(np.abs(want))))
    return max(deviations)


def checks(cupy: Any) -> Iterator[tuple[str, float, float]]:
    """Name, deviation and limit of each activation."""
    for activation in ACTIVATIONS:
        yield f"PINN, {activation}, float32", worst(cupy, activation), LIMIT


def rows(
    cupy: Any, seconds: Callable[..., float], rates: dict[str, float], size: dict[str, Any] = SIZE
) -> Iterator[tuple[str, ...]]:
    """Activation or step; milliseconds forward and back, or of the step; floors; milliseconds of CuPy's own functions."""
    n, d, width = size["n"], size["d"], size["hidden"][0]
    rng = np.random.default_rng(0)
    stacks = [cupy.asarray(rng.standard_normal((d + 2, n, width), "float32")) for _ in range(3)]
    z, h, bar = stacks
    for activation in ACTIVATIONS:
        network, _ = problem(cupy, activation, "float32", **SMALL)
        took = {}
        for method in ("cupy.rawkernel", "generic.out"):
            with scanfield.use(method=method):
                kernels = kernels_for(network)
            memory = Buffers(kernels.xp, z.dtype, z.device)
            forth = seconds(
                cupy, lambda k=kernels, m=memory, a=activation: k.activate(a, z, d, (None,), m, "h")
            )
            back = seconds(
                cupy,
                lambda k=kernels, m=memory, a=activation: k.activate_back(a, z, h, bar, d, (None,), m, "bar"),
            )
            took[method] = forth, back
        floors = (2 * z.nbytes / rates["copy"], (3 * z.nbytes + h[0].nbytes) / rates["copy"])
        yield tuple(
            [f"jet, {activation}, ({d} + 2, {n}, {width})"]
            + [f"{1e3 * x:.3f}" for x in (*took["cupy.rawkernel"], *floors, *took["generic.out"])]
        )
    network, terms = problem(cupy, "tanh", "float32", **size)
    workspace = pinn.Workspace.of(network, n)
    took_step = []
    for method in ("cupy.rawkernel", "generic.out"):
        with scanfield.use(method=method):
            took_step.append(seconds(cupy, lambda: pinn.loss_and_grad(network, terms, workspace=workspace)))
    widths = [2 * size["features"], *size["hidden"], 2]
    # h W^T forward, zbar W and zbar^T h back, a multiply and an add each, for every block.
    products = 6.0 * (d + 2) * n * sum(a * b for a, b in pairwise(widths))
    floor = products / rates["matmul of float32"]
    yield (
        f"step, tanh, {n} points, {size['features']} features, {size['hidden']}",
        f"{1e3 * took_step[0]:.3f}", "", f"{1e3 * floor:.3f}", "", f"{1e3 * took_step[1]:.3f}", "",
    )  # fmt: skip


HEAD = (
    "| PINN, float32 | forward or step, ms | back, ms | floor | floor back | CuPy's own functions, ms | back, ms |\n"
    "|---|---|---|---|---|---|---|"
)
