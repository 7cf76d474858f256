"""Complex numbers on the compiled scans, forced so that they cannot fall back: golden cases, truths, generic code."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from arrays import Library, deviation, numpy_dtype
from checks import TOLERANCE, vjp
from examples import EXAMPLES, Example, call_options
from golden_adapter import GoldenCall, scan_cases
from processes import python

import scanfield

pytest.importorskip("numba")

pytestmark = pytest.mark.backend("numpy")

METHOD = "numpy.numba"


def is_complex(inputs: dict[str, np.ndarray]) -> bool:
    return any(np.asarray(x).dtype.kind == "c" for x in inputs.values())


CALLS = [call for call in scan_cases() if is_complex(call.inputs)]
COMPLEX = [example for example in EXAMPLES if is_complex(dict(example.inputs))]


def test_every_complex_case_is_here():
    assert {call.case.op for call in CALLS} == {"linear_scan", "selective_scan"}
    assert len(COMPLEX) == 15


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.case.name)
def test_golden(library: Library, dtype: str, call: GoldenCall):
    case = call.case
    cotangents = case.cotangents["output"], case.cotangents["final_state"]
    got = vjp(library, case.op, call.inputs, cotangents, dtype, **call.options, method=METHOD)
    found: dict[str, Any] = {"expected/output": got.output, "expected/final_state": got.final_state}
    found |= {f"gradient/{name}": gradient for name, gradient in got.gradients.items()}
    errors = {key: case.error(key, library.raw(x), dtype) for key, x in found.items()}
    assert all(error <= 1 for error in errors.values()), {k: e for k, e in errors.items() if not e <= 1}


@pytest.mark.parametrize("example", COMPLEX, ids=repr)
def test_examples(library: Library, dtype: str, example: Example):
    options = call_options(example.options, METHOD, None)
    got = vjp(library, example.op, example.inputs, example.cotangents(dtype), dtype, **options)
    truth, gradients = example.truth(dtype), example.gradients(dtype)
    assert deviation(library.numpy(got.output), truth.output) <= TOLERANCE[dtype]
    assert deviation(library.numpy(got.final_state), truth.final_state) <= TOLERANCE[dtype]
    for name, gradient in got.gradients.items():
        assert deviation(library.numpy(gradient), gradients[name], floor=1e-6) <= TOLERANCE[dtype], name


# -- sizes and options that reach every branch of the kernels -----------------------------------------------
def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape) + 1j * rng.standard_normal(shape)


def bounds_of(time: int) -> list[int]:
    return [0, 0, 5, 12, time]


def linear(
    time: int, lanes: int, a_ones: str, b_ones: str, packed: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """``a_ones`` and ``b_ones``: the axes (b, t, f) along which a and b have size 1."""
    rng = np.random.default_rng(time + lanes)
    full = {"b": 1 if packed else 3, "t": time, "f": lanes}
    shapes = [[1 if axis in ones else size for axis, size in full.items()] for ones in (a_ones, b_ones)]
    a = rng.uniform(0, 1, shapes[0]) * np.exp(1j * rng.uniform(0, 6, shapes[0]))
    b = normal(rng, *shapes[1])
    whole = np.broadcast_shapes(a.shape, b.shape)
    inputs = {"a": a, "b": b, "initial_state": normal(rng, 4 if packed else whole[0], whole[2])}
    return inputs, {"cu_seqlens": bounds_of(time)} if packed else {}


def selective(
    time: int, channels: int, N: int, layouts: str, extras: str, packed: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """``layouts`` of B and C: c (a channel's), t (a token's) or g (groups); ``extras``: z, D, h (a state), s (softplus
    and bias), l (limits)."""
    rng = np.random.default_rng(time + channels)
    batch = 1 if packed else 2
    shapes = {"c": (channels, N), "t": (batch, time, N), "g": (batch, time, 4, N)}
    inputs = {
        "u": rng.standard_normal((batch, time, channels)),
        "delta": rng.random((batch, time, channels)),
        "A": -2 * rng.random((channels, N)) + 1j * rng.uniform(-2, 2, (channels, N)),
        "B": normal(rng, *shapes[layouts[0]]),
        "C": normal(rng, *shapes[layouts[1]]),
    }
    options: dict[str, Any] = {}
    if "z" in extras:
        inputs["z"] = rng.standard_normal((batch, time, channels))
    if "D" in extras:
        inputs["D"] = rng.standard_normal(channels)
    if "s" in extras:
        inputs["delta_bias"] = rng.standard_normal(channels)
        options["delta_softplus"] = True
    if "l" in extras:
        options["dt_limit"] = (0.4, 0.9)
    if "h" in extras:
        inputs["initial_state"] = normal(rng, 4 if packed else batch, channels, N)
    if packed:
        options["cu_seqlens"] = bounds_of(time)
    return inputs, options


VARIED = {
    "linear_scan": [
        linear(time, lanes, a_ones, b_ones, packed)
        for time, lanes in ((70, 5), (33, 1), (20, 1040))
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
}


def cast(x: np.ndarray, dtype: str) -> np.ndarray:
    return x.astype(
        {"float32": "complex64", "float64": "complex128"}[dtype] if x.dtype.kind == "c" else dtype
    )


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("op", list(VARIED))
def test_agrees_with_generic(op: str, reverse: bool):
    function = getattr(scanfield, op)
    tried = 0
    for inputs, options in VARIED[op]:
        for dtype in ("float64", "float32"):
            given = {name: cast(x, dtype) for name, x in inputs.items()}
            wide = {name: cast(x, "float64") for name, x in given.items()}
            found = []
            for each, method in ((given, METHOD), (wide, "generic.recurrent")):
                rng = np.random.default_rng(7)
                result, pull = scanfield.vjp(function, **each, **options, reverse=reverse, method=method)
                drawn = [
                    normal(rng, *x.shape) if x.dtype.kind == "c" else rng.standard_normal(x.shape)
                    for x in result
                ]
                cotangents = [cast(cast(x, dtype), "float64") for x in drawn]
                plain = function(**each, **options, reverse=reverse, method=method)
                bare = {name: x for name, x in each.items() if name != "initial_state"}
                block = scanfield.summarise(function, **bare, **options, reverse=reverse, method=method)
                found.append(
                    {"output": result.output, "state": result.final_state}
                    | {"forward": plain.output, "forward's state": plain.final_state}
                    | {"map's state": block.state, "transition": block.transition}
                    | pull(*cotangents)
                )
            for name, x in found[0].items():
                y = found[1][name]
                assert x.dtype == cast(y, dtype).dtype, name
                shapes = {key: array.shape for key, array in given.items()}
                # A gradient summed over all tokens may cancel a few digits; the map's angle is a sum of all tokens'.
                limit = (12 if name == "transition" else 4) * TOLERANCE[dtype]
                assert deviation(x, y, floor=1e-3) <= limit, (name, dtype, shapes, options)
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


@pytest.mark.parametrize("op", list(VARIED))
def test_steps_are_the_sequence(op: str):
    inputs, options = VARIED[op][0]
    state = inputs["initial_state"]
    function = getattr(scanfield, op)
    whole = function(**inputs, **options, method=METHOD)
    if op == "selective_scan":
        options = {"delta_softplus": True}
    for t in range(6):
        token = {
            n: x if n in ("A", "D", "delta_bias") else x[:, t]
            for n, x in inputs.items()
            if n != "initial_state"
        }
        output, state = function.step(state, **token, **options, method=METHOD)
        assert np.array_equal(output, whole.output[:, t])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_complex_model_of_half_sequences(dtype: str):
    """u, delta, z and D in half precision, A, B and C in complex64, as trained models have it."""
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    inputs, options = selective(37, 32, 16, "tg", "zDsh", False)
    given = {
        n: x.astype("complex64" if x.dtype.kind == "c" else numpy_dtype(dtype)) for n, x in inputs.items()
    }
    found = []
    for method in (METHOD, "generic.recurrent"):
        result, pull = scanfield.vjp(scanfield.selective_scan, **given, **options, method=method)
        gradients = pull(np.ones_like(result.output), np.ones_like(result.final_state))
        found.append({"output": result.output, "state": result.final_state, **gradients})
    for name, x in found[0].items():
        y = found[1][name]
        assert x.dtype == y.dtype == (dtype if name == "output" else y.dtype), name
        wide = "complex128" if x.dtype.kind == "c" else "float64"
        limit = 1.6e-5 if x.dtype.kind == "c" else 2.0 ** (-10 if dtype == "float16" else -7)
        assert deviation(x.astype(wide), y.astype(wide), floor=1e-3) <= limit, name


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_angles_of_any_size(dtype: str):
    """Whole turns, and angles where one product no longer finds the nearest quarter turn, in some lanes of a register."""
    rng = np.random.default_rng(5)
    time, channels, N = 9, 20, 3
    sizes = 10.0 ** rng.uniform(-3, 12, (channels, N))
    A = (-rng.random((channels, N)) + 1j * np.where(rng.random((channels, N)) < 0.5, sizes, 1.0)).astype(
        dtype
    )
    real = A.real.dtype
    given = {
        "u": rng.standard_normal((1, time, channels)).astype(real),
        "delta": rng.random((1, time, channels)).astype(real),
        "A": A,
        "B": normal(rng, 1, time, N).astype(dtype),
        "C": normal(rng, 1, time, N).astype(dtype),
    }
    got, want = (scanfield.selective_scan(**given, method=method) for method in (METHOD, "generic.recurrent"))
    for x, y in zip(got, want, strict=True):
        assert deviation(x, y) <= (4e-6 if dtype == "complex64" else 1e-14)


def test_decays_at_the_ends_of_the_range():
    """exp(s A) is 0 where s Re A is -inf, whatever the angle; infinite where it overflows; NaN stays."""
    delta = np.array([1.0, 1e308, 1.0])[None, :, None] * np.ones((1, 3, 4))
    u = np.array([1.0, 0.0, 1.0])[None, :, None] * np.ones((1, 3, 4))
    A = np.array([[-1e4 + 0.5j], [-1e4 + 1e4j], [-1e4 + 0j], [-1 + 1e-309j]])
    B = C = np.ones((1, 3, 1)) + 0j
    state = np.ones((1, 4, 1)) + 0j

    def both(A: np.ndarray) -> list[Any]:
        given = {"u": u, "delta": delta, "A": A, "B": B, "C": C, "initial_state": state}
        return [scanfield.selective_scan(**given, method=method) for method in (METHOD, "generic.recurrent")]

    got, want = both(A)
    assert np.isfinite(got.output).all() and not got.output[:, 1].any()
    assert deviation(got.output, want.output) <= 1e-12
    got, want = both(np.array([[-1e4 + np.nan * 1j], [-1 + 1j], [-1e4 + np.inf * 1j], [1e4 + 0j]]))
    assert np.array_equal(np.isnan(got.output), np.isnan(want.output))
    assert np.isnan(got.output[0, 0, :3]).tolist() == [True, False, True]
    grown = scanfield.selective_scan(
        u[:, :1], delta[:, :1], A * -1, B[:, :1], C[:, :1], initial_state=state, method=METHOD
    )
    assert np.isinf(grown.final_state[0, 2].real).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_not_a_number_and_infinity(dtype: str):
    """What is not finite stays where the token recurrence has it."""
    spots = {"linear_scan": ("b", (0, 9, 3)), "selective_scan": ("u", (0, 9, 3))}
    for op, (name, spot) in spots.items():
        inputs, options = VARIED[op][0]
        for value in (np.nan, np.inf):
            given = {key: cast(x, dtype) for key, x in inputs.items()}
            given[name][spot] = value
            results = []
            for method in (METHOD, "generic.recurrent"):
                with np.errstate(all="ignore"):
                    results.append(getattr(scanfield, op)(**given, **options, method=method))
            for x, y in zip(*results, strict=True):
                assert np.array_equal(np.isnan(x), np.isnan(y)), (op, value)
                assert np.isnan(x).any() and np.isfinite(x).any()
                finite = np.isfinite(y)
                assert deviation(x[finite], y[finite]) <= 4e-6, (op, value)


@pytest.mark.parametrize("op", list(VARIED))
def test_layouts_of_memory(op: str):
    """Strided, flipped, read-only and misaligned arrays give the same bits."""
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


@pytest.mark.parametrize("op", list(VARIED))
def test_the_same_bits_for_every_number_of_threads(op: str):
    time = 256
    made = (
        linear(time, 2100, "", "b", False)
        if op == "linear_scan"
        else selective(time, 200, 5, "tt", "zDsh", False)
    )
    inputs, options = made

    def everything() -> list[np.ndarray]:
        result, pull = scanfield.vjp(getattr(scanfield, op), **inputs, **options, method=METHOD)
        return [*result, *pull(np.ones_like(result.output), np.ones_like(result.final_state)).values()]

    try:
        scanfield.set_num_threads(1)
        want = everything()
        for count in (2, 3, 5):
            scanfield.set_num_threads(count)
            assert all(np.array_equal(x, y) for x, y in zip(everything(), want, strict=True)), count
    finally:
        scanfield.set_num_threads(None)


@pytest.mark.parametrize("op", list(VARIED))
def test_memory_of_backward(op: str):
    """Beside inputs and gradients at most half as much again, and never a state for each token."""
    time = 4096
    inputs, options = (
        linear(time, 64, "", "", False) if op == "linear_scan" else selective(time, 64, 8, "tt", "z", False)
    )
    function = getattr(scanfield, op)

    def both() -> list[np.ndarray]:
        result, pull = scanfield.vjp(function, **inputs, **options, method=METHOD)
        return [*result, *pull(result.output).values()]

    both()  # compiled
    tracemalloc.start()
    try:
        made = sum(x.nbytes for x in both())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    size = made + sum(x.nbytes for x in inputs.values())
    assert peak - made <= 0.5 * size
    assert op == "linear_scan" or peak - made < 0.2 * 2 * time * 64 * 8 * 16


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sine_and_cosine(dtype: str):
    """Within 2 units in the last place of the exact value, near their zeros too; NaN of what is not finite."""
    from numba import njit

    from scanfield_numpy.complex_vector import cosine, far, sine
    from scanfield_numpy.vector import ONE, lane_count, load, numbers, store

    @njit(error_model="numpy")
    def fill(x, to_sine, to_cosine, to_far, count, width, kind):
        for i in range(0, count, width):
            value = load(numbers(x, kind), i, ONE)
            store(numbers(to_sine, kind), i, sine(value))
            store(numbers(to_cosine, kind), i, cosine(value))
            to_far[i // width] = far(value)

    rng = np.random.default_rng(2)
    last = 2.0**15 if dtype == "float32" else 2.0**30
    quarters = np.pi / 2 * rng.integers(-int(0.63 * last), int(0.63 * last), 4000)
    x = np.concatenate(
        [
            np.linspace(-10, 10, 9999),
            rng.uniform(-last, last, 4000),
            10.0 ** rng.uniform(-30, 4, 4000),
            quarters,
            [0.0, -0.0, last, -last, 1e-40, np.nan],
        ]
    ).astype(dtype)
    x = np.concatenate([x, np.zeros(-x.size % 16, dtype)])
    got = [np.empty_like(x) for _ in range(2)]
    width = lane_count(x.itemsize)
    flags = np.ones(x.size // width, np.bool_)
    fill(x.ctypes.data, *(y.ctypes.data for y in got), flags, x.size, width, x.dtype.type(0))
    assert not flags.any()
    finite = np.isfinite(x)
    wide = x.astype(np.longdouble)
    for y, function in zip(got, (np.sin, np.cos), strict=True):
        with np.errstate(invalid="ignore"):
            want = function(wide)
        assert np.isnan(y[~finite]).all()
        rounded = want[finite].astype(dtype)
        assert np.max(np.abs(y[finite] - want[finite]) / np.spacing(np.abs(rounded))) <= 2
    for large in (np.nextafter(x.dtype.type(last), x.dtype.type(np.inf)), -np.inf):
        x[:] = 0
        x[-1] = large
        fill(x.ctypes.data, *(y.ctypes.data for y in got), flags, x.size, width, x.dtype.type(0))
        assert flags[-1] and not flags[:-1].any()


WIDTHS = """
from golden_adapter import scan_cases
import scanfield
from scanfield_numpy import vector
assert vector.REGISTER_BYTES == {width}, vector.REGISTER_BYTES
tried = 0
for call in scan_cases():
    if all(x.dtype.kind != "c" for x in call.inputs.values()):
        continue
    given = {{n: x.astype("complex64" if x.dtype.kind == "c" else "float32") for n, x in call.inputs.items()}}
    result, pull = scanfield.vjp(getattr(scanfield, call.case.op), **given, **call.options, method="numpy.numba")
    cotangents = [call.case.cotangents[n] for n in ("output", "final_state")]
    found = {{"expected/output": result.output, "expected/final_state": result.final_state}}
    found |= {{f"gradient/{{n}}": x for n, x in pull(*cotangents).items()}}
    for key, x in found.items():
        assert call.case.error(key, x, "float32") <= 1, (call.case.name, key)
    tried += 1
assert tried == 2
"""


@pytest.mark.parametrize("width", [16, 32])
def test_golden_cases_at_forced_vector_widths(width: int):
    """4 and 8 numbers of float32."""
    python(WIDTHS.format(width=width), SCANFIELD_VECTOR_BYTES=str(width))


def test_real_numbers_compile_nothing_complex():
    python(
        """
        import numpy as np, scanfield
        from scanfield_numpy import linear_complex_kernels as linear, selective_complex_kernels as selective
        a = np.full((1, 3, 2), 0.5, np.float32)
        scanfield.linear_scan(a, a, method="numpy.numba")
        scanfield.selective_scan(a, a, -a[0, :2], a, a, method="numpy.numba")
        kernels = [linear.forward, linear.backward, selective.forward, selective.backward]
        assert not any(kernel._compiled for kernel in kernels)
        scanfield.linear_scan(a + 0j, a + 0j, method="numpy.numba")
        assert [dtype for dtype, _ in linear.forward._compiled] == ["float32"]
        """
    )
