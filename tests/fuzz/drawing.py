"""Any call of any operation, drawn from its record: sizes, layouts, what is absent, options, packs, how arrays lie.

Structure is drawn by Hypothesis, so that a failing call shrinks; the numbers come from a seed that it draws.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import numpy as np
from arrays import numpy_dtype
from hypothesis import strategies as st

import scanfield
from scanfield.cli.draws import _values as plain_values

LIES = ("plain", "transposed", "every second", "backwards", "unaligned", "read only", "inside")
SPECIAL = {
    "NaN": np.nan,
    "inf": np.inf,
    "zero": 0.0,
    "subnormal": 1e-40,
    "huge": 1e12,  # its square is finite in float32 too
}


@dataclass(frozen=True)
class Drawn:
    """One call: arrays in NumPy as they lie, options, and what a float64 call would be given."""

    op: str
    dtype: str
    arrays: dict[str, np.ndarray]
    options: dict[str, Any]
    special: str
    lies: tuple[str, ...]

    def __repr__(self) -> str:
        shapes = ", ".join(f"{n}{x.shape}{x.dtype}" for n, x in self.arrays.items())
        return f"{self.op}({shapes}, {self.options}; {self.dtype}, {self.special}, {self.lies})"

    @property
    def exact(self) -> dict[str, np.ndarray]:
        """The same numbers in float64."""
        return {
            n: np.array(x, dtype=np.complex128 if x.dtype.kind == "c" else np.float64, order="C")
            for n, x in self.arrays.items()
        }

    @property
    def is_packed(self) -> bool:
        return "cu_seqlens" in self.options


def lie(x: np.ndarray, how: str) -> np.ndarray:
    """Equal values in an array that lies in memory in another way."""
    if how == "transposed":
        return np.ascontiguousarray(x.T).T
    if how == "every second":
        wide = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)
        wide[..., ::2] = x
        return wide[..., ::2]
    if how == "backwards":
        return (
            np.ascontiguousarray(x[:, ::-1])[:, ::-1] if x.ndim > 1 else np.ascontiguousarray(x[::-1])[::-1]
        )
    if how == "unaligned":
        raw = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
        raw[...] = x
        return raw
    if how == "inside":
        around = np.full([n + 2 for n in x.shape], 7, x.dtype)
        inner = tuple(slice(1, -1) for _ in x.shape)
        around[inner] = x
        return around[inner]
    copy = np.array(x, order="C")
    if how == "read only":
        copy.flags.writeable = False
    return copy


@st.composite
def calls(draw: st.DrawFn, op: str, dtypes: tuple[str, ...], tidy: bool = False) -> Drawn:
    """A call that is right. ``tidy``: of few shapes, for libraries that compile at every new one."""
    record = next(r for r in scanfield.operations() if r.name == op)
    keywords = inspect.signature(getattr(scanfield, op)).parameters
    rng = np.random.default_rng([draw(st.integers(0, 2**32 - 1)), *op.encode()])
    small = st.just(2) if tidy else st.integers(1, 4)
    sizes = {
        "batch": draw(st.sampled_from([2, 1] if tidy else [1, 2, 3, 0])),
        "time": draw(st.sampled_from([5, 1] if tidy else [0, 1, 2, 3, 5, 8, 9, 17, 33])),
        "heads": draw(small),
        "key": draw(st.just(3) if tidy else st.sampled_from([1, 2, 3, 4, 5, 8, 16, 17])),
        "value": draw(st.just(4) if tidy else st.sampled_from([1, 2, 3, 4, 5, 8, 16, 33])),
        "state": draw(st.just(3) if tidy else st.sampled_from([1, 2, 3, 4, 8, 16])),
        "householders": draw(st.sampled_from([2, 1])),
        "feature": draw(st.just(3) if tidy else st.sampled_from([1, 2, 3, 5, 8, 17])),
    }
    shared = draw(st.sampled_from([1, 2] if tidy else [1, 2, 3]))
    sizes |= {"vheads": sizes["heads"] * shared, "groups_B": draw(small), "groups_C": 1}
    sizes["groups_C"] = draw(st.sampled_from([1, sizes["groups_B"]]))
    sizes["channels"] = sizes["groups_B"] * shared
    packed = draw(st.booleans()) if not tidy else False
    options: dict[str, Any] = {}
    if packed:
        sizes["batch"] = 1
        inner = draw(st.lists(st.integers(0, sizes["time"]), max_size=4))
        cuts = [0, *sorted(inner), sizes["time"]]
        options["cu_seqlens"] = draw(st.sampled_from([cuts, np.array(cuts, np.int32), np.array(cuts)]))
    sizes["sequence"] = len(options["cu_seqlens"]) - 1 if packed else sizes["batch"]
    if draw(st.booleans()):
        options["reverse"] = True
    for name, values in {
        "qk_l2norm": (False, True),
        "scale": (None, 0.5, -2.0),
        "delta_softplus": (False, True),
        "dt_softplus": (False, True),
        "dt_limit": (None, (0.1, 0.4), (0.0, float("inf"))),
        "chunk_size": (None, 1, 2, 4, 64),
    }.items():
        if name in keywords:
            value = draw(st.sampled_from(values))
            if value is not None:
                options[name] = value

    dtype = draw(st.sampled_from(dtypes))
    low = numpy_dtype(dtype)
    special = (
        draw(st.sampled_from(["none"] * 6 + sorted(SPECIAL))) if dtype in ("float32", "float64") else "none"
    )
    is_complex = dtype in ("float32", "float64") and draw(st.sampled_from([False, False, False, True]))
    arrays: dict[str, np.ndarray] = {}
    lies = []
    for entry in record.inputs:
        if entry.role == "index":
            continue
        if entry.optional and keywords[entry.name].default is inspect.Parameter.empty:
            if draw(st.booleans()):
                options[entry.name] = None
                continue
        elif entry.optional and draw(st.booleans()):
            continue
        axes = [a for a in draw(st.sampled_from(entry.layouts)).split() if a != "1"]
        shape = [sizes[axis] for axis in axes]
        values = plain_values(entry.name, shape, rng)
        if is_complex and entry.complex_allowed:
            values = values + 1j * rng.standard_normal(values.shape) * (0.3 if entry.name == "a" else 1.0)
        wide = {"float32": np.complex64, "float64": np.complex128}.get(dtype)
        values = values.astype(wide if values.dtype.kind == "c" else low)
        how = draw(st.sampled_from(LIES)) if values.size and not tidy else "plain"
        lies.append(how)
        arrays[entry.name] = lie(values, how)
    if special != "none":
        name = draw(st.sampled_from(sorted(arrays)))
        target = arrays[name]
        if target.size:
            changed = np.array(target)
            changed.reshape(-1)[draw(st.integers(0, target.size - 1))] = SPECIAL[special]
            arrays[name] = lie(changed, lies[list(arrays).index(name)])
    return Drawn(op, dtype, arrays, options, special, tuple(lies))
