"""Field reports F001, F002 and F004 to F014: numerics. (F003 joins with the adapters of `compat`.)"""

from __future__ import annotations

import math

import numpy as np
import pytest
import reference
from calls import CHEAP_FORMS, FORMS, GENERIC, READY, call, pull, rounded, truth_vjp
from draws import G, M, printed, within
from examples import methods

import scanfield

pytestmark = GENERIC


def read_past_gone(drawn, beta_or_write, scale):
    """The output when the past is gone at every token: scale (query . key) write * value."""
    return scale * np.sum(drawn.query * drawn.key, axis=-1, keepdims=True) * beta_or_write * drawn.value


@pytest.mark.parametrize("method", FORMS)
def test_f001_very_strong_decay_leaves_the_present_alone(library, method):
    drawn = G(11, 1, 64, 2, 16, 8)
    inputs = drawn.inputs() | {"log_decay": np.full_like(drawn.log_decay, -25.8)}
    truth = reference.forward("gdn2", rounded(inputs, "float32"))
    wanted = truth_vjp("gdn2", rounded(inputs, "float32"), drawn.d_output, drawn.d_state)
    result, gradients = pull(library, "gdn2", inputs, drawn.d_output, drawn.d_state, "float32", method=method)
    within(library.numpy(result.output), truth.output, 1e-5)
    within(library.numpy(result.final_state), truth.final_state, 1e-5)
    within(library.numpy(result.output), read_past_gone(drawn, drawn.write, 16**-0.5), 1e-5)
    for name, gradient in gradients.items():
        within(library.numpy(gradient), wanted[name], 1e-4, name)
    printed(library.numpy(call(library, "gdn2", inputs, method=method).output).sum(), "6.646639677")


@pytest.mark.parametrize("method", FORMS)
def test_f002_a_log_decay_of_minus_infinity_is_a_reset(library, method):
    drawn = G(12, 1, 70, 3, 8, 5)
    inputs = drawn.inputs("kda")
    inputs["log_decay"][0, 33] = -np.inf
    inputs["log_decay"][0, 50, 1, :4] = -np.inf
    from_33 = {name: x[:, 33:] for name, x in inputs.items()}
    with_state = inputs | {"initial_state": drawn.state}

    result = call(library, "kda", with_state, method=method)
    output, final_state = library.numpy(result.output), library.numpy(result.final_state)
    assert np.isfinite(output).all() and np.isfinite(final_state).all()
    alone = call(library, "kda", from_33, method=method)
    within(output[:, 33:], library.numpy(alone.output), 1e-12)
    within(final_state, library.numpy(alone.final_state), 1e-12)
    printed(output[0, 69, 2, 4], "-0.0276485825071")
    printed(final_state[0, 1, 0, 0], "0.0917723171670")

    d_output = drawn.d_output.copy()
    d_output[:, :33] = 0
    _, gradients = pull(library, "kda", with_state, d_output, drawn.d_state, method=method)
    gradients = library.numpys(gradients)
    for name, gradient in gradients.items():
        assert np.isfinite(gradient).all(), name
        before = gradient if name == "initial_state" else gradient[:, :33]
        assert np.all(before == 0), name
    assert np.all(gradients["log_decay"][np.isneginf(inputs["log_decay"])] == 0)


@pytest.mark.parametrize("method", FORMS)
def test_f004_a_gate_of_one_is_the_plain_delta_rule(library, method):
    drawn = G(13, 2, 130, 2, 24, 16)
    plain = drawn.inputs("delta_rule") | {"beta": np.ones_like(drawn.beta)}
    gate = np.zeros_like(drawn.head_decay)
    for dtype in ("float64", "float32", "bfloat16"):
        if dtype not in library.dtypes:
            continue
        results = [
            call(library, "gated_delta_rule", plain | {"log_decay": gate}, dtype, method=method),
            call(library, "gated_delta_rule", plain | {"log_decay": gate - 1e-30}, dtype, method=method),
            call(library, "delta_rule", plain, dtype, method=method),
        ]
        first, *others = (library.numpy(result.output) for result in results)
        for other in others:
            if dtype == "bfloat16":  # eight bits of mantissa: one rounding is at most 2^-7 of the value
                assert np.all(np.abs(other - first) <= 2.0**-7 * np.maximum(np.abs(other), np.abs(first)))
            else:
                within(other, first, {"float64": 1e-15, "float32": 2e-6}[dtype], dtype)

    forgetful = drawn.inputs("delta_rule") | {"log_decay": gate - np.inf}
    result = call(library, "gated_delta_rule", forgetful, method=method)
    within(library.numpy(result.output), read_past_gone(drawn, drawn.beta[..., None], 24**-0.5), 1e-12)
    assert np.isfinite(library.numpy(result.final_state)).all()


@pytest.mark.parametrize("method", CHEAP_FORMS)
def test_f005_equal_keys_overwrite_or_reflect(library, method):
    first = np.zeros((1, 64, 1, 16))
    first[..., 0] = 1
    value = np.random.default_rng(5).standard_normal((1, 64, 1, 4))
    inputs = {"query": first, "key": first, "value": value}
    once = call(
        library, "delta_rule", inputs | {"beta": np.ones((1, 64, 1))}, "float32", scale=1.0, method=method
    )
    within(library.numpy(once.output), value, 1e-6)
    state = library.numpy(once.final_state)
    within(state[:, 0, 0], value[:, 63, 0], 1e-6)
    assert np.all(state[:, 0, 1:] == 0)

    twice = call(
        library,
        "delta_rule",
        inputs | {"beta": np.full((1, 64, 1), 2.0)},
        "float32",
        scale=1.0,
        method=method,
    )
    wanted, last = [], np.zeros((1, 1, 4))
    for t in range(64):
        last = 2 * value[:, t] - last
        wanted.append(last)
    within(library.numpy(twice.output), np.stack(wanted, axis=1), 1e-5)


@READY  # token by token
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_f006_the_forms_of_gated_linear_attention_agree_on_a_ragged_length(library, dtype):
    if dtype == "bfloat16" and library.name != "torch":
        pytest.skip("the row names torch for bfloat16")
    r = np.random.default_rng(14)
    inputs = {name: r.standard_normal((1, 4097, 1, 64)) for name in ("query", "key", "value")}
    inputs["log_decay"] = r.uniform(-0.1, 0, (1, 4097, 1, 64))
    truth = reference.forward("gla", rounded(inputs, dtype)).output

    given = library.arrays(inputs, dtype)
    state, walked = None, []
    for t in range(4097):
        y, state = scanfield.gla.step(state, **{name: x[:, t, ...] for name, x in given.items()})
        walked.append(library.numpy(y))
    outputs = {
        "default": library.numpy(scanfield.gla(**given).output),
        "generic": library.numpy(scanfield.gla(**given, method="generic").output),
        "step": np.stack(walked, axis=1),
        "ref": truth,
    }
    tolerance = {"float32": 2e-6, "bfloat16": 1e-2}[dtype]
    names = list(outputs)
    for i, one in enumerate(names):
        for other in names[:i]:
            within(outputs[one], outputs[other], tolerance, f"{one} against {other}")


def test_f007_growth_is_legal_until_the_state_itself_overflows(library):
    """In the recurrent form. The chunk form multiplies the carried state by exp of the summed decay and overflows
    earlier, which `explain` says."""
    drawn = G(15, 1, 40, 1, 4, 3)
    inputs = drawn.inputs("kda") | {"log_decay": np.full_like(drawn.log_decay, 5.0)}
    truth = reference.forward("kda", inputs)
    assert abs(np.log10(np.abs(truth.states).max()) - 81.56) < 0.01

    result = call(library, "kda", inputs, "float64", method="generic.recurrent")
    within(library.numpy(result.output), truth.output, 1e-10)
    within(library.numpy(result.final_state), truth.final_state, 1e-10)

    truth = reference.forward("kda", rounded(inputs, "float32"))
    with np.errstate(over="ignore", invalid="ignore"):  # the true state leaves float32 at token 19
        output = library.numpy(call(library, "kda", inputs, "float32", method="generic.recurrent").output)
    for t in range(19):
        within(output[:, t], truth.output[:, t], 1e-5, f"token {t}")
    # Past the range of float32 every value is right or not finite: nothing was clipped.
    for t in range(19, 40):
        kept = np.isfinite(output[:, t])
        assert np.all(
            np.abs(output[:, t][kept] - truth.output[:, t][kept]) <= 1e-4 * np.abs(truth.output[:, t]).max()
        )
    assert not np.isfinite(output[:, 39]).any()

    text = str(scanfield.explain(scanfield.kda, **library.arrays(inputs)))
    assert "generic.chunk" in text and "overflow" in text


@READY
def test_f008_the_state_space_dual_masks_before_it_exponentiates(library):
    r = np.random.default_rng(16)
    inputs = {
        "x": r.standard_normal((1, 64, 2, 4)),
        "dt": r.uniform(0.5, 1.5, (1, 64, 2)),
        "A": -r.uniform(50, 130, (2,)),
        "B": r.standard_normal((1, 64, 1, 8)),
        "C": r.standard_normal((1, 64, 1, 8)),
    }
    ones = np.ones((1, 64, 2, 4))
    wanted = truth_vjp("ssd", rounded(inputs, "float32"), ones, None)
    for method in (None, "generic.recurrent") if library.name == "jax" else (None, *methods(library, "ssd")):
        _, gradients = pull(library, "ssd", inputs, ones, None, "float32", method=method)
        gradients = library.numpys(gradients)
        for name in inputs:
            assert np.isfinite(gradients[name]).all(), name
            if name != "A":
                within(gradients[name], wanted[name], 1e-5, name)
        assert np.abs(gradients["A"]).max() < 1e-20


@pytest.mark.parametrize("method", FORMS)
def test_f009_decays_are_sums_never_differences(library, method):
    r = np.random.default_rng(9)
    inputs = {name: r.standard_normal((1, 64, 2, 8)) for name in ("query", "key", "value")}
    inputs["log_decay"] = np.repeat(r.uniform(-0.05, 0, (1, 64, 2, 1)), 8, axis=-1)
    inputs["log_decay"][0, 5] = -1e7
    result = call(library, "gla", inputs, "float32", method=method)
    within(library.numpy(result.output), reference.forward("gla", rounded(inputs, "float32")).output, 1e-5)
    alone = call(library, "gla", {name: x[:, 5:] for name, x in inputs.items()}, "float32", method=method)
    within(library.numpy(result.output)[:, 5:], library.numpy(alone.output), 1e-6)
    printed(library.numpy(call(library, "gla", inputs, method=method).output)[0, 63, 1, 7], "5.972413061536")


@pytest.mark.parametrize(("time", "delta"), [(100000, 2.0**-7), (131072, 1.0)])
def test_f010_half_precision_is_carried_in_float32(library, time, delta):
    if "float16" not in library.dtypes:
        pytest.skip(f"{library.name} has no float16")
    one = np.ones((1, time, 1))
    inputs = library.arrays({"u": one, "delta": one * delta, "B": one, "C": one}, "float16")
    A = library.array(np.full((1, 1), -1e-8), "float32")
    with np.errstate(over="ignore"):  # the second output passes 65504, the largest float16
        result = scanfield.selective_scan(inputs["u"], inputs["delta"], A, inputs["B"], inputs["C"])
    assert library.dtype(result.output) == "float16" and library.dtype(result.final_state) == "float32"
    output, final_state = library.numpy(result.output)[0, :, 0], library.numpy(result.final_state).item()
    if time == 100000:
        assert abs(final_state - 781.247) <= 0.01
        assert abs(output[-1] - 781.247) <= 0.5
        return
    assert abs(final_state - 130986.1) <= 200
    # In float32 exp(-1e-8) is 1, so the carried value runs ahead of the true one, by less than the row's 200; the float16
    # output is infinite exactly where the carried value rounds past 65504, the largest float16.
    wide = library.arrays({"u": one, "delta": one * delta, "B": one, "C": one}, "float32")
    carried = library.numpy(
        scanfield.selective_scan(wide["u"], wide["delta"], A, wide["B"], wide["C"]).output
    )[0, :, 0]
    true = np.expm1(-1e-8 * np.arange(1, time + 1)) / math.expm1(-1e-8)
    assert np.abs(carried - true).max() <= 200
    assert np.array_equal(
        np.isposinf(output), carried >= 65520
    )  # halfway from 65504 to the next float16 there would be
    assert not np.isnan(output).any()
    assert "65504" in scanfield.selective_scan.__doc__


def test_f011_softplus_is_exact_for_negative_arguments(library):
    delta = np.array([-30, -20, -17, -10, -1, 100], dtype=np.float64).reshape(1, 1, 6)
    one = np.ones((1, 1, 1))
    inputs = {"u": np.ones((1, 1, 6)), "delta": delta, "A": -np.ones((6, 1)), "B": one, "C": one}
    result, gradients = pull(
        library, "selective_scan", inputs, np.ones((1, 1, 6)), None, "float32", delta_softplus=True
    )
    output = library.numpy(result.output).ravel()
    wanted = np.array([9.3576230e-14, 2.0611536e-9, 4.1399376e-8, 4.5398899e-5, 0.31326169, 100])
    assert np.all(np.abs(output - wanted) <= 1e-6 * wanted) and np.all(output > 0)
    slope = library.numpy(gradients["delta"])
    assert np.isfinite(slope).all() and np.all(slope > 0)


def test_f012_no_division_by_a_running_product_of_decays(library):
    b = np.random.default_rng(17).standard_normal((1, 512, 4))
    for dtype, tolerance in (("float32", 1e-6), ("float64", 1e-11)):
        a = np.full_like(b, 1e-4)
        output = library.numpy(call(library, "linear_scan", {"a": a, "b": b}, dtype).output)
        wanted = b.copy()
        wanted[:, 1:] += 1e-4 * b[:, :-1]
        wanted[:, 2:] += 1e-8 * b[:, :-2]
        within(output, wanted, tolerance, dtype)

    drawn = M(17, 1, 512, 4, 4)
    inputs = drawn.inputs() | {"delta": np.ones_like(drawn.delta), "A": np.full_like(drawn.A, math.log(1e-4))}
    output = library.numpy(call(library, "selective_scan", inputs, "float32").output)
    assert np.isfinite(output).all()
    within(output, reference.forward("selective_scan", rounded(inputs, "float32")).output, 1e-5)
    printed(library.numpy(call(library, "selective_scan", inputs).output).sum(), "-89.0280404721")


ZEROS_AND_SIGNS = [
    ((0.5,) * 8, (0, 0, 0, 0, 0, 1, 0, -2), (0, 0, 0, 0, 0, 1, 0.5, -1.75)),
    ((0.5, 0.5, 0.5, 0, 0.5, 0.5, -0.5, 0), (0, 0, 0, 0, 0, 1, 0, -2), (0, 0, 0, 0, 0, 1, -0.5, -2)),
    ((0.5, 0.5, -0.5, 0.5, 0, 0.25, -2, 1), (0, 0, 4, 0, 0, 1, 0, -2), (0, 0, 4, 2, 0, 1, -2, -4)),
]


@pytest.mark.parametrize(("a", "b", "wanted"), ZEROS_AND_SIGNS)
def test_f013_zeros_and_negative_coefficients_are_ordinary(library, a, b, wanted):
    inputs = {"a": np.reshape(a, (1, 8, 1)), "b": np.reshape(b, (1, 8, 1)).astype(float)}
    result, gradients = pull(library, "linear_scan", inputs, np.ones((1, 8, 1)), np.ones((1, 1)), "float32")
    assert np.array_equal(library.numpy(result.output).ravel(), wanted)
    assert library.numpy(result.final_state).item() == wanted[-1]
    assert all(np.isfinite(library.numpy(gradient)).all() for gradient in gradients.values())


def reduced_precision_row(library, place=lambda x: x):
    """gdn2 and its pullback on the row's draw, within 1e-5 of ref."""
    drawn = G(18, 1, 256, 4, 64, 64)
    inputs = drawn.inputs()
    given = {name: place(x) for name, x in library.arrays(inputs, "float32").items()}
    result, pullback = scanfield.vjp(scanfield.gdn2, **given)
    gradients = pullback(
        place(library.array(drawn.d_output, "float32")), place(library.array(drawn.d_state, "float32"))
    )
    exact = rounded(inputs, "float32")
    truth = reference.forward("gdn2", exact)
    wanted = truth_vjp("gdn2", exact, drawn.d_output, drawn.d_state)

    def host(x):
        return library.numpy(x.cpu() if library.name == "torch" else x)

    within(host(result.output), truth.output, 1e-5)
    within(host(result.final_state), truth.final_state, 1e-5)
    for name, gradient in gradients.items():
        within(host(gradient), wanted[name], 1e-5, name)


@pytest.mark.backend("torch")
def test_f014_a_lower_matmul_precision_does_not_show_on_the_cpu(library):
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        reduced_precision_row(library)
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.gpu
@pytest.mark.backend("torch", "jax", "cupy")
@pytest.mark.parametrize("reduced", [False, True])
def test_f014_reduced_precision_matmuls_on_a_gpu(library, reduced):
    if library.name == "torch":
        import torch

        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = reduced
        try:
            reduced_precision_row(library, lambda x: x.cuda())
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before
    elif library.name == "jax":
        with library.jax.default_matmul_precision("tensorfloat32" if reduced else "highest"):
            reduced_precision_row(library)
    else:
        import os

        before = os.environ.get("CUPY_TF32", "0")
        os.environ["CUPY_TF32"] = "1" if reduced else "0"
        try:
            reduced_precision_row(library)
        finally:
            os.environ["CUPY_TF32"] = before
