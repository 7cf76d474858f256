"""``method="torch.compile"`` on golden cases, and the laws that hold for any input: few blocks are compiled for all.

In blocks of 4 tokens, as the time that it takes to compile one grows with its tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from arrays import Library
from checks import vjp
from examples import BASE, op_inputs
from golden_adapter import GoldenCall, scan_cases, time_steps

import scanfield

pytestmark = pytest.mark.backend("torch")

torch = pytest.importorskip("torch")

from tensors import tensors  # noqa: E402

METHOD = "torch.compile"
TOKENS = 4

CALLS = {
    call.case.name: call
    for call in scan_cases()
    if "cu_seqlens" not in call.options and not any(x.dtype.kind == "c" for x in call.inputs.values())
}
# An option or a layout each; what else there is are other numbers in the same blocks.
BY_INDUCTOR = (
    "linear_scan_reverse_t130",
    "selective_scan_groups2_gate_t64",
    "selective_scan_reverse_t17",
    "gdn2_minus_inf_t64",
)


@pytest.fixture
def graphs():
    """How many graphs torch compiled since."""
    from torch._dynamo.utils import counters

    from scanfield_torch import unrolled

    torch._dynamo.reset()
    unrolled._compile.cache_clear()
    before = counters["stats"]["unique_graphs"]
    return lambda: counters["stats"]["unique_graphs"] - before


def held(library: Library, call: GoldenCall, dtype: str) -> None:
    case = call.case
    cotangents = case.cotangents["output"], case.cotangents["final_state"]
    options = {**call.options, "method": METHOD, "chunk_size": TOKENS}
    got = vjp(library, case.op, call.inputs, cotangents, dtype, **options)
    found: dict[str, Any] = {"expected/output": got.output, "expected/final_state": got.final_state}
    found |= {f"gradient/{name}": gradient for name, gradient in got.gradients.items()}
    assert set(found) == set(case.keys())
    errors = {key: case.error(key, library.raw(x), dtype) for key, x in found.items()}
    assert all(error <= 1 for error in errors.values()), {k: e for k, e in errors.items() if not e <= 1}


@pytest.mark.parametrize(
    "name", [name if name in BY_INDUCTOR else pytest.param(name, marks=pytest.mark.slow) for name in CALLS]
)
def test_golden_compiled(library: Library, graphs, name: str):
    """Two graphs a case: of a block forward, and of one backward."""
    held(library, CALLS[name], "float64")
    assert graphs() == (2 if time_steps(CALLS[name]) >= TOKENS else 0)


@pytest.mark.parametrize("name", CALLS)
def test_golden_in_blocks(library: Library, dtype: str, name: str, monkeypatch):
    """All of them through the same blocks, these as they are: what is compiled is the code that runs here."""
    from scanfield_torch import unrolled

    blocks = []

    def as_it_is(step, config, form, *kinds):
        def block(*leaves):
            blocks.append(step)
            return step(config, *unrolled._filled(form, iter(leaves)))

        return block

    monkeypatch.setattr(unrolled, "_compile", as_it_is)
    held(library, CALLS[name], dtype)
    assert bool(blocks) == (time_steps(CALLS[name]) >= TOKENS)


def test_every_dense_real_case_is_here():
    assert len(CALLS) == 34 and set(BY_INDUCTOR) < set(CALLS)


def pulled(op, given, **options):
    """The results, and the gradients of their sums."""
    function = getattr(scanfield, op)
    result, pullback = scanfield.vjp(function, **given, method=METHOD, chunk_size=TOKENS, **options)
    return result, pullback(torch.ones_like(result.output), torch.ones_like(result.final_state))


def cut(op, given, start, stop):
    """The tokens from start to stop; what has no time stays."""
    whole = {"A", "D", "delta_bias", "initial_state"}
    return {name: x if name in whole else x[:, start:stop] for name, x in given.items()}


@pytest.mark.parametrize("op", BASE)
def test_laws(op, graphs):
    """One shape of block, two graphs: twelve lengths, every cut, and what may not reach what."""
    full = tensors(op_inputs(op, f"{op} laws", time=30))
    for length in range(8, 32, 2):
        given = cut(op, full, 0, length)
        result, gradients = pulled(op, given)
        truth, pullback = scanfield.vjp(getattr(scanfield, op), **given, method="generic.recurrent")
        wanted = pullback(torch.ones_like(truth.output), torch.ones_like(truth.final_state))
        for x, y in [*zip(result, truth, strict=True), *((gradients[name], wanted[name]) for name in wanted)]:
            torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)

    result, gradients = pulled(op, full)
    again, gradients_again = pulled(op, full)
    for x, y in [
        *zip(result, again, strict=True),
        *zip(gradients.values(), gradients_again.values(), strict=True),
    ]:
        assert torch.equal(x, y)  # the same call twice

    for at in (7, 16):  # cut anywhere, the state handed on
        first, _ = pulled(op, cut(op, full, 0, at))
        second, _ = pulled(op, cut(op, full, at, 30) | {"initial_state": first.final_state})
        output = torch.cat([first.output, second.output], dim=1)
        torch.testing.assert_close(output, result.output, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(second.final_state, result.final_state, rtol=1e-12, atol=1e-12)

    timed = [name for name, x in cut(op, full, 0, 1).items() if x.shape != full[name].shape]
    changed = {name: x.clone() for name, x in full.items()}
    for name in timed:
        changed[name][:, 17:] *= 0.5
    later, _ = pulled(op, changed)
    assert torch.equal(later.output[:, :17], result.output[:, :17])  # no token sees a later one
    assert not torch.equal(later.output[:, 17:], result.output[:, 17:])

    other = {name: x.clone() for name, x in full.items()}
    for name in (*timed, "initial_state"):
        other[name][1] *= 0.5
    rows, _ = pulled(op, other)
    assert torch.equal(rows.output[0], result.output[0])  # and no row of the batch another one
    assert not torch.equal(rows.output[1], result.output[1])
    assert np.isfinite(rows.output.numpy()).all()
    assert graphs() == 2
