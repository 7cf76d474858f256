"""``method="torch.compile"``: blocks of the recurrence compiled once, whatever the length."""

from __future__ import annotations

import numpy as np
import pytest
import reference
from examples import BASE, op_inputs, rng_of

import scanfield

pytestmark = pytest.mark.backend("torch")

torch = pytest.importorskip("torch")

from tensors import tensors  # noqa: E402

METHOD = "torch.compile"
TOKENS = 16


def run(op, given, **options):
    return tuple(getattr(scanfield, op)(**given, **options, method=METHOD))


@pytest.fixture
def compiled():
    """How many graphs torch compiled since."""
    from torch._dynamo.utils import counters

    from scanfield_torch import unrolled

    torch._dynamo.reset()
    unrolled._compile.cache_clear()
    before = counters["stats"]["unique_graphs"]
    return lambda: counters["stats"]["unique_graphs"] - before


@pytest.mark.parametrize("op", BASE)
def test_forward_and_backward_are_the_truth(op, compiled):
    """Two whole blocks and three tokens over; one graph forward and one backward."""
    tokens = 8 if op == "gdn2" else TOKENS  # twice as many take twice as long to compile
    inputs = op_inputs(op, f"{op} unrolled", time=2 * tokens + 3)
    draw = rng_of(f"{op} unrolled cotangents")
    truth = reference.forward(op, inputs)
    cotangents = [draw.standard_normal(x.shape) for x in (truth.output, truth.final_state)]
    wanted = reference.vjp(op, inputs, *cotangents)
    given = tensors(inputs, requires_grad=True)
    results = run(op, given, chunk_size=tokens)
    for found, right in zip(results, (truth.output, truth.final_state), strict=True):
        assert np.abs(found.detach().numpy() - right).max() <= 1e-12 * np.abs(right).max()
    gradients = torch.autograd.grad(results, list(given.values()), [torch.tensor(x) for x in cotangents])
    size = max(np.abs(x).max() for x in wanted.values())
    for name, found in zip(given, gradients, strict=True):
        assert np.abs(found.numpy() - wanted[name]).max() <= 1e-12 * size, name
    assert compiled() == 2


def test_twelve_lengths_are_one_compilation(compiled):
    """Of two rows, whose distance in memory changes with the length; with gradients, without, and in inference mode."""
    draw = np.random.default_rng(0)
    for length in range(TOKENS, TOKENS + 12 * 9, 9):
        a, b = draw.uniform(-1, 1, (2, length, 3)), draw.standard_normal((2, length, 3))
        found, _ = run("linear_scan", {"a": torch.tensor(a), "b": torch.tensor(b)})
        assert (
            np.abs(found.numpy() - reference.forward("linear_scan", {"a": a, "b": b}).output).max() <= 1e-12
        )
        # Another row of memory, and grad mode off: what compiled code is made for does not change.
        turned = [torch.tensor(np.swapaxes(x, 0, 1).copy()).transpose(0, 1) for x in (a, b)]
        with torch.no_grad():
            again, _ = run("linear_scan", {"a": turned[0], "b": turned[1]})
        assert torch.equal(again, found)
    assert compiled() == 1


def test_backward_is_compiled_once_too(compiled):
    for length in (TOKENS, 3 * TOKENS + 5):
        given = {name: torch.rand(2, length, 3, requires_grad=True) for name in ("a", "b")}
        output, _ = run("linear_scan", given)
        output.sum().backward()
    assert compiled() == 2


def test_what_is_shorter_than_a_block_compiles_nothing(compiled):
    inputs = op_inputs("gdn2", "gdn2 short", time=TOKENS - 1)
    output, _ = run("gdn2", tensors(inputs))
    assert np.abs(output.numpy() - reference.forward("gdn2", inputs).output).max() <= 1e-12
    assert compiled() == 0


def test_autocast_and_half_precision(compiled):
    """Half goes in and out; the carry is float32, under autocast too."""
    given = {name: torch.rand(1, 2 * TOKENS, 3).bfloat16().requires_grad_() for name in ("a", "b")}
    wanted = scanfield.linear_scan(*given.values(), method="generic.recurrent")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, state = run("linear_scan", given)
    assert output.dtype is torch.bfloat16 and state.dtype is torch.float32
    assert torch.equal(output, wanted.output)
    torch.testing.assert_close(state, wanted.final_state)
    gradient = torch.autograd.grad(output.float().sum(), given["a"])[0]
    right = torch.autograd.grad(wanted.output.float().sum(), given["a"])[0]
    assert gradient.dtype is torch.bfloat16
    torch.testing.assert_close(gradient, right)


def test_second_derivatives_go_through_plain_operations():
    given = {name: torch.rand(1, 5, 2, dtype=torch.float64, requires_grad=True) for name in ("a", "b")}
    names = list(given)
    assert torch.autograd.gradgradcheck(
        lambda *x: run("linear_scan", dict(zip(names, x, strict=True))), tuple(given.values())
    )


def test_it_is_asked_for_by_name():
    x = torch.ones(1, 3, 2)
    assert scanfield.explain(scanfield.linear_scan, x, x).taken["forward"] != METHOD
    with scanfield.use(method=METHOD):
        assert scanfield.explain(scanfield.linear_scan, x, x).taken["forward"] == METHOD


def test_what_it_declines():
    x = torch.ones(1, 3, 2, dtype=torch.complex128)
    with pytest.raises(scanfield.BackendError, match="no kernels for complex numbers"):
        scanfield.linear_scan(x, x, method=METHOD)
    x = torch.ones(1, 3, 2)
    with pytest.raises(scanfield.BackendError, match="cu_seqlens: code would be compiled"):
        scanfield.linear_scan(x, x, cu_seqlens=[0, 1, 3], method=METHOD)
    with pytest.raises(scanfield.BackendError, match="plain operations"):
        torch.vmap(lambda y: scanfield.linear_scan(y, y, method=METHOD).output)(torch.ones(2, 1, 3, 2))
    traced = torch.compile(
        lambda y: scanfield.linear_scan(y, y, method=METHOD).output, fullgraph=True, backend="eager"
    )
    with pytest.raises(Exception, match="a graph is made of the call"):
        traced(torch.ones(1, 3, 2))
