"""The kernels for NumPy arrays, called by XLA: every option and golden case, and what must not go wrong on the way."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest

pytestmark = pytest.mark.backend("jax")

jax = pytest.importorskip("jax")
pytest.importorskip("numba")

import jax.numpy as jnp  # noqa: E402
from checks import check_kind, check_truth, run_example, vjp  # noqa: E402
from examples import BASE, EXAMPLES, rng_of  # noqa: E402
from golden_adapter import scan_cases  # noqa: E402

import scanfield  # noqa: E402
from scanfield_jax import ffi  # noqa: E402

METHOD = "jax.numba"


@pytest.mark.parametrize("example", [e for e in EXAMPLES if e.op in BASE], ids=repr)
def test_option(library, example):
    got = run_example(library, example, "float64", METHOD, chunk_size=4)
    check_kind(library, got, example.op, example.inputs, "float64")
    check_truth(library, got, example, "float64")


@pytest.mark.parametrize("call", scan_cases(), ids=lambda call: call.case.name)
def test_golden(library, call):
    case = call.case
    cotangents = case.cotangents["output"], case.cotangents["final_state"]
    got = vjp(library, case.op, call.inputs, cotangents, "float32", **call.options, method=METHOD)
    found = {"expected/output": got.output, "expected/final_state": got.final_state}
    found |= {f"gradient/{name}": gradient for name, gradient in got.gradients.items()}
    errors = {key: case.error(key, library.raw(x), "float32") for key, x in found.items()}
    assert all(error <= 1 for error in errors.values()), {k: e for k, e in errors.items() if not e <= 1}


def draw(*shape: int, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(rng_of(str(shape)).uniform(-1, 1, shape), dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_numpy_s_own_bits(library, dtype):
    """The same kernels on the same numbers, gradients too; half precision goes in and out as it is."""
    a, b, weights = (draw(2, 9, 3, dtype=dtype) for _ in range(3))
    result, pullback = scanfield.vjp(scanfield.linear_scan, a, b, method=METHOD)
    there, back = scanfield.vjp(scanfield.linear_scan, np.asarray(a), np.asarray(b), method="numpy.numba")
    pairs = [*zip(result, there, strict=True)]
    pairs += zip(pullback(weights).values(), back(np.asarray(weights)).values(), strict=True)
    for ours, theirs in pairs:
        assert library.raw(ours).tobytes() == theirs.tobytes() and ours.dtype == theirs.dtype


def test_sizes_of_zero(library):
    for shape in ((2, 0, 3), (0, 5, 3), (2, 5, 0)):
        x = jnp.zeros(shape)
        result, pullback = scanfield.vjp(scanfield.linear_scan, x, x, method=METHOD)
        assert result.output.shape == shape
        assert pullback(result.output)["a"].shape == shape


def test_no_state_leaves_the_skip_connection(library):
    """Its gradient asked the generic form for the shapes of residuals, of which that knew nothing."""
    u, none, D = jnp.full((1, 4, 3), 2.0), jnp.zeros((3, 0)), jnp.asarray([0.5, 1.0, 2.0])
    given = (u, u, none, jnp.zeros((1, 4, 0)), jnp.zeros((1, 4, 0)), D)
    result, pullback = scanfield.vjp(scanfield.selective_scan, *given, method=METHOD)
    assert np.array_equal(library.raw(result.output), np.broadcast_to([1.0, 2.0, 4.0], (1, 4, 3)))
    found = pullback(jnp.ones_like(u))
    assert np.array_equal(library.raw(found["u"]), np.broadcast_to([0.5, 1.0, 2.0], (1, 4, 3)))
    assert np.array_equal(library.raw(found["D"]), [8.0] * 3) and not library.raw(found["delta"]).any()


def test_memory_that_is_given_away_is_not_written_before_it_is_read():
    a, b = draw(2, 33, 5), draw(2, 33, 5)
    want = scanfield.linear_scan(a, b, method=METHOD).output + b
    run = jax.jit(lambda a, b: scanfield.linear_scan(a, b, method=METHOD).output + b, donate_argnums=0)
    given = jnp.array(a), b
    assert jnp.array_equal(run(*given), want)
    assert given[0].is_deleted()


def test_arrays_as_transforms_leave_them():
    """Slices, transposes and flips reach XLA's memory in its own layout."""
    x = draw(5, 7, 9)
    turned = [jnp.moveaxis(x, 0, 2), x[:, ::-1], x[1:, 2:, ::2], jnp.broadcast_to(x[:1], x.shape)]
    for y in turned:
        here = scanfield.linear_scan(y, y, method=METHOD).output
        there = scanfield.linear_scan(np.asarray(y), np.asarray(y)).output
        assert np.array_equal(np.asarray(here), there)


class TestErrors:
    """What goes wrong at the other end is an error of JAX's with the words of what raised it, never a crash."""

    def test_a_function_that_raises(self):
        def broken(what, arrays):
            raise MemoryError(f"no room for {what['size']}")

        ffi.register("scanfield.test.broken", broken)
        x = jnp.ones(3)
        with pytest.raises(jax.errors.JaxRuntimeError, match="MemoryError: no room for 7"):
            ffi.call("scanfield.test.broken", {"size": 7}, [x], [jax.ShapeDtypeStruct((3,), x.dtype)])[
                0
            ].block_until_ready()
        assert scanfield.linear_scan(x[None, :, None], x[None, :, None], method=METHOD).output.shape == (
            1,
            3,
            1,
        )

    @pytest.mark.parametrize(
        ("found", "words"),
        [
            (lambda x: [x[:2]], "where float64.3,. is expected"),
            (lambda x: [x.astype("float32")], "where float64.3,. is expected"),
            (lambda x: [], "0 results where 1"),
        ],
        ids=["shape", "dtype", "number"],
    )
    def test_results_that_do_not_fit(self, found, words):
        name = f"scanfield.test.{words}{found.__code__.co_firstlineno}{len(found.__code__.co_code)}"
        ffi.register(name, lambda what, arrays: found(arrays[0]))
        x = jnp.ones(3, "float64")
        with pytest.raises(jax.errors.JaxRuntimeError, match=words):
            ffi.call(name, None, [x], [jax.ShapeDtypeStruct((3,), x.dtype)])[0].block_until_ready()

    def test_calls_that_are_none_of_ours(self):
        """Without the text that says what they are, or on numbers that no kernel knows."""
        ffi.register("scanfield.test.kind", lambda what, arrays: arrays)
        x = jnp.ones(3, "int32")
        result = [jax.ShapeDtypeStruct((3,), x.dtype)]
        with pytest.raises(jax.errors.JaxRuntimeError, match="expected one text, came 0 attributes"):
            jax.ffi.ffi_call("scanfield.test.kind", result)(x)[0].block_until_ready()
        with pytest.raises(jax.errors.JaxRuntimeError, match="a buffer of XLA's dtype 4"):
            ffi.call("scanfield.test.kind", None, [x], result)[0].block_until_ready()

    def test_structures_that_an_older_xla_has_shorter(self):
        frame = ffi._Frame(struct_size=ctypes.sizeof(ffi._Frame) - 8)
        with pytest.raises(RuntimeError, match="this version of XLA lays out _Frame otherwise"):
            ffi._handle(frame, lambda what, arrays: [])
        frame.struct_size += 8
        with pytest.raises(RuntimeError, match="this version of XLA lays out _Buffers otherwise"):
            ffi._handle(frame, lambda what, arrays: [])
        assert ffi._failed(frame, "who asks did not say how to tell") is None

    def test_a_version_that_xla_does_not_say_stands_in_its_header(self, monkeypatch, tmp_path):
        told = ffi._Metadata()
        ffi._describe(ffi._Frame(), told)
        assert (told.version.major, told.version.minor) >= (0, 1)  # of the jaxlib that is installed
        header = tmp_path / "xla" / "ffi" / "api" / "c_api.h"
        header.parent.mkdir(parents=True)
        header.write_text("#define XLA_FFI_API_MAJOR 3\n#define XLA_FFI_API_MINOR 14\n")
        monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(tmp_path))
        ffi._describe(ffi._Frame(), told)
        assert (told.version.major, told.version.minor) == (3, 14)
        header.write_text("#define XLA_FFI_API_MAJOR 3\n")
        with pytest.raises(RuntimeError, match="header of its FFI says no version"):
            ffi._describe(ffi._Frame(), told)

    def test_inputs_cannot_be_written(self):
        def writes(what, arrays):
            arrays[0][:] = 0
            return [arrays[0]]

        ffi.register("scanfield.test.writes", writes)
        x = jnp.ones(3)
        with pytest.raises(jax.errors.JaxRuntimeError, match="read-only"):
            ffi.call("scanfield.test.writes", None, [x], [jax.ShapeDtypeStruct((3,), x.dtype)])[
                0
            ].block_until_ready()
        assert jnp.all(x == 1)

    def test_a_dtype_that_no_kernel_takes_is_declined(self):
        with pytest.raises(scanfield.ScanfieldError, match="dtype int32"):
            scanfield.linear_scan(jnp.ones((1, 3, 1), "int32"), jnp.ones((1, 3, 1), "int32"), method=METHOD)


def test_many_threads_at_once():
    a, b = draw(2, 65, 5), draw(2, 65, 5)
    run = jax.jit(lambda a, b: scanfield.linear_scan(a, b, method=METHOD).output)
    want = np.asarray(run(a, b))
    wrong = []

    def often():
        wrong.extend(not np.array_equal(np.asarray(run(a, b)), want) for _ in range(20))

    threads = [threading.Thread(target=often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == [False] * 80


def test_a_compiled_program_says_what_it_calls():
    """In words, not by a number of this process: what is compiled may be kept on disk and run in another one."""
    a, b = draw(1, 5, 2), draw(1, 5, 2)
    text = jax.jit(lambda a, b: scanfield.linear_scan(a, b, method=METHOD)).lower(a, b).as_text()
    (line,) = (line for line in text.splitlines() if "scanfield.numba" in line)
    assert all(word in line for word in ("linear_scan", "forward", "float32")), line


def test_it_runs_by_name_alone():
    a, b = draw(1, 5, 2), draw(1, 5, 2)
    assert scanfield.explain(scanfield.linear_scan, a, b).taken["forward"] == "jax.scan"
    assert "runs only by method='jax.numba'" in str(scanfield.explain(scanfield.linear_scan, a, b))
