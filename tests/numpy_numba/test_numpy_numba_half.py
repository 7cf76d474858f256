"""Half precision on the compiled scans: float32 inside, blocks that may lie anywhere, no sequence there twice."""

from __future__ import annotations

import functools
import tracemalloc
from typing import Any

import numpy as np
import pytest
from arrays import deviation, numpy_dtype
from examples import BASE, EXAMPLES, Example, call_options, op_inputs

import scanfield
from scanfield.dispatch import implementation

pytest.importorskip("numba")
pytest.importorskip("ml_dtypes")

half = pytest.importorskip("scanfield_numpy.half")

pytestmark = pytest.mark.backend("numpy")

METHOD = "numpy.numba"
UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8}  # half a unit in the last place, relative
REAL = [e for e in EXAMPLES if all(np.asarray(x).dtype.kind != "c" for x in e.inputs.values())]


@pytest.fixture(params=["one block", "blocks of 3 tokens"])
def cut(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Examples are shorter than a block, so blocks are also made shorter than examples."""
    if request.param != "one block":
        monkeypatch.setattr(half, "_BLOCK_BYTES", 1)
        monkeypatch.setattr(half, "_STEP", 3)
        # A block is as large as what is kept for it: small states let blocks be small.
        monkeypatch.setattr(half, "_sizes", lambda batch, token, held: (1, 3))
    return request.param


def test_blocks_are_cut(cut: str):
    """The fixture does what it says: several blocks, and each row by itself."""
    a = np.ones((2, 7, 3), "float16")
    prepared = scanfield.linear_scan.record.prepare(
        {"a": a, "b": a, "initial_state": None, "cu_seqlens": None}, {"reverse": False, "chunk_size": None}
    )
    blocks = half._plan(prepared.call).blocks
    assert len(blocks) == (1 if cut == "one block" else 6)


def cast(arrays: dict[str, Any], dtype: str) -> dict[str, Any]:
    return {name: x.astype(numpy_dtype(dtype)) for name, x in arrays.items()}


@functools.cache
def every_result(e: Example, dtype: str, method: str, cut: str) -> dict[str, np.ndarray]:
    """Output, state, forward alone, map and gradients. (``cut`` keeps results of different blocks apart.)"""
    function = getattr(scanfield, e.op)
    given = cast(dict(e.inputs), dtype)
    options = call_options(e.options, method, None)
    result, pull = scanfield.vjp(function, **given, **options)
    alone = function(**given, **options)
    bare = {name: x for name, x in given.items() if name != "initial_state"}
    block = scanfield.summarise(function, **bare, **options)
    found = {"output": result.output, "final_state": result.final_state}
    found |= {"forward's output": alone.output, "forward's state": alone.final_state}
    found |= {"transition": block.transition, "state of the map": block.state}
    d_output, d_final = e.cotangents(dtype)
    gradients = pull(d_output.astype(result.output.dtype), d_final.astype("float32"))
    return found | {f"gradient of {name}": x for name, x in gradients.items()}


@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("e", REAL, ids=repr)
def test_agrees_with_generic(e: Example, dtype: str, cut: str):
    got = every_result(e, dtype, METHOD, cut)
    want = every_result(e, dtype, "generic.recurrent", "")
    assert got.keys() == want.keys()
    for name, x in got.items():
        y = want[name]
        assert (x.dtype, x.shape) == (y.dtype, y.shape), name
        # Both sides round once; a derived operation may round a sum of two gradients again.
        limit = 4e-6 if x.dtype == "float32" else 2.1 * UNIT[dtype]
        assert deviation(x.astype(float), y.astype(float), floor=1e-3) <= limit, name


@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("e", [e for e in REAL if e.op in BASE], ids=repr)
def test_rounded_once(e: Example, dtype: str, cut: str):
    """Each element lies within half a unit in the last place of the truth, and what float32 adds to it."""
    got, truth = every_result(e, dtype, METHOD, cut), e.truth(dtype)
    wanted = {"output": truth.output}
    wanted |= {f"gradient of {name}": x for name, x in e.gradients(dtype).items()}
    tiny = float(np.finfo(np.float16).smallest_subnormal) if dtype == "float16" else 0.0
    for name, want in wanted.items():
        x = got[name].astype(float)
        assert got[name].dtype == numpy_dtype(dtype), name
        allowed = UNIT[dtype] * np.abs(want) + 8e-6 * np.max(np.abs(want), initial=0) + tiny
        assert np.all(np.abs(x - want) <= allowed), name
    assert deviation(got["final_state"], truth.final_state) <= 4e-6


@pytest.mark.parametrize("op", BASE)
def test_mixed_widths(op: str, cut: str):
    """Any subset of the arrays in half precision, beside float32 or float64 ones."""
    rng = np.random.default_rng(3)
    inputs = op_inputs(op, f"{op} mixed halves", time=8)
    for wide in ("float32", "float64"):
        for _ in range(4):
            kinds = {name: rng.choice(["float16", "bfloat16", wide]) for name in inputs}
            given = {name: x.astype(numpy_dtype(kinds[name])) for name, x in inputs.items()}
            found = []
            for method in (METHOD, "generic.recurrent"):
                result, pull = scanfield.vjp(getattr(scanfield, op), **given, method=method)
                gradients = pull(np.ones_like(result.output), np.ones_like(result.final_state))
                found.append([*result, *gradients.values()])
            for x, y in zip(*found, strict=True):
                assert x.dtype == y.dtype
                limit = {2: 2.1 * UNIT["bfloat16"], 4: 4e-6, 8: 1e-12}[x.dtype.itemsize]
                assert deviation(x.astype(float), y.astype(float), floor=1e-3) <= limit


@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("op", BASE)
def test_steps_are_the_sequence(op: str, dtype: str):
    """The carry is float32 in both; gdn2 alone takes several tokens at once where it has them, so its last bit differs."""
    exact = op != "gdn2"
    time = 5
    inputs = cast(op_inputs(op, f"{op} half steps", time=time), dtype)
    function = getattr(scanfield, op)
    whole = function(**inputs, method=METHOD)
    state = inputs.pop("initial_state").astype("float32")
    before = state.copy()
    for t in range(time):
        token = {n: x if n in ("A", "D", "delta_bias") else x[:, t] for n, x in inputs.items()}
        output, after = function.step(state, **token, method=METHOD)
        assert np.array_equal(state, before), "the caller's state is not written to"
        if exact:
            assert np.array_equal(output, whole.output[:, t])
        state, before = after, after.copy()
    if exact:
        assert np.array_equal(state, whole.final_state)
    assert np.abs(state - whole.final_state).max() < 1e-6 * np.abs(state).max()
    assert (
        np.abs((output - whole.output[:, -1]).astype(float)).max() < 0.01 * np.abs(output.astype(float)).max()
    )


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("op", BASE)
def test_blocks_of_their_own_size(op: str, packed: bool):
    """Several real blocks, of rows and of tokens, give what the same numbers in float32 give, rounded once."""
    time, batch = 2000, 1 if packed else 3
    inputs = op_inputs(op, f"{op} real blocks", batch=batch, time=time, states=5 if packed else None)
    if op == "linear_scan":
        inputs = {n: np.tile(x, 700) for n, x in inputs.items()}
    elif op == "selective_scan":
        axes = {"A": -2, "initial_state": -2, "B": None, "C": None}  # of the channels
        inputs = {
            n: x if axes.get(n, -1) is None else np.repeat(x, 64, axis=axes.get(n, -1))
            for n, x in inputs.items()
        }
    else:
        inputs = {n: np.tile(x, 25) / (5 if n == "key" else 1) for n, x in inputs.items()}
        inputs["initial_state"] = np.repeat(inputs["initial_state"], 25, axis=-2)
    given = cast(inputs, "bfloat16")
    options = {"cu_seqlens": [0, 0, 700, 701, 1900, time]} if packed else {}
    function = getattr(scanfield, op)
    record = function.record
    prepared = record.prepare(
        {entry.name: given.get(entry.name) for entry in record.inputs} | options,
        {"reverse": False, "chunk_size": None, **KEYWORDS[op]},
    )
    assert len(half._plan(prepared.call).blocks) >= 3
    found = []
    for each in (given, {n: x.astype("float32") for n, x in given.items()}):
        result, pull = scanfield.vjp(function, **each, **options, method=METHOD)
        gradients = pull(np.ones(result.output.shape, "float32"), np.ones_like(result.final_state))
        found.append({"output": result.output, "final_state": result.final_state, **gradients})
    for name, x in found[0].items():
        y = found[1][name]
        # Sums over all tokens are grouped by blocks.
        limit = 4e-6 if name == "final_state" else UNIT["bfloat16"] + 2e-5
        assert deviation(x.astype(float), y.astype(float)) <= limit, name


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", UNIT)
def test_long_narrow_sums_are_accurate(dtype: str, reverse: bool):
    """100,000 equal numbers: a sum in float32, one after the other, is off by a thousandth."""
    time = 100_000
    a = np.ones((1, time, 2), numpy_dtype(dtype))
    b = np.full((1, time, 2), 0.001, numpy_dtype(dtype))
    exact = time * float(b[0, 0, 0])
    for state in (None, np.zeros((1, 2), np.float32)):
        result, pull = scanfield.vjp(scanfield.linear_scan, a, b, state, reverse=reverse, method=METHOD)
        assert result.final_state.dtype == np.float32 and result.output.dtype == a.dtype
        assert deviation(result.final_state, np.full((1, 2), exact)) <= 1e-6
        gradients = pull(b, np.ones((1, 2), np.float32))
        first = gradients["b"][0, -1 if reverse else 0].astype(float)
        assert deviation(first, np.full(2, 1 + exact)) <= UNIT[dtype]
        assert all(x.dtype == y.dtype for x, y in zip(gradients.values(), (a, b, state), strict=False))
    block = scanfield.summarise(scanfield.linear_scan, a, b, reverse=reverse, method=METHOD)
    assert block.state.dtype == block.transition.dtype == np.float32
    assert deviation(block.state, np.full((1, 2), exact)) <= 1e-6
    assert np.array_equal(block.transition, np.ones((1, 2), np.float32))


LONG = {
    "linear_scan": {"a": (64,), "b": (64,)},
    "selective_scan": {"u": (64,), "delta": (64,), "B": (16, 4), "C": (16, 4), "z": (64,)},
    "gdn2": {"query": (1, 64), "key": (1, 64), "value": (1, 64), "log_decay": (1, 64), "erase": (1, 64)},
}
KEYWORDS = {
    "linear_scan": {},
    "selective_scan": {"delta_softplus": True, "dt_limit": None},
    "gdn2": {"scale": None, "qk_l2norm": False},
}


@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("op", BASE)
def test_no_sequence_is_there_twice(op: str, dtype: str):
    """What a verb needs beside its arguments and results: some blocks, whatever the length is."""
    rng = np.random.default_rng(1)
    time, room = 2**16, 8 * 2**20
    given = {
        name: (-0.1 * rng.random((1, time, *rest), np.float32)).astype(numpy_dtype(dtype))
        for name, rest in LONG[op].items()
    }
    assert all(4 * x.size >= 2 * room for x in given.values()), "a float32 copy of any of them would show"
    if op == "selective_scan":
        given["A"] = -np.ones((64, 4), numpy_dtype(dtype))
    record = getattr(scanfield, op).record
    arrays = {entry.name: given.get(entry.name) for entry in record.inputs}
    call = record.prepare(arrays, {"reverse": False, "chunk_size": None, **KEYWORDS[op]}).call
    chosen = implementation(op, METHOD)

    def size(made: Any) -> int:
        return sum(x.nbytes if isinstance(x, np.ndarray) else size(x) for x in made if x is not None)

    def extra(verb: Any, *arguments: Any) -> tuple[int, Any]:
        tracemalloc.start()
        try:
            made = verb(*arguments)
            return tracemalloc.get_traced_memory()[1] - size(made), made
        finally:
            tracemalloc.stop()

    wanted = tuple(array is not None for array in call.arrays)
    output, _, residuals = chosen.save(call)  # compiled, so that the compiler's own memory is not counted
    chosen.backward(call, residuals, output, None, wanted)
    found = {verb: extra(getattr(chosen, verb), call) for verb in ("forward", "save", "summarise")}
    found["backward"] = extra(chosen.backward, call, residuals, np.ones_like(output), None, wanted)
    for verb, (bytes_, _) in found.items():
        assert bytes_ <= room, (verb, bytes_)
    inputs = sum(x.nbytes for x in given.values())
    assert size(residuals) <= inputs / 2
    assert size(found["backward"][1]) <= 1.01 * inputs, "gradients are as wide as their arrays"


def test_what_is_not_finite():
    """Overflow of an output is infinity, NaN stays NaN, and neither warns."""
    for dtype in UNIT:
        a = np.ones((1, 4, 2), numpy_dtype(dtype))
        b = np.full((1, 4, 2), np.finfo(np.float16).max if dtype == "float16" else 3e38, numpy_dtype(dtype))
        b[0, 2, 1] = np.nan
        result = scanfield.linear_scan(a, b, method=METHOD)
        want = scanfield.linear_scan(a, b, method="generic.recurrent")
        assert np.array_equal(result.output.astype(float), want.output.astype(float), equal_nan=True)
        assert np.isinf(result.output.astype(float)[0, 1]).all()
        assert np.isnan(result.output.astype(float)[0, 2, 1])


def test_every_float16_is_widened_and_rounded_as_numpy_does():
    """All 65536 numbers there; back, those between: ties to even, overflow to infinity, subnormal numbers, NaN."""
    from scanfield_numpy.widening import put, widened

    every = np.arange(2**16, dtype=np.uint16).view(np.float16)[: 2**16 - 3]
    with np.errstate(invalid="ignore"):
        want = every.astype(np.float32)
    assert np.array_equal(widened(every, "float32"), want, equal_nan=True)
    assert np.array_equal(widened(every[::-1], "float32"), want[::-1], equal_nan=True)
    bits = np.random.default_rng(0).integers(0, 2**32, 2**18, dtype=np.uint32)
    middle = 0.5 * (want[1:30000] + want[:29999])
    with np.errstate(all="ignore"):
        nearby = [np.nextafter(want, np.float32(np.inf)), np.nextafter(middle, np.float32(0))]
        some = np.concatenate([bits.view(np.float32), want, middle, -middle, *nearby])
        rounded = some.astype(np.float16)
    room = np.empty((2, some.size), np.float16)
    put(room[0], some)
    put(room[:, ::-1][1], some[::-1])
    for found in room:
        assert np.array_equal(found, rounded, equal_nan=True)
        numbers = ~np.isnan(found)
        assert np.array_equal(np.signbit(found[numbers]), np.signbit(rounded[numbers]))


def test_explain_says_who_runs():
    a = np.full((1, 3, 2), 0.5, "float16")
    rows = [row for row in scanfield.explain(scanfield.linear_scan, a, a).verdicts if row.candidate == METHOD]
    assert rows and rows[0].taken
