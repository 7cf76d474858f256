"""The compiled scans beside their peers, beside C and beside the machine's memory, all in one run.

float32, median CPU time of one thread on one CPU; the peers take turns with scanfield. A row says what was measured,
the floor that was set before, and whether it is met. What a peer computes is compared with what scanfield does first.

    python benchmarks/scans_numpy.py
    python benchmarks/scans_numpy.py --only gdn2 memory
    python benchmarks/scans_numpy.py --json
    python benchmarks/scans_numpy.py --output docs/performance.json
    python benchmarks/scans_numpy.py --quick                            # small sizes: does it run?
"""

from __future__ import annotations

import _timing  # before NumPy: it sets the number of BLAS threads

# isort: split
import argparse
import functools
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from unittest import mock

import _compiled
import _peers
import numpy as np

import scanfield
from scanfield import dispatch
from scanfield_numpy.memory import LAST_CACHE, pool, taking_turns

METHOD = "numpy.numba"
Row = dict[str, Any]

# An AVX2 machine, for numba's compiler and for the kernels' vectors.
AVX2 = {
    "NUMBA_CPU_NAME": "haswell",
    "NUMBA_CPU_FEATURES": "+sse,+sse2,+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt",
    "SCANFIELD_VECTOR_BYTES": "32",
}


# -- inputs ------------------------------------------------------------------------------------------------------------
def selective_inputs(batch: int, time: int, channels: int, state: int) -> dict[str, np.ndarray]:
    """The five required arrays."""
    rng = np.random.default_rng(0)
    draws = {
        "u": rng.standard_normal((batch, time, channels)),
        "delta": rng.uniform(0.01, 0.1, (batch, time, channels)),
        "A": -rng.uniform(0.5, 4.0, (channels, state)),
        "B": rng.standard_normal((batch, time, state)),
        "C": rng.standard_normal((batch, time, state)),
    }
    return {name: x.astype(np.float32) for name, x in draws.items()}


def gdn2_inputs(batch: int, time: int, heads: int, size: int) -> dict[str, np.ndarray]:
    """All arrays but the state; gates a channel, keys of length one."""
    rng = np.random.default_rng(0)
    shape = (batch, time, heads, size)
    key = rng.standard_normal(shape)
    draws = {
        "query": rng.standard_normal(shape),
        "key": key / np.linalg.norm(key, axis=-1, keepdims=True),
        "value": rng.standard_normal(shape),
        "log_decay": rng.uniform(-1.0, -0.01, shape),
        "erase": rng.uniform(0, 1, shape),
        "write": rng.uniform(0, 1, shape),
    }
    return {name: x.astype(np.float32) for name, x in draws.items()}


def linear_inputs(batch: int, time: int, width: int) -> dict[str, np.ndarray]:
    """Coefficients below one."""
    rng = np.random.default_rng(0)
    shape = (batch, time, width)
    a, b = (rng.random(shape, dtype=np.float32) for _ in range(2))
    return {"a": a, "b": b}


# -- calls -------------------------------------------------------------------------------------------------------------
def forward(op: Any, arrays: Mapping[str, np.ndarray]) -> Callable[[], Any]:
    """The call itself."""
    return lambda: op(**arrays, method=METHOD)


def training(op: Any, arrays: Mapping[str, np.ndarray], d_output: np.ndarray) -> Callable[[], Any]:
    """Forward and backward."""
    return lambda: scanfield.vjp(op, **arrays, method=METHOD)[1](d_output)


def cotangent(op: Any, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Of the output."""
    output = op(**arrays, method=METHOD).output
    return np.random.default_rng(1).standard_normal(output.shape).astype(np.float32)


def alike(found: Any, wanted: Any, what: str, tolerance: float = 1e-3) -> None:
    """Stop if two computations of one thing differ: a wrong peer is no peer."""
    if isinstance(found, dict):
        assert set(found) == set(wanted), (what, sorted(found), sorted(wanted))
        pairs = {name: (found[name], wanted[name]) for name in wanted}
    else:
        pairs = {str(i): pair for i, pair in enumerate(zip(found, wanted, strict=True))}
    for name, (x, y) in pairs.items():
        error = float(np.max(np.abs(x - y)) / np.max(np.abs(y)))
        if x.shape != y.shape or not error <= tolerance:
            raise SystemExit(f"{what}: {name} of the peer is not ours, {x.shape} and {y.shape}, {error:.1e}")


def row(table: str, work: str, peer: str, ratio: float | None, *, least: float | None = None, most: float | None = None,
        unit: str = "times", **more: Any) -> Row:  # fmt: skip
    """One line of the table; `least` or `most` is the floor or the limit that was set."""
    met = None
    if ratio is not None and (least is not None or most is not None):
        met = ratio >= least if most is None else ratio <= most
    return {
        "table": table,
        "work": work,
        "beside": peer,
        "measured": ratio,
        "unit": unit,
        "at least": least,
        "at most": most,
        "met": met,
        "note": "",
        **more,
    }


SPEED = "Against what users of a CPU have today"


def against(work: str, ours: Callable[[], Any], peers: Mapping[str, tuple[Callable[[], Any], float | None]], quick: bool,
            note: str = "", case: str = "") -> Iterator[Row]:  # fmt: skip
    """Rows of one work and its peers, each with its floor; `case` names the work in `works`, if it is there."""
    for name, (peer, _) in peers.items():
        alike(peer(), ours(), f"{work} beside {name}")
    calls = {"ours": ours} | {name: peer for name, (peer, _) in peers.items()}
    taken = _timing.rivals(calls, least=0.02 if quick else 1.0, rounds=3 if quick else 7)
    for name, (_, least) in peers.items():
        ratio = taken[name] / taken["ours"]
        times = {"ms": 1e3 * taken["ours"], "peer ms": 1e3 * taken[name]}
        yield row(SPEED, work, name, ratio, least=least, **times, note=note, case=case)


# -- rows --------------------------------------------------------------------------------------------------------------
def selective(quick: bool) -> Iterator[Row]:
    """selective_scan against PyTorch and JAX."""
    sizes = (1, 64, 32, 16) if quick else (1, 2048, 1024, 16)
    arrays = selective_inputs(*sizes)
    peers = {
        "the way of mamba's PyTorch reference": (_peers.mamba_reference(arrays), 30.0),
        "jitted lax.scan, state (N, D)": (_peers.jax_selective(arrays), 1.9),
    }
    yield from against(
        f"selective_scan forward, {_named(sizes, 'BTDN')}",
        forward(scanfield.selective_scan, arrays),
        peers,
        quick,
        case="selective_scan",
    )


def selective_training(quick: bool) -> Iterator[Row]:
    """selective_scan with gradients against PyTorch's autograd."""
    works = (
        ((1, 64, 32, 16) if quick else (1, 2048, 1024, 16), "PyTorch eager loop, autograd",
         _peers.eager_selective_training, 25.0),
        ((1, 64, 48, 16) if quick else (1, 1024, 1536, 16), "parallel scan in PyTorch, the way of mambapy",
         _peers.parallel_selective_training, 100.0),
    )  # fmt: skip
    for sizes, name, peer, least in works:
        arrays = selective_inputs(*sizes)
        d_output = cotangent(scanfield.selective_scan, arrays)
        ours = training(scanfield.selective_scan, arrays, d_output)
        work = f"selective_scan forward + backward, {_named(sizes, 'BTDN')}"
        rows = list(against(work, ours, {name: (peer(arrays, d_output), least)}, quick))
        bound = _training_in_c(ours, arrays, d_output, rows[0]["peer ms"], work, quick)
        yield from (line | {"bound": bound} for line in rows)


def _training_in_c(ours, arrays, d_output, peer_ms: float, work: str, quick: bool) -> str:
    """What the same loops in C would reach, in a sentence."""
    try:
        loop = _compiled.loops(_compiled.IEEE).selective_training
        alike(loop(**arrays, d_output=d_output), ours(), f"{work} in C")
    except _compiled.Absent as reason:
        return f"C was not measured: {reason}."
    calls = {"ours": ours, "C": lambda: loop(**arrays, d_output=d_output)}
    taken = _timing.rivals(calls, least=0.02 if quick else 0.7, rounds=3 if quick else 7)
    return (
        f"C of the same loops (gcc, {' '.join(_compiled.IEEE)}) takes {1e3 * taken['C']:.3g} ms, "
        f"{peer_ms / 1e3 / taken['C']:.3g} times; scanfield runs at {100 * taken['C'] / taken['ours']:.3g} % of its speed."
    )


def _floors(least: float) -> Iterator[tuple[str, float | None]]:
    """The floor was set against the plain loop; the other shows what the loop itself costs."""
    return zip(_peers.GDN2_LOOPS, (least, None), strict=True)


def gdn2(quick: bool) -> Iterator[Row]:
    """gdn2 against PyTorch."""
    for size, least in ((64, 28.0), (128, 13.0)):
        sizes = (1, 32, 2, size) if quick else (1, 4096, 4, size)
        arrays = gdn2_inputs(*sizes)
        yield from against(
            f"gdn2 forward, {_named(sizes, 'BTHK')}, V = K",
            forward(scanfield.gdn2, arrays),
            {loop: (_peers.eager_gdn2(arrays, loop), floor) for loop, floor in _floors(least)},
            quick,
            case=f"gdn2, K = V = {size}",
        )


def gdn2_training(quick: bool) -> Iterator[Row]:
    """gdn2 with gradients against PyTorch's autograd."""
    for size, least in ((64, 23.0), (128, 10.0)):
        tokens, note = 32 if quick else 4096, ""
        # Autograd keeps some four states a token.
        while 4 * 4 * 4 * size * size * tokens > 0.6 * _free_bytes():
            tokens //= 2
            note = f"{tokens} tokens: autograd's states of more do not fit in memory here"
        sizes = (1, tokens, 2 if quick else 4, size)
        arrays = gdn2_inputs(*sizes)
        d_output = cotangent(scanfield.gdn2, arrays)
        yield from against(
            f"gdn2 forward + backward, {_named(sizes, 'BTHK')}, V = K",
            training(scanfield.gdn2, arrays, d_output),
            {
                f"{loop}, autograd": (_peers.eager_gdn2_training(arrays, d_output, loop), floor)
                for loop, floor in _floors(least)
            },
            quick,
            note,
        )


def step(quick: bool) -> Iterator[Row]:
    """One token of gdn2 against NumPy."""
    for batch, least in ((1, 5.0), (2 if quick else 64, 8.0)):
        heads, size = (2, 16) if quick else (16, 128)
        arrays = gdn2_inputs(batch, 1, heads, size)
        token = {name: np.ascontiguousarray(x[:, 0]) for name, x in arrays.items()}
        state = np.random.default_rng(2).standard_normal((batch, heads, size, size)).astype(np.float32)
        rows = against(
            f"gdn2 one decoding step, {_named((batch, heads, size), 'BHK')}, V = K",
            lambda state=state, token=token: scanfield.gdn2.step(state, **token, method=METHOD),
            {"NumPy einsum step": (lambda state=state, token=token: _peers.einsum_step(state, **token), least)},
            quick,
        )  # fmt: skip
        reached, parts = _step_in_c(state, token, quick), _step_parts(state, token, quick)
        for line in rows:
            yield line | {"bound": f"{reached(line['peer ms'])} {parts}"}


def _step_parts(state: np.ndarray, token: Mapping[str, np.ndarray], quick: bool) -> str:
    """What a step's time is made of, in a sentence."""
    tiny = {name: np.ascontiguousarray(x[:1, :1, :8]) for name, x in token.items()}
    little, copied = np.ascontiguousarray(state[:1, :1, :8, :8]), np.empty_like(state)

    def python() -> None:
        scanfield.gdn2.step(little, **tiny, method=METHOD)

    def cold() -> None:
        np.copyto(copied, state)
        python()

    calls: dict[str, Callable[[], Any]] = {
        "kernel": _kernel_alone(state, token),
        "python": python,
        "cold": cold,
        "copy": lambda: np.copyto(copied, state),
        "array": taking_turns(state.shape, state.dtype),
    }
    for call in calls.values():  # from its fourth call on a step has nothing to find out
        for _ in range(4):
            call()
    taken = {name: 1e3 * x for name, x in _timing.rivals(calls, least=0.02 if quick else 0.5).items()}
    cold = taken["cold"] - taken["copy"]
    more = f"{cold:.2g} ms" if cold > 0 else "too little to be told beside it"
    return (
        f"Of scanfield's own time its kernel takes {taken['kernel']:.3g} ms, memory for the new state "
        f"{taken['array']:.2g} ms, and the rest is Python: a step of one head of 8 numbers takes "
        f"{taken['python']:.2g} ms, and {more} where the copy of a state has just gone through the caches."
    )


def _kernel_alone(state: np.ndarray, token: Mapping[str, np.ndarray]) -> Callable[[], None]:
    """The compiled kernel of a step of ``gdn2`` on these arrays."""
    from scanfield_numpy import gated_delta
    from scanfield_numpy.threads import block_of

    names = ("query", "key", "value", "log_decay", "erase", "write")
    arrays = (*(token[name][:, None] for name in names), state, None)
    call = dispatch.Call("gdn2", arrays, (state.shape[2] ** -0.5, False, None), state.dtype.name)
    told: list[Any] = []
    own = gated_delta.run
    try:
        gated_delta.run = lambda *given: told.append(given)
        dispatch.implementation("gdn2", METHOD).step(call)
    finally:
        gated_delta.run = own
    kernel, dtype, tasks, _, memory, integers, arrays = told[0]
    block, held = block_of(integers, arrays), np.zeros(memory + 16, dtype)
    compiled, zero, address = kernel(dtype), np.dtype(dtype).type(0), held.ctypes.data
    place, own_place = block.buffer_info()[0], address + -address % 64
    return lambda kept=(block, arrays, held): compiled(0, tasks, place, own_place, zero)


def _step_in_c(state: np.ndarray, token: Mapping[str, np.ndarray], quick: bool) -> Callable[[float], str]:
    """What C reaches that makes the same step, and one that copies the state: a sentence, from the peer's time."""
    if quick:
        return lambda peer: "C was not measured in a short run."
    try:
        loops = _compiled.loops(_compiled.IEEE)
    except _compiled.Absent as reason:
        told = f"C was not measured: {reason}."
        return lambda peer: told
    # Pages that are there, on lines of the cache.
    held = np.zeros(state.size + 32, np.float32)
    start = -held.ctypes.data // 4 % 16
    last = held[start : start + state.size].reshape(state.shape)
    past = state.nbytes > LAST_CACHE
    output = np.empty_like(token["value"])
    calls = {
        "step": loops.gdn2_step(state, **token, output=output, last=last, past=past),
        "copy": loops.copy(state, last, past=past),
    }
    calls["step"]()
    alike((output, last), scanfield.gdn2.step(state, **token, method=METHOD), "a step in C")
    taken = {name: 1e3 * x for name, x in _timing.rivals(calls, least=0.5).items()}
    way = ", past the cache," if past else ""
    return lambda peer: (
        f"C that makes the same step into an array that is there{way} takes {taken['step']:.3g} ms, "
        f"{peer / taken['step']:.3g} times, and to copy the state alone {taken['copy']:.3g} ms, "
        f"{peer / taken['copy']:.3g} times: no step that leaves its state as it was is faster than that copy."
    )


def linear(quick: bool) -> Iterator[Row]:
    """linear_scan against the memory's bandwidth."""
    sizes = (2, 64, 64) if quick else (8, 4096, 512)
    arrays = linear_inputs(*sizes)
    a, b = arrays.values()
    triad, told = _triad(a, b)
    calls = {"ours": forward(scanfield.linear_scan, arrays), "triad": triad}
    taken = _timing.rivals(calls, least=0.02 if quick else 1.0, rounds=3 if quick else 7)
    work = f"linear_scan forward, {_named(sizes, 'BTD')}"
    moved = 3e-9 * a.nbytes
    yield row(
        "Against the machine's memory", work, f"STREAM triad, {told}", 100 * taken["triad"] / taken["ours"],
        least=70.0, unit="% of its bandwidth", case="linear_scan", ms=1e3 * taken["ours"],
        **{"peer ms": 1e3 * taken["triad"],
           "note": f"{moved / taken['ours']:.1f} of {moved / taken['triad']:.1f} GB/s; the call makes its output anew, "
                   "triad writes into one that is there"},
    )  # fmt: skip


def memory(quick: bool) -> Iterator[Row]:
    """What forward and backward take at their peak."""
    cases = {
        "linear_scan": linear_inputs(2, *((128, 64) if quick else (4096, 512))),
        "selective_scan": selective_inputs(1, *((128, 64, 16) if quick else (2048, 1024, 16))),
        "gdn2": gdn2_inputs(1, *((128, 2, 64) if quick else (4096, 4, 64))),
    }
    for name, arrays in cases.items():
        op = getattr(scanfield, name)
        d_output = cotangent(op, arrays)
        kept: list[Any] = []

        def both(op=op, arrays=arrays, d_output=d_output, kept=kept) -> None:
            result, pullback = scanfield.vjp(op, **arrays, method=METHOD)
            kept[:] = [result, pullback(d_output)]

        both()
        kept.clear()
        pool.clear()  # memory that waits for a next result would not be seen
        peak = _timing.peak_bytes(both)
        result, gradients = kept
        extra = peak - sum(x.nbytes for x in result)
        assert extra >= sum(x.nbytes for x in gradients.values()), "not all memory was seen"
        lasting = sum(x.nbytes for x in (*arrays.values(), *gradients.values()))
        yield row(
            "Memory", f"{name} forward + backward, {_shape(arrays)}", "bytes of inputs and gradients", extra / lasting,
            most=1.5, note=f"{extra / 1e6:.1f} of {lasting / 1e6:.1f} MB, the gradients themselves counted as taken",
        )  # fmt: skip


def length(quick: bool) -> Iterator[Row]:
    """Cost per token at lengths of 256 to 262,144, as many tokens in all."""
    total = 2048 if quick else 262_144
    lengths = [256 * 4**i for i in range(6) if 256 * 4**i <= total]
    makers = {
        "linear_scan": lambda time: linear_inputs(total // time, time, 64),
        "selective_scan": lambda time: selective_inputs(total // time, time, 64, 16),
        "gdn2": lambda time: gdn2_inputs(total // time, time, 1, 64),
    }
    for name, make in makers.items():
        arrays = {time: make(time) for time in lengths}
        calls = {time: forward(getattr(scanfield, name), given) for time, given in arrays.items()}
        taken = _timing.rivals(calls, least=0.02 if quick else 0.7, rounds=3 if quick else 7)
        each = {time: 1e9 * seconds / total for time, seconds in taken.items()}
        listed = ", ".join(f"{time:,}: {ns:.1f}" for time, ns in each.items())
        yield row(
            "Cost per token", f"{name} forward, {total:,} tokens in all, {_shape(arrays[lengths[0]], 2)} a token",
            f"T = {lengths[0]:,} to {lengths[-1]:,}", max(each.values()) / min(each.values()), most=1.15,
            unit="max / min", note=f"ns a token at T = {listed}",
        ) | {"bound": _length_in_c(name, arrays, total, quick)}  # fmt: skip


def _sequences(arrays: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """Each sequence of a batch alone; A is that of all."""
    batch = max(len(x) for name, x in arrays.items() if name != "A")
    return [{name: x if name == "A" else x[i : i + 1] for name, x in arrays.items()} for i in range(batch)]


def _length_in_c(name: str, arrays: dict[int, dict[str, np.ndarray]], total: int, quick: bool) -> str:
    """How even the same loops in C are over these lengths, in a sentence: what is uneven there too is the machine's."""
    try:
        loop = getattr(
            _compiled.loops(_compiled.IEEE),
            {"selective_scan": "selective", "linear_scan": "linear"}.get(name, name),
        )
        # Most of C's loops take one sequence: one call for each.
        rows = {
            time: [given] if name == "linear_scan" else _sequences(given) for time, given in arrays.items()
        }
        calls = {time: lambda given=given: [loop(**x) for x in given] for time, given in rows.items()}
        taken = _timing.rivals(calls, least=0.02 if quick else 0.4, rounds=3 if quick else 5)
    except _compiled.Absent as reason:
        return f"C was not measured: {reason}."
    listed = ", ".join(f"{time:,}: {1e9 * seconds / total:.1f}" for time, seconds in taken.items())
    return f"C of the same loops in this run: {max(taken.values()) / min(taken.values()):.3g}; ns a token at T = {listed}."


# -- against C ---------------------------------------------------------------------------------------------------------
def works(quick: bool) -> dict[str, tuple[Any, dict[str, np.ndarray]]]:
    """The forward calls that are also written in C, and timed on narrower vectors."""
    return {
        "selective_scan": (
            scanfield.selective_scan,
            selective_inputs(1, *((64, 32, 16) if quick else (2048, 1024, 16))),
        ),
        "gdn2, K = V = 64": (scanfield.gdn2, gdn2_inputs(1, *((32, 2, 64) if quick else (4096, 4, 64)))),
        "gdn2, K = V = 128": (scanfield.gdn2, gdn2_inputs(1, *((32, 2, 128) if quick else (4096, 4, 128)))),
        "linear_scan": (scanfield.linear_scan, linear_inputs(*((2, 64, 64) if quick else (8, 4096, 512)))),
    }


def c(quick: bool) -> Iterator[Row]:
    """Compiled C of the same loops."""
    table = "Against C of the same loops"
    names = {"selective_scan": "selective", "gdn2": "gdn2", "linear_scan": "linear"}
    for work, (op, arrays) in works(quick).items():
        ours = forward(op, arrays)
        calls: dict[str, Callable[[], Any]] = {"ours": ours}
        builds = {"gcc -O3 -march=native": _compiled.IEEE, "the same with -ffast-math": _compiled.FAST}
        try:
            for build, flags in builds.items():
                loop = getattr(_compiled.loops(flags), names[work.split(",")[0]])
                calls[build] = lambda loop=loop, arrays=arrays: loop(**arrays)
                alike(calls[build](), ours(), f"{work} in C, {build}")
        except _compiled.Absent as reason:
            yield row(table, f"{work} forward", "C", None, unit="", note=f"not measured: {reason}", case=work)
            continue
        taken = _timing.rivals(calls, least=0.02 if quick else 1.0, rounds=3 if quick else 7)
        told = {"bound": _gdn2_limits(arrays, quick)} if op is scanfield.gdn2 else {}
        for build in builds:
            yield row(
                table, f"{work} forward, {_shape(arrays)}", build, 100 * taken[build] / taken["ours"],
                least=85.0 if build != "the same with -ffast-math" else None, unit="% of its speed", case=work,
                ms=1e3 * taken["ours"], **{"peer ms": 1e3 * taken[build], "note": ""}, **told,
            )  # fmt: skip


def _gdn2_limits(arrays: Mapping[str, np.ndarray], quick: bool) -> str:
    """What memory alone takes, the arithmetic alone, and tokens that lie in cache: a sentence."""
    loops = _compiled.loops(_compiled.IEEE)
    _, time, heads, size = arrays["query"].shape
    tokens = {
        count: {name: x[:, :count].copy() for name, x in arrays.items()} for count in (8, 16 if quick else 64)
    }
    each = heads * time
    # A pass over the state takes 13 multiply-adds a number for four tokens.
    count = 13 * size * size * each // 4
    calls = {"moves": loops.gdn2_moves(**arrays), "arithmetic": loops.multiply_adds(count)}
    for number, given in tokens.items():
        calls[f"ours {number}"] = forward(scanfield.gdn2, given)
        calls[f"C {number}"] = lambda given=given: loops.gdn2(**given)
    taken = _timing.rivals(calls, least=0.02 if quick else 0.5, rounds=3 if quick else 15)
    few, more = tokens
    cached = {
        name: (taken[f"{name} {more}"] - taken[f"{name} {few}"]) / (heads * (more - few))
        for name in ("ours", "C")
    }
    return (
        f"C that only reads the six arrays and writes the output takes {1e9 * taken['moves'] / each:.3g} ns a token and "
        f"head, the {count / each / size**2:.3g} multiply-adds for each number of the state "
        f"{1e9 * taken['arithmetic'] / each:.3g} ns at the most that C reaches in registers. Over tokens that lie in "
        f"cache ({few} to {more}) scanfield takes {1e9 * cached['ours']:.3g} ns and C of the loop "
        f"{1e9 * cached['C']:.3g}: what is more over all tokens is memory."
    )


# -- in processes of their own -----------------------------------------------------------------------------------------
def avx2(quick: bool) -> Iterator[Row]:
    """scanfield as it is compiled for an AVX2 machine."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return
    here = _alone(quick)
    there = json.loads(_child(__file__, "--alone", *(["--quick"] if quick else []), **AVX2))
    for work, seconds in there.items():
        yield row(
            "Compiled for an AVX2 machine (haswell), run on this one", work, "compiled for this machine",
            here[work] / seconds, ms=1e3 * seconds, **{"peer ms": 1e3 * here[work], "note": ""},
        )  # fmt: skip


def _alone(quick: bool) -> dict[str, float]:
    """CPU seconds of scanfield's rows."""
    calls: dict[str, Callable[[], Any]] = {}
    for work, (op, arrays) in works(quick).items():
        calls[f"{work} forward"] = forward(op, arrays)
        if op is not scanfield.linear_scan:
            calls[f"{work} forward + backward"] = training(op, arrays, cotangent(op, arrays))
    return _timing.rivals(calls, least=0.02 if quick else 0.7, rounds=3 if quick else 5)


FIRST = """
import json, sys, time
import numpy as np, scanfield
op, x, heads = sys.argv[1], np.full((1, 4, 2), 0.5, np.float32), np.full((1, 4, 1, 2), 0.5, np.float32)
arrays = {"linear_scan": (x, x), "selective_scan": (x, x, x[0, :2], x, x), "gdn2": (heads,) * 6}[op]
function, seconds, start = getattr(scanfield, op), {}, time.process_time()
def lap(name):
    global start
    now = time.process_time()
    seconds[name], start = now - start, now
import numba
lap("numba")
function(*arrays, method="numpy.numba")
lap("forward")
result, pullback = scanfield.vjp(function, *arrays, method="numpy.numba")
pullback(result.output)
lap("backward")
print(json.dumps(seconds))
"""


START = """
import time
import numba
start = time.process_time()
numba.njit(lambda x: x + 1).compile("(int64,)")
print(time.process_time() - start)
"""


def first(quick: bool) -> Iterator[Row]:
    """What compiling costs at the first call."""
    for op in ("linear_scan",) if quick else ("linear_scan", "selective_scan", "gdn2"):
        found = {"without a cache": _first_calls(op, "")}
        with tempfile.TemporaryDirectory(prefix="scanfield-bench-") as folder:
            _first_calls(op, folder)
            if not any(Path(folder).rglob("*.nbc")):
                raise SystemExit(f"{op}: nothing came into SCANFIELD_CACHE_DIR")
            found["from SCANFIELD_CACHE_DIR"] = _first_calls(op, folder)
        start = float(_child("-c", START))
        bound = f"numba's own start, for a function of one line, takes {start:.2g} s of it; the rest goes into its passes."
        for verb, most in (("forward", 1.5), ("backward", 3.0)):
            for way, seconds in found.items():
                yield row(
                    "First call of a process", f"{op} {verb}", way, seconds[verb],
                    most=most if way == "without a cache" else 0.3, unit="CPU seconds",
                    note=f"importing numba, {seconds['numba']:.2f} s, comes before",
                    **({"bound": bound} if verb == "forward" and way == "without a cache" else {}),
                )  # fmt: skip


def _first_calls(op: str, folder: str) -> dict[str, float]:
    found: dict[str, float] = json.loads(_child("-c", FIRST, op, SCANFIELD_CACHE_DIR=folder))
    return found


def _child(*arguments: str, **environment: str) -> str:
    """What a Python of its own prints, on the same CPU."""
    clean = {name: x for name, x in os.environ.items() if not name.startswith("SCANFIELD_")}
    done = subprocess.run(
        [sys.executable, *arguments], env=clean | environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{arguments[:2]} failed:\n{done.stderr[-3000:]}")
    return done.stdout


# -- widths ------------------------------------------------------------------------------------------------------------
def widths(quick: bool) -> Iterator[Row]:
    """Few lanes have a kernel for each number of them: what that costs, and what one for all would."""
    from scanfield.scans.launches import Launches
    from scanfield_numpy import linear as ours

    few = ours._few
    for width in (1, 2) if quick else (1, 2, 3, 4, 8):
        arrays = linear_inputs(1, 2048 if quick else 200_000, width)
        run = forward(scanfield.linear_scan, arrays)
        start = time.process_time()
        run()
        first = time.process_time() - start
        # Both the long way: a call that goes straight keeps the kernel it knows.
        with mock.patch.object(Launches, "run", lambda *_: None):  # noqa: PT008  # a mock's own time would be measured
            own = _timing.seconds(run, least=0.02 if quick else 0.3)
            try:
                ours._few = lambda *_: False
                ours._plan.cache_clear()
                one = _timing.seconds(run, least=0.02 if quick else 0.3)
            finally:
                ours._few = few
                ours._plan.cache_clear()
        yield row(
            "One kernel for each number of few lanes", f"linear_scan forward, lanes: {width}",
            "the kernel that takes any number", one / own,
            **{"ms": 1e3 * own, "peer ms": 1e3 * one, "note": f"its first call takes {first:.2g} CPU seconds"},
        )  # fmt: skip


# -- threads -----------------------------------------------------------------------------------------------------------
def threads(quick: bool) -> Iterator[Row]:
    """Wall time on two CPUs, the one row that is not CPU time."""
    if len(CPUS) < 2:
        return
    for work, (op, arrays) in works(quick).items():
        call, wall = forward(op, arrays), {}
        for count in (1, 2):
            _on(sorted(CPUS)[:count])
            wall[count] = _wall(call, 3 if quick else 15)
        _on(sorted(CPUS)[:1])
        yield row(
            "Wall time of two threads on two CPUs", f"{work} forward, {_shape(arrays)}", "one thread",
            wall[1] / wall[2], ms=1e3 * wall[2],
            **{"peer ms": 1e3 * wall[1], "note": "best of several rounds"},
        )  # fmt: skip


def _wall(call: Callable[[], Any], rounds: int) -> float:
    call()
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


CPUS = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else {0}


def _on(cpus: Iterable[int]) -> None:
    """Stay on these CPUs; scanfield, PyTorch and JAX take as many threads."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, set(cpus))


# -- small things ------------------------------------------------------------------------------------------------------
@functools.cache
def _triad_loops() -> tuple[Any, str]:
    try:
        return _compiled.loops(_compiled.IEEE).triad, "in C"
    except _compiled.Absent:
        from numba import njit

        @njit(fastmath=True)
        def triad(a, b, output):
            for i in range(output.size):
                output[i] = a[i] + np.float32(0.5) * b[i]

        return triad, "compiled by numba"


def _triad(a: np.ndarray, b: np.ndarray) -> tuple[Callable[[], Any], str]:
    loop, told = _triad_loops()
    output = np.zeros(a.size, np.float32)
    return lambda: loop(a.reshape(-1), b.reshape(-1), output), told


def _free_bytes() -> float:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 8e9


def _named(sizes: Iterable[int], letters: str) -> str:
    return " ".join(f"{letter}{size}" for letter, size in zip(letters, sizes, strict=True))


def _shape(arrays: Mapping[str, np.ndarray], first_axis: int = 0) -> str:
    main = next(iter(arrays.values()))
    states = f", N {arrays['A'].shape[1]}" if "A" in arrays else ""
    return f"({', '.join(map(str, main.shape[first_axis:]))}){states}"


def machine() -> dict[str, Any]:
    """What the figures were measured with."""

    def found(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    packages = ("scanfield", "numpy", "numba", "llvmlite", "torch", "jax")
    return {
        "processor": _timing.processor(),
        "cpus": len(CPUS),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: found(name) for name in packages},
        "gcc": _compiled.version(),
        "flags of C": " ".join(_compiled.IEEE),
        "date": time.strftime("%Y-%m-%d"),
    }


ROWS: dict[str, Callable[[bool], Iterator[Row]]] = {
    "selective": selective,
    "selective_training": selective_training,
    "gdn2": gdn2,
    "gdn2_training": gdn2_training,
    "step": step,
    "linear": linear,
    "memory": memory,
    "length": length,
    "c": c,
    "avx2": avx2,
    "first": first,
    "widths": widths,
    "threads": threads,
}


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--output", metavar="FILE", help="write JSON")
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run?")
    parser.add_argument("--only", nargs="+", choices=ROWS, metavar="ROWS", help=f"some of {', '.join(ROWS)}")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    _on(sorted(CPUS)[:1])
    if asked.alone:
        print(json.dumps(_alone(asked.quick)))
        return
    rows: list[Row] = []
    for name in asked.only or ROWS:
        print(f"{name} ...", file=sys.stderr, flush=True)
        rows += ROWS[name](asked.quick)
    if asked.quick:  # the floors are for the full sizes
        rows = [line | {"met": None} for line in rows]
    arguments = [*(["--quick"] if asked.quick else []), *(["--only", *asked.only] if asked.only else [])]
    command = " ".join(["python benchmarks/scans_numpy.py", *arguments])
    report = {"command": command, "machine": machine(), "rows": rows}
    if asked.output:
        Path(asked.output).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    elif asked.json:
        print(json.dumps(report, indent=2))
    else:
        print(", ".join(f"{name} {value}" for name, value in report["machine"].items()))
        print_rows(rows)


def print_rows(rows: Iterable[Row]) -> None:
    """The rows as text."""
    table = None
    for line in rows:
        if line["table"] != table:
            table = line["table"]
            print(f"\n{table}")
        floor = "" if line["met"] is None else f" ({'met' if line['met'] else 'NOT MET'}: {goal(line)})"
        measured = "" if line["measured"] is None else f"{line['measured']:.3g} {line['unit']}"
        print(f"  {line['work']} | {line['beside']} | {measured}{floor} {line['note']}")


def goal(line: Row) -> str:
    """What was asked of a row."""
    return f"at least {line['at least']:g}" if line["at most"] is None else f"at most {line['at most']:g}"


if __name__ == "__main__":
    main()
