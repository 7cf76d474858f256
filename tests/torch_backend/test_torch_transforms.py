"""Every operation, verb and transform of torch: derivatives of any kind are right, eager and compiled.

The compiled scan declines where a transform is open and the generic form runs in plain operations. Its numbers are
held to those of the compiled scan, which autograd differentiates backward, once and twice.
"""

from __future__ import annotations

import pytest

pytestmark = [
    pytest.mark.backend("torch"),
    # Once a process, torch itself compiles its forward-mode formulas with what it has deprecated.
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]

torch = pytest.importorskip("torch")
pytest.importorskip("numba")

from tensors import SMALL, Line  # noqa: E402

import scanfield  # noqa: E402

OPERATIONS = tuple(record.name for record in scanfield.operations())
VERBS = ("forward", "step", "vjp")
PLACE = torch.tensor([0.3, -0.2], dtype=torch.float64)
TANGENT = torch.tensor([0.7, 1.1], dtype=torch.float64)
PLACES = torch.stack([PLACE, -PLACE, 2 * TANGENT])


def jacobian(line: Line) -> torch.Tensor:
    """Row by row, by autograd."""
    t = PLACE.clone().requires_grad_()
    found = line(t)
    rows = [
        torch.autograd.grad(found, t, one, retain_graph=True)[0]
        for one in torch.eye(found.numel(), dtype=t.dtype)
    ]
    return torch.stack(rows)


def gradient(line: Line, place: torch.Tensor = PLACE) -> torch.Tensor:
    t = place.clone().requires_grad_()
    return torch.autograd.grad(line.loss(t), t)[0]


def hessian(line: Line) -> torch.Tensor:
    t = PLACE.clone().requires_grad_()
    (first,) = torch.autograd.grad(line.loss(t), t, create_graph=True)
    return torch.stack(
        [torch.autograd.grad(first, t, one, retain_graph=True)[0] for one in torch.eye(2, dtype=t.dtype)]
    )


def dual(line: Line) -> torch.Tensor:
    with torch.autograd.forward_ad.dual_level():
        found = line(torch.autograd.forward_ad.make_dual(PLACE, TANGENT))
        return torch.autograd.forward_ad.unpack_dual(found).tangent


def loop(function) -> torch.Tensor:
    return torch.stack([function(place) for place in PLACES])


def autograd_through_vmap(line: Line) -> torch.Tensor:
    places = PLACES.clone().requires_grad_()
    return torch.autograd.grad(torch.vmap(line.loss)(places).sum(), places)[0]


def batched_rows(line: Line) -> torch.Tensor:
    """Backward under vmap, of a forward that was under nothing."""
    t = PLACE.clone().requires_grad_()
    found = line(t)
    return torch.autograd.grad(found, t, torch.eye(found.numel(), dtype=t.dtype), is_grads_batched=True)[0]


# What a transform says, and what it must be by autograd alone.
TRANSFORMS = {
    "grad": (lambda line: torch.func.grad(line.loss)(PLACE), gradient),
    "vjp": (
        lambda line: torch.func.vjp(line, PLACE)[1](line(PLACE))[0],
        lambda line: jacobian(line).T @ line(PLACE),
    ),
    "jvp": (
        lambda line: torch.func.jvp(line, (PLACE,), (TANGENT,))[1],
        lambda line: jacobian(line) @ TANGENT,
    ),
    "forward mode": (dual, lambda line: jacobian(line) @ TANGENT),
    "jacrev": (lambda line: torch.func.jacrev(line)(PLACE), jacobian),
    "jacfwd": (lambda line: torch.func.jacfwd(line)(PLACE), jacobian),
    "hessian": (lambda line: torch.func.hessian(line.loss)(PLACE), hessian),
    "grad of grad": (
        lambda line: torch.func.grad(lambda t: (torch.func.grad(line.loss)(t) * TANGENT).sum())(PLACE),
        lambda line: hessian(line) @ TANGENT,
    ),
    "vmap": (lambda line: torch.vmap(line)(PLACES), loop),
    "vmap of grad": (
        lambda line: torch.vmap(torch.func.grad(line.loss))(PLACES),
        lambda line: loop(lambda place: gradient(line, place)),
    ),
    "grad through vmap": (
        lambda line: torch.func.grad(lambda places: torch.vmap(line.loss)(places).sum())(PLACES),
        lambda line: loop(lambda place: gradient(line, place)),
    ),
    "autograd through vmap": (
        autograd_through_vmap,
        lambda line: loop(lambda place: gradient(line, place)),
    ),
    "rows of the jacobian together": (batched_rows, jacobian),
}


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.shape == wanted.shape
    assert wanted.abs().max() > 0
    assert (found - wanted).abs().max() <= 1e-9 * wanted.abs().max()


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_transforms(operation, verb, transform):
    line = Line(operation, verb)
    ours, truth = TRANSFORMS[transform]
    wanted = truth(line)
    close(ours(line), wanted)


def test_the_truth_above_is_that_of_the_compiled_scan():
    line = Line("gdn2", "forward")
    t = PLACE.clone().requires_grad_()
    close(line(t), line(t, method="generic.recurrent"))
    assert "_RunBackward" in graph(line(t)), graph(line(t))
    assert "_RunBackward" not in graph(line(t, method="generic.recurrent"))


def graph(tensor: torch.Tensor) -> set[str]:
    """The names of all nodes that autograd goes back through."""
    seen, names, todo = set(), set(), [tensor.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            names.add(node.name())
            todo += [before for before, _ in node.next_functions]
    return names


COMPILED = {
    "grad": lambda line: torch.compile(torch.func.grad(line.loss), fullgraph=True, backend="eager")(PLACE),
    "vjp": lambda line: torch.compile(
        lambda t: torch.func.vjp(line, t)[1](line(t))[0], fullgraph=True, backend="eager"
    )(PLACE),
    "jvp": lambda line: torch.compile(
        lambda t: torch.func.jvp(line, (t,), (TANGENT,))[1], fullgraph=True, backend="eager"
    )(PLACE),
    "jacfwd": lambda line: torch.compile(torch.func.jacfwd(line), fullgraph=True, backend="eager")(PLACE),
    "hessian": lambda line: torch.compile(torch.func.hessian(line.loss), fullgraph=True, backend="eager")(
        PLACE
    ),
    "vmap": lambda line: torch.compile(torch.vmap(line), fullgraph=True, backend="eager")(PLACES),
    "vmap of grad": lambda line: torch.compile(
        torch.vmap(torch.func.grad(line.loss)), fullgraph=True, backend="eager"
    )(PLACES),
}


@pytest.mark.parametrize("transform", COMPILED)
@pytest.mark.parametrize(
    "operation", [record.name for record in scanfield.operations() if hasattr(record, "generic")]
)
def test_compiled_transforms(operation, transform):
    """The compiler traces the transform: while it does, the level is open, and plain operations go into the graph."""
    torch._dynamo.reset()
    line = Line(operation, "forward")
    truth = TRANSFORMS[transform][1]
    close(COMPILED[transform](line), truth(line))


def test_a_compiled_function_beside_transforms():
    """What was compiled under none is right after one was open, and so is its gradient."""
    torch._dynamo.reset()
    line = Line("gdn2", "forward")
    compiled = torch.compile(line.loss, backend="aot_eager", fullgraph=True)
    plain = compiled(PLACE)
    close(plain, line.loss(PLACE))
    torch.func.grad(line.loss)(PLACE)
    t = PLACE.clone().requires_grad_()
    close(torch.autograd.grad(compiled(t), t)[0], gradient(line))


class TestDetection:
    """The one function that asks whether a transform is open."""

    def reasons(self, opened) -> list[str | None]:
        from scanfield_torch.transforms import transform_reason

        seen = [transform_reason()]

        def note(x):
            seen.append(transform_reason())
            return (x * x).sum()

        opened(note)
        return [*seen, transform_reason()]

    @pytest.mark.parametrize(
        ("opened", "words"),
        [
            (lambda f: torch.func.grad(f)(PLACE), "torch.func"),
            (lambda f: torch.vmap(f)(PLACES), "torch.func"),
            (lambda f: torch.func.jvp(f, (PLACE,), (TANGENT,)), "forward-mode"),
            (lambda f: torch.func.vjp(f, PLACE), "torch.func"),
        ],
        ids=["grad", "vmap", "jvp", "vjp"],
    )
    def test_inside_and_never_outside(self, opened, words):
        before, inside, after = self.reasons(opened)
        assert before is after is None
        assert words in inside

    def test_a_dual_level(self):
        from scanfield_torch.transforms import transform_reason

        with torch.autograd.forward_ad.dual_level():
            assert "forward-mode" in transform_reason()
        assert transform_reason() is None

    def test_autograd_is_no_transform(self):
        x = PLACE.clone().requires_grad_()
        before, inside, after = self.reasons(lambda f: torch.autograd.grad(f(x), x))
        assert before is inside is after is None


def test_explain_says_why():
    told = []

    def look(x):
        told.append(str(scanfield.explain(scanfield.linear_scan, x, x)))
        return scanfield.linear_scan(x, x).output.sum()

    torch.func.grad(look)(torch.ones(1, 3, 2))
    assert "torch.func and vmap go through plain operations" in told[0]


def test_a_forced_compiled_scan_raises_under_a_transform():
    inputs, options, _ = SMALL["linear_scan"]
    given = {name: torch.tensor(x) for name, x in inputs.items()}

    def run(a):
        return scanfield.linear_scan(**{**given, "a": a}, **options, method="torch.numba").output.sum()

    with pytest.raises(scanfield.BackendError, match="plain operations"):
        torch.func.grad(run)(given["a"])
