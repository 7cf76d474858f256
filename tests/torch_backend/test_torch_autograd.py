"""The compiled scans in torch's autograd: what is saved, which gradients come back and in what dtype."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from examples import BASE, EXAMPLES, example

import scanfield

pytestmark = pytest.mark.backend("torch")

torch = pytest.importorskip("torch")
pytest.importorskip("numba")

from tensors import METHOD, tensors  # noqa: E402

OWN = [one for one in EXAMPLES if one.op in BASE]
SMALL = {op: next(one for one in OWN if one.op == op) for op in BASE}
TOLERANCE = {torch.float64: 1e-11, torch.float32: 4e-6}


def run(op, given, options, method=None):
    return tuple(getattr(scanfield, op)(**given, **options, method=method))


def leaves(one, dtype=torch.float64, names=None):
    given = tensors(one.inputs, dtype)
    for name, x in given.items():
        x.requires_grad_(names is None or name in names)
    return given


def backward(op, given, options, cotangents, method=None):
    """The gradient of each leaf, by its name."""
    results = run(op, given, options, method)
    asked = [(y, d_y) for y, d_y in zip(results, cotangents, strict=True) if d_y is not None]
    wanted = [name for name, x in given.items() if x.requires_grad]
    found = torch.autograd.grad(
        [y for y, _ in asked],
        [given[name] for name in wanted],
        [d_y.to(y.dtype) for y, d_y in asked],
        allow_unused=True,
    )
    return dict(zip(wanted, found, strict=True))


def held(found, wanted, tolerance):
    size = max(float(np.abs(x).max()) for x in wanted.values() if x.size)
    for name, x in found.items():
        got = np.zeros(wanted[name].shape) if x is None else x.numpy()
        assert np.abs(got - wanted[name]).max() <= tolerance * size, name


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("one", OWN, ids=repr)
def test_backward_is_the_truth(one, dtype):
    name = str(dtype).rpartition(".")[2]
    cotangents = [torch.tensor(x) for x in one.cotangents(name)]
    given = leaves(one, dtype)
    found = backward(one.op, given, one.options, cotangents, METHOD)
    assert {key: x.dtype for key, x in found.items()} == {key: x.dtype for key, x in given.items()}
    held(found, one.gradients(name), TOLERANCE[dtype])


@pytest.mark.parametrize("op", BASE)
def test_gradcheck_and_gradgradcheck(op):
    one = SMALL[op]
    given = leaves(one)
    names = list(given)

    def function(*arrays):
        return run(op, dict(zip(names, arrays, strict=True)), one.options, METHOD)

    assert torch.autograd.gradcheck(function, tuple(given.values()))
    assert torch.autograd.gradgradcheck(function, tuple(given.values()))


def test_gradgradcheck_of_complex_numbers():
    one = example("linear_scan: complex")
    given = leaves(one)
    assert torch.autograd.gradgradcheck(
        lambda *x: run(one.op, dict(zip(given, x, strict=True)), {}, METHOD), tuple(given.values())
    )


@pytest.mark.parametrize("op", BASE)
def test_any_subset_may_require_a_gradient(op):
    """One at a time, and all but one; either cotangent may be absent."""
    one = SMALL[op]
    full = [torch.tensor(x) for x in one.cotangents()]
    names = list(one.inputs)
    subsets = [{name} for name in names] + [set(names) - {name} for name in names]
    for cotangents in (full, [full[0], None], [None, full[1]]):
        wanted = backward(op, leaves(one), one.options, cotangents, "generic.recurrent")
        for subset in subsets:
            found = backward(op, leaves(one, names=subset), one.options, cotangents, METHOD)
            assert set(found) == subset
            held(
                found,
                {
                    name: np.zeros(one.inputs[name].shape) if x is None else x.numpy()
                    for name, x in wanted.items()
                },
                1e-11,
            )


@pytest.mark.parametrize("op", BASE)
def test_nothing_is_saved_where_nothing_requires_a_gradient(op):
    saved = []

    def pack(x):
        saved.append(x)
        return x

    one = SMALL[op]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        results = run(op, tensors(one.inputs), one.options, METHOD)
        with torch.no_grad():
            results += run(op, leaves(one), one.options, METHOD)
        with torch.inference_mode():
            results += run(op, leaves(one), one.options, METHOD)
        assert not saved
        assert not any(y.requires_grad for y in results)
        assert all(y.requires_grad for y in run(op, leaves(one), one.options, METHOD))
        assert saved


@pytest.mark.parametrize("method", [METHOD, "torch.generic"])
@pytest.mark.parametrize("op", BASE)
def test_what_was_saved_comes_back_lying_otherwise(op, method):
    """As from a hook that keeps it elsewhere: the same numbers, other strides."""

    def turned(x):
        return x.movedim(0, -1).contiguous().movedim(-1, 0)

    found = []
    for unpack in (lambda x: x, turned):
        given = leaves(SMALL[op])
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
            output, _ = run(op, given, SMALL[op].options, method)
            output.square().sum().backward()
        found.append([x.grad for x in given.values()])
    for got, want in zip(*found, strict=True):
        assert torch.allclose(got, want, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("op", BASE)
def test_backward_frees_what_was_saved(op):
    one = SMALL[op]
    residuals = []

    def pack(x):
        if not x.requires_grad:
            residuals.append(weakref.ref(x))
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        output, _ = run(op, leaves(one), one.options, METHOD)
    assert residuals and all(ref() is not None for ref in residuals)
    output.sum().backward()
    gc.collect()
    assert not any(ref() is not None for ref in residuals)


@pytest.mark.parametrize("op", BASE)
def test_an_input_changed_in_place_raises(op):
    one = SMALL[op]
    for name in one.inputs:
        given = {key: x * 1 for key, x in leaves(one).items()}
        output, _ = run(op, given, one.options, METHOD)
        with torch.no_grad():
            given[name].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


@pytest.mark.parametrize("op", BASE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_has_its_own_gradients(op, dtype):
    one = SMALL[op]
    name = str(dtype).rpartition(".")[2]
    cotangents = [torch.tensor(x) for x in one.cotangents(name)]
    given = leaves(one, dtype)
    output, state = run(op, given, one.options, METHOD)
    assert output.dtype is dtype and state.dtype is torch.float32
    found = backward(op, given, one.options, cotangents, METHOD)
    assert {x.dtype for x in found.values()} == {dtype}
    held({key: x.double() for key, x in found.items()}, one.gradients(name), 4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("op", BASE)
def test_autocast_changes_nothing(op):
    one = SMALL[op]
    cotangents = [torch.tensor(x) for x in one.cotangents("float32")]
    plain = backward(op, leaves(one, torch.float32), one.options, cotangents, METHOD)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = backward(op, leaves(one, torch.float32), one.options, cotangents, METHOD)
    for name, x in plain.items():
        assert torch.equal(under[name], x), name


def test_second_derivatives_under_autocast_keep_their_dtype():
    one = SMALL["gdn2"]

    def second(given, half):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            output, _ = run("gdn2", given, one.options, METHOD)
        first = torch.autograd.grad((output**2).sum(), list(given.values()), create_graph=True)
        return torch.autograd.grad(sum((x**2).sum() for x in first), list(given.values()))

    for x, y in zip(
        second(leaves(one, torch.float32), False), second(leaves(one, torch.float32), True), strict=True
    ):
        assert torch.equal(x, y)


LAYOUTS = {
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "every other": lambda x: torch.stack([x, x], dim=-1).reshape(*x.shape[:-1], -1)[..., ::2],
    "one batch row, expanded": lambda x: x[:1].expand(x.shape),
    "one number, expanded": lambda x: x.reshape(-1)[:1].reshape((1,) * x.ndim).expand(x.shape),
    "negative bit": lambda x: torch._neg_view(-x),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", BASE)
def test_layouts(op, layout):
    """Whatever memory an input lies in, results and gradients are those of contiguous inputs."""
    one = SMALL[op]
    cotangents = [torch.tensor(x) for x in one.cotangents()]

    def both(method, move):
        given = leaves(one)
        moved = {name: move(LAYOUTS[layout](x)) for name, x in given.items()}
        results = run(op, moved, one.options, method)
        return [*results, *torch.autograd.grad(results, list(given.values()), cotangents)]

    for found, wanted in zip(both(METHOD, lambda x: x), both("generic.recurrent", torch.clone), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


def test_conjugate_views():
    one = example("linear_scan: complex")
    given = leaves(one)
    conjugates = {name: x.conj() for name, x in given.items()}
    assert conjugates["a"].is_conj()
    output, _ = run(one.op, conjugates, {}, METHOD)
    wanted, _ = run(
        one.op, {name: x.conj().resolve_conj() for name, x in given.items()}, {}, "generic.recurrent"
    )
    torch.testing.assert_close(output, wanted, rtol=1e-12, atol=1e-12)
    cotangent = torch.ones_like(output).conj()
    for x, y in zip(
        torch.autograd.grad(output, list(given.values()), cotangent, allow_unused=True),
        torch.autograd.grad(wanted, list(given.values()), cotangent, allow_unused=True),
        strict=True,
    ):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_one_tensor_in_two_places():
    x = torch.randn(2, 5, 2, 3, dtype=torch.float64, requires_grad=True)
    found = {}
    for method in (METHOD, "generic.recurrent"):
        output, _ = scanfield.gdn2(x, x, x, method=method)
        (first,) = torch.autograd.grad((output**2).sum(), x, create_graph=True)
        found[method] = first.detach(), torch.autograd.grad((first**2).sum(), x)[0]
    for one, other in zip(*found.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_a_cotangent_that_is_one_number_expanded():
    one = SMALL["gdn2"]
    given, again = leaves(one), leaves(one)
    run("gdn2", given, one.options, METHOD)[0].sum().backward()
    output = run("gdn2", again, one.options, METHOD)[0]
    output.backward(torch.ones_like(output))
    for name, x in given.items():
        if x.grad is not None:
            assert torch.equal(x.grad, again[name].grad), name


def test_checkpointing():
    from torch.utils.checkpoint import checkpoint

    one = SMALL["gdn2"]
    given, again = leaves(one), leaves(one)
    run("gdn2", given, one.options, METHOD)[0].sum().backward()
    names = list(again)
    output = checkpoint(
        lambda *x: run("gdn2", dict(zip(names, x, strict=True)), one.options, METHOD)[0],
        *again.values(),
        use_reentrant=False,
    )
    output.sum().backward()
    for name, x in given.items():
        assert torch.equal(x.grad, again[name].grad), name


class TestCopies:
    """Kernels read and write the tensors' own memory."""

    @pytest.fixture
    def addresses(self, monkeypatch):
        """Where the arrays lie that kernels are given, and those that they return."""
        from scanfield_torch import numba_scans

        seen = []
        kernels = numba_scans.implementation("gdn2").kernels._arrays

        class Watched:
            residuals = kernels.residuals

            def forward(self, call):
                results = kernels.forward(call)
                seen.append(([x.__array_interface__["data"][0] for x in call.arrays[:3]], results))
                return results

            def save(self, call):
                results = kernels.save(call)
                seen.append(([x.__array_interface__["data"][0] for x in call.arrays[:3]], results))
                return results

        monkeypatch.setattr(numba_scans.implementation("gdn2").kernels, "_arrays", Watched())
        return seen

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("follows", [False, True])
    def test_none(self, addresses, dtype, follows):
        query, key, value = (torch.randn(1, 5, 2, 4).to(dtype).requires_grad_(follows) for _ in range(3))
        result = scanfield.gdn2(query, key, value, method=METHOD)
        ((given, made),) = addresses
        assert given == [x.data_ptr() for x in (query, key, value)]
        assert [x.__array_interface__["data"][0] for x in made[:2]] == [x.data_ptr() for x in result]


def test_tensors_that_no_kernel_takes_are_told():
    x = torch.ones(1, 3, 2, dtype=torch.float64, device="meta")
    assert "runs on cpu, not on meta" in str(scanfield.explain(scanfield.linear_scan, x, x))


def test_bfloat16_without_ml_dtypes(monkeypatch):
    from scanfield_torch import views

    x = torch.ones(1, 3, 2, dtype=torch.bfloat16)
    wanted = scanfield.linear_scan(x, x, method=METHOD).output
    monkeypatch.delitem(views._NUMPY, torch.bfloat16)
    assert "need the package ml_dtypes" in str(scanfield.explain(scanfield.linear_scan, x, x))
    assert torch.equal(scanfield.linear_scan(x, x).output, wanted)


def test_vjp_of_tensors_that_autograd_follows_stays_in_its_graph():
    one = SMALL["gdn2"]
    given = leaves(one)
    result, pullback = scanfield.vjp(scanfield.gdn2, **given, **one.options)
    gradients = pullback(result.output)
    (found,) = torch.autograd.grad((gradients["value"] ** 2).sum(), given["query"])
    output = run("gdn2", given, one.options, "generic.recurrent")[0]
    (first,) = torch.autograd.grad(output, given["value"], output, create_graph=True)
    (wanted,) = torch.autograd.grad((first**2).sum(), given["query"])
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def test_vjp_takes_the_compiled_scan_where_autograd_follows_nothing():
    one = SMALL["gdn2"]
    given = tensors(one.inputs)
    assert scanfield.explain(scanfield.gdn2, **given).taken["save"] == METHOD
    result, pullback = scanfield.vjp(scanfield.gdn2, **given, **one.options)
    assert not result.output.requires_grad
    # Cotangents that are followed are so through the pullback.
    d_output = torch.ones_like(result.output).requires_grad_()
    gradient = pullback(d_output)["value"]
    assert gradient.requires_grad
    torch.testing.assert_close(
        gradient.detach(), pullback(d_output.detach())["value"], rtol=1e-11, atol=1e-11
    )
