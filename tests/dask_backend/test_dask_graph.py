"""The graph: lazy, a task a block, on the block's own fast path; the form over time; what explain says of it."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import pickle
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from arrays import Library, deviation
from arrays import library as library_called
from checks import operation
from examples import BASE, op_inputs

import scanfield
from scanfield import dispatch
from scanfield.dispatch import registry

pytestmark = pytest.mark.backend("dask")


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Calls that reach a dispatcher's implementation with arrays that hold values: (verb, implementation) -> how many."""
    counts: Counter[str] = Counter()
    select = registry.select

    def counting(call: dispatch.Call, verb: Any, method: str | None = None) -> Any:
        chosen = select(call, verb, method)
        if isinstance(call.arrays[0], np.ndarray):
            counts[f"{verb} {chosen.name}"] += 1
        return chosen

    with monkeypatch.context() as patch:
        patch.setattr(registry, "select", counting)
        yield counts


def fast() -> str:
    return "numpy.numba" if importlib.util.find_spec("numba") else "generic.recurrent"


def refuse(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("something asked for the values of a lazy array")


SHARED = ("A", "D", "delta_bias")


def lazy(library: Library, op: str, size: int = 7, *, batch: int = -1, time: int = -1) -> dict[str, Any]:
    """The operation's arrays over ``size`` tokens; ``batch`` and ``time`` are the sizes of their blocks."""
    arrays = library.arrays(op_inputs(op, f"{op} graph", time=size))
    return {
        n: x
        if n in SHARED
        else x.rechunk({0: batch})
        if n == "initial_state"
        else x.rechunk({0: batch, 1: time})
        for n, x in arrays.items()
    }


@pytest.mark.parametrize("op", BASE)
def test_one_task_a_block_on_its_fast_path(library: Library, monkeypatch: pytest.MonkeyPatch, op: str):
    arrays = lazy(library, op, batch=1)
    with counted(monkeypatch) as counts:
        result = operation(op)(**arrays)
        assert not counts
        library.dask.compute(*result)
    assert counts == {f"forward {fast()}": 2}


@pytest.mark.parametrize(
    ("form", "counts"),
    [("dask.sequential", {"save": 2 * 4}), ("dask.parallel", {"save": 2 * 4, "summarise": 2 * 3})],
)
@pytest.mark.parametrize("op", BASE)
def test_each_block_runs_once_for_result_and_gradient(
    library: Library, monkeypatch: pytest.MonkeyPatch, op: str, form: str, counts: dict[str, int]
):
    arrays = lazy(library, op, 8, batch=1, time=2)
    with counted(monkeypatch) as found:
        with library.dask.config.set(scheduler=refuse):
            result, pullback = scanfield.vjp(operation(op), **arrays, method=form)
            gradients = pullback(*result)
            between = operation(op)(**arrays, method=form, states_at=[3, 8])
            state = arrays.pop("initial_state")
            block = scanfield.summarise(operation(op), **arrays, method=form)
        assert not found
        library.dask.compute(*result, gradients)
    assert found == {f"{verb} {fast()}": count for verb, count in counts.items()}
    assert deviation(between.states[:, 1].compute(), library.numpy(result.final_state)) <= 1e-12
    moved = scanfield.compose(scanfield.Affine(block.transition * 0, state, block.diagonal), block).state
    assert deviation(moved.compute(), library.numpy(result.final_state)) <= 1e-12


@pytest.mark.parametrize(("form", "longest"), [("dask.sequential", 32), ("dask.parallel", 2 * 5 + 1)])
def test_the_longest_path(library: Library, form: str, longest: int):
    """Block after block, or up and down a tree: so many scans, compositions and entries wait for one another."""
    output = scanfield.linear_scan(**lazy(library, "linear_scan", 64, time=2), method=form).output
    graph = dict(output.__dask_graph__())
    depths: dict[Any, int] = {}

    def depth(key: Any) -> int:
        if key not in depths:
            task = graph[key]
            parts = task if isinstance(task, tuple) else getattr(task, "dependencies", ())
            below = max(
                (depth(part) for part in parts if isinstance(part, tuple) and part in graph), default=0
            )
            depths[key] = below + str(key[0]).startswith(("run-", "map-", "enter-"))
        return depths[key]

    assert output.numblocks[1] == 32
    assert max(depth(key) for key in graph) == longest


def form_told(library: Library, op: str, arrays: dict[str, Any], **options: Any) -> str:
    text = str(scanfield.explain(operation(op), **arrays, **options))
    return next(form for form in ("sequential", "parallel", "no block waits") if f"; {form}" in text)


def test_the_rule_for_time(library: Library):
    """Parallel where one chain of eight blocks or more is all there is, and maps are elementwise."""
    eight = lazy(library, "linear_scan", 16, time=2)
    assert form_told(library, "linear_scan", lazy(library, "linear_scan", 16, batch=1)) == "no block waits"
    assert form_told(library, "linear_scan", eight) == "parallel"
    assert form_told(library, "linear_scan", eight, method="dask.sequential") == "sequential"
    assert form_told(library, "linear_scan", lazy(library, "linear_scan", 14, time=2)) == "sequential"
    assert (
        form_told(library, "linear_scan", lazy(library, "linear_scan", 16, batch=1, time=2)) == "sequential"
    )
    erases = lazy(library, "gdn2", 16, time=2)
    assert form_told(library, "gdn2", erases) == "sequential"
    assert form_told(library, "gdn2", erases, method="dask.parallel") == "parallel"
    erases.pop("erase")
    assert form_told(library, "gdn2", erases) == "parallel"


def test_explain_says_what_is_cut_anew(library: Library):
    a = library.da.ones((2, 6, 3), chunks=(2, (2, 4), 3))
    b = library.da.ones((2, 6, 3), chunks=(1, (3, 3), 3))
    told = str(scanfield.explain(scanfield.linear_scan, a, b))
    assert "a is cut anew to fit: batch 2 to 1+1; time 2+4 to 2+1+3." in told
    assert "b is cut anew to fit: time 3+3 to 2+1+3." in told
    assert "cut anew" not in str(scanfield.explain(scanfield.linear_scan, a, a))


def test_a_key_stays_whole(library: Library):
    """Elements of a key meet in the output: its blocks are joined, those of the value are not."""
    inputs = op_inputs("gdn2", "gdn2 whole key")
    arrays = {n: library.array(x).rechunk({x.ndim - 1: 2}) for n, x in inputs.items()}
    result = scanfield.gdn2(**arrays)
    assert result.output.chunks[3] == result.final_state.chunks[3] == (2, 2)
    assert result.final_state.numblocks[2] == 1
    assert "key is cut anew to fit: key 2+1 to 3." in str(scanfield.explain(scanfield.gdn2, **arrays))


def test_equal_calls_share_their_tasks(library: Library):
    arrays = lazy(library, "linear_scan")
    first, second = (scanfield.linear_scan(**arrays) for _ in range(2))
    assert first.output.name == second.output.name
    other = scanfield.linear_scan(**arrays, reverse=True)
    assert other.output.name != first.output.name


def test_unknown_sizes_are_refused_with_the_line_that_finds_them(library: Library):
    a = library.array(np.ones((4, 5, 3)))
    some = a[a[:, 0, 0] > 0]
    for arguments in ((some, a), (a, some)):
        with pytest.raises(scanfield.ShapeError, match=r"unknown.*compute_chunk_sizes\(\)"):
            scanfield.linear_scan(*arguments)
    result, pullback = scanfield.vjp(scanfield.linear_scan, a, a)
    with pytest.raises(scanfield.ShapeError, match=r"d_output: .*unknown"):
        pullback(result.output[a[:, 0, 0] > 0])
    known = some.compute_chunk_sizes()
    assert deviation(library.numpy(scanfield.linear_scan(known, a).output)[0, :, 0], np.arange(1.0, 6.0)) == 0


def test_a_forced_method_stays_with_the_graph(library: Library):
    """The names that choose a graph mean nothing to its blocks, in whatever thread they run."""
    arrays = lazy(library, "selective_scan", batch=1)
    want = scanfield.selective_scan(**op_inputs("selective_scan", "selective_scan graph")).output
    with scanfield.use(method="dask.parallel"):
        result = scanfield.selective_scan(**arrays)
        for scheduler in ("synchronous", "threads"):
            assert deviation(result.output.compute(scheduler=scheduler), want) <= 1e-12
    with pytest.raises(scanfield.BackendError, match="serves dask arrays"):
        scanfield.linear_scan(np.ones((1, 2, 1)), np.ones((1, 2, 1)), method="dask.blocks")


@pytest.mark.parametrize("op", BASE)
def test_blocks_of_a_library_that_is_not_numpy(library: Library, op: str):
    """The functions of the tasks on arrays that take nothing but the standard: nothing becomes a NumPy array."""
    pytest.importorskip("array_api_strict")
    strict = library_called("strict")
    from scanfield_dask import tasks
    from scanfield_dask.grid import Piece

    inputs = op_inputs(op, f"{op} strict blocks")
    record = operation(op).record
    whole = record.prepare({**strict.arrays(inputs), "cu_seqlens": None}, _options(op))
    call = whole.call
    place = [entry.role for entry in record.inputs].index("state")
    shared = [entry.role != "sequence" for entry in record.inputs]

    def part(start: int, stop: int) -> list[Any]:
        return [
            x if x is None or fixed else x[:, start:stop, ...]
            for x, fixed in zip(call.arrays, shared, strict=True)
        ]

    def block(piece: Piece) -> tasks.Block:
        return pickle.loads(pickle.dumps(tasks.Block(call.operation, call.options, call.compute, piece)))

    left, right = block(Piece(0, 3, False, True)), block(Piece(3, 7, True, False))
    output, middle, kept = tasks.save(left, None, *part(0, 3))
    entered = tasks.enter(tasks.summarise_tail(left, *part(0, 3)), call.arrays[place])
    assert deviation(strict.numpy(entered), strict.numpy(middle)) <= 1e-12
    rest, last, kept_right = tasks.save(right, middle, *part(3, 7))
    wanted = tuple(x is not None for x in call.arrays)
    *_, d_carry = tasks.backward(right, wanted, middle, kept_right, rest, last, None, *part(3, 7))
    *grads, _ = tasks.backward(left, wanted, None, kept, output, None, d_carry, *part(0, 3))
    want, pullback = scanfield.vjp(operation(op), **inputs)
    assert deviation(strict.numpy(tasks.add(output, output)), 2 * want.output[:, :3]) <= 1e-12
    assert deviation(strict.numpy(last), want.final_state) <= 1e-12
    gradient = pullback(*want)["initial_state"]
    assert deviation(strict.numpy(grads[place]), gradient) <= 1e-12
    assert all(strict.is_array(x) for x in (output, rest, d_carry, entered) if x is not None)


def test_gradients_come_as_the_graph_says(library: Library, monkeypatch: pytest.MonkeyPatch):
    """Whatever dtype an implementation gives its gradients: real arrays have real ones, in the carry's dtype."""
    from scanfield_dask import tasks

    class Wide:
        def backward(self, call: Any, residuals: Any, *cotangents: Any) -> Any:
            true = dispatch.implementation("linear_scan", "generic.recurrent")
            return [None if g is None else g + 0j for g in true.backward(call, residuals, *cotangents)]

    a = library.array(np.full((1, 4, 2), 0.5), "float32").rechunk({1: 2})
    gradient = scanfield.vjp(scanfield.linear_scan, a, a)[1](a)["a"]
    save = registry.save
    with monkeypatch.context() as patch:  # while the blocks are computed
        patch.setattr(registry, "save", lambda call, method=None: save(call, "generic.recurrent"))
        patch.setattr(tasks, "implementation", lambda operation, name: Wide())
        assert gradient.compute().dtype == gradient.dtype == np.float32


def test_a_record_without_axes_is_left_to_generic(library: Library):
    """An operation of a plugin that does not say how its output lies cannot be cut; the reason is told."""
    record = dataclasses.replace(scanfield.linear_scan.record, output="")
    prepared = record.prepare(
        {"a": library.array(np.ones((1, 2, 1))), "b": library.array(np.ones((1, 2, 1))), "initial_state": None,
         "cu_seqlens": None},
        _options("linear_scan"),
    )  # fmt: skip
    from scanfield_dask import implementations

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry._OPERATIONS, "linear_scan", record)
        reason = implementations.blocks("linear_scan").declines(prepared.call, "forward")
        assert reason == "the record of linear_scan names no axes of its output"
        assert registry.select(prepared.call, "forward").name == "generic.recurrent"


def _options(op: str) -> dict[str, Any]:
    names = inspect.signature(operation(op)).parameters
    return {
        n: p.default
        for n, p in names.items()
        if p.kind is p.KEYWORD_ONLY and n not in ("states_at", "method", "cu_seqlens")
    }
