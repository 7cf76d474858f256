"""The scans on the CUDA card at hand: built, checked against float64 on the CPU, timed, in one table.

    python benchmarks/gpu.py                 everything, in less than 8 minutes
    python benchmarks/gpu.py --check         build and check, no times
    python benchmarks/gpu.py --budget 120    stop timing after so many seconds
    python benchmarks/gpu.py --paper         no card: what the gated delta rule in chunks moves and multiplies

Beside each time stand the floors of the case on this card: its bytes at the measured rate of a copy, its exponentials
and its multiply-adds at the measured rates of loops of nothing else, and how many times the largest of them the call
takes. The gated delta rule is timed by each of its forms; for those in chunks, bytes are those that its kernels hand to each
other too, and products on tensor cores are counted at the measured rate of a matrix product. Peers that are installed
(mamba_ssm, flash-linear-attention, plain PyTorch and its compiler) run the same shapes.
Nothing is begun that the time left would not allow; what was left out is said.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import _gpu_eager
import _gpu_pinn
import numpy as np
from _gpu_paper import chunk_kernels, chunk_kernels_back

import scanfield

METHOD = "cupy.rawkernel"
# The forms of the gated delta rule; which of the first two is the default is a matter of length (both are timed).
RECURRENT, CHUNK, TENSOR = FORMS = tuple(f"{METHOD}.{form}" for form in ("recurrent", "chunk", "tensor"))
# Largest deviation from float64, relative to the largest value. Half precision rounds its inputs and outputs.
LIMITS = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}


@dataclass(frozen=True)
class Case:
    """One call at a size worth timing, and the same call small enough to check."""

    name: str
    op: str
    draw: Callable[..., dict[str, np.ndarray]]
    size: dict[str, int]
    small: dict[str, int]
    dtype: str
    options: dict[str, Any]
    exponentials: Callable[[dict[str, int]], float]
    multiplications: Callable[[dict[str, int]], float]
    methods: tuple[str, ...] = (METHOD,)


def selective(rng: np.random.Generator, B: int, T: int, C: int, N: int) -> dict[str, np.ndarray]:
    """Mamba's shapes, with gate."""
    return {
        "u": rng.standard_normal((B, T, C), "float32"),
        "delta": rng.standard_normal((B, T, C), "float32") - 4,
        "A": -rng.uniform(0.5, N, (C, N)).astype("float32"),
        "B": rng.standard_normal((B, T, N), "float32"),
        "C": rng.standard_normal((B, T, N), "float32"),
        "D": rng.standard_normal(C, "float32"),
        "z": rng.standard_normal((B, T, C), "float32"),
    }


def delta(
    rng: np.random.Generator, B: int, T: int, H: int, VH: int, D: int, wide: int
) -> dict[str, np.ndarray]:
    """The gated delta family; ``wide`` 1: gates of a channel, 0: of a head."""
    gate = (B, T, VH, D) if wide else (B, T, VH)
    made = {
        "query": rng.standard_normal((B, T, H, D), "float32"),
        "key": rng.standard_normal((B, T, H, D), "float32"),
        "value": rng.standard_normal((B, T, VH, D), "float32"),
        "log_decay": -rng.random(gate, "float32") / 10,
    }
    if wide:
        return {**made, "erase": rng.random(gate, "float32"), "write": rng.random(gate, "float32")}
    return {**made, "beta": rng.random(gate, "float32")}


def linear(rng: np.random.Generator, B: int, T: int, W: int) -> dict[str, np.ndarray]:
    """A gated sum."""
    return {"a": rng.random((B, T, W), "float32"), "b": rng.standard_normal((B, T, W), "float32")}


def _states(s: dict[str, int]) -> float:
    return float(s["B"] * s["T"] * s["C"] * s["N"])


def _products(s: dict[str, int]) -> float:
    return float(s["B"] * s["T"] * s["VH"] * s["D"] * s["D"])


def _gates(s: dict[str, int]) -> float:
    return float(s["B"] * s["T"] * s["VH"] * s["D"])


def _none(s: dict[str, int]) -> float:
    return 0.0


def cases() -> list[Case]:
    """The shapes that the field reports, and long sequences with little beside time."""
    soft, unit = {"delta_softplus": True}, {"qk_l2norm": True}
    made = []
    for dtype in ("bfloat16", "float32"):
        size = {"B": 8, "T": 2048, "C": 5120, "N": 16}
        small = {"B": 2, "T": 150, "C": 70, "N": 16}
        made.append(
            Case(
                "mamba",
                "selective_scan",
                selective,
                size,
                small,
                dtype,
                soft,
                _states,
                lambda s: 4 * _states(s),
            )
        )
    size, small = {"B": 1, "T": 65536, "C": 256, "N": 16}, {"B": 1, "T": 700, "C": 8, "N": 16}
    made.append(
        Case(
            "mamba, long",
            "selective_scan",
            selective,
            size,
            small,
            "bfloat16",
            soft,
            _states,
            lambda s: 4 * _states(s),
        )
    )
    for name, op, shape, wide in (
        ("gdn2", "gdn2", (1, 8192, 96, 96), 1),
        ("16/64 heads", "gated_delta_rule", (1, 8192, 16, 64), 0),
        ("16/32 heads", "gated_delta_rule", (1, 8192, 16, 32), 0),
        ("512 tokens", "gdn2", (16, 512, 16, 16), 1),
        ("256 tokens", "gdn2", (32, 256, 16, 16), 1),
    ):
        size = dict(zip(("B", "T", "H", "VH"), shape, strict=True)) | {"D": 128, "wide": wide}
        small = {"B": 1, "T": 150, "H": 1, "VH": 2, "D": 128, "wide": wide}
        made.append(
            Case(name, op, delta, size, small, "bfloat16", unit, _gates, lambda s: 4 * _products(s), FORMS)
        )
    for name, size in (
        ("wide", {"B": 8, "T": 4096, "W": 4096}),
        ("one series", {"B": 1, "T": 2**26, "W": 1}),
    ):
        small = {
            **size,
            "B": min(2, size["B"]),
            "T": 20_000 if size["W"] == 1 else 700,
            "W": min(70, size["W"]),
        }
        made.append(Case(name, "linear_scan", linear, size, small, "float32", {}, _none, _none))
    return made


# An H200 by its data sheet: bytes a second, bfloat16 operations a second without sparsity.
PAPER = {"copy": 4.8e12, "matmul": 989e12}


def on_paper() -> None:
    """Bytes and products of each kernel in chunks on tensor cores, with keys that need no normalising."""
    print("| case | kernel | MB | products, GFLOP | ms by bytes | ms by products |")
    print("|---|---|---|---|---|---|")
    models = (("forward", chunk_kernels), ("backward", chunk_kernels_back))
    for case, (way, model) in itertools.product(cases(), models):
        if case.methods != FORMS or case.size["B"] > 1:
            continue
        parts = model(case.size, kept=2)
        parts["all"] = tuple(map(sum, zip(*parts.values(), strict=True)))
        for name, (moved, products) in parts.items():
            times = moved / PAPER["copy"], 2 * products / PAPER["matmul"]
            print(
                f"| {case.op}, {case.name}, {way} | {name} | {moved / 1e6:.0f} | {2 * products / 1e9:.0f} | "
                f"{1e3 * times[0]:.2f} | {1e3 * times[1]:.2f} |"
            )


# ---------------------------------------------------------------------------------------------------------------------
# checked


def arrays_of(cupy: Any, case: Case, size: dict[str, int]) -> dict[str, Any]:
    """The case's arrays on the card; parameters of a layer (of one or two axes) stay in float32."""
    made = case.draw(np.random.default_rng(0), **size)
    return {name: cupy.asarray(_rounded(x, case.dtype)) for name, x in made.items()}


def _rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    if x.ndim < 3:
        return x
    if dtype == "bfloat16":
        return x.astype(importlib.import_module("ml_dtypes").bfloat16)
    return x.astype(dtype)


def to_check(every: list[Case]) -> list[Case]:
    """Cases that differ when they are small: the first of each kind."""
    return list({(x.op, x.dtype, *sorted(x.small.items())): x for x in reversed(every)}.values())[::-1]


def check(cupy: Any, case: Case) -> float:
    """The worst deviation of output, state and gradients from float64 on the CPU, relative to the largest value of each."""
    function = getattr(scanfield, case.op)
    card = arrays_of(cupy, case, case.small)
    host = {name: cupy.asnumpy(x).astype("float64") for name, x in card.items()}
    want = _everything(function, host, **case.options)
    worst = 0.0
    for method in case.methods:
        got = _everything(function, card, method=method, **case.options)
        for name, x in want.items():
            y = cupy.asnumpy(got[name]).astype("float64")
            worst = max(worst, float(np.max(np.abs(x - y)) / np.max(np.abs(x))))
    return worst


def _everything(function: Any, arrays: dict[str, Any], **options: Any) -> dict[str, Any]:
    result, pullback = scanfield.vjp(function, **arrays, **options)
    gradients = pullback(result.output * 0 + 1, result.final_state * 0 + 1)
    return {"output": result.output, "final_state": result.final_state, **gradients}


# ---------------------------------------------------------------------------------------------------------------------
# timed

LOOPS = r"""
extern "C" __global__ void exponentials(float* y, int n) {
    float a = threadIdx.x, b = a + 1, c = a + 2, d = a + 3;
    for (int i = 0; i < n; ++i) a = exp2f(-a), b = exp2f(-b), c = exp2f(-c), d = exp2f(-d);
    if (a + b + c + d == 12345.0f) y[0] = a;
}
extern "C" __global__ void multiplications(float* y, int n) {
    float a = threadIdx.x, b = a + 1, c = a + 2, d = a + 3;
    for (int i = 0; i < n; ++i) a = a * b + c, b = b * c + d, c = c * d + a, d = d * a + b;
    if (a + b + c + d == 12345.0f) y[0] = a;
}
"""


class Budget:
    """The time that a whole run may take."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.began = seconds, time.monotonic()

    def allows(self, seconds: float) -> bool:
        """Whether so many seconds are left."""
        return time.monotonic() - self.began + seconds <= self.seconds


# What the longest of these takes, first calls included: a case of ours, a kernel of others, a loop of 65,536 tokens in plain
# operations, a compilation.
OURS, PEER, EAGER, COMPILED = 15.0, 15.0, 60.0, 90.0


def seconds(cupy: Any, run: Callable[[], Any], repeats: int = 10, most: float = 2.0) -> float:
    """The median of some runs, by the card's own clock, after one that is not counted; about ``most`` seconds in all."""
    run()
    cupy.cuda.Device().synchronize()
    start_of_one = time.perf_counter()
    run()
    cupy.cuda.Device().synchronize()
    once = max(time.perf_counter() - start_of_one, 1e-6)
    found = []
    for _ in range(max(1, min(repeats, int(most / once)))):
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        run()
        stop.record()
        stop.synchronize()
        found.append(cupy.cuda.get_elapsed_time(start, stop) / 1e3)
    return statistics.median(found)


def rates(
    cupy: Any, numbers: int = 2**28, blocks: int = 132 * 16, turns: int = 2048, side: int = 8192
) -> dict[str, float]:
    """Bytes of a copy, exponentials, multiply-adds, and operations of matrix products, a second each."""
    x, y = (cupy.empty(numbers, "float32") for _ in range(2))
    copy = 2 * x.nbytes / seconds(cupy, lambda: cupy.copyto(y, x))
    module = cupy.RawModule(code=LOOPS, options=("-std=c++17",))
    threads = 256
    looped = {}
    for name in ("exponentials", "multiplications"):
        kernel = module.get_function(name)
        took = seconds(cupy, lambda kernel=kernel: kernel((blocks,), (threads,), (y, np.int32(turns))))
        looped[name] = 4.0 * turns * blocks * threads / took
    products = {}
    for name, dtype in (("matmul", "float16"), ("matmul of float32", "float32")):
        a = cupy.ones((side, side), dtype)
        products[name] = 2 * float(side) ** 3 / seconds(cupy, lambda a=a: a @ a)
    return {"copy": copy, **looped, **products}


def timed(cupy: Any, case: Case, arrays: dict[str, Any], method: str, found: dict[str, float]) -> list[str]:
    """A row: forward, backward; and the floors of forward."""
    function = getattr(scanfield, case.op)
    result, pullback = scanfield.vjp(function, **arrays, method=method, **case.options)
    cotangent = cupy.ones_like(result.output)
    forward = seconds(cupy, lambda: function(**arrays, method=method, **case.options))
    backward = seconds(cupy, lambda: pullback(cotangent))
    moved = sum(x.nbytes for x in arrays.values()) + result.output.nbytes
    handed, products = moved, 0
    if method in (CHUNK, TENSOR):
        # Normalised queries and keys are float32.
        parts = chunk_kernels(case.size, kept=2 if method == TENSOR else 4, keys=4)
        handed, products = (sum(part[i] for part in parts.values()) for i in (0, 1))
    fused = products if method == CHUNK else 0 if method == TENSOR else case.multiplications(case.size)
    floors = (
        handed / found["copy"],
        case.exponentials(case.size) / found["exponentials"],
        fused / found["multiplications"],
        2 * products / found["matmul"] if method == TENSOR else 0.0,
    )
    shown = [f"{1e3 * x:.3f}" for x in (forward, backward, *floors)]
    return [*shown, f"{forward / max(floors):.2f}", f"{moved / forward / 1e9:.0f}"]


def peers(case: Case, budget: Budget) -> Iterator[tuple[str, str]]:
    """Milliseconds of the same call by others, on torch's tensors on the same card, or why there are none."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return
    if not torch.cuda.is_available():
        return
    if not budget.allows(PEER):  # before anything is drawn
        yield "all of them", f"not timed: {PEER:.0f} s may be needed, and are not left"
        return
    tensors = {}
    for name, x in case.draw(np.random.default_rng(0), **case.size).items():
        tensors[name] = torch.as_tensor(x, device="cuda").to(
            getattr(torch, case.dtype) if x.ndim > 2 else torch.float32
        )
    found = _peer(case, tensors)
    todo = [] if found is None else [(*found, PEER)]
    loop = _gpu_eager.eager(case.op, tensors)
    if loop is not None and case.size["T"] <= 2**16:
        todo.append(("torch, a loop over time", loop, EAGER))
    todo.append(("torch.compile of scanfield", _gpu_eager.compiled(case.op, tensors, case.options), COMPILED))
    for name, call, need in todo:
        if not budget.allows(need):
            yield name, f"not timed: {need:.0f} s may be needed, and are not left"
            continue
        # A peer that fails (memory, a version that it does not know) is a row, not the end.
        try:
            yield name, f"{1e3 * _peer_seconds(torch, call):.3f}"
        except Exception as error:
            yield name, f"failed: {type(error).__name__}"


def _peer_seconds(torch: Any, call: Callable[[], Any], repeats: int = 10, most: float = 2.0) -> float:
    """The median, after two runs that are not counted (the second shows how long one takes)."""
    found: list[float] = []
    wanted = repeats
    for i in range(repeats + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        took = time.perf_counter() - start
        if i == 1:
            wanted = max(1, min(repeats, int(most / max(took, 1e-6))))
        if i > 1:
            found.append(took)
        if len(found) == wanted:
            break
    return statistics.median(found)


def _peer(case: Case, x: dict[str, Any]) -> tuple[str, Callable[[], Any]] | None:
    try:
        if case.op == "selective_scan":
            scan = importlib.import_module("mamba_ssm.ops.selective_scan_interface").selective_scan_fn
            u, step, z, b, c = (
                x[name].transpose(1, 2).contiguous() for name in ("u", "delta", "z", "B", "C")
            )
            return "mamba_ssm", lambda: scan(u, step, x["A"], b, c, x["D"], z, delta_softplus=True)
        if case.op == "gated_delta_rule":
            rule = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
            return "flash-linear-attention", lambda: rule(
                x["query"],
                x["key"],
                x["value"],
                g=x["log_decay"].float(),
                beta=x["beta"],
                use_qk_l2norm_in_kernel=True,
            )
    except ImportError:
        return None
    return None


def main(arguments: list[str] | None = None) -> int:
    """Run it; 1 where a check fails, 2 without a card."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="build and check, no times")
    parser.add_argument(
        "--paper", action="store_true", help="bytes and products of the chunk kernels, without a card"
    )
    parser.add_argument(
        "--budget", type=float, default=420.0, help="seconds that the whole run may take, about"
    )
    chosen = parser.parse_args(arguments)
    budget = Budget(chosen.budget)
    if chosen.paper:
        on_paper()
        return 0
    try:
        cupy = importlib.import_module("cupy")
    except ImportError:
        print("needs CuPy: pip install 'scanfield[cupy-cuda13]'", file=sys.stderr)
        return 2
    if not cupy.cuda.is_available():
        print("needs a CUDA card that CuPy can use", file=sys.stderr)
        return 2
    wrong = 0
    checked = (
        (f"{case.op}, {case.name}, {case.dtype}", check(cupy, case), LIMITS[case.dtype])
        for case in to_check(cases())
    )
    for name, worst, limit in itertools.chain(checked, _gpu_pinn.checks(cupy)):
        fine = worst <= limit
        wrong += not fine
        print(f"{'ok  ' if fine else 'BAD '} {name}: deviates by {worst:.1e}", flush=True)
    if chosen.check or wrong:
        return 1 if wrong else 0
    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    found = rates(cupy)
    print(
        f"\n{properties['name'].decode()}, CUDA {cupy.cuda.runtime.runtimeGetVersion()}, CuPy {cupy.__version__}, "
        f"scanfield {scanfield.__version__}, Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}\n"
        f"copy {found['copy'] / 1e9:.0f} GB/s, float16 matmul {found['matmul'] / 1e12:.0f} TFLOP/s, "
        f"float32 matmul {found['matmul of float32'] / 1e12:.0f} TFLOP/s, "
        f"{found['exponentials'] / 1e12:.2f} T exponentials/s, {found['multiplications'] / 1e12:.1f} T multiply-adds/s\n"
    )
    print(
        "| case | shape | forward, ms | backward, ms | floors: bytes | exponentials | multiply-adds | tensor cores "
        "| forward / largest floor | GB/s |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for case in cases():
        shape = " ".join(f"{name}{n}" for name, n in case.size.items() if name != "wide")
        arrays = None  # drawn once for all forms: that takes longer than the calls
        for method in case.methods:
            form = "" if method == METHOD else f", {method.removeprefix(METHOD + '.')}"
            name = f"{case.op}, {case.name}, {case.dtype}{form}"
            if not budget.allows(OURS):
                print(f"| {name} | {shape} | not timed: no time is left | | | | | | | |")
                continue
            arrays = arrays_of(cupy, case, case.size) if arrays is None else arrays
            row = timed(cupy, case, arrays, method, found)
            print(f"| {name} | {shape} | {' | '.join(row)} |", flush=True)
            cupy.get_default_memory_pool().free_all_blocks()
    print(f"\n{_gpu_pinn.HEAD}")
    if budget.allows(OURS):
        for shown in _gpu_pinn.rows(cupy, seconds, found):
            print(f"| {' | '.join(shown)} |", flush=True)
        cupy.get_default_memory_pool().free_all_blocks()
    # After all of our own: what others take may be much.
    print("\n| the same by others | shape | forward, ms |\n|---|---|---|")
    for case in cases():
        shape = " ".join(f"{name}{n}" for name, n in case.size.items() if name != "wide")
        for name, took in peers(case, budget):
            print(f"| {case.op}, {case.name}, {case.dtype}: {name} | {shape} | {took} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
