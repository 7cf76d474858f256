"""What is refused with the line that mends it, and what is carried as the call says whatever torch is told."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from arrays import Library
from checks import followed

import scanfield
from scanfield import layers
from scanfield.optimize import Adam, Cosine, Exponential, minimise


@pytest.mark.backend("numpy")
def test_relevance_without_its_first_argument_names_it():
    a = np.full((1, 4, 1), 0.5)
    with pytest.raises(
        scanfield.ArgumentError, match=r"R_output: comes before .*linear_scan, R_output, a, b\)"
    ):
        scanfield.relevance(scanfield.linear_scan, a, a)


@pytest.mark.backend("numpy")
def test_a_series_and_a_sequence_without_batch_are_told_how_to_get_their_axes():
    x, A = np.ones(4), -np.ones((1, 2))
    with pytest.raises(scanfield.ShapeError, match=r"a = a\[None, :, None\]"):
        scanfield.linear_scan(x, x)
    with pytest.raises(scanfield.ShapeError, match=r"u = u\[None, :, None\]"):
        scanfield.selective_scan(x, x, A, x, x)
    with pytest.raises(scanfield.ShapeError, match=r"query = query\[None, \.\.\.\]"):
        scanfield.gdn2(*[np.ones((4, 2, 3))] * 3)


@pytest.mark.backend("numpy")
@pytest.mark.parametrize("wrong", [[5], "chunk", 3])
def test_explain_refuses_the_boundaries_that_the_call_refuses(wrong):
    a = np.full((1, 4, 1), 0.5)
    said = []
    for run in (scanfield.linear_scan, lambda *x, **o: scanfield.explain(scanfield.linear_scan, *x, **o)):
        with pytest.raises(scanfield.ScanfieldError) as caught:
            run(a, a, states_at=wrong)
        said.append(str(caught.value))
    assert said[0] == said[1]


@pytest.mark.backend("numpy")
def test_a_rate_of_decay_of_minus_infinity():
    """It resets the state at each step above 0; at a step of 0, 0 times infinity is NaN, as IEEE has it."""
    u, B = np.ones((1, 3, 1)), np.ones((1, 3, 1))
    for method in (None, "generic"):
        output = scanfield.selective_scan(u, u, np.full((1, 1), -np.inf), B, B, method=method).output
        assert (output == 1).all()
        output = scanfield.selective_scan(u, 0 * u, np.full((1, 1), -np.inf), B, B, method=method).output
        assert np.isnan(output).all()


@pytest.mark.backend("jax")
def test_schedules_of_a_traced_step():
    import jax
    import jax.numpy as jnp

    for rate in (Cosine(1.0, 10, warmup=4), Cosine(1.0, 3, warmup=3, final=0.1), Exponential(0.1, 0.5, 7)):
        found = jax.jit(jax.vmap(rate))(jnp.arange(14))
        np.testing.assert_allclose(found, [rate(step) for step in range(14)], rtol=1e-6, atol=1e-7)
    adam, value = Adam(Cosine(0.1, 5, warmup=2)), {"x": jnp.ones(3)}
    state = adam.init(value)
    eager = adam.update(value, value, state)
    traced = jax.jit(lambda value, state: adam.update(value, value, state))(value, state)
    np.testing.assert_allclose(traced[0]["x"], eager[0]["x"], rtol=1e-6)


@pytest.mark.backend("torch")
@pytest.mark.filterwarnings("ignore")  # torch's own, about prototypes
@pytest.mark.parametrize("kind", ["sparse_coo", "sparse_csr", "nested"])
def test_tensors_that_are_not_dense(kind: str):
    import torch

    dense = torch.ones(1, 4, 2)
    if kind == "nested":
        odd = torch._nested_tensor_from_tensor_list(list(torch.ones(2, 4, 2)))
    else:
        dense = dense[0] if kind == "sparse_csr" else dense
        odd = dense.to_sparse(layout=getattr(torch, kind))
    for a, b, name in ((odd, dense, "a"), (dense, odd, "b")):
        with pytest.raises(scanfield.BackendError, match=rf"^{name}: a .*allowed are dense .*; {name} = "):
            scanfield.linear_scan(a, b)
    with pytest.raises(scanfield.BackendError, match=r"^value: a "):
        scanfield.gdn2(torch.ones(1, 4, 2, 2), torch.ones(1, 4, 2, 2), odd)


@pytest.mark.backend("torch")
@pytest.mark.parametrize("form", ["generic.recurrent", "generic.chunk"])
def test_autocast_changes_no_forced_generic_form(form: str):
    import torch

    x = torch.rand(1, 9, 2, 4, generator=torch.Generator().manual_seed(0))

    def both():
        result, pull = scanfield.vjp(scanfield.gdn2, x, x, x, -x, x, method=form)
        block = scanfield.summarise(scanfield.gdn2, x, x, x, -x, x, method=form)
        return [*result, *pull(result.output, None).values(), *scanfield.compose(block, block)[:2]]

    want = both()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = both()
    assert all(torch.equal(x, y) for x, y in zip(found, want, strict=True))


@pytest.mark.backend("torch")
def test_softplus_is_curved_at_0():
    """A quarter, by autograd through the generic form's own operations."""
    import torch
    from array_api_compat import torch as xp

    from scanfield.scans.selective_forms import softplus

    x = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(softplus(xp, x).sum(), x, create_graph=True)
    (curved,) = torch.autograd.grad(slope.sum(), x)
    assert slope.item() == 0.5 and curved.item() == 0.25


def led(call: Any, steps: int = 1, **scope: Any) -> Any:
    """The result of a call after its advice was followed this many times, and not once less."""
    for _ in range(steps):
        with pytest.raises(scanfield.ScanfieldError) as caught:
            call(**scope)
        followed(str(caught.value), scope)
    return call(**scope)


@pytest.mark.backend("torch")
def test_advice_for_a_mix_cuts_no_gradient():
    import torch

    from scanfield.layers import LanguageModel, Linear, MambaBlock
    from scanfield.lrp import explain

    a, b = np.full((1, 1), 0.9), torch.ones(1, 4, requires_grad=True)
    (slope,) = torch.autograd.grad(led(scanfield.linear_scan, a=a, b=b).output.sum(), b)
    assert slope.shape == (1, 4) and (slope > 0).all()
    q, t = np.ones((1, 3, 2, 4)), torch.ones(1, 3, 2, 4)
    led(scanfield.gated_delta_rule, query=q, key=t, value=t, log_decay=-t[..., 0], beta=t[..., 0])

    # A layer stays where its parameters are, or is made anew where the input has a gradient.
    def run(layer: Any, x: Any) -> Any:
        return layer(x).output

    x = torch.ones(1, 3, 4, requires_grad=True)
    made = MambaBlock(4).init(0, np)
    found = led(run, layer=made, x=x)
    assert found.requires_grad and isinstance(made.named_parameters()["D"], np.ndarray)
    np.testing.assert_allclose(found.detach(), made(np.ones((1, 3, 4), "f4")).output, rtol=1e-5, atol=1e-7)
    assert isinstance(led(run, layer=MambaBlock(4).init(0, torch), x=np.ones((1, 3, 4))), torch.Tensor)
    assert led(run, layer=Linear(4, 2).init(0, torch), x=[[[1.0] * 4]]).dtype == torch.float32
    for space, ids in (
        (np, torch.tensor([[1, 2]])),
        (torch, [[1, 2]]),
        (torch, np.array([[1, 2]])),
        (np, [[1, 2]]),
    ):
        model = LanguageModel(7, 4, [MambaBlock(4, 2)]).init(0, space)
        led(explain, model=model, input_ids=ids)
        led(run, layer=model, x=ids)
        led(lambda layer, x: layer.step(x).output, layer=model, x=ids[0])
    with pytest.raises(scanfield.DeviceError, match=r"; nothing .*: x = x\.to\('meta'\)$"):
        Linear(4, 2).init(0, torch, device="meta")(torch.ones(1, 3, 4))


@pytest.mark.backend("jax")
def test_advice_for_a_mix_reads_no_tracer():
    import jax

    for a in (np.full((1, 1), 0.9), 0.9):
        found = jax.jit(lambda b, a=a: led(scanfield.linear_scan, a=a, b=b).output)(jax.numpy.ones((1, 4)))
        np.testing.assert_allclose(found[0], [1, 1.9, 2.71, 3.439], rtol=1e-6)


@pytest.mark.backend("numpy", "torch", "strict")
def test_what_lacks_axes_gets_those_that_the_other_array_has(library: Library):
    one, series, wide = (library.array(np.full(shape, 0.5)) for shape in ((1, 1), (4,), (2, 4, 3)))
    assert led(scanfield.linear_scan, a=one, b=series).output.shape == (1, 4)
    assert led(scanfield.linear_scan, a=one, b=wide).output.shape == (2, 4, 3)
    assert led(scanfield.linear_scan, a=wide[0, ...], b=wide).output.shape == (2, 4, 3)
    assert led(scanfield.linear_scan, a=wide[..., None], b=wide).output.shape == (2, 4, 3, 1)
    assert led(scanfield.linear_scan, 2, a=series, b=series).output.shape == (1, 4, 1)
    assert (
        led(scanfield.linear_scan, a=library.xp.sum(one) * 1, b=one).output.shape == (1, 1)
        or library.name == "numpy"
    )
    assert led(scanfield.linear_scan, 2, a=0.5, b=series).output.shape == (1, 4, 1)
    found = led(
        lambda a, b, state: scanfield.linear_scan.step(state, a, b), 2, a=0.5, b=wide[:, 0, ...], state=1
    )
    assert (found[1] == 1).all() if library.name != "strict" else library.xp.all(found[1] == 1.0)
    found = led(scanfield.linear_scan, 2, a=1, b=2)
    assert (found.output == 2.0).all()


@pytest.mark.backend("numpy", "strict")
def test_one_number_as_a_cotangent(library: Library):
    a = library.array(np.full((1, 4, 1), 0.5))
    pull = scanfield.vjp(scanfield.linear_scan, a, a)[1]
    assert float(led(lambda a, d_output: pull(d_output)["b"], a=a, d_output=1)[0, 0, 0]) == 1.875
    layer = layers.Linear(1, 1, bias=False).init(0, library.xp, library.device, "float64")
    pull = layer.vjp(a)[1]
    assert tuple(led(lambda d_output: pull(d_output)[0], d_output=2.0).shape) == (1, 4, 1)
    with pytest.raises(scanfield.BackendError, match=r"^x: expected an array, came builtins.float \(0.5\)$"):
        layer(0.5)


@pytest.mark.backend("numpy")
def test_tables_and_sparse_matrices_are_told_their_own_way_out():
    class Table:
        def to_numpy(self) -> Any:
            return np.ones((1, 4))

    class Sparse:
        def toarray(self) -> Any:
            return np.ones((1, 4))

    class Foreign:
        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            return np.ones((1, 4))

    for thing in (Table(), Sparse(), Foreign()):
        assert led(scanfield.linear_scan, a=np.ones((1, 4)), b=thing).output[0, -1] == 4
        assert led(scanfield.linear_scan, 2, a=thing, b=thing).output[0, -1] == 4
        assert list(led(scanfield.linear_scan, a=np.ones((1, 4)), b=[[1, 2, 3, 4]]).output[0]) == [
            1,
            3,
            6,
            10,
        ]
    for thing in (Table, {"a": 1}, "a word"):
        with pytest.raises(scanfield.BackendError, match=r"^b: expected an array") as caught:
            scanfield.linear_scan(np.ones((1, 4)), thing)
        assert "b = " not in str(caught.value)


_A = np.full((1, 4, 1), 0.5)
_MANY = list(range(10_000))


LONG = {
    "flag": lambda: scanfield.linear_scan(_A, _A, reverse=np.ones((20, 20))),
    "size": lambda: scanfield.linear_scan(_A, _A, chunk_size=_MANY),
    "boundary": lambda: scanfield.linear_scan(_A, _A, states_at=[_MANY]),
    "bound": lambda: scanfield.linear_scan(_A, _A, cu_seqlens=[_MANY]),
    "huge": lambda: scanfield.linear_scan(_A, _A, chunk_size=-(10**5000)),
    "list": lambda: scanfield.linear_scan([_MANY], _A),
    "map": lambda: scanfield.apply(scanfield.summarise(scanfield.linear_scan, _A, _A), _A),
    "count": lambda: scanfield.check_gradients(scanfield.linear_scan, _A, _A, directions=_MANY),
    "method": lambda: scanfield.use(_MANY).__enter__(),
    "limits": lambda: scanfield.selective_scan(_A, _A, -_A[0], _A, _A, dt_limit=_MANY),
    "rate": lambda: Cosine(_MANY, 1),
    "threads": lambda: scanfield.set_num_threads(_MANY),
}


@pytest.mark.backend("numpy")
@pytest.mark.parametrize("call", LONG)
def test_long_values_are_cut(call: str):
    with pytest.raises(scanfield.ScanfieldError) as caught:
        LONG[call]()
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value) and "99" not in str(caught.value)


@pytest.mark.backend("numpy")
@pytest.mark.parametrize(
    "verb", [scanfield.vjp, scanfield.explain, scanfield.summarise, scanfield.check_gradients]
)
def test_a_scan_by_name_is_told_to_be_passed_itself(verb: Any):
    for name in ("linear_scan", "scanfield.linear_scan"):
        with pytest.raises(
            scanfield.ArgumentError, match=r"op: '\S+' is a name; .* itself: scanfield\.linear_scan$"
        ):
            verb(name, _A, _A)


MISFITS = {
    "initials": (lambda: Adam(lr=1e-2), "Adam: unknown keyword 'lr'; did you mean 'learning_rate'?"),
    "layer": (lambda: layers.MambaBlock(16, states=4), "MambaBlock: unknown keyword 'states'; did you mean 'state_size'?"),
    "beginning": (lambda: layers.GatedDeltaNet2Config(latent=8), "unknown keyword 'latent'; did you mean 'latent_per_head'?"),
    "block": (lambda: scanfield.use(methods="generic"), "use: unknown keyword 'methods'; did you mean 'method'?"),
    "function": (lambda: minimise(function=None, iteration=3), "minimise: unknown keyword 'iteration'; did you mean"),
    "rule": (lambda: scanfield.lrp.rules.Gamma(gama=1), "Gamma: unknown keyword 'gama'; did you mean 'gamma'?"),
    "missing": (lambda: layers.Linear(2), "Linear: missing a required argument: 'outputs'"),
    "too many": (lambda: Cosine(1.0, 2, 0, 0.0, 5), "Cosine: too many positional arguments; it takes peak, steps"),
    "own": (lambda: Own(4, wide=3), "Own: missing a required argument: 'width'"),
}  # fmt: skip


class Own(layers.Layer):
    """A layer of a caller's, with keywords that go elsewhere."""

    def __init__(self, depth: int, width: int, **more: int) -> None:
        super().__init__(carries=more.get("carries", ()))
        len(width)  # a mistake of its author's

    def define(self, run: Any, x: Any) -> Any:
        return x


@pytest.mark.backend("numpy")
@pytest.mark.parametrize("call", MISFITS)
def test_calls_that_do_not_fit_are_answered_with_what_was_meant(call: str):
    made, words = MISFITS[call]
    with pytest.raises(scanfield.ArgumentError) as caught:
        made()
    assert words in str(caught.value)


@pytest.mark.backend("numpy")
def test_a_type_error_of_another_cause_is_left_alone():
    """A call that fits, and fails within: what it says is no misfit."""
    with pytest.raises(TypeError, match="has no len") as caught:
        Own(1, 2, other=3)
    assert not isinstance(caught.value, scanfield.ScanfieldError)
    rate = Adam(0.1)
    assert pickle.loads(pickle.dumps(rate)) == rate == Adam(learning_rate=0.1)


@pytest.mark.backend("numpy")
def test_a_limit_of_a_form_that_does_not_run_is_told_as_such():
    x = np.ones((1, 200, 2, 4))

    def concerned(op: Any, *arrays: Any, **options: Any) -> list[bool]:
        told = scanfield.explain(op, *arrays, **options)
        assert "save is the call under vjp" in str(told)
        return [not note.startswith("(Not run here: ") for note in told.notes if "generic." in note]

    assert concerned(scanfield.gdn2, x, x, x, method="generic.recurrent") == [False]
    assert concerned(scanfield.gdn2, x, x, x, method="generic.chunk") == [True]
    assert concerned(scanfield.gdn2, x, x, x, method="generic") == [True]
    assert concerned(scanfield.linear_scan, x, x) == [False]
    assert concerned(scanfield.linear_scan, x, x, method="generic.blocked") == [True]


@pytest.mark.backend("torch")
def test_the_limit_of_a_form_that_another_candidate_runs():
    import torch

    x = torch.ones(1, 200, 2, 4)
    told = scanfield.explain(scanfield.gdn2, x, x, x, method="torch.generic")
    assert any(note.startswith("generic.chunk is for") for note in told.notes)
    (other,) = scanfield.explain(scanfield.gdn2, x[:, :2], x[:, :2], x[:, :2], method="torch.generic").notes
    assert other.startswith("(Not run here: generic.chunk is for")


@pytest.mark.backend("torch")
def test_a_class_in_the_place_of_a_model():
    import torch

    from scanfield.compat.transformers import accelerate

    with pytest.raises(scanfield.ArgumentError, match=r"model: Linear is a class; pass an instance"):
        accelerate(torch.nn.Linear)
