"""The compiled scans against generic code, in sizes and options that reach every branch of the kernels.

Golden cases, examples and properties run on them in tests/scans and tests/field.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from arrays import deviation
from checks import TOLERANCE

import scanfield

pytest.importorskip("numba")

pytestmark = pytest.mark.backend("numpy")

METHOD = "numpy.numba"


# -- sizes and options that reach every branch of the kernels -----------------------------------------------
def draw(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape)


def bounds_of(time: int) -> list[int]:
    return [0, 0, 5, 12, time]


def linear(
    time: int, lanes: int, a_ones: str, b_ones: str, packed: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    rng = np.random.default_rng(time + lanes)
    full = {"b": 1 if packed else 3, "t": time, "f": lanes}

    def array(ones: str) -> np.ndarray:
        return rng.uniform(-1, 1, [1 if axis in ones else size for axis, size in full.items()])

    a, b = array(a_ones), array(b_ones)
    whole = np.broadcast_shapes(a.shape, b.shape)
    inputs = {"a": a, "b": b}
    inputs["initial_state"] = draw(rng, 4 if packed else whole[0], whole[2])
    return inputs, {"cu_seqlens": bounds_of(time)} if packed else {}


def selective(
    time: int, channels: int, N: int, layouts: str, extras: str, packed: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    rng = np.random.default_rng(time + channels)
    batch = 1 if packed else 2
    shapes = {"c": (channels, N), "t": (batch, time, N), "g": (batch, time, 4, N)}
    inputs = {
        "u": draw(rng, batch, time, channels),
        "delta": rng.random((batch, time, channels)),
        "A": -2 * rng.random((channels, N)),
        "B": draw(rng, *shapes[layouts[0]]),
        "C": draw(rng, *shapes[layouts[1]]),
    }
    options: dict[str, Any] = {}
    if "z" in extras:
        inputs["z"] = draw(rng, batch, time, channels)
    if "D" in extras:
        inputs["D"] = draw(rng, channels)
    if "s" in extras:
        inputs["delta_bias"] = draw(rng, channels)
        options["delta_softplus"] = True
    if "l" in extras:
        options["dt_limit"] = (0.4, 0.9)
    if "h" in extras:
        inputs["initial_state"] = draw(rng, 4 if packed else batch, channels, N)
    if packed:
        options["cu_seqlens"] = bounds_of(time)
    return inputs, options


def gdn2(time: int, heads: int, vheads: int, K: int, V: int, gates: str, packed: bool) -> tuple[dict, dict]:
    """``gates``: for decay, erase and write each k (a channel's), s (scalar) or - (none); then h with a state."""
    rng = np.random.default_rng(time + K + V)
    batch = 1 if packed else 2
    inputs = {
        "query": draw(rng, batch, time, heads, K),
        "key": draw(rng, batch, time, heads, K) * K**-0.5,
        "value": draw(rng, batch, time, vheads, V),
    }
    for kind, name, width, sign in zip(
        gates, ("log_decay", "erase", "write"), (K, K, V), (-1, 1, 1), strict=False
    ):
        if kind != "-":
            shape = (batch, time, vheads) if kind == "s" else (batch, time, vheads, width)
            inputs[name] = sign * rng.random(shape)
    if gates[3:] == "h":
        inputs["initial_state"] = draw(rng, 4 if packed else batch, vheads, K, V)
    return inputs, {"cu_seqlens": bounds_of(time)} if packed else {}


VARIED = {
    "linear_scan": [
        linear(time, lanes, a_ones, b_ones, packed)
        for time, lanes in ((70, 5), (33, 1), (20, 1040), (300, 3), (131, 1))
        for a_ones, b_ones in (("", ""), ("f", ""), ("bt", ""), ("", "tf"), ("bf", "t"))
        for packed in (False, True)
    ],
    "selective_scan": [
        selective(time, channels, N, layouts, extras, packed)
        for time, channels, N in ((37, 32, 16), (18, 100, 3), (33, 40, 17), (1, 4, 1))
        for layouts, extras in (
            ("tt", "zDsh"),
            ("gt", ""),
            ("cc", "z"),
            ("gg", "lh"),
            ("ct", "Dsl"),
            ("tc", "s"),
        )
        for packed in (False, True)
        if time > 12 or not packed
    ],
    "gdn2": [
        gdn2(*sizes, gates, packed)
        for sizes in ((37, 1, 2, 16, 16), (17, 2, 4, 5, 37), (20, 1, 3, 100, 130), (1, 2, 2, 8, 1))
        for gates in ("kkkh", "sss", "---h", "k--h", "sk-", "-sk", "ks-")
        for packed in (False, True)
        if sizes[0] > 12 or not packed
    ],
}


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("op", list(VARIED))
def test_agrees_with_generic(op: str, reverse: bool):
    function = getattr(scanfield, op)
    tried = 0
    for inputs, options in VARIED[op]:
        for dtype in ("float64", "float32"):
            given = {name: x.astype(dtype) for name, x in inputs.items()}
            wide = {name: x.astype("float64") for name, x in given.items()}
            rng = np.random.default_rng(7)
            want, want_pull = scanfield.vjp(
                function, **wide, **options, reverse=reverse, method="generic.recurrent"
            )
            cotangents = [rng.standard_normal(x.shape).astype(dtype) for x in want]
            got, pull = scanfield.vjp(function, **given, **options, reverse=reverse, method=METHOD)
            plain = function(**given, **options, reverse=reverse, method=METHOD)
            pairs = {"output": (got.output, want.output), "state": (got.final_state, want.final_state)}
            pairs |= {
                "forward": (plain.output, want.output),
                "forward's state": (plain.final_state, want.final_state),
            }
            wanted = want_pull(*(x.astype("float64") for x in cotangents))
            pairs |= {name: (x, wanted[name]) for name, x in pull(*cotangents).items()}
            stateless = [{n: x for n, x in each.items() if n != "initial_state"} for each in (given, wide)]
            maps = [
                scanfield.summarise(function, **each, **options, reverse=reverse, method=method)
                for each, method in zip(stateless, (METHOD, "generic.recurrent"), strict=True)
            ]
            pairs |= {"map's state": (maps[0].state, maps[1].state)}
            pairs |= {"transition": (maps[0].transition, maps[1].transition)}
            for name, (x, y) in pairs.items():
                assert x.dtype == dtype, name
                shapes = {key: array.shape for key, array in given.items()}
                # A gradient summed over all tokens, or a product of them all, may cancel a few digits.
                assert deviation(x, y, floor=1e-3) <= 4 * TOLERANCE[dtype], (name, dtype, shapes, options)
            tried += 1
    assert tried == 2 * len(VARIED[op]) >= 50


@pytest.mark.parametrize("op", list(VARIED))
def test_only_what_is_wanted(op: str):
    """Each gradient alone is the one among all, bit for bit, and either cotangent may be absent."""
    inputs, options = VARIED[op][0]
    result, pull = scanfield.vjp(getattr(scanfield, op), **inputs, **options, method=METHOD)
    every = pull(np.ones_like(result.output))
    for name in inputs:
        _, pull = scanfield.vjp(getattr(scanfield, op), **inputs, **options, wrt=name, method=METHOD)
        alone = pull(np.ones_like(result.output))
        assert list(alone) == [name]
        assert np.array_equal(alone[name], every[name]), name
    nothing = pull(d_final_state=np.zeros_like(result.final_state))
    assert not np.any(nothing[name])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_not_a_number_and_infinity(dtype: str):
    """What is not finite stays where the token recurrence has it, in lanes, tokens and sums."""
    spots = {
        "linear_scan": ("b", (0, 9, 3)),
        "gdn2": ("value", (0, 9, 1, 3)),
        "selective_scan": ("u", (0, 9, 3)),
    }
    for op, (name, spot) in spots.items():
        inputs, options = VARIED[op][0]
        for value in (np.nan, np.inf):
            given = {key: x.astype(dtype) for key, x in inputs.items()}
            given[name][spot] = value
            results = []
            for method in (METHOD, "generic.recurrent"):
                with np.errstate(all="ignore"):
                    results.append(getattr(scanfield, op)(**given, **options, method=method))
            for x, y in zip(*results, strict=True):
                assert np.array_equal(np.isnan(x), np.isnan(y)), (op, value)
                assert deviation(x, y) <= 4e-6, (op, value)


@pytest.mark.parametrize("channels", [20, 37])
@pytest.mark.parametrize("name", ["B", "C"])
def test_infinities_stay_in_the_channels_that_are_there(name: str, channels: int):
    """A register's lanes beyond the last channel hold no channel, and add nothing to what channels share."""
    inputs, options = selective(37, channels, 5, "tt", "", False)
    given = {key: x.astype("float32") for key, x in inputs.items()}
    given["u"] = abs(given["u"])  # so that infinities are of one sign, and their sum is no NaN
    given[name][1, 9, 3] = np.inf
    found, want = [], []
    for method, grads in ((METHOD, found), ("generic.recurrent", want)):
        with np.errstate(all="ignore"):
            result, pull = scanfield.vjp(scanfield.selective_scan, **given, **options, method=method)
            grads.append(pull(np.ones_like(result.output)))
    for key, x in want[0].items():
        y = found[0][key]
        assert np.array_equal(np.isnan(x), np.isnan(y)), key
        assert np.array_equal(np.isinf(x), np.isinf(y)), key
    shared = want[0]["C" if name == "B" else "B"]
    assert np.isinf(shared).any() and not np.isnan(shared).all()


@pytest.mark.parametrize("op", ["linear_scan", "selective_scan", "gdn2"])
def test_layouts_of_memory(op: str):
    """Strided, flipped, read-only, misaligned and big-endian arrays give the same bits."""
    inputs, options = VARIED[op][0]
    want = getattr(scanfield, op)(**inputs, **options, method=METHOD)

    def misaligned(x: np.ndarray) -> np.ndarray:
        room = np.empty(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
        room[...] = x
        return room

    def frozen(x: np.ndarray) -> np.ndarray:
        x = x.copy()
        x.flags.writeable = False
        return x

    for change in (
        np.asfortranarray,
        misaligned,
        frozen,
        lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
        lambda x: x[::-1].copy()[::-1],
    ):
        got = getattr(scanfield, op)(**{n: change(x) for n, x in inputs.items()}, **options, method=METHOD)
        assert np.array_equal(got.output, want.output)
        assert np.array_equal(got.final_state, want.final_state)


@pytest.mark.parametrize(
    ("dtype", "reason"),
    [
        ("longdouble", "kernels are compiled for float32 and float64"),
        ("clongdouble", "complex256: kernels are compiled for"),
    ],
)
def test_what_is_declined_says_why(dtype: str, reason: str):
    a = np.full((1, 3, 2), 0.5).astype(dtype)
    with pytest.raises(scanfield.BackendError, match=reason):
        scanfield.linear_scan(a, a, method=METHOD)
    rows = [row for row in scanfield.explain(scanfield.linear_scan, a, a).verdicts if row.candidate == METHOD]
    assert rows and not rows[0].taken and reason in rows[0].reason
    assert scanfield.linear_scan(a, a).output.dtype == dtype
