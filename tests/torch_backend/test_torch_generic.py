"""The generic forms under one node of autograd: what runs where numba is missing, or declines."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from examples import BASE, EXAMPLES, rng_of
from processes import python

import scanfield

pytestmark = [
    pytest.mark.backend("torch"),
    # Once a process, torch itself compiles its forward-mode formulas with what it has deprecated.
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]

torch = pytest.importorskip("torch")

from tensors import SMALL, Line, tensors  # noqa: E402

METHOD = "torch.generic"
HERE = Path(__file__).resolve().parent
FIRST = {op: next(one for one in EXAMPLES if one.op == op) for op in BASE}
PLACE = torch.tensor([0.3, -0.2], dtype=torch.float64)


def run(op, given, **options):
    return tuple(getattr(scanfield, op)(**given, **{"method": METHOD, **options}))


@pytest.mark.parametrize("op", BASE)
def test_gradcheck_and_gradgradcheck(op):
    one = FIRST[op]
    given = tensors(one.inputs, requires_grad=True)

    def function(*arrays):
        return run(op, dict(zip(given, arrays, strict=True)), **one.options)

    assert torch.autograd.gradcheck(function, tuple(given.values()))
    assert torch.autograd.gradgradcheck(function, tuple(given.values()))


def saved_bytes(op, given, method, **options):
    """Of distinct memory that autograd keeps, beside the inputs."""
    kept = {}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        results = run(op, given, method=method, **options)
    assert all(y.requires_grad for y in results)
    inputs = {x.untyped_storage().data_ptr() for x in given.values()}
    return sum(size for place, size in kept.items() if place not in inputs)


@pytest.mark.parametrize("op", BASE)
def test_what_is_kept_is_the_states_at_the_starts_of_chunks(op):
    """A chunk of tokens costs one state, whatever else the plain operations of the same form would keep."""
    draw, chunk, chunks = rng_of(f"{op} kept"), 16, 12
    time = chunk * chunks
    shapes = {
        "linear_scan": {"a": (2, time, 6), "b": (2, time, 6)},
        "selective_scan": {"u": (2, time, 6), "delta": (2, time, 6), "A": (6, 3), "B": (2, time, 3), "C": (2, time, 3)},
        "gdn2": dict.fromkeys(("query", "key", "value", "log_decay", "erase"), (2, time, 3, 5)),
    }[op]  # fmt: skip
    state = {"linear_scan": 2 * 6, "selective_scan": 2 * 6 * 3, "gdn2": 2 * 3 * 5 * 5}[op]
    given = tensors(
        {name: -draw.uniform(0.1, 0.9, shape) for name, shape in shapes.items()}, requires_grad=True
    )
    kept = saved_bytes(op, given, METHOD, chunk_size=chunk)
    assert kept == chunks * state * 8
    # Plain operations keep something a token.
    assert saved_bytes(op, given, "generic.recurrent", chunk_size=chunk) > 4 * kept


WITHOUT_NUMBA = """
    import sys
    sys.modules["numba"] = None    # as if it were not installed
    import torch
    import scanfield
    from tensors import SMALL

    for operation, (inputs, options, _) in SMALL.items():
        function = getattr(scanfield, operation)
        given = {name: torch.tensor(x, requires_grad=True) for name, x in inputs.items()}
        told = scanfield.explain(function, **given, **options)
        assert set(told.taken.values()) == {"torch.generic"}, told
        assert "numba" in next(row.reason for row in told.verdicts if row.candidate == "torch.numba"), told
        nodes, seen = [function(**given, **options).output.grad_fn], set()
        while nodes:
            node = nodes.pop()
            seen.add(node.name())
            nodes += [before for before, _ in node.next_functions if before is not None]
        assert "_RunBackward" in seen, seen
"""


def test_it_is_the_default_where_numba_is_missing():
    python(WITHOUT_NUMBA, path=(HERE,))


def test_explain_says_where_it_runs_operation_by_operation():
    told = []

    def look(x):
        told.append(scanfield.explain(scanfield.linear_scan, x, x))
        return scanfield.linear_scan(x, x).output.sum()

    torch.func.grad(look)(torch.ones(1, 3, 2))
    assert set(told[0].taken.values()) == {METHOD}
    assert "torch.generic runs in plain operations here: torch.func" in str(told[0])
    look(torch.ones(1, 3, 2))
    assert "plain operations here" not in str(told[1])


TRANSFORMS = {
    "func.grad": lambda line: torch.func.grad(line.loss)(PLACE),
    "vmap": lambda line: torch.vmap(line.loss)(torch.stack([PLACE, 2 * PLACE])),
    "jvp": lambda line: torch.func.jvp(line.loss, (PLACE,), (PLACE.flip(0),))[1],
    "hessian": lambda line: torch.func.hessian(line.loss)(PLACE),
    "compile": lambda line: torch.compile(line.loss, fullgraph=True, backend="aot_eager")(PLACE),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("op", BASE)
def test_transforms(op, transform):
    """By name, as where numba is missing."""
    torch._dynamo.reset()
    line = Line(op, "forward")
    with scanfield.use(method=METHOD):
        found = TRANSFORMS[transform](line)
    with scanfield.use(method="generic.recurrent"):
        wanted = TRANSFORMS[transform](line)
    assert wanted.abs().max() > 0
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("op", BASE)
def test_autocast_changes_nothing_under_a_transform(op):
    inputs, options, _ = SMALL[op]
    rows = {name: torch.tensor(x, dtype=torch.float32)[None] for name, x in inputs.items()}

    def outputs(given):
        return tuple(getattr(scanfield, op)(**given, **options))

    plain = torch.vmap(outputs)(rows)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = torch.vmap(outputs)(rows)
    for x, y in zip(plain, under, strict=True):
        assert torch.equal(x, y)


def test_packed_sequences_and_a_state_that_requires_a_gradient():
    one = next(one for one in EXAMPLES if one.name == "gdn2: packed reverse")
    given = tensors(one.inputs, requires_grad=True)
    cotangents = [torch.tensor(x) for x in one.cotangents()]
    found = torch.autograd.grad(run(one.op, given, **one.options), list(given.values()), cotangents)
    for (name, wanted), x in zip(one.gradients().items(), found, strict=True):
        assert np.abs(x.numpy() - wanted).max() <= 1e-11 * max(1, np.abs(wanted).max()), name
