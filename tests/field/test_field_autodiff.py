"""Field reports F053 to F057: gradients, our own and through the libraries' transforms."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import reference
from calls import GENERIC, call, pull, truth_vjp
from draws import G, M, printed, within
from operations import every_operation

import scanfield

pytestmark = GENERIC

RULES = ("gdn2", "kda", "gated_delta_rule", "delta_rule")


@cache
def short_sequence(operation: str, time: int):
    """Inputs, cotangents and true gradients of F053's draw."""
    drawn = G(47, 2, time, 2, 4, 3)
    inputs = drawn.inputs(operation) | {"initial_state": drawn.state}
    return inputs, drawn.d_output, drawn.d_state, truth_vjp(operation, inputs, drawn.d_output, drawn.d_state)


@pytest.mark.parametrize("time", [10, 1])
@pytest.mark.parametrize("operation", RULES)
def test_f053_short_sequences_have_gradients(library, operation, time):
    if library.name == "jax" and operation != "gdn2":
        pytest.skip("on JAX every rule goes through jax.grad, in the test below")
    inputs, d_output, d_state, wanted = short_sequence(operation, time)
    _, gradients = pull(library, operation, inputs, d_output, d_state)
    for name, gradient in gradients.items():
        within(library.numpy(gradient), wanted[name], 1e-10, name)


@pytest.mark.backend("torch")
@pytest.mark.parametrize("time", [10, 1])
@pytest.mark.parametrize("operation", RULES)
def test_f053_short_sequences_through_torch_backward(library, operation, time):
    inputs, d_output, d_state, wanted = short_sequence(operation, time)
    leaves = {name: x.requires_grad_() for name, x in library.arrays(inputs).items()}
    result = getattr(scanfield, operation)(**leaves)
    (
        (result.output * library.array(d_output)).sum() + (result.final_state * library.array(d_state)).sum()
    ).backward()
    for name, leaf in leaves.items():
        assert leaf.grad is not None, name
        within(library.numpy(leaf.grad), wanted[name], 1e-10, name)


@pytest.mark.backend("jax")
@pytest.mark.parametrize("time", [10, 1])
@pytest.mark.parametrize("operation", RULES)
def test_f053_short_sequences_through_jax_grad(library, operation, time):
    inputs, d_output, d_state, wanted = short_sequence(operation, time)

    def loss(given):
        result = getattr(scanfield, operation)(**given)
        return (result.output * d_output).sum() + (result.final_state * d_state).sum()

    gradients = library.jax.grad(loss)(library.arrays(inputs))
    for name, gradient in gradients.items():
        within(library.numpy(gradient), wanted[name], 1e-10, name)


SUMS = {
    "u": "2.537873492",
    "delta": "-0.095623422",
    "A": "0.206725376",
    "B": "0.485063687",
    "C": "-0.987705661",
    "D": "0.166592873",
    "z": "3.644923260",
    "delta_bias": "-0.095623422",
    "initial_state": "0.485744917",
}


@cache
def all_nine(constant: bool):
    drawn = M(32, 1, 5, 2, 3)
    inputs = drawn.inputs("D", "z", "delta_bias") | {"initial_state": drawn.state}
    if constant:
        inputs |= {"B": drawn.B[0, :2], "C": drawn.C[0, :2]}  # (channels, state) = (2, 3)
    wanted = reference.numeric_vjp(
        "selective_scan", inputs, drawn.d_output, drawn.d_state, delta_softplus=True
    )
    return inputs, drawn.d_output, drawn.d_state, wanted


@pytest.mark.parametrize("constant", [False, True])
def test_f054_all_nine_gradients_of_the_selective_scan(library, constant):
    inputs, d_output, d_state, wanted = all_nine(constant)
    _, gradients = pull(library, "selective_scan", inputs, d_output, d_state, delta_softplus=True)
    assert len(gradients) == 9
    for name, gradient in gradients.items():
        within(library.numpy(gradient), wanted[name], 1e-7, name)
        if not constant:
            printed(library.numpy(gradient).sum(), SUMS[name])


def complex_draw():
    r = np.random.default_rng(43)

    def cx(*shape):
        return r.standard_normal(shape) + 1j * r.standard_normal(shape)

    a, b, w, va, vb = 0.6 * cx(1, 8, 2), cx(1, 8, 2), cx(1, 8, 2), cx(1, 8, 2), cx(1, 8, 2)
    output = reference.forward("linear_scan", {"a": a, "b": b}).output
    tangent, last, before = np.zeros_like(output), np.zeros((1, 2)), np.zeros((1, 2))
    for t in range(8):
        last = a[:, t] * last + va[:, t] * before + vb[:, t]
        tangent[:, t], before = last, output[:, t]
    return a, b, w, va, vb, np.real(np.sum(np.conj(w) * tangent))


def test_f055_the_complex_gradient_is_conjugated(library):
    a, b, w, va, vb, derivative = complex_draw()
    assert abs(derivative - 15.2845812657) < 1e-8
    _, gradients = pull(library, "linear_scan", {"a": a, "b": b}, w, None)
    ga, gb = library.numpy(gradients["a"]), library.numpy(gradients["b"])
    assert abs(np.real(np.sum(np.conj(ga) * va + np.conj(gb) * vb)) - derivative) <= 1e-8


@pytest.mark.backend("torch")
def test_f055_the_complex_gradient_is_that_of_torch(library):
    import torch

    a, b, w, *_ = complex_draw()
    ours = call_with_gradients(library, a, b, w)
    leaves = [library.array(x).requires_grad_() for x in (a, b)]
    h, outputs = torch.zeros(1, 2, dtype=torch.complex128), []
    for t in range(8):
        h = leaves[0][:, t] * h + leaves[1][:, t]
        outputs.append(h)
    theirs = torch.autograd.grad(torch.stack(outputs, dim=1), leaves, library.array(w))
    for one, other in zip(ours, theirs, strict=True):
        within(library.numpy(one), library.numpy(other), 1e-12)


def call_with_gradients(library, a, b, w):
    """The gradients that torch itself takes through our scan."""
    import torch

    leaves = [library.array(x).requires_grad_() for x in (a, b)]
    return torch.autograd.grad(scanfield.linear_scan(*leaves).output, leaves, library.array(w))


@pytest.mark.backend("jax")
def test_f055_jax_vjp_has_no_conjugate(library):
    a, b, w, va, vb, derivative = complex_draw()
    _, pullback = library.jax.vjp(
        lambda a, b: scanfield.linear_scan(a, b).output, library.array(a), library.array(b)
    )
    ga, gb = (library.numpy(x) for x in pullback(library.array(np.conj(w))))
    assert abs(np.real(np.sum(ga * va + gb * vb)) - derivative) <= 1e-8


SMALL = every_operation(48, 1, 7, 1, 3, 2, channels=2, state=3)


# Once a process, torch itself compiles its forward-mode formulas with what it has deprecated.
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.backend("torch")
@pytest.mark.parametrize("operation", SMALL)
def test_f056_forward_mode_is_right_never_silently_zero(library, operation):
    import torch

    inputs, options, _ = SMALL[operation]
    r = np.random.default_rng(4800)
    tangents = {name: r.standard_normal(x.shape) for name, x in inputs.items()}
    names = list(inputs)

    def run(*given):
        return tuple(getattr(scanfield, operation)(**dict(zip(names, given, strict=True)), **options))

    primal = tuple(library.arrays(inputs).values())
    _, found = torch.func.jvp(run, primal, tuple(library.arrays(tangents).values()))

    step = np.longdouble(1e-4)  # in extended precision a fourth-order difference is good to 1e-13

    def moved(by):
        return reference.forward(
            operation,
            {
                name: np.asarray(x, dtype=np.longdouble) + by * step * tangents[name]
                for name, x in inputs.items()
            },
            **options,
        )

    near, far = (moved(1), moved(-1)), (moved(2), moved(-2))
    wanted = [
        (
            8 * (getattr(near[0], part) - getattr(near[1], part))
            - (getattr(far[0], part) - getattr(far[1], part))
        )
        / (12 * step)
        for part in ("output", "final_state")
    ]
    for one, other in zip(found, wanted, strict=True):
        assert np.any(other != 0)
        within(library.numpy(one), other, 1e-7)

    cotangents = [r.standard_normal(tuple(x.shape)) for x in found]
    _, gradients = pull(library, operation, inputs, *cotangents, **options)
    left = sum(np.sum(w * library.numpy(x)) for w, x in zip(cotangents, found, strict=True))
    right = sum(np.sum(library.numpy(gradients[name]) * tangents[name]) for name in names)
    assert abs(left - right) <= 1e-10 * max(abs(left), 1)


TRACES = {"value": ("2.068185526122", True), "key": ("7.662547623190", False)}


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.backend("torch", "jax")
@pytest.mark.parametrize("name", TRACES)
def test_f057_hessians_through_gdn2(library, name):
    inputs = G(41, 1, 4, 1, 3, 2).inputs()
    given = library.arrays(inputs)

    def loss(x):
        output = scanfield.gdn2(**(given | {name: x})).output
        return (output * output).sum()

    if library.name == "torch":
        import torch

        hessian = library.numpy(torch.func.hessian(loss)(given[name]))
    else:
        hessian = library.numpy(library.jax.hessian(loss)(given[name]))
    size = inputs[name].size
    hessian = hessian.reshape(size, size)
    within(hessian, hessian.T, 1e-12)
    text, linear = TRACES[name]
    printed(np.trace(hessian), text)
    if linear:  # the output is linear in value: the Hessian is 2 J^T J, with J column by column
        unit = np.eye(size).reshape(size, *inputs[name].shape)
        columns = [library.numpy(call(library, "gdn2", inputs | {name: one}).output).ravel() for one in unit]
        jacobian = np.stack(columns, axis=1)
        within(hessian, 2 * jacobian.T @ jacobian, 1e-10)
