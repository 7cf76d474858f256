"""What people put around an operation in PyTorch: hooks, modes, threads, workers, tracers, subclasses."""

from __future__ import annotations

import copy
import io
import threading
import warnings

import numpy as np
import pytest
from examples import BASE, OPERATIONS, op_inputs

import scanfield

pytestmark = pytest.mark.backend("torch")

torch = pytest.importorskip("torch")
pytest.importorskip("numba")

from tensors import tensors  # noqa: E402

METHODS = ("torch.numba", "torch.generic")


def leaves(op, name="around", **sizes):
    return tensors(op_inputs(op, f"{op} {name}", **sizes), requires_grad=True)


def run(op, given, method=None):
    return tuple(getattr(scanfield, op)(**given, method=method))


def loss(results):
    return sum((x.abs() ** 2).sum() for x in results)


def gradients(op, given, method=None):
    results = run(op, given, method)
    return [*results, *torch.autograd.grad(loss(results), list(given.values()), allow_unused=True)]


def equal(found, wanted):
    for x, y in zip(found, wanted, strict=True):
        assert torch.equal(x, y)


def close(found, wanted):
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


# -- what autograd offers ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("op", BASE)
def test_results_may_be_changed_in_place(op, method, dtype):
    """They are nobody's memory but the caller's, and no residual of the backward."""
    given = {name: x.detach().to(dtype).requires_grad_() for name, x in leaves(op).items()}
    output, state = run(op, given, method)
    wanted = torch.autograd.grad(loss((2 * output, 4 * state)), list(given.values()), retain_graph=True)
    output.mul_(2)
    state *= 4
    equal(torch.autograd.grad(loss((output, state)), list(given.values())), wanted)
    # And where nothing was asked for until now.
    weight = torch.full((), 2.0, dtype=dtype, requires_grad=True)
    with torch.no_grad():
        results = run(op, given, method)
    results += run(op, {name: x.detach() for name, x in given.items()}, method)
    for x in results:
        x.mul_(weight)
        assert x.requires_grad


@pytest.mark.parametrize("time", [0, 1, 7])
@pytest.mark.parametrize("op", OPERATIONS)
def test_nothing_that_comes_out_shares_memory_with_what_went_in(op, time):
    given = tensors(op_inputs(op, f"{op} memory", time=time))
    before = {name: x.clone() for name, x in given.items()}
    for method in METHODS:
        result, pullback = scanfield.vjp(getattr(scanfield, op), **given, method=method)
        cotangents = torch.ones_like(result.output), torch.ones_like(result.final_state)
        for x in (*pullback(*cotangents).values(), *result):
            x.fill_(7)
        assert all((x == 1).all() for x in cotangents)
        equal(given.values(), before.values())


def test_hooks_and_a_graph_that_is_walked_twice():
    given, plain = leaves("gdn2"), leaves("gdn2")
    for x in given.values():
        x.register_hook(lambda d: 2 * d)
    output, state = run("gdn2", given)
    output.register_hook(lambda d: 3 * d)
    state.register_hook(lambda d: 3 * d)
    (output.sum() + state.sum()).backward(retain_graph=True)
    first = {name: x.grad.clone() for name, x in given.items()}
    (output.sum() + state.sum()).backward()
    output, state = run("gdn2", plain)
    (output.sum() + state.sum()).backward()
    for name, x in plain.items():
        assert torch.equal(given[name].grad, 2 * first[name])
        torch.testing.assert_close(first[name], 6 * x.grad, rtol=1e-12, atol=1e-12)
    with pytest.raises(RuntimeError, match="second time"):
        output.sum().backward()


def test_hooks_on_what_is_saved():
    wanted = gradients("gdn2", leaves("gdn2"))
    with torch.autograd.graph.save_on_cpu():
        equal(gradients("gdn2", leaves("gdn2")), wanted)
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        given = leaves("gdn2")
        moved = {name: x * 1 for name, x in given.items()}
        results = run("gdn2", moved)
        moved["key"].mul_(2)
        equal(torch.autograd.grad(loss(results), list(given.values())), wanted[2:])


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_detection_and_deterministic_mode():
    wanted = gradients("gdn2", leaves("gdn2"))
    torch.use_deterministic_algorithms(True)
    try:
        with torch.autograd.detect_anomaly():
            for method in METHODS:
                close(gradients("gdn2", leaves("gdn2"), method), wanted)
    finally:
        torch.use_deterministic_algorithms(False)


def test_an_inference_tensor_among_those_that_require_a_gradient():
    """As torch does: it cannot be saved for backward, and says so."""
    given = leaves("gdn2")
    with torch.inference_mode():
        given["value"] = given["value"] * 1
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
        run("gdn2", given)
    with torch.no_grad():
        run("gdn2", given)


@pytest.mark.parametrize("strategy", ["reverse-mode", "forward-mode"])
def test_jacobians_and_hessians_of_torch_autograd(strategy):
    """The functions that came before torch.func, with a vmap of their own."""
    start = torch.linspace(-1, 1, 30, dtype=torch.float64).reshape(1, 5, 2, 3)

    def energy(q):
        return scanfield.gdn2(q, q.sin(), q.cos()).output.square().sum()

    wanted = torch.autograd.functional.hessian(energy, start)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, in torch's own forward mode
        found = torch.autograd.functional.hessian(
            energy, start, vectorize=True, outer_jacobian_strategy=strategy
        )
    close([found], [wanted])


# -- memory of any kind ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("op", BASE)
def test_memory_that_is_not_aligned(op):
    """Not to a register, and not even to an item."""
    given, moved = leaves(op), {}
    for name, x in given.items():
        memory = np.zeros(8 * x.numel() + 1, dtype=np.uint8)
        moved[name] = torch.frombuffer(memoryview(memory)[1:], dtype=x.dtype).view(x.shape)
        moved[name].copy_(x.detach())
        moved[name].requires_grad_()
    assert all(x.data_ptr() % 8 for x in moved.values())
    close(gradients(op, moved), gradients(op, given))


def test_views_that_overlap():
    x = torch.randn(40, dtype=torch.float64)
    a, b = x.as_strided((2, 7, 3), (5, 2, 1)), x.as_strided((2, 7, 3), (1, 1, 1))
    equal(scanfield.linear_scan(a, b), scanfield.linear_scan(a.clone(), b.clone()))


def test_defaults_of_dtype_and_device_change_nothing():
    given = {name: x.float().detach().requires_grad_() for name, x in leaves("gdn2", time=40).items()}
    wanted = {method: gradients("gdn2", given, method) for method in METHODS}
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            for method in METHODS:
                equal(gradients("gdn2", given, method), wanted[method])
    finally:
        torch.set_default_dtype(before)


def test_meta_tensors_have_shapes_alone():
    for op in OPERATIONS:
        real = run(op, {name: x.detach() for name, x in leaves(op).items()})
        given = {name: x.detach().to("meta").requires_grad_() for name, x in leaves(op).items()}
        for x, y in zip(run(op, given), real, strict=True):
            assert x.is_meta and x.shape == y.shape and x.dtype is y.dtype, op


def test_subclasses():
    from torch.testing._internal.two_tensor import TwoTensor

    class Named(torch.Tensor):
        pass

    x, y = torch.rand(2, 5, 3), torch.rand(2, 5, 3)
    named = scanfield.linear_scan(x.as_subclass(Named), y.as_subclass(Named)).output
    assert type(named) is Named
    both = TwoTensor(x, y)
    pair = scanfield.linear_scan(both, both).output
    assert type(pair) is TwoTensor
    close([named, pair.b], [scanfield.linear_scan(x, y).output, scanfield.linear_scan(y, y).output])
    copied = copy.deepcopy(scanfield.linear_scan(x, y))
    equal(copied, scanfield.linear_scan(x, y))


# -- modes and tracers -----------------------------------------------------------------------------------------------------
def test_modes_that_watch():
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Functions(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    class Operators(TorchDispatchMode):
        seen = set()

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.seen.add(str(function))
            return function(*args, **(kwargs or {}))

    wanted = gradients("gdn2", leaves("gdn2"))
    with Functions():
        equal(gradients("gdn2", leaves("gdn2")), wanted)
    with Operators():
        equal(gradients("gdn2", leaves("gdn2")), wanted)
    assert {"scanfield.gdn2_save.default", "scanfield.gdn2_backward.default"} <= Operators.seen


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("op", BASE)
def test_jit_trace_records_the_operator(op):
    """Not the numbers that came out while it traced."""
    first, second = leaves(op), leaves(op, "other")
    names = list(first)

    def function(*arrays):
        return run(op, dict(zip(names, arrays, strict=True)))

    traced = torch.jit.trace(function, tuple(x.detach() for x in first.values()), check_trace=False)
    for x, y in zip(traced(*[x.detach() for x in second.values()]), function(*second.values()), strict=True):
        # Sizes are tensors while it traces, and what is made of them, as the scale, has their float32.
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("op", BASE)
def test_a_program_that_was_exported_without_gradients_has_them(op):
    given = leaves(op)

    class Module(torch.nn.Module):
        def forward(self, arrays):
            return run(op, arrays)

    plain = {name: x.detach() for name, x in given.items()}
    program = torch.export.export(Module(), (plain,))
    assert f"scanfield.{op}.default" in [str(node.target) for node in program.graph.nodes]
    saved = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch's own, while it copies
        torch.export.save(program, saved)
    saved.seek(0)
    results = torch.export.load(saved).module()(given)
    found = [*results, *torch.autograd.grad(loss(results), list(given.values()))]
    equal(found, gradients(op, given))
    torch.library.opcheck(
        getattr(torch.ops.scanfield, op).default,
        _arguments(op, given),
        test_utils=("test_autograd_registration", "test_aot_dispatch_static"),
    )


def _arguments(op, given):
    from scanfield.scans.binding import bind

    bound = bind(getattr(scanfield, op), (), given)
    call = bound.record.prepare(bound.arrays, bound.options).call
    arrays = [x.detach().requires_grad_() if isinstance(x, torch.Tensor) else x for x in call.arrays]
    return (*arrays, *call.options, call.compute)


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # torch's, of any Function
def test_compiled_autograd():
    """torch compiles the backward of what ran eagerly: no break in its graph, and no warning."""
    from torch._dynamo import compiled_autograd

    torch._dynamo.reset()
    plain, given = leaves("gdn2"), leaves("gdn2")
    loss(run("gdn2", plain)).backward()
    with compiled_autograd._enable(lambda graph: torch.compile(graph, backend="eager", fullgraph=True)):
        loss(run("gdn2", given)).backward()
    for name, x in given.items():
        torch.testing.assert_close(x.grad, plain[name].grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("op", BASE)
def test_compiled_with_dynamic_shapes(op):
    torch._dynamo.reset()
    compiled = torch.compile(lambda given: run(op, given), fullgraph=True, dynamic=True, backend="aot_eager")
    for batch, time in ((2, 7), (3, 9), (1, 5), (2, 1), (2, 40)):
        given = leaves(op, batch=batch, time=time)
        results = compiled(given)
        found = [*results, *torch.autograd.grad(loss(results), list(given.values()))]
        close(found, gradients(op, given))


# -- threads and processes -------------------------------------------------------------------------------------------------
def test_sixteen_threads_call_backward():
    given = leaves("gdn2", time=70)
    results = run("gdn2", given)
    shared = torch.autograd.grad(loss(results), list(given.values()), retain_graph=True)
    alone = {op: gradients(op, leaves(op, time=33)) for op in BASE}
    barrier, failed = threading.Barrier(16), []

    def work(number):
        try:
            barrier.wait(60)
            for turn in range(4):
                op = BASE[(number + turn) % 3]
                equal(gradients(op, leaves(op, time=33)), alone[op])
                equal(torch.autograd.grad(loss(results), list(given.values()), retain_graph=True), shared)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failed and not any(thread.is_alive() for thread in threads)


class Scans(torch.utils.data.Dataset):
    """Each item is a scan, made in a worker."""

    def __len__(self):
        return 4

    def __getitem__(self, number):
        a = torch.full((1, 64, 8), 0.5, requires_grad=True)
        output = scanfield.linear_scan(a, a * number).output
        return torch.stack([output.detach(), *torch.autograd.grad(output.sum(), a)])


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_workers_of_a_data_loader():
    """Forked after the parent has scanned and gone backward."""
    wanted = torch.stack([Scans()[number] for number in range(4)])
    loader = torch.utils.data.DataLoader(
        Scans(), batch_size=2, num_workers=2, multiprocessing_context="fork", timeout=120
    )
    equal([torch.cat(list(loader))], [wanted])
