"""The Burn implementation of GDN2 that we follow, contract by contract: what of it is ours, and under which
name.

| there | here | test |
|---|---|---|
| layouts [B, H, T, dim], state [B, H, K, V] | (batch, time, heads, dim), state (batch, vheads, K, V) | layouts |
| order query, key, value, erase, write, log_decay, initial_state | log_decay before erase and write | argument order |
| gradients: seven, in the order of the arguments | a mapping by name, in the order of the arguments | gradients |
| context, state | ScanResult(output, final_state) | result |
| the final state is detached | the gradient of the final state flows | final state |
| scale fixed at K^-1/2 | the default of `scale` | scale |
| chunk_size 0 becomes 1 | raises; any chunk size gives the same | chunk size |
| forward_impl, a differentiable token loop | method="generic.recurrent" | token loop |
| chunk-WY form, dividing by cumulative decays | method="generic.chunk", which never divides | strong decay |
| boundary_states [B, H, ceil(T / C), K, V] | states_at="chunks"; what backward keeps | boundary states |
| recompute_chunk_states | states_at=[...], or a call on the chunk from its boundary state | recompute |
| saved: seven inputs and the boundary states | the same, no state a token | what is saved |
| only tracked parents get a gradient | vjp(..., wrt=...) | tracked parents |
| try_... returns None when no kernel matches | the generic code always serves; explain says what ran | selection |
| flags by environment variables, path printed once to stderr | SCANFIELD_BLOCK, SCANFIELD_LOG, method= | selection |
| tolerance 3e-3 + 3e-3 max|ref|, four geometries | golden cases and sums, 1e-10 and 1e-5 | test_golden.py |

Left out: the runtime parameter tensor (gdn2_forward_params: shapes travel with the arrays here), the WGPU and
CUDA entry points of their own (one function serves every device), the module GatedDeltaNet2Memory (a layer,
not a scan).
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from arrays import Library, deviation, same_bits
from checks import vjp
from examples import GENERIC, METHODS, Example, gdn2_inputs, methods

import scanfield

T, C = 9, 4  # two whole chunks and a ragged one


def leave_out(backend: str, test: str, given: dict[str, Any]) -> bool:
    """Eager calls are dear on JAX and Dask; other tests run there what these only name."""
    return backend in ("jax", "dask") and test not in (
        "test_layouts",
        "test_boundary_states",
        "test_gradients",
    )


def example(time: int) -> Example:
    return Example(
        f"burn {time}", "gdn2", gdn2_inputs("burn contract", batch=1, time=time, heads=2, K=5, V=3)
    )


def given(library: Library) -> tuple[Example, dict[str, Any]]:
    e = example(library.time(T))
    return e, library.arrays(e.inputs)


def test_layouts(library: Library):
    """(batch, time, heads, dim) in and out, states (batch, vheads, K, V)."""
    e, inputs = given(library)
    result = scanfield.gdn2(**inputs)
    assert tuple(result.output.shape) == (1, e.time, 2, 3)
    assert tuple(result.final_state.shape) == (1, 2, 5, 3)


def test_argument_order():
    """log_decay stands before erase and write, the initial state last, and the chunk size is a keyword."""
    parameters = inspect.signature(scanfield.gdn2).parameters
    arrays = [n for n, p in parameters.items() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert arrays == ["query", "key", "value", "log_decay", "erase", "write", "initial_state"]
    assert parameters["chunk_size"].kind is inspect.Parameter.KEYWORD_ONLY


def test_result(library: Library):
    """Both the context and the state always come back, by name and by position."""
    _, inputs = given(library)
    result = scanfield.gdn2(**inputs)
    assert isinstance(result, scanfield.ScanResult) and result._fields == ("output", "final_state")
    output, state = result
    assert output is result.output and state is result.final_state


def test_gradients(library: Library):
    """Seven, by name, in the order of the arguments, each in its argument's shape."""
    e, inputs = given(library)
    d_output, d_final = (library.array(x) for x in e.cotangents())
    got = scanfield.vjp(scanfield.gdn2, **inputs)[1](d_output, d_final)
    assert list(got) == ["query", "key", "value", "log_decay", "erase", "write", "initial_state"]
    for name, want in e.gradients().items():
        assert deviation(library.numpy(got[name]), want) <= 1e-12, name


def test_the_gradient_of_the_final_state_flows(library: Library):
    """Detached there; here a loss of the final state alone has the gradients of all that the state depends
    on.
    """
    _, inputs = given(library)
    result, pullback = scanfield.vjp(scanfield.gdn2, **inputs)
    gradients = pullback(None, result.final_state)
    for name in ("key", "value", "log_decay", "erase", "write", "initial_state"):
        assert np.abs(library.numpy(gradients[name])).max() > 1e-6, name
    assert not library.numpy(gradients["query"]).any()  # the state does not depend on what reads it


@pytest.mark.backend("torch")
def test_the_state_is_tracked_by_autograd(library: Library):
    _, inputs = given(library)
    inputs = {n: x.requires_grad_() for n, x in inputs.items()}
    state = scanfield.gdn2(**inputs).final_state
    assert state.requires_grad
    state.sum().backward()
    assert inputs["log_decay"].grad is not None and bool(inputs["log_decay"].grad.abs().max() > 0)


def test_scale(library: Library):
    """K^-1/2 unless given."""
    e, inputs = given(library)
    default, written = scanfield.gdn2(**inputs), scanfield.gdn2(**inputs, scale=5**-0.5)
    doubled = scanfield.gdn2(**inputs, scale=2 * 5**-0.5)
    assert same_bits(library.raw(default.output), library.raw(written.output))
    assert deviation(library.numpy(doubled.output), 2 * e.truth().output) <= 1e-12
    assert same_bits(library.raw(default.final_state), library.raw(doubled.final_state))


def test_chunk_size_zero_raises(library: Library):
    _, inputs = given(library)
    with pytest.raises(scanfield.ArgumentError, match="chunk_size"):
        scanfield.gdn2(**inputs, chunk_size=0)


@pytest.mark.parametrize("method", METHODS["gdn2"])
def test_token_loop_and_chunk_form_agree(library: Library, method: str):
    e, inputs = given(library)
    got = scanfield.gdn2(**inputs, method=method, chunk_size=C)
    assert deviation(library.numpy(got.output), e.truth().output) <= 1e-12


@pytest.mark.parametrize("lowest", [-2.0, -5.0, -20.0, -200.0])
def test_decays_that_overflow_the_division_form(library: Library, lowest: float):
    """Dividing by cumulative decays turns NaN in float32 at [-2, 0] with 128 tokens and at [-20, 0] with 16."""
    time = library.time(128)
    inputs = gdn2_inputs("burn strong", batch=1, time=time, heads=2, K=5, V=3)
    inputs["log_decay"] = inputs["log_decay"] * (lowest / -2.0)
    e = Example(f"burn strong {lowest}", "gdn2", inputs)
    got = vjp(
        library, "gdn2", inputs, e.cotangents("float32"), "float32", method="generic.chunk", chunk_size=128
    )
    assert deviation(library.numpy(got.output), e.truth("float32").output) <= 4e-6
    for name, want in e.gradients("float32").items():
        assert deviation(library.numpy(got.gradients[name]), want) <= 4e-6, name


def test_boundary_states(library: Library):
    """The state at the start of each chunk, ceil(T / C) of them; time stands on axis 1 here."""
    e, inputs = given(library)
    got = scanfield.gdn2(**inputs, states_at="chunks", chunk_size=C)
    starts = range(0, e.time, C)
    assert tuple(got.states.shape) == (1, len(starts), 2, 5, 3) and len(starts) == -(-e.time // C)
    assert deviation(library.numpy(got.states), e.truth().states[:, list(starts)]) <= 1e-12


def test_recompute_chunk_states(library: Library):
    """The states inside a chunk, from its boundary state: those of the whole sequence."""
    e, inputs = given(library)
    boundary = scanfield.gdn2(**inputs, states_at="chunks", chunk_size=C).states[:, 1, ...]
    stop = min(2 * C, e.time)
    chunk = {n: x[:, C:stop, ...] for n, x in inputs.items() if n != "initial_state"}
    got = scanfield.gdn2(**chunk, initial_state=boundary, states_at=list(range(stop - C + 1)))
    assert deviation(library.numpy(got.states), e.truth().states[:, C : stop + 1]) <= 1e-12


@pytest.mark.backend("numpy")
@pytest.mark.parametrize("method", GENERIC["gdn2"])
def test_what_is_saved(method: str):
    """The inputs and at most one state a chunk; not the eight chunk temporaries, not a state a token."""
    from scanfield.dispatch import save
    from scanfield.scans.binding import bind

    e = example(64)
    bound = bind(scanfield.gdn2, (), {**e.inputs, "chunk_size": 16, "method": method})
    call = bound.record.prepare(bound.arrays, bound.options).call
    _, _, saved, _ = save(call, method)
    new = [
        x for x in saved if not any(np.shares_memory(x, y) for y in call.arrays if isinstance(y, np.ndarray))
    ]
    assert sum(x.size for x in new) <= (64 // 16) * 2 * 5 * 3


def test_only_tracked_parents_get_a_gradient(library: Library):
    _, inputs = given(library)
    result, pullback = scanfield.vjp(scanfield.gdn2, **inputs, wrt=("query", "log_decay"))
    assert list(pullback(result.output)) == ["query", "log_decay"]


def test_selection_is_told_and_can_be_forced(library: Library):
    """Nothing returns None when a kernel does not match: the generic code serves, and `explain` names what
    ran.
    """
    _, inputs = given(library)
    for method in methods(library, "gdn2"):
        explanation = scanfield.explain(scanfield.gdn2, **inputs, method=method)
        assert explanation.taken["forward"] == method
        assert method in str(explanation)
        with scanfield.use(method=method):
            assert scanfield.explain(scanfield.gdn2, **inputs).taken["forward"] == method
    assert scanfield.explain(scanfield.gdn2, **inputs).taken["forward"] in methods(library, "gdn2")
