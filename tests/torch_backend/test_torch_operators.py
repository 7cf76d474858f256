"""The operators that torch puts in its graphs: right by torch's own checks, in compiled and exported programs."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples import BASE, EXAMPLES
from processes import python

import scanfield

pytestmark = pytest.mark.backend("torch")

torch = pytest.importorskip("torch")
pytest.importorskip("numba")

from tensors import METHOD, arguments, canonical, tensors  # noqa: E402

HERE = Path(__file__).resolve().parent
OWN = [one for one in EXAMPLES if one.op in BASE]
SMALL = {op: next(one for one in OWN if one.op == op) for op in BASE}
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


def operator(name):
    from scanfield_torch import numba_scans

    numba_scans.implementation(name.split("_save")[0].split("_backward")[0])
    return getattr(torch.ops.scanfield, name).default


def run(op, given, options):
    return tuple(getattr(scanfield, op)(**given, **options, method=METHOD))


def leaves(op, dtype=torch.float64):
    return tensors(SMALL[op].inputs, dtype, requires_grad=True)


def gradients(function, given):
    """Of a loss that is not linear in the results, with them."""
    results = function(*given.values())
    loss = sum((y.abs() ** 2).sum() for y in results)
    return [*results, *torch.autograd.grad(loss, list(given.values()))]


def equal(found, wanted):
    for x, y in zip(found, wanted, strict=True):
        assert x.dtype is y.dtype and x.stride() == y.stride()
        assert torch.equal(x, y)


# ---------------------------------------------------------------------------------------------------------------------
# torch's own checks


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("one", OWN, ids=repr)
def test_opcheck(one, dtype):
    call = canonical(one, dtype, requires_grad=True)
    given = arguments(call)
    torch.library.opcheck(operator(f"{one.op}_save"), given, test_utils=CHECKS)
    with torch.no_grad():
        plain = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in given)
        torch.library.opcheck(operator(one.op), plain, test_utils=("test_schema", "test_faketensor"))
        output, state, residuals = operator(f"{one.op}_save")(*plain)
        wanted = [isinstance(x, torch.Tensor) for x in call.arrays]
        for cotangents in ((output, state), (output, None), (None, state)):
            torch.library.opcheck(
                operator(f"{one.op}_backward"),
                (*plain, residuals, *cotangents, wanted),
                test_utils=("test_schema", "test_faketensor"),
            )


@pytest.mark.parametrize("bounds", [None, (0, 0, 700, 2999, 3000)], ids=["dense", "packed"])
@pytest.mark.parametrize("width", [3, 700])
def test_opcheck_of_long_half_precision(width, bounds):
    """Cut in blocks, and of few lanes carried in float64: what is saved has the shape that is told beforehand."""
    batch = 2 if bounds is None else 1
    a, b = (torch.rand(batch, 3000, width).bfloat16() for _ in range(2))
    given = (a, b, None, bounds, None, "float32")
    residuals = operator("linear_scan_save")(*given)[2]
    assert residuals[0].dtype is (torch.float64 if width == 3 else torch.float32)
    assert residuals[0].shape[0] > batch or width == 3  # few lanes are one block
    torch.library.opcheck(operator("linear_scan_save"), given, test_utils="test_faketensor")


@pytest.mark.parametrize("op", BASE)
def test_opcheck_under_the_compiler(op):
    given = [
        x.detach().requires_grad_() if isinstance(x, torch.Tensor) else x
        for x in arguments(canonical(SMALL[op]))
    ]
    torch.library.opcheck(operator(f"{op}_save"), given, test_utils="test_aot_dispatch_dynamic")


@pytest.mark.parametrize("op", BASE)
def test_the_operator_alone_has_first_and_second_derivatives(op):
    call = canonical(SMALL[op], requires_grad=True)
    save, given = operator(f"{op}_save"), arguments(call)
    places = [i for i, x in enumerate(given) if isinstance(x, torch.Tensor)]

    def function(*arrays):
        filled = list(given)
        for i, x in zip(places, arrays, strict=True):
            filled[i] = x
        return save(*filled)[:2]

    arrays = tuple(given[i].detach().requires_grad_() for i in places)
    assert torch.autograd.gradcheck(function, arrays)
    assert torch.autograd.gradgradcheck(function, arrays)


def test_the_schema_says_what_the_record_says():
    schema = str(operator("gdn2_save")._schema)
    assert schema == (
        "scanfield::gdn2_save(Tensor query, Tensor key, Tensor value, Tensor? log_decay, Tensor? erase, Tensor? write, "
        "Tensor? initial_state, int[]? cu_seqlens, float? scale, bool erase_vector, int? chunk, str compute) "
        "-> (Tensor, Tensor, Tensor[])"
    )


def test_shapes_without_values():
    from torch._subclasses.fake_tensor import FakeTensorMode

    for one in OWN:
        results = run(one.op, tensors(one.inputs), one.options)
        with FakeTensorMode() as mode:
            given = {name: mode.from_tensor(x) for name, x in tensors(one.inputs).items()}
            for fake, real in zip(run(one.op, given, one.options), results, strict=True):
                assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride()), one


# ---------------------------------------------------------------------------------------------------------------------
# torch.compile


def graphs(function):
    """``function`` compiled, and the names of the operators in its forward and backward graphs."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    seen = {"forward": [], "backward": []}

    def note(kind):
        def compiler(graph, _):
            seen[kind] += [str(node.target) for node in graph.graph.nodes if "scanfield" in str(node.target)]
            return make_boxed_func(graph.forward)

        return compiler

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=note("forward"), bw_compiler=note("backward"))
    return torch.compile(function, fullgraph=True, backend=backend), seen


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", BASE)
def test_compiled_forward_and_backward(op, dtype):
    given = leaves(op, dtype)

    def function(*arrays):
        return run(op, dict(zip(given, arrays, strict=True)), SMALL[op].options)

    compiled, seen = graphs(function)
    equal(gradients(compiled, given), gradients(function, given))
    assert seen == {
        "forward": [f"scanfield.{op}_save.default"],
        "backward": [f"scanfield.{op}_backward.default"],
    }


def test_compiled_without_gradients():
    given = tensors(SMALL["gdn2"].inputs)

    def function(*arrays):
        return run("gdn2", dict(zip(given, arrays, strict=True)), {})

    compiled, seen = graphs(function)
    equal(compiled(*given.values()), function(*given.values()))
    assert seen["forward"] == ["scanfield.gdn2.default"]


def test_compiled_without_a_state():
    """Tracing asked the generic form for the shapes of residuals, of which that knew nothing."""
    u, none, B = torch.rand(1, 4, 3, requires_grad=True), torch.zeros(3, 0), torch.zeros(1, 4, 0)
    run = lambda u: scanfield.selective_scan(u, u.detach(), none, B, B, u[0, 0], method=METHOD)  # noqa: E731
    plain, compiled = run(u), torch.compile(run, fullgraph=True, backend="aot_eager")(u)
    equal(compiled, plain)
    weights = torch.rand(1, 4, 3)
    (found,), (want,) = (torch.autograd.grad((y.output * weights).sum(), u) for y in (compiled, plain))
    assert torch.equal(found, want) and found.any()


def test_compiled_vjp():
    given = tensors(SMALL["gdn2"].inputs)

    def function(*arrays):
        result, pullback = scanfield.vjp(scanfield.gdn2, **dict(zip(given, arrays, strict=True)))
        return (*result, *pullback(result.output).values())

    compiled, seen = graphs(function)
    equal(compiled(*given.values()), function(*given.values()))
    assert seen["forward"] == ["scanfield.gdn2_save.default", "scanfield.gdn2_backward.default"]


def test_inductor():
    given = leaves("gdn2", torch.float32)

    def function(*arrays):
        output, state = run("gdn2", dict(zip(given, arrays, strict=True)), {})
        return torch.tanh(output), state * 2

    torch._dynamo.reset()
    for x, y in zip(
        gradients(torch.compile(function, fullgraph=True), given), gradients(function, given), strict=True
    ):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", BASE)
def test_twelve_lengths_compile_twice(op, dtype):
    """Once for the first length, once for all others."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    options = SMALL[op].options
    timed = [name for name, x in SMALL[op].inputs.items() if x.ndim >= 3 and name != "initial_state"]

    def function(*arrays):
        return run(op, dict(zip(SMALL[op].inputs, arrays, strict=True)), options)

    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for length in range(70, 142, 6):
        given = {
            name: (x.detach().repeat(1, 21, *[1] * (x.ndim - 2))[:, :length] if name in timed else x.detach())
            for name, x in leaves(op, dtype).items()
        }
        given = {name: x.requires_grad_() for name, x in given.items()}
        equal(gradients(compiled, given), gradients(function, given))
    assert counter.frame_count == 2


FIRST_CALL = """
    import sys
    import torch
    import scanfield
    from tensors import SMALL

    operation = sys.argv[1]
    inputs, options, _ = SMALL[operation]
    names = list(inputs)
    given = [torch.tensor(x, requires_grad=True) for x in inputs.values()]

    def run(*arrays):
        return tuple(getattr(scanfield, operation)(**dict(zip(names, arrays)), **options))

    def gradients(function):
        return torch.autograd.grad(sum((y * y).sum() for y in function(*given)), given)

    compiled = gradients(torch.compile(run, fullgraph=True, backend="aot_eager"))   # the first call of this process
    for one, other in zip(compiled, gradients(run), strict=True):
        assert torch.equal(one, other)
"""


@pytest.mark.parametrize("operation", [*BASE, "ssd"])
def test_the_first_call_may_be_a_compiled_one_with_gradients(operation):
    python(FIRST_CALL, operation, path=(HERE,))


# ---------------------------------------------------------------------------------------------------------------------
# torch.export and make_fx


class Module(torch.nn.Module):
    def forward(self, query, key, value):
        result = scanfield.gdn2(query, key, value, method=METHOD)
        return result.output, result.final_state


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    """The program holds the operator, and runs at another length."""
    given = [torch.randn(2, 9, 2, 4) for _ in range(3)]
    time = torch.export.Dim("time", min=2, max=4096)
    program = torch.export.export(
        Module(), tuple(given), dynamic_shapes=({1: time}, {1: time}, {1: time}), strict=strict
    )
    assert [str(node.target) for node in program.graph.nodes if "scanfield" in str(node.target)] == [
        "scanfield.gdn2.default"
    ]
    longer = [torch.randn(2, 40, 2, 4) for _ in range(3)]
    equal(program.module()(*longer), Module()(*longer))


def test_make_fx_records_the_operator():
    from torch.fx.experimental.proxy_tensor import make_fx

    given = [torch.randn(2, 9, 2, 4) for _ in range(3)]
    graph = make_fx(Module())(*given)
    other = [torch.randn(2, 9, 2, 4) for _ in range(3)]
    equal(graph(*other), Module()(*other))
