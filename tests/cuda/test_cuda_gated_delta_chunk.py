"""The gated delta rule in chunks, with and without tensor cores: sizes, packs, strong decays, golden cases, turns, choice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import standin
from arrays import deviation, same_bits
from checks import check_kind, check_truth, run_example, vjp
from golden_adapter import GoldenCall
from test_cuda_agreement import CALLS, HALF_TOLERANCE, WALKS
from test_cuda_gated_delta import both, draw

import scanfield
from scanfield.dispatch import Derived, operations
from scanfield.scans.gated_delta import OPERATION

CHUNK, TENSOR, RECURRENT = "cupy.rawkernel.chunk", "cupy.rawkernel.tensor", "cupy.rawkernel.recurrent"
FAMILY = {"gdn2"} | {
    record.name for record in operations() if isinstance(record, Derived) and record.base.name == "gdn2"
}


def check(card, inputs: Mapping[str, np.ndarray], tolerance: float = 1e-12, **options: Any) -> None:
    """The chunk kernels against the generic recurrence on NumPy arrays."""
    got = both(card.arrays(inputs), CHUNK, **options)
    want = both(inputs, "generic.recurrent", **options)
    assert set(got) == set(want)
    for name, x in want.items():
        assert deviation(card.raw(got[name]), x) <= tolerance, name


# One token less than a chunk, one exactly, one more; K of one to four tiles of 64 rows, V of one block and of several.
@pytest.mark.parametrize(
    ("time", "K", "V"), [(63, 16, 5), (64, 64, 33), (65, 100, 20), (129, 32, 40), (5, 256, 2), (3, 5, 70)]
)
def test_sizes(card, time: int, K: int, V: int):
    check(card, draw(time, K, V, batch=1))


@pytest.mark.parametrize("gates", ["---", "k--", "s--", "-k-", "sss", "ks-", "--k"])
def test_gates(card, gates: str):
    check(card, draw(70, 6, 4, heads=2, vheads=4, gates=gates))


@pytest.mark.parametrize("reverse", [False, True])
def test_packed(card, reverse: bool):
    """Chunks keep to their sequences: some are empty, some end with a chunk, some start within one of the row's."""
    bounds = [0, 0, 3, 70, 70, 134, 140]
    inputs = draw(140, 5, 3, batch=1, sequences=6)
    check(card, inputs, cu_seqlens=bounds, reverse=reverse)
    on_card = card.cupy.asarray(np.array(bounds))
    got = scanfield.gdn2(**card.arrays(inputs), cu_seqlens=on_card, reverse=reverse, method=CHUNK)
    want = scanfield.gdn2(**card.arrays(inputs), cu_seqlens=bounds, reverse=reverse, method=CHUNK)
    assert same_bits(card.raw(got.output), card.raw(want.output))


@pytest.mark.parametrize("what", ["strong", "minus inf", "channels", "mixed", "growth", "alike"])
def test_decays_of_any_strength(card, what: str):
    """Factors and no quotients: exact down to -inf; keys that are alike, whose series would diverge."""
    inputs = draw(135, 5, 3)
    decay = inputs["log_decay"]
    if what == "strong":
        decay *= 200
    elif what == "minus inf":
        decay[:, [30, 64, 127]] = -np.inf
    elif what == "channels":
        decay[:, ::7, :, ::2] = -np.inf
    elif what == "mixed":
        decay *= 10.0 ** np.random.default_rng(3).integers(-3, 4, decay.shape)
    elif what == "growth":
        decay *= -0.1
    else:
        inputs["key"][...], inputs["erase"][...] = 5**-0.5, 2.0
    check(card, inputs, 1e-11 if what == "growth" else 1e-12)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(
    "call", [call for call in CALLS if call.case.op in FAMILY], ids=lambda call: call.case.name
)
def test_golden(card, call: GoldenCall, dtype: str):
    case = call.case
    cotangents = case.cotangents["output"], case.cotangents["final_state"]
    got = vjp(card, case.op, call.inputs, cotangents, dtype, **call.options, method=CHUNK)
    found: dict[str, Any] = {"expected/output": got.output, "expected/final_state": got.final_state}
    found |= {f"gradient/{name}": gradient for name, gradient in got.gradients.items()}
    errors = {key: case.error(key, card.raw(x), dtype) for key, x in found.items()}
    assert set(found) == set(case.keys()) and all(error <= 1 for error in errors.values()), errors


def test_every_option(card):
    for i, example in enumerate(each for each in WALKS if each.op in FAMILY):
        dtype = ("float64", "float32")[i % 2]
        got = run_example(card, example, dtype, CHUNK)
        check_kind(card, got, example.op, example.inputs, dtype)
        check_truth(card, got, example, dtype)


@pytest.mark.parametrize("number", [0, 1])
def test_every_option_on_tensor_cores(card, number: int):
    dtype = list(HALF_TOLERANCE)[number]
    for example in [each for each in WALKS if each.op == "gdn2" and "l2norm" not in each.name][number::2]:
        got = run_example(card, example, dtype, TENSOR)
        check_kind(card, got, "gdn2", example.inputs, dtype)
        # Growth makes large terms that cancel: of rounded factors, one digit less is left.
        grown = 5 if "growth" in example.name and dtype == "bfloat16" else 1
        check_truth(card, got, example, dtype, grown * HALF_TOLERANCE[dtype])


def test_normalised_keys_in_float32_stand_beside_values_in_half_precision(card):
    from arrays import numpy_dtype

    rounded = {name: x.astype(numpy_dtype("bfloat16")) for name, x in draw(70, 20, 9, batch=1).items()}
    got = scanfield.gdn2(
        **{n: card.cupy.asarray(x) for n, x in rounded.items()}, qk_l2norm=True, method=TENSOR
    )
    wide = {name: x.astype("float64") for name, x in rounded.items()}
    want = scanfield.gdn2(**wide, qk_l2norm=True, method="generic.recurrent")
    assert got.output.dtype == numpy_dtype("bfloat16")
    for x, y in zip(got[:2], want[:2], strict=True):
        assert deviation(card.raw(x), y) <= HALF_TOLERANCE["bfloat16"]


@pytest.mark.parametrize("dtype", HALF_TOLERANCE)
def test_chunks_on_tensor_cores(card, dtype: str):
    """Whole chunks and their rests, several tiles of everything; the truth is that of the rounded inputs."""
    from arrays import numpy_dtype

    rounded = {name: x.astype(numpy_dtype(dtype)) for name, x in draw(150, 70, 40, heads=1, batch=1).items()}
    got = both({name: card.cupy.asarray(x) for name, x in rounded.items()}, TENSOR)
    want = both({name: x.astype("float64") for name, x in rounded.items()}, "generic.recurrent")
    for name, x in want.items():
        assert deviation(card.raw(got[name]), x) <= HALF_TOLERANCE[dtype], name
    # float16 goes as two numbers: what is not rounded to half is close to float32.
    assert deviation(card.raw(got["final_state"]), want["final_state"]) <= (
        3e-5 if dtype == "float16" else 1e-2
    )


@pytest.mark.parametrize("method", [CHUNK, TENSOR])
def test_what_comes_later_changes_no_bit_before_and_calls_are_repeatable(card, method: str):
    from arrays import numpy_dtype

    dtype = numpy_dtype("bfloat16" if method == TENSOR else "float64")
    inputs = draw(150, 20, 9, batch=1)
    first, second = (
        both({n: card.cupy.asarray(x.astype(dtype)) for n, x in inputs.items()}, method) for _ in range(2)
    )
    assert all(same_bits(card.raw(first[name]), card.raw(second[name])) for name in first)
    for name in inputs:
        if name != "initial_state":
            inputs[name][:, 101:] *= 3
    later = both({n: card.cupy.asarray(x.astype(dtype)) for n, x in inputs.items()}, method)
    assert same_bits(card.raw(first["output"])[:, :101], card.raw(later["output"])[:, :101])


def test_residuals_are_those_of_the_kernels_that_walk_token_by_token(card):
    """What one form keeps, the other's backward takes: states every 64 tokens, updates."""
    from scanfield_cupy import implementations

    inputs = card.arrays(draw(135, 6, 3, batch=1, heads=1))
    names = [each.name for each in OPERATION.inputs]
    options = {"scale": None, "qk_l2norm": False, "reverse": False, "chunk_size": None}
    call = OPERATION.prepare({name: inputs.get(name) for name in names}, options).call
    forms = implementations.recurrent("gdn2"), implementations.chunk("gdn2")
    wanted = (True,) * 7 + (False,)
    found = []
    for saves in forms:
        output, final, residuals = saves.save(call)
        found += [each.backward(call, residuals, output, final, wanted) for each in forms]
    for grads in found[1:]:
        assert all(
            deviation(card.raw(x), card.raw(y)) <= 1e-12 for x, y in zip(grads[:7], found[0][:7], strict=True)
        )


def test_heads_in_turns_and_gradients_that_are_not_wanted(card, monkeypatch):
    """What kernels leave to each other is kept small: the same numbers, head after head."""
    from scanfield_cupy import gated_delta_chunk

    arrays = card.arrays(draw(70, 6, 20, heads=3, vheads=3, batch=1))
    whole = both(arrays, CHUNK)
    monkeypatch.setattr(gated_delta_chunk, "_WORK_BYTES", 1)
    standin.LAUNCHES.clear()
    turns = both(arrays, CHUNK)
    assert sum(launch.name == "delta_states_back" for launch in standin.LAUNCHES) == 3
    assert all(same_bits(card.raw(whole[name]), card.raw(turns[name])) for name in whole)
    for name in arrays:
        result, pullback = scanfield.vjp(scanfield.gdn2, **arrays, wrt=[name], method=CHUNK)
        gradients = pullback(result.output * 0 + 1, result.final_state * 0 + 1)
        assert set(gradients) == {name} and same_bits(card.raw(gradients[name]), card.raw(whole[name])), name


@pytest.mark.parametrize("which", [0, 1])
def test_one_cotangent_alone(card, which: int):
    inputs = draw(70, 6, 3, batch=1)
    found = []
    for arrays, method in ((card.arrays(inputs), CHUNK), (inputs, "generic.recurrent")):
        result, pullback = scanfield.vjp(scanfield.gdn2, **arrays, method=method)
        found.append(pullback(*(x * 0 + 1 if i == which else None for i, x in enumerate(result[:2]))))
    for name, x in found[1].items():
        assert deviation(card.raw(found[0][name]), x, floor=1e-9) <= 1e-12, name


@pytest.mark.parametrize("sizes", [(0, 4, 3), (2, 0, 3), (2, 4, 0)])
def test_nothing_is_launched_on_nothing(card, sizes: tuple[int, int, int]):
    batch, time, V = sizes
    standin.LAUNCHES.clear()
    check(card, draw(time, 3, V, batch=batch))
    assert not standin.LAUNCHES


def test_grids_that_are_too_large_walk_on(card, monkeypatch):
    from scanfield_cupy import gated_delta_chunk

    assert gated_delta_chunk.MOST_ROWS <= 65_535 and gated_delta_chunk.MOST_BLOCKS <= 2**31 - 1
    monkeypatch.setattr(gated_delta_chunk, "MOST_ROWS", 3)
    limited = gated_delta_chunk.launch

    def launch(file, defined, name, grid, *rest):
        few = (
            grid if "states" in name else (min(grid[0], 5), *grid[1:])
        )  # blocks of states do not walk on along x
        limited(file, defined, name, few, *rest)

    monkeypatch.setattr(gated_delta_chunk, "launch", launch)
    check(card, draw(66, 4, 3, batch=4))


def test_arrays_are_read_as_they_lie_and_in_types_of_their_own(card):
    """One projection cut into three, flipped gates; keys and gates in other types than the values', no copy."""
    arrays = card.arrays(draw(70, 4, 4, heads=2, vheads=2), "float32")
    wide = card.cupy.concatenate([arrays[name] for name in ("query", "key", "value")], axis=-1)
    arrays["query"], arrays["key"], arrays["value"] = (wide[..., 4 * i : 4 * i + 4] for i in range(3))
    arrays["erase"] = arrays["erase"][:, ::-1].copy()[:, ::-1]
    got, want = both(arrays, CHUNK), both({name: x.copy() for name, x in arrays.items()}, CHUNK)
    assert all(same_bits(card.raw(got[name]), card.raw(want[name])) for name in want)
    half = {name: arrays[name].astype("float16") for name in ("value", "erase", "write")}
    told = str(scanfield.explain(scanfield.gdn2, **(arrays | half), method=TENSOR))
    assert f"{TENSOR} reads query, key, value, log_decay, erase, write as they lie: no copy" in told


def test_the_form_is_chosen_by_length_and_what_cannot_run_says_why(card, monkeypatch):
    from scanfield_cupy import gated_delta_chunk

    def told(time: int, K: int, dtype: str = "float32", method: str | None = None, **options: Any) -> str:
        arrays = {
            name: card.cupy.broadcast_to(x, (1, time, *x.shape[2:])) for name, x in small(K, dtype).items()
        }
        return str(scanfield.explain(scanfield.gdn2, **arrays, method=method, **options))

    def small(K: int, dtype: str) -> dict[str, Any]:
        return card.arrays({name: np.ones((1, 1, 1, K)) for name in ("query", "key", "value")}, dtype)

    long = gated_delta_chunk.LONG
    assert "runs as cupy.rawkernel.chunk" in told(long, 32)
    assert "runs as cupy.rawkernel.recurrent" in told(long - 1, 32)
    assert "runs as cupy.rawkernel.recurrent" in told(long, gated_delta_chunk.NARROW - 1)
    assert "runs as cupy.rawkernel.recurrent" in told(
        2 * long, 32, cu_seqlens=[0, 100, 2 * long - 7, 2 * long]
    )
    assert "growth" in told(long, 32)
    many = {name: card.cupy.broadcast_to(x, (300, long, 1, 32)) for name, x in small(32, "float32").items()}
    assert "runs as cupy.rawkernel.recurrent" in str(scanfield.explain(scanfield.gdn2, **many))
    with pytest.raises(
        scanfield.BackendError, match="value is float32, tensor cores multiply float16 and bfloat16"
    ):
        told(9, 4, method=TENSOR)
    monkeypatch.setattr(standin.Device, "compute_capability", "75")
    with pytest.raises(scanfield.BackendError, match="compute capability is 75: bfloat16 needs 80"):
        told(9, 4, "float16", method=TENSOR)
    monkeypatch.setattr(gated_delta_chunk, "shared_memory", lambda device: 40 * 1024)
    assert "runs as cupy.rawkernel.recurrent" in told(long, 32)
    with pytest.raises(scanfield.BackendError, match=r"chunks need \d+ bytes of shared memory for save"):
        both(card.arrays(draw(3, 4, 2), "float32"), CHUNK)


def test_long_sequences_by_default_a_step_and_summaries(card):
    from scanfield_cupy import gated_delta_chunk

    inputs = draw(gated_delta_chunk.LONG, 32, 2, heads=1, vheads=1, batch=1)
    standin.LAUNCHES.clear()
    got, want = both(card.arrays(inputs), None), both(inputs, "generic.recurrent")
    assert {"delta_inside", "delta_states", "delta_output", "delta_gradients"} <= {
        each.name for each in standin.LAUNCHES
    }
    assert all(deviation(card.raw(got[name]), x) <= 1e-11 for name, x in want.items())
    short = draw(70, 6, 3, batch=1)
    del short["initial_state"]
    one, two = (
        scanfield.summarise(scanfield.gdn2, **arrays, method=method)
        for arrays, method in ((card.arrays(short), CHUNK), (short, "generic.recurrent"))
    )
    assert deviation(card.raw(one.transition), two.transition) <= 1e-12
    assert deviation(card.raw(one.state), two.state) <= 1e-12
    token = {name: x[:, 0] for name, x in draw(1, 6, 3, batch=1).items()}
    state = draw(1, 6, 3, batch=1)["initial_state"]
    del token["initial_state"]
    out, _ = scanfield.gdn2.step(card.array(state), **card.arrays(token), method=CHUNK)
    want_out, _ = scanfield.gdn2.step(state, **token, method="generic.recurrent")
    assert deviation(card.raw(out), want_out) <= 1e-12
