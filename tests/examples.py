"""Inputs that walk through every option of every operation, with their float64 truth.

An `Example` is small (time other than heads, K other than V, state other than channels, so that a swapped
axis cannot hide) and knows its truth in any working precision: inputs are rounded first, the truth is
computed from the rounded ones.
"""

from __future__ import annotations

import functools
import importlib.util
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import reference

DELTA_FAMILY = (
    "gdn2",
    "linear_attention",
    "retention",
    "gla",
    "ssd",
    "delta_rule",
    "gated_delta_rule",
    "kda",
    "comba",
    "gated_delta_product",
)
BASE = ("linear_scan", "selective_scan", "gdn2")
OPERATIONS = ("linear_scan", "selective_scan", *DELTA_FAMILY)

# What runs each operation: its generic forms, and the compiled scans, which a run on another library leaves out.
# Shared by all tests that run "every candidate"; a test compares it with the library's own registry.
COMPILED = "numpy.numba"
COMPILED_FOR = {
    COMPILED: "numpy",
    "torch.numba": "torch",  # the same kernels, on tensors
    "torch.generic": "torch",
    "jax.scan": "jax",
}
GENERIC = {
    "linear_scan": ("generic.recurrent", "generic.blocked"),
    "selective_scan": ("generic.recurrent",),
    **dict.fromkeys(DELTA_FAMILY, ("generic.recurrent", "generic.chunk")),
}
METHODS = {op: (*forms, *COMPILED_FOR) for op, forms in GENERIC.items()}
# A form that JAX compiles for seconds at every shape and runs by name alone: tests of every method leave it to others.
DEAR = {"jax": "generic.chunk"}
# What runs Dask arrays block by block, beside their generic forms.
GRAPHS = ("dask.sequential", "dask.parallel")


def methods(library: Any, op: str) -> list[str]:
    """Of `METHODS` (and `GRAPHS`), those that can be forced on this library's arrays."""
    compiles = importlib.util.find_spec("numba") is not None
    name = "numpy" if library.name == "readonly" else library.name
    found = [
        method
        for method in METHODS[op]
        if method != DEAR.get(name)
        and COMPILED_FOR.get(method, name) == name
        and (compiles or not method.endswith(".numba"))
    ]
    return [*found, *GRAPHS] if library.name == "dask" else found


# Packed sequences of 7 tokens: an empty one first, one of 3, an empty one in the middle, one of a single
# token, one of 3.
PACKED = [0, 0, 3, 3, 4, 7]
PACKED_SHORT = [0, 0, 2, 3]  # the same kinds in 3 tokens

# The main input of each operation: its dtype is the dtype of the output.
MAIN = {"linear_scan": "a", "selective_scan": "u", "ssd": "x"}


def main_of(op: str) -> str:
    return MAIN.get(op, "query")


@dataclass(frozen=True, eq=False)
class Example:
    name: str
    op: str
    inputs: Mapping[str, np.ndarray]
    options: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return self.name

    @property
    def time(self) -> int:
        return max(x.shape[1] for n, x in self.inputs.items() if n in ("a", "b", main_of(self.op)))

    def rounded(self, dtype: str) -> dict[str, np.ndarray]:
        """The inputs as a call in `dtype` sees them, in float64 again."""
        return {n: round_to(x, dtype) for n, x in self.inputs.items()}

    @functools.cache  # noqa: B019  (examples live as long as the tests)
    def truth(self, dtype: str = "float64") -> reference.Truth:
        return reference.forward(self.op, self.rounded(dtype), **self.options)

    @functools.cache  # noqa: B019
    def cotangents(self, dtype: str = "float64") -> tuple[np.ndarray, np.ndarray]:
        truth = self.truth("float64")
        rng = rng_of(self.name + " cotangents")
        return tuple(round_to(draw_like(rng, x), dtype) for x in (truth.output, truth.final_state))

    @functools.cache  # noqa: B019
    def gradients(self, dtype: str = "float64") -> dict[str, np.ndarray]:
        return reference.vjp(self.op, self.rounded(dtype), *self.cotangents(dtype), **self.options)


def rng_of(name: str) -> np.random.Generator:
    """A generator for a name: the same numbers in every process, others for every name."""
    return np.random.default_rng(zlib.crc32(name.encode()))


def round_to(x: np.ndarray, dtype: str) -> np.ndarray:
    """`x` rounded to a float type, in float64 (complex data: both parts)."""
    if dtype == "float64":
        return x
    from arrays import numpy_dtype

    low = numpy_dtype(dtype)
    if x.dtype.kind == "c":
        return x.real.astype(low).astype(np.float64) + 1j * x.imag.astype(low).astype(np.float64)
    return x.astype(low).astype(np.float64)


def draw_like(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
    drawn = rng.standard_normal(x.shape)
    return drawn + 1j * rng.standard_normal(x.shape) if x.dtype.kind == "c" else drawn


def complex_normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.standard_normal(shape) + 1j * rng.standard_normal(shape)


# -- data of each operation ----------------------------------------------------------------------------------
def linear_inputs(
    name: str, batch=2, time=7, rest=(3,), *, complex_=False, states=None
) -> dict[str, np.ndarray]:
    rng = rng_of(name)
    shape = (batch, time, *rest)
    a, b = rng.uniform(-1, 1, shape), rng.standard_normal(shape)
    if complex_:
        a, b = a * np.exp(1j * rng.uniform(0, 6, shape)), complex_normal(rng, shape)
    state = (batch if states is None else states, *rest)
    return {
        "a": a,
        "b": b,
        "initial_state": complex_normal(rng, state) if complex_ else rng.standard_normal(state),
    }


def selective_inputs(
    name: str,
    batch=2,
    time=7,
    channels=4,
    state=3,
    *,
    B="time",
    C="time",
    groups=2,
    complex_=False,
    states=None,
    optional=True,
) -> dict[str, np.ndarray]:
    """`B` and `C`: constant, time or groups; `optional`: with D, z, delta_bias and initial_state."""
    rng = rng_of(name)

    def coefficient(layout: str) -> np.ndarray:
        shape = {
            "constant": (channels, state),
            "time": (batch, time, state),
            "groups": (batch, time, groups, state),
        }[layout]
        return complex_normal(rng, shape) if complex_ else rng.standard_normal(shape)

    A = -rng.uniform(0.2, 2, (channels, state))
    state_shape = (batch if states is None else states, channels, state)
    inputs = {
        "u": rng.standard_normal((batch, time, channels)),
        "delta": rng.uniform(0.05, 0.8, (batch, time, channels)),
        "A": A + 1j * rng.uniform(-3, 3, A.shape) if complex_ else A,
        "B": coefficient(B),
        "C": coefficient(C),
    }
    if optional:
        inputs |= {
            "D": rng.standard_normal(channels),
            "z": rng.standard_normal((batch, time, channels)),
            "delta_bias": rng.uniform(-0.04, 0.3, channels),
            "initial_state": complex_normal(rng, state_shape)
            if complex_
            else rng.standard_normal(state_shape),
        }
    return inputs


def gdn2_inputs(
    name: str, batch=2, time=7, heads=2, vheads=None, K=3, V=4, *, log_decay="channel", erase="channel",
    write="channel", states=None, initial_state=True,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Gates: channel, head or none."""
    rng = rng_of(name)
    vheads = heads if vheads is None else vheads
    key = rng.standard_normal((batch, time, heads, K))
    inputs = {
        "query": rng.standard_normal((batch, time, heads, K)),
        "key": key / np.linalg.norm(key, axis=-1, keepdims=True),
        "value": rng.standard_normal((batch, time, vheads, V)),
    }
    gates = (("log_decay", log_decay, -2, 0, K), ("erase", erase, 0, 1, K), ("write", write, 0, 1, V))
    for gate, kind, low, high, size in gates:
        if kind != "none":
            shape = (batch, time, vheads, size) if kind == "channel" else (batch, time, vheads)
            inputs[gate] = rng.uniform(low, high, shape)
    if initial_state:
        inputs["initial_state"] = rng.standard_normal((batch if states is None else states, vheads, K, V))
    return inputs


def ssd_inputs(name: str, batch=2, time=7, heads=4, P=3, groups=2, N=5, *, states=None, optional=True):
    rng = rng_of(name)
    inputs = {
        "x": rng.standard_normal((batch, time, heads, P)),
        "dt": rng.uniform(0.1, 0.9, (batch, time, heads)),
        "A": -rng.uniform(0.2, 2, heads),
        "B": rng.standard_normal((batch, time, groups, N)),
        "C": rng.standard_normal((batch, time, groups, N)),
    }
    if optional:
        inputs["D"] = rng.standard_normal(heads)
        inputs["dt_bias"] = rng.uniform(-0.05, 0.3, heads)
        inputs["initial_state"] = rng.standard_normal((batch if states is None else states, heads, P, N))
    return inputs


def family_inputs(
    op: str, name: str, batch=2, time=7, heads=2, vheads=None, K=3, V=4, *, states=None, householders=2
):
    """The arguments of any member of the delta family under its own names."""
    if op == "gdn2":
        return gdn2_inputs(name, batch, time, heads, vheads, K, V, states=states)
    if op == "ssd":
        return ssd_inputs(name, batch, time, vheads or heads, V, heads, K, states=states)
    rng = rng_of(name)
    every = gdn2_inputs(name, batch, time, heads, vheads, K, V, states=states)
    vheads = heads if vheads is None else vheads
    inputs = {n: every[n] for n in ("query", "key", "value", "initial_state")}
    if op == "comba":
        inputs["erase_key"] = every["key"] * rng.uniform(0, 1, every["key"].shape)
    if op in ("gla", "kda"):
        inputs["log_decay"] = every["log_decay"]
    if op in ("retention", "gated_delta_rule", "comba", "gated_delta_product"):
        inputs["log_decay"] = every["log_decay"][..., 0]
    if op in ("delta_rule", "gated_delta_rule", "kda", "comba"):
        inputs["beta"] = every["erase"][..., 0]
    if op == "gated_delta_product":
        key = rng.standard_normal((batch, time, householders, heads, K))
        inputs["key"] = key / np.linalg.norm(key, axis=-1, keepdims=True)
        inputs["value"] = rng.standard_normal((batch, time, householders, vheads, V))
        inputs["beta"] = rng.uniform(0, 1, (batch, time, householders, vheads))
    return inputs


def op_inputs(op: str, name: str, batch=2, time=7, states=None) -> dict[str, np.ndarray]:
    """Full inputs of any operation."""
    if op == "linear_scan":
        return linear_inputs(name, batch, time, states=states)
    if op == "selective_scan":
        return selective_inputs(name, batch, time, states=states)
    return family_inputs(op, name, batch, time, heads=2, vheads=4, states=states)


# -- the list ------------------------------------------------------------------------------------------------
def _without(inputs: dict[str, np.ndarray], *names: str) -> dict[str, np.ndarray]:
    return {n: x for n, x in inputs.items() if n not in names}


def _linear() -> list[Example]:
    full = linear_inputs
    broadcast = full("linear broadcast")
    a, b = broadcast["a"], broadcast["b"]
    state = broadcast["initial_state"]
    cases = {
        "plain": (full("linear plain"), {}),
        "no state": (_without(full("linear no state"), "initial_state"), {}),
        "two trailing axes": (full("linear two axes", rest=(3, 2)), {}),
        "no trailing axis": (full("linear no axis", rest=()), {}),
        "complex": (full("linear complex", complex_=True), {}),
        "complex reverse": (full("linear complex reverse", complex_=True), {"reverse": True}),
        "real a, complex b": ({**full("linear mixed", complex_=True), "a": a}, {}),
        "a a number a token": ({"a": a[..., :1], "b": b, "initial_state": state}, {}),
        "a constant in time": ({"a": a[:, :1], "b": b, "initial_state": state}, {}),
        "a alike for all rows": ({"a": a[:1], "b": b, "initial_state": state}, {}),
        "b constant in time": ({"a": a, "b": b[:, :1], "initial_state": state}, {}),
        "both broadcast": ({"a": a[:1], "b": b[..., :1], "initial_state": state}, {}),
        "reverse": (full("linear reverse"), {"reverse": True}),
        "a constant in time, reverse": ({"a": a[:, :1], "b": b, "initial_state": state}, {"reverse": True}),
        "packed": (full("linear packed", batch=1, states=5), {"cu_seqlens": PACKED}),
        "packed reverse": (
            full("linear packed reverse", batch=1, states=5),
            {"cu_seqlens": PACKED, "reverse": True},
        ),
        "packed, no state": (
            _without(full("linear packed bare", batch=1), "initial_state"),
            {"cu_seqlens": PACKED},
        ),
        "one token": (full("linear one", time=1), {}),
    }
    return [Example(f"linear_scan: {n}", "linear_scan", *c) for n, c in cases.items()]


def _selective() -> list[Example]:
    full = selective_inputs
    layouts = ("constant", "time", "groups")
    cases: dict[str, tuple[dict, dict]] = {}
    for complex_ in (False, True):
        for B in layouts:
            for C in layouts:
                name = f"{'complex' if complex_ else 'real'}, B {B}, C {C}"
                cases[name] = full(name, B=B, C=C, complex_=complex_), {"delta_softplus": True}
    real_bc = full("real B and C", complex_=True)
    cases |= {
        "nothing optional": (full("selective bare", optional=False), {}),
        "complex A, real B and C": ({**real_bc, "B": real_bc["B"].real, "C": real_bc["C"].real}, {}),
        "complex A, real B": ({**real_bc, "B": real_bc["B"].real}, {"reverse": True}),
        "no softplus": (full("selective no softplus"), {}),
        "one group": (full("selective one group", B="groups", C="groups", groups=1), {}),
        "a group a channel": (full("selective groups = channels", B="groups", groups=4), {}),
        "only D": (_without(full("selective only D"), "z", "delta_bias", "initial_state"), {}),
        "only z": (_without(full("selective only z"), "D", "delta_bias", "initial_state"), {}),
        "only bias": (
            _without(full("selective only bias"), "D", "z", "initial_state"),
            {"delta_softplus": True},
        ),
        "negative step, growth": (
            full("selective growth") | {"delta": -full("selective growth")["delta"] / 4},
            {},
        ),
        "dt_limit": (full("selective limit"), {"dt_limit": (0.2, 0.6)}),
        "dt_limit softplus": (
            full("selective limit softplus"),
            {"dt_limit": (0.0, 0.9), "delta_softplus": True},
        ),
        "reverse": (full("selective reverse", B="groups"), {"reverse": True, "delta_softplus": True}),
        "packed": (
            full("selective packed", batch=1, states=5),
            {"cu_seqlens": PACKED, "delta_softplus": True},
        ),
        "packed reverse": (
            full("selective packed reverse", batch=1, states=5, C="constant"),
            {"cu_seqlens": PACKED, "reverse": True},
        ),
        "packed, no state": (full("selective packed bare", batch=1, optional=False), {"cu_seqlens": PACKED}),
        "packed complex": (
            full("selective packed complex", batch=1, states=5, complex_=True),
            {"cu_seqlens": PACKED},
        ),
        "one token": (full("selective one", time=1), {}),
    }
    return [Example(f"selective_scan: {n}", "selective_scan", *c) for n, c in cases.items()]


def _gdn2() -> list[Example]:
    full = gdn2_inputs
    gates = ("log_decay", "erase", "write")
    cases = {
        "plain": (full("gdn2 plain"), {}),
        "no state": (full("gdn2 no state", initial_state=False), {}),
        "no gates": (full("gdn2 no gates", **dict.fromkeys(gates, "none")), {}),
        "only log_decay": (full("gdn2 only decay", erase="none", write="none"), {}),
        "only erase": (full("gdn2 only erase", log_decay="none", write="none"), {}),
        "only write": (full("gdn2 only write", log_decay="none", erase="none"), {}),
        "no write": (full("gdn2 no write", write="none"), {}),
        "no log_decay": (full("gdn2 no decay", log_decay="none"), {}),
        "gates a head": (full("gdn2 head gates", **dict.fromkeys(gates, "head")), {}),
        "decay a head": (full("gdn2 head decay", log_decay="head"), {}),
        "decay a head, no erase": (
            full("gdn2 head decay only", log_decay="head", erase="none", write="none"),
            {},
        ),
        "erase a head": (full("gdn2 head erase", erase="head"), {}),
        "write a head": (full("gdn2 head write", write="head"), {}),
        "grouped heads": (full("gdn2 grouped", vheads=4), {}),
        "grouped heads, gates a head": (
            full("gdn2 grouped head", vheads=6, **dict.fromkeys(gates, "head")),
            {},
        ),
        "one query head": (full("gdn2 one head", heads=1, vheads=3), {}),
        "scale": (full("gdn2 scale"), {"scale": 0.7}),
        "negative scale": (full("gdn2 negative scale"), {"scale": -1.3}),
        "l2norm": (full("gdn2 l2norm", vheads=4), {"qk_l2norm": True}),
        "l2norm and scale": (full("gdn2 l2norm scale"), {"qk_l2norm": True, "scale": 1.0}),
        "growth": (full("gdn2 growth") | {"log_decay": full("gdn2 growth")["log_decay"] + 1.5}, {}),
        "erase up to two": (full("gdn2 two") | {"erase": 2 * full("gdn2 two")["erase"]}, {}),
        "V one": (full("gdn2 V1", V=1), {}),
        "K one": (full("gdn2 K1", K=1), {}),
        "reverse": (full("gdn2 reverse", vheads=4), {"reverse": True}),
        "packed": (full("gdn2 packed", batch=1, states=5, vheads=4), {"cu_seqlens": PACKED}),
        "packed reverse": (
            full("gdn2 packed reverse", batch=1, states=5),
            {"cu_seqlens": PACKED, "reverse": True, "qk_l2norm": True},
        ),
        "packed, no state": (full("gdn2 packed bare", batch=1, initial_state=False), {"cu_seqlens": PACKED}),
        "one token": (full("gdn2 one", time=1), {}),
    }
    return [Example(f"gdn2: {n}", "gdn2", *c) for n, c in cases.items()]


def _derived() -> list[Example]:
    """Tiny, because the truth of a derived gradient is a difference an entry."""
    found = []
    for op in DELTA_FAMILY[1:]:
        small = {"time": 4, "heads": 1, "vheads": 2, "K": 3, "V": 2}
        whole = dict(batch=2, **small)
        packed = dict(batch=1, states=3, **{**small, "time": 3})
        norm = {} if op == "ssd" else {"qk_l2norm": True, "scale": 0.4}
        soft = {"dt_softplus": True, "dt_limit": (0.3, 0.95)} if op == "ssd" else norm
        cases = {
            "plain": (family_inputs(op, f"{op} plain", **whole), {}),
            "options": (family_inputs(op, f"{op} options", **whole), soft),
            "no state": (_without(family_inputs(op, f"{op} no state", **whole), "initial_state"), {}),
            "packed reverse": (
                family_inputs(op, f"{op} packed", **packed), {"cu_seqlens": PACKED_SHORT, "reverse": True}
            ),
        }  # fmt: skip
        if op == "retention":
            cases["default decay"] = (
                _without(family_inputs(op, "retention default", **whole), "log_decay"),
                {},
            )
            per_head = family_inputs(op, "retention per head", **whole)
            cases["decay a head"] = {**per_head, "log_decay": per_head["log_decay"][0, 0]}, {}
        if op == "gated_delta_product":
            bare = _without(family_inputs(op, "product no decay", **whole), "log_decay")
            cases["no decay"] = bare, {"log_decay": None}
            cases["three"] = family_inputs(op, "product three", **whole, householders=3), {"qk_l2norm": True}
        if op == "ssd":
            cases["bare"] = (
                _without(family_inputs(op, "ssd bare", **whole), "D", "dt_bias", "initial_state"),
                {},
            )
            cases["softplus"] = family_inputs(op, "ssd softplus", **whole), {"dt_softplus": True}
        found += [Example(f"{op}: {n}", op, *c) for n, c in cases.items()]
    return found


EXAMPLES: tuple[Example, ...] = (*_linear(), *_selective(), *_gdn2(), *_derived())


def examples(*ops: str) -> list[Example]:
    return [e for e in EXAMPLES if e.op in ops]


def example(name: str) -> Example:
    return next(e for e in EXAMPLES if e.name == name)


def call_options(
    options: Mapping[str, Any], method: str | None = None, chunk_size: int | None = None
) -> dict[str, Any]:
    """The options of a call, with what chooses and cuts the implementation added where given."""
    extra = {"method": method, "chunk_size": chunk_size}
    return {**options, **{n: x for n, x in extra.items() if x is not None}}
