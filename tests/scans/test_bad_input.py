"""Bad input, one test a row: the right error, which names the argument, what came and what is allowed.

Every error is one of scanfield's family and also the builtin that a caller expects. For a mix of libraries or
devices the message holds the line that converts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from arrays import Library
from checks import followed, operation
from examples import DELTA_FAMILY, OPERATIONS, op_inputs

import scanfield
from scanfield import (
    ArgumentError,
    BackendError,
    DeviceError,
    DtypeError,
    ScanfieldError,
    ShapeError,
    StateError,
)
from scanfield.arrays import check_same_library

BUILTIN = {
    ShapeError: ValueError, DtypeError: TypeError, BackendError: TypeError, DeviceError: ValueError,
    ArgumentError: TypeError, StateError: RuntimeError,
}  # fmt: skip


def good(library: Library, op: str, **sizes: int) -> dict[str, Any]:
    return library.arrays(op_inputs(op, f"{op} bad input", **{"time": 3, **sizes}))


class Says:
    """`with Says(ShapeError, "key", "(2, 3)")`: that error, as family member and builtin, with all these
    words.
    """

    def __init__(self, error: type[ScanfieldError], *words: str) -> None:
        self.error, self.words = error, words
        self.context = pytest.raises(error)

    def __enter__(self) -> Says:
        self.caught = self.context.__enter__()
        return self

    def __exit__(self, *exc: Any) -> bool:
        passed = self.context.__exit__(*exc)
        assert isinstance(self.caught.value, ScanfieldError) and isinstance(
            self.caught.value, BUILTIN[self.error]
        )
        assert type(self.caught.value) is self.error
        message = str(self.caught.value)
        for word in self.words:
            assert word in message, f"{word!r} is not in: {message}"
        return passed


def test_the_family():
    for error, builtin in BUILTIN.items():
        assert issubclass(error, ScanfieldError) and issubclass(error, builtin)


# -- rank ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("op", OPERATIONS)
def test_wrong_rank(library: Library, op: str):
    """Every array with an axis too many and, where no layout has that rank, with one too few."""
    inputs = good(library, op)
    for name, x in inputs.items():
        longer = {**inputs, name: library.xp.reshape(x, (*x.shape, 1, 1))}
        with Says(ShapeError, name, str(tuple(longer[name].shape))):
            operation(op)(**longer)
        scalar = {**inputs, name: library.xp.reshape(x, (-1,))[0, ...]}
        if scalar[name].shape == () and library.is_array(
            scalar[name]
        ):  # NumPy gives a number here, another row
            with Says(ShapeError, name, "()"):
                operation(op)(**scalar)


def test_a_batch_axis_is_offered_where_it_is_what_lacks(library: Library):
    """A decay a head, where each channel has its own, lacks its last axis and not its first."""
    inputs = good(library, "kda")
    with Says(ShapeError, "log_decay", "(batch, time, vheads, key)") as said:
        scanfield.kda(**{**inputs, "log_decay": inputs["log_decay"][..., 0]})
    assert "log_decay[None, ...]" not in str(said.caught.value)
    with Says(ShapeError, "log_decay = log_decay[None, ...]"):
        scanfield.kda(**{**inputs, "log_decay": inputs["log_decay"][0, ...]})


def test_the_message_on_rank_shows_the_layouts(library: Library):
    inputs = good(library, "gdn2")
    with Says(ShapeError, "log_decay", "5 axes", "(batch, time, vheads, key)", "(batch, time, vheads)"):
        scanfield.gdn2(**{**inputs, "log_decay": inputs["log_decay"][..., None]})
    inputs = good(library, "selective_scan")
    with Says(ShapeError, "B", "(batch, time, state)", "(batch, time, groups, state)", "(channels, state)"):
        scanfield.selective_scan(**{**inputs, "B": inputs["B"][0, 0, ...]})


@pytest.mark.backend("numpy", "strict", "torch")
def test_one_sequence_alone_comes_with_the_line_that_mends_it(library: Library):
    inputs = good(library, "gdn2")
    alone = inputs["query"][0, ...]
    with pytest.raises(ShapeError) as caught:
        scanfield.gdn2(**{**inputs, "query": alone})
    scope = {"query": alone}
    exec(str(caught.value).split("; one sequence: ")[1], scope)  # noqa: S102  (the advice itself is what is tested)
    assert tuple(scope["query"].shape) == (1, *inputs["query"].shape[1:])
    with pytest.raises(ShapeError, match=r"expected \(sequence, vheads, key, value\)$"):  # no such line
        scanfield.gdn2(**{**inputs, "initial_state": inputs["initial_state"][0, ...]})


# -- size ----------------------------------------------------------------------------------------------------
# (operation, argument, axis that is made one longer, another argument that it then disagrees with)
SIZES = [
    ("linear_scan", "b", 0, "a"),
    ("linear_scan", "b", 1, "a"),
    ("linear_scan", "b", 2, "a"),
    ("linear_scan", "initial_state", 0, "batch"),
    ("linear_scan", "initial_state", 1, "a"),
    ("selective_scan", "delta", 0, "u"),
    ("selective_scan", "delta", 1, "u"),
    ("selective_scan", "delta", 2, "u"),
    ("selective_scan", "A", 0, "u"),
    ("selective_scan", "B", 1, "u"),
    ("selective_scan", "B", 2, "A"),
    ("selective_scan", "C", 2, "A"),
    ("selective_scan", "D", 0, "u"),
    ("selective_scan", "z", 2, "u"),
    ("selective_scan", "delta_bias", 0, "u"),
    ("selective_scan", "initial_state", 2, "A"),
    ("gdn2", "key", 0, "query"),
    ("gdn2", "key", 1, "query"),
    ("gdn2", "key", 2, "query"),
    ("gdn2", "key", 3, "query"),
    ("gdn2", "value", 1, "query"),
    ("gdn2", "log_decay", 2, "value"),
    ("gdn2", "log_decay", 3, "query"),
    ("gdn2", "erase", 3, "query"),
    ("gdn2", "write", 3, "value"),
    ("gdn2", "initial_state", 1, "value"),
    ("gdn2", "initial_state", 2, "query"),
    ("gdn2", "initial_state", 3, "value"),
    ("kda", "beta", 2, "value"),
    ("comba", "erase_key", 2, "query"),
    ("comba", "erase_key", 3, "query"),
    ("gated_delta_product", "value", 2, "key"),
    ("ssd", "dt", 2, "x"),
    ("ssd", "A", 0, "x"),
    ("ssd", "C", 3, "B"),
    ("ssd", "initial_state", 3, "B"),
]


@pytest.mark.parametrize(("op", "name", "axis", "other"), SIZES)
def test_wrong_size_names_both(library: Library, op: str, name: str, axis: int, other: str):
    data = op_inputs(op, f"{op} bad input", time=3)
    data[name] = np.concatenate([data[name], np.take(data[name], [0], axis=axis)], axis=axis)
    inputs = library.arrays(data)
    with Says(ShapeError, name, other, str(tuple(inputs[name].shape)), str(data[name].shape[axis])):
        operation(op)(**inputs)


@pytest.mark.parametrize("op", [op for op in DELTA_FAMILY if op != "ssd"])
def test_a_size_of_one_is_no_broadcast(library: Library, op: str):
    """Only gates of gdn2 may have axes of size 1; a value or key of size 1 is a mistake, not an invitation."""
    data = op_inputs(op, f"{op} bad input", time=3)
    data["key"] = data["key"][..., :1]
    with Says(ShapeError, "key", "query"):
        operation(op)(**library.arrays(data))


@pytest.mark.parametrize("op", OPERATIONS)
def test_a_state_for_another_batch(library: Library, op: str):
    data = op_inputs(op, f"{op} bad input", batch=2, time=3, states=3)
    with Says(ShapeError, "initial_state", str(data["initial_state"].shape), "2"):
        operation(op)(**library.arrays(data))


@pytest.mark.parametrize("op", [op for op in DELTA_FAMILY if op != "ssd"])
def test_heads_not_a_divisor(library: Library, op: str):
    """2 query heads do not divide 3 value heads."""
    data = op_inputs(op, f"{op} bad input", time=3)
    for name, x in data.items():
        if name not in ("query", "key", "erase_key"):
            axis = (
                1
                if name == "initial_state"
                else 3
                if name in ("value", "beta") and op == "gated_delta_product"
                else 2
            )
            data[name] = np.take(x, range(3), axis=axis)
    with Says(ShapeError, "query", "value", "2", "3"):
        operation(op)(**library.arrays(data))


def test_groups_not_a_divisor(library: Library):
    for op, name in (("selective_scan", "B"), ("selective_scan", "C"), ("ssd", "B")):
        data = op_inputs(op, f"{op} bad input", time=3)
        wide = np.random.default_rng(0).standard_normal((*data["B"].shape[:2], 3, data["B"].shape[-1]))
        data |= {"B": wide, "C": wide} if op == "ssd" else {name: wide}
        with Says(ShapeError, name, "3", "4"):
            operation(op)(**library.arrays(data))


# -- keywords ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("op", OPERATIONS)
def test_unknown_keyword(library: Library, op: str):
    inputs = good(library, op)
    with Says(ArgumentError, op, "'attention_mask'"):
        operation(op)(**inputs, attention_mask=None)
    with Says(ArgumentError, op, "'chunksize'", "chunk_size"):  # and which one was probably meant
        operation(op)(**inputs, chunksize=4)
    with Says(ArgumentError, "'reversed'"):
        scanfield.vjp(operation(op), **inputs, reversed=True)
    with Says(ArgumentError, "'reverse'"):
        operation(op).step(None, **{n: x for n, x in inputs.items() if n != "initial_state"}, reverse=True)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("g", "log_decay"), ("q", "query"), ("w", "write"), ("initial_states", "initial_state")],
)
def test_another_projects_keyword(library: Library, theirs: str, ours: str):
    inputs = good(library, "gdn2")
    inputs[theirs] = inputs.pop(ours)
    with Says(ArgumentError, f"'{theirs}'", ours):
        scanfield.gdn2(**inputs)


@pytest.mark.parametrize("op", OPERATIONS)
def test_a_missing_argument(library: Library, op: str):
    inputs = good(library, op)
    required = [e.name for e in operation(op).record.inputs if not e.optional and e.role != "index"]
    for name in required:
        with Says(ArgumentError, name):
            operation(op)(**{n: x for n, x in inputs.items() if n != name})
        with Says(ArgumentError, name):
            operation(op)(**{**inputs, name: None})


@pytest.mark.parametrize("op", OPERATIONS)
def test_too_many_positional_arguments(library: Library, op: str):
    """Options are named: a chunk size in the place of an array is refused."""
    inputs = good(library, op)
    order = [e.name for e in operation(op).record.inputs if e.role != "index"]
    arrays = [inputs.get(name) for name in order]
    with Says(ArgumentError, op):
        operation(op)(*arrays, 64)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("reverse", 1),
        ("reverse", "yes"),
        ("reverse", None),
        ("qk_l2norm", 1),
        ("scale", "1"),
        ("scale", True),
        ("states_at", "all"),
        ("states_at", [1.0]),
        ("states_at", [4]),
        ("states_at", [-1]),
        ("method", "generic.fast"),
    ],
)
def test_a_bad_option(library: Library, option: str, value: Any):
    with pytest.raises(ScanfieldError) as caught:
        scanfield.gdn2(**good(library, "gdn2"), **{option: value})
    shown = repr(value) if not isinstance(value, list) else str(value[0])
    assert option in str(caught.value)
    assert shown in str(caught.value) or type(value).__name__ in str(caught.value)


@pytest.mark.parametrize("limit", [(1.0, 0.5), (0.1,), 0.1, ("a", "b"), (0.1, None)])
def test_a_bad_dt_limit(library: Library, limit: Any):
    for op in ("selective_scan", "ssd"):
        with pytest.raises(ScanfieldError, match="dt_limit"):
            operation(op)(**good(library, op), dt_limit=limit)


# -- things that are no arrays of floats ---------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["int32", "int64", "bool"])
@pytest.mark.parametrize("op", OPERATIONS)
def test_integers_and_booleans(library: Library, op: str, dtype: str):
    data = op_inputs(op, f"{op} bad input", time=3)
    for name in data:
        inputs = library.arrays(data)
        inputs[name] = library.array(np.ones(data[name].shape, dtype=dtype))
        with Says(DtypeError, name, dtype, "float32", f"cast it first: {name} = "):
            operation(op)(**inputs)


@pytest.mark.parametrize("op", OPERATIONS)
def test_scalars(library: Library, op: str):
    """A number is refused with the line that makes an array of it, of a shape and a dtype that the call takes."""
    inputs = good(library, op)
    runs = op == "linear_scan" or library.name not in ("jax", "dask")  # where a shape costs no compilation
    for name in inputs:
        for number in (1, 0.5, True, 1j, np.float64(0.5), np.float32(2.0)):
            call = {**inputs, name: number}
            with Says(BackendError, name, type(number).__name__, f"; the same everywhere: {name} = ") as said:
                operation(op)(**call)
            if runs and not isinstance(number, complex):
                followed(str(said.caught.value), call)
                assert library.dtype(operation(op)(**call).output) == "float64"


@pytest.mark.parametrize(
    "thing", [[[[1.0]]], ((1.0,),), "a word", {"a": 1}, object()], ids=lambda x: type(x).__name__
)
def test_lists_and_other_things(library: Library, thing: Any):
    inputs = good(library, "gdn2")
    for name in ("query", "erase", "initial_state"):
        with Says(BackendError, name, type(thing).__name__):
            scanfield.gdn2(**{**inputs, name: thing})


@pytest.mark.parametrize("op", DELTA_FAMILY)
def test_complex_where_it_makes_no_sense(library: Library, op: str):
    data = op_inputs(op, f"{op} bad input", time=3)
    for name in data:
        inputs = library.arrays({**data, name: data[name] + 0j})
        with Says(DtypeError, name, "complex128"):
            operation(op)(**inputs)


@pytest.mark.parametrize("name", ["u", "delta", "D", "z", "delta_bias"])
def test_a_complex_u_is_refused(library: Library, name: str):
    data = op_inputs("selective_scan", "complex u", time=3)
    with Says(DtypeError, name, "complex128"):
        scanfield.selective_scan(**library.arrays({**data, name: data[name] + 0j}))


@pytest.mark.parametrize("name", ["B", "C", "initial_state"])
def test_complex_b_needs_a_complex_a(library: Library, name: str):
    """With a real A the output would silently drop an imaginary part."""
    data = op_inputs("selective_scan", "complex B", time=3)
    with Says(DtypeError, name, "complex", "A is real", "astype"):
        scanfield.selective_scan(**library.arrays({**data, name: data[name] + 0j}))


@pytest.mark.backend("numpy")
@pytest.mark.parametrize("op", OPERATIONS)
def test_masked_arrays(library: Library, op: str):
    inputs = good(library, op)
    for name in inputs:
        masked = np.ma.masked_array(np.array(inputs[name]), mask=False)
        with Says(BackendError, name, "MaskedArray", "filled"):
            operation(op)(**{**inputs, name: masked})


@pytest.mark.backend("numpy")
@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_matrices(library: Library):
    inputs = good(library, "selective_scan")
    matrix = np.matrix(np.array(inputs["A"]))
    with Says(BackendError, "A", "matrix", "numpy.asarray(A)"):
        scanfield.selective_scan(**{**inputs, "A": matrix})
    with Says(BackendError, "a", "matrix"):
        scanfield.linear_scan(np.matrix(np.ones((2, 3))), np.ones((2, 3)))


@pytest.mark.backend("numpy")
def test_object_arrays(library: Library):
    a, b = np.ones((1, 3, 1), dtype=object), library.array(np.ones((1, 3, 1)))
    with Says(DtypeError, "a", "object"):
        scanfield.linear_scan(a, b)


# -- mixes ---------------------------------------------------------------------------------------------------
# How NumPy data become an array of each library.
CONVERTS = {
    "strict": "array_api_strict.asarray", "torch": "torch.as_tensor", "jax": "jax.numpy.asarray",
    "dask": "dask.array.from_array", "cupy": "cupy.asarray",
}  # fmt: skip


@pytest.mark.backend(*CONVERTS)
@pytest.mark.parametrize("op", OPERATIONS)
def test_two_libraries(library: Library, op: str):
    """Both libraries are named, every stranger is named, and the line that converts it is there and is right."""
    data = op_inputs(op, f"{op} bad input", time=3)
    order = [e.name for e in operation(op).record.inputs if e.name in data]
    for name in order[1:]:
        inputs = library.arrays(data)
        inputs[name] = data[name]  # NumPy among the others
        with Says(BackendError, name, "numpy", order[0], f"{name} = {CONVERTS[library.name]}({name}"):
            operation(op)(**inputs)
    inputs = {name: data[name] for name in order}
    # One stranger among NumPy: it may have a gradient, or be traced.
    inputs[order[1]] = library.array(data[order[1]])
    with Says(BackendError, order[1], "numpy", f"{order[0]} = {CONVERTS[library.name]}({order[0]}") as said:
        operation(op)(**inputs)
    assert f" {order[1]} = " not in str(said.caught.value)


@pytest.mark.backend("torch", "strict")
def test_one_stranger_among_many_is_converted_and_the_many_are_counted(library: Library):
    """A model's input beside its hundreds of parameters: the message stays a line."""
    many = {f"weight{i}": library.array(np.ones(1)) for i in range(40)}
    line = f": x = {CONVERTS[library.name]}(x"
    with Says(BackendError, "x is numpy, the parameters are", line) as said:
        check_same_library([("x", np.ones(1)), *many.items()], held=("layer", many))
    assert "weight" not in str(said.caught.value).replace("['weight0']", "")
    with Says(BackendError, "x is numpy, weight0 and 39 more are"):
        check_same_library([("x", np.ones(1)), *many.items()])


@pytest.mark.backend("torch", "jax", "dask", "strict")
def test_the_line_that_converts_works(library: Library):
    data = op_inputs("linear_scan", "converts", time=3)
    for kept, other in ("ab", "ba"):
        call = {"a": data["a"], "b": data["b"], kept: library.array(data[kept])}
        with pytest.raises(BackendError) as caught:
            scanfield.linear_scan(**call)
        followed(str(caught.value), call)
        assert library.is_array(call[other]) and library.on_device(call[other])
        scanfield.linear_scan(**call)


@pytest.mark.backend("strict")
def test_two_devices(library: Library):
    inputs = good(library, "gdn2")
    far = library.xp.Device("device2")
    for name in list(inputs)[1:]:
        moved = {**inputs, name: inputs[name].to_device(far)}
        with Says(DeviceError, name, "device2", "query", "device1", f"{name} = ", "to_device"):
            scanfield.gdn2(**moved)


@pytest.mark.backend("torch")
def test_two_devices_of_torch(library: Library):
    """The meta device stands for any second device."""
    torch = pytest.importorskip("torch")
    inputs = good(library, "gdn2")
    for name in list(inputs)[1:]:
        moved = {**inputs, name: inputs[name].to(torch.device("meta"))}
        with Says(DeviceError, name, "meta", "query", "cpu", f"{name} = {name}.to(query.device)"):
            scanfield.gdn2(**moved)


@pytest.mark.gpu
@pytest.mark.backend("torch")
def test_cpu_and_cuda(library: Library):
    inputs = good(library, "gdn2")
    with Says(DeviceError, "key", "cuda", "cpu", "key = key.to(query.device)"):
        scanfield.gdn2(**{**inputs, "key": inputs["key"].cuda()})


# -- cu_seqlens ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize(
    ("cuts", "words"),
    [([0, 2, 1, 3], ("decrease", "2", "1")), ([0, 1, 2], ("end", "2", "3")), ([0, 1, 4], ("end", "4", "3")),
     ([1, 2, 3], ("start", "1", "0")), ([], ("empty",))],
    ids=["falls", "too short", "too long", "not from 0", "empty"],
)  # fmt: skip
def test_cu_seqlens_values(library: Library, op: str, cuts: list[int], words: tuple[str, ...]):
    data = op_inputs(op, f"{op} bad input", batch=1, time=3, states=max(len(cuts) - 1, 0))
    with Says(ShapeError, "cu_seqlens", *words):
        operation(op)(**library.arrays(data), cu_seqlens=cuts)
    with Says(ShapeError, "cu_seqlens", *words):
        operation(op)(**library.arrays(data), cu_seqlens=np.asarray(cuts, dtype=np.int64))


@pytest.mark.parametrize("op", OPERATIONS)
def test_cu_seqlens_needs_one_row(library: Library, op: str):
    data = op_inputs(op, f"{op} bad input", batch=2, time=3, states=2)
    with Says(ShapeError, "cu_seqlens", "batch", "2", "1"):
        operation(op)(**library.arrays(data), cu_seqlens=[0, 1, 3])


@pytest.mark.parametrize("op", OPERATIONS)
def test_a_state_for_another_number_of_sequences(library: Library, op: str):
    data = op_inputs(op, f"{op} bad input", batch=1, time=3, states=1)
    with Says(ShapeError, "initial_state", str(data["initial_state"].shape), "2"):
        operation(op)(**library.arrays(data), cu_seqlens=[0, 1, 3])


@pytest.mark.parametrize(
    ("cuts", "error"),
    [
        ([0.0, 3.0], DtypeError),
        (np.asarray([0.0, 3.0]), DtypeError),
        ([0, True, 3], DtypeError),
        ([0, "1", 3], DtypeError),
        (np.asarray([[0, 3]]), ShapeError),
        ("03", BackendError),
        (3, BackendError),
    ],
    ids=["floats", "float array", "bool", "word among them", "two axes", "word", "number"],
)
def test_cu_seqlens_of_another_kind(library: Library, cuts: Any, error: type[ScanfieldError]):
    with Says(error, "cu_seqlens"):
        scanfield.gdn2(**good(library, "gdn2", batch=1, states=1), cu_seqlens=cuts)


@pytest.mark.backend("dask")
def test_a_dask_index_has_no_values_yet(library: Library):
    with Says(ArgumentError, "cu_seqlens", "compute"):
        scanfield.gdn2(**good(library, "gdn2", batch=1), cu_seqlens=library.array(np.asarray([0, 3])))


@pytest.mark.backend("jax")
def test_a_traced_index_has_no_values(library: Library):
    jax = pytest.importorskip("jax")
    inputs = good(library, "gdn2", batch=1)
    with Says(ArgumentError, "cu_seqlens", "static"):
        jax.jit(lambda cuts: scanfield.gdn2(**inputs, cu_seqlens=cuts).output)(
            library.array(np.asarray([0, 3]))
        )


def test_associative_scan_is_told_apart_from_the_scans_with_gradients(library: Library):
    with pytest.raises(scanfield.ArgumentError, match="associative_scan takes any rule"):
        scanfield.vjp(scanfield.associative_scan, library.array(np.ones((1, 2, 1))))


def test_integers_come_with_the_line_that_mends_them(library: Library):
    """A line of the caller's own library, that runs as it stands."""
    a = library.xp.ones((1, 3, 2), dtype=library.xp.int32)
    default = "float32" if library.name in ("torch", "jax") else "float64"
    for beside, wanted in ((None, default), ("float64", "float64"), ("float32", "float32")):
        b = a if beside is None else library.xp.ones((1, 3, 2), dtype=getattr(library.xp, beside))
        with pytest.raises(scanfield.DtypeError) as caught:
            scanfield.linear_scan(a, b)
        line = str(caught.value).split("cast it first: ")[1].split(", with")[0]
        scope = {"a": a, "xp": library.xp}
        exec(line, scope)  # noqa: S102  (the advice itself is what is tested)
        assert library.dtype(scope["a"]) == wanted


@pytest.mark.backend("numpy")
@pytest.mark.parametrize(
    "values", [["a"], np.array(["2020"], "M8[D]"), np.zeros(1, "i4,f4")], ids=["str", "date", "record"]
)
def test_what_no_cast_makes_numbers_of_is_told_without_one(values: Any):
    a = np.asarray(values)[None]
    with Says(DtypeError, "a: dtype", "allowed are float16") as said:
        scanfield.linear_scan(a, np.ones((1, 1)))
    assert "cast" not in str(said.caught.value) and "astype" not in str(said.caught.value)


@pytest.mark.parametrize("op", ["linear_scan", "selective_scan", "gdn2"])
def test_a_step_s_state_is_called_as_the_step_calls_it(library: Library, op: str):
    arrays = library.arrays(op_inputs(op, f"{op} state of a step", time=1))
    state = arrays.pop("initial_state")
    token = {n: x if n in ("A", "D", "delta_bias") else x[:, 0, ...] for n, x in arrays.items()}
    with pytest.raises(scanfield.ShapeError, match=r"^state: shape"):
        operation(op).step(state[..., :1], **token)
    with pytest.raises(scanfield.ShapeError, match=r"^initial_state: shape"):
        operation(op)(**arrays, initial_state=state[..., :1])


_A = np.full((1, 3, 2), 0.5)


@pytest.mark.backend("numpy")
@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: scanfield.linear_scan(_A, _A, cu_seqlens=()), ShapeError, "cu_seqlens: empty; it holds"),
        (lambda: scanfield.linear_scan(_A, _A, states_at=2), ArgumentError, "states_at: came int; allowed are"),
        (lambda: scanfield.gdn2(_A[..., None], _A[..., None], _A[..., None], scale=10**400),
         ArgumentError, "scale: too large for a float"),
        (lambda: scanfield.linear_scan(_A, _A, b=_A), ArgumentError, "linear_scan: multiple values for argument 'b'"),
        (lambda: scanfield.linear_scan.step(None, _A[:, 0], _A[:, 0], b=_A[:, 0]),
         ArgumentError, "linear_scan.step: multiple values for argument 'b'"),
        (lambda: scanfield.linear_scan.step(None, _A[:, 0]), ArgumentError, "missing a required argument: 'b'"),
        (lambda: scanfield.linear_scan.step(*[_A[:, 0]] * 9), ArgumentError, "too many positional arguments"),
    ],
)  # fmt: skip
def test_calls_that_cannot_be_read(call: Any, error: type[ScanfieldError], words: str):
    with pytest.raises(error) as caught:
        call()
    assert words in str(caught.value)


@pytest.mark.parametrize(("op", "name"), [("linear_scan", "a"), ("gdn2", "query")])
def test_the_dtypes_that_are_named_are_taken_and_no_others(library: Library, op: str, name: str):
    """longdouble was taken and not named."""
    inputs = op_inputs(op, f"{op} dtypes")
    with pytest.raises(DtypeError) as told:
        operation(op)(**library.arrays(inputs | {name: inputs[name].astype(np.int64)}))
    named = str(told.value).split("allowed are ")[1].split(";")[0].split(", ")
    assert ("complex64" in named) == (op == "linear_scan")
    assert ("longdouble" in named) == (library.name in ("numpy", "readonly", "dask"))
    if library.name == "numpy":
        for dtype in (
            "float16",
            "float32",
            "float64",
            "longdouble",
            "complex64",
            "complex128",
            "clongdouble",
        ):
            arrays = {n: x.astype(dtype) for n, x in inputs.items()}
            if dtype in named:
                assert operation(op)(**arrays).output.dtype == dtype
            else:
                with pytest.raises(DtypeError, match="allowed are"):
                    operation(op)(**arrays)
